"""fuse.shared_parts: parts of one tensor that are computed from the same elements are stored by one kernel, which reads
these once. (In Triton's interpreter: test_triton_programs.)"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_cases import CPU, GPU, fused, kernels
from torch import Tensor

import reflib
from reflib.fuse.places import LAUNCH
from reflib.fuse.shared_parts import RUN, STORES
from reflib.ir.interpret import interpret
from reflib.lower.indexing import MAX_CAT_INPUTS
from reflib.pipeline import _retarget

# which of the inputs a, b, c, d a part reads, and what it computes
FORMULAS: tuple[tuple[str, Callable[..., Tensor]], ...] = (
    ("a", lambda a: a.sin()),
    ("ab", lambda a, b: (a + b).exp()),
    ("ab", lambda a, b: (a + b) * b),
    ("bc", lambda b, c: b.sigmoid() * (1 - c)),
    ("c", lambda c: c * 2),
    ("d", lambda d: d.tanh()),
    ("d", lambda d: d),  # a copy
    ("abc", lambda a, b, c: a * b + c),
)


def joined(chosen: list[int], dim: int) -> Callable[..., tuple[Tensor]]:
    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor]:
        given = {"a": a, "b": b, "c": c, "d": d}
        return (torch.cat([FORMULAS[k][1](*(given[n] for n in FORMULAS[k][0])) for k in chosen], dim),)

    return fn


def together(chosen: list[int]) -> list[tuple[set[str], int]]:
    """Parts with an input in common, of these with each other and so on: the inputs, and how many parts."""
    out: list[tuple[set[str], int]] = []
    for k in chosen:
        mine, count = set(FORMULAS[k][0]), 1
        for other in [o for o in out if o[0] & mine]:
            out.remove(other)
            mine, count = mine | other[0], count + other[1]
        out.append((mine, count))
    return out


def loaded(f: Any) -> int:
    """Bytes that kernels load: each element that is loaded for each point, once per kernel."""
    size = f.program.buffers
    return sum(
        n.numel.hint() * size[b].dtype.itemsize for n in kernels(f) for b, _ in {(s.buffer, s.index) for s in n.loads()}
    )


def inputs(rows: int, columns: int, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(rows, columns, generator=g) for _ in "abcd"]


@pytest.mark.parametrize("seed", range(12))
def test_bytes_are_at_the_lower_bound(seed: int) -> None:
    """Parts with shared and other inputs, odd sizes: each input is read once per kernel; eager's results."""
    r = random.Random(seed)
    args = inputs(r.randrange(51, 90, 2), r.randrange(81, 120, 2))
    chosen, dim = [r.randrange(len(FORMULAS)) for _ in range(r.randrange(2, 7))], r.randrange(2)
    f = fused(joined(chosen, dim), args, CPU)
    unit, sets = args[0].nbytes, together(chosen)
    least, apart = sum(len(names) for names, _ in sets), sum(len(FORMULAS[k][0]) for k in chosen)
    if apart > least and (apart - least) * unit >= LAUNCH[0] * (len(sets) - 1):
        assert loaded(f) == least * unit and len(kernels(f)) == len(sets)
        assert sum(len(n.stores()) for n in kernels(f)) == len(chosen)
    else:
        assert len(kernels(f)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_numbers_on_a_cpu(seed: int) -> None:
    r = random.Random(seed)
    args, dim = inputs(r.randrange(51, 90, 2), r.randrange(81, 120, 2), seed), seed % 2
    fn = joined([r.randrange(len(FORMULAS)) for _ in range(5)], dim)
    for dynamic in (False, True):
        torch._dynamo.reset()
        (got,) = reflib.compile(fn, dynamic=dynamic, verify=True)(*args)
        torch.testing.assert_close(got, fn(*args)[0])


def cell(gates: Tensor, c: Tensor, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
    """The backward of an LSTM's cell."""
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    t = (f * c + i * g).tanh()
    dc = dc + dh * o * (1 - t * t)
    parts = [dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)]
    return torch.cat(parts, 1), dc * f


@pytest.mark.parametrize("target", [CPU, GPU])
def test_the_backward_of_an_lstm_cell_reads_once(target: Any) -> None:
    """As eager's; seven elements are read per column of a gate, and five stored. (TorchInductor 2.13, for sm_90: two
    kernels, of 7 loads and 2 stores, and of 15 masked loads and a store four times as wide.)"""
    rows, n = 15, 37
    _, c, dh, dc = inputs(rows, n)
    f = fused(cell, (torch.cat(inputs(rows, n, 1), 1), c, dh, dc), target)
    (kernel,) = kernels(f)
    assert loaded(f) == 7 * c.nbytes and len(kernel.stores()) == 5


def test_where_it_does_not_pay() -> None:
    def of(fn: Callable[..., Any], args: list[Tensor], target: Any = GPU) -> list[int]:
        return [len(n.stores()) for n in kernels(fused(fn, args, target))]

    a, b, *_ = inputs(33, 65)
    assert of(lambda a, b: (torch.cat([a.sin(), b.cos()], 1),), [a, b]) == [1]  # nothing is shared
    assert of(lambda a, b: (torch.cat([a[:, 32:].sin(), a[:, :32].cos()], 1),), [a, b]) == [1]  # nor are halves
    assert of(lambda a, b: (torch.cat([a.sin(), a.cos(), b], 1),), [a, b]) == [1]  # another kernel costs more
    assert of(lambda a, b: (torch.cat([a.sin(), a.cos()], 1) * 2,), [a, b]) == [1]  # not stored otherwise
    short = a[:, : RUN // a.itemsize - 1].contiguous()
    assert of(lambda a, b: (torch.cat([a.sin(), a.cos()], 1),), [short, b]) == [1]  # fractions of sectors
    assert of(lambda a, b: (torch.cat([a.sin(), a.cos()], 0),), [short, b]) == [2]
    many = of(lambda a, b: (torch.cat([(a + k).sin() for k in range(MAX_CAT_INPUTS)], 1),), [a, b])
    assert many == [STORES]  # (of more tensors, cat is a call)


def columns(steps: int) -> Callable[..., tuple[Tensor]]:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor]:
        for _ in range(steps):
            a, b = a * b, a - (b.sigmoid() + 1).log().sin().exp()
        return (torch.stack([a - b, a + b, a * b, a.maximum(b)], -1),)

    return fn


@pytest.mark.parametrize(("target", "steps", "stores"), [(GPU, 0, 1), (GPU, 4, 4), (CPU, 4, 1)])
def test_short_rows(target: Any, steps: int, stores: int) -> None:
    """One kernel stores every column where these have much in common."""
    a, b, *_ = inputs(33, 65)
    found = kernels(fused(columns(steps), [a, b], target))
    assert sum(s.buffer == found[-1].writes()[-1] for s in found[-1].stores()) == stores
    assert stores == 1 or len(found) == 1


def test_the_gradient_of_boxes_is_one_kernel() -> None:
    """Its columns are computed in float32, and rounded before they are joined (``capture/rounded_parts``)."""

    def overlap(a: Tensor, b: Tensor) -> Tensor:
        (x, y, w, h), (u, v, p, q) = (t.float().unbind(1) for t in (a, b))
        w, h, p, q = w.exp(), h.exp(), p.exp(), q.exp()
        wide, high = (x + w).minimum(u + p) - x.maximum(u), (y + h).minimum(v + q) - y.maximum(v)
        inner = wide.clamp(0) * high.clamp(0)
        far = ((x + w / 2 - u - p / 2).square() + (y + h / 2 - v - q / 2).square() + 1).log()
        return (inner / (w * h + p * q - inner + 1e-7) - far + ((w / h).atan() - (p / q).atan()).square()).sum()

    args = [torch.randn(500, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    backward = reflib.explain(overlap, *args, target="sm_90").backward
    (kernel,) = backward.kernels
    assert kernel.source.count("tl.store(") == 8
    given = [_drawn(n.meta["val"]) for n in backward.graph.module.graph.nodes if n.op == "placeholder"]
    got = interpret(_retarget(backward.scheduled, CPU), [g.clone() for g in given])
    for a, b in zip(got, backward.graph.module(*given), strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        torch.testing.assert_close(a, b)


def _drawn(like: Tensor) -> Tensor:
    return torch.randn(like.shape).to(like.dtype)


def test_column_sums_are_cut_as_the_parts_are() -> None:
    """A bias's gradient: the kernel that makes the parts sums their columns. Sums of rows need the whole."""
    a, w = inputs(31, 63)[0], torch.rand(126, 5)

    def columns(a: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = torch.cat([a.sin(), a.cos()], 1)
        return whole @ w, whole.sum(0), whole.amax(0)

    for target in (CPU, GPU):
        (kernel,) = kernels(fused(columns, (a, w), target))
        assert len(list(kernel.loads())) == 1 and len(kernel.stores()) == 6

    def rows(a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([a.sin(), a.cos()], 1)
        return whole @ w, whole.sum(1)

    assert all(n.reduced or len(n.stores()) == 1 for n in kernels(fused(rows, (a, w), CPU)))

    def changed(a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """What a part is copied from is written before the sum."""
        whole = torch.cat([a, a.sin(), a.cos()], 1)
        product = whole @ torch.cat((w, w[:63]))
        a.copy_(a + product[:, :1])
        return product, whole.sum(0)

    fused(changed, (a, w), CPU)


@pytest.mark.parametrize("seed", range(8))
def test_reductions_of_parts(seed: int) -> None:
    """Along either dimension, of several parts, some of which are constants or calls."""
    r = random.Random(seed)
    chosen, dim = [r.randrange(len(FORMULAS)) for _ in range(r.randrange(2, 5))], r.randrange(2)
    over, kind = r.randrange(2), r.choice(("sum", "amax", "argmin", "var"))

    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        (whole,) = joined(chosen, dim)(a, b, c, d)
        whole = torch.cat([whole, torch.ones_like(a) if seed % 2 else a @ a.t() @ b], dim)
        return whole @ whole.t(), getattr(whole, kind)(over) + 1

    fused(fn, inputs(r.randrange(51, 90, 2), r.randrange(81, 120, 2)), r.choice((CPU, GPU)))
