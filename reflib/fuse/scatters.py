"""Loop nests that store, or add atomically, at places that tensors name (``lower.scatter``, ``lower.accumulate``).

Their neighbours join them like those of any elementwise loop nest: a gradient is computed where it is added. What fills
the buffer, and what reads it, stays outside by the rule about indices: it touches other elements. Reductions stay
outside by ``scatter_rule``.

The fill copies the tensor that is written to; ``in_place`` drops the copies that are not needed.
"""

from __future__ import annotations

from ..ir.expr import Ref
from ..ir.loops import Store
from .legality import Cluster, FusionContext
from .result import Reason


def scatters(s: Store) -> bool:
    """Does it touch single elements, at places that a tensor names?"""
    return s.reduce == "atomic" or any(isinstance(a, Ref) for a in s.index.atoms())


def scatter_rule(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    """A reduction may go over its row several times, and keeps what is done once per row apart from what is done for
    each element; an atomic addition must happen exactly once at every point. (A store may happen again.)"""
    reduces, template = a.reduces or b.reduces, a.template is not None or b.template is not None
    if not reduces and not template:
        return None
    found = [s for x in (a, b) for _, loops, _ in x.parts for s in loops.stores() if scatters(s)]
    if reduces and any(s.reduce for s in found):
        return Reason("scatter", "one adds at places in a tensor, the other reduces")
    if template and found:
        return Reason("template", "a matrix product's kernel stores nothing at places in a tensor")
    return None
