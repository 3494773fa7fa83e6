"""Few, long rows: a reduction in two steps, so that the whole machine has work.

Summing 4 rows of a million elements with one program per row keeps 4 of 132 multiprocessors busy. Instead the longest
reduced axis ``r < n`` is cut into ``s < pieces`` (parallel) and ``t < length`` (reduced)::

    y[i] = f(sum_r g(i, r))     becomes     part[i, s] = sum_t g(i, s*length + t)
                                            y[i] = f(sum_s part[i, s])

Where ``pieces`` does not divide ``n`` the last piece is masked: beyond the end ``g`` is the reduction's identity. A
variance's pieces have a sum and an m2 each, which combine as ``m2 = sum m2_i + n_i (mean_i - mean)^2`` (Chan, Golub,
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
The first step is an ordinary reduction: the producers of ``g``'s inputs fuse into it. Columns (a bias gradient: the sum
over 32,768 rows of each of 4,096 columns) are cut as well where COLUMNS per program do not fill the machine.

**Whole rows** (``whole_rows``). What is reduced over all of a tensor is reduced row by row first where rows are reduced
too; and where other pieces would not be equal: with what makes and reads the same elements (the gradient of a tensor
beside that of the number it is scaled by) rows are one kernel. ::

    y = sum_{i, r} f(i, r)     becomes     of_rows[i] = sum_r f(i, r);  y = sum_i of_rows[i], which may be cut again
"""

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from ..ir.expr import ONE, ZERO, Expr, ceildiv, divide_exact, expr, maximum, minimum, product
from ..ir.loops import Axis, BodyBuilder, Indirect, Load, LoopNest, Reduce, Scan, Stmt, Store, map_stmt, stmt_args
from ..ir.ops import identity
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import eliminate_dead, merge_axes, needed, varying
from ..lower.context import contiguous_strides
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies
from .mapping import fresh
from .one_order import has_order, pieces_by_length
from .producers import makers, steps_apart
from .result import Fused
from .whole_rows import LINE, PLAIN, sums_all, whole_rows

BLOCK = 64  # a piece's length is a multiple of this where possible: generated loops go over rows in such steps
COLUMNS = 64  # results per program of a column reduction: 128 bytes of half precision
FEW, PAIRS = 16, 64  # ... of what is in no lines of its own, having so many times as many points as bytes are read
WHOLE = 512  # rows of a column reduction that a program keeps in registers, of 32 columns: all in one kernel
PIECE = 256  # rows of a column reduction that are read all at once
ALIGNED = 8  # columns of which rows begin at 16 bytes: others are read more slowly in parts than whole
FAR = 2.5  # times as many pieces as wanted, at most, that are equal: their sums take a tenth of what they are sums of
SECOND = 4_000_000  # bytes that a GPU moves in the time of the second kernel: 1 us of an H200
MIN_SCAN = 16384  # a shorter row is not worth the three kernels of ``split_scans``
MOST = 512  # pieces, for a second step that is short
WAVES = 16  # programs per multiprocessor, some 6 at a time: so many that few of these idle while the last ones end
RICH = 1 << 16  # elements of a piece beside which its start is short
_KINDS = (*PLAIN, "argmax", "argmin", "m2")


def split_reductions(fused: Fused, options: Options, target: Target) -> Fused:
    """Cut every reduction with few, long rows in two; symbolic sizes count by their hints. A program is fused again
    once its choices are made: the two steps of a reduction that was cut before are not cut again."""
    if not options.split_reductions:
        return fused
    program, depends = fused.program, dependencies(fused.program)
    nodes, buffers, invariant = list[Node](), dict(program.buffers), options.batch_invariant
    enough = 2 * target.units if target.is_gpu else sys.maxsize  # a thread of a CPU takes many rows
    for position, node in enumerate(program.nodes):
        if not isinstance(node, LoopNest) or not can_split(node) or was_split(node):
            nodes.append(node)
            continue
        pieces, least = _pieces(program, depends, position, node, options, target)
        rows = 0 if invariant else whole_rows(program, depends, position, node)
        rows = rows or (_long_rows(node, pieces, enough) if pieces > 1 and not invariant else 0)
        if product(a.size for a in node.axes[:rows]).hint() >= enough:
            first, node = _by_rows(node, rows, buffers)
            nodes.append(first)
            pieces, least = pieces_wanted(node, buffers, target), 0
        steps = steps_apart(program, node, COLUMNS * enough, MOST) if pieces > 1 and not invariant else None
        nodes += _split(node, pieces, buffers, least, steps) if pieces > 1 else [node]
    return replace(fused, program=replace(program, nodes=tuple(nodes), buffers=buffers))


