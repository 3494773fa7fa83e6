"""Kernels cut where their elements are made in another way; kernels that store apart share a launch."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import GPU, lowered
from torch import Tensor

import reflib
from reflib.fuse import fuse, pieces
from reflib.fuse.combine import _in_any_order
from reflib.fuse.places import apart
from reflib.ir.instructions import work_of
from reflib.ir.interpret import interpret
from reflib.ir.loops import Indirect, LoopNest
from reflib.options import Options
from reflib.pipeline import _retarget
from reflib.target import parse_target


def agrees(fn: Callable[..., Tensor], *args: Tensor) -> int:
    """Kernels for a GPU, interpreted, give what ``fn`` does; returns how many pieces there are."""
    (stages,) = reflib.explain(fn, *args, target="sm_90").graphs
    inputs = [n.meta["val"] for n in stages.graph.module.graph.nodes if n.op == "placeholder"]
    given = [torch.empty_strided(v.shape, v.stride()).normal_() for v in inputs]
    got = interpret(_retarget(stages.scheduled, parse_target("cpu")), [a.clone() for a in given])
    torch.testing.assert_close(got[0], stages.graph.module(*given)[0], rtol=1e-5, atol=1e-5)
    loops = [n for n in stages.fused.program.nodes if isinstance(n, LoopNest)]
    return max(sum("_piece" in n.name for n in loops), *(len(n.stores()) for n in loops))


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "dear": lambda t: t.sin().erf(),
    "rotated": lambda t: torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2) * t,
    "gathered": lambda t: t[:, torch.arange(t.shape[1] - 1, -1, -1)].exp(),
    "enlarged": lambda t: F.interpolate(t[..., ::2].contiguous(), t.shape[2:], mode="bilinear"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(12))
def test_parts_of_any_kind(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined, padded, or chosen by position, along any dimension, and used by more than one result's elements."""
    monkeypatch.setattr(pieces, "LAUNCH", (0, 0))
    monkeypatch.setattr(pieces, "RUN", 0)
    monkeypatch.setattr(pieces, "SECTORS", 64 * (seed % 2))
    rng = random.Random(seed)
    dim, size = rng.randrange(1, 4), [2, 4, rng.randint(2, 5), 2 * rng.randint(2, 5)]
    kinds = rng.choices(list(PARTS), k=rng.randint(2, 5))
    lengths = [4 * rng.randint(1, 3) for _ in kinds]
    torch.manual_seed(seed)
    args = [torch.randn([n if d == dim else s for d, s in enumerate(size)]) for n in lengths]
    at, pads = rng.randint(1, sum(lengths)), (0, 0) * (3 - dim) + (4, 4)

    def fn(*args: Tensor) -> Tensor:
        whole = torch.cat([PARTS[kind](a) for kind, a in zip(kinds, args)], dim)
        place = torch.arange(whole.shape[dim]).view([-1 if d == dim else 1 for d in range(4)])
        return F.pad(torch.where(place < at, whole.cos(), whole) if seed % 3 else whole, pads)

    assert agrees(fn, *args) > 1


def kernels(fn: Callable[..., Tensor], *args: Tensor) -> list[LoopNest]:
    e = reflib.explain(fn, *args, target="sm_90")
    return [n for stages in e.graphs for n in stages.fused.program.nodes if isinstance(n, LoopNest)]


def instructions(found: list[LoopNest]) -> int:
    return sum(work_of(n) * n.numel.hint() for n in found)


