"""Formulas of eager's CUDA kernels, as far as a CPU can tell: that they are used, fuse, round once where a product is
added, and mean the op. That they have eager's bits, ``tests/gpu/test_cuda_formulas.py`` looks at."""

import importlib.util
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import reflib
from reflib.generate.compile_triton import compile_kernel
from reflib.ir.interpret import interpret
from reflib.ir.program import Extern
from reflib.target import parse_target
from tests.cuda_formula_cases import CASES, DTYPES, TWO, numbers

EAGER: dict[str, Any] = {"numerics": "eager", "target": "sm_90"}
triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


def _inputs(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return [numbers(dtype, "cpu", i, 4000).clamp(-9, 9) for i in range(2 if name in TWO else 1)]


@pytest.mark.each
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", CASES)
def test_they_mean_the_op(name: str, dtype: torch.dtype) -> None:
    """Of the program that a GPU's kernel is printed from."""
    args = _inputs(name, dtype)
    program = reflib.explain(lambda *t: CASES[name](*(-v for v in t)), *args, **EAGER).program
    subnormal = name == "x / 3e-39"
    assert any(isinstance(n, Extern) for n in program.nodes) == subnormal
    cpu = {name: replace(b, device=torch.device("cpu")) for name, b in program.buffers.items()}
    (got,) = interpret(replace(program, buffers=cpu), args)
    exact = CASES[name](*(-t.double() for t in args)).to(dtype).double()
    near = torch.isclose(got.double(), exact, rtol=3e-5 if dtype == torch.float32 else 0.03, atol=1e-5, equal_nan=True)
    assert got.dtype == dtype and near.double().mean() > (0.9999 if dtype == torch.float32 else 0.98)  # halves cancel


@triton
def test_only_what_is_marked_is_one_instruction() -> None:
    """Neither LLVM nor the assembler contracts what the formulas leave apart; quotients are IEEE's."""

    def count(fn: Any, *args: torch.Tensor) -> tuple[int, ...]:
        (kernel,) = {k.source.count("fallback"): k for k in reflib.explain(fn, *args, **EAGER).kernels}.values()
        ptx = compile_kernel(kernel, parse_target("sm_90")).ptx
        assert not re.search(r"\b((mul|add|sub)\.f32|div\.(full|approx)|sqrt\.approx)|rsqrt\.approx\.ftz", ptx)
        return tuple(len(re.findall(rf"\b{op}\.rn\.f32", ptx)) for op in ("fma", "div"))

    x = torch.rand(32)  # a thread has two numbers
    fmas, _ = count(torch.exp, x)
    assert count(torch.nn.functional.silu, x) == (fmas, 2)
    assert count(torch.ops.aten.silu_backward, x, x) == (fmas + 2, 2)
    assert count(torch.ops.aten.tanh_backward, x, x) == (2, 0)
    assert count(torch.ops.aten.tanh_backward, x.bfloat16(), x.bfloat16()) == (0, 0)
    assert count(lambda x, y: torch.add(x, y, alpha=0.3) * y + x, x, x) == (2, 0)
    assert count(lambda x: x / 3 + x.rsqrt(), x) == (0, 0)
    (kernel,) = reflib.explain(lambda x: x / 0.001, x, **EAGER).kernels
    assert "* 1000.0" in kernel.source  # (1 / 0.001 in float32 is another number)


@triton
def test_a_chain_is_one_kernel() -> None:
    """A gated layer's middle, forward and backward, in half precision: rounded between the ops."""

    def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * torch.sigmoid(y) / 3

    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    e = reflib.explain(gated, x, x, **EAGER)
    for stages in e.graphs:
        assert not any(isinstance(n, Extern) for n in stages.scheduled.nodes)
    assert [len(s.fused.program.nodes) for s in e.graphs] == [1, 1]


def test_an_erf_of_another_version_is_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(version: str | None) -> list[str]:
        monkeypatch.setattr(torch.version, "cuda", version)
        program = reflib.explain(torch.nn.functional.gelu, torch.ones(9), **EAGER).program
        return [n.reason for n in program.nodes if isinstance(n, Extern)]

    assert called("13.0") == called(None) == [] and called("13.9") == ["numerics: erf of eager's library"]
    monkeypatch.setattr(torch.version, "hip", "6.4")  # other functions, another compiler
    assert called(None) != []
