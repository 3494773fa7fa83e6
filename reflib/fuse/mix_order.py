"""Columns summed in the kernel that reduces the rows: a tensor read once for both.

The backward of a layer norm reduces every row (over the features) for the gradient of its input, and sums every column
(over the rows) for the gradients of weight and bias. Two kernels read the same two tensors twice: 5 full-size accesses
with the result's store, where 3 are needed. So are the backward of RMS norm, and of a bias before a softmax or a norm.

**One kernel.** A program keeps whole rows in registers, as a persistent row reduction does. It takes every P-th block
of rows (P programs), and adds each column up in registers as it goes: RBLOCK float32 accumulators per sum. At its end
it stores them as one row of ``part[P, columns]``. A second kernel, an ordinary column reduction of P rows, adds these
and does what followed the sum. There are no atomics: which program adds which rows, and in which order, is fixed.

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

* of known length, and short enough: at 512 threads per multiprocessor a thread has 128 registers, for RBLOCK/512
  elements of each sum and of about three more blocks (what was read, and the next row, read ahead). Hence at most three
  sums over rows of 8192, and nine over 4096.
* many: each program takes at least ``LEAST`` of them. The partial results cost 8 bytes (written, read) per column and
  program, a row 6 or more (bfloat16: two tensors read, one written) in all and 4 or more that are not read again. P is
  ``units`` times as many thread blocks as are resident, less where the partial results would be over about 5%.

Facts from TorchInductor 2.13 (``MixOrderReduction`` in torch/_inductor/scheduler.py): there a fused pair of a row and a
column reduction becomes such a kernel, over rows that are contiguous for each program, if the column reduction needs no
result of the row reduction, rows are at least 4096 and at least twice the columns, and with the Python wrapper only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..ir.loops import Axis, BodyBuilder, LoopNest, Reduce, Store, map_stmt
from ..ir.expr import Expr, expr
from ..ir.program import Buffer, Node
from ..ir.transforms import needed
from ..options import Options
from ..target import Target
from .driver import BEFORE, grouped
from .legality import Cluster, FusionContext, common_space
from .mapping import fresh
from .result import Fused, Reason, Refusal
from .split import PartialResults, can_split, reduces_columns, row_major, second_step

BLOCK = 2048  # elements of a tensor that a program holds at least: rows shorter than this are taken several at a time
RESIDENT = 8192  # ... that a multiprocessor holds: 512 threads with 16 elements each
REGISTERS = 96 * 512  # float32 values that fit beside a thread's addresses, in all
OTHERS = 3  # blocks in registers besides the sums
LEAST, MANY = 8, 64  # rows per program: less does not pay; from here on partial results cost under 5%


def mix_orders(fused: Fused, options: Options, target: Target) -> Fused:
    """Cut each column sum that a row reduction's kernel can compute; the others get a Refusal. Assumes a legal order.
    A program is fused again once its choices are made: what was cut before is elementwise, and is not cut again."""
    if not (options.mix_orders and target.is_gpu):
        return fused
    wanted: dict[str, int] = {}
    for node, rows in _candidates(fused):
        pieces = _pieces(node, options, target)
        if isinstance(pieces, Reason):
            fused = _refuse(fused, rows, node, pieces)
        else:
            wanted[node.name] = pieces
    while wanted:
        trial = _cut(fused, wanted)
        joined = _joined(trial, options, target)
        if joined >= wanted.keys():
            return trial
        apart = Reason("columns", "the column sums did not end up in a kernel that reduces the same rows")
        for node, rows in _candidates(fused):
            if node.name in wanted and node.name not in joined:
                del wanted[node.name]
                fused = _refuse(fused, rows, node, apart)
    return fused


def _refuse(fused: Fused, rows: LoopNest, columns: LoopNest, reason: Reason) -> Fused:
    return replace(fused, refusals=(*fused.refusals, Refusal(rows.name, columns.name, reason)))


# -- which --------------------------------------------------------------------------------------------
def _candidates(fused: Fused) -> Iterator[tuple[LoopNest, LoopNest]]:
    """Column sums, each with a row reduction over as many rows and columns."""
    loops = [n for n in fused.program.nodes if isinstance(n, LoopNest) and n.reduced]
    across: dict[tuple[Expr, Expr], LoopNest] = {}
    for n in loops:
        if not reduces_columns(n):
            across.setdefault((n.numel, n.rnumel), n)
    for n in loops:
        rows = across.get((n.rnumel, n.numel))
        if rows is not None and reduces_columns(n) and can_split(n) and _sums(n):
            yield n, rows


def _sums(loops: LoopNest) -> bool:
    return all(s.kind == "sum" and s.dtype == torch.float32 for s in loops.body if isinstance(s, Reduce))


def _pieces(loops: LoopNest, options: Options, target: Target) -> int | Reason:
    """How many programs share the rows of a column sum."""
    length, rows = loops.numel.constant, loops.rnumel.hint()
    if length is None:
        return Reason("columns", f"rows of {loops.numel} elements, not known before run time: registers hold no row")
    if length < 2 or length > options.persistent_limit or not fits(length, 1):
        return Reason("columns", f"registers do not hold rows of {length} elements and their column sums")
    at_once = max(1, BLOCK // block(length))
    resident = max(1, min(4, RESIDENT // max(BLOCK, block(length))))
    for count in range(resident, 0, -1):
        if rows >= count * target.units * at_once * (MANY // at_once if count > 1 else LEAST):
            return count * target.units
    return Reason("columns", f"{rows} rows are too few for {target.units} multiprocessors that sum their own each")


def block(length: int) -> int:
    """Elements of the block that holds a row."""
    return 1 << (length - 1).bit_length()


def fits(length: int, sums: int) -> bool:
    """Do rows of ``length`` elements and that many column sums fit in registers?"""
    return block(length) * (sums + OTHERS) <= REGISTERS


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


def _joined(trial: Fused, options: Options, target: Target) -> set[str]:
    """Names of the column sums whose first step would be in a kernel that reduces rows."""
    for key, run in BEFORE.items():
        if key != "mix_order":
            trial = run(trial, options, target)
    trial = grouped(trial, options, target)
    rows = {n.name for n in trial.program.nodes if isinstance(n, LoopNest) and n.reduced and column_sums(n)}
    return {m.removesuffix("_part") for g in trial.groups if g.name in rows for m in g.members}


# -- legality -----------------------------------------------------------------------------------------
def column_sums(loops: LoopNest) -> list[Store]:
    return [s for s in loops.stores() if s.reduce]


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
    reduces = any(x.kind == "r" for x in m.axes)
    for x in m.axes:
        along = {i.has(x.var) for i in indices}
        if len(along) > 1 or reduces and along != {x.kind == "r"}:
            return Reason("columns", f"columns are summed, and the axis of size {x.size} is not one of rows or columns")
    length = 1
    for x in m.axes:
        length *= x.size.hint() if indices[0].has(x.var) else 1
    if not fits(length, len(indices)):
        return Reason("columns", f"registers do not hold {len(indices)} sums of rows of {length} elements")
    return None
