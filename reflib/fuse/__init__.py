"""Fusing: which Loops become one kernel, and why the others do not.

``fuse(program, options, target) -> Fused``; what it gives may be fused again. A kernel's time is mostly the bytes it
moves, so two Loops that touch the same buffer are worth joining: the intermediate is neither written nor read. Read the
files in this order:

* ``split``: few long reductions become two Loops, so that all of the machine has work.
* ``inline_loads``: a cheap producer that is read at other elements than it writes (cat, pad, slices, broadcasts) is
  computed again where it is read. These are the pairs that no common iteration space exists for.
* ``casts``: a cast before a matrix product becomes its prologue; one behind it waits for its readers.
* ``mapping``: given one element that two Loops both touch, how do the axes of one correspond to those of the other?
* ``legality``: may two groups be one kernel? Yes (with the mapping), or a ``Reason``.
* ``templates``: what a matrix product's kernel takes in behind the product, as its epilogue.
* ``driver``: nodes in program order, each joined to the best groups around it (most bytes saved first).
* ``emit``: a group's bodies joined into one Loops (or epilogue); stores nobody needs dropped; groups put in a legal
  order.
* ``combine``: small independent kernels that could share one launch.

What makes it simple: a group is a Loops (so ``interpret`` runs the result), and members are in program order. One
iteration space per group; an axis is parallel (p) or reduced (r). A member may use all of the axes or only the p ones
("row level"): softmax is max (p, r), sub and exp (p, r), sum (p, r), div (p, r) over one space.

NB: TorchInductor's scheduler scores all pairs over several rounds and decides late about layouts and templates.
"""

from .driver import fuse
from .result import Fused, Group, Reason, Refusal

__all__ = ["Fused", "Group", "Reason", "Refusal", "fuse"]
