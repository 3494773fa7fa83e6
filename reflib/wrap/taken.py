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
    p.put(f"if references({step.reuse}) == UNSHARED and owned({step.reuse}):")
    p._block((Alloc(step.buffer, step.reuse),))
    p.put("else:")
    p._block((Alloc(step.buffer),))


def owned(t: torch.Tensor) -> bool:
    """Does nothing but ``t`` refer to its memory, all of it, which an allocator made, and to ``t`` nothing in C++? (A
    hook may have brought it here: from an array of NumPy's, which holds the memory too, or with a history, which a
    gradient in its place would have.)"""
    storage = t.untyped_storage()  # (has an object in Python from now on, which it refers to itself)
    alone = _uses(storage._cdata) == 2 and references(storage) == UNSHARED + 1 and t._use_count() == 1  # type: ignore[attr-defined]
    whole = storage.nbytes() == t.nbytes and storage.resizable() and t.data_ptr() % 16 == 0
    return alone and whole and not t.requires_grad


def _unshared() -> int:
    t = object()
    return references(t)


UNSHARED = _unshared()  # of what is in one local variable, and nowhere else
