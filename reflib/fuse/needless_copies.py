"""A copy that a call reads is not made where the call can read what was copied.

What loop nests read, fusion computes where it is read; a call reads memory. ``clone``, ``contiguous``, ``pad`` by
nothing, and neighbouring slices of one tensor put together again (``lower.indexing``), are that tensor or a view of
it::

    clone[i, j] = x[i, j]
    mm = clone @ w                                mm = x @ w

The readers are loop nests, calls that neither write to it nor may return it, and which take these strides, and matrix
products. Nothing may write to what was copied before the last of them, or be an update of it (which can be in place
only after them), and no temporary may be in memory for longer than the copy would have been, unless it is no larger.

NB: TorchInductor leaves out a ``cat`` of what one ``split`` made (``fx_passes/split_cat.py``), and ``clone`` of what it
will compute.
"""

from collections.abc import Iterator
from dataclasses import replace

from ..ir.expr import expr, mod
from ..ir.loops import LoopNest
from ..ir.program import Extern, Node, Program, Template, View, iter_views
from ..ir.rename import renamed
from ..lower.extern import OUT_VARIANTS
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, remove_dead
from .in_place import may_alias
from .into_place import MOVED
from .places import linear_view, moved_load, plain, rehomed, within
from .result import Fused
from .slices import whole_copy
from .updates import find_updates


def needless_copies(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. Assumes a legal order."""
    program, d = fused.program, dependencies(fused.program)
    places: dict[str, View] = {}
    updated: dict[str, int] | None = None
    for position in reversed(range(len(program.nodes))):  # (of a copy of a copy the second one first)
        found = _copied(program, program.nodes[position])
        good = found is not None and (not target.is_gpu or _aligned(found[1]))
        last = _last(program, d, position, *found, places) if found is not None and good else None
        if found is None or last is None:
            continue
        if updated is None:  # where updates of a buffer begin
            found_updates = reversed(find_updates(program, d))
            updated = {u.old: u.at for u in found_updates if u.kind not in ("each", "same")}
        if updated.get(found[1].buffer, last + 1) > last:
            places[found[0]] = found[1]
    if not places:
        return fused
    nodes = [n for n in program.nodes if places.keys().isdisjoint(n.writes())]
    for b in reversed(places):  # (what is a view of a copy that is another's view: of that one)
        for p, v in places.items():
            there = within(v, program.buffers[b], places[b]) if v.buffer == b else v
            assert there is not None
            places[p] = there
    nodes = [_there(n, places, program) for n in nodes]
    return replace(fused, program=remove_dead(replace(program, nodes=tuple(nodes))))


def _there(node: Node, places: dict[str, View], program: Program) -> Node:
    if isinstance(node, Template):  # (whose operands are as they were)
        names = {b: v.buffer for b, v in places.items() if b in node.reads()}
        return renamed([node], (), names)[0][0] if names else node
    return rehomed(node, places, program.buffers)


def _copied(program: Program, node: Node) -> tuple[str, View] | None:
    """The temporary that ``node`` only copies to, all of it, and the view that it copies."""
    found = whole_copy(program, node)
    if found is None or program.buffers[found[2].buffer].kind != "temp":
        return None
    axes, load, store = found
    source, buffer = program.buffers[load.buffer], program.buffers[store.buffer]
    view = linear_view(source.name, load.index, axes, buffer)
    return None if view is None or source.device != buffer.device else (buffer.name, view)


def _last(
    program: Program, d: Dependencies, position: int, new: str, there: View, places: dict[str, View]
) -> int | None:  # fmt: skip
    """The last of those that can all read ``there`` what the node at ``position`` copies."""
    source, uses = there.buffer, list(_uses(program, d, new, there, places))
    if new in d.needed or d.writers[new] != [position] or not uses:
        return None
    nodes = [(program.nodes[i], b, v) for i, b, v in uses]
    loops = all(isinstance(n, LoopNest) for n, *_ in nodes)
    if loops or not all(v is not None and _takes(n, program, b, v) for n, b, v in nodes):
        return None
    last, writers = max(i for i, *_ in uses), d.writers.get(source, [])
    makers = [program.nodes[i] for i in writers]
    if any(isinstance(n, Extern) and may_alias(n.target) for n in makers) or any(position < i <= last for i in writers):
        return None
    a, b = program.buffers[source], program.buffers[new]
    lasts = source in d.needed or d.readers[source][-1] >= last
    return last if a.kind != "temp" or lasts or a.nbytes == b.nbytes else None


def _uses(
    program: Program, d: Dependencies, b: str, there: View, places: dict[str, View]
) -> Iterator[tuple[int, str, View | None]]:
    """The nodes that will read ``b``, or a view of it that they know as another buffer, and where that is."""
    for i in d.readers.get(b, ()):
        copies = [c for c in program.nodes[i].writes() if c in places]
        for c in copies:
            inner = within(places[c], program.buffers[b], there)
            if inner is None:
                yield i, c, None
            else:
                yield from _uses(program, d, c, inner, places)
        if not copies:
            yield i, b, there


def _takes(node: Node, program: Program, new: str, there: View) -> bool:
    """Can ``node`` read ``there`` what it reads of ``new``?"""
    buffer = program.buffers[new]
    if isinstance(node, LoopNest):
        return all(moved_load(node, s, buffer, there) is not None for s in node.loads() if s.buffer == new)
    if isinstance(node, Template):
        return plain(there, buffer)
    if not isinstance(node, Extern) or may_alias(node.target):
        return False
    views = [v for v in iter_views((node.args, node.kwargs)) if v.buffer == new]
    product = node.target in OUT_VARIANTS and "mm" in str(node.target)
    for v, now in ((v, within(v, buffer, there)) for v in views):
        if now is None or not (now.strides == v.strides or product and _in_rows(now)):
            return False
    return True


def _aligned(v: View) -> bool:
    """On a GPU, which libraries move 16 bytes at a time."""
    steps = (v.offset, *(s for s in v.strides if s != 1))
    return all(mod(e * v.dtype.itemsize, expr(MOVED)) == 0 for e in steps)


def _in_rows(v: View) -> bool:
    """Do libraries take it as a matrix: one row, or column, after another?"""
    if len(v.shape) < 2:  # a bias
        return False
    (m, n), (a, b) = v.shape[-2:], v.strides[-2:]
    return (b == 1 and (a - n).hint() >= 0) or (a == 1 and (b - m).hint() >= 0)
