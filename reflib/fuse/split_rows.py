"""A reduction over all of a tensor whose elements need a statistic of their row: first the rows, then over the rows.

The mean over a batch of a divergence of two distributions sums ``f(i, r)`` over rows and columns, where ``f`` needs row
``i``'s maximum and sum of exponentials. Cut into pieces of equal size (``split``), its first step has other axes than
the kernel that makes these, and the row is read again. Instead::

    y = sum_{i, r} f(i, r)     becomes     of_rows[i] = sum_r f(i, r);  y = sum_i of_rows[i]

whose first step is one more reduction of the row, in the statistics' kernel. What it stores, a number per row, is read
by the second step, which ``split`` may cut.

The same helps where elementwise work goes over the same elements in any case (the gradient of a tensor beside that of
the number it is scaled by; an optimizer's step and the norm of what it made): its kernel reduces each row as well.
"""

from dataclasses import replace

from ..ir.expr import Expr, product
from ..ir.loops import BodyBuilder, LoopNest, Reduce, map_stmt
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import needed
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies
from .result import Fused
from .split import can_split, cut_axis, made_for, new_part, pieces_wanted, row_major, second_step, with_axis

_KINDS = ("sum", "prod", "max", "min", "any", "all")
SHARED = 8_000_000  # bytes read once instead of twice that are worth a further step: 2 us of an H200
PARTS = 8  # a row's results may take one part in so many of these
FAR = 64  # nodes that are looked at


def split_rows(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program, such reductions in two steps. GPU only: a thread of a CPU takes many rows."""
    if not options.split_reductions or not target.is_gpu:
        return fused
    program, buffers = fused.program, dict(fused.program.buffers)
    depends = dependencies(program)
    nodes: list[Node] = []
    for position, node in enumerate(program.nodes):
        rows = 0
        if isinstance(node, LoopNest) and _sums_all(node):
            rows = _rows(program, depends, position, node) or _beside(program, depends, position, node, target)
        if isinstance(node, LoopNest) and rows and product(a.size for a in node.axes[:rows]).hint() >= 2 * target.units:
            nodes += _two_steps(node, rows, buffers)
        else:
            nodes.append(node)
    return replace(fused, program=replace(program, nodes=tuple(nodes), buffers=buffers))


def _sums_all(loops: LoopNest) -> bool:
    kinds = {s.kind for s in loops.body if isinstance(s, Reduce)}
    return len(loops.reduced) > 1 and not loops.parallel and kinds <= set(_KINDS) and can_split(loops)


def _rows(program: Program, depends: Dependencies, position: int, loops: LoopNest) -> int:
    """How many of the first axes are rows of which a statistic is needed: all are reduced. 0: none."""
    sizes = [a.size for a in loops.axes]
    todo, seen = [position], set[int]()
    while todo:
        at = todo.pop()
        for name in program.nodes[at].reads():
            writer = depends.last_writer(name, at)
            maker = None if writer is None else program.nodes[writer]
            if writer is None or writer in seen or not isinstance(maker, LoopNest):
                continue
            seen.add(writer)
            own = [a.size for a in maker.axes]
            if maker.reduced and own == sizes and maker.parallel and maker.axes[-1].kind == "r":
                return len(maker.parallel)
            if not maker.reduced and own in (sizes, sizes[: len(own)]):
                todo.append(writer)
    return 0


def _beside(program: Program, depends: Dependencies, position: int, loops: LoopNest, target: Target) -> int:
    """How many of the first axes are rows, where elementwise work that stores its results touches as many bytes of what
    is reduced that a kernel for both pays. 0: none."""
    sizes = [a.size for a in loops.axes]
    lengths = [product(sizes[:n]).hint() for n in range(len(sizes))]
    rows = next((n for n, length in enumerate(lengths) if length >= 2 * target.units), 0)
    if not rows or any(s.index.coefficient(loops.axes[-1].var) not in (0, 1) for s in loops.loads()):
        return 0
    pieces = pieces_wanted(loops, program.buffers, target)
    if pieces == 1 or cut_axis(*with_axis(loops, pieces)[1:], alone=False).exact:
        return 0  # a kernel for both is made as it is
    chain, touched = made_for(program, depends, position, product(sizes))
    after = _dependents(program, depends, position)
    shared = set[str]()
    for b in touched:
        for at in (*depends.readers.get(b, []), *depends.writers.get(b, [])):
            node = program.nodes[at]
            if at not in chain and at not in after and isinstance(node, LoopNest) and not node.reduced:
                shared |= {b} if _stores(program, depends, at, sizes, after) else set()
    saved = sum(program.buffers[b].nbytes.hint() for b in shared)
    steps = sum(isinstance(s, Reduce) for s in loops.body) * 4 * lengths[rows]
    return rows if saved >= SHARED and PARTS * steps <= saved else 0


def _dependents(program: Program, depends: Dependencies, position: int) -> set[int]:
    """What needs the results of the node at ``position``, at once or by others."""
    out = {position}
    for at in range(position + 1, len(program.nodes)):
        if out & depends.before[at]:
            out.add(at)
    return out


def _stores(program: Program, depends: Dependencies, position: int, sizes: list[Expr], after: set[int]) -> bool:
    """Is it among elementwise work over these axes that makes a result of the program? (What only waits for the sum is
    computed again behind it.)"""
    todo, seen = [position], {position}
    while todo and len(seen) < FAR:
        at = todo.pop()
        node = program.nodes[at]
        if isinstance(node, LoopNest) and not node.reduced and [a.size for a in node.axes] == sizes:
            if any(b in depends.needed for b in node.writes()):
                return True
            near = {w for b in node.reads() if (w := depends.last_writer(b, at)) is not None}
            near |= {r for b in node.writes() for r in depends.readers.get(b, [])}
            todo += near - seen - after
            seen |= near
    return False


def _two_steps(loops: LoopNest, rows: int, buffers: dict[str, Buffer]) -> list[Node]:
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
    return [made, second_step(loops, count, of_rows, buffers)]
