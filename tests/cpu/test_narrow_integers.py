"""Integers of 8 and 16 bits wrap after each op, in C++ too (Triton: test_triton_programs.py); numbers become ones."""

import random

import pytest
import torch
from narrow_chains import DTYPES, chain, operands


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chains(dtype: torch.dtype) -> None:
    fns = [chain(seed, dtype) for seed in range(12)]
    x, y = operands(0, dtype)
    got = torch.compile(lambda x, y: [fn(x, y) for fn in fns], backend="reflib")(x, y)
    for seed, fn in enumerate(fns):
        for a, b in zip(got[seed], fn(x, y)):
            assert torch.equal(a, b), seed


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.int64, torch.float32])
def test_a_range_of_integers_rounds_its_start_and_step_first(dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    ranges = []
    for _ in range(12):
        start, step = rng.uniform(-9, 9), rng.choice((-1, 1)) * rng.uniform(1, 3)
        ranges.append((start, start + step * rng.uniform(0, 6), step))

    def fn() -> list[torch.Tensor]:
        return [torch.arange(*r, dtype=dtype) for r in ranges]

    for r, got, want in zip(ranges, torch.compile(fn, backend="reflib")(), fn()):
        torch.testing.assert_close(got, want, msg=str(r))
