"""Integers of 8 and 16 bits wrap after each op, in C++ too. (In Triton: test_triton_programs.py.)"""

from __future__ import annotations

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
