"""Pooling as loop nests: eager's results at random parameters, with ties and NaN; one kernel with neighbours."""

import importlib.util
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reflib import compile, explain
from reflib.generate.compile_triton import compile_kernel
from reflib.pipeline import dynamo_backend
from reflib.target import parse_target
from tests.checking import check
from tests.semantics import compare

Case = tuple[Callable[[torch.Tensor], Any], tuple[int, ...]]


def draw(seed: int, dims: int) -> Case:
    """A few poolings of one input at random parameters, and the input's shape."""
    rng = random.Random(seed)
    shape = (rng.randint(1, 3), rng.randint(1, 4), *(rng.randint(9, 14) for _ in range(dims)))
    parts: list[Callable[[torch.Tensor], Any]] = []
    for _ in range(3):
        kernel = [rng.randint(1, 4) for _ in range(dims)]
        stride = [rng.randint(1, 5) for _ in range(dims)]
        padding = [rng.randint(0, k // 2) for k in kernel]
        ceil, dilation = rng.random() < 0.5, rng.randint(1, 2)
        average = {"ceil_mode": ceil, "count_include_pad": rng.random() < 0.5}
        if dims > 1 and rng.random() < 0.3:
            average["divisor_override"] = rng.randint(1, 9)
        size = [rng.randint(1, 9) for _ in range(dims)]
        avg, most = getattr(F, f"avg_pool{dims}d"), getattr(F, f"max_pool{dims}d")
        parts += [
            lambda x, a=(kernel, stride, padding), kw=average, f=avg: f(x, *a, **kw),
            lambda x, a=(kernel, stride, padding, dilation, ceil), f=most: f(x, *a, return_indices=True),
            lambda x, size=size, f=getattr(F, f"adaptive_avg_pool{dims}d"): f(x, size),
            lambda x, size=size, f=getattr(F, f"adaptive_max_pool{dims}d"): f(x, size, return_indices=True),
        ]
    return lambda x: [f(x) for f in parts], shape


def ties(shape: tuple[int, ...], dtype: torch.dtype, last: bool = False) -> torch.Tensor:
    """Small whole numbers: many are equal."""
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[len(shape)]) if last and len(shape) in formats else x


DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.sample(6)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_at_random(dims: int, seed: int) -> None:
    fn, shape = draw(10 * seed + dims, dims)
    dtype = DTYPES[seed] if dims < 3 else torch.float32  # eager's volumes have no halves on a CPU
    x = ties(shape, dtype, last=seed % 2 == 1).requires_grad_()
    compiled = compare(fn, x, backward=seed < 2, dynamic=seed == 2)
    on_cpu = ["max_pool"] if seed % 2 == 1 or seed == 0 else []  # channels last, overlapping windows
    assert all(any(name in str(e.target) for name in on_cpu) for e in compiled.externs)


def test_without_a_batch_and_without_elements() -> None:
    fn = lambda x: (F.avg_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, (2, 3)))  # noqa: E731
    compare(fn, torch.randn(3, 8, 9))
    compare(fn, torch.randn(0, 3, 8, 9))


@pytest.mark.parametrize("kernel", [2, 9])
def test_nan_and_infinity(kernel: int) -> None:
    """The last NaN of a window, the first of equals, the first inside of a window of -inf; unrolled and reduced."""
    x = ties((2, 2, 18, 18), torch.float32)
    x[0, 0, ::5, ::3] = float("nan")
    x[0, 1] = float("-inf")
    x[1, 0, 3:9, 4] = float("inf")

    def fn(x: torch.Tensor) -> Any:
        return F.max_pool2d(x, kernel, 2, 1, return_indices=True), F.adaptive_max_pool2d(x, 1, return_indices=True)

    assert not compare(fn, x).externs


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int16])
def test_whole_numbers(dtype: torch.dtype) -> None:
    x = ties((2, 3, 9, 10), dtype).abs()
    assert not compare(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), x).externs
    if dtype == torch.int64:
        assert not compare(lambda x: F.avg_pool2d(x, 3, 2, 1), x).externs


def test_large_windows_are_reductions() -> None:
    x = ties((2, 3, 24, 26), torch.float32).requires_grad_()

    def fn(x: torch.Tensor) -> Any:
        return F.avg_pool2d(x, 9, 1, 4), F.max_pool2d(x, 9, 1, 4), F.avg_pool2d(x, x.shape[2:])

    for dynamic in (False, True):
        externs = compare(fn, x, backward=True, dynamic=dynamic).externs
        assert [str(e.target) for e in externs] == ["aten.max_pool2d_with_indices_backward.default"]


