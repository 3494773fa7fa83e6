"""Temporaries in the order in memory of what they are computed from.

Strides follow PyTorch's rules, by which a slice that is written to zeros is laid out as the zeros are, and a padded
tensor as it would be in eager, whatever is in it. Where such a temporary is never stored, since it is inlined or fused,
its strides still decide how a reduction over it is cut, and which axis is read along: a bias's gradient, summed over
rows of a tensor in channels-last order (``capture.layouts``), looked like a sum along rows of channels. And where it is
stored, each kernel that reads or writes it goes through two orders at once.

So before these decisions a temporary that one loop nest computes elementwise, and only loop nests read, gets the order
of what most of its bytes are computed from. Not what is reduced and then read beside the result (a norm): that is one
kernel, which holds whole rows, and cut it would be two.
"""

from dataclasses import replace

from ..ir.expr import Expr, Var, expr
from ..ir.loops import Load, LoopNest, Store
from ..ir.program import Node, Program, View
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
    nodes = list(program.nodes)
    for position, node in enumerate(nodes):
        if isinstance(node, LoopNest):
            nodes[position] = node = rehomed(node, places, program.buffers)
            if isinstance(node, LoopNest) and (place := _ordered(program, d, position, node)) is not None:
                places[place.buffer] = place
                nodes[position] = rehomed(node, {place.buffer: place}, program.buffers)
    buffers = program.buffers | {b: replace(program.buffers[b], strides=v.strides) for b, v in places.items()}
    return replace(fused, program=replace(program, nodes=tuple(nodes), buffers=buffers)) if places else fused


def _ordered(program: Program, d: Dependencies, position: int, node: LoopNest) -> View | None:
    """Where what ``node`` computes is, in another order; None if it has the right one, or must keep its own."""
    stores = node.stores()
    if node.reduced or len(stores) != 1 or stores[0].reduce:
        return None
    (store,) = stores
    order = _order(program, node, store)
    name, b = store.buffer, program.buffers[store.buffer]
    if order is None or b.kind != "temp" or name in d.needed or d.writers[name] != [position] or b.numel != b.extent:
        return None
    dims = whole_dimensions(b, node, store)
    if dims is None:
        return None
    readers: list[Node] = [program.nodes[i] for i in d.readers.get(name, ())]
    totals = {b for n in readers if isinstance(n, LoopNest) and n.reduced for b in n.writes()}
    if any(not totals.isdisjoint(n.reads()) for n in readers):
        return None
    used = [s.index for n in readers if isinstance(n, LoopNest) for s in n.loads() if s.buffer == name]
    used.append(store.index)
    if not all(isinstance(n, LoopNest) for n in readers) or any(coordinates(i, b) is None for i in used):
        return None
    strides, step = [expr(1)] * len(dims), expr(1)
    for n in sorted(range(len(dims)), key=lambda n: (order.get(dims[n], -1), -n)):  # type: ignore[arg-type]
        strides[n], step = step, step * b.shape[n]
    return View(name, b.shape, tuple(strides), expr(0), b.dtype)


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
