"""Copies that change nothing: not a tensor more is saved or stored, and what the caller may write to is his own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.clones import without_clones
from reflib.options import Options

aten = torch.ops.aten


def clones(fn: Any, *args: torch.Tensor, tracing: str = "fake") -> int:
    """How many are left; the results are the same."""
    module = make_fx(fn, tracing_mode=tracing)(*args)
    out = without_clones(module, Options(), True)
    for got, want in zip(out(*args), fn(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert got.stride() == want.stride()
    return sum(n.target is aten.clone.default for n in out.graph.nodes)


def test_which_copies_are_nothing() -> None:
    x = torch.randn(6, 8)
    assert clones(lambda x: (x.sin().clone() @ x.t(),), x) == 0
    assert clones(lambda x: (x.sin().clone().clone().t() @ x,), x) == 0
    assert clones(lambda x: (x.sin().t().clone().cos(),), x) == 0  # in the order of what is copied
    assert clones(lambda x: (x.sin().t().clone(memory_format=torch.contiguous_format).cos(),), x) == 1
    assert clones(lambda x: (x.sin()[:, :4].clone() @ x[:, :4].t(),), x) == 1  # without gaps
    assert clones(lambda x: (x.sin()[0].expand(6, 8).clone() + 1,), x) == 1
    assert clones(lambda x: (x.sin()[1:].clone().as_strided((4,), (1,)) * 2,), x) == 1  # other places
    assert clones(lambda x: (x.sin()[1:].clone().view(torch.float64) * 1,), x) == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.clone() + 1,),
        lambda x: (x.t().clone() + 1,),
        lambda x: (x.sin().clone(),),
        lambda x: (x.sin().clone().view(-1),),
        lambda x: ((y := x.sin()).view(48), y.clone() * 2),
        lambda x: ((y := x.sin().split(3))[0], y[0].clone() * 2),
    ],
)
def test_what_the_caller_may_write_to_is_copied(fn: Any) -> None:
    assert clones(fn, torch.randn(6, 8)) == 1


def test_sizes_that_data_decide_get_no_guards() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x[torch.nonzero(x[:, 0] > 0)[:, 0]].sin()
        in_order = y.t().clone(memory_format=torch.contiguous_format)
        return y.clone() @ x.t(), x @ in_order, y[:1].clone() + 1

    x = torch.arange(48.0).view(6, 8) - 20
    assert clones(fn, x, tracing="symbolic") == 2


def test_dropout_of_nothing_saves_nothing_more() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (F.dropout(torch.softmax(x @ w, -1), 0.0, True) @ v).sin()

    args = [torch.randn(s, requires_grad=True) for s in ((64, 32), (32, 48), (48, 16))]
    e = reflib.explain(fn, *args, target="sm_90")
    saved = [b for b in e.scheduled.output_buffers() if e.scheduled.buffers[b].kind == "temp"]
    assert sum(e.scheduled.buffers[b].numel == 64 * 48 for b in saved) == 1


def test_a_weights_copy_is_not_saved() -> None:
    """Convolutions in channels-last order read copies of their weights, the backward's too; eager saves none."""
    model = torch.nn.Sequential(*(torch.nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(3))).bfloat16()
    e = reflib.explain(model, torch.randn(8, 64, 56, 56).bfloat16(), target="sm_90")
    saved = [b for b in map(e.scheduled.buffers.get, e.scheduled.output_buffers()) if b.kind == "temp"]
    assert len(saved) == 3 and all(b.shape[-1].hint() == 56 for b in saved)
    assert sum(n.target is aten.clone.default for n in e.backward.graph.nodes) >= 3
