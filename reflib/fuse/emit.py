"""Groups become nodes again: bodies joined, unneeded stores dropped, axes put in the best order and merged, groups in a
legal order."""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..ir.loops import LoopNest
from ..ir.program import Buffer, Choice, Extern, Node, Template
from ..ir.traffic import accesses, cheapest_last
from ..ir.transforms import drop_unit_axes, join, merge_axes, rename_axes
from ..seams import Seam
from .legality import Cluster

# A group around a Template: (Cluster, its joined LoopNest) -> Template, under "template".
EMIT = Seam("fuse.EMIT")


def emit(cluster: Cluster, name: str, drop: set[str], buffers: dict[str, Buffer]) -> LoopNest | Template:
    """One node for the whole cluster. Assumes that every merge was legal."""
    parts = sorted(cluster.parts, key=lambda p: p[0])
    origins = tuple(dict.fromkeys(o for _, loops, _ in parts for o in loops.origins))
    if len(parts) == 1 and not drop:
        loops = replace(drop_unit_axes(parts[0][1]), name=name, origins=origins)
    else:
        loops = LoopNest(name, cluster.axes, join([(part, env) for _, part, env in parts], drop), origins)
    if cluster.template is not None:
        return EMIT["template"](cluster, loops)
    if not loops.reduced:
        loops = replace(loops, axes=tuple(cheapest_last(loops.axes, accesses(loops.body, buffers))))
    return rename_axes(merge_axes(loops))


def order(before: Sequence[set[int]], kind: Any = lambda i: 0, pick: Any = lambda ready, out: 0) -> list[int]:
    """A legal order: next is the least number (the first member's old place) of the kind picked among what is ready."""
    waiting = [len(b) for b in before]
    after: list[list[int]] = [[] for _ in before]
    for i, b in enumerate(before):
        for j in b:
            after[j].append(i)
    ready: dict[Any, list[int]] = defaultdict(list)
    for i in (i for i, n in enumerate(waiting) if n == 0):
        ready[kind(i)].append(i)  # (least first, as a heap is)
    out: list[int] = []
    while any(ready.values()):
        i = heapq.heappop(ready[pick(ready, out)])
        out.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready[kind(j)], j)
    assert len(out) == len(before), "groups depend on each other in a circle"
    return out


def kind_of(node: Node) -> str:
    """A Group's kind."""
    if isinstance(node, LoopNest):
        return "reduction" if node.reduced else "pointwise"
    kinds = ((Template, "template"), (Extern, "extern"), (Choice, "choice"))
    return next((kind for cls, kind in kinds if isinstance(node, cls)), "variants")
