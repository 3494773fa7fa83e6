"""Steps of a stencil, of a recurrence by doubling: what is read at several places is computed once and stored, unless
that takes longer; and then it is stored for all of its readers, as one result. Of several such results, those that the
others follow from (``fuse.waist``)."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import GPU, lowered
from fuse_cases import fused as check_fused
from torch import Tensor

import reflib
from reflib.fuse import fuse, inline_loads, producers, waist
from reflib.ir.instructions import work_of
from reflib.ir.loops import LoopNest
from reflib.ir.program import Program


def averaged(y: Tensor, steps: int) -> Tensor:
    p = torch.zeros_like(y)
    for _ in range(steps):
        q = F.pad(p, (1, 1, 1, 1))
        p = (q[:, 1:-1, 2:] + q[:, 1:-1, :-2] + q[:, 2:, 1:-1] + q[:, :-2, 1:-1] - y) / 4
    return p


def advected(y: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        y = y * y + 0.1 * y * y * y - y.abs() * 0.5 + y.clamp(-1, 1)
        y = y.roll(1, 1) - y.roll(-1, 1)
    return y


def swapped(y: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        y = 2 - y.roll((1, 1), (1, 2))
    return y


def by_doubling(a: Tensor, b: Tensor) -> Tensor:
    """h = a * h + b along the last dimension."""
    a, k = a.sigmoid(), 1
    while k < a.shape[-1]:
        b = b + a * F.pad(b[..., :-k], (k, 0))
        a = a * F.pad(a[..., :-k], (k, 0), value=1.0)
        k *= 2
    return b


def butterflies(x: Tensor) -> Tensor:
    """A Hadamard transform of the last dimension."""
    n, h = x.shape[-1], 1
    while h < n:
        a, b = x.view(-1, n // (2 * h), 2, h).unbind(2)
        x = torch.stack([a + b, a - b], 2).reshape(-1, n)
        h *= 2
    return x


def limited(u: Tensor, steps: int) -> Tensor:
    """Advection with limited slopes."""
    for _ in range(steps):
        a, b = u - u.roll(1, -1), u.roll(-1, -1) - u
        slope = torch.where(a * b > 0, torch.where(a.abs() < b.abs(), a, b), 0.0)
        flux = 0.3 * (u + 0.35 * slope)
        u = u - flux + flux.roll(1, -1)
    return u


def reaction(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(3):
        r = u * v * v
        a, b = (y.roll(1, -1) + y.roll(-1, -1) + y.roll(1, -2) + y.roll(-1, -2) - 4 * y for y in (u, v))
        u, v = u + 0.16 * a - r + 0.03 * (1 - u), v + 0.08 * b + r - 0.1 * v
    return u, v


def bilateral(x: Tensor) -> tuple[Tensor]:
    """A mean of neighbours, weighted by how near their values are."""
    h, w = x.shape[-2:]
    p, num, den = F.pad(x, (1, 1, 1, 1)), torch.zeros_like(x), torch.zeros_like(x)
    for i in range(3):
        for j in range(3):
            n = p[..., i : i + h, j : j + w]
            k = (-2 * (n - x).square()).exp()
            num, den = num + k * n, den + k
    return (num / den,)


def gradients(f: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Of as many arguments as ``f`` has, and as many gradients of its results."""
    n = f.__code__.co_argcount

    def back(*args: Tensor) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = torch.func.vjp(f, *args[:n])[1](tuple(args[n:]))
        return out

    return back


def fused(f: Callable[..., Tensor], *args: Tensor) -> Program:
    program: Program = reflib.explain(f, *args, target="sm_90").fused
    return program


def work(f: Callable[[Tensor, int], Tensor], steps: int) -> list[int]:
    """Operations per element of each kernel."""
    made = reflib.explain(lambda y: f(y, steps), torch.empty(16, 1024, 1024), target="sm_90").fused
    return [work_of(n) for n in made.nodes if isinstance(n, LoopNest)]


