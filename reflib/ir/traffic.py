"""What a kernel's accesses move: the 32-byte sectors that a tile of its points touches.

Memory is moved in sectors of 32 bytes, a warp's request for each distinct sector it touches, whatever it uses of them
(CUDA C++ Best Practices Guide, "Coalesced access to global memory"). So an access is weighed by its sectors per point,
not counted: a tile of 128 points along a contiguous axis touches 8 sectors of bf16, along one of stride 100 it touches
128, and an access that does not vary with the axis touches 1. What one warp touches twice L1 still has, but what
it stores goes to L2 instruction by instruction. An order of loops is therefore judged by the points of a warp (loads)
and of its 32 lanes (stores); a two-dimensional block, whose accesses Triton each lays along their own contiguous side,
by all of its points. What is looked up in a small table is in L2, and often in L1: it counts less.

How many sectors: along each variable an index takes ``count`` values ``step`` elements apart (several such pairs where
it has // or %). Least step first, elements closer than a sector grow a dense run; any wider step repeats the run. A run
that begins anywhere touches 1 + (bytes - itemsize) / 32 sectors on average::

    i*96 + j,  4 bytes, tile {i: 8, j: 64}:   j: a run of 256 bytes;  i: 8 runs, 384 bytes apart  ->  8 * 8.9 sectors

Sizes known at run time only count by their hints: this chooses, and proves nothing.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, prod

from .expr import BinOp, Expr, Ref, Sym, Var, expr
from .loops import Axis, Indirect, Load, LoopNest, Stmt, Store, stmt_args, stmt_exprs
from .program import Buffer

SECTOR = 32  # bytes
LANES = 32
WARP = 4 * LANES  # points that a warp computes
ROWS = 16  # neighbouring rows that are looked at together
LOAD, STORE = 2, 3  # weights
L2, KEPT = 1 << 22, 0.5  # bytes of a table that stays there; the weight of its sectors, by those of memory
PARTIAL = 3  # of what a store leaves of a sector, which is read and written again: 67 us where loads do so in 28
CLOSE, CLOSE_ROWS = 1.1, 1.5  # costs that are equal: the order as written needs fewer divisions (rows share little)
TILE = 64  # points of a side
MIN_TILE = 8  # a shorter side costs less read out of order than tiled
PIECE = 8  # elements, of 16 bits, that a thread moves at once
WORTH = 0.8  # of the sectors: what is left must pay for going through shared memory
Sides = tuple[Sequence[Axis], Sequence[Axis]]  # (x, y), each from its outermost axis on
_FAR = 1 << 40  # elements: the step of an index that is itself loaded


@dataclass(frozen=True)
class Access:
    """``index`` in elements of ``itemsize`` bytes; ``loaded``: what the indices vary with that are values; ``kept``: of
    a table that L2 holds."""

    index: Expr
    itemsize: int
    store: bool
    loaded: frozenset[Expr] = frozenset()
    kept: bool = False

    def varies(self, v: Var) -> bool:
        return any(e.has(v) for e in (self.index, *self.loaded))

    def sectors(self, tile: Mapping[Var, int]) -> float:
        """How many sectors the points of ``tile`` touch: extents by variable; all others are fixed."""
        steps = [s for v, extent in tile.items() for s in self._steps(v, extent)]
        run, runs = self.itemsize, 1
        for step, count in sorted(steps):
            if step * self.itemsize <= max(run, SECTOR):
                run += (count - 1) * step * self.itemsize
            else:
                runs *= count
        return min(runs * (1 + (run - self.itemsize) / SECTOR), prod(tile.values()))

    def _steps(self, v: Var, extent: int) -> list[tuple[int, int]]:
        far = [(_FAR, max(prod(n for _, n in _steps(e, v, extent)) for e in self.loaded))] if self.loaded else []
        return _steps(self.index, v, extent) + far


def _steps(e: Expr, v: Var, extent: int) -> list[tuple[int, int]]:
    """(step, count) pairs: the values that ``e`` takes over ``extent`` steps of ``v``."""
    out: list[tuple[int, int]] = []
    for m, c in e.terms:
        factor, inner = abs(c), [(0, 1)]
        for a in m:
            if a == v:
                inner = [(1, extent)]
            elif isinstance(a, BinOp) and (a.a.has(v) or a.b.has(v)):
                inner = _divided(a, _steps(a.a, v, extent))
            elif isinstance(a, Sym):
                factor *= max(1, expr(a).hint())
        out += [(factor * step, count) for step, count in inner if count > 1]
    return out


def _divided(a: BinOp, inner: list[tuple[int, int]]) -> list[tuple[int, int]]:
    n = 1 if a.b.variables() else max(1, a.b.hint())
    if a.fn == "%":
        return [(s, min(count, -(-n // s))) for s, count in inner]
    if a.fn == "//":
        return [(s // n, count) if s >= n else (1, -(-count * s // n)) for s, count in inner]
    return inner


def accesses(body: Sequence[Stmt], buffers: Mapping[str, Buffer], only: Container[int] | None = None) -> list[Access]:
    """The loads and stores of ``body``, one per sector that several loads read (``only``: each of those statements)."""
    made_of: list[frozenset[Expr]] = []  # per statement: the index expressions behind its value
    out: dict[tuple, Access] = {}
    gathers = any(isinstance(s, Indirect) for s in body)  # else nothing asks for these
    for i, s in enumerate(body):
        if isinstance(s, (Load, Store)) and (only is None or i in only):
            loaded = frozenset().union(*(made_of[a.id] for a in s.index.atoms() if isinstance(a, Ref)))
            b, store = buffers[s.buffer], isinstance(s, Store)
            size, each, kept = b.dtype.itemsize, store or only, loaded and not store and b.nbytes.hint() <= L2
            near = tuple((m, n) for m, c in s.index.terms if (n := c if m or each else c * size // SECTOR))
            out[store, s.buffer, near] = Access(s.index, size, store, loaded, bool(kept))
        if gathers:
            own = frozenset(e for e in stmt_exprs(s) if e.variables())
            made_of.append(own.union(*(made_of[a] for a in stmt_args(s))))
    return list(out.values())


def cost(moved: Sequence[Access], tile: Mapping[Var, int], stored: Mapping[Var, int] | None = None) -> float:
    """Weighed sectors per point of ``tile``; of ``stored``, if that is given, for stores."""
    total = 0.0
    for a in moved:
        touched = stored if a.store and stored else tile
        sectors, points = a.sectors(touched), prod(touched.values())
        partial = max(0, sectors - points * a.itemsize / SECTOR)
        load = LOAD * (KEPT if a.kept else 1) * sectors
        total += (STORE * sectors + PARTIAL * partial if a.store else load) / points
    return total


def cost_of_order(moved: Sequence[Access], axes: Sequence[Axis], rows: Sequence[Axis] = ()) -> float:
    """Weighed sectors per point of a warp that visits neighbouring points, the last of ``axes`` being the innermost. Of
    a reduction, ``rows`` are what it reduces: a warp has some of each."""
    piece = neighbours(rows, WARP // 2)
    loads, stores = (ROWS, ROWS) if rows else (WARP, LANES)
    return cost(moved, piece | neighbours(axes, loads), piece | neighbours(axes, stores))


def neighbours(axes: Sequence[Axis], points: int) -> dict[Var, int]:
    tile: dict[Var, int] = {}
    for a in reversed(axes):
        if points > 1:
            tile[a.var] = min(points, max(1, a.size.hint()))
            points //= tile[a.var]
    return tile


def cheapest_last(axes: Sequence[Axis], moved: Sequence[Access], rows: Sequence[Axis] = ()) -> list[Axis]:
    """``axes`` with the innermost, and where that is shorter than a warp the next one too, moved to the end so that a
    warp's points touch the fewest sectors; of equal orders the one nearest to ``axes``."""
    if len(axes) < 2:
        return list(axes)
    orders: list[list[Axis]] = []
    for last in reversed(axes):
        rest = [a for a in axes if a is not last]
        seconds = reversed(rest) if last.size.hint() < WARP else rest[-1:]
        orders += [[*(a for a in rest if a is not second), second, last] for second in seconds]
    costs = [cost_of_order(moved, order, rows) for order in orders]
    return next(order for order, c in zip(orders, costs) if c <= (CLOSE_ROWS if rows else CLOSE) * min(costs))


