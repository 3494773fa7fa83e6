"""Launching Triton kernels through Triton itself, which compiles them at their first call. A launch costs tens of
microseconds: the compiler ring's own launcher, about one.

With TRITON_INTERPRET=1 Triton's interpreter runs the kernels, on tensors of a CPU.
"""

import ctypes
import linecache
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from ..generate.kernel import Kernel
from ..ir.program import Program
from ..options import Options


def bind(
    program: Program, kernels: Mapping[str, Kernel], options: Options, built: Mapping[Kernel, Future]
) -> tuple[dict[str, Callable[[], Any]], list[Future]]:
    """Per kernel name, a function that returns its launcher. Nothing is built before the first call."""
    return {k.name: partial(launcher, k) for k in kernels.values() if k.grid != 0}, []


def launcher(kernel: Kernel) -> Callable[..., None]:
    """``launch(stream, grid, *addresses, *sizes)``, all ints. ``stream`` must be the current one."""
    from triton import knobs

    pointer = _in_memory if knobs.runtime.interpret else _Pointer
    function = _function(kernel)
    dtypes = [dtype for _, dtype in kernel.buffers]

    def launch(stream: int | None, grid: int, *args: int) -> None:
        if grid > 0:
            pointers = [pointer(address, dtype) for address, dtype in zip(args, dtypes)]
            sizes = args[len(dtypes) :]
            function[(grid,)](*pointers, *sizes, num_warps=kernel.num_warps, num_stages=kernel.num_stages)

    return launch


def _function(kernel: Kernel) -> Any:
    """The kernel's function. Triton reads its source again, by the name of its file."""
    path = f"<reflib kernel {kernel.name} {hash(kernel.source):x}>"
    linecache.cache[path] = len(kernel.source), None, kernel.source.splitlines(keepends=True), path
    names: dict[str, Any] = {"__name__": kernel.name}
    exec(compile(kernel.source, path, "exec"), names)
    return names[kernel.name]


class _Pointer:
    """An address as Triton takes one: an object like a tensor."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype):
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def _in_memory(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one element at ``address``; the interpreter computes all other addresses from it."""
    if not address:
        return torch.empty(0, dtype=dtype)
    raw = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)
