"""``numerics="eager"``: ops that are formulas of eager's CUDA kernels have its bits, over whole dtypes.

Each op is fused with an exact one before and after it. Float32: 2^24 random patterns of bits, subnormal numbers,
infinities and NaN among them; halves: all numbers. Ops of two tensors take those, and ordinary numbers, by turns.
"""

import pytest
import torch

import reflib
from tests.cuda_formula_cases import CASES, DTYPES, GPU_ONLY, ONE, different_bits, every, numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*CASES, *GPU_ONLY])
def test_the_bits_are_eagers(name: str, dtype: torch.dtype) -> None:
    fn = (CASES | GPU_ONLY)[name]
    x = every(dtype, "cuda", 0)
    some = numbers(dtype, "cuda", 1, x.numel())
    if name in ONE or name in GPU_ONLY:
        inputs = [(x,), (some,)]
    else:
        inputs = [(some, x), (x, some), (x, every(dtype, "cuda", 2)), (some, numbers(dtype, "cuda", 3, x.numel()))]
    run = reflib.compile(lambda *t: fn(*(-v for v in t)).abs(), numerics="eager", dynamic=False)
    found = [different_bits(run(*t), fn(*(-v for v in t)).abs()) for t in inputs]
    assert found == [0] * len(inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", ("a size", "a number of the CPU's", "a number that changes"))
def test_divisions_by_numbers(of: str, dtype: torch.dtype) -> None:
    x = every(dtype, "cuda", 0, 2**16)
    run = reflib.compile(lambda x, p: x / (x.shape[0] if of == "a size" else p), numerics="eager", dynamic=True)
    for p in (0.3, 7.0, 1e-3):
        t = x[: int(9000 + p)]
        by = torch.tensor(p) if of == "a number of the CPU's" else p
        assert different_bits(run(t, by), t / (t.shape[0] if of == "a size" else by)) == 0, p


@pytest.mark.parametrize("dtype", DTYPES)
def test_divisions_by_tensors(dtype: torch.dtype) -> None:
    """Of one number, and one that is known when the model is compiled."""
    x = every(dtype, "cuda", 0, 2**16)
    one = torch.tensor(0.7, device="cuda", dtype=dtype)
    for fn in (lambda x: x / one, lambda x: x / torch.full_like(x, 0.7)):
        assert different_bits(reflib.compile(fn, numerics="eager")(x), fn(x)) == 0
