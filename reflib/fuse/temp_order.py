"""Temporaries in the order in memory of what they are computed from.

Strides follow PyTorch's rules, by which a slice that is written to zeros is laid out as the zeros are, and a padded
tensor as it would be in eager, whatever is in it. Where such a temporary is never stored, since it is inlined or fused,
its strides still decide how a reduction over it is cut, and which axis is read along: a bias's gradient, summed over
rows of a tensor in channels-last order (``capture.layouts``), looked like a sum along rows of channels. And where it is
stored, each kernel that reads or writes it goes through two orders at once.

So before these decisions a temporary that one loop nest computes elementwise, and only loop nests read, gets the order
of what most of its bytes are computed from. Not what is reduced and then read beside the result (a norm): that is one
kernel, which holds whole rows, and cut it would be two.

A residual stream is a chain of these: each sum has the order of the one before, however many layers add to it in
another (``patch(x).flatten(2).transpose(1, 2)``, and then transformer blocks). All of a chain get one order: what else
their nodes read and what reads them decides, by bytes.
"""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace

from ..ir.expr import Expr, Var, expr
from ..ir.loops import Load, LoopNest, Store
from ..ir.program import Buffer, Node, Program, View
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies
from .places import rehomed
from .result import Fused
from .slices import coordinates, whole_dimensions


