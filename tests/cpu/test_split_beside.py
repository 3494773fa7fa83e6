"""The sum of a whole tensor beside elementwise work over it: a sum of each row in that kernel, then of these."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_cases import fused, kernels

import reflib
from reflib.fuse import split
from reflib.ir.loops import LoopNest

SIZES = random.Random(5)


def learned_scale(x, g, s):
    inside = (x / s).abs() < 1
    return torch.where(inside, g / s, 0), torch.where(inside, -g * x, g).sum().reshape(1)


def step_and_norm(p, g, s):
    m, v = p.lerp(g, 0.1), p * 0.9 + g * g
    update = m / (v.abs().sqrt() + 1) + p * s
    return m, v, p - update / update.square().sum()


def averaged(p, q, s):
    return p.lerp(q, 0.1), (p - q).square().sum(), (p * s).abs().amax()


def of_four(x, y, s):
    x, y = x.unflatten(1, (-1, 3)), y.unflatten(1, (-1, 3))
    return x * y, (x + y).sum()


CASES: list[Callable[..., Any]] = [learned_scale, step_and_norm, averaged, of_four]


def tensors() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(SIZES.randint(0, 1000))
    m, n = SIZES.choice([283, 307, 331, 359, 383, 397]), 3 * SIZES.randint(25, 40)  # (parts of a prime have a tail)
    return [torch.randn(m, n, generator=g), torch.randn(m, n, generator=g), torch.rand(1, generator=g) + 0.5]


def large(f: Any) -> int:
    """How often kernels read a tensor of all the elements."""
    return sum(f.program.buffers[b].numel.hint() > 10_000 for n in f.program.nodes for b in n.reads())


@pytest.mark.parametrize("fn", CASES)
def test_less_is_read(fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    args = tensors()
    together = fused(fn, args)
    monkeypatch.setattr(split, "_long_rows", lambda *how: 0)
    apart = fused(fn, args)
    assert large(together) < large(apart)
    assert len(kernels(together)) <= len(kernels(apart)) + 1


@pytest.mark.parametrize("seed", range(3))
def test_columns_beside_what_stays_are_summed_in_its_kernel(seed: int) -> None:
    """In equal pieces, far from as many as wanted; what only the sum needs is cut into pieces that are not equal."""
    rng = random.Random(seed)
    n, piece = 8 * rng.randrange(5, 18), rng.choice([53, 59, 61, 67])
    x, y = torch.randn(23 * piece, n), torch.randn(23 * piece, n)
    f = fused(lambda x, y: ((x * y).relu(), (x * y).relu().sum(0)), (x, y))
    assert len(kernels(f)) == 2 and large(f) == 2
    (first, *_) = kernels(fused(lambda x, y: ((x * y).relu().sum(0),), (x, y)))
    assert first.numel.hint() // n not in (23, piece)


@pytest.mark.parametrize("seed", range(2))
def test_sums_over_pairs_are_not_cut(seed: int) -> None:
    """Of a thousand boxes, the best overlap with each: 16 results per program fill the machine."""
    rng = random.Random(seed)
    a, b = torch.rand(rng.randrange(4300, 5000), 2), torch.rand(rng.randrange(300, 400), 2)

    def overlaps(a, b):
        return ((torch.minimum(a[None], b[:, None]) - torch.maximum(a[None] - 1, b[:, None] - 1)).prod(-1).amax(0),)

    assert len([n for n in kernels(fused(overlaps, (a, b))) if n.reduced]) == 1


def test_pieces_that_are_equal_are_taken_before_rows() -> None:
    """Nor are they rows where a row's sums would be as large as the row."""
    narrow = [t.reshape(-1, 3)[:10_001] for t in tensors()[:2]]
    for x, y in (narrow, [torch.ones(512, 64), torch.ones(512, 64)]):
        program = fused(lambda x, y: (x * y, (x + y).sum()), [x, y]).program
        assert not any("of_rows" in b for n in program.nodes if isinstance(n, LoopNest) for b in n.writes())


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_beside_those_of_rows_is_one_of_rows(seed: int) -> None:
    """A loss per sequence and the mean loss: what both are made of is computed once, and not stored. (Rows that nothing
    else reduces, or short ones, are no reason: pieces as long as wanted have fewer results.)"""
    rng = random.Random(seed)
    m, n = rng.randrange(270, 500), rng.choice([97, 101, 103])
    x, y = torch.randn(m, n), torch.randn(m, n)

    def losses(x, y):
        d = (x - y).exp() - x
        return (d * y).sum(1), d.mean(), (d * x.relu()).sum()

    f = fused(losses, (x, y))
    assert large(f) == 2 and not any(b.kind == "temp" and b.numel == m * n for b in f.program.buffers.values())
    x7, y7 = x[:, :91].reshape(-1, 7), y[:, :91].reshape(-1, 7)
    short = fused(losses, (x7, y7))
    assert all(n.numel.hint() != 13 * m or n.rnumel == 7 for n in kernels(short))
    if seed == 0:
        check_close(losses, (x, y))


def check_close(fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> None:
    wide = fn(*(a.double() for a in args))
    for got, exact in zip(reflib.compile(fn)(*args), wide):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-3)