# -- whole rows -------------------------------------------------------------------------------------
def _of_softmax(program: Program, depends: Dependencies, position: int, loops: LoopNest) -> bool:
    """Is what is summed made, element by element, with the maximum of the same row?"""
    return any(
        maker.rnumel == loops.rnumel and any(isinstance(s, Reduce) and s.kind == "max" for s in maker.body)
        for maker in makers(program, depends, position, lambda maker: not maker.reduced) if maker.reduced
    )  # fmt: skip


def _of_scan(program: Program, depends: Dependencies, position: int, loops: LoopNest) -> bool:
    """Does a program that scans the row have it whole, and can reduce it as well?"""
    return any(
        (maker.numel, maker.rnumel) == (loops.numel, loops.rnumel) and any(isinstance(s, Scan) for s in maker.body)
        for maker in makers(program, depends, position, lambda maker: not maker.reduced)
    )  # fmt: skip


def _long_rows(loops: LoopNest, pieces: int, enough: int) -> int:
    """How many of the first axes are rows, ``enough`` and of LINE neighbours or more, if ``pieces`` are not equal."""
    last = loops.axes[-1]
    if not sums_all(loops) or any(s.index.coefficient(last.var) not in (0, 1) for s in loops.loads()):
        return 0
    if _cut_rows(loops, pieces) or cut_axis(*with_axis(loops, pieces)[1:], alone=False).exact:
        return 0
    numbers = [product(a.size for a in loops.axes[:n]).hint() for n in range(len(loops.axes))]
    rows = next((n for n, number in enumerate(numbers) if number >= enough), 0)
    return rows if loops.rnumel.hint() >= LINE * numbers[rows] else 0


def _by_rows(loops: LoopNest, rows: int, buffers: dict[str, Buffer]) -> tuple[LoopNest, LoopNest]:
    axes = tuple(replace(a, kind="p") if i < rows else a for i, a in enumerate(loops.axes))
    count = product(a.size for a in axes[:rows])
    b, ids, of_rows = BodyBuilder(), dict[int, int](), dict[int, list[str]]()
    for i in needed(loops.body, (i for i, s in enumerate(loops.body) if isinstance(s, Reduce))):
        s = map_stmt(loops.body[i], ids)
        ids[i] = b.add(s)
        if isinstance(s, Reduce):
            of_rows[i] = [new_part(loops, (count,), s.dtype, buffers, "of_rows")]
            b.store(of_rows[i][0], row_major(axes[:rows]), ids[i])
    made = LoopNest(f"{loops.name}_rows", axes, tuple(b.body), loops.origins)
    return made, second_step(loops, count, of_rows, buffers)


