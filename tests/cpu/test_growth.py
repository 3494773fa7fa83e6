"""Compile time and memory grow linearly with the program (counted, not timed); long programs compute what eager does.

A chain of writes to slices, of the forms that recurrences are written in; many kernels; sizes that are products and
quotients of symbols.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reflib
from reflib.fuse.dependencies import dependencies
from reflib.options import Options
from reflib.pipeline import Backend, Stages, eager, run
from reflib.plan.memory import memory
from reflib.plan.order import _before
from tests.semantics import compare


# -- chains of writes -------------------------------------------------------------------------------------
def tridiagonal(n: int, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Thomas' algorithm: forward elimination, back substitution."""
    x, e = torch.zeros_like(d), torch.zeros_like(c)
    e[:, 0] = c[:, 0] / b[:, 0]
    x[:, 0] = d[:, 0] / b[:, 0]
    for i in range(1, n):
        m = b[:, i] - a[:, i] * e[:, i - 1]
        e[:, i] = c[:, i] / m
        x[:, i] = (d[:, i] - a[:, i] * x[:, i - 1]) / m
    for i in range(n - 2, -1, -1):
        x[:, i] = x[:, i] - e[:, i] * x[:, i + 1]
    return x


def forward(n: int, a: Any, d: Any) -> Any:
    x = torch.zeros_like(d)
    for i in range(1, n):
        x[:, i] = d[:, i] - a[:, i] * x[:, i - 1]
    return x


def backward(n: int, a: Any, d: Any) -> Any:
    x = d.clone()
    for i in range(n - 2, -1, -1):
        x[:, i] = d[:, i] - a[:, i] * x[:, i + 1]
    return x


def scattered(n: int, a: Any, d: Any) -> Any:
    for i in range(1, n):
        d = torch.select_scatter(d, d[:, i] - a[:, i] * d[:, i - 1], 1, i)
    return d


def one_wide(n: int, a: Any, d: Any) -> Any:
    x = torch.zeros_like(d)
    for i in range(1, n):
        x[:, i : i + 1] = d[:, i : i + 1] - a[:, i : i + 1] * x[:, i - 1 : i]
    return x


def rows(n: int, a: Any, d: Any) -> Any:
    a, d = a.t(), d.t().contiguous()
    x = torch.empty_like(d).fill_(0.5)
    for i in range(1, n):
        x[i] = d[i] - a[i] * x[i - 1]
    return x


def middle(n: int, a: Any, d: Any) -> Any:
    """Slices of the middle of three dimensions."""
    return forward(n, a[:, :, None], torch.stack([d, -d, d * 2], 2))


def onto_input(n: int, a: Any, d: Any) -> Any:
    for i in range(1, n):
        d[:, i] -= a[:, i] * d[:, i - 1]
    return d.sum(1)


def constants(n: int, a: Any, d: Any) -> Any:
    """Numbers written to elements, and the rest read again."""
    x = d * a
    for i in range(0, n, 2):
        x[:, i] = float(i)
    return x, x[:, 1] + x[:, 2]


CHAINS = (tridiagonal, forward, backward, scattered, one_wide, rows, middle, onto_input, constants)


def operands(fn: Callable[..., Any], n: int, m: int = 5) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    count = fn.__code__.co_argcount - 1
    return [torch.rand(m, n, generator=g) + (4 if i == 1 and count == 4 else 0) for i in range(count)]


@pytest.mark.parametrize("fn", CHAINS, ids=lambda f: f.__name__)
@pytest.mark.sample(2)
def test_a_chain_computes_what_eager_does(fn: Callable[..., Any]) -> None:
    n = random.Random(fn.__name__).randrange(7, 14)
    compare(lambda *args: fn(n, *args), *operands(fn, n))


@pytest.mark.parametrize("fn", (tridiagonal, onto_input, middle), ids=lambda f: f.__name__)
@pytest.mark.sample(3)
def test_a_chain_of_unknown_sizes(fn: Callable[..., Any]) -> None:
    n = random.Random(fn.__name__).randrange(6, 9)
    (stages,) = compare(lambda *args: fn(n, *args), *operands(fn, n), dynamic=True).stages
    assert len(stages.scheduled.nodes) <= 3  # type: ignore[union-attr]


def overlapping(plan: list[tuple[int, int, int]], x: Any, d: Any) -> Any:
    """Slices that overlap, have steps, are empty, are read whole in between, and are written from themselves."""
    x = x * 2
    for i, (low, high, step) in enumerate(plan):
        x[:, low:high:step] = x[:, low:high:step] * d[:, i : i + 1] + i
        if i % 4 == 3:
            x[:, i] = x.sum(1)
        if i % 5 == 2:
            x[1:-1] = x[2:].clone()
            x[:, 1:-1] = x[:, 2:].clone()
    return x


