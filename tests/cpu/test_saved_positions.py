"""What a forward saves for its backward: positions in as many bits as they need, and nothing for its shape alone."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_export_joint_simple

import reflib
from reflib.capture.saved_positions import saved_positions
from reflib.options import Options

aten = torch.ops.aten
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], torch.dtype]] = {
    "pool": (lambda x: F.max_pool2d(x, 3, 2, 1).exp(), (2, 3, 13, 9), torch.int16),
    "pool3d": (lambda x: F.max_pool3d(x, 2), (1, 2, 6, 5, 4), torch.int16),
    "adaptive": (lambda x: F.adaptive_max_pool2d(x, (3, 2)), (2, 3, 7, 9), torch.int16),
    "large image": (lambda x: F.max_pool2d(x, 2), (1, 1, 182, 182), torch.int32),
    "max": (lambda x: x.max(1).values * 2, (5, 8), torch.int16),
    "sort": (lambda x: x.sort(0, descending=True).values, (40, 3), torch.int16),
    "topk": (lambda x: x.topk(3).values, (4, 33000), torch.int32),
    "nanmedian": (lambda x: x.nanmedian(1).values, (4, 7), torch.int16),
    "cummax": (lambda x: x.cummax(-1).values, (3, 11), torch.int16),
}


def joint(fn: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.fx.GraphModule:
    """Forward and backward in one graph, as our capture has it."""
    return aot_export_joint_simple(lambda x: (fn(x),), (x,), trace_joint=True, decompositions={})


@pytest.mark.parametrize("name", CASES)
def test_backward_reads_narrow_positions(name: str) -> None:
    fn, shape, dtype = CASES[name]
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    module = joint(fn, x)
    out = saved_positions(module, Options(), True)
    casts = [n.args[0] for n in out.graph.nodes if n.target is aten._to_copy.default]
    assert [n.kwargs["dtype"] for n in out.graph.nodes if n.target is aten._to_copy.default] == [dtype, torch.int64]
    assert casts[1].target is aten._to_copy.default
    given = ([x.detach()], [torch.randn_like(fn(x))])
    torch.testing.assert_close(out(*given), module(*given), rtol=0, atol=0)


POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: F.max_pool2d(x.relu(), 3, 2, 1),
    "average": lambda x: F.avg_pool2d(x.relu(), 2),
    "padded": lambda x: F.avg_pool3d(F.pad(x.relu(), (1, 1, 0, 0))[:, None], (2, 3, 1)),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x.relu(), (3, 2)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x.relu(), 2),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_what_was_pooled_is_not_saved_for_its_shape(name: str) -> None:
    """With random sizes: the gradients are the same, and none but the input and positions is saved."""
    rng = random.Random(name)
    x = torch.randn(2, *(rng.randint(3, 17) for _ in range(3)), requires_grad=True)
    module = joint(POOLINGS[name], x)
    out = saved_positions(module, Options(), True)
    given = ([x.detach()], [torch.randn_like(POOLINGS[name](x))])
    torch.testing.assert_close(out(*given), module(*given), rtol=0, atol=0)
    forward = reflib.explain(POOLINGS[name], x, target="sm_90").graphs[0].scheduled
    saved = [forward.buffers[o.buffer] for o in forward.outputs[1:] if o.buffer not in forward.inputs]
    assert [b.dtype for b in saved] == [torch.int16] * ("max" in name)


def test_what_is_returned_or_read_by_the_forward_alone_stays() -> None:
    x = torch.randn(6, 9).requires_grad_()
    both = aot_export_joint_simple(lambda x: tuple(x.max(1)), (x,), trace_joint=True, decompositions={})
    assert saved_positions(both, Options(), True) is not both
    for module in (both, joint(lambda x: x * x.argmax(1)[:, None], x)):
        out = saved_positions(module, Options(), True)
        assert not any(n.target is aten._to_copy.default and n.kwargs["dtype"] is torch.int16 for n in out.graph.nodes)
    assert saved_positions(both, Options(), False) is both


def test_they_are_what_is_saved() -> None:
    x = torch.randn(2, 4, 16, 16, dtype=torch.bfloat16, requires_grad=True)
    forward = reflib.explain(lambda x: F.max_pool2d(x, 2), x, target="sm_90").graphs[0].program
    assert forward is not None
    kept = {forward.buffers[b].dtype for b in forward.output_buffers()}
    assert torch.int16 in kept and torch.int64 not in kept
