"""Atomic additions on CUDA: many duplicates, every wrapper, graph replay, and the options that avoid them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.semantics import Compiled, compare, randn

aten = torch.ops.aten


def _indices(rows: int, *shape: int) -> torch.Tensor:
    """One in 16 is one row. (A thousand values added one by one are less exact than eager's sum of parts.)"""
    i = torch.randint(0, rows, shape, device="cuda", generator=torch.Generator("cuda").manual_seed(len(shape)))
    return torch.where(i % 16 == 0, 3, i)


CASES: dict[str, Callable[[torch.dtype], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "embedding": lambda d: (
        lambda g, i: aten.embedding_dense_backward(g * 2, i, 501, 0, False),
        (randn(40, 33, 72, device="cuda", dtype=d), _indices(501, 40, 33)),
    ),
    "index_put": lambda d: (
        lambda x, i, v: x.cos().index_put((i - 97,), v.sin(), accumulate=True) + 1,
        (randn(97, 130, device="cuda", dtype=d), _indices(97, 900), randn(900, 130, device="cuda", dtype=d)),
    ),
    "several dimensions": lambda d: (
        lambda x, i, j, v: aten.index_put(x, [i, None, j], v, True),
        (randn(9, 5, 11, device="cuda", dtype=d), _indices(9, 700, 1), _indices(11, 3),
         randn(700, 3, 5, device="cuda", dtype=d)),
    ),
    "index_add": lambda d: (
        lambda x, i, v: x.index_add(1, i, v, alpha=2).relu(),
        (randn(65, 97, device="cuda", dtype=d), _indices(97, 700), randn(65, 700, device="cuda", dtype=d)),
    ),
    "scatter": lambda d: (
        lambda x, i, v: (x.scatter_add(0, i, v), x.scatter_reduce(0, i, v, "mean", include_self=False)),
        (randn(97, 130, device="cuda", dtype=d), _indices(97, 300, 130), randn(300, 130, device="cuda", dtype=d)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, dtype: torch.dtype) -> None:
    fn, args = CASES[name](dtype)
    for dynamic in (False, True):
        compiled = compare(fn, *args, dynamic=dynamic)
        assert not compiled.externs
        assert any("tl.atomic_add" in k.source for s in compiled.stages for k in (s.kernels or {}).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [40_001, 3])
def test_rows_into_zeros(rows: int, dtype: torch.dtype) -> None:
    """Of many rows few are named, some twice and more often; or few rows are named by many. (Of float32 whole numbers:
    in whatever order they are added, their sum is the same.)"""
    g, i = randn(30, 100, 136, device="cuda", dtype=dtype), _indices(rows, 30, 100)
    g = (4 * g).round() if dtype == torch.float32 else g
    compiled = compare(lambda g, i: aten.embedding_dense_backward(g, i, rows, 1, False), g, i)
    sources = [k.source for s in compiled.stages for k in (s.kernels or {}).values()]
    assert not compiled.externs and any("tl.atomic_add" in s for s in sources) == (rows > 3)
    compare(lambda v, i: v.new_zeros(rows, 136).index_put((i - rows,), v, accumulate=True), g[0], _indices(rows, 100))


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("way", ["bilinear 4", "nearest 3", "nearest 2"])
def test_interpolation(wrapper: str, way: str) -> None:
    x = randn(2, 19, 33, 47, device="cuda", grad=True)
    mode, _, factor = way.partition(" ")
    up: dict[str, Any] = {"scale_factor": int(factor), "mode": mode}
    compiled = compare(lambda x: F.interpolate(x.sin(), **up), x, backward=True, dynamic=False, wrapper=wrapper)
    assert not compiled.externs


def test_embedding_is_trained() -> None:
    def step(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.embedding(i, w) * 3, (64,)).square().sum((0, 1))

    w = randn(1000, 64, device="cuda", grad=True)
    compiled = compare(step, w, _indices(1000, 16, 128), backward=True)
    assert not compiled.externs


def test_replayed_graph_fills_again() -> None:
    fn, args = CASES["index_put"](torch.float32)
    compiled = Compiled(fn)
    for _ in range(3):
        want = compiled(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = compiled(*args)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_fixed_order() -> None:
    fn, args = CASES["index_put"](torch.float32)
    first, second = (Compiled(fn, atomics=False)(*args) for _ in range(2))
    assert torch.equal(first, second)
    torch.use_deterministic_algorithms(True)
    try:
        compiled = Compiled(fn)
        assert torch.equal(compiled(*args), compiled(*args)) and len(compiled.externs) == 1
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_stores_and_a_cache_in_place(dtype: torch.dtype) -> None:
    def step(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> Any:
        cache.index_copy_(2, at, new)
        sorted_ = new.index_put((at.flip(0) - 3,), new[0, 0])
        return cache[:, :, :40] == cache[:, :, 1:41], sorted_, cache.scatter(2, at[None, None, :, None] - 3, True)

    cache = randn(8, 4, 64, 16, device="cuda").to(dtype)
    compiled = compare(step, cache, torch.tensor([3, 5, 4], device="cuda"), randn(8, 4, 3, 16, device="cuda").to(dtype))
    assert not compiled.externs
    (stages,) = compiled.stages
    assert stages.fused is not None
    name = stages.fused.program.inputs[0]
    (store,) = [s for n in stages.fused.program.nodes for s in n.stores() if s.buffer == name]  # type: ignore[union-attr]
    assert "%" in str(store.index)
