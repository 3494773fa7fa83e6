"""The step that allocates an arena (``plan.arena``) as text, in Python and in C++: its buffers are addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plan.arena import Arena
from ..plan.steps import Alloc
from .python import PythonPrinter, py

if TYPE_CHECKING:
    from .cpp import CppPrinter


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
