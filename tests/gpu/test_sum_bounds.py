"""``numerics="eager"`` on a CUDA device: sums, norms and softmax at random sizes are within their bounds of float64."""

import random

import pytest
import torch

import reflib
from tests.sum_bounds import broken, numbers, program


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("seed", range(12))
def test_sums_are_within_their_bounds(seed: int, dtype: torch.dtype) -> None:
    x = numbers(random.Random(f"{seed} {dtype}"), 1 << 21, dtype, "cuda")
    torch._dynamo.reset()
    assert broken(reflib.compile(program, dynamic=False, numerics="eager"), x) == []
