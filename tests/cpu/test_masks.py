"""Masks of attention that no input decides: left out, or ``is_causal``; any other is kept."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import reflib
from reflib.capture import attention_call
from reflib.capture.masks import _dense
from tests.attention_cases import INF, Rewritten, qkv
from tests.checking import check
from tests.semantics import Compiled

Mask = Callable[[torch.Tensor], torch.Tensor]
rng = random.Random("masks")
LENGTHS = [rng.randint(2, 90) for _ in range(3)]


def positions(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(q.shape[2], device=q.device) + 0
    return at[None, None, :, None], at[None, None, None, :]


def everything(q: torch.Tensor) -> torch.Tensor:
    rows, _ = positions(q)
    return (rows >= 0).expand(q.shape[0], -1, -1, q.shape[2])


def added_nothing(q: torch.Tensor) -> torch.Tensor:
    return torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype)


def triangle(q: torch.Tensor) -> torch.Tensor:
    rows, columns = positions(q)
    return columns <= rows


def of_documents(q: torch.Tensor) -> torch.Tensor:
    """As transformers makes it: a triangle, and only tokens of the same document; of which there is one."""
    rows, columns = positions(q)
    ids = (torch.diff(rows.flatten(), prepend=rows.flatten()[:1] - 1) != 1).cumsum(-1)
    return rows.new_ones((), dtype=torch.bool) & (columns <= rows) & (ids[rows] == ids[columns])


def made_by_tril(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()


def added_triangle(q: torch.Tensor) -> torch.Tensor:
    return torch.full((q.shape[2], q.shape[2]), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)


def infinite_triangle(q: torch.Tensor) -> torch.Tensor:
    return torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype).masked_fill(~triangle(q), -torch.inf)


def window(q: torch.Tensor) -> torch.Tensor:
    rows, columns = positions(q)
    return (columns <= rows) & (columns > rows - max(1, q.shape[2] // 2))


def upper(q: torch.Tensor) -> torch.Tensor:
    rows, columns = positions(q)
    return columns >= rows


def of_the_input(q: torch.Tensor) -> torch.Tensor:
    return (q[:, :1, :, :1] < 9).expand(-1, -1, -1, q.shape[2])


def weak(q: torch.Tensor) -> torch.Tensor:
    return torch.full((q.shape[2], q.shape[2]), -100.0, dtype=q.dtype).triu(1)


def at_random(q: torch.Tensor) -> torch.Tensor:
    return torch.rand(q.shape[2], q.shape[2]) < 2.0


def written(q: torch.Tensor) -> torch.Tensor:
    mask = triangle(q).clone()
    mask[..., 0] = True
    return mask


def written_later(q: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
    mask.diagonal().logical_and_(q[0, 0, :, 0] < 9)
    return mask


CAUSAL = (triangle, of_documents, made_by_tril, added_triangle, infinite_triangle)
KEPT = (window, upper, of_the_input, weak, at_random, written_later)


def heads(length: int, keys: int | None = None, grad: bool = False) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(length)
    return [torch.randn(2, 3, n, 16, generator=g).requires_grad_(grad) for n in (length, *[keys or length] * 2)]


def attended(mask: Mask) -> Callable[..., torch.Tensor]:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q)) * 2

    return fn


def calls(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False, **options: Any) -> list[tuple[Any, Any]]:
    """Of each call of attention in the forward: has it a mask, is it causal?"""
    torch._dynamo.reset()
    compiled = Compiled(fn, dynamic, **options)
    compiled(*args)
    nodes = [n for n in compiled.stages[0].graph.module.graph.nodes if "scaled_dot_product" in str(n.target)]
    return [("attn_mask" in n.kwargs, True in n.args[3:]) for n in nodes]


def same(fn: Callable[..., Any], length: int, keys: int | None = None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="reflib", dynamic=False)
    check(fn, compiled, *heads(length, keys, grad=True), backward=True)


@pytest.mark.parametrize("mask", [triangle, made_by_tril, added_triangle])
def test_attention_by_hand(mask: Mask) -> None:
    """Its triangle is ``is_causal`` as well, and nothing else is left of the mask."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores, m = q @ k.transpose(-1, -2) / 4, mask(q)
        return (scores.masked_fill(~m, -torch.inf) if m.dtype == torch.bool else scores + m).softmax(-1) @ v

    qkv = [t.bfloat16() for t in heads(LENGTHS[0])]
    assert calls(fn, *qkv) == [(False, True)]
    torch._dynamo.reset()
    check(fn, torch.compile(fn, backend="reflib", dynamic=False), *(t.requires_grad_() for t in qkv), backward=True)
    graph = reflib.explain(fn, *qkv, target="sm_90").graphs[0].graph.module.graph
    assert not any("mul" in str(n.target) or "where" in str(n.target) for n in graph.nodes)


