"""Stage 7, ``generate``: scheduled kernels become source text, Triton for GPUs and C++ for CPUs.

Only this stage and ``wrap`` make strings of code.
"""

from collections.abc import Callable, Collection

import torch

from ..errors import GenerateError
from ..ir.loops import LoopNest
from ..ir.program import Buffer, KernelNode, Program, Variant, kernel_variants
from ..seams import Seam
from ..target import Target
from .kernel import Kernel

__all__ = ["PRINTERS", "Kernel", "generate"]


def _triton(node: KernelNode, buffers: dict[str, Buffer], target: Target, aligned: Collection[str]) -> Kernel:
    from .triton import generate_triton

    parts = tuple(p for p in node.parts if isinstance(p, LoopNest))
    return generate_triton(node.name, parts, node.config, buffers, target, aligned)


# (KernelNode, buffers, target, aligned buffers) -> Kernel, by the class of a part that is no LoopNest or of its target,
# else by the kind of device. A CPU without a printer: Triton's interpreter runs a GPU's (``pipeline.targets``).
PRINTERS = Seam("generate.PRINTERS", {"cuda": _triton, "hip": _triton})


def generate(program: Program, target_of: Callable[[torch.device], Target]) -> dict[str, Kernel]:
    """One Kernel per KernelNode, by its name. Nothing is compiled."""
    kernels: dict[str, Kernel] = {}
    for node in kernel_variants(program.nodes):
        target = target_of(program.buffers[node.outputs[0]].device)
        for v in node.variants:
            kernels[v.kernel.name] = _generate(v, program, target)
    return kernels


def _generate(variant: Variant, program: Program, target: Target) -> Kernel:
    aligned = tuple(a.what for a in variant.predicate if a.kind == "aligned")
    node = variant.kernel
    kind = type(getattr(node.parts[0], "target", node.parts[0])).__name__
    kind = kind if kind in PRINTERS else target.kind
    if kind not in PRINTERS:
        raise GenerateError(f"kernel {node.name}: nothing prints code for {kind}")
    return PRINTERS[kind](node, program.buffers, target, aligned)
