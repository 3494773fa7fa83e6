"""What is reduced over all of a tensor, row by row first: where rows are reduced as well.

The mean over a batch of a divergence of two distributions needs a statistic of each row; a loss per sequence is
returned beside their mean. In the kernel that reduces the rows it is one more reduction; other pieces (``split``) would
have other axes, and all elements would be read twice.
"""

from ..ir.loops import LoopNest, Reduce
from ..ir.program import Program
from .dependencies import Dependencies
from .producers import makers

LINE = 64  # elements that one piece of a row reads next to each other: 128 bytes of half precision
MANY = 64  # nodes that are looked at
PLAIN = ("sum", "prod", "max", "min", "any", "all")  # which a part's result is reduced by


def sums_all(loops: LoopNest) -> bool:
    plain = all(s.kind in PLAIN for s in loops.body if isinstance(s, Reduce))
    return len(loops.reduced) > 1 and not loops.parallel and plain


def whole_rows(program: Program, depends: Dependencies, position: int, loops: LoopNest) -> int:
    """How many of the first axes are rows of which a statistic is needed: all are reduced. 0: none."""
    sizes = [a.size for a in loops.axes]

    def elementwise(maker: LoopNest) -> bool:
        own = [a.size for a in maker.axes]
        return not maker.reduced and own in (sizes, sizes[: len(own)])

    if not sums_all(loops):
        return 0
    for maker in makers(program, depends, position, elementwise):
        if maker.reduced and [a.size for a in maker.axes] == sizes and maker.parallel and maker.axes[-1].kind == "r":
            return len(maker.parallel)
    return _rows_beside(program, depends, position, loops)


def _rows_beside(program: Program, depends: Dependencies, position: int, loops: LoopNest) -> int:
    """How many of the first axes are long rows that are reduced too, each by itself, of what this reads. 0: none. (A
    loss per sequence beside their mean: in other pieces it would be read twice.)"""
    sizes, todo, seen = [a.size for a in loops.axes], [position], {position}
    while todo and len(seen) < MANY:
        at = todo.pop()
        names = [b for b in program.nodes[at].reads() if program.buffers[b].numel == loops.rnumel]
        near = {r for b in (*names, *program.nodes[at].writes()) for r in depends.readers.get(b, [])}
        near |= {w for b in names if (w := depends.last_writer(b, at)) is not None}
        for i in sorted(near - seen):
            node = program.nodes[i]
            if not isinstance(node, LoopNest) or [a.size for a in node.axes] != sizes or position in depends.before[i]:
                continue
            seen.add(i)
            rows = len(node.parallel)
            if not node.reduced:
                todo.append(i)
            elif rows and all(a.kind == "r" for a in node.axes[rows:]) and node.rnumel.hint() >= LINE:
                return rows
    return 0
