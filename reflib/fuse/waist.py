"""What goes from one elementwise kernel to the next, at its narrowest: fewer tensors from which the others follow.

Fusion keeps a step's results that later kernels read elsewhere. The backward of a stencil reads the gradients ``gu`` and
``gv`` of a step at the neighbours and, times this and that, at home: seven products of them were stored and read, 56
bytes per element, where the two gradients and the forward's ``u`` and ``v``, from which the next kernel can compute
these, are 24. So were the gradients of a bilateral filter's nine weights, each read at one place, where two tensors
and the image give all of them.

Which values? A minimum cut between what the first kernel reads and what its readers want. Each value of its body may be

* stored: it is written once, and read by each kernel behind it; ``bytes * (1 + readers)``,
* computed again by the readers, at each place where they read what follows from it: its instructions, in bytes
  (``PER_BYTE``), times the places. What was loaded at the same point is loaded there, which takes its bytes.

NB: TorchInductor stores what has several users by counting reads and operations (``realize_hint``), one value at a
time, before kernels are formed. AOTAutograd's partition of a training step is such a cut, with other weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

import networkx
import torch

from ..ir.expr import Expr, Ref
from ..ir.instructions import PER_BYTE
from ..ir.loops import Const, Index, Load, LoopNest, Op, Stmt, Store, stmt_args
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import needed, select
from ..lower.context import contiguous_strides
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies
from .driver import grouped
from .inline_loads import MAX_BODY, make_producer, makes_all, replace_loads, weight
from .recompute import drop_stores
from .result import Fused
from .split import row_major

NARROWER = 0.8  # of the bytes: what is left where it pays


@dataclass(frozen=True)
class _Wanted:
    """A result of a kernel that only later elementwise kernels read: by ``readers``, at ``places``."""

    store: Store
    bytes: int
    readers: frozenset[int]
    places: frozenset[tuple[int, Expr, int | None]]


def waist(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results with fewer bytes between elementwise kernels. Assumes a legal order; for GPUs."""
    if not target.is_gpu:
        return fused
    program, changed = fused.program, False
    depends = dependencies(program)
    nodes, buffers = list(program.nodes), dict(program.buffers)
    for position in range(len(nodes)):
        node = nodes[position]
        if isinstance(node, LoopNest) and not node.reduced and len(node.stores()) > 1:
            wanted = list(_wanted(program, depends, nodes, position, node))
            if len(wanted) > 1 and (cut := _cut(program, depends, nodes, position, wanted)):
                changed |= _apply(nodes, position, wanted, cut, buffers)
    done = replace(program, nodes=tuple(nodes), buffers=buffers)
    return grouped(fused.regrouped(drop_stores(done)), options, target) if changed else fused


def _wanted(
    program: Program, depends: Dependencies, nodes: list[Node], position: int, loops: LoopNest
) -> Iterable[_Wanted]:
    for s in loops.stores():
        readers = depends.readers.get(s.buffer, [])
        buffer, found = program.buffers[s.buffer], [nodes[r] for r in readers]
        if s.reduce or s.buffer in depends.needed or depends.writers[s.buffer] != [position] or not readers:
            continue
        if not all(isinstance(n, LoopNest) and not n.reduced and r > position for r, n in zip(readers, found)):
            continue
        if buffer.dtype.is_floating_point and makes_all(program, loops, s) and loops.numel == buffer.numel:
            loads = ((r, n) for r, n in zip(readers, found) if isinstance(n, LoopNest))
            places = {(r, x.index, x.mask) for r, n in loads for x in n.loads() if x.buffer == s.buffer}
            yield _Wanted(s, buffer.nbytes.hint(), frozenset(r for r, _, _ in places), frozenset(places))


