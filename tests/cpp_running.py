"""Run hand-made Loops as C++ kernels, beside the interpreter. Many kernels make one library: one compiler start."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hand_loops import contiguous

from reflib.generate.cpp import HEADER, generate_cpp
from reflib.generate.kernel import Kernel
from reflib.ir.expr import Expr, expr
from reflib.ir.interpret import run_loops
from reflib.ir.loops import Loops
from reflib.ir.program import Buffer, Config
from reflib.toolchain import build_library
from reflib.wrap.native import load_library

CPU = torch.device("cpu")


def buffer(name: str, dtype: torch.dtype, *shape: int | Expr) -> Buffer:
    """A contiguous buffer."""
    return Buffer(name, dtype, CPU, tuple(map(expr, shape)), contiguous(shape))


class Case:
    """One kernel: its parts, the buffers they use, and what is in these before."""

    def __init__(self, parts: Loops | Sequence[Loops], tensors: dict[str, torch.Tensor], sizes=None):
        self.parts = (parts,) if isinstance(parts, Loops) else tuple(parts)
        self.tensors, self.sizes = tensors, dict(sizes or {})
        self.buffers = {n: buffer(n, t.dtype, *t.shape) for n, t in tensors.items()}
        self.kernel: Kernel | None = None

    def generate(self, name: str) -> Kernel:
        self.kernel = generate_cpp(name, self.parts, Config(), self.buffers)
        return self.kernel

    def run(self, library, threads: int = 2) -> dict[str, torch.Tensor]:
        """What the buffers hold afterwards. Raises AssertionError on a failed bounds check."""
        after, code = self.call(library, threads)
        assert code == 0, f"bounds check {code} failed"
        return after

    def call(self, library, threads: int = 2) -> tuple[dict[str, torch.Tensor], int]:
        k = self.kernel
        assert k is not None
        after = {n: t.clone() for n, t in self.tensors.items()}
        pointers = [after[b].data_ptr() for b, _ in k.buffers]
        sizes = [self.sizes[s.name] for s in k.symbols]
        return after, library.function(k.name, len(pointers) + len(sizes) + 1)(*pointers, *sizes, threads)

    def interpreted(self, double: bool = False) -> dict[str, torch.Tensor]:
        """What the interpreter makes of it."""
        memory = {n: t.clone().flatten() for n, t in self.tensors.items()}
        for p in self.parts:
            run_loops(p, memory, self.sizes)
        return {n: memory[n].view(t.shape) for n, t in self.tensors.items()}


def build(cases: dict[str, Case]):
    """One library of all ``cases``, whose names become the kernels'."""
    return load_library(build_library([c.generate(n).source for n, c in cases.items()], header=HEADER))
