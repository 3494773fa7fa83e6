"""Steps that the core does not have, as text in Python and C++: a loop (``plan.regions.Repeat``) and an arena whose
buffers are addresses (``plan.arena``); in Python an input's storage that is taken over (``plan.taken``)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from ..plan.arena import Arena
from ..plan.regions import Repeat
from ..plan.steps import Alloc
from ..plan.taken import Take
from .python import PythonPrinter, _condition, py

if TYPE_CHECKING:
    from .cpp import CppPrinter

_uses = torch._C._storage_Use_Count  # type: ignore[attr-defined]
# Called by the text itself: how many references a Python function's argument has depends on who evaluates frames.
references = sys.getrefcount


def repeat_in_python(p: PythonPrinter, step: Repeat) -> None:
    holds = " and ".join(map(_condition, step.predicate)) or "True"
    if step.counter is not None:
        p.put(f"{step.counter.name} = 0")
    p.put("while True:" if step.otherwise else f"while {holds}:")
    if step.otherwise:
        p._block(step.otherwise)
        p.put(f"    if not ({holds}): break")
    p._block(step.then)
    if step.counter is not None:
        p.put(f"    {step.counter.name} += 1")


def repeat_in_cpp(p: CppPrinter, step: Repeat) -> None:
    counter = p.name(step.counter.name) if step.counter is not None else ""
    if counter:
        p.put(f"int64_t {counter} = 0;")
    holds = " && ".join(map(p._condition, step.predicate)) or "true"
    p.put("for (;;) {")
    p._block(step.otherwise)
    p.put(f"  if (!({holds})) break;")
    p._block(step.then)
    p.put(f"  ++{counter};" if counter else "")
    p.put("}")


def arena_in_python(p: PythonPrinter, step: Arena) -> None:
    p._alloc(Alloc(step.buffer))
    p.put(f"{step.buffer}_at = {step.buffer}.data_ptr()")
    for b, at in step.places:
        p.put(f"{b} = {step.buffer}_at + {py(at)}" if at != 0 else f"{b} = {step.buffer}_at")
        p.addresses.add(b)


def arena_in_cpp(p: CppPrinter, step: Arena) -> None:
    p._alloc(Alloc(step.buffer))
    for b, at in step.places:
        p.put(f"char* {p.name(b)} = {p.name(step.buffer)}.ptr + ({p.size(at)});")


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
