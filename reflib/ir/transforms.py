"""Analyses of loop bodies and rewrites of them: each written once, for every stage.

A body is a sequence of statements over some loop variables. Most functions take just that, and where it matters the
variables that are reduced over, so that they serve a ``LoopNest`` and a ``schedule.axes.Space`` alike. The functions
at the end rearrange the axes of a ``LoopNest``; the points of a loop nest may be visited in any order, so all of that
is free.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from .expr import Atom, BinOp, Expr, IntLike, Var, expr, floordiv, mod
from .loops import Axis, BodyBuilder, Load, LoopNest, Reduce, Scan, Stmt, Store, map_stmt, stmt_args, stmt_exprs

Body = Sequence[Stmt]
Env = Mapping[Atom, IntLike]
TWICE = ("m2", "argmax", "argmin")  # reductions that may read their operand in two passes


# -- analyses --------------------------------------------------------------------------------------
def varying(body: Body, variables: Collection[Var], reduces: bool = False) -> list[bool]:
    """For each statement: does its value change along ``variables``? ``reduces``: the answer for a Reduce.

    With the reduced variables: does it run once per point of these (True), or once per row (False)?
    """
    out: list[bool] = []
    for s in body:
        inside = any(e.has(v) for e in stmt_exprs(s) for v in variables) or any(out[a] for a in stmt_args(s))
        out.append(reduces if isinstance(s, Reduce) else inside or isinstance(s, Scan))
    return out


def phases(body: Body, most: bool = False) -> list[int]:
    """For each statement: how many reductions must be complete before it (its pass, in a looped kernel). ``most``: if
    those count as two that a printer may write as two (``two_passes``; C++, for positions)."""
    count = [(2 if most and s.kind in TWICE else 1) if isinstance(s, Reduce) else 0 for s in body]
    out: list[int] = []
    for s in body:
        out.append(max((out[a] + count[a] for a in stmt_args(s)), default=0))
    return out


def needed(body: Body, wanted: Iterable[int], follow: Callable[[int], bool] = lambda i: True) -> list[int]:
    """The statements ``wanted``, and all that they need, in order. ``follow``: which others to include."""
    found = set(wanted)
    for i in range(max(found, default=-1), -1, -1):
        if i in found:
            found.update(a for a in stmt_args(body[i]) if follow(a))
    return sorted(found)


# -- rewrites ---------------------------------------------------------------------------------------
def substitute(body: Body, env: Env) -> tuple[Stmt, ...]:
    """``body`` with atoms, such as loop variables, replaced."""
    same = {i: i for i in range(len(body))}
    return tuple(map_stmt(s, same, env) if env and stmt_exprs(s) else s for s in body)


def select(body: Body, positions: Iterable[int]) -> tuple[Stmt, ...]:
    """The statements at ``positions`` (ascending) alone, renumbered. All that they need must be among them."""
    ids: dict[int, int] = {}
    out: list[Stmt] = []
    for i in positions:
        out.append(map_stmt(body[i], ids))
        ids[i] = len(out) - 1
    return tuple(out)


def eliminate_dead(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Without stores that a later one replaces (it may come before them: they after a sum) and what no store needs."""
    stores = [(i, s) for i, s in enumerate(body) if isinstance(s, Store)]
    last = {(s.buffer, s.index): i for i, s in stores if not s.reduce}
    live = needed(body, (i for i, s in stores if i >= last.get((s.buffer, s.index), i)))
    return body if len(live) == len(body) else select(body, live)


def join(parts: Iterable[tuple[LoopNest, Env]], drop: Iterable[str] = ()) -> tuple[Stmt, ...]:
    """Bodies one after another, each with its atoms replaced; a load of what an earlier part stored at the same index
    becomes the stored value; stores to buffers in ``drop`` go, and all that only they needed.

    Assumes that the order is legal, and that no buffer stored here is loaded at *another* index (``fuse.can_fuse``
    excludes that). A stored half value is forwarded unrounded.
    """
    b = BodyBuilder()
    stored: dict[tuple[str, Expr], int] = {}
    drop = set(drop)
    for loops, env in parts:
        ids: dict[int, int] = {}
        for i, s in enumerate(loops.body):
            new = map_stmt(s, ids, env)
            if isinstance(new, Load) and (new.buffer, new.index) in stored:
                value = stored[new.buffer, new.index]
                if new.mask is not None:
                    value = b.op("where", new.mask, value, b.const(new.other, b.dtype(value)))
                ids[i] = value
            elif isinstance(new, Store):
                stored[new.buffer, new.index] = new.value
                ids[i] = b.add(new) if new.buffer not in drop else -1
            else:
                ids[i] = b.add(new)
    return eliminate_dead(tuple(b.body))


