"""Runs the Triton cases in Triton's interpreter: a program of its own, because the interpreter must be chosen before
Triton is imported.

    TRITON_INTERPRET=1 python tests/triton_interpreting.py [KIND [name ...]]

Prints one JSON object: by kind (all of ``KINDS``, or the named one), for each case, what is wrong with it, or nothing.
"""

import sys
from collections.abc import Callable
from typing import Any

import matmul_cases
import numpy as np
import torch
from interpreter import answer, told
from one_pass_cases import sum_cases, sum_problem, variance_cases, variance_problem
from prologue_cases import prologue_cases
from triton.runtime import interpreter
from triton_cases import Case, asserted_cases, kernel_cases, op_cases, reduce_cases
from triton_half_cases import half_cases, half_problem

from reflib.wrap.launch import launcher


def run(name: str, case: Case) -> dict[str, torch.Tensor]:
    """What the buffers hold after the kernel has run."""
    kernel = case.kernel(f"k_{name}")
    guards = {n: _guarded(t) for n, t in case.tensors.items()}
    after = {n: middle for n, (_, middle) in guards.items()}
    grid = int(kernel.grid.evaluate(case.sizes))
    args = [after[b].data_ptr() for b, _ in kernel.buffers] + [case.sizes[s.name] for s in kernel.symbols]
    with np.errstate(all="ignore"):
        launcher(kernel)(None, grid, *args)
    for n, (whole, _) in guards.items():
        edge = torch.cat([whole[:GUARD], whole[-GUARD:]])
        assert bool((edge == 1).all()), f"wrote outside {n}"
    return after


GUARD = 4096


def _guarded(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of a tensor in the middle of a larger one, whose ends must stay as they are."""
    count = t.untyped_storage().nbytes() // t.itemsize
    whole = torch.ones(count + 2 * GUARD, dtype=t.dtype)
    whole[GUARD : GUARD + count] = t.as_strided((count,), (1,), 0)
    return whole, whole.as_strided(t.shape, t.stride(), GUARD)


def problem(name: str, case: Case, got: dict[str, torch.Tensor]) -> str:
    want = case.expected()
    for b, w in want.items():
        g = got[b]
        if not w.dtype.is_floating_point:
            bad = g != w
            bad &= _defined(name, case, bad)
        else:
            eps = torch.finfo(w.dtype).eps
            near = (g.double() - w.double()).abs() <= 8 * eps * w.double().abs() + 3e-6 * w.dtype.itemsize / 4
            bad = ~((g == w) | (g.isnan() & w.isnan()) | near)
            bad &= _defined(name, case, bad)
        if bool(bad.any()):
            at = bad.flatten().nonzero().flatten()[:4].tolist()
            ins = {
                k: [t.flatten()[i].item() for i in at if i < t.numel()]
                for k, t in case.tensors.items()
                if k[:3] != "out"
            }
            values = f"got {g.flatten()[at].tolist()} want {w.flatten()[at].tolist()}"
            return f"{b}: {int(bad.sum())} of {bad.numel()} wrong; {values} from {ins}"
    return ""


def _defined(name: str, case: Case, like: torch.Tensor) -> torch.Tensor:
    """Where the op has one right answer (C leaves min / -1 and a float outside an integer's range open)."""
    ok = torch.ones_like(like)
    x = case.tensors.get("x0")
    if x is None or "out" not in case.tensors or x.shape != like.shape:
        return ok
    if name.startswith(("remainder", "fmod", "floordiv")) and x.dtype.is_floating_point:
        x1 = case.tensors["x1"]  # torch's own gives NaN where the quotient overflows
        ok &= ~((x / x1).isinf() & (x1 != 0) & x.isfinite())
    out = case.tensors["out"].dtype
    if name.startswith("cast") and x.dtype.is_floating_point and not out.is_floating_point and out != torch.bool:
        i = torch.iinfo(out)
        ok &= (x > max(i.min, -(2**31))) & (x < min(i.max, 2**31 - 256))
    return ok


def product_problem(name: str, case: Case, got: dict[str, torch.Tensor]) -> str:
    return matmul_cases.problem(case, got)


# cases, and what is wrong with (name, case, what its buffers hold afterwards)
KINDS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[..., str]]] = {
    "ops": (op_cases, problem),
    "reductions": (reduce_cases, problem),
    "kernels": (kernel_cases, problem),
    "asserted": (asserted_cases, problem),
    "half": (half_cases, lambda name, case, got: half_problem(name, case.tensors["x"], got["out"])),
    "products": (matmul_cases.matmul_cases, product_problem),
    "computed": (prologue_cases, product_problem),
    "variances": (variance_cases, variance_problem),
    "sums": (sum_cases, sum_problem),
}


def wrong_with(name: str, number: int, make: Callable[[], Case], problem: Callable[..., str]) -> str:
    case = make()
    return problem(name, case, run(f"case{number}", case))


def main(kinds: list[str], wanted: list[str]) -> dict[str, dict[str, str]]:
    if "asserted" in kinds:  # where kernels are compiled, ``compile_triton`` asks for it
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    return {
        kind: {
            name: told(wrong_with, name, number, make, KINDS[kind][1])
            for number, (name, make) in enumerate(KINDS[kind][0]().items())
            # (the interpreter cuts bfloat16 off instead of rounding)
            if (not wanted or name in wanted) and not name.startswith("to_bf16")
        }
        for kind in kinds
    }


if __name__ == "__main__":
    answer(main, sys.argv[1:2] or [*KINDS], sys.argv[2:])
