"""Products of small depth, and deep ones of few elements, are loop nests on a GPU, fused with what is around them."""

import random

import pytest
import torch

from reflib.lower import small_products
from tests.cpu.fuse_cases import calls, gpu_fused, kernels

DTYPES = torch.float32, torch.bfloat16, torch.float16


def made(rng: random.Random, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(1000))).to(dtype)


@pytest.mark.parametrize("seed", range(8))
def test_one_kernel(seed: int) -> None:
    rng = random.Random(seed)
    dtype, depth, columns, rows = rng.choice(DTYPES), rng.randrange(2, 5), rng.randrange(1, 3), rng.randrange(3000)
    a, b = made(rng, dtype, depth, 4096 + rows), made(rng, dtype, depth, columns)
    bias, scale = made(rng, dtype, columns), rng.choice([1, 0.5])
    f = gpu_fused(lambda x, w, c: (torch.addmm(c, (2 * x).t(), w, beta=scale, alpha=scale).relu(),), a, b, bias)
    assert len(f.program.nodes) == len(kernels(f)) == 1
    x, w = made(rng, dtype, 4096, rows % 3 + 1, depth), made(rng, dtype, 4096, depth, columns)
    f = gpu_fused(lambda x, w: (torch.bmm(x.abs(), w) + 1,), x, w)
    assert len(f.program.nodes) == len(kernels(f)) == 1


def test_deeper_ones_and_few_elements_are_products() -> None:
    for rows, depth, columns in ((5000, 17, 2), (5000, 16, 16), (100, 3, 3)):
        f = gpu_fused(lambda x, w: (x @ w,), torch.randn(rows, depth), torch.randn(depth, columns))
        assert not kernels(f)


@pytest.mark.parametrize("dtype", DTYPES)
def test_deep_ones_are_sums(dtype: torch.dtype) -> None:
    rng = random.Random(5)
    a, b = made(rng, dtype, 40_003, 3), made(rng, dtype, 40_003, 7)
    f = gpu_fused(lambda x, g: ((x * 0.01).t() @ g,), a, b)
    assert not [n for n in f.program.nodes if n not in kernels(f)] and len(kernels(f)) <= 2


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("rows, depth, columns", [(-1, 3, 2), (3, -1, 7), (1, -1, 1)])
def test_of_unusual_operands(
    rows: int, depth: int, columns: int, symbolic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expanded, in another order, or a bias that does not count; -1: a size that may be known at run time only."""
    monkeypatch.setattr(small_products, "ELEMENTS", 1)
    monkeypatch.setattr(small_products, "DEEP", 30)
    rng, n = random.Random(0), 60
    a, b = (
        made(rng, torch.bfloat16, abs(r * c) * (n if -1 in (r, c) else 1)) for r, c in ((rows, depth), (depth, columns))
    )
    nan = torch.full((columns,), torch.nan, dtype=torch.bfloat16)

    def expanded(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = x.view(rows, depth), w.view(depth, columns)
        return torch.bmm(x.expand(2, *x.shape), torch.stack([w, -w])), x[:, :1].expand(x.shape) @ w

    def reordered(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = x.view(rows, depth).t().contiguous().t(), w.view(depth, columns)
        return x @ w, torch.addmm(c, x, w, beta=0, alpha=3) if depth == 3 else x @ -w

    for fn in (expanded, reordered):
        f = gpu_fused(fn, a, b, nan, symbolic=symbolic)
        assert kernels(f) and not calls(f)


def test_with_eagers_numerics_they_are_eagers_calls() -> None:
    for a, b in ((torch.randn(5000, 3), torch.randn(3, 2)), (torch.randn(3, 40_000), torch.randn(40_000, 4))):
        f = gpu_fused(lambda x, w: (x @ w,), a, b, numerics="eager")
        assert not kernels(f)
