"""A loop nest on a GPU's one-dimensional grid: which axes become x, y, r, and in which order.

Three shapes of kernel::

    1-D         x              a program computes XBLOCK consecutive points
    tile        y, x (and z)   two axes, because some accesses are contiguous along y and others along x (a transpose);
                               all other axes are z: one value of z per program
    reduction   x, r           XBLOCK rows of RBLOCK elements

Each letter is one linear variable over one or more axes. A kernel is fast when addresses need no division of a linear
variable and when neighbours in x (or r) are neighbours in memory; so axes that every access steps through as one are
merged first, and the axis that most accesses are contiguous in comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.expr import Atom, BinOp, Expr, IntLike, Var, expr, floordiv, mod, product
from ..ir.loops import Axis, Load, LoopNest, Reduce, Stmt, Store
from ..ir.transforms import contiguous_last, drop_unit_axes, merge_axes, substitute

MIN_TILE = 8  # a shorter side costs less read out of order than tiled
LOAD, STORE = 2, 3  # weights: a scattered store is a read and a write


@dataclass(frozen=True)
class Space:
    """A loop nest rewritten over its linear variables ``x``, ``y``, ``z``, ``r`` (None: not used); ``body`` contains no
    other variable. ``mode``: ``1d``, ``tile`` or ``reduction``."""

    mode: str
    body: tuple[Stmt, ...]
    x: Var
    y: Var | None = None
    z: Var | None = None
    r: Var | None = None

    @property
    def variables(self) -> list[Var]:
        return [v for v in (self.x, self.y, self.z, self.r) if v is not None]

    @property
    def reduced_vars(self) -> set[Var]:
        return set() if self.r is None else {self.r}

    @property
    def loads(self) -> list[Load]:
        return [s for s in self.body if isinstance(s, Load)]

    @property
    def stores(self) -> list[Store]:
        return [s for s in self.body if isinstance(s, Store)]


def layout(loops: LoopNest, tile: bool = True) -> Space:
    """``loops`` on the grid. ``tile=False`` keeps a pointwise kernel one-dimensional.

    Not memoized: two loop nests over axes of one name and different sizes compare equal."""
    loops = merge_axes(drop_unit_axes(_one_empty_axis(loops)), apart=True)
    if loops.reduced or any(isinstance(s, Reduce) for s in loops.body):
        return _linear(loops, "reduction", x=_ordered(loops.parallel, loops), r=_ordered(loops.reduced, loops))
    sides = _tile_sides(loops) if tile else None
    if sides is None:
        return _linear(loops, "1d", x=_ordered(loops.parallel, loops))
    x, y = sides
    rest = [a for a in loops.parallel if a not in (x, y)]
    return _linear(loops, "tile", x=[x], y=[y], z=_ordered(rest, loops))


def _one_empty_axis(loops: LoopNest) -> LoopNest:
    """Where an axis has size 0 there are no points, whatever the sizes of the others of its kind: these are removed,
    and with them divisions by 0."""
    for kind in ("p", "r"):
        empty = next((a for a in loops.axes if a.kind == kind and a.size == 0), None)
        if empty is not None:
            gone: dict[Atom, IntLike] = {a.var: 0 for a in loops.axes if a.kind == kind and a != empty}
            axes = tuple(a for a in loops.axes if a.var not in gone)
            loops = replace(loops, axes=axes, body=substitute(loops.body, gone))
    return loops


def _ordered(axes: Sequence[Axis], loops: LoopNest) -> list[Axis]:
    """Outermost first."""
    return contiguous_last(axes, loops.body, LOAD, STORE)


def _tile_sides(loops: LoopNest) -> tuple[Axis, Axis] | None:
    """(x, y) when accesses are contiguous in two different axes, both long enough; else None."""
    votes: dict[Axis, int] = {}
    accesses = [(s.index, LOAD) for s in loops.loads()] + [(s.index, STORE) for s in loops.stores()]
    for e, weight in accesses:
        walked = [a for a in loops.axes if e.has(a.var)]
        unit = next((a for a in walked if e.coefficient(a.var) == 1), None)
        if unit is not None and len(walked) > 1:
            votes[unit] = votes.get(unit, 0) + weight
    sides = sorted(votes, key=lambda a: votes[a], reverse=True)[:2]
    if len(sides) < 2 or any(a.size.hint() < MIN_TILE for a in sides):
        return None
    # x is the side that the first store is contiguous in
    for s in loops.stores():
        if s.index.coefficient(sides[1].var) == 1:
            return sides[1], sides[0]
    return sides[0], sides[1]


# -- linear variables -------------------------------------------------------------------------------
def _linear(loops: LoopNest, mode: str, **letters: Sequence[Axis]) -> Space:
    """Each letter's axes (outermost first) as one variable. A letter without axes is used if the mode needs it."""
    env: dict[Atom, IntLike] = {}
    made: dict[str, Var] = {}
    for letter, axes in letters.items():
        if letter == "z" and not axes:
            continue
        made[letter] = Var(letter, product(a.size for a in axes))
        rest = expr(made[letter])
        for a in axes[:0:-1]:
            env[a.var] = mod(rest, a.size)
            rest = floordiv(rest, a.size)
        env |= {a.var: rest for a in axes[:1]}
    return Space(mode, substitute(loops.body, env), **made)


def walks(index: Expr, space: Space) -> str | None:
    """The letter along which ``index`` moves by one element per step, if any."""
    for v in (space.r, space.x, space.y):
        if v is None or v.size == 1:
            continue
        if step(index, v) == 1:
            return v.name
    return None


def step(index: Expr, v: Var) -> int | None:
    """How far ``index`` moves per small step of ``v`` (``v % n`` counts, ``v // n`` does not); None when unclear."""
    total = 0
    for m, c in index.terms:
        for a in m:
            if a == v or (isinstance(a, BinOp) and a.fn == "%" and a.a.coefficient(v) == 1):
                if len(m) > 1:
                    return None
                total += c
    return total
