"""Generated Triton, run by Triton's interpreter, gives what the IR's interpreter gives."""

from __future__ import annotations

import importlib.util

import pytest
from interpreter import results
from matmul_cases import matmul_cases
from triton_cases import kernel_cases, op_cases, reduce_cases
from triton_half_cases import HALF

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


def check(kind: str, names: list[str]) -> None:
    found = results("triton_interpreting.py")[kind]
    problems = [f"{n}: {found[n]}" for n in names if found.get(n)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("op", sorted({n.split("_")[0] if not n.startswith("to_") else n for n in op_cases()}))
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


@pytest.mark.parametrize("name", matmul_cases())
def test_product(name: str) -> None:
    assert name in results("triton_interpreting.py")["products"]
    check("products", [name])
