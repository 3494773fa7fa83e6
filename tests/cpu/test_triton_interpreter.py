"""Generated Triton, run by Triton's interpreter, gives what the IR's interpreter gives."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_cases import kernel_cases, op_cases, reduce_cases
from triton_half_cases import HALF

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
TESTS = Path(__file__).parent.parent


@functools.cache
def results(kind: str) -> dict[str, str]:
    """All cases of a kind in one child: the interpreter has to be chosen before Triton is imported."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }
    done = subprocess.run(
        [sys.executable, str(TESTS / "triton_interpreting.py"), kind], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(kind: str, names: list[str]) -> None:
    found = results(kind)
    problems = [f"{n}: {found[n]}" for n in names if found.get(n)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "op", sorted({n.split("_")[0] if not n.startswith("to_") else n for n in op_cases()})
)
def test_op(op: str) -> None:
    check("ops", [n for n in op_cases() if n == op or n.startswith(op + "_")])


@pytest.mark.parametrize("kind", sorted({n.split("_")[0] for n in reduce_cases()}))
def test_reduction(kind: str) -> None:
    check("reductions", [n for n in reduce_cases() if n.startswith(kind + "_")])


@pytest.mark.parametrize("name", kernel_cases())
def test_kernel(name: str) -> None:
    check("kernels", [name])


@pytest.mark.parametrize("name", HALF)
def test_cheap_form_for_half_precision(name: str) -> None:
    check("half", [name])
