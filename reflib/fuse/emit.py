"""Groups become nodes again: bodies joined, stores nobody needs dropped, axes put in the best order and merged, groups
in a legal order. A group around a Template becomes a Template: its epilogue is the joined body, over the product's own
axes in their own order."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir.expr import ONE, Atom, Expr, IntLike, Var, expr
from ..ir.loops import Axis, Load, Loops, Stmt, Store, join, map_stmt, stmt_exprs
from ..ir.program import Choice, Dispatch, Extern, Node, Template
from .legality import Cluster

Env = Mapping[Atom, IntLike]


def emit(cluster: Cluster, name: str, drop: set[str]) -> Loops | Template:
    """One node for the whole cluster. Assumes that every merge was legal."""
    parts = sorted(cluster.parts, key=lambda p: p[0])
    origins = tuple(dict.fromkeys(o for _, loops, _ in parts for o in loops.origins))
    if len(parts) == 1 and not drop:
        axes, body = _drop_ones(parts[0][1])
    else:
        axes, body = cluster.axes, join([(loops, env) for _, loops, env in parts], drop)
    loops = Loops(name, axes, body, origins)
    return rename_axes(merge_axes(order_axes(loops))) if cluster.template is None else _emit_template(cluster, loops)


def _emit_template(cluster: Cluster, loops: Loops) -> Template:
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
    """``body`` with the pieces of ``axis``, whose sum with their strides is ``value``, replaced by parts of ``axis``.
    Two pieces at a time, the highest first: each step's ``//`` and ``%`` cancel before the next one's are made."""
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


def _drop_ones(loops: Loops) -> tuple[tuple[Axis, ...], tuple[Stmt, ...]]:
    env: dict[Atom, IntLike] = {a.var: 0 for a in loops.axes if a.size == 1}
    return tuple(a for a in loops.axes if a.size != 1), substitute(loops.body, env)


def substitute(body: Sequence[Stmt], env: Env) -> tuple[Stmt, ...]:
    if not env:
        return tuple(body)
    ids = {i: i for i in range(len(body))}
    return tuple(map_stmt(s, ids, env) for s in body)


def order_axes(loops: Loops) -> Loops:
    """Without reductions, put the axis that most accesses step through by one innermost: neighbours in the iteration
    space are then neighbours in memory. Stores count double. The other axes keep their order."""
    if loops.reduced or len(loops.axes) < 2:
        return loops
    votes = {a.var: 0 for a in loops.axes}
    for s in loops.body:
        if isinstance(s, (Load, Store)):
            for v in votes:
                if s.index.coefficient(v) == 1:
                    votes[v] += 2 if isinstance(s, Store) else 1
    best = max(reversed(loops.axes), key=lambda a: votes[a.var])
    if votes[best.var] <= votes[loops.axes[-1].var]:
        return loops
    return replace(loops, axes=(*(a for a in loops.axes if a is not best), best))


def merge_axes(loops: Loops) -> Loops:
    """Two neighbouring axes of one kind that every index steps through as one (``8*i + j``, j < 8) become one axis.
    A contiguous elementwise kernel ends with a single loop, whatever the rank."""
    done = False
    while not done:
        done = True
        for outer, inner in zip(loops.axes, loops.axes[1:]):
            if outer.kind == inner.kind and _steps_as_one(loops, outer, inner):
                both = Var(f"{outer.var.name}_{inner.var.name}", outer.size * inner.size)
                env: dict[Atom, IntLike] = {outer.var: expr(both) // inner.size, inner.var: expr(both) % inner.size}
                axes = tuple(Axis(both, outer.kind) if a is outer else a for a in loops.axes if a is not inner)
                loops = replace(loops, axes=axes, body=substitute(loops.body, env))
                done = False
                break
    return loops


def _steps_as_one(loops: Loops, outer: Axis, inner: Axis) -> bool:
    for s in loops.body:
        for e in stmt_exprs(s):
            a, b = e.coefficient(outer.var), e.coefficient(inner.var)
            if a is None or b is None or a != b * inner.size:
                return False
    return True


def rename_axes(loops: Loops) -> Loops:
    """``p0, p1, ...`` and ``r0, r1, ...``: short and the same from run to run."""
    counts = {"p": 0, "r": 0}
    env: dict[Atom, IntLike] = {}
    axes = []
    for a in loops.axes:
        new = Var(f"{a.kind}{counts[a.kind]}", a.size)
        counts[a.kind] += 1
        env[a.var] = expr(new)
        axes.append(Axis(new, a.kind))
    return replace(loops, axes=tuple(axes), body=substitute(loops.body, env))


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
    if isinstance(node, Loops):
        return "reduction" if node.reduced else "pointwise"
    kinds = ((Template, "template"), (Extern, "extern"), (Choice, "choice"), (Dispatch, "dispatch"))
    return next((kind for cls, kind in kinds if isinstance(node, cls)), "region")
