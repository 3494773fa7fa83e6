"""How much memory eager takes for the same call, op by op.

Without a GPU it is computed: the function runs once more on fake tensors, which have sizes and no numbers (on copies,
if it needs numbers), and every storage that an op makes counts from then until its last tensor is gone. What a kernel
allocates for itself is not seen.
With its tensors on a GPU the function runs for real, on copies, and the caching allocator is asked after each op.
"""

import copy
import linecache
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..capture.advice import first_lines
from ..errors import ReflibError

_BY_NUMBERS = ("cond", "while_loop", "scan", "map_impl", "associative_scan")
_TORCH, _OURS = (os.path.join(os.path.dirname(f), "") for f in (torch.__file__, os.path.dirname(__file__)))


@dataclass(frozen=True, slots=True)
class EagerMoment:
    """One op of eager. ``bytes``: in what the call allocated, while the op runs; ``source``: the user's line ("" in a
    backward, which no line calls)."""

    op: str
    bytes: int
    source: str
    backward: bool


@dataclass(frozen=True)
class Eager:
    """``how``: "computed" or "allocator"; else why eager's memory is not known, without moments."""

    moments: tuple[EagerMoment, ...]
    how: str

    def peak_bytes(self, backward: bool | None = None) -> int | None:
        """Of the forward, the backward, or (None) both; None if it is not known."""
        return max((m.bytes for m in self.moments if backward in (None, m.backward)), default=None)


def eager_memory(
    fn: Any, args: Any, kwargs: dict[str, Any], run_backward: Callable[..., None] | None, on_gpu: bool
) -> Eager:
    """Runs ``fn`` (not the caller's: its copy), and its backward by ``run_backward(fn, args, kwargs, result)``."""
    why = ""
    for real in (True,) if on_gpu else (False, True):
        try:
            with torch.random.fork_rng(enabled=not on_gpu):
                moments = _moments(fn, args, kwargs, run_backward, on_gpu, real)
            return Eager(tuple(moments), "allocator" if on_gpu else "computed")
        except Exception as e:
            why = why or first_lines(e)
    return Eager((), f"eager's memory is not known: {why}")


def _moments(
    fn: Any, args: Any, kwargs: dict[str, Any], run_backward: Callable[..., None] | None, on_gpu: bool, real: bool
) -> list[EagerMoment]:
    with copied(fn, args, kwargs, real) as (under, own, (own_args, own_kwargs)):
        state = tree_leaves((own_args, own_kwargs))
        if isinstance(own, torch.nn.Module):
            state += [*own.parameters(), *own.buffers()]
        watch = _Watch([t for t in state if isinstance(t, torch.Tensor)], on_gpu)

        def run() -> None:
            with torch.set_grad_enabled(run_backward is not None), watch:
                result = own(*own_args, **own_kwargs)
                watch.backward = True
                if run_backward is not None:
                    run_backward(own, own_args, own_kwargs, result)

        under(run)()
    return watch.moments


@contextmanager
def copied(fn: Any, args: Any, kwargs: dict[str, Any], real: bool) -> Iterator[tuple[Any, Any, Any]]:
    """(what to run a function under, ``fn``, its arguments): copies, ``real`` ones or tensors without numbers."""
    from ..capture.export import with_fakes

    if not real:
        with with_fakes(fn, (args, kwargs), None, False) as found:
            yield found
        return

    def cloned(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    call = tree_map_only(torch.Tensor, cloned, (args, kwargs))
    yield (lambda run: run), copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn, call


class _Watch(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, state: list[torch.Tensor], on_gpu: bool):
        super().__init__()
        self.on_gpu, self.backward = on_gpu, False
        self.moments: list[EagerMoment] = []
        self.state = state  # keeps them alive: so that no other storage gets the number of one of theirs
        self.known = {t.untyped_storage()._cdata for t in state}
        self.bytes = 0
        self.base = torch.cuda.memory_allocated() if on_gpu else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.on_gpu and getattr(func, "_name", "") in _BY_NUMBERS:
            raise ReflibError(f"how {func._name} goes on depends on numbers, and tensors have none here")
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self._count(t)
        now = torch.cuda.max_memory_allocated() - self.base if self.on_gpu else self.bytes
        if func.namespace != "prim":  # (questions such as a fake tensor's device)
            self.moments.append(EagerMoment(str(func), now, "" if self.backward else _line(), self.backward))
        return result

    def _count(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.bytes += size
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size


def _line() -> str:
    """As ``lower.lower.origin`` has it: the innermost line that is neither torch's nor ours."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        path = frame.f_code.co_filename
        if not path.startswith((_TORCH, _OURS, "<")) and "contextlib" not in path:
            file = "cell" if "ipykernel_" in path else os.path.basename(path)
            code = linecache.getline(path, line).strip()
            return f"{file}:{line} in {frame.f_code.co_name}: {code}".rstrip(": ")
    return ""
