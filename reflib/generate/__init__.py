"""Stage 5, ``generate``: Loops to source text, Triton for GPUs and C++ for CPUs.

Strings of code are made here and in ``wrap`` only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..ir.program import Arm, Program, Region
from ..target import Target
from .kernel import Kernel

__all__ = ["Kernel", "generate"]


def generate(program: Program, target_of: Callable[[torch.device], Target]) -> dict[tuple[str, int], Kernel]:
    """One Kernel per arm of every Region, by (region name, arm number). Nothing is compiled."""
    kernels: dict[tuple[str, int], Kernel] = {}
    for node in program.nodes:
        if isinstance(node, Region):
            target = target_of(program.buffers[node.writes()[0]].device)
            for i, arm in enumerate(node.arms):
                name = node.name if i == 0 else f"{node.name}_general"
                kernels[node.name, i] = _generate_arm(name, arm, program, target)
    return kernels


def _generate_arm(name: str, arm: Arm, program: Program, target: Target) -> Kernel:
    if target.is_gpu:
        from .triton import generate_triton

        aligned = tuple(a.what for a in arm.predicate if a.kind == "aligned")
        return generate_triton(name, arm.parts, arm.config, program.buffers, target, aligned)
    from .cpp import generate_cpp

    return generate_cpp(name, arm.parts, arm.config, program.buffers)
