"""Sorts of short rows on CUDA: eager's results for every dtype, in kernels of ours."""

import pytest
import torch

from tests.semantics import Compiled, compare
from tests.sorts import DTYPES, FUNCTIONS, INTS, cases, gate, hostile, sparsemax, wrong


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_every_dtype_at_random(dtype: torch.dtype, name: str) -> None:
    fn = FUNCTIONS[name]
    for x, d in cases(dtype, 6, longest=256 if dtype not in INTS else 70):
        x = x.cuda()
        try:
            want = fn(x, d)
        except RuntimeError:  # no such kernel in eager: of bools, some
            return
        compiled = Compiled(lambda x, d=d: fn(x, d), dynamic=False)
        assert not wrong(name, x, d, compiled(x), want), (x.shape, x.stride(), d)
        assert not compiled.externs


@pytest.mark.parametrize("columns", [2, 16, 33, 100, 1000])
def test_fused(columns: int) -> None:
    x = torch.randn(4099, columns, generator=torch.Generator().manual_seed(columns)).cuda().requires_grad_()
    for fn in (sparsemax, lambda x: gate(x)[0], lambda x: x - x.median(-1, keepdim=True).values):
        assert not compare(fn, x, backward=True).externs


def test_many_rows() -> None:
    """More than one wave of programs, and rows whose last block is not whole."""
    x = hostile((70001, 24), 0, torch.float32).cuda()
    for got, want in zip(Compiled(lambda x: x.sort(dim=-1, stable=True))(x), x.sort(dim=-1, stable=True), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