def two_passes(loops: LoopNest) -> LoopNest:
    """With each ``m2`` written out: a sum for the mean, then one of squared distances. That is exact, and costs no more
    than one pass where the second one reads registers or a cache."""
    if not any(isinstance(s, Reduce) and s.kind == "m2" for s in loops.body):
        return loops
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(loops.body):
        new = map_stmt(s, ids)
        if isinstance(new, Reduce) and new.kind == "m2":
            (value, *weight), dtype, n = new.args, new.dtype, loops.rnumel.constant
            count = b.const(n, dtype) if n is not None else b.cast(b.index(loops.rnumel), dtype)
            weighed = value
            if weight:
                count = b.op("maximum", b.reduce("sum", *weight, dtype=dtype), b.const(1, dtype))
                weighed = b.op("mul", value, *weight)
            d = b.op("sub", value, b.op("div", b.reduce("sum", weighed, dtype=dtype), count))
            square = b.op("mul", d, d)
            ids[i] = b.reduce("sum", b.op("mul", square, *weight) if weight else square, dtype=dtype)
        else:
            ids[i] = b.add(new)
    return replace(loops, body=tuple(b.body))


# -- axes -------------------------------------------------------------------------------------------
def drop_unit_axes(loops: LoopNest) -> LoopNest:
    """Without axes of size 1."""
    env: dict[Atom, IntLike] = {a.var: 0 for a in loops.axes if a.size == 1}
    axes = tuple(a for a in loops.axes if a.size != 1)
    return replace(loops, axes=axes, body=substitute(loops.body, env)) if env else loops


def merge_axes(loops: LoopNest, apart: bool = False) -> LoopNest:
    """Two neighbouring axes of one kind that every index steps through as one (``8*i + j``, j < 8) become one axis, as
    often as possible: a contiguous elementwise kernel ends with a single loop, whatever the rank.

    ``apart``: the same for axes that are no neighbours, and for axes inside // and % if no index gets more of these.
    """
    merged: LoopNest | None = loops
    while merged is not None:
        loops, merged = merged, _merge_two(merged, apart)
    return loops


def _merge_two(loops: LoopNest, apart: bool) -> LoopNest | None:
    """Two axes merged; None where none can be."""
    exprs = {e for s in loops.body for e in stmt_exprs(s) if e.constant is None}
    for outer, inner in _pairs(loops.axes, apart):
        both = Var(f"{outer.var.name}_{inner.var.name}", outer.size * inner.size)
        env = _one_for_two(exprs, outer, inner, both, apart)
        if env is not None:
            axes = tuple(Axis(both, inner.kind) if a == inner else a for a in loops.axes if a != outer)
            return replace(loops, axes=axes, body=substitute(loops.body, env))
    return None


def _pairs(axes: Sequence[Axis], apart: bool) -> list[tuple[Axis, Axis]]:
    """(outer, inner) pairs of one kind; neighbours first."""
    n = len(axes)
    order = [(i, i + 1) for i in range(n - 1)]
    if apart:
        order += [(i, j) for i in range(n) for j in range(n) if j not in (i, i + 1)]
    return [(axes[i], axes[j]) for i, j in order if axes[i].kind == axes[j].kind]


def _one_for_two(exprs: set[Expr], outer: Axis, inner: Axis, both: Var, divided: bool) -> Env | None:
    """``outer`` and ``inner`` in terms of ``both``; None if an index does not step through them as one."""
    others: list[Expr] = []
    for e in exprs:
        a, b = e.coefficient(outer.var), e.coefficient(inner.var)
        if a is None or b is None:
            others.append(e)
        elif a != b * inner.size:
            return None
    if not others:
        return {outer.var: 0, inner.var: expr(both)}
    if not divided:
        return None
    env: Env = {outer.var: floordiv(expr(both), inner.size), inner.var: mod(expr(both), inner.size)}
    return env if all(divisions(e.subs(env)) <= divisions(e) for e in others) else None


def unflattened(axes: Sequence[Axis], v: Var) -> Env:
    """The variables of ``axes``, the last one innermost, in terms of ``v``, which counts the points of all of them."""
    env, rest = dict[Atom, IntLike](), expr(v)
    for a in axes[:0:-1]:
        env[a.var], rest = mod(rest, a.size), floordiv(rest, a.size)
    return env | {a.var: rest for a in axes[:1]}


def divisions(e: Expr) -> int:
    return sum(isinstance(a, BinOp) for a in e.atoms())


def rename_axes(loops: LoopNest) -> LoopNest:
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
