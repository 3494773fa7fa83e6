"""`lab.has`: test for a capability, not for a device model."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from reflib.errors import LabError, ToolchainError

if TYPE_CHECKING:
    import torch


def has(capability: str) -> bool:
    """Does the device of this notebook have it? An unknown name is an error that lists them."""
    if capability not in CAPABILITIES:
        raise LabError(f"unknown capability {capability!r}; there are {', '.join(CAPABILITIES)}")
    return bool(CAPABILITIES[capability][1]())


def _device() -> str:
    from reflib.lab.session import current

    return current().device.type


def _on_cuda() -> bool:
    return _device() == "cuda"


def _arch_at_least(major: int, minor: int = 0) -> bool:
    """An NVIDIA GPU of this compute capability or a later one."""
    import torch

    from reflib.lab.session import current

    if not _on_cuda() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(current().device) >= (major, minor)


def _is_amd() -> bool:
    import torch

    return _on_cuda() and torch.version.hip is not None


@functools.cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _compiler() -> bool:
    from reflib.toolchain import find_compiler

    try:
        return bool(find_compiler())
    except ToolchainError:
        return False


def _can_compile() -> bool:
    """Both compilers need Triton on a GPU and a C++ compiler on a CPU."""
    return (_triton() and _triton_runs()) if _on_cuda() else _compiler()


def _inductor() -> bool:
    """REFLIB_LAB_PEERS=0 does without it, where time is short: what is recorded is shown."""
    return os.environ.get("REFLIB_LAB_PEERS") != "0" and _can_compile()


def _triton_runs() -> bool:
    return _is_amd() or _arch_at_least(7)


@functools.cache
def _reflib(device: str) -> bool:
    """Compile one tiny function; on failure, warn with the reason and return False."""
    import torch

    import reflib

    try:
        x = torch.arange(4.0, device=device)
        return torch.equal(reflib.compile(_probe)(x), _probe(x))
    except Exception as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(f"reflib cannot compile for {device} here: {why[0]}")
        return False


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# name -> (what it means, the test)
CAPABILITIES: dict[str, tuple[str, Callable[[], bool]]] = {
    "cuda": ("the notebook runs on a GPU", _on_cuda),
    "graphs": ("work can be captured in a CUDA graph", _on_cuda),
    "fp16": ("half precision in hardware", lambda: _is_amd() or _arch_at_least(5, 3)),
    "bf16": ("bfloat16 in hardware", lambda: _is_amd() or _arch_at_least(8)),
    "fp8": ("8-bit floats in hardware", lambda: _arch_at_least(8, 9)),
    "tensor_cores": (
        "matrix units that Triton's tl.dot can use",
        lambda: _is_amd() or _arch_at_least(8),
    ),
    "tma": ("the tensor memory accelerator", lambda: _arch_at_least(9)),
    "amd": ("an AMD GPU", _is_amd),
    "triton": ("Triton can be imported", _triton),
    "compiler": ("a C++ compiler is on the path", _compiler),
    "inductor": ("TorchInductor can compile for this device", _inductor),
    "reflib": (
        "reflib can compile for this device",
        lambda: _can_compile() and _reflib(_device()),
    ),
}
