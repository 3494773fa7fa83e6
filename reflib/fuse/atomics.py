"""Kernels that add atomically (``lower.accumulate``) do elementwise work only.

Their neighbours join them like those of any elementwise loop nest: a gradient is computed where it is added. What fills
the buffer, and what reads the sums, stays outside by the rule about indices: it touches other elements.
"""

from __future__ import annotations

from .legality import Cluster, FusionContext
from .result import Reason


def atomic_rule(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    """A reduction may go over its row several times, and keeps what is done once per row apart from what is done for
    each element; an atomic addition must happen exactly once at every point."""
    if not any(s.reduce == "atomic" for x in (a, b) for _, loops, _ in x.parts for s in loops.stores()):
        return None
    if a.reduces or b.reduces:
        return Reason("atomic", "one adds atomically, the other reduces")
    if a.template is not None or b.template is not None:
        return Reason("template", "a matrix product's kernel adds nothing atomically")
    return None
