"""A reduction over a few elements whose results meet other rows: written out, so that both are one kernel.

The squared distance of two points is a sum over three coordinates; the distance to the nearest point is a minimum of
these. One kernel has one set of rows, so as two reductions they are two kernels, and all the distances go through
memory. Written out, the first is elementwise::

    d[i, j] = sum_c (x[i, c] - y[j, c])^2     becomes     d[i, j] = (x[i, 0] - y[j, 0])^2 + (x[i, 1] - y[j, 1])^2 + ...

(Or a cost of all pairs of boxes, of sums over four coordinates and of products of two sides: they meet in a sum.) It is
joined to its readers, or computed again in each of them, like other elementwise work. The elementwise nodes that
make its operand alone go into it first; they are computed as often as before. A short reduction whose readers reduce
the same rows (a norm of 4 features), or put its result back beside each element, stays one.

**Strided elements** (``across``, on the kernels that fusion made). Where neighbours in memory are other results, lanes
go along these. Triton then spreads a row's few elements over warps, and what is computed per row goes through shared
memory, a barrier each time. Written out, a thread has all elements of its rows, and nothing is exchanged. (A softmax
over 8 channels of 445 images of 120 x 128, bf16, H200: 508 us before, 66 with another order of what it stores.)

**Shared elements** (likewise). All pairs of two short lists of points read each coordinate thousands of times: from
the cache. What counts is how many lanes work, and of a row of 5 in a block of 8 three lanes do not.

Of an argmax or argmin, the extreme value first, then the first position that has it (or NaN); comparisons of positions
that are decided then go (``decided``): of three parts that a ``stack`` joins, an element is one.

**Elements that the kernel also reads one by one** (likewise; ``f.sum(0)`` of nine populations, and ``f[1] - f[3]``): a
thread of a loop over the row would have only some of these, and reads them twice.

**Coordinates** (``by_row``). A cross product's element is made of two others of its row. As loops over coordinates,
each is computed where it is asked for, three times, or goes through memory; written out, with what makes and takes its
rows, a thread has a row, and all is one kernel. (Points rotated by quaternions, on an H200: 101 us before, 31.) Not
where rows are gathered or added at places: lanes that go along coordinates share sectors there, 88 us where those that
have rows of their own take 156.

**Coordinates of sums** (``by_result``). The forces on a body are three sums of one weight, times a coordinate each. As
one loop nest over coordinates, the weights of all pairs are computed three times or go through memory; written out,
three sums share a kernel's rows, and what makes the weights joins them. (6,144 bodies: 302 MB less.)

NB: TorchInductor writes out each reduction of fewer than 8 elements while lowering.
"""

from dataclasses import replace
from itertools import product
from math import inf
from typing import TypeGuard

from ..ir.expr import Atom, Expr, IntLike, Var, expr
from ..ir.expr import product as points
from ..ir.instructions import work_of
from ..ir.loops import Axis, BodyBuilder, Index, Indirect, Load, LoopNest, Op, Reduce, Scan, Stmt, Store, map_stmt
from ..ir.program import Buffer, Node, Program
from ..ir.traffic import LANES, WARP, accesses, cheapest_last, cost, neighbours
from ..ir.transforms import drop_unit_axes, two_passes, varying
from ..options import Options
from ..target import Target
from .decided import decided
from .dependencies import Dependencies, dependencies, remove_dead
from .emit import kind_of
from .inline_loads import MAX_BODY
from .legality import common_space, single
from .producers import Producer, make_producer, makes_all, replace_loads
from .result import Fused, Reason

LONGEST = 8  # elements: from a second row of them on, a thread has their registers twice
STRIDED = 32  # elements that one thread has, where lanes go along the results of many threads
COORDINATES, LONG = 4, 1 << 12  # of a row; rows or elements that are worth it
MAX_WORK = 96  # loads and operations of one result
LESS = 0.6  # of the instructions: what is left where a kernel's points are written out by part
FEWER = 0.8  # of the sectors: what is left where a kernel's points are written out along an axis
FILLED = 1024  # points per multiprocessor
FAR = 64  # readers that are looked at
_OPS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "or", "all": "and", "m2": "",
        "argmax": "maximum", "argmin": "minimum"}  # fmt: skip


