"""The user's own Triton kernels for a GPU that this machine may not have.

``torch.library.triton_op`` and, under Dynamo, ``kernel[grid](...)`` are captured as calls of
``triton_kernel_wrapper_functional``. What a kernel writes PyTorch finds in Triton's IR, for which it asks Triton's
driver for the GPU. Without one it takes every argument for written (each is copied, inputs are written back), and
Dynamo does not know the kernel at all. So while programs for a GPU are captured, and there is none, the driver is a
stand-in that knows a target, on which what a kernel writes does not depend.

How these calls go on from here. Lowered, each is an Extern with an effect: it is never dead, keeps its place, and what
it writes are copies that it makes itself and returns; the launch is PyTorch's, through Triton's launcher. To come, in
this order, each a whole step:

1. A rule that writes the copies as loop nests of their own (they fuse; one of a buffer that nobody else reads is
   dropped) and then a node with known reads and writes: a ``KernelNode`` whose part holds the kernel's function, its
   constants and the order of its arguments, so that ``plan`` places the storage and the copies go in place.
2. ``generate`` makes a ``Kernel`` of it: pointers, sizes by the grid's expressions, constants; ``compile_triton``
   compiles it with the signature that Triton's specialization would have (bools ``i1``, a None left out, 1 a constant).
   Then our launcher, packages for several architectures and exported C++ need nothing else.
3. ``@triton.autotune``'s configurations as Variants of that node, for the tuner; ``@triton.heuristics`` when compiling.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

CAPABILITY = 80  # of the stand-in: any GPU will do


@contextmanager
def triton_of_gpu() -> Iterator[None]:
    """Triton as if there was a GPU, for what captures; nothing where there is one, or nobody has imported Triton."""
    if torch.cuda.is_available() or "triton" not in sys.modules:
        yield
        return
    import triton
    from torch._higher_order_ops import triton_kernel_wrap
    from torch.utils import _triton

    with ExitStack() as stack:
        for owner, name, value in (
            (triton.runtime.driver, "_active", _Driver()),
            (_triton, "has_triton", lambda: True),
            (triton_kernel_wrap, "JITFunction", triton.runtime.JITFunction),  # torch has its own, without a GPU
            (triton_kernel_wrap, "Autotuner", triton.runtime.Autotuner),
        ):
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield


class _Driver:
    """Of a GPU that nothing is launched on."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)
