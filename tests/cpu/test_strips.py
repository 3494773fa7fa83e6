"""Sums at places in strips of columns; parts that are rolled are stored where they go; lanes along neighbours."""

from typing import Any

import pytest
import torch
from fuse_cases import GPU, check_same, kernels, lowered

from reflib.fuse import fuse, inline_loads, into_place, strips
from reflib.options import Options
from reflib.schedule.heuristics import choose_configs

O = Options(target="sm_90")


def fused(fn: Any, *args: Any) -> Any:
    program = lowered(fn, args, False, O)
    f = fuse(program, O, GPU)
    check_same(program, f, fn, args)
    return f


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches cost nothing, and caches are small, so that small tensors are treated as large ones are."""
    monkeypatch.setattr(strips, "CACHE", 20_000)
    for module in (strips, inline_loads, into_place):
        monkeypatch.setattr(module, "LAUNCH", (0, 0))


def added(fn: Any, dtype: torch.dtype, rows: int = 30, columns: int = 328) -> Any:
    index = torch.randint(0, rows, (50,))
    return fused(fn, torch.randn(rows, columns).to(dtype), index, (torch.randn(50, columns) * 0.1).to(dtype))


@pytest.mark.parametrize("columns", [128, 200, 328])
def test_sums_that_a_cache_does_not_hold_are_made_strip_by_strip(small: None, columns: int) -> None:
    f = added(lambda x, i, g: (torch.index_add(x * 0, 0, i, g * 2),), torch.bfloat16, columns=columns)
    adds = [n for n in kernels(f) if any(s.reduce == "atomic" for s in n.stores())]
    assert len(adds) == -(-columns // 128)
    (name,) = {s.buffer for n in adds for s in n.stores()}
    assert f.program.buffers[name].nbytes.hint() <= strips.CACHE  # one strip's
    if len(adds) > 1:
        assert [n.name.rpartition("_strip")[2] for n in f.program.nodes][:6] == list("000111")


def test_what_is_returned_stays_whole(small: None) -> None:
    f = added(lambda x, i, g: (torch.index_add(torch.zeros_like(x), 0, i, g * 2),), torch.float32)
    out = f.program.outputs[0].buffer
    assert f.program.buffers[out].shape[-1] == 328 and len(kernels(f)) == 6


@pytest.mark.parametrize("fn", [
    lambda x, i, g: (torch.index_add(x, 1, i[:20], g[:30, :20]).exp(),),  # columns are named: not apart
    lambda x, i, g: ((y := torch.index_add(x.sin(), 0, i, g)).cos(), y.amax(1)),  # read twice
    lambda x, i, g: (torch.index_add(torch.index_add(x * 0, 0, i, g), 0, i, g.cos()) * 2,),
])  # fmt: skip
def test_others_are_right_too(small: None, fn: Any) -> None:
    added(fn, torch.float32)
    added(fn, torch.bfloat16)


@pytest.mark.parametrize("move", [lambda u: u.roll(1, 1), lambda u: u.flip(1) * 2])
def test_what_is_added_is_not_read_after_the_sums_replaced_it(small: None, move: Any) -> None:
    """The first strip of the results would be there before the second strip of the sums is made."""

    def update(u: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u.copy_(torch.zeros_like(u).index_add(0, i, move(u)) * 2)
        return (i * 2,)

    fused(update, torch.randn(50, 328), torch.randint(0, 50, (50,)))


def test_sums_that_a_cache_holds_are_not_cut() -> None:
    f = added(lambda x, i, g: (torch.index_add(x * 0, 0, i, g * 2),), torch.bfloat16)
    assert not any("strip" in n.name for n in f.program.nodes)


def streamed(f: torch.Tensor, dims: int, steps: tuple[int, ...]) -> list[torch.Tensor]:
    total = f.sum(0)
    speed = sum(k * f[k] for k in range(len(f))) / total
    made = [f[k] + (total * (1 + speed * k + speed * speed) - f[k]) * 0.8 for k in range(len(f))]
    return [torch.roll(m, s, k % dims) for k, (m, s) in enumerate(zip(made, steps))]


@pytest.mark.parametrize("shape, steps", [((6, 7), (0, 1, -1, 2, 9)), ((4, 3, 5), (1, -1, 2)), ((40,), (3, -39))])
def test_rolled_parts_are_one_kernel(small: None, shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
    f = torch.rand(len(steps), *shape) + 0.5
    (n,) = kernels(fused(lambda f: (torch.stack(streamed(f, len(shape), steps)),), f))
    assert not n.reduced and len(n.loads()) == len(n.stores()) == len(steps)


def test_rolls_of_a_shared_value_read_it(small: None) -> None:
    """It was computed from all that it is made of for each of the results, since it is used twice in each."""
    f = torch.rand(5, 6, 7) + 0.5
    found = kernels(fused(lambda f: tuple(streamed(f, 2, (0, 1, -1, 2, 9))), f))
    assert all(len(n.loads()) <= 4 for n in found[1:])


@pytest.mark.parametrize("cat", [
    lambda x: (torch.cat([(x * 2).roll(1, 0), (x * 3).roll(2, 0)], 0),),  # along the dimension that is divided
    lambda x: (torch.cat([(x * 2).roll(1, 1), (x * 3).roll(2, 0), x * 4], 0), x.sum()),
    lambda x: (torch.stack([(x * 2).roll((1, 2), (0, 1)), (x * 3).flip(0)]).sum((1, 2)),),
    lambda x: (torch.stack([(x * 2).roll(3), (x * 3).roll(-3)]),),  # all dimensions as one
])  # fmt: skip
def test_other_moves_are_right(small: None, cat: Any) -> None:
    fused(cat, torch.randn(6, 7))


def test_lanes_go_along_neighbours_where_these_are_read_one_by_one() -> None:
    def heat(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inner = x[1:-1, 1:-1]
        y = x.clone()
        y[1:-1, 1:-1] = inner + 0.1 * (x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2] - 4 * inner)
        return (y,)

    def piece(fn: Any, x: torch.Tensor) -> object:
        program = fuse(lowered(fn, (x,), False, O), O, GPU).program
        (n,) = program.nodes
        return dict(choose_configs((n,), program.buffers, GPU, O)[0].kernel.config.extras).get("piece")  # type: ignore[arg-type]

    x = torch.randn(1000, 2048)
    assert piece(heat, x) is None and piece(heat, x.bfloat16()) == 2  # (of float32, a lane would have one element)
    assert piece(lambda x: (x * 2 + x.sin(),), x) is None