def _cut(
    program: Program, depends: Dependencies, nodes: list[Node], position: int, wanted: list[_Wanted]
) -> set[int]:
    """The statements whose values are stored instead; none if that is not much less."""
    loops = nodes[position]
    assert isinstance(loops, LoopNest)
    body, points = loops.body, loops.numel.hint()
    behind: dict[int, list[_Wanted]] = {}
    for w in wanted:
        for i in needed(body, [w.store.value]):
            behind.setdefault(i, []).append(w)
    graph = networkx.DiGraph()
    for i, found in behind.items():
        s = body[i]
        readers = frozenset[int]().union(*(w.readers for w in found))
        places = len(frozenset[object]().union(*(w.places for w in found)))
        again = weight(s) * places * points // PER_BYTE
        if isinstance(s, Load):
            again += _read_again(program, depends, nodes, position, s, readers)
        elif not isinstance(s, (Op, Const, Index)):
            again = inf
        _edge(graph, "inputs", (i, "in"), again)
        stored = isinstance(s, Op) and s.dtype == torch.float32
        _edge(graph, (i, "in"), (i, "out"), 4 * points * (1 + _kernels(program, depends, readers)) if stored else inf)
        for a in stmt_args(s):
            _edge(graph, (a, "out"), (i, "in"), inf)
    for w in wanted:
        graph.add_edge((w.store.value, "out"), "results")
    now = sum(w.bytes * (1 + len(w.readers)) for w in wanted)
    try:
        cost, (_, late) = networkx.minimum_cut(graph, "inputs", "results")
    except networkx.NetworkXUnbounded:
        return set()
    if cost > NARROWER * now:
        return set()
    return {i for i in behind if (i, "out") in late and (i, "in") not in late}


def _edge(graph: networkx.DiGraph, a: object, b: object, capacity: float) -> None:
    if capacity == inf:
        graph.add_edge(a, b)
    else:
        graph.add_edge(a, b, capacity=int(capacity))


def _read_again(
    program: Program, depends: Dependencies, nodes: list[Node], position: int, s: Load, readers: frozenset[int]
) -> float:
    """Bytes that the readers then read of its buffer; infinite where they cannot."""
    buffer, loops = program.buffers.get(s.buffer), nodes[position]
    assert isinstance(loops, LoopNest)
    if buffer is None or any(isinstance(a, Ref) for a in s.index.atoms()) or s.buffer in loops.writes():
        return inf
    if depends.written_between(s.buffer, position, max(readers) + 1):
        return inf
    size = min(buffer.nbytes.hint(), loops.numel.hint() * buffer.dtype.itemsize)
    return size * _kernels(program, depends, {r for r in readers if s.buffer not in nodes[r].reads()})


def _kernels(program: Program, depends: Dependencies, readers: Iterable[int]) -> int:
    """How many kernels they are, once those that read the same tensors and wait for none of each other are one."""
    found: list[int] = []
    for r in sorted(readers):
        node = program.nodes[r]
        assert isinstance(node, LoopNest)
        same = (q for q in found if isinstance(n := program.nodes[q], LoopNest) and n.numel == node.numel)
        if not any(q not in depends.before[r] for q in same):
            found.append(r)
    return len(found)


def _apply(
    nodes: list[Node], position: int, wanted: list[_Wanted], cut: set[int], buffers: dict[str, Buffer]
) -> bool:
    loops = nodes[position]
    assert isinstance(loops, LoopNest)
    body, made = list(loops.body), list[Stmt]()
    shape, home = tuple(a.size for a in loops.axes), row_major(loops.axes)
    device = buffers[wanted[0].store.buffer].device
    kept = {w.store.value: w.store for w in wanted if w.bytes == 4 * loops.numel.hint()}
    new: dict[str, Buffer] = {}
    for i in sorted(cut):
        if i in kept:
            body[i] = Load(kept[i].buffer, kept[i].index, torch.float32)
            continue
        name = f"{loops.name}_waist{i}"
        new[name] = Buffer(name, torch.float32, device, shape, contiguous_strides(shape))
        body[i] = Load(name, home, torch.float32)
        made.append(Store(name, home, i))
    producers = []
    for w in wanted:
        if w.store.value not in cut:
            store = body.index(w.store)
            slice_ = replace(loops, body=select(tuple(body), needed(tuple(body), [store])))
            producers.append(make_producer(position, slice_, slice_.stores()[0]))
    after: dict[int, LoopNest] = {}
    for r in frozenset[int]().union(*(w.readers for w in wanted)):
        reader = nodes[r]
        assert isinstance(reader, LoopNest)
        if None in producers:
            return False
        after[r] = replace_loads(reader, *producers)  # type: ignore[arg-type]
        if len(after[r].body) > MAX_BODY:
            return False
    buffers |= new
    nodes[position] = replace(loops, body=(*loops.body, *made))
    for r, reader in after.items():
        nodes[r] = reader
    return True
