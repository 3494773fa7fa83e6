"""Columns summed in the kernel that reduces the rows: a tensor read once for both.

The backward of a layer norm reduces every row (over the features) for the gradient of its input, and sums every column
(over the rows) for the gradients of weight and bias. Two kernels read the same two tensors twice: 5 full-size accesses
with the result's store, where 3 are needed. So are the backward of RMS norm, and of a bias before a softmax or a norm.

**One kernel.** A program keeps whole rows in registers, as a persistent row reduction does. It takes every P-th block
of rows (P programs), and adds each column up in registers as it goes: RBLOCK float32 accumulators per sum. At its end
it stores them as one row of ``part[P, columns]``. A second kernel, an ordinary column reduction of P rows, adds these
and does what followed the sum. There are no atomics: which program adds which rows, and in which order, is fixed.

**In groups.** A shift, scale or gate that each image of a batch has for its rows (``adaLN``) has a gradient for each
image, the sum of its rows. Programs of such a kernel have rows of one image each, so what an image has is read once
(``schedule.mixed``); partial results have columns for each image. For 16 images, 128 programs, 8 per image. (In a block
of a diffusion transformer, what a norm's backward reads was read three times.)

**In the IR** the sum ``y[c] = f(sum_r g(r, c))`` is cut in two before kernels are formed::

    loops first  [r < rows : p, c < columns : p] {  store part[c] += g(r, c) }        elementwise
    loops second [s < P : r, c < columns : p]    {  y[c] = f(reduce sum part[s, c]) }

The first step is an elementwise loop nest, so everything about it is decided by the fusion that is there: its
producers join it (the backward of a gelu), a row reduction over the same elements makes it a part of its kernel, and so
do further column sums. It may also use what the row reduction returned (softmax with a bias). ``sums_rule`` keeps such
a kernel in the form that ``generate.triton_mixed`` prints: rows are parallel, the columns are the row's elements, the
accumulators fit.

**When.** Programs are formed on trial: a sum whose first step does not end up in a kernel that reduces rows stays as it
was (``split`` may then cut it). Sums are tried where a row reduction over the same elements exists, and where the rows
are

* of known length, and short enough for registers. A multiprocessor with one thread block has 128 for each of 512
  threads (or 256 for each of 256: ``schedule.mixed``). An element takes one for each sum, for each tensor one and as
  much as the next row's element takes (which is read ahead), and one for what all rows share: 2 + 2 * 1.5 + 1 = 6 for a
  layer norm in bfloat16, whose rows may have 8192 elements, 16 per thread of 512.
* read: what is computed from much less (all pairs of two lists) is computed again for less than it is kept for.
* many: each of the P = ``units`` programs takes at least ``LEAST`` of them. The partial results cost
  8 bytes (written, read) per column, sum and program; a row costs 6 bytes per column (bfloat16: two tensors read, one
  written) and saves 4. From 64 rows per program on, two sums cost less than 5%. Then P is twice as much, if rows are
  half as long as they may be: one program of a multiprocessor reads while the other waits for its own reductions. (By
  hand, 32,768 rows of 4,096: 345 us with 132 programs, 231 with 264 on an H200; 382, 290 on an H100.)
* or few, and short: a launch takes longer than such a tensor, and sums of ``CUT`` rows or more would take two of their
  own. Then programs may have ``FEW`` rows each, and be fewer than multiprocessors, while each has ``SHORT`` elements or
  less. (1,024 rows of 768 with a bias, dropout, and a norm's weight and bias: 2 launches instead of 5.)

Facts from TorchInductor 2.13 (``MixOrderReduction`` in torch/_inductor/scheduler.py): there a fused pair of a row and a
column reduction becomes such a kernel, over rows that are contiguous for each program, if the column reduction needs no
result of the row reduction, rows are at least 4096 and at least twice the columns, and with the Python wrapper only.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import log2, prod

import torch

from ..ir.expr import Expr, expr, product
from ..ir.loops import Axis, BodyBuilder, LoopNest, Reduce, Store, map_stmt
from ..ir.program import Buffer, Node, Program
from ..ir.traffic import SECTOR, Access, neighbours
from ..ir.transforms import needed
from ..options import Options
from ..target import Target
from .driver import BEFORE, grouped
from .legality import Cluster, FusionContext, common_space
from .mapping import Mapping, fresh
from .result import Fused, Reason, Refusal
from .split import PartialResults, can_split, reduces_columns, row_major, second_step

THREADS = 512  # of a program
REGISTERS = 96  # of a thread's 128, for elements; the others are for addresses and the like
LEAST = 16  # rows per program
FEW, SHORT = 8, 1 << 14  # ... of a program that ends after so many elements
CUT = 256  # rows; sums of fewer are one kernel in any case
MANY = 64  # rows per program, where each multiprocessor has two
ELEMENTS = 16  # per thread and tensor, if there are registers for so many
HELD = 4096  # elements of each tensor, by a program
BUSY = 0.75  # of the multiprocessors, where rows are summed in groups
APART = 2  # times that two kernels, one per sum, read each tensor


def mix_orders(fused: Fused, options: Options, target: Target) -> Fused:
    """Cut each column sum that a row reduction's kernel can compute; the others get a Refusal. Assumes a legal order.
    A program is fused again once its choices are made: what was cut before is elementwise, and is not cut again."""
    if not (options.mix_orders and target.is_gpu):
        return fused
    wanted: dict[str, int] = {}
    found = list(_candidates(fused, options, target))
    several = Counter((rows.name, n) for node, rows in found if (n := _groups(node, rows)) > 1)
    groups: dict[str, int] = {}  # of the rows, those that most sums are of, each with programs of its own
    for (name, n), _ in several.most_common():
        groups.setdefault(name, n)
    read = {node.name: _sources(fused.program, node.name) for node, _ in found}
    for node, rows in found:
        pieces = _pieces(rows, _groups(node, rows), groups.get(rows.name, 1), options, target)
        if not read[node.name]:
            pieces = Reason("columns", "nothing of that size is read: what is summed is computed from less")
        if isinstance(pieces, Reason):
            fused = _refuse(fused, rows, node, pieces)
        else:
            wanted[node.name] = pieces
    while wanted:
        trial = _formed(_cut(fused, wanted), options, target)
        out = wanted.keys() - _summed(trial)
        if not out:
            return replace(trial, formed=True)
        again = {b for name in out for b in read[name]}  # what their own kernels will read in any case
        apart = Reason("columns", "a kernel that reduces the rows and sums these columns would not read less")
        for node, rows in _candidates(fused, options, target):
            if node.name in wanted and (node.name in out or read[node.name] <= again):
                del wanted[node.name]
                fused = _refuse(fused, rows, node, apart)
    return fused


def _refuse(fused: Fused, rows: LoopNest, columns: LoopNest, reason: Reason) -> Fused:
    return replace(fused, refusals=(*fused.refusals, Refusal(rows.name, columns.name, reason)))


# -- which --------------------------------------------------------------------------------------------
def _candidates(fused: Fused, options: Options, target: Target) -> Iterator[tuple[LoopNest, LoopNest]]:
    """Column sums, each with a row reduction over as many rows and columns. Of a small tensor, which is read from the
    cache, if they would be cut in two: that is a launch more."""
    loops = [n for n in fused.program.nodes if isinstance(n, LoopNest) and n.reduced]
    across: dict[tuple[Expr, Expr], LoopNest] = {}
    for n in loops:
        if not reduces_columns(n):
            across.setdefault((n.numel, n.rnumel), n)
    for n in loops:
        lengths = [product(a.size for a in n.parallel[k:]) for k in range(1, len(n.parallel))]
        found = [across.get((n.numel * n.rnumel // length, length)) for length in lengths if length != 0]
        rows = next((r for r in (across.get((n.rnumel, n.numel)), *found) if r is not None), None)
        if rows is None or not (reduces_columns(n) and can_split(n) and _sums(n)):
            continue
        large = (n.numel * n.rnumel).hint() >= ELEMENTS * THREADS * target.units
        if large or options.split_reductions and _groups(n, rows) == 1 and n.rnumel.hint() >= CUT:
            yield n, rows


def _sums(loops: LoopNest) -> bool:
    return all(s.kind == "sum" and s.dtype == torch.float32 for s in loops.body if isinstance(s, Reduce))


def _groups(loops: LoopNest, rows: LoopNest) -> int:
    """How many results a column has: one for each group of rows that follow each other. 0: not known."""
    return 1 if loops.numel == rows.rnumel else (loops.numel.constant or 0) // (rows.rnumel.constant or 1)


def _pieces(loops: LoopNest, mine: int, groups: int, options: Options, target: Target) -> int | Reason:
    """How many programs share the rows of a column sum, which ``loops`` reduces: of each of ``mine`` groups of them.
    All sums of a kernel share its programs, each of which has rows of one of ``groups``."""
    length, rows = loops.rnumel.constant, loops.numel.hint()
    if length is None:
        return Reason("columns", f"rows of {loops.rnumel} elements, not known before run time: registers hold no row")
    if length < 2 or length > options.persistent_limit or block(length) > THREADS * ELEMENTS:
        return Reason("columns", f"registers do not hold rows of {length} elements and their column sums")
    each = min(target.units, rows // FEW)
    if rows < LEAST * target.units and rows * length > SHORT * each:
        return Reason("columns", f"{rows} rows are too few for {target.units} programs that each sum their own")
    halved = 2 * block(length) <= THREADS * ELEMENTS
    programs = _filling(groups, rows, (1 + halved) * target.units, target) if groups > 1 else 0
    if mine != 1 and (mine != groups or not programs):
        return Reason("columns", f"{mine or 'some'} groups of {rows} rows do not fill {target.units} multiprocessors")
    two = halved and rows >= 2 * MANY * target.units
    return programs // mine or (2 * target.units if two else each)


def _filling(groups: int, rows: int, most: int, target: Target) -> int:
    """As many programs for each group of rows as keep all multiprocessors busy; 0: there is no such number."""
    each = range(1, min(max(groups, most), rows // LEAST) // groups + 1)
    busy = {n * groups: n * groups / (-(-n * groups // target.units) * target.units) for n in each}
    best = max(busy, key=lambda n: (busy[n], -n), default=0)
    return best if best and busy[best] >= BUSY else 0


def block(length: int) -> int:
    """Elements of the block that holds a row."""
    return 1 << (length - 1).bit_length()


def per_element(sums: int, reads: Iterable[tuple[Buffer, bool]]) -> float:
    """Registers that an element of a row takes. ``reads``: what is read along the columns, and if for each row."""
    return sums + sum(1 + b.dtype.itemsize / 4 if each else 1.0 for b, each in reads)


# -- the cut ------------------------------------------------------------------------------------------
def _cut(fused: Fused, pieces: dict[str, int]) -> Fused:
    """With the nodes in ``pieces`` in two steps."""
    nodes: list[Node] = []
    buffers = dict(fused.program.buffers)
    for n in fused.program.nodes:
        if isinstance(n, LoopNest) and n.name in pieces:
            nodes += _two_steps(n, pieces[n.name], buffers)
        else:
            nodes.append(n)
    return replace(fused, program=replace(fused.program, nodes=tuple(nodes), buffers=buffers))


def _two_steps(loops: LoopNest, pieces: int, buffers: dict[str, Buffer]) -> list[Node]:
    b = BodyBuilder()
    partial = PartialResults(loops, Axis(fresh(expr(pieces)), "p"), b, buffers)
    column = row_major([a for a in loops.axes if a.kind == "p"])
    ids: dict[int, int] = {}
    for i in needed(loops.body, (i for i, s in enumerate(loops.body) if isinstance(s, Reduce))):
        s = map_stmt(loops.body[i], ids)
        if isinstance(s, Reduce):
            b.store(partial.make(i, s.dtype), column, s.args[0], "sum")
        else:
            ids[i] = b.add(s)
    axes = tuple(Axis(a.var, "p") for a in loops.axes)
    first = LoopNest(f"{loops.name}_part", axes, tuple(b.body), loops.origins)
    return [first, second_step(loops, expr(pieces), partial.names, buffers)]


def _formed(trial: Fused, options: Options, target: Target) -> Fused:
    """The kernels that it becomes: the passes behind this one, and the grouping."""
    passes = list(BEFORE.items())
    for _, run in passes[[key for key, _ in passes].index("mix_order") + 1 :]:
        trial = run(trial, options, target)
    return grouped(trial, options, target)


def _summed(trial: Fused) -> set[str]:
    """Names of the column sums whose first step is in a kernel that reduces rows."""
    kernels = (n for n in trial.program.nodes if isinstance(n, LoopNest) and n.reduced)
    return {s.buffer[: s.buffer.rindex("_part")] for n in kernels for s in column_sums(n)}


def _sources(program: Program, name: str) -> set[str]:
    """The tensors of full size that a column sum's kernel would read: not what is elementwise, and computed in it."""
    makers = {b: n for n in program.nodes if isinstance(n, LoopNest) for b in n.writes()}
    node = next(n for n in program.nodes if n.name == name)
    assert isinstance(node, LoopNest)
    points = (node.numel * node.rnumel).hint()
    todo, seen, out = node.reads(), set(), set()
    while todo:
        b = todo.pop()
        if b in seen or program.buffers[b].numel.hint() < points:
            continue
        seen.add(b)
        maker = makers.get(b)
        if maker is None or maker.reduced:
            out.add(b)
        else:
            todo += maker.reads()
    return out


