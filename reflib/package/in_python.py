"""What the wrapper in Python of a package calls, where there is no C extension that could call the one in C++."""

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import IndexOutOfRange, PackageError
from ..wrap import host_ctypes
from ..wrap.runtime import namespace
from ..wrap.zeros import zeros
from .manifest import KernelEntry, PackagedVariant

Facts = Callable[[KernelEntry], tuple]


def names(
    v: PackagedVariant, state: Mapping[str, torch.Tensor], device: torch.device, facts: Facts
) -> dict[str, Any]:  # fmt: skip
    """Tensors that the graph holds, kernels, and what is told the number of a device: 0 in the text is ``device``."""
    first, usual = device.index or 0, namespace()
    out: dict[str, Any] = {name.partition(".")[2]: state[name] for name, _ in v.constants}
    out |= {k.name: (_late if k.late else _kernel)(k, facts) for k in v.kernels}
    out["only_in_c"] = _only_in_c
    out["zeros"] = lambda number, stream, count: zeros(number + first, stream, count)
    if device.type == "cuda":
        out["device_guard"] = lambda number: usual["device_guard"](number + first)
        out["current_stream"] = lambda number: usual["current_stream"](number + first)
    return out


def _only_in_c(op: str, symbol: str) -> None:
    remedy = "register it, or install a C compiler and Python's headers"
    raise PackageError(f"{op} is not registered here, and nothing can call its C function {symbol}: {remedy}")


def _kernel(k: KernelEntry, facts: Facts) -> Callable[..., Any]:
    found = facts(k)
    if len(found) != 2:
        return host_ctypes.launcher(k.name, found, None)
    function = ctypes.CFUNCTYPE(ctypes.c_int)(found[0])

    def call(*args: int) -> None:
        if function(*map(ctypes.c_int64, args)) and k.checked:
            what = f"{k.name}{k.where}"
            raise IndexOutOfRange(f"index out of range in kernel {what}: an index is outside the tensor it indexes")

    return call


def _late(k: KernelEntry, facts: Facts) -> Callable[..., Any]:
    """It is loaded at its first call."""
    made = functools.cache(lambda: _kernel(k, facts))
    return lambda *args: made()(*args)
