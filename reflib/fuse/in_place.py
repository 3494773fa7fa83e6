"""Updates at positions held in tensors, stored in place: the pass behind ``lower.scatter``.

An update is lowered as a copy, ``new = old``, and a kernel that stores a few elements of ``new``. Where nothing reads
``old`` after that, ``new`` may as well be ``old``: the copy is dropped. That is so for a temporary that dies there, and
for an input that the result is copied onto in the end, by a copy that then does nothing and is dropped too::

    new[e] = cache[e]                       (dropped)
    new[position] = row                     cache[position] = row
    attention(q, new)                       attention(q, cache)
    cache[e] = new[e]                       (dropped)

Reads of ``old`` before the update stay before it, as dependencies see to. An update that must be a copy after all gets
a Refusal, and a line under ``REFLIB_LOGS=fallback``.

Inputs in memory that overlaps an input that is written to never get here (``wrap.unusual``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import logs
from ..ir.loops import LoopNest
from ..ir.program import Extern, Program, View
from ..ir.rename import renamed
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, used_buffers
from .result import Fused, Reason, Refusal
from .scatters import scatters
from .slices import whole_copy


@dataclass(frozen=True)
class Start:
    """The copy at ``position``: ``new`` is ``old`` until the node at ``update`` stores single elements."""

    position: int
    old: str
    new: str
    update: int


def in_place(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results; copies before and after updates are removed. Assumes a legal order."""
    program = fused.program
    d = dependencies(program)
    starts = [s for i in range(len(program.nodes)) if (s := _start(program, d, i)) is not None]
    if not starts:
        return fused
    outputs = program.output_buffers()
    names: dict[str, str] = {}  # of what is stored in another buffer instead
    dropped: set[int] = set()
    refusals = []
    for s in starts:
        is_input = program.buffers[s.old].kind == "input"
        why = "" if is_input else _still_used(program, d, s, outputs)
        if not is_input and not why:
            names[s.new] = names.get(s.old, s.old)
            dropped.add(s.position)
        elif why:
            refusals.append(_refused(program, s, why))
    for s in starts:
        if program.buffers[s.old].kind == "input":
            group = {s.new} | {b for b, root in names.items() if root == s.new}
            found = _copied_back(program, d, s, group, outputs)
            if isinstance(found, str):
                refusals.append(_refused(program, s, found))
            else:
                names |= dict.fromkeys(group, s.old)
                dropped |= {s.position, *found}
    nodes = [n for i, n in enumerate(program.nodes) if i not in dropped]
    nodes = [n if names.keys().isdisjoint((*n.reads(), *n.writes())) else renamed([n], (), names)[0][0] for n in nodes]
    changed = tuple(
        replace(v, buffer=names.get(v.buffer, v.buffer)) if isinstance(v, View) else v for v in program.outputs
    )
    program = replace(program, nodes=tuple(nodes), outputs=changed)
    program = replace(program, buffers=used_buffers(program, nodes))
    return replace(fused, program=program, refusals=(*fused.refusals, *refusals))


def _start(program: Program, d: Dependencies, position: int) -> Start | None:
    """The copy before an update, if ``position`` is one."""
    found = whole_copy(program, program.nodes[position])
    if found is None or found[1].index != found[2].index:
        return None
    old, new = found[1].buffer, found[2].buffer
    a, b = program.buffers[old], program.buffers[new]
    if b.kind != "temp" or (a.shape, a.strides, a.dtype, a.device) != (b.shape, b.strides, b.dtype, b.device):
        return None
    first, *more = d.writers[new]
    if first != position or not more or not all(_updates(program, i, new) for i in more):
        return None
    return Start(position, old, new, more[0])


def _updates(program: Program, position: int, name: str) -> bool:
    """Does the node only store elements of ``name`` at positions held in tensors?"""
    node = program.nodes[position]
    if not isinstance(node, LoopNest):
        return False
    return all(scatters(s) for s in node.stores() if s.buffer == name)


def _still_used(program: Program, d: Dependencies, s: Start, outputs: set[str]) -> str:
    """Why the temporary ``old`` cannot be overwritten; "" if it can."""
    made = [program.nodes[i] for i in d.writers.get(s.old, ())]
    if s.old in d.needed or s.old in outputs:
        return f"{s.old} is needed afterwards"
    if any(isinstance(n, Extern) for n in made) or not made:
        return f"{s.old} was made by a call, and may be in another tensor's memory"
    if any(i > s.position for i in (*d.readers[s.old], *d.writers[s.old])):
        return f"{s.old} is read afterwards"
    return ""


def _copied_back(program: Program, d: Dependencies, s: Start, group: set[str], outputs: set[str]) -> str | list[int]:
    """The nodes that copy the result onto the input ``old``, perhaps through temporaries; or why the updates cannot be
    stored there. ``group``: buffers that are one, ``new`` among them."""
    back: list[int] = []
    at = s.old
    while at not in group:
        writers = d.writers.get(at, [])
        if len(writers) != 1:
            return f"{at} is not written to, or more than once"
        found = whole_copy(program, program.nodes[writers[0]])
        if found is None or found[1].index != found[2].index:
            return f"what is copied onto {s.old} in the end is something else"
        if back and (at in d.needed or d.readers[at] != back[-1:]):
            return f"{at} is read as well"
        at = found[1].buffer
        back.append(writers[0])
    if any(i > back[-1] for b in group for i in d.writers[b]):
        return f"it is updated after it was copied onto {s.old}"
    if s.old in outputs or group & d.needed:
        return f"{s.old} and its update are both results"
    late = [i for i in d.readers[s.old] if i >= s.update]
    if late:
        return f"{program.nodes[late[0]].name} reads {s.old} as it was before"
    return back


def _refused(program: Program, s: Start, why: str) -> Refusal:
    node = program.nodes[s.update]
    assert isinstance(node, LoopNest)
    op = node.origins[0] if node.origins else None
    where = f" ({op.source})" if op is not None and op.source else ""
    logs.get("fallback").info("%s updates a copy: %s%s", op.op if op is not None else node.name, why, where)
    return Refusal(program.nodes[s.position].name, node.name, Reason("in-place", why))