@pytest.mark.parametrize("seed", range(3))
def test_slices_of_all_kinds(seed: int) -> None:
    n, rng = 11 + seed, random.Random(seed)
    lows = [rng.randrange(n) for _ in range(n)]
    plan = [(low, rng.randrange(low, n + 1), rng.choice((1, 1, 2, 3))) for low in lows]
    compare(lambda *args: overlapping(plan, *args), *operands(overlapping, n))


def shifted(x: Any) -> Any:
    """An input's own elements, moved along: each is read before it is written over."""
    x[:, 1:] = x[:, :-1].clone()
    return x + 1


def one_row(cache: Any, row: Any, at: int) -> Any:
    """A cache with one new row: the rest of it is not touched."""
    cache[:, at] = row * 2
    return cache.sum(1)


def test_a_chain_that_is_read_before_it_is_full() -> None:
    def f(x: Any, v: Any) -> Any:
        x, total = x.clone(), 0
        for i in range(6):
            x[i] = v[i]
            total = total + x.mean(0)
        return x, total

    compare(f, torch.randn(6, 40), torch.randn(6, 40))


def test_what_a_slice_stores_is_rounded() -> None:
    def f(x: Any, v: Any) -> Any:
        y = torch.slice_scatter(x, v, 0, 1, 5)
        return y, y[2:3].float().log()

    compare(f, torch.ones(8, 40, dtype=torch.float16), torch.full((4, 40), 1e-9))


def test_slices_of_an_input() -> None:
    compare(shifted, *operands(lambda n, a: n, 40))
    cache, row = torch.rand(3, 300, 5), torch.rand(3, 5)
    (stages,) = compare(lambda c, r: one_row(c, r, 7), cache, row).stages
    stores = [s for n in stages.fused.program.nodes for s in n.stores() if s.buffer in stages.program.inputs]  # type: ignore
    assert len(stores) == 1 and all(n.numel != cache.numel() for n in stages.fused.program.nodes)  # type: ignore


def graph_of(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Any:
    graphs: list[Any] = []

    class Captured(Backend):
        def _compile(self, graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return eager(graph)

    torch._dynamo.reset()
    torch.compile(fn, backend=Captured(Options()), dynamic=dynamic)(*args)
    return graphs[0]


def calls_and_kernels(graph: Any, **options: Any) -> tuple[int, int, Stages]:
    """How many functions of reflib are called to compile it, and how many kernels that gives."""
    count = 0

    def called(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call" and "reflib" in frame.f_code.co_filename

    sys.setprofile(called)
    try:
        stages = run(graph, Options(target="cpu", **options), until="generate")
    finally:
        sys.setprofile(None)
    return count, len(stages.scheduled.nodes), stages  # type: ignore[union-attr]


# TorchInductor's kernels for 16 columns (torch 2.13, CPU: torch._inductor.metrics.generated_kernel_count).
INDUCTOR = {tridiagonal: 23, forward: 7, scattered: 8, one_wide: 7, rows: 7}


@pytest.mark.parametrize("fn", INDUCTOR, ids=lambda f: f.__name__)
@pytest.mark.sample(5)
def test_a_chain_is_compiled_in_linear_time(fn: Callable[..., Any]) -> None:
    graphs = [graph_of(lambda *args, n=n: fn(n, *args), *operands(fn, n, 64)) for n in (16, 32)]
    peak = lambda s: memory(s.scheduled, s.plan).peak_bytes  # noqa: E731
    _, kernels, small = calls_and_kernels(graphs[0])
    _, more, large = calls_and_kernels(graphs[1])
    assert kernels <= INDUCTOR[fn] and more <= 2 * INDUCTOR[fn]
    assert peak(large) <= 8 * (peak(small) + 64 * 32 * 4)
    # what is linear in n may be worse in the size of one kernel, which is bounded
    calls, twice = (calls_and_kernels(g, max_fused_ops=40)[0] for g in graphs)
    assert twice <= 2.5 * calls  # n^3: 8


# -- sizes that are products and quotients ----------------------------------------------------------------
SHAPES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "pool1d": (lambda x: F.adaptive_avg_pool1d(x, 7), (2, 3, 17)),
    "pool2d": (lambda x: F.adaptive_avg_pool2d(x, (7, 5)), (2, 3, 17, 23)),
    "shuffle": (lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2) + 1, 2) * 2, (2, 8, 5, 7)),
    "windows": (
        lambda x: x.view(x.shape[0], x.shape[1] // 4, 4, x.shape[2] // 4, 4, -1).permute(0, 1, 3, 2, 4, 5)
        .reshape(-1, 16, x.shape[3]) + 1,
        (2, 8, 12, 6),
    ),
    "interpolate": (lambda x: F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] + 3), mode="bilinear"), (2, 3, 9, 7)),
    "unfold": (lambda x: x.unfold(2, 4, 3).unfold(3, 3, 2) + 1, (2, 3, 17, 11)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.sample(3)
def test_symbolic_sizes_take_bounded_effort(name: str) -> None:
    fn, shape = SHAPES[name]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(len(name)))
    graph = graph_of(fn, x, dynamic=True)
    nodes = sum(n.op == "call_function" for n in graph.nodes)
    calls, _, _ = calls_and_kernels(graph)
    assert calls <= 100_000 * nodes  # 73,000 for shuffle; it was above 10**8 for pool2d, and did not end
    compare(fn, x, dynamic=True)


