"""What a Template's kernel takes in behind its product: ``template_rule``, with the Reason code ``template``.

A matrix product holds a tile of its result in registers when it is done. Elementwise work on the result costs nothing
there, and the result need not be written and read again: one store and one load of M*N elements less for each node
taken in. But that kernel already uses most registers a program has and runs few programs, so:

* two products never share a kernel, and no reduction joins one: an element's row is spread over several programs;
* a consumer joins: what reads an element that the kernel stores, or that another consumer in it stores. What only
  reads the same operands, bias or residual does not: it would save a load, and take registers;
* a producer of something the epilogue reads joins if all of its readers are in the kernel, so that it is never stored.
  A smaller one (a bias computed for each column) does not: it would be computed again in every row. Like all others,
  it must run over the product's own space ([b,] m, n), perhaps reshaped or permuted, never broadcast;
* nothing is written to an operand: other programs still read it. (In place over what the epilogue reads at the same
  element is well: the rule ``index`` sees to that.)
* what is stored at an index that is itself a value (a scatter) stays out;
* a ``closed`` product takes in nothing: ``choose`` measures this where it is not certain that an epilogue pays;
* few whole matrices pass through the epilogue (``few_streams``, with the Reason code ``limit``).

NB: TorchInductor's scheduler asks much the same before it gives a Triton template an epilogue, and also takes in
prologues that compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..ir.expr import Ref
from ..ir.program import Template
from .result import Reason

if TYPE_CHECKING:
    from .legality import Cluster, Context

MAX_STREAMS = 7  # buffers of the product's size that an epilogue reads or writes: the result, and six more


def template_rule(a: Cluster, b: Cluster, c: Context) -> Reason | None:
    """May ``b``, by what it is, join the template ``a``? None: yes."""
    if a.template is not None and b.template is not None:
        return Reason("template", "two matrix products never share a kernel")
    t, other = (a, b) if a.template is not None else (b, a)
    assert t.template is not None
    if t.template.closed:
        return Reason("template", "this product is to be a kernel of its own, its epilogue apart")
    operands = set(t.template.operands())
    if made := sorted(operands & set(other.writes)):
        if other.first < t.first:
            return Reason("template", f"{', '.join(made)}, which the product multiplies, must be complete before it")
        return Reason("template", f"{', '.join(made)} is an operand of the product: other programs still read it")
    if other.reduces:
        return Reason("template", "a reduction cannot join a matrix product: its rows are spread over programs")
    if any(isinstance(x, Ref) for table in other.writes.values() for i in table for x in i.atoms()):
        return Reason("template", "a scatter cannot join a matrix product")
    return _follows(t, other, c)


def _follows(t: Cluster, other: Cluster, c: Context) -> Reason | None:
    """Does each of ``other``'s members use the product, or only make what is used here?"""
    made = {name: min(table.values()) for name, table in t.writes.items()}  # by the product, since when
    for position, loops, _ in sorted(other.parts, key=lambda part: part[0]):
        if any(made.get(name, position) < position for name in loops.reads()):
            for name in loops.writes():
                made.setdefault(name, position)
        elif not _private(loops.writes(), t.members | other.members, c):
            return Reason("template", f"{loops.name} does not use the product, and not only this kernel needs it")
    return None


def _private(names: Iterable[str], members: set[int], c: Context) -> bool:
    """Is everything that touches these buffers in the kernel?"""
    d = c.depends
    return all(
        name not in d.needed and members.issuperset([*d.readers.get(name, ()), *d.writers[name]]) for name in names
    )


def few_streams(t: Template, outside: Iterable[str], c: Context) -> bool:
    """``outside``: buffers that the kernel reads or writes in memory."""
    batch, m, n, _ = t.sizes
    points = (batch * m * n).hint()
    names = set(outside) - set(t.operands())
    return sum(c.program.buffers[b].numel.hint() >= points for b in names) <= MAX_STREAMS