def tile_sides(loops: LoopNest, order: Sequence[Axis], moved: Sequence[Access]) -> Sides | None:
    """(x, y) when accesses, each with both, are contiguous in two different axes, both long enough, and a tile of these
    touches clearly fewer sectors than ``order``; else None. Short axes that follow each other may be a side."""
    sides = {a: [m for m in moved if _rows_along(a, m.index)] for a in loops.axes if a.size.hint() >= MIN_TILE}
    pairs = [p for p in combinations(sides, 2) if all(any(m.varies(b.var) for m in sides[a]) for a, b in (p, p[::-1]))]
    tiles = {pair: cost(moved, {a.var: min(TILE, a.size.hint()) for a in pair}) for pair in pairs}
    best = min(tiles, key=lambda pair: tiles[pair], default=None)
    if best is None or tiles[best] > WORTH * cost_of_order(moved, order):
        return _folded_sides(loops, order, moved)
    # x is the side that the first store is contiguous in
    first = next((s.index for s in loops.stores() if any(_rows_along(a, s.index) for a in best)), None)
    x, y = best if first is None or _rows_along(best[0], first) else best[::-1]
    return [x], [y]


def _folded_sides(loops: LoopNest, order: Sequence[Axis], moved: Sequence[Access]) -> Sides | None:
    """x: the axes that a store steps through first; y: those that a load does, mostly others. (Pixels that become
    channels, windows of an image, heads: there no axis is long.)"""
    stores, loads = ([m.index for m in moved if m.store == kind and not m.loaded] for kind in (True, False))
    x = _first(stores[0], loops.parallel) if stores else []
    across = (i for i in loads if prod(a.size.hint() for a in _first(i, loops.parallel) if a in x) < MIN_TILE)
    sides = [y for i in across if (y := _first(i, [a for a in loops.parallel if a not in x])) and x]
    costs = [cost(moved, neighbours(x, TILE) | neighbours(y, TILE)) for y in sides]
    least = min(costs, default=inf)
    return (x, sides[costs.index(least)]) if least <= WORTH * cost_of_order(moved, order) else None


