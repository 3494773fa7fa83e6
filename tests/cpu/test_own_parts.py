"""Composite ops that are taken apart in another way than torch does it."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import reflib

ROWS = [1028, 2056, 4112]  # half way between two numbers of bfloat16


@pytest.mark.sample(3)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_counts_its_rows_exactly(rows: int, weighted: bool) -> None:
    """In bfloat16, a number of rows is off by up to 0.4%, and the loss with it."""
    g = torch.Generator().manual_seed(rows)
    x = torch.full((rows, 2), 1.0).bfloat16()  # each row's loss is log(2), rounded
    target = torch.randint(0, 2, (rows,), generator=g)
    weight = torch.tensor([1.0, 1.0]).bfloat16() if weighted else None

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target, weight)

    torch._dynamo.reset()
    got = torch.compile(loss, backend="reflib")(x)
    assert got == torch.tensor(2.0).log().bfloat16()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_integers_between_two_numbers(dtype: torch.dtype) -> None:
    """Ends that are no integers are cut; numbers, tensors or one of either."""
    rng = random.Random(str(dtype))
    for _ in range(6):
        least = 0 if dtype == torch.uint8 else -60
        first, last = (rng.choice((rng.randint(least, 100), rng.uniform(least, 100))) for _ in range(2))
        steps = rng.choice((1, 2, rng.randint(3, 90)))
        kinds = [rng.random() < 0.5 for _ in range(2)]

        def fn(*ends: Any, steps: int = steps) -> torch.Tensor:
            return torch.linspace(*ends, steps, dtype=dtype)

        ends = [torch.tensor(x) if kind else x for x, kind in zip((first, last), kinds, strict=True)]
        torch._dynamo.reset()
        assert torch.equal(reflib.compile(fn, dynamic=False)(*ends), fn(*ends)), (first, last, steps, kinds)


def test_the_gradient_of_a_filled_number() -> None:
    """Its rows are counted by the indices that differ."""

    def fn(x: torch.Tensor, at: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return x.index_fill(0, at, value).sin().sum()

    x, value = torch.randn(5, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    at = torch.tensor([0, 2, 3, 2])
    torch._dynamo.reset()
    got, want = (torch.autograd.grad(f(x, at, value), (x, value)) for f in (reflib.compile(fn), fn))
    assert all(map(torch.allclose, got, want))


SCATTERS = [
    lambda x: x.diagonal_scatter(x.new_zeros(2, 2), 0, 0, 2),
    lambda x: x.select_scatter(x.new_zeros(2, 2), 0, 1),
    lambda x: x.slice_scatter(x.new_zeros(1, 2, 2), 0, 2),
]


@pytest.mark.parametrize("scatter", SCATTERS)
def test_scattered_into_an_expanded_tensor(scatter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 has it, whose meta functions keep the strides."""
    monkeypatch.setattr(
        torch._meta_registrations, "_scatter_meta_output", torch._prims_common.clone_preserve_strides, raising=False
    )

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = scatter(x.expand(3, 2, 2))
        return y, y.diagonal(0, 0, 1) * 2

    x = torch.randn(1, 2, 2, generator=torch.Generator().manual_seed(3))
    torch._dynamo.reset()
    got, want = torch.compile(fn, backend="reflib", options={"verify": True})(x), fn(x)
    torch.testing.assert_close(got, want)
    assert got[0].stride() == want[0].stride()


def test_scattered_into_nothing_with_strides_of_zero() -> None:
    """Its clone has strides of 0, too: it has no element that could be stored to twice."""
    x = torch.empty(3, 1, 0, 1).as_strided((3, 1, 0, 1), (0, 0, 0, 0))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.select_scatter(x.select(1, 0) + 1, 1, 0)

    torch._dynamo.reset()
    assert torch.compile(fn, backend="reflib", dynamic=True)(x).shape == x.shape


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.softmax(x, -1), lambda x: F.log_softmax(x, 0), lambda x: F.glu(x), torch.frac,
        lambda x: F.smooth_l1_loss(x, x + 1), lambda x: F.huber_loss(x, x + 1),
    ],
)  # fmt: skip
def test_of_integers_what_eager_refuses(fn: Any) -> None:
    torch._dynamo.reset()
    x = torch.arange(24).view(4, 6)
    for f in (fn, torch.compile(fn, backend="reflib")):
        with pytest.raises(Exception, match="not implemented for 'Long'"):
            f(x)
    y = x.float()
    torch.testing.assert_close(torch.compile(fn, backend="reflib")(y), fn(y))
