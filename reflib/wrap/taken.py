"""The step that takes over an input's storage (``plan.taken``) as text in Python, and what that text asks."""

import sys

import torch

from ..plan.steps import Alloc
from ..plan.taken import Take
from .python import PythonPrinter

_uses = torch._C._storage_Use_Count  # type: ignore[attr-defined]
# Called by the text itself: how many references a Python function's argument has depends on who evaluates frames.
references = sys.getrefcount


def take_in_python(p: PythonPrinter, step: Take) -> None:
    ask = f"if references({step.reuse}) == UNSHARED and owned({step.reuse}):"
    for line, alloc in ((ask, step), ("else:", Alloc(step.buffer))):
        p.put(line)
        p.pad += "    "
        p._alloc(alloc)
        p.pad = p.pad[:-4]


def owned(t: torch.Tensor) -> bool:
    """Does no tensor but ``t`` refer to its memory (which begins as allocations do), and to ``t`` nothing in C++?"""
    uses = _uses(t.untyped_storage()._cdata)  # (one of them is this)
    return uses == 2 and t._use_count() == 1 and t.data_ptr() % 16 == 0  # type: ignore[attr-defined]


def _unshared() -> int:
    t = object()
    return references(t)


UNSHARED = _unshared()  # of what is in one local variable, and nowhere else