def _first(index: Expr, axes: Sequence[Axis]) -> list[Axis]:
    """The axes of the smallest steps, outermost first: a side's points, or none."""
    steps = [(abs(c.hint()), a) for a in axes if (c := index.coefficient(a.var)) is not None and c != 0]
    side: list[Axis] = []
    for _, a in sorted(steps, key=lambda s: s[0]):
        side = side if 2 * prod(b.size.hint() for b in side) >= TILE else [a, *side]
    return side if prod(a.size.hint() for a in side) >= MIN_TILE else []


def rows_looked_up(order: Sequence[Axis], moved: Sequence[Access]) -> Sides | None:
    """(x, y) when rows, contiguous in the innermost axis x, are looked up, or added to, at values that vary with y and
    not with x. Triton sees neighbours where a block has one position per row: it moves pieces of 16 bytes then."""
    *outer, x = order
    looked_up = [a for a in moved if a.loaded and a.index.coefficient(x.var) == 1]
    rows = [a for a in looked_up if not any(e.has(x.var) for e in a.loaded)]
    many = [a for a in outer if a.size.hint() >= MIN_TILE]
    picks = [y for y in many if any(e.has(y.var) for a in rows for e in a.loaded)]
    return ([x], picks[-1:]) if picks and (x.size.constant or 1) % PIECE == 0 else None


def _rows_along(a: Axis, index: Expr) -> bool:
    """Is ``index``, of two axes or more, contiguous in ``a``, but for where it wraps around or is reversed?"""
    return (1, n := a.size.hint()) in _steps(index, a.var, n) and len(index.variables()) > 1
