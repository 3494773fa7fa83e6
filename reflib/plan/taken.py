"""A backward stores over what the forward saved for it, where a kernel reads that for the last time::

    p = softmax(x)          saved
    g = p * (dy - sum(...)) in p's memory: not two such tensors at once, and half the memory to fetch

As within a program (``plan.can_overwrite``), but an input may be someone else's as well: another saved value may be a
view of it, autograd keeps it where the graph is retained, a hook may have kept it. Only the call can tell: it takes the
memory if no other reference to it is left (``wrap.taken``), and allocates if there is one.

NB: In TorchInductor these are "donated buffers". What it stores over is decided when it compiles, and a backward with
``retain_graph=True`` after that is an error.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..ir.program import Program
from .plan import _key, can_overwrite, escaping, is_kernel, last_uses
from .steps import Alloc, Plan, Step


@dataclass(frozen=True, slots=True)
class Take(Alloc):
    """Take over the storage of ``reuse``, an input, if nothing else refers to it; else allocate."""


def takeable(owned: Mapping[str, tuple[Any, int]]) -> set[str]:
    """Of ``plan.order.Owned``: those with a storage of their own. (The caller often holds gradients.)"""
    views = Counter(storage for storage, _ in owned.values())
    return {b for b, (storage, _) in owned.items() if views[storage] == 1 and not b.startswith("tangents_")}


def taking(program: Program, plan: Plan, given: Collection[str]) -> Plan:
    """``plan`` with a Take for each allocation that one of ``given`` can serve."""
    last, pinned, taken = last_uses(program), escaping(program) | program.output_buffers(), dict[str, str]()
    made = set[str]()
    for i, node in enumerate(program.nodes):
        ends = [b for b in dict.fromkeys(node.reads()) if b in given and last.get(b) == i and b not in pinned]
        for new, old in product(node.writes(), ends) if is_kernel(node) else ():
            free = new not in made | taken.keys() and old not in taken.values()
            same = _key(program.buffers[old]) == _key(program.buffers[new]) and program.buffers[new].kind == "temp"
            if free and same and is_kernel(node) and can_overwrite(node, old, new):
                taken[new] = old
        made.update(node.writes())

    def step(s: Step) -> Step:
        free = isinstance(s, Alloc) and s.reuse is None and s.buffer in taken
        return Take(s.buffer, taken[s.buffer]) if free else s  # type: ignore[union-attr]

    return Plan(tuple(map(step, plan.steps)))
