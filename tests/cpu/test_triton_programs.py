"""Whole programs for a GPU give eager's results: the wrapper runs here, its kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from interpreter import chosen, results

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
NAMES = (
    "siblings", "one of each length", "block", "looped", "one op each", "columns", "empty", "empty rows", "mutates",
    "views", "long", "lists", "product and gelu", "products", "long product", "batched product", "trained product",
    "pools", "trained pools", "scans", "looped scans", "embeddings", "puts", "one put each", "scatters", "upsamples",
    "stores", "random", "long rows", "one order", "one order, looped",
)  # fmt: skip


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    """What is wrong with each program among the tests to run, which share a process."""
    return results("triton_programs.py", *chosen(request))


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", NAMES)
def test_program(name: str, found: dict[str, str]) -> None:
    mine = {k: v for k, v in found.items() if k.rpartition(", ")[0].rpartition(", ")[0] == name}
    assert len(mine) == 4  # fast kernels and fallbacks, static and dynamic
    assert not any(mine.values()), "\n".join(f"{k}: {v}" for k, v in mine.items() if v)


def test_every_program_is_looked_at(root: Path) -> None:
    text = (root / "tests" / "triton_programs.py").read_text().partition("\nPROGRAMS")[2].partition("\n}")[0]
    assert set(re.findall(r'^    "([^"]+)": ', text, re.M)) == set(NAMES)
