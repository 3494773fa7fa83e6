"""A Triton kernel of the user's, as plain data: what an Extern calls that launches one.

Such an Extern's ``args`` are what the kernel is given, flat: Views (pointers) and Exprs (sizes first known at run
time). ``kwargs`` holds ``grid``, three sizes. It returns nothing; ``mutates`` names what the kernel writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ReflibError


class Launched:
    """What an Extern calls that launches one kernel: a ``UserKernel``, or a kernel of ours (``ir.flex``). ``how``: the
    reason of its launch, in ``explain(...).decisions``."""

    __slots__ = ()
    how = "launched as its node says"


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
    # NB: TorchInductor appends one pointwise node to a kernel that stores once, to a tensor that it does not read.
    how = "launched as its call says; what follows is a kernel of its own, because its text is not changed"

    @property
    def __name__(self) -> str:  # as other callables have it
        return self.function

    def __str__(self) -> str:
        return self.function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ReflibError: kernels are compiled, not called."""
        raise ReflibError(f"{self.function} is a Triton kernel: the interpreter of programs does not run it")
