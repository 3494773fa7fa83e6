"""What the backward computes again, beside torch's list: the forward saves what it has read, not what it has moved."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch import partitioners

import reflib
from reflib.capture import recomputable

RNG = random.Random(11)
PICKED = torch.arange(200) % 6


def glu(x, b):
    left, right = (x + b).chunk(2, -1)
    return left * F.gelu(right)


def rotated(x, b):
    half = x.shape[-1] // 2
    y = x * b
    return y.sin() + torch.cat([-y[..., half:], y[..., :half]], -1).tanh()


def behind_cat(x, b):
    return F.silu(torch.cat([x, x * b], 0))


def shifted(x, b):
    return torch.sigmoid(F.pad(x, (0, 0, 1, -1)) * b) * x.roll(1, 0)


def upsampled(x, b):
    return F.silu(F.interpolate(x[None] * b, scale_factor=2.0))


def taken_apart(x, b):
    first, second, third = (x * b)[: len(x) // 3 * 3].unflatten(0, (3, -1)).unbind(0)
    return first * second.exp() + third.tanh()


def masked(x, b):
    return F.hardswish(x * b).exp() * torch.tril(1 - torch.eye(*x.shape)).tanh()


def selected(x, b):
    return torch.tanh((x * b).index_select(1, PICKED)).sin()


def windowed(x, b):
    windows = F.unfold((x * b)[None, None], 2)
    return windows * windows.tanh()


CASES = [glu, rotated, behind_cat, shifted, upsampled, taken_apart, masked, selected, windowed]


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    m, n = RNG.randint(5, 40), 2 * RNG.randint(3, 30)
    torch.manual_seed(m * n)
    return torch.randn(m, n, requires_grad=True), torch.randn(n, requires_grad=True)


def gradients(fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    out = fn(*args)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), args)]


@pytest.mark.parametrize("fn", CASES)
def test_only_inputs_are_saved(fn: Callable[..., Any]) -> None:
    args = arguments()
    forward = reflib.explain(fn, *args, target="sm_90").graphs[0].scheduled
    assert len(forward.nodes) == 1
    assert {o.buffer for o in forward.outputs[1:]} <= set(forward.inputs)


@pytest.mark.parametrize("fn", CASES)
def test_gradients_are_eagers(fn: Callable[..., Any]) -> None:
    args = arguments()
    exact = gradients(fn, tuple(a.detach().double().requires_grad_() for a in args))
    for got, eager, want in zip(gradients(reflib.compile(fn), args), gradients(fn, args), exact, strict=True):
        worst = (eager.double() - want).abs().max()
        allowed = 2 * worst + 1e-6 * (1 + want.abs().max())  # (float32 sums of some 40 rows)
        assert (got.double() - want).abs().max() <= allowed and got.stride() == eager.stride()


def test_integers_and_long_lists_are_saved() -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.ops.aten.cat.default([x] * 5))
    (cat,) = (n for n in gm.graph.nodes if n.op == "call_function")
    cat.meta["val"] = torch.zeros(5)
    assert not recomputable._short_cat(cat)
    cat.args = ([cat.args[0][0]] * 4,)
    assert recomputable._short_cat(cat)
    cat.meta["val"] = torch.zeros(5, dtype=torch.int32)
    assert not recomputable._short_cat(cat)


def test_a_sum_with_a_convolutions_bias_is_not_saved() -> None:
    """The bias is added in the kernel that reads the convolution."""
    conv = torch.nn.Conv1d(8, 16, 3)

    def gated(x):
        left, right = conv(x).chunk(2, 1)
        return left.tanh() * right.sigmoid()

    forward = reflib.explain(gated, torch.randn(2, 8, 33), target="sm_90").graphs[0].scheduled
    assert len(forward.nodes) == 2  # the convolution, and one kernel


def test_others_have_torchs_list() -> None:
    """TorchInductor in the same process, and other threads."""
    reflib.compile(glu)(*arguments())
    assert type(partitioners.get_default_op_list()) is partitioners.OpTypes
    assert torch.ops.aten.roll not in partitioners.get_default_op_list().recomputable_ops


def test_the_gradient_of_a_maximum_compares_in_the_forward() -> None:
    """In the backward the operand might be rounded elsewhere, be equal to its maximum nowhere, and divide by 0."""

    def nearest(x, c):
        y = (x[:, None] - (c - 0.5)) * x.float()[:, None].exp()
        return torch.where(y.amax(-1) > 0, y.amax(-1), 1.0).amin(-1)

    x = torch.randn(RNG.randrange(20, 90), 3, dtype=torch.bfloat16, requires_grad=True)
    e = reflib.explain(nearest, x, torch.randn(6, 3, dtype=torch.bfloat16, requires_grad=True))
    assert e.backward is not None
    assert "aten.eq.Tensor" in str(e.graph) and "aten.eq.Tensor" not in str(e.backward.graph)


def test_an_input_is_not_saved_in_a_wider_dtype() -> None:
    """Nor where it is compared with its own maximum: widened again it is the same."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        z = x.float()
        e = (z - z.amax(-1, keepdim=True)).exp()
        return e / (e.sum(-1, keepdim=True) + 1e-6) * z.amax(-1, keepdim=True)

    def masked(x: torch.Tensor) -> torch.Tensor:
        """What is chosen of an input is not rounded either."""
        inside = torch.arange(x.shape[1])[None] < torch.arange(1, x.shape[0] + 1)[:, None]
        return fn(torch.where(inside, x, -9.0)) + x.float().masked_fill(~inside, 9.0).amin(-1, keepdim=True)

    for f in (fn, masked):
        _saves_numbers_per_row(f)


def _saves_numbers_per_row(fn: Any) -> None:
    x = torch.randn(RNG.randint(50, 99), RNG.randint(100, 300), dtype=torch.bfloat16, requires_grad=True)
    forward = reflib.explain(fn, x, target="sm_90").graphs[0].scheduled
    kept = [o.buffer for o in forward.outputs[1:] if o.buffer not in forward.inputs]
    assert all(forward.buffers[b].numel.hint() == x.shape[0] for b in kept)
    for got, want in zip(gradients(reflib.compile(fn), (x,)), gradients(fn, (x,)), strict=True):
        torch.testing.assert_close(got, want)
