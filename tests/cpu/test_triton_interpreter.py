"""Generated Triton, run by Triton's interpreter, gives what the IR's interpreter gives."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from interpreter import chosen, results
from matmul_cases import matmul_cases
from one_pass_cases import VARIANCES, sum_cases, variance_cases
from triton_cases import kernel_cases, op_cases, reduce_cases
from triton_half_cases import HALF

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


Check = Callable[[str, Callable[[Any], list[str]]], None]


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """Are the cases of a kind right that belong to this variant of a test?"""

    def check(kind: str, names: Callable[[Any], list[str]]) -> None:
        wanted = [n for variant in chosen(request) for n in names(variant)]
        found = results("triton_interpreting.py", kind, *wanted)[kind]
        mine = names(next(iter(request.node.callspec.params.values())))
        assert mine and {n for n in mine if not n.startswith("to_bf16")} <= set(found)
        problems = [f"{n}: {found[n]}" for n in mine if found.get(n)]
        assert not problems, "\n".join(problems)

    return check


def named(variant: str) -> list[str]:
    return [variant]


@pytest.mark.sample(4)
@pytest.mark.parametrize("op", sorted({n.split("_")[0] if not n.startswith("to_") else n for n in op_cases()}))
def test_op(op: str, check: Check) -> None:
    check("ops", lambda op: [n for n in op_cases() if n == op or n.startswith(op + "_")])


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", sorted({n.split("_")[0] for n in reduce_cases()}))
def test_reduction(kind: str, check: Check) -> None:
    check("reductions", lambda kind: [n for n in reduce_cases() if n.startswith(kind + "_")])


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", kernel_cases())
def test_kernel(name: str, check: Check) -> None:
    check("kernels", named)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", HALF)
def test_cheap_form_for_half_precision(name: str, check: Check) -> None:
    check("half", named)


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", matmul_cases())
def test_product(name: str, check: Check) -> None:
    check("products", named)


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", [*VARIANCES, "length"])
def test_variance_in_one_pass(kind: str, check: Check) -> None:
    check("variances", lambda kind: [n for n in variance_cases() if n.startswith(kind)])


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", sorted({n.split(",")[0] for n in sum_cases()}))
def test_softmax_sum_in_one_pass(kind: str, check: Check) -> None:
    check("sums", lambda kind: [n for n in sum_cases() if n.startswith(kind)])
