"""Run hand-made LoopNests as C++ kernels, beside the interpreter. Many kernels make one library: one compiler start."""

from dataclasses import dataclass
from typing import Any

import torch
import triton_cases
from triton_cases import storage

from reflib.generate.cpp import HEADER, generate_cpp
from reflib.generate.kernel import Kernel
from reflib.ir.loops import LoopNest
from reflib.ir.program import Config
from reflib.toolchain import build_library
from reflib.wrap.native import load_library


@dataclass
class Case(triton_cases.Case):
    """A case as a C++ kernel."""

    made: Kernel | None = None

    def generate(self, name: str) -> Kernel:
        self.made = generate_cpp(name, self.parts, Config(), self.buffers)
        return self.made

    def run(self, library: Any, threads: int = 2) -> dict[str, torch.Tensor]:
        """What the buffers hold afterwards. Raises AssertionError on a failed bounds check."""
        after, code = self.call(library, threads)
        assert code == 0, f"bounds check {code} failed"
        return after

    def call(self, library: Any, threads: int = 2) -> tuple[dict[str, torch.Tensor], int]:
        k = self.made
        assert k is not None
        after = {n: storage(t) for n, t in self.tensors.items()}
        pointers = [after[b].data_ptr() for b, _ in k.buffers]
        sizes = [self.sizes[s.name] for s in k.symbols]
        code = library.function(k.name, len(pointers) + len(sizes) + 1)(*pointers, *sizes, threads)
        return {n: after[n].as_strided(t.shape, t.stride()) for n, t in self.tensors.items()}, code


def as_cpp(case: triton_cases.Case) -> Case:
    return Case(case.parts, case.tensors, case.sizes, shapes=case.shapes)


def one(loops: LoopNest, tensors: dict[str, torch.Tensor]) -> Case:
    return Case((loops,), tensors)


def build(cases: dict[str, Case]) -> Any:
    """One library of all ``cases``, whose names become the kernels'."""
    return load_library(build_library([c.generate(n).source for n, c in cases.items()], header=HEADER))