@pytest.mark.parametrize("step", [averaged, advected])
def test_a_step_is_not_computed_at_each_place_where_it_is_read(step: Callable[[Tensor, int], Tensor]) -> None:
    """Its kernel would do four times, or twice, what the steps before it take together."""
    assert max(work(step, 6)) == max(work(step, 4))


def test_a_step_that_is_read_at_one_place_is() -> None:
    assert len(work(swapped, 3)) == 1


def inside(x: Tensor, steps: int) -> Tensor:
    """Heat that spreads; the faces of a box keep theirs."""
    for _ in range(steps):
        near = x[2:, 1:-1, 1:-1] + x[:-2, 1:-1, 1:-1] + x[1:-1, 2:, 1:-1] + x[1:-1, :-2, 1:-1]
        near = near + x[1:-1, 1:-1, 2:] + x[1:-1, 1:-1, :-2]
        y = x.clone()
        y[1:-1, 1:-1, 1:-1] = x[1:-1, 1:-1, 1:-1] + 0.1 * (near - 6 * x[1:-1, 1:-1, 1:-1])
        x = y
    return x


def test_a_step_that_writes_the_inside_of_a_box_is_one_kernel() -> None:
    """The write of each dimension's slice is a copy of nearly all, which is not read where the last one can be."""
    check_fused(lambda x: (inside(x, 2),), [torch.rand(14, 15, 17)], GPU)
    made = [n for n in fused(lambda x: inside(x, 4), torch.rand(64, 65, 67)).nodes if isinstance(n, LoopNest)]
    assert len(made) == 4 and all(len(n.stores()) == 1 for n in made)


def test_a_sine_per_row_is_stored_rather_than_computed_for_each_element() -> None:
    """The kernel that sums along the heads computes it once per row; the other one has elements."""

    def fn(g: Tensor, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = g * t.cos()
        return (y * x).sum(0), torch.cat([y[..., 1:], y[..., :1]], -1)

    args = [torch.rand(64, 40, 30), torch.rand(40, 30), torch.rand(64, 40, 30)]
    nodes = [n for n in check_fused(fn, args, GPU).program.nodes if isinstance(n, LoopNest)]
    assert [n.numel.hint() for n in nodes if any(getattr(s, "op", "") == "cos" for s in n.body)] == [1200]


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_edges_of_two_axes_are_one_kernel(mode: str) -> None:
    """Where an element comes from is computed from its coordinates, however many elements have the same."""
    rng = random.Random(mode)
    for _ in range(3):
        shape, edges = [rng.randint(60, 120) for _ in range(4)], [rng.randint(1, 9) for _ in range(4)]
        program = fused(lambda x: F.pad(x, edges, mode=mode) * 0.5, torch.empty(shape))  # noqa: B023 - called here
        (kernel,) = program.nodes
        assert isinstance(kernel, LoopNest)
        assert len(kernel.loads()) == len(kernel.stores())  # of several rows at once


def test_the_weights_of_an_interpolation_are_stored() -> None:
    """Per row and column they are few; computed at each element they would part what reads 16 neighbours."""
    x = torch.empty(3, 16, random.Random(9).randint(80, 110), 101)
    program = fused(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=True), x)
    assert sum(n.numel.hint() >= x.numel() for n in program.nodes if isinstance(n, LoopNest)) == 1


def test_what_a_kernel_keeps_of_a_recurrence_is_its_state() -> None:
    """Two tensors, at any step: not the padded ones as well, which are as large and belong to one step alone."""
    rng = random.Random(1)
    shape = rng.randint(900, 1500), rng.randint(40, 60), 2 ** rng.randint(4, 6)
    kernels = [n for n in fused(by_doubling, *torch.empty(2, *shape)).nodes if isinstance(n, LoopNest)]
    assert 1 < len(kernels) < shape[-1].bit_length()
    assert all(len(set(n.reads())) <= 2 and len(set(n.writes())) <= 2 for n in kernels)


