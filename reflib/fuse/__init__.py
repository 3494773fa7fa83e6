"""Stage 3, ``fuse``: which loop nests become one kernel, and why the others do not.

``fuse(program, options, target) -> Fused``; the result may be fused again. A kernel's time is mostly the bytes it
moves, so two loop nests that touch the same buffer are worth joining: the intermediate is neither written nor read.

The core, in reading order:

* ``driver``: nodes in program order, each joined to the best groups around it (most bytes saved first).
* ``dependencies``: what must run before what.
* ``mapping``: given one element that two loop nests both touch, how do the axes of one correspond to those of the
  other?
* ``legality``: may two groups be one kernel? Yes (with the mapping), or a ``Reason``.
* ``emit``: a group's bodies joined into one loop nest (or epilogue), unneeded stores dropped; groups in a legal order.

Passes plug in before it (``driver.BEFORE``), as a rule (``legality.RULES``) and behind it (``driver.AFTER``), in the
order of ``reflib/plugins.py``; the first lines of each pass's file say what it does.

A group is a loop nest again (so ``interpret`` runs the result), and its members are in program order. One iteration
space per group; an axis is parallel (p) or reduced (r). A member may use all of the axes or only the p ones ("row
level"): softmax is max (p, r), sub and exp (p, r), sum (p, r), div (p, r) over one space.

NB: TorchInductor's scheduler scores all pairs over several rounds and decides late about layouts and templates.
"""

from .driver import fuse
from .result import Fused, Group, Reason, Refusal

__all__ = ["Fused", "Group", "Reason", "Refusal", "fuse"]