def temp_order(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. On a GPU only: a CPU's caches hold the lines of both orders."""
    program = fused.program
    if not target.is_gpu:
        return fused
    d, places = dependencies(program), dict[str, View]()
    if chains := _chains(program, d):
        fused = replace(fused, program=(program := _moved(program, chains)))
    nodes = list(program.nodes)
    for position, node in enumerate(nodes):
        if isinstance(node, LoopNest):
            nodes[position] = node = rehomed(node, places, program.buffers)
            decided = not chains.keys().isdisjoint(node.writes())
            place = _ordered(program, d, position, node) if isinstance(node, LoopNest) and not decided else None
            if place is not None:
                places[place.buffer] = place
                nodes[position] = rehomed(node, {place.buffer: place}, program.buffers)
    return replace(fused, program=_moved(replace(program, nodes=tuple(nodes)), places, done=True)) if places else fused


def _moved(program: Program, places: dict[str, View], done: bool = False) -> Program:
    """With buffers in another order. ``done``: the nodes use them so already."""
    nodes = (
        program.nodes
        if done
        else tuple(
            n if places.keys().isdisjoint((*n.reads(), *n.writes())) else rehomed(n, places, program.buffers)
            for n in program.nodes
        )
    )
    buffers = program.buffers | {b: replace(program.buffers[b], strides=v.strides) for b, v in places.items()}
    return replace(program, nodes=nodes, buffers=buffers)


def _chains(program: Program, d: Dependencies) -> dict[str, View]:
    """Where temporaries are that are computed from each other, element by element, if another order is better."""
    groups: dict[str, list[str]] = {}
    for position, node in enumerate(program.nodes):
        dims = _dimensions(program, d, position, node)
        if dims is None or not isinstance(node, LoopNest):
            continue
        store, name = node.stores()[0], node.stores()[0].buffer
        mine = groups[name] = [name]
        for s in node.loads():
            other, b, mate = groups.get(s.buffer, mine), program.buffers[name], program.buffers[s.buffer]
            if other is not mine and (b.shape, b.strides) == (mate.shape, mate.strides) and s.index == store.index:
                mine += other
                groups |= dict.fromkeys(mine, mine)
    out: dict[str, View] = {}
    for group in {id(g): g for g in groups.values() if len(g) > 1}.values():
        if (best := _voted(program, d, group, groups)) is not None:
            for name in group:
                b = program.buffers[name]
                out[name] = _dense(b, sorted(range(len(b.shape)), key=lambda k: (k != best, b.strides[k].hint())))
    return out


def _voted(program: Program, d: Dependencies, group: list[str], free: Container[str]) -> int | None:
    """The dimension along which neighbours should lie, if that is another one than they do; by bytes. What else is read
    does not count if it is ``free`` to take another order itself: two chains would take each other's."""
    votes: Counter[int] = Counter()
    rows = set[int]()  # dimensions that norms need as they are
    for name in group:
        b, node = program.buffers[name], program.nodes[d.writers[name][0]]
        assert isinstance(node, LoopNest)
        dims = whole_dimensions(b, node, node.stores()[0])
        axes = [a.var for a in node.axes if a.size != 1]
        assert dims is not None
        found = (_inner(s.index, axes) for s in node.loads() if s.buffer not in free)
        votes.update({dims.index(v): b.nbytes.hint() for v in found if v is not None})
        readers = [n for i in d.readers[name] if isinstance(n := program.nodes[i], LoopNest)]
        normed = _normed(readers)
        for n in (n for n in readers if normed or not n.reduced):
            own = n.reduced_vars if n.reduced else [_inner(s.index, [a.var for a in n.axes]) for s in n.stores()]
            for s in n.loads():
                if s.buffer == name and not set(n.writes()) & set(group):
                    at = [k for k, c in enumerate(coordinates(s.index, b) or ()) if c.atom in own]
                    read = min(b.nbytes.hint(), (n.numel * n.rnumel).hint() * b.dtype.itemsize)
                    votes.update(dict.fromkeys(at, read))
                    rows.update(at if n.reduced else ())
    inner = next(k for k, s in enumerate(program.buffers[group[0]].strides) if s == 1)
    best = max(votes, key=lambda k: votes[k], default=inner)
    return None if votes[best] <= votes[inner] or rows - {best} else best


def _normed(readers: Sequence[Node]) -> bool:
    """Does one of them read what another one reduces?"""
    totals = {t for n in readers if isinstance(n, LoopNest) and n.reduced for t in n.writes()}
    return any(not totals.isdisjoint(n.reads()) for n in readers)


def _dimensions(program: Program, d: Dependencies, position: int, node: Node) -> tuple[Var | None, ...] | None:
    """The loop variable of each dimension of what an elementwise node makes, if only loop nests read it, element by
    element."""
    if not isinstance(node, LoopNest) or node.reduced or len(node.stores()) != 1 or node.stores()[0].reduce:
        return None
    store = node.stores()[0]
    name, b = store.buffer, program.buffers[store.buffer]
    dense = b.numel == b.extent and 1 in b.strides
    if b.kind != "temp" or name in d.needed or d.writers[name] != [position] or not dense:
        return None
    readers, dims = [program.nodes[i] for i in d.readers.get(name, ())], whole_dimensions(b, node, store)
    if dims is None or not all(isinstance(n, LoopNest) for n in readers):
        return None
    used = {s.index for n in readers if isinstance(n, LoopNest) for s in n.loads() if s.buffer == name}
    return None if any(coordinates(i, b) is None for i in used) else dims


def _ordered(program: Program, d: Dependencies, position: int, node: LoopNest) -> View | None:
    """Where what ``node`` computes is, in another order; None if it has the right one, or must keep its own."""
    dims = _dimensions(program, d, position, node)
    order = None if dims is None else _order(program, node, node.stores()[0])
    if order is None or dims is None:
        return None
    name = node.stores()[0].buffer
    b, readers = program.buffers[name], [program.nodes[i] for i in d.readers.get(name, ())]
    if _normed(readers):
        return None
    return _dense(b, sorted(range(len(dims)), key=lambda n: (order.get(dims[n], -1), -n)))  # type: ignore[arg-type]


def _dense(b: Buffer, order: Sequence[int]) -> View:
    """``b`` without gaps, its dimensions in this order in memory, the innermost first."""
    strides, step = [expr(1)] * len(b.shape), expr(1)
    for n in order:
        strides[n], step = step, step * b.shape[n]
    return View(b.name, b.shape, tuple(strides), expr(0), b.dtype)


def _order(program: Program, node: LoopNest, store: Store) -> dict[Var, int] | None:
    """The loop variables' strides in the load that most bytes have the order of; None if the store has it."""
    axes = [a.var for a in node.axes if a.size != 1]
    votes: dict[Var, int] = {}
    loads: dict[Var, Load] = {}
    for s in {(s.buffer, s.index): s for s in node.loads()}.values():
        inner = _inner(s.index, axes)
        if inner is not None and all(s.index.coefficient(v) is not None for v in axes):
            votes[inner] = votes.get(inner, 0) + program.buffers[s.buffer].dtype.itemsize
            loads.setdefault(inner, s)
    mine = _inner(store.index, axes)
    best = max(votes, key=lambda v: votes[v], default=mine)
    if mine is None or best is None or votes.get(mine, 0) >= votes.get(best, 0):
        return None
    return {v: loads[best].index.coefficient(v).hint() for v in axes}  # type: ignore[union-attr]


def _inner(index: Expr, axes: list[Var]) -> Var | None:
    """The variable along which neighbours lie, of an index that has them all."""
    if not index.variables() >= set(axes):
        return None
    return next((v for v in axes if index.coefficient(v) == 1), None)