def test_what_every_branch_of_a_butterfly_reads_is_loaded_once() -> None:
    for n in fused(butterflies, torch.empty(random.Random(2).randint(9000, 20000), 64)).nodes:
        assert isinstance(n, LoopNest)
        assert len(n.loads()) == len({(s.buffer, s.index) for s in n.loads()}) <= 16


@pytest.mark.parametrize("f", [reaction, bilateral])
def test_few_tensors_go_from_a_gradients_kernel_to_the_next(f: Callable[..., tuple[Tensor, ...]]) -> None:
    """Two states' gradients per step; a filter's weighted sums and own part. Not one per product or window."""
    rng = random.Random(3)
    shape = 2 * f.__code__.co_argcount, rng.randint(20, 40), rng.randint(200, 300), rng.randint(200, 300)
    made = fuse(lowered(gradients(f), torch.empty(shape).unbind()), reflib.Options(), GPU).program
    kernels = [n for n in made.nodes if isinstance(n, LoopNest)]
    assert len(kernels) <= 4 and sum(len(n.writes()) for n in kernels[:-1]) <= 6
    assert max(work_of(n) for n in kernels) < 700


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("f", [reaction, bilateral])
def test_gradients_are_eagers(f: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_loads, "LAUNCH", (0, 0))
    torch.manual_seed(4)
    found = check_fused(gradients(f), torch.randn(2 * f.__code__.co_argcount, 2, 9, 7, dtype=dtype).unbind())
    assert any("_waist" in b for b in found.program.buffers) == (dtype == torch.float32)


def test_what_results_of_16_bits_cost() -> None:
    """Where what is stored is rounded, others that follow from the value need a copy in float32 beside it."""
    seen: list[Any] = []

    def f(x: Tensor) -> Tensor:
        a = x.sin().tanh() * x
        half, other = a.bfloat16(), a * 2 + 1
        return half.roll(1, 0) * half.roll(3, 0) * other.roll(2, 0) * other.roll(5, 0)

    with mock.patch.object(waist, "_cut", lambda work: seen.append(work) or set()):
        fuse(lowered(f, [torch.empty(512, 4096)]), reflib.Options(), GPU)
    (work,), points = seen, 512 * 4096
    half, other = work.wanted
    assert half.exact and other.exact and work.cost({half.store.value, other.store.value}) == (2 + 4) * 2 * points
    a = work.loops.body[half.store.value].args[0]
    costs = [
        replace(work, wanted=[replace(half, store=replace(half.store, value=a), exact=exact), other]).cost({a})
        for exact in (True, False)
    ]
    assert costs[1] - costs[0] == pytest.approx(4 * 2 * points)


@pytest.mark.parametrize("f", [by_doubling, butterflies])
def test_they_compute_what_eager_does(f: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels of small tensors, too, where all of it is otherwise one."""
    monkeypatch.setattr(inline_loads, "LAUNCH", (0, 0))
    args = (torch.randn(5, 32), torch.randn(5, 32))[: f.__code__.co_argcount]
    found = check_fused(lambda *x: (f(*x),), args)
    assert len(found.program.nodes) > 1


def test_steps_take_linear_time() -> None:
    """Counted in statements of bodies that were put together."""

    def statements(steps: int) -> int:
        made: list[int] = []

        def counted(loops: LoopNest, *made_of: producers.Producer, longest: float) -> LoopNest:
            made.append(len((out := replace_loads(loops, *made_of, longest=longest)).body))
            return out

        replace_loads = producers.replace_loads
        with mock.patch.object(producers, "replace_loads", counted):
            fused(lambda u: limited(u, steps), torch.empty(512, 4096))
        return sum(made)

    few = statements(3)
    assert few < 3000
    assert statements(9) < 4 * few