# -- pieces -----------------------------------------------------------------------------------------
def _pieces(
    program: Program, depends: Dependencies, position: int, loops: LoopNest, options: Options, target: Target
) -> tuple[int, int]:
    """Into how many parts a row should be cut (1: not at all); and how many equal parts are better than unequal ones,
    at least (0: only about as many). Neighbours of unequal parts are kernels of their own."""
    strided = reduces_columns(loops)
    if loops.reduced and loops.rnumel.hint() < MIN_SCAN and _of_scan(program, depends, position, loops):
        return 1, 0
    if options.batch_invariant and has_order(loops):
        whole = not strided and _of_softmax(program, depends, position, loops)
        return pieces_by_length(loops.rnumel.constant, strided, whole, target.is_gpu), 0
    pieces = pieces_wanted(loops, program.buffers, target)
    if pieces == 1 or not target.is_gpu or not strided:
        return pieces, 0
    columns = max(1, loops.numel.hint())
    if _pairs(program, depends, position, loops):
        return pieces_wanted(loops, program.buffers, target, FEW), 0
    beside = columns % ALIGNED == 0 and _beside(program, depends, position, loops)
    return pieces, -(-3 * target.units // -(-columns // COLUMNS)) if beside else 0


def was_split(loops: LoopNest) -> bool:
    """Does it make partial results or combine them? By their buffers' names (``PartialResults``)."""
    return any(re.fullmatch(r".*_part\d+", b) for b in (*loops.reads(), *loops.writes()))


def _beside(program: Program, depends: Dependencies, position: int, loops: LoopNest) -> bool:
    """Is what columns are summed of made or read by elementwise work as well, before the sum? In equal pieces both are
    one kernel."""
    points = loops.numel * loops.rnumel
    chain, touched, todo = {position}, set[str](), [position]  # elementwise nodes that make its operand alone
    while todo:
        at = todo.pop()
        for name in program.nodes[at].reads():
            writer = depends.last_writer(name, at)
            maker = None if writer is None else program.nodes[writer]
            alone = name not in depends.needed and set(depends.readers.get(name, [])) <= chain
            if isinstance(maker, LoopNest) and not maker.reduced and alone and len(maker.writes()) == 1:
                chain.add(writer)  # type: ignore[arg-type]
                todo.append(writer)  # type: ignore[arg-type]
            elif program.buffers[name].numel.hint() == points.hint():
                touched.add(name)
    users = {at for b in touched for at in (*depends.readers.get(b, []), *depends.writers.get(b, []))}
    nodes = {at: program.nodes[at] for at in users - chain if position not in depends.before[at]}
    return any(isinstance(n, LoopNest) and not n.reduced and n.numel == points for n in nodes.values())


def _pairs(program: Program, depends: Dependencies, position: int, loops: LoopNest) -> bool:
    """Are its points made, element by element, of much less than there are: all pairs of the elements of two lists?"""
    todo, read, most = [(position, b) for b in loops.reads()], dict[str, int](), (loops.numel * loops.rnumel).hint()
    while todo and sum(read.values()) < most // PAIRS:
        at, name = todo.pop()
        writer = depends.last_writer(name, at)
        maker = None if writer is None else program.nodes[writer]
        if writer is not None and isinstance(maker, LoopNest) and not maker.reduced:
            todo += [(writer, b) for b in maker.reads()]
        else:
            read[name] = program.buffers[name].nbytes.hint()
    return not todo and sum(read.values()) < most // PAIRS


def pieces_wanted(loops: LoopNest, buffers: dict[str, Buffer], target: Target, columns: int = COLUMNS) -> int:
    """Into how many parts a row should be cut: a power of two; 1: not at all. ``columns``: results per program."""
    if not loops.reduced:
        return 1
    rows, length = max(1, loops.numel.hint()), loops.rnumel.hint()
    if target.is_gpu and reduces_columns(loops):
        programs = -(-rows // columns)
        if programs >= 2 * target.units or length < 256 or (length <= WHOLE and rows >= 16 * target.units):
            return 1
        wanted = max(min(4 * target.units // programs, length // 64), min(length // PIECE, MOST))
    elif target.is_gpu:
        if rows >= 2 * target.units or length < 8192 or _idle_bytes(loops, buffers, target) < SECOND:
            return 1
        wanted = max(min(4 * target.units // rows, length // 2048), min(WAVES * target.units // rows, length // RICH))
    else:
        threads = torch.get_num_threads()
        if rows >= threads or length < 32768:
            return 1
        wanted = min(-(-threads // rows), length // 8192)
    pieces = 1
    while pieces < wanted and pieces * 4 <= length:
        pieces *= 2
    return pieces


def _idle_bytes(loops: LoopNest, buffers: dict[str, Buffer], target: Target) -> int:
    """What multiprocessors without a row could have read while the others read theirs, one program per row."""
    inside = {s.buffer: s for s in loops.loads() if s.index.variables() & loops.reduced_vars}
    row = sum(buffers[name].dtype.itemsize for name in inside) * loops.rnumel.hint()
    return -loops.numel.hint() % target.units * row


def with_axis(loops: LoopNest, pieces: int) -> tuple[LoopNest, Axis, int]:
    """The axis to cut, and into how many pieces: of those with about enough steps the one with the widest, so that a
    piece is contiguous where the row is. Steps of a narrower one are worth a piece if what it reads at once is LINE
    elements: of 283 rows of 8,192, each row is a piece, not 8 columns. If none has a quarter: the longest, after axes
    that memory steps through as one are merged. (What a piece reads is then no part of any axis that the producers
    have, and these do not fuse.)"""
    widest, columns = max(_step(loops, a) for a in loops.reduced), reduces_columns(loops)

    def most(a: Axis) -> int:
        size, step = a.size.hint(), _step(loops, a)
        return min(pieces, size if columns or step in (0, widest) else min(size, size * step // LINE))

    enough = [a for a in loops.reduced if 2 * most(a) >= pieces]
    axis = max(enough, key=lambda a: _step(loops, a)) if enough else max(loops.reduced, key=most)
    if 4 * most(axis) >= pieces:
        return loops, axis, most(axis)
    loops = merge_axes(loops, apart=True)
    return loops, max(loops.reduced, key=lambda a: a.size.hint()), pieces


def _step(loops: LoopNest, a: Axis) -> int:
    steps = [ld.index.coefficient(a.var) for ld in loops.loads()]
    return max((abs(step.hint()) for step in steps if step is not None), default=0)


def reduces_columns(loops: LoopNest) -> bool:
    """Do neighbouring results come from neighbouring columns, for most of what is read? Then one GPU program computes
    COLUMNS of them."""
    reduced, read = loops.reduced_vars, {"p": 0, "r": 0}
    for s in loops.loads():
        along = [a.kind for a in loops.axes if s.index.coefficient(a.var) == 1 and a.size != 1]
        for kind in along if s.index.variables() & reduced else ():
            read[kind] += product(v.size for v in s.index.variables()).hint()
    inner = [a.kind for a in loops.axes if a.size != 1][-1:]
    return read["p"] > read["r"] if any(read.values()) else inner == ["p"]


def can_split(loops: LoopNest) -> bool:
    """Is there one round of reductions, with results stored once per row, and nothing that needs the row whole?"""
    level = varying(loops.body, loops.reduced_vars)
    after = [False] * len(loops.body)
    for i, s in enumerate(loops.body):
        after[i] = any(after[a] or isinstance(loops.body[a], Reduce) for a in stmt_args(s))
        if isinstance(s, Reduce) and (after[i] or s.kind not in _KINDS):
            return False
        if isinstance(s, Store) and (level[i] or level[s.value]):
            return False
        if isinstance(s, Scan) or isinstance(s, Indirect) and level[i]:
            return False
    return True


@dataclass
class Cut:
    """The reduced axis that is cut, its two parts, and the guard ``axis < size`` where the parts reach beyond it."""

    axis: Axis
    s: Axis
    t: Axis
    exact: bool


def _split(loops: LoopNest, wanted: int, buffers: dict[str, Buffer], least: int, steps: Axis | None) -> list[Node]:
    if steps is None and (both := _cut_rows(loops, wanted)) is not None:
        first, partials = first_step(*both, buffers)
        (rows,) = set(loops.reduced) - set(both[0].reduced)
        return [first, second_step(loops, rows.size * both[1].s.size, partials, buffers)]
    loops, axis, pieces = with_axis(loops, wanted) if steps is None else (loops, steps, int(steps.size))
    if reduces_columns(loops) and steps is None:
        pieces = equal_pieces(axis, pieces, *((min(0.75, least / pieces), FAR) if least else ()))
    cut = cut_axis(axis, pieces, alone=all(a is axis or a.size == 1 for a in loops.reduced))
    first, partials = first_step(loops, cut, buffers)
    return [first, second_step(loops, cut.s.size, partials, buffers, cut)]


def _cut_rows(loops: LoopNest, wanted: int) -> tuple[LoopNest, Cut] | None:
    """Where each step of an axis can be a piece and these are too few: ``loops`` parallel in it, and a cut of its
    longest other axis, along which memory is contiguous, in equal parts. (One program for each of 283 rows gives
    some of 132 multiprocessors three where the mean is 2.1, as if a third of them were idle; four parts: 9, 8.6.)"""
    merged, axis, _ = with_axis(loops, wanted)
    axis = axis if merged is loops else max(loops.reduced, key=lambda a: _step(loops, a))
    inner = max((a for a in loops.reduced if a is not axis), key=lambda a: a.size.hint(), default=axis)
    size, each = inner.size.constant, -(-wanted // max(1, axis.size.hint()))
    last = [a for a in loops.axes if a is axis or a.kind == "p" and a.size != 1][-1]  # else pieces are not neighbours
    sums = all(s.kind != "m2" for s in loops.body if isinstance(s, Reduce))
    if axis.size.constant is None or last is not axis or size is None or not sums or _step(loops, inner) != 1:
        return None
    parts = max((n for n in range(2, 2 * each) if size % n == 0 and size >= 2048 * n), default=1)
    axes = tuple(replace(a, kind="p") if a is axis else a for a in loops.axes)
    return (replace(loops, axes=axes), cut_axis(inner, parts, alone=False)) if parts > 1 else None


def equal_pieces(axis: Axis, pieces: int, least: float = 0.75, most: float = 1.25) -> int:
    """About as many (``least`` to ``most`` times), if that makes them equal: else each element has a mask, and a
    variance's a weight. (Of 100 x 28 x 28 rows one takes 2.6 times the instructions in 409 pieces of 192 as in 490 of
    160.)"""
    size, near = axis.size.constant or 0, range(ceil(least * pieces), int(most * pieces) + 1)
    equal = (n for n in near if size and size % n == 0)
    return min(equal, key=lambda n: max(n, pieces) / min(n, pieces), default=pieces)


def cut_axis(axis: Axis, pieces: int, alone: bool) -> Cut:
    """``alone``: it is the only axis that is reduced. Of several, it is one that producers have: those fuse with equal
    parts of it, not with a tail."""
    pieces = min(pieces, axis.size.hint())
    if not alone:
        pieces = equal_pieces(axis, pieces, 0.5, 2)
    length = divide_exact(axis.size, pieces)
    if length is None and axis.size.constant is not None:  # pieces of whole blocks, so that only the last has a tail
        block = BLOCK if alone and axis.size.constant >= pieces * BLOCK else 1
        length = expr(-(-axis.size.constant // (pieces * block)) * block)
        pieces = -(-axis.size.constant // int(length))
    exact = length is not None and length * pieces == axis.size
    s = Axis(fresh(expr(pieces)), "p")
    t = Axis(fresh(length if length is not None else ceildiv(axis.size, pieces)), "r")
    return Cut(axis, s, t, exact)


def first_step(
    loops: LoopNest,
    cut: Cut,
    buffers: dict[str, Buffer],
    change: Callable[[BodyBuilder, int, Stmt], Stmt] | None = None,
) -> tuple[LoopNest, dict[int, list[str]]]:
    """``part[p..., s] = reduce_t ...``; returns also which buffers hold each Reduce's partial results. ``change``: of
    the statement that ``loops`` has at a position."""
    b = BodyBuilder()
    at = expr(cut.s.var) * cut.t.size + expr(cut.t.var)
    mask = None if cut.exact else b.op("lt", b.index(at), b.index(cut.axis.size))
    partial = PartialResults(loops, cut.s, b, buffers)
    ids: dict[int, int] = {}
    for i in needed(loops.body, (i for i, s in enumerate(loops.body) if isinstance(s, Reduce))):
        st = map_stmt(loops.body[i], ids, {cut.axis.var: at})
        st = st if change is None else change(b, i, st)
        if isinstance(st, Load) and mask is not None:
            st = replace(st, mask=mask if st.mask is None else b.op("and", mask, st.mask))
        if isinstance(st, Reduce):
            partial.add(i, st, mask)
        else:
            ids[i] = b.add(st)
    axes = tuple(x for a in loops.axes for x in ((cut.s, cut.t) if a is cut.axis else (a,)))
    return LoopNest(f"{loops.name}_part", axes, eliminate_dead(tuple(b.body)), loops.origins), partial.names


class PartialResults:
    """Makes a buffer for each partial result: with one row of pieces per row, or the other way round (columns)."""

    def __init__(self, loops: LoopNest, s: Axis, b: BodyBuilder, buffers: dict[str, Buffer]):
        axes = partial_axes(loops, s)
        self.shape = tuple(a.size for a in axes)
        self.index = row_major(axes)
        self.loops, self.b, self.buffers = loops, b, buffers
        self.names: dict[int, list[str]] = {}
        self.made: dict[int, str] = {}  # by the partial reduction

    def add(self, i: int, reduce: Reduce, mask: int | None) -> None:
        """An arg* needs each piece's extreme value too, an m2 the sum. ``mask``: where the piece is inside."""
        steps = [reduce]
        if reduce.kind.startswith("arg"):
            steps.insert(0, Reduce(reduce.kind[3:], reduce.args[:1], self.b.dtype(reduce.args[0])))
        elif reduce.kind == "m2":
            steps.append(replace(reduce, kind="sum"))
        for step in steps:
            value = self.b.add(step if mask is None else self._masked(step, mask))
            if value not in self.made:
                self.made[value] = self._buffer(step.dtype)
                self.b.store(self.made[value], self.index, value)
            self.names.setdefault(i, []).append(self.made[value])

    def make(self, i: int, dtype: torch.dtype) -> str:
        """A buffer for the results of the Reduce at ``i``; the caller stores them."""
        self.names[i] = [self._buffer(dtype)]
        return self.names[i][0]

    def _masked(self, step: Reduce, mask: int) -> Reduce:
        """Beyond the end, values that change nothing; of an m2, a weight of 0."""
        dtype = self.b.dtype(step.args[0])
        neutral = self.b.const(identity(step.kind, dtype), dtype)
        args = (self.b.op("where", mask, step.args[0], neutral), *step.args[1:])
        return replace(step, args=args if step.kind != "m2" else (*args, self.b.cast(mask, dtype)))

    def _buffer(self, dtype: torch.dtype) -> str:
        return new_part(self.loops, self.shape, dtype, self.buffers)


def new_part(
    loops: LoopNest, shape: tuple[Expr, ...], dtype: torch.dtype, buffers: dict[str, Buffer], what: str = "part"
) -> str:
    """A buffer for results of a part of ``loops``, row-major. ``what``: in its name; ``was_split`` knows ``part``."""
    name = next(n for i in itertools.count() if (n := f"{loops.name}_{what}{i}") not in buffers)
    buffers[name] = Buffer(name, dtype, buffers[loops.writes()[0]].device, shape, contiguous_strides(shape))
    return name


def partial_axes(loops: LoopNest, s: Axis) -> list[Axis]:
    """The axes of a buffer of partial results. A row's pieces are contiguous; for columns, a piece's columns are:
    either way neighbours in the first step store next to each other."""
    rows = [a for a in loops.axes if a.kind == "p"]
    return [s, *rows] if reduces_columns(loops) else [*rows, s]


def row_major(axes: Sequence[Axis]) -> Expr:
    step, out = ONE, expr(0)
    for a in reversed(axes):
        out = out + expr(a.var) * step
        step = step * a.size
    return out


def second_step(
    loops: LoopNest,
    pieces: Expr,
    partials: dict[int, list[str]],
    buffers: dict[str, Buffer],
    cut: Cut | None = None,
    weight: Callable[[BodyBuilder, Expr, dict[int, int]], int] | None = None,
) -> LoopNest:
    """Reduce the partial results, then everything that ran once per row. An m2 takes ``cut``. ``weight``: what each
    partial result is multiplied by; it takes their index, and the statements so far by their position in ``loops``."""
    b = BodyBuilder()
    r = Axis(fresh(pieces), "r")
    axes = partial_axes(loops, r)
    index = row_major(axes)
    level = varying(loops.body, loops.reduced_vars)
    ids: dict[int, int] = {}
    for i, st in enumerate(loops.body):
        if isinstance(st, Reduce):
            parts = tuple(b.load(n, index, buffers[n].dtype) for n in partials[i])
            if cut is not None and st.kind == "m2":
                ids[i] = _combined_m2(b, parts, loops, cut, r)
            else:
                parts = parts if weight is None else (b.op("mul", *parts, weight(b, index, ids)),)
                ids[i] = b.add(replace(st, args=parts))
        elif not level[i]:
            ids[i] = b.add(map_stmt(st, ids))
    return LoopNest(loops.name, tuple(axes), eliminate_dead(tuple(b.body)), loops.origins)


def _combined_m2(b: BodyBuilder, parts: Sequence[int], loops: LoopNest, cut: Cut, r: Axis) -> int:
    """From the m2 and the sum of each piece. (The last may be shorter; of a symbolic size some may be empty.)"""
    m2, total = parts
    dtype = b.dtype(m2)

    def number(e: Expr) -> int:
        return b.const(e.constant, dtype) if e.constant is not None else b.cast(b.index(e), dtype)

    inside = cut.t.size if cut.exact else minimum(cut.t.size, maximum(cut.axis.size - expr(r.var) * cut.t.size, ZERO))
    count = number(inside * product(a.size for a in loops.reduced if a is not cut.axis))
    if cut.exact:
        between = b.op("mul", count, b.reduce("m2", b.op("div", total, count), dtype=dtype))
    else:
        mean = b.op("div", total, b.op("maximum", count, number(ONE)))
        between = b.reduce("m2", mean, count, dtype=dtype)
    return b.op("add", b.reduce("sum", m2, dtype=dtype), between)
