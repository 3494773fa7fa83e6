"""``numerics="eager"`` on a CUDA device: what tests/cpu/test_like_eager.py looks at, by CUDA's library and cuBLAS."""

import copy
import random

import pytest
import torch

import reflib
from tests.like_eager_cases import BINARY, DTYPES, MODELS, UNARY, chain, different, model_in, numbers, step

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
    program = chain(rng)  # (its last result is a sum: see test_sum_bounds)
    elementwise = lambda *t: program(*t)[:-1]  # noqa: E731
    assert different(elementwise, args, wrapper=rng.choice(("python", "cpp")), **EAGER) == []


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums have an order of their own: results and gradients are as exact as eager's."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model, shape = model_in(name, dtype)
    model.cuda()
    x = torch.randn(shape, dtype=dtype, device="cuda")
    want = step(model, model, x)
    got = step(model, reflib.compile(model, dynamic=False, **EAGER), x)
    wide = copy.deepcopy(model).double()
    exact = step(wide, wide, x.double())
    for a, b, c in zip(got, want, exact, strict=True):
        assert a.dtype == b.dtype
        if a.is_floating_point():
            assert (a - c).norm() <= 2 * (b - c).norm() + torch.finfo(dtype).eps * c.norm()
        else:  # how many batches were seen
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["floor", "ceil", "floor_divide", "remainder", "fmod", "trunc", "frac", "sign"])
def test_subnormal_numbers(name: str) -> None:
    """They are not 0 where a function jumps."""
    function = getattr(torch, name)
    x = torch.tensor([1e-40, -1e-40, 1e-45, -3e-39, 0.0, -0.0, 0.5, -0.5], device="cuda").repeat(40)
    args = (x, torch.full_like(x, 0.75)) if name in ("floor_divide", "remainder", "fmod") else (x,)
    torch._dynamo.reset()
    assert torch.equal(reflib.compile(function)(*args), function(*args))


def test_integers_between_two_numbers() -> None:
    """(Eager's kernel computes in float32.)"""
    rng = random.Random(3)
    for _ in range(12):
        first, last = (rng.choice((rng.randint(-60, 100), rng.uniform(-60, 100))) for _ in range(2))

        steps = rng.randint(3, 90)

        def fn(
            ends: torch.Tensor, first: float = first, last: float = last, steps: int = steps
        ) -> list[torch.Tensor]:
            plain = torch.linspace(first, last, steps, dtype=torch.int64, device="cuda")
            return [plain, torch.linspace(ends[0], ends[1], steps, dtype=torch.int64, device="cuda")]

        ends = torch.tensor([first, last], device="cuda")
        torch._dynamo.reset()
        assert all(map(torch.equal, reflib.compile(fn, dynamic=False)(ends), fn(ends))), (first, last)


def test_strides_of_max_unpool() -> None:
    """(On a GPU eager's result is contiguous whatever the input is.)"""
    x = torch.randn(2, 3, 6, 8, device="cuda").to(memory_format=torch.channels_last)
    pooled, at = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    fn = torch.nn.functional.max_unpool2d
    got, want = reflib.compile(fn)(pooled, at, 2), fn(pooled, at, 2)
    assert torch.equal(got, want) and got.stride() == want.stride()
