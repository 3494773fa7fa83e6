"""Launching compiled kernels on CUDA, cheaply.

Triton's own ``kernel[grid](...)`` spends tens of microseconds per launch on checking its arguments. Here a kernel is a
C object that copies its arguments into an array and calls the driver: about a microsecond from Python. ::

    add = load(binary)                         # a compile_triton.Binary
    add(stream, grid, *pointers, *sizes)       # ints; returns at once

``facts`` has what a launch takes beyond these. Python wrappers call ``load``'s result, C++ wrappers launch from C
(``host_graph.c``), exported programs without Python (``package/cpp/gpu.cpp``): all end in ``cuda_driver.h``, which
declares the driver's functions by hand. ``REFLIB_LIBCUDA`` names another driver library (tests use a stand-in).
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import DeviceError
from ..generate.compile_triton import Binary
from . import native

Facts = tuple[bytes, str, int, int, int, int]


def load(binary: Binary, device: int | None = None) -> Callable[..., None]:
    """``binary`` as ``launch(stream, grid, *pointers, *sizes)``. A binary with ``scratch`` takes one more pointer at
    the end, to grid * scratch bytes, which concurrent launches on two streams must not share.

    ``device``: load into this GPU's primary context now; None: at the first launch, into the context current then.
    Launching a grid of 0 does nothing. Raises DeviceError: no driver, a wrong architecture, the driver's own errors.
    """
    nargs = binary.pointers + binary.symbols + bool(binary.scratch)
    return native.extension().launcher(binary.name, facts(binary, -1 if device is None else device), nargs)


def facts(binary: Binary, device: int) -> Facts:
    """What loads and launches ``binary``: (image, entry, shared bytes, threads, early, device; -1: the current one).
    Raises DeviceError for a binary that cannot be launched here."""
    if binary.arch.startswith("gfx"):
        raise DeviceError(
            f"kernel {binary.name} is compiled for {binary.arch}: "
            "reflib compiles for AMD GPUs but cannot launch there yet"
        )
    threads = binary.num_warps * binary.warp
    return binary.image, binary.entry, binary.shared, threads, int(binary.pdl), device