@pytest.mark.parametrize("mask", [everything, added_nothing])
def test_nothing_is_masked(mask: Mask) -> None:
    for length in LENGTHS:
        assert calls(attended(mask), *heads(length)) == [(False, False)]
    same(attended(mask), LENGTHS[0])


@pytest.mark.parametrize("mask", CAUSAL)
def test_a_triangle_is_causal(mask: Mask) -> None:
    for length in LENGTHS:
        assert calls(attended(mask), *heads(length)) == [(False, True)]
    same(attended(mask), LENGTHS[0])


@pytest.mark.parametrize("mask", KEPT)
def test_other_masks_are_kept(mask: Mask) -> None:
    assert calls(attended(mask), *heads(LENGTHS[0])) == [(True, False)]
    if mask is not at_random:
        same(attended(mask), LENGTHS[0])


def test_a_mask_that_is_written_to() -> None:
    assert calls(attended(written), *heads(20)) == [(True, False)]
    same(attended(written), 20)


def test_a_triangle_of_more_keys_is_kept() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, mask)

    assert calls(fn, *heads(12, 30)) == [(True, False)]
    same(fn, 12, 30)


def test_one_mask_for_all_layers() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = triangle(q)
        once = F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.5)
        return F.scaled_dot_product_attention(once, k, v, attn_mask=mask, enable_gqa=True), mask.sum()

    assert calls(fn, *heads(31)) == [(False, True)] * 2
    same(fn, 31)


def test_views_of_the_result_still_fit() -> None:
    """What a call with a mask returns may be contiguous where another kernel's result is not."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=everything(q))
        return out.reshape(6, -1), out.transpose(1, 2).flatten(2)

    same(fn, 17)


def test_lengths_that_vary_and_eager_numerics() -> None:
    assert calls(attended(triangle), *heads(33), dynamic=True) == [(True, False)]
    assert calls(attended(triangle), *heads(33), numerics="eager") == [(True, False)]
    assert calls(attended(triangle), *heads(33), attention=False) == [(True, False)]


def test_exported_programs(tmp_path: Any) -> None:
    import reflib

    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=of_documents(q))

    args = tuple(t.detach() for t in heads(24))
    program = torch.export.export(Model(), args)
    compiled = reflib.compile(program)
    torch.testing.assert_close(compiled(*args), Model()(*args))
    (node,) = [n for n in reflib.explain(program).graph.nodes if "scaled_dot_product" in str(n.target)]
    assert "attn_mask" not in node.kwargs and True in node.args[3:]


def test_a_copy_for_no_batch() -> None:
    """A mask that is broadcast along the keys and to a batch of none."""
    graph = torch.fx.Graph()
    mask = graph.placeholder("mask")
    with FakeTensorMode():
        mask.meta["example_value"] = torch.empty(1, 1, 4, 1, dtype=torch.bool).expand(0, 3, 4, 5)
    assert _dense(graph, mask).meta["example_value"].shape == (0, 3, 4, 5)


def test_a_mask_in_a_list_that_is_written_to() -> None:
    def f(q: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(8, 8)
        torch._foreach_add_([mask], [torch.full((8, 8), -1e4).triu(1)])
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.compile(f, backend="reflib")(q), f(q))


def test_gradients_of_filled_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias that is no mask too; nothing is added where no row is filled."""
    monkeypatch.setattr(attention_call, "LONG", 0)
    for first in (0, 1):  # all keys of the first row, or all but one

        def fn(q, k, v, first=first):
            fill = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(first)
            return (q @ k.mT / 4 + torch.arange(q.shape[2]) * 0.1).masked_fill(fill, -INF).softmax(-1) @ v

        torch._dynamo.reset()
        rewritten = Rewritten(fn)
        check(fn, rewritten, *qkv(34, grad=True), backward=True)
        nodes = [n.target for n in rewritten.graphs[0].graph.nodes]
        assert rewritten.names() == ["scaled_dot_product_attention"]
        assert nodes.count(attention_call.filled) == 1 - first