def test_each_part_is_evaluated_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images of four sizes, enlarged: not all four for each element."""
    channels = [18, 36, 72, 144]
    images = [torch.empty(4, c, 128 >> i, 128 >> i, dtype=torch.bfloat16) for i, c in enumerate(channels)]

    def fn(*images: Tensor) -> Tensor:
        size = images[0].shape[2:]
        return torch.cat([images[0], *(F.interpolate(x, size, mode="bilinear") for x in images[1:])], 1)

    cut = kernels(fn, *images)
    assert sum("_piece" in n.name for n in cut) == 3  # the first two cost less than a launch together
    # places are computed 128 times, not per element from what is stored: their ranges are known where they are read
    assert not any(s.checked for n in cut for s in n.body if isinstance(s, Indirect))
    monkeypatch.setattr(pieces, "MOST", 0)
    whole = kernels(fn, *images)
    assert len(whole) == len(cut) - 2 and instructions(cut) < 0.65 * instructions(whole)


def test_a_cut_pays_or_there_is_none() -> None:
    """Not of copies, which take no longer under masks; nor where runs of less than a line are stored; nor of little."""
    dear, plain = PARTS["dear"], PARTS["plain"]

    def fn(first: Any, second: Any) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda a, b: torch.cat([first(a), second(b)], 1)

    def parts(make: Any, *shapes: tuple[int, int]) -> int:
        return len(kernels(make, *(torch.empty(s, dtype=torch.bfloat16) for s in shapes)))

    assert parts(fn(dear, plain), (1 << 14, 1024), (1 << 14, 488)) == 2
    assert parts(fn(dear, plain), (1 << 14, 1024), (1 << 14, 483)) == 2
    assert parts(fn(dear, plain), (1 << 14, 1021), (1 << 14, 488)) == 1
    assert parts(fn(plain, plain), (1 << 14, 1024), (1 << 14, 488)) == 1
    assert parts(fn(dear, plain), (1 << 19, 32), (1 << 19, 24)) == 1
    assert parts(fn(dear, plain), (64, 1024), (64, 488)) == 1


def test_rows_are_rotated_in_part() -> None:
    """Of the other half, nothing is computed."""

    def fn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, rest = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat([a * cos + torch.stack([-a[..., 1::2], a[..., ::2]], -1).flatten(-2) * sin, rest], -1)

    rows = [torch.empty(s, dtype=torch.bfloat16) for s in ((8, 16, 2048, 128), (2048, 64), (2048, 64))]
    (both,) = kernels(fn, *rows)
    assert len(both.loads()) == 6 and len(both.stores()) == 2


def grown(first: int, more: int, steps: int, like: torch.memory_format) -> list[Tensor]:
    """Images of a block in which each layer reads what all before it have made."""
    sizes = [first, *[more] * steps]
    return [torch.randn(2, c, 3, 2).to(memory_format=like) for c in sizes]


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(8))
def test_parts_of_one_length_are_stored_by_one_kernel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is read once, as it is, whatever the first one's length; also more than ATen's call would be made for.
    What reduces the whole reads it from memory."""
    monkeypatch.setattr(pieces, "LAUNCH", (0, 0))
    rng = random.Random(seed)
    first, more, steps = 16 * rng.randint(1, 5), rng.choice([16, 32, 48]), rng.randint(17, 40)
    torch.manual_seed(seed)
    args = grown(first, more, steps, rng.choice([torch.channels_last, torch.contiguous_format]))
    scale = torch.randn(first + more * steps, 1, 1)

    def fn(scale: Tensor, *parts: Tensor) -> Tensor:
        y = torch.cat(parts, 1)
        return (y * scale if seed % 3 else (y - y.mean((0, 2, 3), True)) * scale).relu()

    assert agrees(fn, scale, *args) > 1
    (stages,) = reflib.explain(fn, scale, *args, target="sm_90").graphs
    assert all(isinstance(n, LoopNest) for n in stages.fused.program.nodes)
    found = [n for n in stages.fused.program.nodes if isinstance(n, LoopNest)]
    read = [b for n in found for b in n.reads() if stages.fused.program.buffers[b].kind == "input"]
    assert not any(s.mask is not None for n in found for s in n.loads())
    assert len(read) <= len(args) + len(found)


def test_what_cannot_be_cut() -> None:
    """Runs that are not whole sectors, and parts of many lengths, where each element would be chosen from all: inputs
    are copied to their places by kernels that share a launch, what a product gives is joined by a call."""
    assert len(kernels(lambda *x: torch.cat(x, 1), *[torch.empty(64, 12, 4, 4) for _ in range(20)])) == 1
    for lengths in ([12] * 20, [16 + 16 * k for k in range(20)]):
        parts = [torch.empty(64, n, dtype=torch.bfloat16) for n in lengths]
        e = reflib.explain(lambda *x: torch.cat(x, 1), *parts, target="sm_90")
        assert len(e.kernels) == 1
        square = torch.empty(64, 64, dtype=torch.bfloat16)
        assert not kernels(lambda w, *x: torch.cat([w @ y for y in x], 1), square, *parts)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(6))
def test_kernels_that_store_apart_share_a_launch(seed: int) -> None:
    """Sums of steps, each over another tensor, in one stack; but not what reads a part in between, or another's."""
    rng = random.Random(seed)
    n, steps, reads = rng.randint(3, 9), rng.randint(17, 24), seed % 2
    torch.manual_seed(seed)
    x = torch.randn(steps, n, 5)

    def fn(x: Tensor) -> Tensor:
        found, last = list[Tensor](), x[0].sum(-1)
        for step in x.unbind(0):
            found.append((step * (found[-1].mean() if reads and found else 1)).sum(-1) + last)
        return torch.stack(found, 1 - reads)

    agrees(fn, x)
    e = reflib.explain(fn, x, target="sm_90")
    assert reads or len(e.kernels) <= 2
    (stages,) = e.graphs
    at = {n.name: n for n in stages.fused.program.nodes}
    for names in stages.fused.combined:
        assert not {b for n in names for b in at[n].reads()} & {b for n in names for b in at[n].writes()}


def updated(parts: list[list[int]], late: list[bool]) -> Callable[..., tuple[Tensor]]:
    def fn(x: Tensor, u: Tensor) -> tuple[Tensor]:
        y = x * 2
        for k, ((a, z), rolled) in enumerate(zip(parts, late)):
            y[:, a:z] = (y.roll(1, 1) if rolled else u)[:, a:z].sin() * (k + 2)
        return (y,)

    return fn


@pytest.mark.parametrize("seed", range(3))
def test_stores_to_the_same_elements_stay_in_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        parts = [sorted(4 * n for n in rng.sample(range(7), 2)) for _ in range(rng.randint(3, 8))]
        fn = updated(parts, [rng.random() < 0.3 for _ in parts])
        program = fuse(lowered(fn, torch.randn(2, 8, 24).unbind()), Options(), GPU).program
        after = [set[int]() for _ in program.nodes]
        for i, before in enumerate(_in_any_order(program)):
            after[i].update(before, *(after[j] for j in before))
            for j, other in enumerate(program.nodes[:i]):
                both = [(s, t) for s in program.nodes[i].stores() for t in other.stores() if s.buffer == t.buffer]
                assert j in after[i] or all(apart(program.buffers[s.buffer], s.index, t.index) for s, t in both)
