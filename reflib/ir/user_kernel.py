"""A Triton kernel of the user's, as plain data: what an Extern calls that launches one.

Such an Extern's ``args`` are what the kernel is given, flat: Views (pointers) and Exprs (sizes first known at run
time). ``kwargs`` holds ``grid``, three sizes. It returns nothing; ``mutates`` names what the kernel writes.

**Appended.** What follows may be computed where the kernel stores (``fuse.launch_epilogues`` decides, ``generate``
prints it). Then ``kwargs`` also holds ``appended``: per Appended, the Views that its ``loops`` read and write, of which
its buffers' names are the numbers; and ``sizes``, the symbols that they use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ReflibError
from .loops import LoopNest


class Launched:
    """What an Extern calls that launches one kernel: a ``UserKernel``, or a kernel of ours (``ir.flex``). ``how``: the
    reason of its launch, in ``explain(...).decisions``."""

    __slots__ = ()
    how = "launched as its node says"
    __name__: str  # as other callables have it

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ReflibError: kernels are compiled, not called."""
        raise ReflibError(f"{self.__name__} is a Triton kernel: the interpreter of programs does not run it")


@dataclass(frozen=True, slots=True)
class Appended:
    """Computed instead of the kernel's only ``tl.store`` to ``argument``. ``loops``, over the elements ``x`` of a
    buffer of ``dtype`` in the order of its memory: ``acc`` is what would be stored there, rounded to it. The kernel is
    given 0 for the argument, so its places are values of ``x``."""

    argument: str
    dtype: torch.dtype
    loops: LoopNest


@dataclass(frozen=True, slots=True)
class UserKernel(Launched):
    """``function``: its name in ``source``, which is a module's text that needs Triton and no module of the user's.
    ``call``: per argument, pieces of Triton text; an int stands for that one of the Extern's ``args``.
    ``scratch``: bytes of global memory per program for descriptors. ``settings``: ``num_ctas`` (thread blocks that are
    launched together, as one program: a cluster), ``maxnreg`` (registers per thread), where the launch says."""

    function: str
    source: str
    call: tuple[tuple[str | int, ...], ...]
    num_warps: int = 4
    num_stages: int = 3
    scratch: int = 0
    settings: tuple[tuple[str, int], ...] = ()
    appended: tuple[Appended, ...] = ()

    @property
    def how(self) -> str:  # type: ignore[override]
        ops = dict.fromkeys(o.op.removeprefix("aten.") for a in self.appended for o in a.loops.origins)
        return "launched as its call says" + (f"; {', '.join(ops)} at its store" if ops else "")

    @property
    def __name__(self) -> str:  # type: ignore[override]
        return self.function

    def __str__(self) -> str:
        return self.function