def unroll(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program, such reductions written out. GPU only: a CPU's kernels vectorize what is left of a row. Not
    with ``batch_invariant``: what reads a sum may depend on the batch, and with it the order of additions."""
    if not target.is_gpu or options.batch_invariant:
        return fused
    program = fused.program
    short = [i for i, n in enumerate(program.nodes) if isinstance(n, LoopNest) and _short(n)]
    if not short:
        return fused
    depends = dependencies(program)
    lengths = _rows(program, depends)
    chosen = {i for i in short if _apart(program, depends, lengths, i)}
    taken = _makers(program, depends, chosen)
    nodes = list(program.nodes)
    for i in sorted(chosen):
        written_out = unrolled(_with_makers(nodes[i], taken, depends, i))  # type: ignore[arg-type]
        work = sum(isinstance(s, (Load, Op, Indirect)) for s in written_out.body)
        if work <= MAX_WORK and _moves_less(program, depends, written_out):
            nodes[i] = written_out
    if all(a is b for a, b in zip(nodes, program.nodes)):
        return fused
    return replace(fused, program=remove_dead(replace(program, nodes=tuple(nodes))))


def by_element(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program, what reads a row of a few elements that a reduction stores one by one (``topk``) written out
    along these. Under the same conditions as ``unroll``; assumes a legal order."""
    if not target.is_gpu or options.batch_invariant:
        return fused
    nodes, depends = list(fused.program.nodes), dependencies(fused.program)
    made: dict[str, list[int]] = {}  # by buffer: where, from the row's first
    for i, node in enumerate(nodes):
        if not isinstance(node, LoopNest):
            continue
        for a in node.axes:
            read = (s for s in node.loads() if s.buffer in made)
            buffer = next((s.buffer for s in read if made[s.buffer] == _steps(s.index, a)), None)
            if buffer is None or node.reduced and not (node.reduced == (a,) and _few(node)):
                continue
            maker = depends.last_writer(buffer, i)
            if maker is None or not isinstance(first := nodes[maker], LoopNest):
                continue
            new = _along(node, a)
            work = sum(isinstance(s, (Load, Op, Indirect)) for s in new.body)
            together = common_space(single(maker, first, depends), single(i, new, depends), fused.program)
            if work <= MAX_WORK and not isinstance(together, Reason):
                nodes[i] = node = new
                made |= _one_by_one(new)
                break
        if any(isinstance(s, Reduce) for s in node.body):
            made |= _one_by_one(node)
    return replace(fused, program=replace(fused.program, nodes=tuple(nodes)))


def by_row(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program, what mixes the few coordinates of its rows written out along them, and so what makes these
    rows or takes them. Under the same conditions as ``unroll``."""
    if not target.is_gpu or options.batch_invariant:
        return fused
    nodes, depends = list(fused.program.nodes), dependencies(fused.program)
    loops = {i: n for i, n in enumerate(nodes) if isinstance(n, LoopNest) and n.numel.hint() >= LONG}
    few = {i: a for i, n in loops.items() if (a := _coordinates(n)) is not None}
    rows = {i: points(b.size for b in n.axes if b is not few.get(i)) for i, n in loops.items()}
    mixed = [i for i, a in few.items() if any(s.index.coefficient(a.var) is None for s in loops[i].loads())]
    written_out, seen = dict[int, LoopNest](), set[int]()
    for first in mixed:
        if first in seen:
            continue
        todo, found = [first], {first}
        while todo:
            i = todo.pop()
            near = {w for b in loops[i].reads() if (w := depends.last_writer(b, i)) is not None}
            near |= {r for b in loops[i].writes() for r in depends.readers.get(b, [])}
            alike = {j for j in near - found if j in loops and rows[j] == rows[i]}
            found |= alike
            todo += alike
        seen |= found
        new = {i: _along(loops[i], few[i]) for i in found & few.keys()}
        gathers = any(isinstance(s, Indirect) for i in found for s in loops[i].body)
        if not gathers and all(len(n.body) <= MAX_WORK for n in new.values()):
            written_out |= new
    nodes = [written_out.get(i, n) for i, n in enumerate(nodes)]
    return replace(fused, program=replace(fused.program, nodes=tuple(nodes)))


def by_result(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program, sums with a few results for each weight that other nodes make written out along these results.
    Under the same conditions as ``unroll``."""
    if not target.is_gpu or options.batch_invariant:
        return fused
    program, depends = fused.program, dependencies(fused.program)
    nodes = list(program.nodes)
    for i, node in enumerate(nodes):
        few = _results(node) if isinstance(node, LoopNest) else None
        if few is None:
            continue
        taken = _makers(program, depends, {i})
        new = _with_makers(node, taken, depends, i)  # type: ignore[arg-type]
        made = [nodes[w] for b in new.reads() if (w := depends.last_writer(b, i)) is not None]
        made += [p.loops for p in taken.values()]
        rows = new.numel * new.rnumel
        if any(isinstance(m, LoopNest) and m.numel * few.size == rows for m in made):
            new = drop_unit_axes(by_parts(new, few, few.size.constant or 0))
            nodes[i] = new if len(new.body) <= MAX_WORK else node
    if all(a is b for a, b in zip(nodes, program.nodes)):
        return fused
    return replace(fused, program=remove_dead(replace(program, nodes=tuple(nodes))))


def _results(loops: LoopNest) -> Axis | None:
    """The axis of a few results of each row that is reduced, where rows are long and many."""
    if not loops.reduced or any(isinstance(s, Scan) for s in loops.body) or any(s.reduce for s in loops.stores()):
        return None
    few = [a for a in loops.parallel if 1 < (a.size.constant or 0) <= COORDINATES]
    long = loops.rnumel.hint() > LONGEST and loops.numel.hint() > LONGEST * COORDINATES
    return few[0] if len(few) == 1 and long else None


def _along(loops: LoopNest, few: Axis) -> LoopNest:
    return unrolled(replace(loops, axes=tuple(Axis(a.var, "r" if a is few else "p") for a in loops.axes)))


def _coordinates(loops: LoopNest) -> Axis | None:
    """The axis of a few elements that each row has: of elementwise work, or reduced alone."""
    short = [a for a in loops.axes if a.size.constant is not None and 1 < a.size.constant <= COORDINATES]
    if len(short) != 1 or any(isinstance(s, Scan) for s in loops.body):
        return None
    if loops.reduced and (loops.reduced != (short[0],) or not _few(loops)):
        return None
    linear = all(s.index.coefficient(short[0].var) is not None for s in loops.stores())
    return short[0] if linear and not any(s.reduce == "sum" for s in loops.stores()) else None


def _one_by_one(loops: LoopNest) -> dict[str, list[int]]:
    by: dict[str, list[Expr]] = {}
    for s in loops.stores():
        by.setdefault(s.buffer, []).append(s.index)
    apart = {name: [(e - indices[0]).constant for e in indices] for name, indices in by.items() if len(indices) > 1}
    return {name: sorted(c for c in found if c is not None) for name, found in apart.items() if None not in found}


def _steps(index: Expr, a: Axis) -> list[int] | None:
    """Where ``index`` goes along a short axis, from its first element."""
    step, n = index.coefficient(a.var), a.size.constant
    if step is None or not step.constant or n is None or not 1 < n <= LONGEST:
        return None
    return sorted(j * step.constant for j in range(n))


def across(fused: Fused, options: Options, target: Target) -> Fused:
    """The same kernels, on a GPU, written out along few elements that lanes should not go along: reductions of strided
    or shared ones; elementwise ones whose elements are made in different ways. With ``batch_invariant`` sums are of
    pairs, as they are in a kernel that reduces (``generate.triton_one_order``): the same bits, written out or not."""
    if not target.is_gpu:
        return fused
    buffers = fused.program.buffers

    def new(n: Node) -> Node:
        if not isinstance(n, LoopNest) or any(s.reduce for s in n.stores()):
            return n
        longest = STRIDED if n.numel.hint() >= FILLED * target.units else LONGEST
        if _few(n, max(longest, len(n.loads()))) and (not options.batch_invariant or _in_pairs(n)):
            written_out = unrolled(n, options.batch_invariant)
            strided = _few(n, longest) and _strided(n, buffers)
            short, most = strided or _few(n) and _shared(n, buffers), (1 + strided) * MAX_BODY
            short = short or len(written_out.loads()) < len(n.loads())  # it reads each of them by itself as well
            n = written_out if short and len(written_out.body) <= most else n
        return n if n.reduced else _by_part(n, target, buffers)

    nodes = tuple(map(new, fused.program.nodes))
    changed = {n.name: n for n, old in zip(nodes, fused.program.nodes) if n is not old}
    groups = tuple(replace(g, kind=kind_of(changed[g.name])) if g.name in changed else g for g in fused.groups)
    return replace(fused, groups=groups, program=replace(fused.program, nodes=nodes))


def _by_part(loops: LoopNest, target: Target, buffers: dict[str, Buffer]) -> LoopNest:
    """``loops``, elementwise over a short axis, written out along it where that takes LESS of the arithmetic: its
    elements are parts made in different ways (a ``stack`` of three colours), of which each is computed for all, and
    lanes do not go along it. Or where what a warp loads for one part has the others in between (``_interleaved``). With
    enough points left for all threads."""
    for a in loops.axes:
        size, moved = a.size.constant or 0, [s for s in loops.body if isinstance(s, (Load, Store))]
        if not 1 < size <= LONGEST or loops.numel.hint() < size * FILLED * target.units:
            continue
        steps, out = [s.index.coefficient(a.var) for s in moved], _along(loops, a)
        if None not in steps and _interleaved(loops, a, buffers) and len(out.body) <= MAX_BODY:
            return out
        apart = not any(step in (None, -1, 1) for step in steps)
        if apart and work_of(out) <= LESS * size * work_of(loops) and len(out.body) <= MAX_BODY:
            return out
    return loops


def _interleaved(loops: LoopNest, a: Axis, buffers: dict[str, Buffer]) -> bool:
    """Do lanes go along another axis, and lines that they read hold the elements of several places along ``a``?"""
    moved = accesses(loops.body, buffers)
    order = cheapest_last(loops.axes, moved)
    lanes, stored = neighbours(order, WARP), neighbours(order, LANES)
    if a.var in lanes:
        return False
    return cost(moved, lanes | {a.var: a.size.hint()}, stored) < FEWER * cost(moved, lanes, stored)


def _strided(loops: LoopNest, buffers: dict[str, Buffer]) -> bool:
    """Are the elements of neighbouring results nearer to each other than those of one result?"""
    moved = [a for a in accesses(loops.body, buffers) if any(map(a.varies, loops.reduced_vars))]
    few = {a.var: a.size.hint() for a in loops.reduced}
    near = [cost(moved, {a.var: min(LONGEST, a.size.hint())}) for a in loops.parallel if a.size.hint() > 1]
    return min(near, default=inf) < cost(moved, few)


def _shared(loops: LoopNest, buffers: dict[str, Buffer]) -> bool:
    """Is each element read for many results?"""
    moved = [a for a in accesses(loops.body, buffers) if any(map(a.varies, loops.reduced_vars))]
    many = [a.var for a in loops.parallel if a.size.hint() > LONGEST]
    return all(any(not a.varies(v) for v in many) for a in moved)


def _moves_less(program: Program, depends: Dependencies, loops: LoopNest) -> bool:
    """Are fewer bytes that other kernels store read again than the result's store and load take?"""
    size = {name: b.nbytes.hint() for name, b in program.buffers.items()}
    todo, again = loops.reads(), 0
    while todo:
        name = todo.pop()
        maker = program.nodes[depends.writers[name][-1]] if name in depends.writers else None
        if isinstance(maker, LoopNest) and not maker.reduced and sum(size[b] for b in maker.reads()) < size[name]:
            todo += maker.reads()  # computed again, from less
        elif maker is not None:
            again += size[name]
    return again < 2 * sum(size[b] for b in loops.writes())


def _few(loops: LoopNest, longest: int = LONGEST) -> bool:
    """Does it reduce a few elements?"""
    kinds = {s.kind for s in loops.body if isinstance(s, Reduce)}
    if not kinds or not kinds <= set(_OPS) or any(isinstance(s, Scan) for s in loops.body):
        return False
    n = loops.rnumel.constant
    return n is not None and 1 < n <= longest and all(_order(loops, s) for s in loops.body if _picks(s))


def _short(loops: LoopNest) -> bool:
    """And is each result stored once per row?"""
    return _few(loops) and not any(s.reduce or s.index.has(v) for s in loops.stores() for v in loops.reduced_vars)


def _rows(program: Program, depends: Dependencies) -> list[dict[Expr, set[Expr]]]:
    """Per node, of each number of results: the lengths of the rows that these were reduced from, in it or in what it
    reads through elementwise nodes with as many points."""
    found: list[dict[Expr, set[Expr]]] = []
    for i, node in enumerate(program.nodes):
        lengths = set[Expr]()
        if isinstance(node, LoopNest):
            lengths = {node.rnumel} if node.reduced else lengths
            makers = (depends.last_writer(b, i) for b in node.reads()) if not node.reduced else ()
            for w in makers:
                lengths |= found[w].get(node.numel, set()) if w is not None else set()
        found.append({node.numel: lengths} if lengths else {})  # type: ignore[union-attr]
    return found


def _apart(program: Program, depends: Dependencies, lengths: list[dict[Expr, set[Expr]]], position: int) -> bool:
    """Do its results meet other rows, at once or through elementwise nodes with as many points: of a reduction that
    reads them, or rows of another length that an elementwise node's other operand was reduced from?"""
    rows = program.nodes[position].numel  # type: ignore[union-attr]
    todo, seen = [position], set[int]()
    while todo and len(seen) < FAR:
        for name in program.nodes[todo.pop()].writes():
            for r in depends.readers.get(name, []):
                reader = program.nodes[r]
                if r in seen or r <= position or not isinstance(reader, LoopNest):
                    continue
                seen.add(r)
                if reader.reduced and reader.numel != rows:
                    return True
                if not reader.reduced and reader.numel == rows:
                    if len(lengths[r].get(rows, ())) > 1:
                        return True
                    todo.append(r)
    return False


def _makers(program: Program, depends: Dependencies, chosen: set[int]) -> dict[str, Producer]:
    """By what they write: elementwise nodes that only ``chosen`` and others of these read, where they write it."""
    found: dict[str, Producer] = {}
    inside = set(chosen)
    for i in range(max(chosen, default=-1), -1, -1):
        node = program.nodes[i]
        if not isinstance(node, LoopNest) or node.reduced or len(node.stores()) != 1 or i in inside:
            continue
        store = node.stores()[0]
        readers = depends.readers.get(store.buffer, [])
        if store.buffer in depends.needed or store.reduce or not readers or not inside.issuperset(readers):
            continue
        if len(depends.writers[store.buffer]) != 1 or not makes_all(program, node, store):
            continue
        alike = (common_space(single(i, node, depends), single(r, program.nodes[r], depends)) for r in readers)  # type: ignore[arg-type]
        producer = make_producer(i, node, store)
        if producer is not None and not any(isinstance(m, Reason) for m in alike):
            found[store.buffer] = producer
            inside.add(i)
    return found


def _with_makers(loops: LoopNest, makers: dict[str, Producer], depends: Dependencies, position: int) -> LoopNest:
    while names := [n for n in loops.reads() if n in makers]:
        p = makers[names[0]]
        if any(depends.written_between(b, p.position, position + 1) for b in p.loops.reads()):
            break
        new = replace_loads(loops, p)
        if len(new.body) > MAX_BODY:
            break
        loops = new
    return loops


def _points(loops: LoopNest) -> list[dict[Atom, IntLike]]:
    ranges = [[(a.var, n) for n in range(a.size.constant or 0)] for a in loops.reduced]
    return [dict(p) for p in product(*ranges)]


def _picks(s: Stmt) -> TypeGuard[Reduce]:
    return isinstance(s, Reduce) and s.kind in ("argmax", "argmin")


def _order(loops: LoopNest, s: Reduce) -> list[int]:
    """The points by the position that ``s`` has there, the first one first. (Empty: not known.)"""
    at = loops.body[s.args[1]]
    if not isinstance(at, Index):
        return []
    places = [at.expr.subs(p) for p in _points(loops)]
    apart = [(e - places[0]).constant for e in places]
    return [] if None in apart else sorted(range(len(apart)), key=apart.__getitem__)  # type: ignore[arg-type]


def _in_pairs(loops: LoopNest) -> bool:
    """Are its sums those of one axis, whose order is known?"""
    kinds = {s.kind for s in loops.body if isinstance(s, Reduce)}
    return len(loops.reduced) == 1 and kinds <= {"sum", "max", "min", "any", "all"}


def unrolled(loops: LoopNest, pairs: bool = False) -> LoopNest:
    """Without its reduced axes, of constant sizes: each statement once per element. ``pairs``: neighbours' sums."""
    loops = two_passes(loops)
    level = varying(loops.body, loops.reduced_vars)
    points = _points(loops)
    b = BodyBuilder()
    ids: list[dict[int, int]] = [{} for _ in points]
    for i, s in enumerate(loops.body):
        if isinstance(s, Reduce):
            total = _total(b, s, ids, pairs)
            new = [_first(b, s, total, [ids[n] for n in _order(loops, s)]) if _picks(s) else total] * len(points)
        elif level[i]:
            new = [b.add(map_stmt(s, at, point)) for at, point in zip(ids, points)]
        else:
            new = [b.add(map_stmt(s, ids[0]))] * len(points)
        for at, value in zip(ids, new):
            at[i] = value
    axes = tuple(Axis(a.var, "p") for a in loops.parallel)
    return LoopNest(loops.name, axes, decided(tuple(b.body)), loops.origins)


def by_parts(loops: LoopNest, a: Axis, n: int) -> LoopNest:
    """``loops`` over a ``n``-th of ``a``: each statement once per part, where it varies with that."""
    part = Var(a.var.name, a.size // n)
    points: list[dict[Atom, IntLike]] = [{a.var: expr(part) + j * part.size} for j in range(n)]
    level = varying(loops.body, [a.var], reduces=a.kind == "p")
    b = BodyBuilder()
    ids: list[dict[int, int]] = [{} for _ in points]
    for i, s in enumerate(loops.body):
        if isinstance(s, Reduce) and a.kind == "r":
            new = [b.reduce(s.kind, _total(b, s, ids), dtype=s.dtype)] * n
        elif level[i]:
            new = [b.add(map_stmt(s, at, point)) for at, point in zip(ids, points)]
        else:
            new = [b.add(map_stmt(s, ids[0]))] * n
        for at, value in zip(ids, new):
            at[i] = value
    axes = tuple(Axis(part, x.kind) if x == a else x for x in loops.axes)
    return replace(loops, axes=axes, body=decided(tuple(b.body)))


def _total(b: BodyBuilder, s: Reduce, ids: list[dict[int, int]], pairs: bool = False) -> int:
    dtype = b.dtype(ids[0][s.args[0]]) if _picks(s) else s.dtype
    values = [b.cast(at[s.args[0]], dtype) for at in ids]
    while pairs and s.kind == "sum" and len(values) > 1:
        values += [b.const(0, dtype)] * (len(values) % 2)  # (-0.0 + 0.0 is 0.0: so it is in a block with zeros)
        values = [b.op("add", x, y) for x, y in zip(values[::2], values[1::2])]
    total, *others = values
    for value in others:
        total = b.op(_OPS[s.kind], total, value)
    return total


def _first(b: BodyBuilder, s: Reduce, extreme: int, ids: list[dict[int, int]]) -> int:
    """The position of the first value that is the extreme one: NaN, if there is one."""
    place = ids[-1][s.args[1]]
    for at in reversed(ids[:-1]):
        value = at[s.args[0]]
        found = b.op("eq", value, extreme)
        if b.dtype(value).is_floating_point:
            found = b.op("or", found, b.op("isnan", value))
        place = b.op("where", found, at[s.args[1]], place)
    return place
