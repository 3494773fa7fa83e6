"""What ``generate`` returns: source text and how to call it. Plain data; nothing is compiled here."""

from dataclasses import dataclass

import torch

from ..ir.expr import Expr, Sym


@dataclass(frozen=True)
class Kernel:
    """One generated kernel.

    name: unique within the program, readable (``k3_mul_add_gelu``), the function's name in ``source``.
    language: ``triton`` or ``cpp``.
    source: complete text of the kernel (Triton: a module with the ``@triton.jit`` function ``name`` and its helpers;
        C++: one ``extern "C"`` function, which follows ``generate.cpp.HEADER`` in one library with the others).
    buffers: (buffer name, dtype) of the pointer arguments, in order.
    symbols: the size symbols passed after the pointers (int64 on CPU; int32 or int64 by ``index_type`` on a GPU).
    grid: programs to launch (GPU; 1-D), an expression in the symbols. CPU: 1.
    num_warps, num_stages: launch parameters (GPU). settings: more options of Triton's, by name.
    aligned: pointer arguments (by position) that the code assumes are 16-byte aligned.
    scratch: bytes of global memory per thread block for Triton's descriptors. If not 0, a launch takes another argument
        after the sizes: the address of ``scratch`` times the grid's bytes (a multiple of 128).
    pdl: its code waits for the kernel before it, so it may be launched early (CUDA's programmatic dependent launch).
    exact: no multiplication is contracted with an addition, and numbers below 2^-126 are kept as they are.
    keep_loops: the assembler must not unroll loops: that takes ten times as long, for code that is no faster.
    """

    name: str
    language: str
    source: str
    buffers: tuple[tuple[str, torch.dtype], ...]
    symbols: tuple[Sym, ...]
    grid: Expr
    num_warps: int = 4
    num_stages: int = 1
    index_type: str = "int64"
    aligned: tuple[int, ...] = ()
    scratch: int = 0
    pdl: bool = False
    exact: bool = False
    keep_loops: bool = False
    settings: tuple[tuple[str, int], ...] = ()
