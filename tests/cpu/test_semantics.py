"""tests/semantics.py, results.py and stages.py on the CPU, and what only the CPU has."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import reflib
from tests.results import *  # noqa: F403
from tests.semantics import *  # noqa: F403
from tests.semantics import Compiled, compare, randn
from tests.stages import *  # noqa: F403


@pytest.fixture
def device() -> str:
    return "cpu"


def test_a_second_compilation_reads_the_cache(fresh_cache: Path) -> None:
    x = randn(6, 6, device="cpu")
    expected = (x.sin() * 3).sum(-1)
    for _ in range(2):
        torch._dynamo.reset()
        torch.testing.assert_close(Compiled(lambda x: (x.sin() * 3).sum(-1))(x), expected)
        built = {p for p in fresh_cache.rglob("*.so") if "kernels" in str(p)}
        assert len(built) == 1, built
    # damaged: built again
    for path in built:
        data = path.read_bytes()
        path.unlink()  # this process has the old file mapped
        path.write_bytes(data[:100])
    torch._dynamo.reset()
    torch.testing.assert_close(Compiled(lambda x: (x.sin() * 3).sum(-1))(x), expected)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    n = 2**31 + 5
    x = torch.zeros(n, dtype=torch.int8)
    x[-1] = 3
    y = Compiled(lambda x: x + 1)(x)
    assert int(y[-1]) == 4 and int(y[0]) == 1 and int(y[n // 2]) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_tensors_are_compared_with_rounded_numbers(dtype):
    x = torch.tensor([0.3, 0.1, -0.7, 2048.0], dtype=dtype)
    precise = torch.tensor(0.3, dtype=torch.float64)  # no dimensions: it takes x's dtype

    def fn(x, precise):
        numbers = [0.3, 0.1, -0.7, 2049]
        ops = [torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge]
        return [op(x, n) for op in ops for n in (*numbers, precise)]

    for got, want in zip(reflib.compile(fn)(x, precise), fn(x, precise), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("divide", ["floor_divide", "remainder", "fmod", "trunc"])
def test_integers_divided_by_zero_are_an_error(divide):
    def fn(x, y):
        return torch.div(x, y, rounding_mode="trunc") if divide == "trunc" else getattr(torch, divide)(x, y)

    f = reflib.compile(fn, dynamic=False)
    x, y = torch.tensor([7, -7, 5]), torch.tensor([2, 3, -4])
    assert torch.equal(f(x, y), fn(x, y)) and torch.equal(f(x, 3), fn(x, 3))
    for zero in (torch.tensor([2, 0, 3]), torch.tensor(0), 0):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            f(x, zero)
    kernels = reflib.explain(lambda x: fn(x, 3) + 1, x).kernels
    assert len(kernels) == 1, "a known divisor is computed in a kernel"


def test_results_that_eager_lays_out_anew() -> None:
    """Whatever the strides of a batch norm's or logsigmoid's input are."""

    def f(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [g(x) for x in xs for g in (F.logsigmoid, lambda x: F.batch_norm(x, None, None, training=True))]

    last = randn(3, 4, 5, 2, device="cpu").to(memory_format=torch.channels_last)
    compare(f, randn(5, 3, 4, device="cpu").permute(1, 2, 0), last, randn(2, 3, 4, device="cpu"))
