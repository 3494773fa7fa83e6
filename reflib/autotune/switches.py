"""torch's settings that change what its kernels compute, and how fast: read here, set in the process that measures."""

import contextlib
from typing import Any

import torch

# Attributes of torch.backends. One that this torch lacks, or refuses because it was set by its older name, is left out.
_ATTRIBUTES = (
    ("cuda.matmul", "fp32_precision"),
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction"),
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction"),
    ("cuda.matmul", "allow_fp16_accumulation"),
    ("cudnn.conv", "fp32_precision"),
    ("cudnn", "benchmark"),
    ("cudnn", "deterministic"),
    ("mkldnn.matmul", "fp32_precision"),
)
_OLDER_NAMES = (("cuda.matmul", "allow_tf32"), ("cudnn", "allow_tf32"))  # read only: setting both is an error


def read() -> dict[str, Any]:
    """All of them, as plain data."""
    found = _values(_ATTRIBUTES)
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    found["warn_only"] = torch.is_deterministic_algorithms_warn_only_enabled()
    found["threads"] = torch.get_num_threads()
    return found


def of_math() -> dict[str, Any]:
    """What a GPU's decisions depend on: ``read`` without the number of threads, and the settings by older names."""
    found = read() | _values(_OLDER_NAMES)
    with contextlib.suppress(RuntimeError):  # torch refuses to read it once the newer setting was made
        found["float32"] = torch.get_float32_matmul_precision()
    with contextlib.suppress(AttributeError, RuntimeError):
        found["blas"] = str(torch.backends.cuda.preferred_blas_library())
    del found["threads"]
    return found


def write(found: dict[str, Any]) -> None:
    """Set those that differ in this process."""
    now = read()
    for place, name in _ATTRIBUTES:
        key = f"{place}.{name}"
        if key in found and found[key] != now.get(key):
            with contextlib.suppress(AttributeError, RuntimeError):
                setattr(_part(place), name, found[key])
    if (found["deterministic"], found["warn_only"]) != (now["deterministic"], now["warn_only"]):
        torch.use_deterministic_algorithms(found["deterministic"], warn_only=found["warn_only"])
    if found["threads"] != now["threads"]:
        torch.set_num_threads(found["threads"])


def _values(attributes: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    found = {}
    for place, name in attributes:
        with contextlib.suppress(AttributeError, RuntimeError):
            value = getattr(_part(place), name)
            if isinstance(value, (bool, int, str)):
                found[f"{place}.{name}"] = value
    return found


def _part(place: str) -> Any:
    part: Any = torch.backends
    for name in place.split("."):
        part = getattr(part, name)
    return part