# -- legality -----------------------------------------------------------------------------------------
def column_sums(loops: LoopNest) -> list[Store]:
    return [s for s in loops.stores() if s.reduce == "sum"]


def programs(sums: Sequence[Store], length: int, buffers: dict[str, Buffer]) -> int:
    """Of the kernel of these ``column_sums`` whose rows have that length: one per row of partial sums and group of
    rows. Rows that are written out by part (``halves``) have a sum per part, in one buffer."""
    columns = length * sum(s.buffer == sums[0].buffer for s in sums)
    return int(buffers[sums[0].buffer].numel) // columns


def sums_rule(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    """May they be one kernel, if it sums columns? In it the parallel axes are those along which columns are summed."""
    sides = [[(s, env) for _, loops, env in x.parts for s in column_sums(loops)] for x in (a, b)]
    if not any(sides):
        return None
    if a.template is not None or b.template is not None:
        return Reason("template", "a matrix product's kernel sums no columns")
    m = common_space(a, b)
    if isinstance(m, Reason):
        return m
    indices = [s.index.subs(env).subs(new) for side, new in zip(sides, (m.env_a, m.env_b)) for s, env in side]
    reduces, groups = any(x.kind == "r" for x in m.axes), 0
    for x in m.axes:
        along = {i.has(x.var) for i in indices}
        if len(along) > 1 or reduces and along != {x.kind == "r"}:
            groups += 1
            if groups > 1 or reduces and x.kind == "r":
                return Reason("columns", f"columns are summed, and the axis of size {x.size} is not of rows or columns")
    if len({c.program.buffers[s.buffer].numel for side in sides for s, _ in side}) > 1:
        return Reason("columns", "columns are summed by another number of programs")
    return _registers(a, b, m, indices, c) if reduces else None


def _registers(a: Cluster, b: Cluster, m: Mapping, indices: list[Expr], c: FusionContext) -> Reason | None:
    rows = [x for x in m.axes if x.kind == "r"]
    length = product(x.size for x in rows).hint()
    inside = {*a.writes, *b.writes}
    found = {(n, i.subs(env)) for x, env in ((a, m.env_a), (b, m.env_b)) for n, t in x.reads.items() for i in t}
    reads = [(c.program.buffers[n], i) for n, i in found if n not in inside]
    own = [x for x in m.axes if x.kind == "r" or not any(i.has(x.var) for i in indices)]  # a program has one group
    for g in (x for x in m.axes if x not in own):
        steps = [[_step(i, x) for x in (g, *own) if x.kind == "p"] for _, i in reads]
        if any(0 < step < max(others, default=0) for step, *others in steps):
            return Reason("columns", "columns are summed of rows that do not follow each other")
    kinds = [(buffer, {x.kind for x in own if i.has(x.var)}) for buffer, i in reads]
    each = per_element(len(indices), [(buffer, "p" in k) for buffer, k in kinds if "r" in k])
    if block(length) * each > REGISTERS * THREADS:
        inputs = f"{len(reads)} inputs and {len(indices)} sums"
        return Reason("columns", f"registers do not hold rows of {length} elements, {inputs}")
    others = [x for x in m.axes if x.kind != "r"]
    tile = neighbours(others, rows_held(length, each)) | neighbours(rows, length)
    both = [Access(i, buffer.dtype.itemsize, False) for (buffer, i), (_, k) in zip(reads, kinds) if len(k) == 2]
    fetched = sum(x.sectors(tile) for x in both) * SECTOR / prod(tile.values())
    if fetched > APART * sum(x.itemsize for x in both):
        return Reason("columns", f"an input is read across: of rows of {length} elements registers hold few at a time")
    return None


def _step(index: Expr, x: Axis) -> int:
    step = index.coefficient(x.var)
    return 0 if step is None else abs(step.hint())


def rows_held(length: int, each: float, share: int = 1) -> int:
    """Rows of ``length`` that a program holds, at ``each`` registers per element, of ``share`` that share these."""
    rows = 1 << max(0, round(log2(HELD / length)))
    while rows > 1 and rows * block(length) * each > REGISTERS * THREADS / share:
        rows //= 2
    return rows
