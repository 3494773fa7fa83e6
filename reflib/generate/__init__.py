"""Stage 5, ``generate``: Loops to source text, Triton for GPUs and C++ for CPUs.

Strings of code are made here and in ``wrap`` only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..ir.loops import Loops
from ..ir.program import Arm, Program, Template, regions
from ..target import Target
from .kernel import Kernel

__all__ = ["Kernel", "generate"]


def generate(program: Program, target_of: Callable[[torch.device], Target]) -> dict[tuple[str, int], Kernel]:
    """One Kernel per arm of every Region, by (region name, arm number). Nothing is compiled."""
    kernels: dict[tuple[str, int], Kernel] = {}
    for node in regions(program.nodes):
        target = target_of(program.buffers[node.writes()[0]].device)
        for i, arm in enumerate(node.arms):
            name = node.name if i == 0 else f"{node.name}_general"
            kernels[node.name, i] = _generate_arm(name, arm, program, target)
    return kernels


def _generate_arm(name: str, arm: Arm, program: Program, target: Target) -> Kernel:
    aligned = tuple(a.what for a in arm.predicate if a.kind == "aligned")
    first = arm.parts[0]
    if isinstance(first, Template):
        from .matmul import generate_matmul

        return generate_matmul(name, first, arm, program.buffers, target, aligned)
    parts = tuple(p for p in arm.parts if isinstance(p, Loops))
    if target.is_gpu:
        from .triton import generate_triton

        return generate_triton(name, parts, arm.config, program.buffers, target, aligned)
    from .cpp import generate_cpp

    return generate_cpp(name, parts, arm.config, program.buffers)
