"""Store it, or compute it again? A value that one kernel makes and that another, which it was not fused with, reads.

The backward of a norm makes ``x_hat = (x - mean) * rstd`` in the kernel that reduces rows, and needs it in the kernel
that reduces columns. Stored in float32 it costs 4 bytes written and 4 read per element; computed again from ``x`` in
bfloat16 it costs 2 read. So, once kernels are formed, a load of such a value is replaced by its computation where that
moves fewer bytes, needs no reduction, and takes little arithmetic.

NB: TorchInductor decides this while lowering (``realize`` heuristics), before kernels are formed.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.loops import Axis, Indirect, Load, LoopNest, Op, Reduce, Scan, Store
from ..ir.program import Node, Program
from ..ir.transforms import eliminate_dead, needed, select
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, used_buffers
from .inline_loads import EXPENSIVE, MAX_BODY, OPS_PER_BYTE, make_producer, makes_all, replace_loads, work_of
from .legality import common_space, single
from .result import Fused, Reason

MAX_OPS = 16  # operations worth repeating to save a store and a load
MAX_EXPENSIVE = 2  # ... of these, slow ones


def recompute(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results with no more bytes moved; kernels without stores are removed. Assumes a legal order. On a CPU
    nothing changes: arithmetic is not free beside memory traffic there."""
    if not target.is_gpu:
        return fused
    program = fused.program
    depends = dependencies(program)
    nodes = list(program.nodes)
    changed = False
    for position, node in enumerate(nodes):
        if not isinstance(node, LoopNest):
            continue
        for name in node.reads():
            new = _without_load(program, depends, nodes, position, name)
            if new is not None:
                nodes[position] = new
                changed = True
    return fused.regrouped(_drop_stores(replace(program, nodes=tuple(nodes)))) if changed else fused


def _without_load(
    program: Program, depends: Dependencies, nodes: list[Node], position: int, name: str
) -> LoopNest | None:
    """The node with its loads of ``name`` computed instead; None where that is impossible or does not pay."""
    node = nodes[position]
    writers = depends.writers.get(name, [])
    assert isinstance(node, LoopNest)
    if len(writers) != 1 or writers[0] >= position:
        return None
    writer = nodes[writers[0]]
    if not isinstance(writer, LoopNest):
        return None
    if not writer.reduced and not node.reduced and not _alike(writers[0], writer, position, node, depends):
        return None  # inline_loads has decided about these
    slice_ = _computation(writer, name)
    if slice_ is None or not makes_all(program, slice_, slice_.stores()[0]) or not _cheap(slice_, node):
        return None
    if set(slice_.reads()) & set(writer.writes()):
        return None  # it overwrites what it reads
    if any(depends.written_between(b, writers[0], position + 1) for b in slice_.reads()):
        return None
    if not _saves_bytes(program, depends, nodes, slice_, node, name):
        return None
    producer = make_producer(writers[0], slice_, slice_.stores()[0])
    if producer is None:
        return None
    new = replace_loads(node, producer)
    window = len({s.index for s in node.loads() if s.buffer == name}) > 2  # of a pooling, computed for each of these
    more = (work_of(new) - work_of(node)) * (node.numel * node.rnumel).hint()
    return new if not window or more <= OPS_PER_BYTE * 2 * program.buffers[name].nbytes.hint() else None


def _alike(p: int, writer: LoopNest, position: int, node: LoopNest, depends: Dependencies) -> bool:
    """Two elementwise kernels that could be one, but for what lies between or is in the other."""
    return not isinstance(common_space(single(p, writer, depends), single(position, node, depends)), Reason)


def _computation(writer: LoopNest, name: str) -> LoopNest | None:
    """The statements of ``writer`` that make ``name``, elementwise; None if a reduction is among them."""
    stores = [i for i, s in enumerate(writer.body) if isinstance(s, Store) and s.buffer == name]
    if len(stores) != 1 or writer.body[stores[0]].reduce:  # type: ignore[union-attr]
        return None
    live = needed(writer.body, stores)
    if any(isinstance(writer.body[i], (Reduce, Scan, Indirect)) for i in live):
        return None
    body = select(writer.body, live)
    store = body[-1]
    assert isinstance(store, Store)
    axes = tuple(Axis(a.var, "p") for a in writer.axes if store.index.has(a.var) or a.size != 1)
    if any(not store.index.has(a.var) for a in axes if a.size != 1):
        return None  # stored once per row: cheap to read
    return LoopNest(writer.name, axes, body, writer.origins)


def _cheap(slice_: LoopNest, node: LoopNest) -> bool:
    work = [s for s in slice_.body if isinstance(s, Op)]
    expensive = sum(s.op in EXPENSIVE for s in work)
    return len(work) <= MAX_OPS and expensive <= MAX_EXPENSIVE and len(node.body) + len(slice_.body) <= MAX_BODY


def _saves_bytes(
    program: Program, depends: Dependencies, nodes: list[Node], slice_: LoopNest, node: LoopNest, name: str
) -> bool:
    """Are fewer bytes read instead than the load takes and, if this is the last other reader, the store?"""
    buffers = program.buffers
    size = buffers[name].nbytes.hint()
    others = [r for r in depends.readers.get(name, []) if name in nodes[r].reads() and nodes[r] is not node]
    inside = depends.writers[name][0]
    goes = name not in depends.needed and all(r == inside for r in others)
    points = buffers[name].numel.hint()
    have = set(node.reads())
    extra = 0
    for load in {(s.buffer, s.index): s for s in slice_.body if isinstance(s, Load)}.values():
        if load.buffer not in have:
            extra += min(buffers[load.buffer].nbytes.hint(), points * buffers[load.buffer].dtype.itemsize)
    return extra < size * (2 if goes else 1)


def _drop_stores(program: Program) -> Program:
    """Without stores to temporaries that are not read any more."""
    read = program.output_buffers() | {b for n in program.nodes for b in n.reads()}
    dead = {name for name, b in program.buffers.items() if b.kind == "temp" and name not in read}
    nodes: list[Node] = []
    for n in program.nodes:
        if isinstance(n, LoopNest) and dead & set(n.writes()):
            kept = (i for i, s in enumerate(n.body) if not (isinstance(s, Store) and s.buffer in dead))
            n = replace(n, body=eliminate_dead(select(n.body, kept)))
            if not n.body:
                continue
        nodes.append(n)
    return replace(program, nodes=tuple(nodes), buffers=used_buffers(program, nodes))
