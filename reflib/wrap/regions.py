"""The step of a loop (``plan.regions.Repeat``) as text, in Python and in C++."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plan.regions import Repeat
from .python import PythonPrinter, _condition

if TYPE_CHECKING:
    from .cpp import CppPrinter


def repeat_in_python(p: PythonPrinter, step: Repeat) -> None:
    holds = " and ".join(map(_condition, step.predicate)) or "True"
    if step.counter is not None:
        p.put(f"{step.counter.name} = 0")
    p.put("while True:" if step.otherwise else f"while {holds}:")
    pad, p.pad = p.pad, p.pad + "    "
    for s in step.otherwise:
        p._step(s)
    if step.otherwise:
        p.put(f"if not ({holds}): break")
    for s in step.then:
        p._step(s)
    if step.counter is not None:
        p.put(f"{step.counter.name} += 1")
    p.pad = pad


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
