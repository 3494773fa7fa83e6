"""Control flow in a Program: ``torch.cond``, ``while_loop``, ``scan``, ``map`` and ``associative_scan``.

**One node.** A :class:`Region` is a Variants node, whose blocks of nodes run or do not run by what is known at run
time:

* ``cond``: the first block whose predicate holds runs once. That is what Variants are, but here their predicate is a
  number read from a tensor (or a fact about sizes), and the blocks compute different things.
* a loop (``repeats``): two blocks, the condition and the body. The condition's nodes run; while its predicate holds
  then, so do the body's. ``while_loop`` reads its predicate in the condition's block; ``scan`` and ``map`` have an
  empty one, whose predicate says that a ``counter`` is below a size; their body reads slices of the inputs, and
  writes slices of the stacked outputs, at offsets of which the counter is a factor.

So a Region needs little of its own. Blocks are lists of nodes over the program's own buffers: sizes, constants and
tensors closed over are what they are outside, and a block's result is a buffer of the outer program. All that looks
through Variants (``walk``, ``schedule``, both printers, packages) looks through Regions, nested ones included.

**Stages.** ``lower.control_flow`` lowers a branch's graph by the same rules, in place. ``fuse.regions`` fuses each
block as a program by itself, in which everything outside is an input that is needed afterwards (:func:`block`); the
Region is one node for what is around it. So ``autotune.decide`` measures the choices in a block, with its neighbours.
``plan.regions`` plans each block in the same way: its temporaries take over each other's storage, results go where
the outer plan wants them. ``wrap.steps`` prints the one step that is new, ``Repeat``, in both languages.

**Carried tensors.** ``carried`` has pairs: the buffer that holds the value, and the one that the body makes for the
next iteration. The first is filled before the loop by a copy of the initial value (fused into what computes it). At
the end of the body the second becomes the first: names change, data does not move. Where the body reads the old value
for the last time in the kernel that stores the new one, the plan stores it in the same memory. A pair of the same
names: unchanged, or updated in place (a slice of a cache, which ``fuse.in_place`` finds). A carried int is a tensor
with one number, read at the start of the condition's block. A ``cond`` has pairs of the same names where all blocks
update an operand in place: its result, which the operand is copied to before (``fuse.branch_updates``).

**Predicates on the device** are copied to the host by one call, in the block or program where they are needed, and
read there: that is where the host waits for the device, as eager does.

NB: TorchInductor lowers and schedules each branch as a graph of its own, which becomes a function of the wrapper.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from .expr import Sym
from .program import Buffer, Extern, Node, Program, Variant, Variants, full_view

CARRIED = "carried"


@dataclass(frozen=True, slots=True)
class Region(Variants):
    """See the module. ``repeats``: a loop of two blocks. ``outputs``: those that are carried first, then those of which
    each iteration writes a slice. ``counter``: 0 in the first iteration, then one more in each."""

    repeats: bool = False
    carried: tuple[tuple[str, str], ...] = ()
    counter: Sym | None = None

    @property
    def of_kernels(self) -> bool:
        return False

    def reads(self) -> list[str]:
        """Of what is carried the first value too: a body may store to some of its elements and then read it."""
        return list(dict.fromkeys((*Variants.reads(self), *(old for old, _ in self.carried))))

    def stacked(self) -> list[str]:
        """Outputs of which each iteration writes a slice."""
        return [o for o in self.outputs if o not in dict(self.carried)] if self.repeats else []


def block(region: Region, variant: Variant, buffers: Mapping[str, Buffer], own: tuple[str, ...] = ()) -> Program:
    """One block as a program by itself: what is around it, apart from ``own``, are inputs that outlive it."""
    around = set(region.outputs) if region.repeats else {old for old, new in region.carried if old == new}
    made = {b for n in variant.nodes for b in n.writes()} - around | set(own)
    kept = {*region.outputs, *(new for old, new in region.carried if old != new)} - set(own)
    return by_itself(variant.nodes, buffers, made, kept)


def carried_in(region: Region, own: tuple[str, ...]) -> Extern:
    """What stands, in a block that is a program by itself, for what was done before to ``own``, which it may update."""
    return Extern(f"{region.name}_carried", torch.ops.aten.empty.memory_format, (), (), own, reason=CARRIED)


def carried_buffers(program: Program) -> set[str]:
    calls = (n for n in program.nodes if isinstance(n, Extern) and n.reason == CARRIED)
    return {b for n in calls for b in n.writes()}


def by_itself(nodes: tuple[Node, ...], buffers: Mapping[str, Buffer], made: set[str], kept: Collection[str]) -> Program:
    """``nodes`` as a program: what they have not ``made`` are inputs; these outlive it, and what is ``kept`` of it."""
    table = {n: replace(b, kind="temp" if n in made else "input") for n, b in buffers.items()}
    outlive = tuple(full_view(b) for n, b in table.items() if n in kept or n not in made)
    return Program((), table, nodes, outlive)