class Normed(nn.Module):
    def __init__(self, pool: nn.Module):
        super().__init__()
        self.norm, self.pool = nn.BatchNorm2d(8), pool

    def forward(self, x: torch.Tensor) -> Any:
        return self.pool(F.relu(self.norm(x)))


POOLS = [nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1), nn.AdaptiveAvgPool2d(7)]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize("pool", POOLS, ids=str)
@torch.no_grad()
def test_one_kernel_with_what_comes_before(pool: nn.Module) -> None:
    """Besides the one that takes eight variances to their roots (of none where the window is large)."""
    e = explain(Normed(pool).eval(), torch.randn(4, 8, 28, 28), target="sm_90")
    large = [g for g in e.groups if any(b.numel.hint() > 8 for b in _written(e, g.name))]
    assert len(large) == 1 and len(e.groups) <= 2
    assert "x % 8" not in e.kernels[-1].source, "neighbours in x are neighbours in memory"
    assert compile_kernel(e.kernels[-1], parse_target("sm_90")).image[:4] == b"\x7fELF"


def _written(e: Any, name: str) -> list[Any]:
    node = next(n for n in e.fused.nodes if n.name == name)
    return [e.fused.buffers[b] for b in node.writes()]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_no_division_where_the_padding_is_masked() -> None:
    """The producer's coordinates are the pooling's, whatever the stride: the masks bound them."""
    x, b = torch.randn(2, 3, 16, 16), torch.randn(16)
    e = explain(lambda x, b: F.avg_pool2d(F.relu(x + b), 2, 2, 1), x, b, target="sm_90")
    (kernel,) = e.kernels
    divisors = {int(n) for n in re.findall(r"[/%] (\d+)", kernel.source)}
    assert 9 in divisors and 16 not in divisors, "the result has 9 rows and columns; the input's 16 do not occur"


def test_a_larger_producer_is_stored() -> None:
    """Where it would take more to compute each of nine elements again than to store it and read it."""
    x = torch.randn(2, 3, 16, 16)
    e = explain(lambda x: F.avg_pool2d(x.sin().exp().tanh() / (x.cosh() + 1), 3, 1, 1), x, target="sm_90")
    assert len(e.groups) == 2


@pytest.mark.parametrize("seed", range(4))
def test_windows_side_by_side_and_their_sum(seed: int) -> None:
    """``unfold`` and ``fold``, forward and backward; one kernel each, whatever the batch."""
    rng = random.Random(seed)
    kernel, stride = ([rng.randint(1, 4) for _ in range(2)] for _ in range(2))
    kernel = [9, 7] if seed == 3 else kernel  # too many places for a sum that is written out
    padding, dilation = [rng.randint(0, 2) for _ in range(2)], [1, rng.randint(1, 3)] if seed % 2 else [1, 1]
    size = [(k - 1) * d + rng.randint(1, 9) for k, d in zip(kernel, dilation)]
    geometry = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    x = torch.randn(*[rng.randint(1, 3)] * (seed != 1), rng.randint(1, 3), *size, requires_grad=True)
    columns = F.unfold(x, **geometry).detach().requires_grad_()

    def added(c):
        return F.fold(c * 2, size, **geometry)

    for fn, arg in ((lambda x: F.unfold(x * 2, **geometry), x), (added, columns)):
        check(fn, torch.compile(fn, backend=dynamo_backend, dynamic=seed == 2), arg, backward=True)
    e = explain(added, columns)
    assert [len(g.kernels) for g in e.graphs] == [1, 1] and not e.fallback_kernels


def test_windows_of_nothing() -> None:
    x, fn = torch.randn(5, 3, requires_grad=True), lambda x: (x * 2).unfold(0, 0, 2).sum() + x.sum()
    torch.testing.assert_close(torch.autograd.grad(compile(fn)(x), x), torch.autograd.grad(fn(x), x))


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(6))
def test_windows_as_a_dimension(seed: int) -> None:
    """The gradient of ``unfold`` gathers, too: overlapping windows, gaps between them, windows of one element."""
    rng = random.Random(seed)
    shape = [rng.randint(2, 70) for _ in range(rng.randint(1, 3))]
    dim, step = rng.randrange(len(shape)), rng.choice([1, 2, 3, 5, 8, 50])
    size = rng.randint(1, shape[dim])
    x, fn = torch.randn(shape, requires_grad=True), lambda x: (x * x).unfold(dim - len(shape), size, step).sin()
    compiled = compile(fn, dynamic=seed % 2 == 0)
    want, got = fn(x), compiled(x)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in (got, want)))
    kernels = explain(fn, x, target="sm_90").kernels
    assert not any("atomic" in k.source for k in kernels)
