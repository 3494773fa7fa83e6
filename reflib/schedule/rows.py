"""Pointwise kernels whose rows are not aligned: a block of whole or long pieces of rows, so that what depends on a row
alone is computed once per row, and what depends on the place in it once per column.

A flat kernel has one linear variable x, and each point finds its row and its place in it by dividing x. Where memory is
read in aligned pieces of 16 bytes, that is done once per piece. Where it is not (rows of 3,249 bf16, a gather of rows
of 1,001, differences between neighbours) it is done per element: 5 instructions for a quotient and a remainder, more
for their use, and with what is computed from them. At 4 TB/s an H200 has time for 26 instructions per bf16 element that
is read and written; of a shuffle of channels, a flat kernel has 19. And as its stores are in pieces of 16 bytes, a
thread has 8 neighbours, whose loads one by one make 32 lanes read from four lines instead of one: L1 looks up a line
per cycle, and has less time than that.

Here a block is YBLOCK rows of XBLOCK columns. An address is that of a row plus that of a column, added in this order:
the first is a pointer per row, and columns that are a constant apart are constants in the instructions. With rows that
are not aligned a warp's lanes are neighbours.

Both ways are weighed in ``slots``: of the four instructions that a multiprocessor starts per cycle, and of L1's
lookups. Sizes known at run time only count by their hints.
"""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..ir.expr import BinOp, Expr, Ref, Var, expr
from ..ir.instructions import INSTRUCTIONS
from ..ir.loops import Const, Indirect, Load, Op, Stmt, Store, stmt_args, stmt_exprs
from ..ir.program import Assume, Buffer, Config
from ..ir.traffic import LANES, SECTOR, Access, accesses
from ..options import Options
from ..target import Target
from .pressure import MOST, live
from .uneven import LINE, in_pieces

WORTH = 0.9  # of the flat kernel's slots
CLEARLY = 0.93  # of those of a block with more columns, or warps
LOOKUP = 2  # slots: half of the instructions that are started in the time of one lookup
LAUNCH = 1500  # slots of a program
DIVIDED = 6  # of a division by what several elements share
QUOTIENT, BY_SIZE = 4, 20  # slots of a division by a constant, by a number known at run time
PIECE, THREAD = 16, 32  # bytes of an access, of a thread per stream
LONGEST = 1024  # columns of a block


@dataclass(frozen=True)
class Shape:
    """A block, and what it takes."""

    x: int
    y: int
    warps: int
    slots: float


def in_rows(flat: Any, rows: Any, buffers: Mapping[str, Buffer]) -> bool:
    """Is ``rows``, whose x is one axis and whose y all others, faster than ``flat``, whose x is all axes? (Spaces.)"""
    moved = accesses(flat.body, buffers)
    if not moved or all(in_pieces(a, flat.x) for a in moved if a.varies(flat.x)):
        return False
    elements = _elements(flat, buffers)
    launch = LAUNCH / (4 * LANES * elements)
    return best(rows, buffers).slots < WORTH * (launch + work(flat, buffers).slots({flat.x: elements}))


