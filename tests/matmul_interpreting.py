"""Runs the matrix products of ``matmul_cases`` in Triton's interpreter: a program of its own, because the interpreter
must be chosen before Triton is imported.

    TRITON_INTERPRET=1 python tests/matmul_interpreting.py [name ...]

Prints one JSON object: for each case, what is wrong with it, or nothing.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matmul_cases import matmul_cases, problem
from triton_interpreting import run

from reflib.lab.triton_child import complete_the_interpreter


def multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as the 16 bits it is; its product multiplies these."""
    import triton.language as tl

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (
            (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data
            for x in (a, b)
        )
        out = np.matmul(left, right, dtype=d.data.dtype) + d.data
        return interpreter().TensorHandle(out, d.dtype.scalar)

    interpreter().InterpreterBuilder.create_dot = dot


class Programs:
    """One launch's programs, each run once. The interpreter runs one after another; where one waits for words that a
    later one will write, that one is run then and there."""

    def __init__(self, count: int, run: Callable[[], None]):
        self.started, self.count, self.run = 0, count, run

    def next(self) -> None:
        builder = interpreter().interpreter_builder
        before, mine = getattr(builder, "grid_idx", None), self.started
        self.started += 1
        builder.set_grid_idx(mine, 0, 0)
        self.run()
        builder.grid_idx = before

    def read(self, asm: str, constraints: str, args: list[Any], **_: Any) -> Any:
        """In place of the only inline assembly there is, which waits for words that are not zero."""
        import triton.language as tl

        assert "ld.relaxed" in asm, "unknown assembly"
        words = tl.load(args[0])
        while not (words.handle.data != 0).all():
            assert self.started < self.count, "a part is missing"
            self.next()
            words = tl.load(args[0])
        return words


def interpreter() -> Any:
    return importlib.import_module("triton.runtime.interpreter")


def programs_that_wait() -> None:
    import triton.language as tl

    def launch(self: Any, *args: Any) -> None:
        given, _ = self._init_args_hst(args, {})
        scope = interpreter()._patch_lang(self.fn)
        try:
            named = inspect.getcallargs(self.fn, *given).items()
            values = {k: v if k in self.constexprs else interpreter()._implicit_cvt(v) for k, v in named}
            interpreter().interpreter_builder.set_grid_dim(*self.grid, 1, 1)
            programs = Programs(self.grid[0], lambda: self.fn(**values))
            tl.inline_asm_elementwise = programs.read
            while programs.started < programs.count:
                programs.next()
        finally:
            scope.restore()
        self._restore_args_dev(args, given, {}, {})

    interpreter().GridExecutor.__call__ = launch


def no_early_launch() -> None:
    cuda = importlib.import_module("triton.language.extra.cuda")
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None


def main(wanted: list[str]) -> dict[str, str]:
    complete_the_interpreter()
    multiply_bfloat16()
    programs_that_wait()
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
