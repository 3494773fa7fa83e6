"""A backward stores over what the forward saved for it, where that is read for the last time::

    p = softmax(x)          saved
    g = p * (dy - sum(...)) in p's memory: not two such tensors at once, and half the memory to fetch

AOTAutograd says which saved tensors it donates to the backward (``order.owned``): those have storage like the
backward's own, and are planned like it. But autograd keeps one where the graph is retained, and a hook may have kept
it. Only the call can tell: it takes the memory if no other reference to it is left (``wrap.steps``), and else
allocates.

NB: In TorchInductor what is stored over is decided when it compiles, and a backward with ``retain_graph=True`` after
that is an error.
"""

from collections.abc import Set
from dataclasses import dataclass, replace

from ..ir.program import Program
from ..options import Options
from .plan import _Planner
from .steps import Alloc, Plan


@dataclass(frozen=True, slots=True)
class Take(Alloc):
    """Take over the storage of ``reuse``, an input, if nothing else refers to it; else allocate."""


def taking(program: Program, options: Options, given: Set[str]) -> Plan:
    """The plan of ``program`` where the storage of these inputs is its own."""
    given = given & {b for node in program.nodes for b in node.reads()}
    table = {name: replace(b, kind="temp") if name in given else b for name, b in program.buffers.items()}
    planner = _Planner(replace(program, buffers=table), options)
    for b in given:
        planner._begin(b)
    steps = planner.run().steps
    takes = (isinstance(s, Alloc) and s.reuse in given for s in steps)
    return Plan(tuple(Take(s.buffer, s.reuse) if take else s for s, take in zip(steps, takes)))  # type: ignore[union-attr]
