"""What the printed Python wrapper calls: allocation, views, streams, checks. Each is one thin function over PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ArgumentError, ReflibError
from ..logs import get as logger

_guards = torch._C._dynamo.guards


def _alloc(device: str) -> Callable[..., torch.Tensor]:
    """PyTorch's allocator without its argument parser, where this build has the short cut."""
    fast = getattr(_guards, f"_empty_strided_{device}", None)
    if fast is not None:
        return fast
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def expect(t: Any, size: tuple[int, ...], stride: tuple[int, ...], any_shape: bool = False) -> Any:
    """``t``, laid out as the captured graph said a call's result would be; a copy if an operator promised otherwise.
    ``any_shape``: no kernel relies on it."""
    if t.layout is not torch.strided or (t.shape == size and t.stride() == stride):
        return t
    if t.shape != size:
        if any_shape:
            return t
        raise ReflibError(f"an operator returned shape {tuple(t.shape)} where its meta function promised {size}")
    if all(n == 1 or s == w for n, s, w in zip(size, t.stride(), stride)) or t.numel() == 0:
        return t.as_strided(size, stride)
    return torch.empty_strided(size, stride, dtype=t.dtype, device=t.device).copy_(t)


def expect_sizes(holds: bool, what: str, **sizes: int) -> None:
    """What must hold of the sizes of the arguments, or the graph is not for them."""
    if not holds:
        here = ", ".join(f"{name} = {n}" for name, n in sizes.items())
        raise ArgumentError(f"it was exported where {what} holds of the arguments' sizes; here {here}")


def has_memory(t: torch.Tensor) -> bool:
    """Are its numbers in memory? Not those of a fake tensor, of a subclass that holds others, of one that a transform
    (torch.vmap, torch.func) carries along, or of one that is known to be zero."""
    if is_fake(t) or is_traceable_wrapper_subclass(t):
        return False
    transformed = torch._C._functorch.is_functorch_wrapped_tensor(t) or torch._is_functional_tensor(t)
    return not transformed and not t._is_zerotensor()


def flat(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        return [leaf for t in tree for leaf in flat(t)]
    return [tree]


def check_nan(t: torch.Tensor, buffer: str, kernel: str) -> None:
    if t.is_floating_point() and bool(torch.isnan(t).any()):
        raise ReflibError(f"check_nan: kernel {kernel} wrote NaN into {buffer} {tuple(t.shape)}")


_said: set[tuple[str, str]] = set()


def outside(what: str, size: int, least: int, most: int, op: str) -> None:
    """Log, once for each thing and op, that a size is outside the tuned ranges."""
    if (op, what) not in _said:
        _said.add((op, what))
        message = "%s = %d is outside the sizes that were tuned, %d to %d: the nearest range serves"
        logger("choose").warning(message, what, size, least, most)


class Zeros:
    """int32 words (counters, parts of split-K) that kernels find at zero and leave at zero, so that no call has to
    clear them.

    Calls on one stream run one after another and may share them; calls captured in a CUDA graph may run whenever the
    graph is replayed, so each capture has words of its own, never given to another.
    """

    CAPTURED = 1 << 20  # words set aside for captures, or these many calls' worth:
    CALLS = 8
    WHOLE = 1024  # what is given out is a multiple of this, so that all of it is aligned

    def __init__(self) -> None:
        self.of: dict[tuple[int, int, int], torch.Tensor] = {}
        self.reserve: dict[int, torch.Tensor] = {}

    def __call__(self, device: int, stream: int, count: int) -> torch.Tensor:
        capture = capture_id(stream) if torch._C._cuda_isCurrentStreamCapturing() else 0
        have = self.of.get((device, stream, capture))
        if have is not None and have.numel() >= count and (capture or self.reserve[device].numel() >= 2 * count):
            return have
        return self._more(device, stream, capture, max(1, -(-count // self.WHOLE)) * self.WHOLE)

    def _more(self, device: int, stream: int, capture: int, count: int) -> torch.Tensor:
        """During a capture nothing can be cleared for good, so a call before it sets aside what captures will want."""
        where = torch.device("cuda", device)
        reserve, out = self.reserve.get(device), self.of.get((device, stream, capture))
        if not capture:
            if reserve is None or reserve.numel() < 2 * count:
                most = max(self.CAPTURED, self.CALLS * count)
                self.reserve[device] = torch.zeros(most, dtype=torch.int32, device=where)
            if out is None or out.numel() < count:
                out = torch.zeros(count, dtype=torch.int32, device=where)
            torch.cuda.current_stream(where).synchronize()  # another stream may take from the reserve
        else:
            if reserve is None or reserve.numel() < count:  # no call before the capture: cleared at every replay
                return torch.zeros(count, dtype=torch.int32, device=where)
            out, self.reserve[device] = reserve[:count], reserve[count:]
        self.of[device, stream, capture] = out
        return out

    @contextmanager
    def for_a_while(self) -> Iterator[None]:
        """Graphs captured inside are gone at its end, and their words with them."""
        before = set(self.of)
        try:
            yield
        finally:
            for key in [k for k in self.of if k not in before and k[2]]:
                del self.of[key]


zeros = Zeros()


def capture_id(stream: int) -> int:
    """A number for the capture that ``stream`` is part of."""
    import ctypes

    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    driver = ctypes.CDLL("libcuda.so.1")
    found = driver.cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    return -1 if found else number.value


def namespace() -> dict[str, Any]:
    """The names every printed wrapper may use."""
    names: dict[str, Any] = {
        "torch": torch,
        "alloc": torch.empty_strided,
        "alloc_cpu": _alloc("cpu"),
        "as_view": _guards._reinterpret_tensor,
        "expect": expect,
        "expect_sizes": expect_sizes,
        "flat": flat,
        "check_nan": check_nan,
        "threads": torch.get_num_threads,
        "outside": outside,
        "zeros": zeros,
        "int_max": max,
        "int_min": min,
    }
    if torch.cuda.is_available():
        names["alloc_cuda"] = _alloc("cuda")
        names["device_guard"] = torch.cuda._DeviceGuard
        names["current_stream"] = torch._C._cuda_getCurrentRawStream
    return names
