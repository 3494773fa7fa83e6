"""How a Loops lies on a GPU's one-dimensional grid: which axes become x, y, r, and in what order.

Three shapes of kernel come out of it::

    1-D         x              a program computes XBLOCK consecutive points
    tile        y, x (and z)   two axes, because some access walks memory along y and another along x (a transpose);
                               whatever axes are left over are z: one value of z per program
    reduction   x, r           XBLOCK rows of RBLOCK elements

Each letter is one linear variable over one or more axes. A kernel is fast when a linear variable needs no division
to find an address and when neighbours in x (or r) are neighbours in memory; so axes which every access walks as if
they were one are merged first, and the axis that most bytes are contiguous in goes innermost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.expr import Atom, Call, Expr, IntLike, Var, expr, floordiv, mod, product
from ..ir.loops import Axis, Load, Loops, Reduce, Stmt, Store, map_stmt, stmt_exprs

MIN_TILE = 8  # a shorter side is cheaper to read badly than to tile


@dataclass(frozen=True)
class Space:
    """A part rewritten over its linear variables. ``x``, ``y``, ``z``, ``r`` are variables with their sizes (None: not
    used); ``body`` speaks of no other variable. ``mode``: ``1d``, ``tile`` or ``reduction``.
    ``runs``: the size of the innermost axis of x, y and r, i.e. how far a contiguous walk goes."""

    mode: str
    x: Var
    y: Var | None
    z: Var | None
    r: Var | None
    body: tuple[Stmt, ...]
    runs: tuple[Expr, Expr, Expr]

    @property
    def loads(self) -> list[Load]:
        return [s for s in self.body if isinstance(s, Load)]

    @property
    def stores(self) -> list[Store]:
        return [s for s in self.body if isinstance(s, Store)]


def layout(loops: Loops, tile: bool = True) -> Space:
    """``loops`` on the grid. ``tile=False`` keeps a pointwise kernel one-dimensional.

    Not memoized: two Loops over axes of one name and different sizes compare equal."""
    loops = collapse(loops)
    p, r = list(loops.parallel), list(loops.reduced)
    exprs = _accesses(loops)
    if any(isinstance(s, Reduce) for s in loops.body) or r:
        return _linear("reduction", loops, _ordered(p, exprs), [], [], _ordered(r, exprs))
    sides = _tile_sides(p, loops) if tile else None
    if sides is None:
        return _linear("1d", loops, _ordered(p, exprs), [], [], [])
    x, y = sides
    rest = _ordered([a for a in p if a not in (x, y)], exprs)
    return _linear("tile", loops, [x], [y], rest, [])


def _accesses(loops: Loops) -> list[tuple[Expr, int]]:
    """Every index with a weight: stores count more, since a scattered store is a read and a write."""
    out = [(s.index, 2) for s in loops.loads()] + [(s.index, 3) for s in loops.stores()]
    return [(e, w) for e, w in out if e.constant is None]


# -- merging ----------------------------------------------------------------------------------------
def collapse(loops: Loops) -> Loops:
    """Drop axes of size one, and merge every two axes that all expressions walk as one."""
    loops = _one_empty_axis(loops)
    ones: dict[Atom, IntLike] = {a.var: 0 for a in loops.axes if a.size == 1}
    axes = [a for a in loops.axes if a.var not in ones]
    body = _rewrite(loops.body, ones) if ones else loops.body
    merged = True
    while merged and len(axes) > 1:
        merged = False
        exprs = {e for s in body for e in stmt_exprs(s) if e.constant is None}
        for a, b in _pairs(axes):
            env = _merge(exprs, a, b)
            if env is not None:
                whole, subs = env
                body = _rewrite(body, subs)
                axes = [whole if c == b else c for c in axes if c != a]
                merged = True
                break
    return replace(loops, axes=tuple(axes), body=body)


def _one_empty_axis(loops: Loops) -> Loops:
    """Where an axis has size 0 there are no points, whatever the others of its kind are: they go, and with them
    divisions by 0."""
    for kind in ("p", "r"):
        empty = next((a for a in loops.axes if a.kind == kind and a.size == 0), None)
        if empty is not None:
            gone: dict[Atom, IntLike] = {a.var: 0 for a in loops.axes if a.kind == kind and a != empty}
            axes = tuple(a for a in loops.axes if a.var not in gone)
            loops = replace(loops, axes=axes, body=_rewrite(loops.body, gone))
    return loops


def _pairs(axes: list[Axis]) -> list[tuple[Axis, Axis]]:
    """(outer, inner) candidates, neighbours first."""
    n = len(axes)
    order = sorted(((i, j) for i in range(n) for j in range(n) if i != j), key=lambda ij: (ij[1] - ij[0] != 1, ij))
    return [(axes[i], axes[j]) for i, j in order if axes[i].kind == axes[j].kind]


def _merge(exprs: set[Expr], a: Axis, b: Axis) -> tuple[Axis, dict[Atom, IntLike]] | None:
    """One axis for ``a`` (outer) and ``b`` (inner), and what they are in terms of it; None if some access objects."""
    whole = Var(f"{a.var.name}_{b.var.name}", a.size * b.size)
    subs: dict[Atom, IntLike] = {a.var: floordiv(expr(whole), b.size), b.var: mod(expr(whole), b.size)}
    for e in exprs:
        ca, cb = e.coefficient(a.var), e.coefficient(b.var)
        if ca is None or cb is None:  # inside a division: does the division get simpler, or at least no worse?
            if _calls(e.subs(subs)) > _calls(e):
                return None
        elif ca != cb * b.size:
            return None
    return Axis(whole, a.kind), subs


def _calls(e: Expr) -> int:
    return sum(isinstance(a, Call) for a in e.atoms())


def _rewrite(body: tuple[Stmt, ...], env: dict[Atom, IntLike]) -> tuple[Stmt, ...]:
    same = {i: i for i in range(len(body))}
    return tuple(map_stmt(s, same, env) if stmt_exprs(s) else s for s in body)


# -- order and tiles --------------------------------------------------------------------------------
def _ordered(axes: list[Axis], exprs: list[tuple[Expr, int]]) -> list[Axis]:
    """Outermost first: the axis most accesses are contiguous in comes last, the others in natural order."""
    if len(axes) < 2:
        return axes
    votes = [sum(w for e, w in exprs if e.coefficient(a.var) == 1) for a in axes]
    best = max(range(len(axes)), key=lambda i: (votes[i], i))
    return [a for i, a in enumerate(axes) if i != best] + [axes[best]]


def _tile_sides(p: list[Axis], loops: Loops) -> tuple[Axis, Axis] | None:
    """(x, y) when accesses are contiguous in two different axes, both long enough; else None."""
    votes: dict[Axis, int] = {}
    for e, w in _accesses(loops):
        walked = [a for a in p if e.has(a.var)]
        unit = next((a for a in walked if e.coefficient(a.var) == 1), None)
        if unit is not None and len(walked) > 1:
            votes[unit] = votes.get(unit, 0) + w
    sides = sorted(votes, key=lambda a: votes[a], reverse=True)[:2]
    if len(sides) < 2 or any(a.size.hint() < MIN_TILE for a in sides):
        return None
    # x is the side that the first store is contiguous in
    for s in loops.stores():
        if s.index.coefficient(sides[1].var) == 1:
            return sides[1], sides[0]
    return sides[0], sides[1]


# -- linear variables -------------------------------------------------------------------------------
def _linear(mode: str, loops: Loops, x: list[Axis], y: list[Axis], z: list[Axis], r: list[Axis]) -> Space:
    env: dict[Atom, IntLike] = {}
    made: list[Var] = []
    for letter, axes in zip("xyzr", (x, y, z, r)):
        whole = Var(letter, product(a.size for a in axes))
        rest = expr(whole)
        for i, a in enumerate(reversed(axes)):
            last = i == len(axes) - 1
            env[a.var] = rest if last else mod(rest, a.size)
            rest = rest if last else floordiv(rest, a.size)
        made.append(whole)
    runs = tuple(axes[-1].size if axes else expr(1) for axes in (x, y, r))
    body = _rewrite(loops.body, env)
    if mode == "reduction":
        return Space(mode, made[0], None, None, made[3], body, runs)  # type: ignore[arg-type]
    if mode == "tile":
        return Space(mode, made[0], made[1], made[2] if z else None, None, body, runs)  # type: ignore[arg-type]
    return Space(mode, made[0], None, None, None, body, runs)  # type: ignore[arg-type]


def walks(index: Expr, space: Space) -> str | None:
    """The letter along which ``index`` moves one element at a time, if any."""
    for v in (space.r, space.x, space.y):
        if v is None or v.size == 1:
            continue
        if step(index, v) == 1:
            return v.name
    return None


def step(index: Expr, v: Var) -> int | None:
    """How far ``index`` moves for a small step of ``v`` (``v % n`` counts, ``v // n`` does not); None when unclear."""
    total = 0
    for m, c in index.terms:
        for a in m:
            if a == v or (isinstance(a, Call) and a.fn == "%" and a.a.coefficient(v) == 1):
                if len(m) > 1:
                    return None
                total += c
    return total


def varies(e: Expr, v: Var | None) -> bool:
    """Does the expression mention ``v``?"""
    return v is not None and e.has(v)