class Pooled(nn.Module):
    """A block of a PoolFormer: norms over whole images, which are split, and a pooling, on a residual stream."""

    def __init__(self, channels: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(1, channels) for _ in range(2))
        self.scales = nn.ParameterList(torch.ones(channels, 1, 1) for _ in range(2))
        self.up, self.down = nn.Conv2d(channels, 4 * channels, 1), nn.Conv2d(4 * channels, channels, 1)

    def forward(self, x: Any) -> Any:
        y = self.norms[0](x)
        x = x + self.scales[0] * (F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y)
        return x + self.scales[1] * self.down(F.gelu(self.up(self.norms[1](x))))


def test_a_block_does_not_compute_the_blocks_before_it_again():
    """What each kernel loads depends on its block alone, not on how many came before."""
    x, loads = torch.randn(32, 96, 14, 14, dtype=torch.bfloat16), []
    for blocks in (2, 3, 5):
        model = nn.Sequential(*(Pooled(96) for _ in range(blocks))).bfloat16().eval()
        with torch.no_grad():
            kernels = reflib.explain(model, x, target="sm_90").kernels
        loads.append([k.source.count("tl.load(") for k in kernels])
    assert max(loads[0]) == max(loads[1]) == max(loads[2]) <= 9 + 5  # a pooling reads nine, and its block the rest
    assert sum(loads[2]) - sum(loads[1]) == 2 * (sum(loads[1]) - sum(loads[0]))


# -- what is known is kept --------------------------------------------------------------------------------
def test_a_program_is_analyzed_and_a_buffer_measured_once() -> None:
    program = reflib.explain(lambda x: torch.softmax(x * 2, -1), torch.zeros(64, 64), target="sm_90").scheduled
    d, b = dependencies(program), next(iter(program.buffers.values()))
    before = [set(b) for b in d.before]
    _before(program)  # which has more of them
    assert dependencies(program) is d and d.before == before
    assert dependencies(replace(program)) == d and dependencies(replace(program)) is not d
    assert b.nbytes is b.nbytes and b.extent is b.extent and b.numel is b.numel


def covariance(x: Tensor, y: Tensor) -> Tensor:
    mean = partial(F.avg_pool2d, kernel_size=3, stride=1)
    return (mean(x * y) - mean(x) * mean(y)).mean()


def similarity(x: Tensor, y: Tensor) -> Tensor:
    mean = partial(F.avg_pool2d, kernel_size=3, stride=1)
    a, b = mean(x), mean(y)
    va, vb, vab = mean(x * x) - a * a, mean(y * y) - b * b, mean(x * y) - a * b
    return (a * b * (2 * vab + 0.03) / ((a * a + b * b + 0.01) * (va.abs() + vb.abs() + 0.03))).mean()


@pytest.mark.parametrize("fn", [covariance, pytest.param(similarity, marks=pytest.mark.slow)])
def test_windows_of_sizes_that_are_not_known(fn: Callable[..., Tensor]) -> None:
    """Their gradients' places are quotients of quotients, which double per level: some are read from memory instead."""
    f = reflib.compile(fn, dynamic=True)
    for shape in ((3, 2, 9, 7), (2, 5, 6, 11)):
        args = [torch.randn(shape, requires_grad=True) for _ in range(2)]
        got, want = (torch.autograd.grad(g(*args), args) for g in (f, fn))
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
