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

Passes that plug in before it (``driver.BEFORE``), as a rule (``legality.RULES``) and behind it (``driver.AFTER``):

* ``slices``, ``slice_stores``: chains of writes to slices go slice by slice; ``in_place``: other updates, in place.
  ``into_place``: a call or a product writes into the part of a larger tensor that it is copied to.
* ``mix_order``: column sums that the kernel which reduces the rows can compute as well.
* ``split``, ``split_online`` (softmax): a reduction in two, so the whole machine has work.
* ``inline_loads``: a cheap producer that is read at other elements than it writes (cat, pad, slices, broadcasts) is
  computed again where it is read (``producers``). ``unroll``: sums of few elements; ``reversal``: scans read backwards.
  ``halves``: rows of parts that mix (rotary embeddings), part by part; ``extremes``: maxima that follow from another;
  ``row_order``: rows that one tensor has across, in the order of the others.
* ``picks``: one element of a row that a scan or a sort makes is found by a reduction over the row, which then fuses.
* ``casts``: a cast behind a matmul is left to its readers.
* ``templates``, ``launch_epilogues``: what joins a matmul, a user's kernel; ``scatters``: those of ours.
* ``waist``: what elementwise kernels keep for later ones is cut at its narrowest. ``recompute``: a value that another
  kernel reads is computed there again where that moves fewer bytes.
  ``store_once``: what an update stores to its input is not stored to a temporary as well.
* ``combine``: small kernels that could share a launch. ``narrow``: indices in 32 bits. ``strips``: large atomic sums.
* ``unmask``: masks that loads do without. ``pieces``: a kernel per way in which elements along an axis are made.
  ``padded_rows``: loops over rows that have padding go over the padding too.

A group is a loop nest again (so ``interpret`` runs the result), and its members are in program order. One iteration
space per group; an axis is parallel (p) or reduced (r). A member may use all of the axes or only the p ones ("row
level"): softmax is max (p, r), sub and exp (p, r), sum (p, r), div (p, r) over one space.

NB: TorchInductor's scheduler scores all pairs over several rounds and decides late about layouts and templates.
"""

from .driver import fuse
from .result import Fused, Group, Reason, Refusal

__all__ = ["Fused", "Group", "Reason", "Refusal", "fuse"]
