"""Store it, or compute it again? A value that one kernel makes and another, which it could not be fused with, reads.

The backward of a norm makes ``x_hat = (x - mean) * rstd`` in the kernel that reduces rows, and needs it in the kernel
that reduces columns. Stored in float32 it costs 4 bytes written and 4 read an element; made again from ``x`` in
bfloat16 it costs 2 read. So, once kernels are formed, a load of such a value is replaced by what it was computed from,
where that moves fewer bytes, needs no reduction, and takes little arithmetic.

NB: TorchInductor decides this while lowering (``realize`` heuristics), before it knows what will be one kernel.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.loops import Axis, Indirect, Load, Loops, Op, Reduce, Stmt, Store, eliminate_dead, map_stmt, stmt_args
from ..ir.program import Node, Program
from .dependencies import Dependencies, dependencies, used_buffers
from .inline_loads import EXPENSIVE, MAX_BODY, make_producer, replace_loads

MAX_OPS = 16  # operations worth repeating to save a store and a load
MAX_DEAR = 2  # ... of these, slow ones


def recompute(program: Program) -> Program:
    """Assumes a fused program in a legal order; gives one that computes the same and moves no more bytes."""
    depends = dependencies(program)
    nodes = list(program.nodes)
    changed = False
    for position, node in enumerate(nodes):
        if not isinstance(node, Loops):
            continue
        for name in node.reads():
            new = _without_load(program, depends, nodes, position, name)
            if new is not None:
                nodes[position] = new
                changed = True
    return _drop_stores(replace(program, nodes=tuple(nodes))) if changed else program


def _without_load(program: Program, depends: Dependencies, nodes: list[Node], position: int, name: str) -> Loops | None:
    """The node with its loads of ``name`` computed instead; None where that cannot be or does not pay."""
    node = nodes[position]
    writers = depends.writers.get(name, [])
    assert isinstance(node, Loops)
    if len(writers) != 1 or writers[0] >= position:
        return None
    writer = nodes[writers[0]]
    if not isinstance(writer, Loops) or not writer.reduced and not node.reduced:
        return None  # two elementwise kernels: inlining has judged them already
    slice_ = _computation(writer, name)
    if slice_ is None or not _cheap(slice_, node):
        return None
    if set(slice_.reads()) & set(writer.writes()):
        return None  # it writes over what it reads
    if any(depends.written_between(b, writers[0], position + 1) for b in slice_.reads()):
        return None
    if not _saves_bytes(program, depends, nodes, slice_, node, name):
        return None
    producer = make_producer(writers[0], slice_, slice_.stores()[0])
    return None if producer is None else replace_loads(node, producer)


def _computation(writer: Loops, name: str) -> Loops | None:
    """The statements of ``writer`` that make ``name``, as an elementwise Loops; None if a reduction is among them."""
    stores = [i for i, s in enumerate(writer.body) if isinstance(s, Store) and s.buffer == name]
    if len(stores) != 1:
        return None
    live = {stores[0]}
    for i in reversed(range(stores[0] + 1)):
        if i in live:
            live.update(stmt_args(writer.body[i]))
    if any(isinstance(writer.body[i], (Reduce, Indirect)) for i in live):
        return None
    ids: dict[int, int] = {}
    body: list[Stmt] = []
    for i in sorted(live):
        ids[i] = len(body)
        body.append(map_stmt(writer.body[i], ids))
    store = body[-1]
    assert isinstance(store, Store)
    axes = tuple(Axis(a.var, "p") for a in writer.axes if store.index.has(a.var) or a.size != 1)
    if any(not store.index.has(a.var) for a in axes if a.size != 1):
        return None  # stored once a row: cheap to read
    return Loops(writer.name, axes, tuple(body), writer.origins)


def _cheap(slice_: Loops, node: Loops) -> bool:
    work = [s for s in slice_.body if isinstance(s, Op)]
    dear = sum(s.op in EXPENSIVE for s in work)
    return len(work) <= MAX_OPS and dear <= MAX_DEAR and len(node.body) + len(slice_.body) <= MAX_BODY


def _saves_bytes(
    program: Program, depends: Dependencies, nodes: list[Node], slice_: Loops, node: Loops, name: str
) -> bool:
    """Bytes read instead, against the load saved and, if this is the last reader elsewhere, the store."""
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
    """Without stores to temporaries that nobody reads any more."""
    read = program.output_buffers() | {b for n in program.nodes for b in n.reads()}
    dead = {name for name, b in program.buffers.items() if b.kind == "temp" and name not in read}
    nodes: list[Node] = []
    for n in program.nodes:
        if isinstance(n, Loops) and dead & set(n.writes()):
            n = replace(n, body=_without_stores(n.body, dead))
            if not n.body:
                continue
        nodes.append(n)
    return replace(program, nodes=tuple(nodes), buffers=used_buffers(program, nodes))


def _without_stores(body: tuple[Stmt, ...], dead: set[str]) -> tuple[Stmt, ...]:
    ids: dict[int, int] = {}
    out: list[Stmt] = []
    for i, s in enumerate(body):
        if not (isinstance(s, Store) and s.buffer in dead):
            ids[i] = len(out)
            out.append(map_stmt(s, ids))
    return eliminate_dead(tuple(out))
