"""``batch_invariant`` on a CUDA device: what tests/cpu/test_batch_invariant.py looks at, with larger sizes."""

import random

import pytest
import torch

import reflib
from tests.invariance_cases import CASES, DTYPES, case, same, variant


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrapper", ("python", "cpp"))
def test_rows_in_calls_of_other_sizes(wrapper: str, name: str, dtype: torch.dtype) -> None:
    rng = random.Random(f"{name} {dtype}")
    made = case(name, dtype, rng, "cuda", scale=4)
    assert variant(reflib.compile(made[0], wrapper=wrapper, batch_invariant=True), made, rng) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_many_sizes(dtype: torch.dtype) -> None:
    """One row beside 16 to 4096 others: in another place of a tile, in other tiles."""
    run = reflib.compile(torch.mm, batch_invariant=True, dynamic=True)
    rng = random.Random(5)
    for k, n in ((4096, 4096), (4096, 128), (11008, 512)):
        x, w = torch.randn(4096, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
        whole = run(x, w)
        for rows in (2, 16, 100, 1000):
            first = rng.randrange(4096 - rows)
            assert same(whole[first : first + rows], run(x[first : first + rows], w)), (k, n, rows)


def test_gradients_are_the_same_in_every_run() -> None:
    model, (where,), _ = case("block", torch.float32, random.Random(1), "cuda", scale=4)
    run = reflib.compile(model, batch_invariant=True)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        run(where)[1].mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    first = step()
    assert all(all(map(same, first, step())) for _ in range(3))
