"""Groups become nodes again: bodies joined, unneeded stores dropped, axes put in the best order and merged, groups in a
legal order. A group around a Template becomes a Template: its epilogue is the joined body, over the product's own axes
in their own order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from ..ir.expr import ONE, Expr, Var, expr
from ..ir.loops import Axis, LoopNest, Stmt
from ..ir.program import Buffer, Choice, Extern, Node, Template
from ..ir.traffic import accesses, cheapest_last
from ..ir.transforms import drop_unit_axes, join, merge_axes, rename_axes, substitute
from .legality import Cluster


def emit(cluster: Cluster, name: str, drop: set[str], buffers: dict[str, Buffer]) -> LoopNest | Template:
    """One node for the whole cluster. Assumes that every merge was legal."""
    parts = sorted(cluster.parts, key=lambda p: p[0])
    origins = tuple(dict.fromkeys(o for _, loops, _ in parts for o in loops.origins))
    if len(parts) == 1 and not drop:
        loops = replace(drop_unit_axes(parts[0][1]), name=name, origins=origins)
    else:
        loops = LoopNest(name, cluster.axes, join([(part, env) for _, part, env in parts], drop), origins)
    if cluster.template is not None:
        return _emit_template(cluster, loops)
    if not loops.reduced:
        loops = replace(loops, axes=tuple(cheapest_last(loops.axes, accesses(loops.body, buffers))))
    return rename_axes(merge_axes(loops))


def _emit_template(cluster: Cluster, loops: LoopNest) -> Template:
    """``loops``: the joined body over the cluster's axes, which are pieces of the product's. The pieces become ``//``
    and ``%`` of the product's axes again, most of which cancel."""
    t = cluster.template
    assert t is not None
    env = next(env for _, part, env in cluster.parts if part is t.epilogue)
    body = loops.body
    for axis in t.epilogue.axes:
        value = env.get(axis.var, expr(axis.var))
        if isinstance(value, Expr) and value.variables() - {axis.var}:
            body = _rejoin(body, axis, value)
    return replace(t, name=loops.name, epilogue=rename_axes(replace(loops, axes=t.epilogue.axes, body=body)))


def _rejoin(body: tuple[Stmt, ...], axis: Axis, value: Expr) -> tuple[Stmt, ...]:
    """``body`` with the pieces of ``axis``, whose sum (each times its stride) is ``value``, replaced by parts of
    ``axis``. Two pieces per step, the highest first: a step's ``//`` and ``%`` cancel before the next step's are
    made."""
    pieces: list[Var] = []
    step = ONE
    while len(pieces) < len(value.variables()):  # the lowest has stride 1, the next that one's size, ...
        low = next(v for v in value.variables() if v not in pieces and value.coefficient(v) == step)
        pieces.append(low)
        step = step * low.size
    high = pieces.pop()
    while pieces:
        low = pieces.pop()
        both = expr(Var(f"{low.name}_{high.name}", low.size * high.size) if pieces else axis.var)
        body = substitute(body, {high: both // low.size, low: both % low.size})
        high = next(iter(both.variables()))
    return substitute(body, {high: expr(axis.var)})


def order(before: Sequence[set[int]]) -> list[int]:
    """Positions in a legal order, each as early as its number allows (numbers: the first member's old position)."""
    waiting = [len(b) for b in before]
    after: list[list[int]] = [[] for _ in before]
    for i, b in enumerate(before):
        for j in b:
            after[j].append(i)
    ready = [i for i, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    out = []
    while ready:
        i = heapq.heappop(ready)
        out.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready, j)
    assert len(out) == len(before), "groups depend on each other in a circle"
    return out


def kind_of(node: Node) -> str:
    """A Group's kind."""
    if isinstance(node, LoopNest):
        return "reduction" if node.reduced else "pointwise"
    kinds = ((Template, "template"), (Extern, "extern"), (Choice, "choice"))
    return next((kind for cls, kind in kinds if isinstance(node, cls)), "variants")
