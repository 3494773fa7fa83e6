"""Rows added into zeros: sums only where a row is named twice; of few rows each compared; columns told from rows."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_cases import atomic, calls, kernels
from fuse_cases import gpu_fused as fused

import reflib
from reflib.ir.expr import Ref
from reflib.ir.loops import Load, LoopNest, Reduce
from reflib.lower import accumulate

aten = torch.ops.aten
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def _numbers(*shape: int) -> torch.Tensor:
    """Of which eager's sums in half precision are exact."""
    return torch.randint(-1, 2, shape).float()


def _embedding(r: random.Random, rows: int, lead: tuple[int, ...], columns: int) -> Case:
    padding = r.choice((-1, r.randrange(rows)))
    index = torch.randint(0, rows, lead, dtype=r.choice((torch.int64, torch.int32)))
    run = lambda g, i: (aten.embedding_dense_backward(g * 3, i, rows, padding, False),)  # noqa: E731
    return run, (_numbers(*lead, columns), index)


def _put(r: random.Random, rows: int, lead: tuple[int, ...], columns: int) -> Case:
    g = _numbers(columns).expand(*lead, columns) if r.random() < 0.3 else _numbers(*lead, columns)
    run = lambda g, i: (aten.index_put(g.new_zeros(rows, g.shape[-1]), [i], g, True) * 2,)  # noqa: E731
    return run, (g, torch.randint(-rows, rows, lead))


def _add(r: random.Random, rows: int, lead: tuple[int, ...], columns: int) -> Case:
    index = torch.randint(0, rows, lead[:1], dtype=r.choice((torch.int64, torch.int32)))
    if r.random() < 0.3:
        return lambda g, i: (g.new_zeros(rows).index_add(0, i, g),), (_numbers(lead[0]), index)
    run = lambda g, i: (g.new_zeros(rows, *g.shape[1:]).index_add(0, i, g * 2),)  # noqa: E731
    return run, (_numbers(lead[0], 2, columns), index)


def _add_into(r: random.Random, rows: int, lead: tuple[int, ...], columns: int) -> Case:
    """Rows of what is not zero, in batches, by one index for all or by one for each."""
    x, index = _numbers(3, rows, columns + 1), torch.randint(0, rows, lead[:1], dtype=torch.int64)
    g = _numbers(3, lead[0], columns + 1)
    if r.random() < 0.4:
        return lambda g, i, x: ((x * 2).index_add(1, i, g),), (g, index, x)
    index = torch.randint(0, rows, (3, lead[0]))
    if r.random() < 0.5:
        return lambda g, i, x: (x.scatter_add(1, i[..., None].expand_as(g), g * 2) + 1,), (g, index, x)
    run = lambda g, i, x: (x.scatter_reduce(1, i[..., None].expand_as(g), g, "sum").relu(),)  # noqa: E731
    return run, (g, index, x)


