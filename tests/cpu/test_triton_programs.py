"""Whole programs for a GPU give eager's results: the wrapper runs here, its kernels in Triton's interpreter."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
TESTS = Path(__file__).parent.parent
NAMES = (
    "siblings", "one of each length", "block", "looped", "one op each", "columns", "empty", "empty rows", "mutates",
    "views", "long", "lists", "product and gelu", "products", "long product", "batched product", "trained product",
)  # fmt: skip


@functools.cache
def results() -> dict[str, str]:
    """All programs in one child: the interpreter has to be chosen before Triton is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run([sys.executable, str(TESTS / "triton_programs.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_program(name: str) -> None:
    mine = {k: v for k, v in results().items() if k.rpartition(", ")[0].rpartition(", ")[0] == name}
    assert len(mine) == 4  # fast and general arm, static and dynamic
    assert not any(mine.values()), "\n".join(f"{k}: {v}" for k, v in mine.items() if v)


def test_every_program_is_looked_at() -> None:
    assert {k.rpartition(", ")[0].rpartition(", ")[0] for k in results()} == set(NAMES)
