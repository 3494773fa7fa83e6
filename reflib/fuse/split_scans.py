"""Few, long rows: a scan in three steps, so that the whole GPU has work.

The cumulative sum of 4 rows of a million elements with one program per row keeps 4 of 132 multiprocessors busy. Instead
the scanned axis ``r < n`` is cut into ``s < pieces`` (parallel) and ``t < length`` (scanned)::

    y[i, r] = f(scan_r g(i, r))  becomes  part[i, s] = reduce_t g(i, s*length + t)
                                          upto[i, s] = scan_s part[i, s]
                                          y[i, s*length + t] = f(upto[i, s - 1] + scan_t g(i, s*length + t))

``g`` is read twice. ``pieces`` divides ``n``: a length without a suitable divisor, or of unknown size, is not cut.
"""

from dataclasses import replace

from ..ir.expr import Atom, IntLike, expr
from ..ir.loops import Axis, BodyBuilder, Load, LoopNest, Reduce, Scan, Stmt, map_stmt, stmt_args
from ..ir.ops import value_dtype
from ..ir.program import Buffer, Node
from ..ir.scans import SCANS, start
from ..ir.transforms import needed
from ..options import Options
from ..target import Target
from .mapping import fresh
from .result import Fused
from .split import MIN_SCAN, new_part, row_major, was_split

MIN_PIECE = 2048
OPERATOR = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def split_scans(fused: Fused, options: Options, target: Target) -> Fused:
    """Cut every scan of few, long rows in three, on a GPU. The steps are not cut when the program is fused again."""
    if not options.split_reductions or options.batch_invariant or not target.is_gpu:
        return fused
    program = fused.program
    nodes: list[Node] = []
    buffers = dict(program.buffers)
    for node in program.nodes:
        pieces = _pieces(node, target) if isinstance(node, LoopNest) and _can_split(node) else 1
        nodes += _split(node, pieces, buffers) if isinstance(node, LoopNest) and pieces > 1 else [node]
    return replace(fused, program=replace(program, nodes=tuple(nodes), buffers=buffers))


def _can_split(loops: LoopNest) -> bool:
    """Are there scans, none of what another one gave, and no reductions?"""
    after = [False] * len(loops.body)
    for i, s in enumerate(loops.body):
        used = any(after[a] for a in stmt_args(s))
        if isinstance(s, Reduce) or isinstance(s, Scan) and (used or s.kind not in OPERATOR):
            return False
        after[i] = used or isinstance(s, Scan)
    return any(isinstance(s, Scan) for s in loops.body) and not was_split(loops)


def _pieces(loops: LoopNest, target: Target) -> int:
    """Into how many equal parts to cut a row; 1: not at all."""
    rows, length = max(1, loops.numel.hint()), loops.rnumel.constant
    if length is None or length < MIN_SCAN or rows >= 2 * target.units:
        return 1
    wanted = min(4 * target.units // rows, length // MIN_PIECE)
    most = next(n for n in range(wanted, 0, -1) if length % n == 0)
    return most if most * 8 >= wanted else 1


def _split(loops: LoopNest, pieces: int, buffers: dict[str, Buffer]) -> list[Node]:
    (axis,) = loops.reduced
    length = int(axis.size) // pieces
    s, t, r = Axis(fresh(expr(pieces)), "p"), Axis(fresh(expr(length)), "r"), Axis(fresh(expr(pieces)), "r")
    cut: dict[Atom, IntLike] = {axis.var: expr(s.var) * length + expr(t.var)}
    rows = loops.parallel
    shape = (*(a.size for a in rows), expr(pieces))
    axes = tuple(x for a in loops.axes for x in ((s, t) if a is axis else (a,)))
    scans = [i for i, st in enumerate(loops.body) if isinstance(st, Scan)]
    upto: dict[int, str] = {}  # by the scan: the buffer of what the pieces come to
    totals, sums = BodyBuilder(), BodyBuilder()
    ids: dict[int, int] = {}
    for i in needed(loops.body, scans):
        st = map_stmt(loops.body[i], ids, cut)
        if not isinstance(st, Scan):
            ids[i] = totals.add(st)
            continue
        part = new_part(loops, shape, st.dtype, buffers)
        upto[i] = new_part(loops, shape, st.dtype, buffers)
        totals.store(part, row_major((*rows, s)), totals.reduce(str(SCANS[st.kind].by), *st.args, dtype=st.dtype))
        loaded = sums.load(part, row_major((*rows, r)), value_dtype(st.dtype))
        sums.store(upto[i], row_major((*rows, r)), sums.add(Scan(st.kind, (loaded,), st.dtype)))
    last = _last_step(loops, cut, upto, rows, s)
    return [
        LoopNest(f"{loops.name}_part", axes, tuple(totals.body), loops.origins),
        LoopNest(f"{loops.name}_upto", (*rows, r), tuple(sums.body), loops.origins),
        LoopNest(loops.name, axes, last, loops.origins),
    ]


def _last_step(
    loops: LoopNest, cut: dict[Atom, IntLike], upto: dict[int, str], rows: tuple[Axis, ...], s: Axis
) -> tuple[Stmt, ...]:
    """The body, each scan from what the pieces before it came to."""
    b = BodyBuilder()
    later = b.op("gt", b.index(expr(s.var)), b.index(0))
    ids: dict[int, int] = {}
    for i, st in enumerate(loops.body):
        st = map_stmt(st, ids, cut)
        ids[i] = b.add(st)
        if isinstance(st, Scan):
            before = b.add(Load(upto[i], row_major((*rows, s)) - 1, st.dtype, later, start(st.kind, st.dtype)))
            ids[i] = b.op(OPERATOR[st.kind], before, ids[i])
    return tuple(b.body)
