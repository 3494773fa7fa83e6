"""What the printed Python wrapper calls: allocation, views, streams, checks. Each is one thin function over PyTorch."""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ReflibError
from ..seams import Seam

_guards = torch._C._dynamo.guards

# Further names that printed wrappers use. "check_nan": (node, tensors that it wrote, those that it only read) -> None.
NAMES = Seam("wrap.NAMES")
_said: set[tuple[str, str]] = set()  # what was logged once: (op, size)


def _alloc(device: str) -> Callable[..., torch.Tensor]:
    """PyTorch's allocator without its argument parser, where this build has the short cut."""
    fast = getattr(_guards, f"_empty_strided_{device}", None)
    if fast is not None:
        return fast
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def expect(t: Any, size: tuple[int, ...], stride: tuple[int, ...], op: str = "a call") -> Any:
    """``t``, laid out as the captured graph said that a call's result would be: a copy if it is not."""
    if t is not None and (t.layout is not torch.strided or (t.shape == size and t.stride() == stride)):
        return t
    if (shape := getattr(t, "shape", None)) != size:
        raise ReflibError(f"{op} returned shape {shape and tuple(shape)} where its meta function promised {size}")
    if all(n == 1 or s == w for n, s, w in zip(size, t.stride(), stride)) or t.numel() == 0:
        return t.as_strided(size, stride)
    return torch.empty_strided(size, stride, dtype=t.dtype, device=t.device).copy_(t)


def flat(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        return [leaf for t in tree for leaf in flat(t)]
    return [tree]


def namespace() -> dict[str, Any]:
    """The names every printed wrapper may use."""
    names: dict[str, Any] = {
        "torch": torch,
        "alloc": torch.empty_strided,
        "alloc_cpu": _alloc("cpu"),
        "as_view": _guards._reinterpret_tensor,
        "expect": expect,
        "flat": flat,
        "threads": torch.get_num_threads,
        "int_max": max,
        "int_min": min,
    }
    if torch.cuda.is_available():
        names["alloc_cuda"] = _alloc("cuda")
        names["device_guard"] = torch.cuda._DeviceGuard
        names["current_stream"] = torch._C._cuda_getCurrentRawStream
    return names | dict(NAMES)
