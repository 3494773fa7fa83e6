"""The numerics table in the book is what this compiler does."""

from __future__ import annotations

import random

import pytest
import torch

from tests import numerics_table as numerics


def test_the_page_shows_the_stored_table() -> None:
    assert (numerics.BOOK / "numerics.md").read_text() == numerics.page()
    _, rows = numerics.stored("cpu")
    ops = [n for of in numerics.KINDS.values() for n in of]
    assert [r["op"] for r in rows] == ops * len(numerics.DTYPES) * len(numerics.MODES)
    assert all(bool(r["why"]) is (r["from_eager"] != "0") for r in rows)


@pytest.mark.parametrize("mode", numerics.MODES)
def test_a_sample_of_it_holds_here(mode: str) -> None:
    """On another kind of machine, or with another torch, eager's own functions are others."""
    rng = random.Random(mode)
    dtype = rng.choice(numerics.DTYPES)
    where, rows = numerics.stored("cpu")
    stored = {r["op"]: r for r in rows if (r["dtype"], r["mode"]) == (str(dtype)[6:], mode)}
    kinds = {n: k for k, of in numerics.KINDS.items() for n in of}
    names = rng.sample(sorted(kinds), 8)
    for row in numerics.measured([(kinds[n], n) for n in names], dtype, mode, "cpu"):
        old = stored[row["op"]]
        if mode == "eager":
            assert row["from_eager"] == old["from_eager"] == "0", row
        elif where == numerics.here("cpu"):
            assert row["from_eager"] == old["from_eager"], (row, old)


def test_ulps() -> None:
    one = torch.tensor([1.0, -1.0, 0.0, float("nan")])
    assert numerics.ulps(one, one) == 0 == numerics.ulps(torch.tensor(0.0), torch.tensor(-0.0))
    assert numerics.ulps(one[:1], torch.nextafter(one[:1], torch.tensor(2.0))) == 1
    assert numerics.ulps(torch.tensor([1e-45]), torch.tensor([-1e-45])) == 2
    assert numerics.ulps(one[3:], one[:1]) == float("inf")
