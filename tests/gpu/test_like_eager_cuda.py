"""``numerics="eager"`` on a CUDA device: what tests/cpu/test_like_eager.py looks at, by CUDA's library and cuBLAS."""

import random

import pytest
import torch

import reflib
from tests.like_eager_cases import BINARY, DTYPES, MODELS, UNARY, chain, different, equal_bits, model_in, numbers, step

EAGER = {"numerics": "eager"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_every_op(name: str, dtype: torch.dtype) -> None:
    rng = random.Random(name)
    x, y = (numbers(rng, "cuda", dtype, 61, 37) for _ in range(2))
    if name in UNARY:
        assert different(lambda x, y: [UNARY[name](x * y) * 0.9, UNARY[name](x)], (x, y), **EAGER) == []
    else:
        assert different(lambda x, y: [BINARY[name](x, y * 1.1) - x, BINARY[name](x, y)], (x, y), **EAGER) == []


@pytest.mark.parametrize("seed", range(12))
def test_random_chains(seed: int) -> None:
    rng = random.Random(seed)
    sizes = 70 + seed, rng.randrange(1, 900)
    args = tuple(numbers(rng, "cuda", DTYPES[seed % 3], *sizes) for _ in range(3))
    assert different(chain(rng), args, wrapper=rng.choice(("python", "cpp")), **EAGER) == []


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model, shape = model_in(name, dtype)
    model.cuda()
    x = torch.randn(shape, dtype=dtype, device="cuda")
    want = step(model, model, x)
    got = step(model, reflib.compile(model, dynamic=False, **EAGER), x)
    assert [i for i, (a, b) in enumerate(zip(want, got, strict=True)) if not equal_bits(a, b)] == []


@pytest.mark.parametrize("name", ["floor", "ceil", "floor_divide", "remainder", "fmod", "trunc", "frac", "sign"])
def test_subnormal_numbers(name: str) -> None:
    """They are not 0 where a function jumps."""
    function = getattr(torch, name)
    x = torch.tensor([1e-40, -1e-40, 1e-45, -3e-39, 0.0, -0.0, 0.5, -0.5], device="cuda").repeat(40)
    args = (x, torch.full_like(x, 0.75)) if name in ("floor_divide", "remainder", "fmod") else (x,)
    torch._dynamo.reset()
    assert torch.equal(reflib.compile(function)(*args), function(*args))
