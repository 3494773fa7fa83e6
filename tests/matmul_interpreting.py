"""Runs the matrix products of ``matmul_cases`` in Triton's interpreter: a program of its own, because the interpreter
must be chosen before Triton is imported.

    TRITON_INTERPRET=1 python tests/matmul_interpreting.py [name ...]

Prints one JSON object: for each case, what is wrong with it, or nothing.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import traceback
from typing import Any

import numpy as np
import torch
from matmul_cases import matmul_cases, problem
from triton_interpreting import run

from reflib.lab.triton_child import complete_the_interpreter


def multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as the 16 bits it is; its product multiplies these."""
    import triton.language as tl
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (
            (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data
            for x in (a, b)
        )
        out = np.matmul(left, right, dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(out, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


def read_for_inline_assembly() -> None:
    """The only one there is waits for words. Here programs run one after another, in the order of their numbers, and
    those that wait come last."""
    import triton.language as tl

    def read(asm: str, constraints: str, args: list[Any], **_: Any) -> Any:
        assert "ld.relaxed" in asm, "unknown assembly"
        words = tl.load(args[0])
        assert (words.handle.data != 0).all(), "a part is missing"
        return words

    tl.inline_asm_elementwise = read


def no_early_launch() -> None:
    cuda = importlib.import_module("triton.language.extra.cuda")
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None


def main(wanted: list[str]) -> dict[str, str]:
    complete_the_interpreter()
    multiply_bfloat16()
    read_for_inline_assembly()
    no_early_launch()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, make) in enumerate(matmul_cases().items()):
            if wanted and name not in wanted:
                continue
            try:
                case = make()
                results[name] = problem(case, run(f"case{number}", case, folder))  # type: ignore[arg-type]
            except Exception as e:
                results[name] = f"{type(e).__name__}: {e}\n" + "".join(traceback.format_exc().splitlines(True)[-6:])
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1:])))
