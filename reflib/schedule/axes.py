"""A loop nest on a GPU's one-dimensional grid: which axes become x, y, r, and in which order.

Three shapes of kernel::

    1-D         x              a program computes XBLOCK consecutive points
    tile        y, x (and z)   two axes, because some accesses are contiguous along y and others along x (a transpose),
                               or rows, along x, are looked up at y; all other axes are z: one value per program
    reduction   x, r           XBLOCK rows of RBLOCK elements

Each letter is one linear variable over one or more axes. A kernel is fast when addresses need no division of a linear
variable and when a warp's points are neighbours in memory; so axes that every access steps through as one are merged
first, and of the orders and tiles that is taken whose points touch the fewest sectors (``ir.traffic``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir.expr import Atom, BinOp, Expr, IntLike, Var, product
from ..ir.loops import Axis, Load, LoopNest, Reduce, Stmt, Store
from ..ir.program import Buffer
from ..ir.traffic import accesses, cheapest_last, rows_looked_up, tile_sides
from ..ir.transforms import drop_unit_axes, merge_axes, substitute, unflattened


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


def layout(loops: LoopNest, buffers: Mapping[str, Buffer], tile: bool = True) -> Space:
    """``loops`` on the grid. ``tile=False`` keeps a pointwise kernel one-dimensional. Kept with ``loops`` itself: loop
    nests over axes of one name and different sizes compare equal."""
    used = tuple((buffers[b].dtype, buffers[b].nbytes.hint()) for b in (*loops.reads(), *loops.writes()))
    kept: dict[tuple, Space] = loops.__dict__.setdefault("spaces", {})
    if used not in kept:
        kept[used] = _layout(loops, buffers, True)
    return kept[used] if tile or kept[used].mode != "tile" else _layout(loops, buffers, False)


def _layout(loops: LoopNest, buffers: Mapping[str, Buffer], tile: bool) -> Space:
    loops = merge_axes(drop_unit_axes(_one_empty_axis(loops)), apart=True)
    moved = accesses(loops.body, buffers)
    reduced = cheapest_last(loops.reduced, moved)
    parallel = cheapest_last(cheapest_last(loops.parallel, moved), moved, reduced)
    sums = [s.index for s in loops.stores() if s.reduce == "sum"]  # of groups of rows that follow each other
    parallel.sort(key=lambda a: not any(i.has(a.var) for i in sums))
    if reduced or any(isinstance(s, Reduce) for s in loops.body):
        return _linear(loops, "reduction", x=parallel, r=reduced)
    sides = tile_sides(loops, parallel, moved) or rows_looked_up(parallel, moved) if tile and parallel else None
    if sides is None:
        return _linear(loops, "1d", x=parallel)
    x, y = sides
    rest = [a for a in loops.parallel if a not in (*x, *y)]
    return _linear(loops, "tile", x=x, y=y, z=cheapest_last(rest, moved))


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


# -- linear variables -------------------------------------------------------------------------------
def _linear(loops: LoopNest, mode: str, **letters: Sequence[Axis]) -> Space:
    """Each letter's axes (outermost first) as one variable. A letter without axes is used if the mode needs it."""
    env: dict[Atom, IntLike] = {}
    made: dict[str, Var] = {}
    for letter, axes in letters.items():
        if letter == "z" and not axes:
            continue
        made[letter] = Var(letter, product(a.size for a in axes))
        env |= unflattened(axes, made[letter])
    return Space(mode, substitute(loops.body, env), **made)


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