def _case(make: Any, seed: int, rows: tuple[int, ...], leads: tuple[tuple[int, ...], ...]) -> Case:
    torch.manual_seed(seed)
    r = random.Random(f"{make.__name__} {seed}")
    return make(r, r.choice(rows), r.choice(leads), r.randint(1, 7))


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", [_embedding, _put, _add, _add_into])
def test_of_positions_that_name_a_row(
    make: Any, seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is read where the result is made, the second begins the sum, others are added."""
    fn, (g, i, *into) = _case(make, seed, (3, 40, 90), ((7,), (3, 5), (40, 2), (2, 1, 6), (3, 0)))
    monkeypatch.setattr(accumulate, "LAUNCH", -(10**9))
    f = fused(fn, g.to(dtype), i, *(x.to(dtype) for x in into), symbolic=bool(seed % 2) and i.numel() > 0)
    (sums,) = (b for b in f.program.buffers.values() if b.name.endswith("sums"))
    positions = 3 * g.shape[1] if into else i.numel()
    assert not calls(f) and sums.shape[0].hint() == positions and len(atomic(f)) == 1


def test_a_position_out_of_range_is_added_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that look up which position came first."""
    monkeypatch.setattr(accumulate, "LAUNCH", -(10**9))
    fn, (g, i) = _put(random.Random(1), 40, (9,), 5)
    bodies = [n.body for n in kernels(fused(fn, g.half(), i))]
    looked_up = [s for b in bodies for s in b if isinstance(s, Load) and s.buffer.endswith("slot") and s.index.atoms()]
    assert {s.other for s in looked_up if s.mask is not None} <= {2**31 - 1}


@pytest.mark.parametrize("rows", [50, 3])
def test_fewer_positions_than_what_is_added_has(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ``scatter_add`` the index says how many."""
    monkeypatch.setattr(accumulate, "LAUNCH", -(10**9))
    x, new, i = torch.randn(rows).half(), torch.randn(900).half(), torch.randint(0, rows, (500,))
    for symbolic in (False, True):
        fused(lambda x, g, i: (x.scatter_add(0, i, g),), x, new, i, symbolic=symbolic)
        fused(lambda g, i: (g.new_zeros(rows).scatter_add(0, i, g),), new, i, symbolic=symbolic)


def test_a_row_that_no_position_names_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "LAUNCH", -(10**9))
    x, new, i = torch.full((9, 4), -0.0).half(), torch.ones(3, 4).half(), torch.tensor([2, 2, 7])
    fused(lambda x, g, i: (x.index_add(0, i, g).copysign(x), 1 / x.index_add(0, i, g)), x, new, i)


def test_stores_at_positions_that_are_known_stay_scatters() -> None:
    """Several points may store there: that is what a position that is no coordinate says."""
    e = reflib.explain(
        lambda x, g: x.index_put((torch.arange(4)[:, None] + torch.arange(4),), g), torch.randn(40, 3),
        torch.randn(4, 4, 3), target="sm_90", verify=True,
    )  # fmt: skip
    assert any(
        isinstance(a, Ref)
        for n in e.graphs[0].fused.program.nodes
        if isinstance(n, LoopNest)
        for s in n.stores()
        for a in s.index.atoms()
    )


def test_one_position_or_float32_is_added_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over one has no axis whose places could be skipped."""
    monkeypatch.setattr(accumulate, "LAUNCH", -(10**9))
    fn, (g, i) = _put(random.Random(0), 40, (1, 1), 5)
    assert not any(b.endswith("slot") for b in fused(fn, g.half(), i).program.buffers)
    monkeypatch.setattr(accumulate, "LAUNCH", 0)
    fn, (g, i) = _put(random.Random(0), 40, (9,), 5)
    assert not any(b.endswith("slot") for b in fused(fn, g, i).program.buffers)


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [_embedding, _put, _add])
def test_few_rows_are_sums_of_those_that_name_them(make: Any, seed: int, dtype: torch.dtype) -> None:
    fn, (g, i) = _case(make, seed, (1, 2, 3, 8), ((700,), (512, 1), (600, 2)))
    f = fused(fn, g.to(dtype), i, symbolic=bool(seed % 2))
    assert not calls(f) and not atomic(f)


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [_embedding, _put, _add])
def test_where_many_add_to_one_place_they_do_it_in_copies(make: Any, seed: int, dtype: torch.dtype) -> None:
    fn, (g, i) = _case(make, seed, (9, 12), ((6_300,), (6_200, 1), (6_300, 2)))
    f = fused(lambda g, i: (fn(g, i)[0] + 1,), g.to(dtype), i)
    (copies,) = (b for b in f.program.buffers.values() if b.name.endswith("copies"))
    assert not calls(f) and len(atomic(f)) == 1 and 8 <= copies.shape[0].hint() <= 22


def test_a_weight_per_row_leaves_columns_columns() -> None:
    """What most is read of decides, not how many tensors: sums of columns are cut, and neighbours read together."""
    x, w = torch.empty(8192, 768, dtype=torch.bfloat16), torch.empty(8192, 1, dtype=torch.bfloat16)
    e = reflib.explain(lambda x, w: (x * w).sum(0), x, w, target="sm_90")
    first = e.kernels[0]
    assert len(e.kernels) == 2 and "XBLOCK: tl.constexpr = 64" in first.source
    two = reflib.explain(
        lambda g, i: aten.embedding_dense_backward(g, i, 2, -1, False), x, torch.zeros(8192).long(), target="sm_90"
    )
    big = [n for n in two.fused.nodes if isinstance(n.body, tuple) and sum(isinstance(s, Reduce) for s in n.body) == 2]
    assert len(two.kernels) == 2 and len(big) == 1
