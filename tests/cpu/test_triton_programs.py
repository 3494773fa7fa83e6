"""Whole programs for a GPU give eager's results: the wrapper runs here, its kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
from interpreter import results

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
NAMES = (
    "siblings", "one of each length", "block", "looped", "one op each", "columns", "empty", "empty rows", "mutates",
    "views", "long", "lists", "product and gelu", "products", "long product", "batched product", "trained product",
    "pools", "trained pools", "scans", "looped scans",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_program(name: str) -> None:
    mine = {k: v for k, v in results("triton_programs.py").items() if k.rpartition(", ")[0].rpartition(", ")[0] == name}
    assert len(mine) == 4  # fast kernels and fallbacks, static and dynamic
    assert not any(mine.values()), "\n".join(f"{k}: {v}" for k, v in mine.items() if v)


def test_every_program_is_looked_at() -> None:
    assert {k.rpartition(", ")[0].rpartition(", ")[0] for k in results("triton_programs.py")} == set(NAMES)