def shape(
    traffic: list[Any], target: Target, options: Options, general: bool
) -> tuple[Config, tuple[Assume, ...]] | None:
    """The launch of a kernel whose block is rows, which is one part; None for others."""
    space = traffic[0].space
    if len(traffic) > 1 or space.mode != "rows":
        return None
    found = best(space, traffic[0].buffers)
    x, y, warps = found.x, found.y, found.warps
    rows, columns = space.y.size.hint(), space.x.size.hint()
    while (y > 1 or x > 2 * target.warp * warps) and -(-rows // y) * -(-columns // x) * warps < 16 * target.units:
        x, y = (x, y // 2) if y > 1 else (x // 2, y)
    warps = max(1, min(warps, x * y // target.warp))
    return Config("none", xblock=x, num_warps=warps, extras=(("printer", "rows"), ("yblock", y))), ()


def best(space: Any, buffers: Mapping[str, Buffer]) -> Shape:
    """The block that takes the fewest slots; of equal ones that with more warps."""
    n, elements = max(1, space.x.size.hint()), _elements(space, buffers)
    found, weighed = None, work(space, buffers)
    for warps in (4, 2, 1):
        x = 1 << (min(LONGEST, n) - 1).bit_length()
        while x >= min(LANES, n):
            y = elements * LANES * warps // x
            if y:
                along = max(1, x // (LANES * warps))
                lanes = -(-n // (x // along)) * (x // along) if x >= n else -(-n // x) * x
                each = {space.x: along, space.y: max(1, elements // along)}
                masks = [1 / _shared({v}, each) for v, b in ((space.x, x), (space.y, y)) if v.size.hint() % b]
                new = Shape(x, y, warps, (weighed.slots(each, x) + sum(masks)) * lanes / n + LAUNCH / (x * y))
                found = new if found is None or new.slots < CLEARLY * found.slots else found
            x //= 2
    assert found is not None
    return found


def _elements(space: Any, buffers: Mapping[str, Buffer]) -> int:
    """Elements of a thread."""
    sizes = [a.itemsize for a in accesses(space.body, buffers) if all(a.varies(v) for v in space.variables)]
    width = min([s for s in sizes if s > 1] or sizes, default=4)
    elements = max(2, THREAD // width // (2 if len(sizes) > 3 else 1))
    while elements > 2 and elements * live(space) > MOST:
        elements //= 2
    return elements


# -- slots ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Work:
    """What a space's statements take: slots by the variables that they vary with, and accesses, each with these and
    with the elements that it reads or writes at once."""

    space: Any
    own: dict[frozenset[Var], float]
    moved: list[tuple[Access, frozenset[Var], int]]

    def slots(self, each: Mapping[Var, int], block: int = 1 << 30) -> float:
        """Per element, where a thread has ``each`` elements along a variable, and a row of the block ``block``."""
        total = sum(n / _shared(here, each) for here, n in self.own.items())
        step = min(each[self.space.x], max((piece for _, _, piece in self.moved), default=1))
        for a, here, piece in self.moved:
            width = min(piece, step)
            lookups = _lookups(a, self.space, step, block) if width == 1 else PIECE / LINE * LANES
            total += (1 + LOOKUP * lookups) / width / _shared(here, each)
        return total


def work(space: Any, buffers: Mapping[str, Buffer]) -> Work:
    every = frozenset(space.variables)
    found = {a.index: (a, _piece(a, space)) for a in accesses(space.body, buffers)}
    varies, divided, once = list[frozenset[Var]](), dict[BinOp, float](), set[Stmt]()
    out = Work(space, defaultdict(float), [])
    for s in space.body:
        exprs = stmt_exprs(s)
        here = frozenset(v for v in every if any(e.has(v) for e in exprs)).union(*(varies[a] for a in stmt_args(s)))
        varies.append(here)
        a, width = found[s.index] if isinstance(s, (Load, Store)) else (None, 1)
        for b in (b for e in exprs for b in e.atoms() if isinstance(b, BinOp)):
            divided[b] = max(divided.get(b, 0), 1 / width)
        if a is None:
            shared = isinstance(s, Op) and s.op == "div" and varies[s.args[1]] < here  # a reciprocal, and a correction
            out.own[here] += DIVIDED if shared else _own(s)
        elif s not in once:
            once.add(s)
            out.moved.append((a, here, width))
            for part, n in _address(s.index, space, varies):
                out.own[part] += n / width
    for b, share in divided.items():
        out.own[_variables(expr(b), every, varies)] += _division(b, divided) * share
    return out


def _piece(a: Access, space: Any) -> int:
    """Elements that are read or written at once."""
    whole = PIECE // a.itemsize
    lines_up = space.y is None or space.x.size.hint() % whole == 0
    return whole if lines_up and in_pieces(a, space.x) and a.varies(space.x) else 1


def _lookups(a: Access, space: Any, step: int, block: int) -> float:
    """Lines that an instruction's lanes read, ``step`` elements apart."""
    lanes = max(1, min(LANES, block // step))
    tile = {space.x: lanes * step} | ({} if space.y is None else {space.y: LANES // lanes})
    place = sum(a.loaded, expr(0))  # what is loaded grows as this does
    index = a.index.subs({r: place for r in a.index.atoms() if isinstance(r, Ref)})
    return max(1.0, min(LANES, replace(a, index=index, loaded=frozenset()).sectors(tile) * SECTOR / LINE))


def _address(e: Expr, space: Any, varies: Sequence[frozenset[Var]]) -> list[tuple[frozenset[Var], int]]:
    """Multiplications and additions: of a row and of a column, where there are both."""
    every = frozenset(space.variables)
    if space.y is None:
        return [(every, len(e.terms) + 1)]
    parts: dict[bool, list[Expr]] = {True: [], False: []}
    for term in e.terms:
        one = Expr((term,))
        parts[_variables(one, every, varies) == {space.x}].append(one)
    plain = all(isinstance(a, Var) for one in parts[True] for m, _ in one.terms for a in m)
    row = frozenset[Var]().union(*(_variables(one, every, varies) for one in parts[False]))
    return [(row, len(parts[False]) + 3), (every, 0 if plain else len(parts[True]) + 1)]


def _variables(e: Expr, every: frozenset[Var], varies: Sequence[frozenset[Var]]) -> frozenset[Var]:
    own = frozenset(v for v in every if e.has(v))
    return own.union(*(varies[a.id] for a in e.atoms() if isinstance(a, Ref)))


def _shared(here: Container[Var], each: Mapping[Var, int]) -> int:
    """How many elements of a thread share what varies with ``here`` alone."""
    return prod(n for v, n in each.items() if v not in here)


def _own(s: Stmt) -> int:
    if isinstance(s, Op):
        return INSTRUCTIONS.get(s.op, 1)
    return 0 if isinstance(s, Const) else 4 if isinstance(s, Indirect) else 1


def _division(b: BinOp, others: Container[BinOp]) -> int:
    """A remainder is what a quotient leaves."""
    n = b.b.constant
    if b.fn not in ("//", "%") or n is not None and n & (n - 1) == 0:
        return 1
    if b.fn == "%" and BinOp("//", b.a, b.b) in others:
        return 1
    return (QUOTIENT if n is not None else BY_SIZE) + (b.fn == "%")
