"""The step that takes over an input's storage (``plan.taken``) as text in Python, and what that text asks."""

import sys

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..plan.steps import Alloc
from ..plan.taken import Take
from .python import PythonPrinter

_uses = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def take_in_python(p: PythonPrinter, step: Take) -> None:
    for line, alloc in ((f"if references({step.reuse}) == UNSHARED:", step), ("else:", Alloc(step.buffer))):
        p.put(line)
        p.pad += "    "
        p._alloc(alloc)
        p.pad = p.pad[:-4]


def references(t: torch.Tensor) -> tuple[int, int, int, int]:
    """How often a tensor is referred to in Python, in C++, and its storage is; where it begins, modulo 16 bytes."""
    uses = _uses(t.untyped_storage()._cdata)
    return sys.getrefcount(t), t._use_count(), uses, t.data_ptr() % 16  # type: ignore[attr-defined]


def _unshared() -> tuple[int, int, int, int]:
    with _disable_current_modes():  # (while a graph is captured)
        t = torch.empty(1)
    return references(t)


UNSHARED = _unshared()  # in one local variable of the caller, and nowhere else
