"""Store it, or compute it again? A value that one kernel makes and that another, which it was not fused with, reads.

The backward of a norm makes ``x_hat = (x - mean) * rstd`` in the kernel that reduces rows, and needs it in the kernel
that reduces columns. Stored in float32 it costs 4 bytes written and 4 read per element; computed again from ``x`` in
bfloat16 it costs 2 read. So, once kernels are formed, a load of such a value is replaced by its computation where that
moves fewer bytes and takes little arithmetic. What a reduction gave it per row, as the mean, is stored for that. What
the first kernel stores in any case, others compute from: the second of two tensors that follow from each other, and
what a product's kernel would store beside the product (a soft cap of logits, in float32, that a softmax reads). A
broadcast (a rotary embedding's cosines) is read from a cache, and would be computed for every element: that is only
done where it saves a launch, and either hides behind what the kernel moves or costs less.

NB: TorchInductor decides this while lowering (``realize`` heuristics), before kernels are formed.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch

from ..ir.expr import Ref, product
from ..ir.instructions import LOAD, PER_BYTE, weight, work_of
from ..ir.loops import Acc, Axis, Indirect, Load, LoopNest, Op, Reduce, Scan, Store, stmt_args
from ..ir.ops import value_dtype
from ..ir.program import Buffer, Node, Program, Template
from ..ir.transforms import eliminate_dead, needed, select, varying
from ..lower.context import contiguous_strides
from ..options import Options
from ..target import Target
from .computed_twice import stays_stored
from .dependencies import Dependencies, dependencies, used_buffers
from .inline_loads import EXPENSIVE, MAX_BODY
from .places import LAUNCH
from .producers import gathers, make_producer, makes_all, replace_loads
from .result import Fused
from .split import row_major

MAX_OPS = 16  # operations worth repeating to save few bytes; for more bytes, PER_BYTE
MAX_ROWS = 2  # results of reductions, each a number per row
MAX_EXPENSIVE = 2  # ... of these, slow ones


def recompute(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results with no more bytes moved; kernels without stores are removed. Assumes a legal order. On a CPU
    nothing changes: arithmetic is not free beside memory traffic there."""
    if not target.is_gpu:
        return fused
    program = fused.program
    depends = dependencies(program)
    depends = replace(depends, readers={b: list(r) for b, r in depends.readers.items()})
    nodes = list(program.nodes)
    changed, buffers = False, dict(program.buffers)
    for position, node in enumerate(nodes):
        if not isinstance(node, LoopNest):
            continue
        makers = {b: nodes[w[0]] for b in node.reads() if len(w := depends.writers.get(b, [])) == 1}
        read = [b for b, maker in makers.items() if not stays_stored(maker, b, program, options)]
        for name in sorted(read, key=lambda b: -program.buffers[b].dtype.itemsize):
            if (new := _without_load(program, depends, nodes, position, name, buffers)) is not None:
                nodes[position] = new
                changed = True
                for b in new.reads():
                    depends.readers[b] = sorted({*depends.readers.get(b, ()), position})
    done = replace(program, nodes=tuple(nodes), buffers=buffers)
    return fused.regrouped(drop_stores(done)) if changed else fused


def _without_load(
    program: Program, depends: Dependencies, nodes: list[Node], position: int, name: str, buffers: dict[str, Buffer]
) -> LoopNest | None:
    """The node with its loads of ``name`` computed instead; None where that is impossible or does not pay. What that
    needs of the writer's reductions gets ``buffers``, and stores in ``nodes``."""
    node = nodes[position]
    writers = depends.writers.get(name, [])
    assert isinstance(node, LoopNest)
    if len(writers) != 1 or writers[0] >= position:
        return None
    made = nodes[writers[0]]
    writer = made.epilogue if isinstance(made, Template) else made
    if not isinstance(writer, LoopNest):
        return None
    have = _at_hand(program, node, name)
    stays = {b for b in writer.writes() if b != name and _stays(depends, nodes, node, b)} - have
    trials = (_computing(program, depends, nodes, position, name, writer, w, buffers) for w in (have, have | stays))
    return next((new for new in itertools.islice(trials, 1 + bool(stays)) if new is not None), None)


def _stays(depends: Dependencies, nodes: list[Node], node: LoopNest, name: str) -> bool:
    """Is it stored in any case, for others than ``node``?"""
    readers = (r for r in depends.readers.get(name, []) if nodes[r] is not node)
    return name in depends.needed or any(name in nodes[r].reads() for r in readers)


def _computing(
    program: Program, depends: Dependencies, nodes: list[Node], position: int, name: str, writer: LoopNest,
    have: set[str], buffers: dict[str, Buffer],
) -> LoopNest | None:  # fmt: skip
    """``have``: what may be read of what the writer stores, instead of what it made that of."""
    node, writers = nodes[position], depends.writers[name]
    assert isinstance(node, LoopNest)
    source, both = _from_stored(writer, have, buffers)
    rows = _of_rows(source, name)
    slice_ = _computation(source, name, rows)
    if slice_ is None or not makes_all(program, slice_, slice_.stores()[0]):
        return None
    elementwise = not writer.reduced and not node.reduced and not set(slice_.reads()) <= both
    if elementwise and gathers(slice_):
        return None  # read at random places again, it costs more than its bytes; inline_loads has decided
    read = [b for b in slice_.reads() if b not in {s.buffer for s in rows.values()}]
    if set(read) & (set(writer.writes()) - both):
        return None  # it overwrites what it reads
    if any(depends.written_between(b, writers[0], position + 1) for b in read):
        return None
    if not _pays(_saved_bytes(program, depends, nodes, slice_, node, name), slice_, node):
        return None
    producer = make_producer(writers[0], slice_, slice_.stores()[0])
    if producer is None:
        return None
    new = replace_loads(node, producer)
    if not _arithmetic_pays(program, depends, writer, slice_, node, new, name):
        return None
    if rows:
        kept = _row_buffers(writer, rows, buffers)
        nodes[writers[0]] = replace(writer, body=(*writer.body, *kept))
    return new


def _arithmetic_pays(
    program: Program, depends: Dependencies, writer: LoopNest, slice_: LoopNest, node: LoopNest, new: LoopNest,
    name: str,
) -> bool:  # fmt: skip
    """Of what is computed more often than before."""
    more, points = work_of(new) - work_of(node), (node.numel * node.rnumel).hint()
    saved = 2 * program.buffers[name].nbytes.hint()
    if len({s.index for s in node.loads() if s.buffer == name}) > 2:  # of a pooling, computed for each of these
        return more * points <= PER_BYTE * saved
    at = _computed_at(node, name)
    if at < 2 * slice_.numel.hint():
        return True
    if name in depends.needed or writer.reduced or len(writer.stores()) > 1:  # its kernel stays
        return more * at <= PER_BYTE * saved
    hidden = work_of(node) * points + more * at <= PER_BYTE * _moved(program, new, points)
    return hidden or more * at <= PER_BYTE * (saved + LAUNCH[True] // len(depends.readers[name]))


def _computed_at(node: LoopNest, name: str) -> int:
    """How often what a load of ``name`` reads would be computed: for each row, for each element of a row, or both."""
    walked = {v for s in node.loads() if s.buffer == name for v in s.index.variables()}
    kinds = {a.kind for a in node.axes if a.var in walked}
    return product(a.size for a in node.axes if a.kind in kinds).hint()


def _moved(program: Program, node: LoopNest, points: int) -> int:
    """Bytes that a kernel reads and writes, behind which it computes."""
    buffers = (program.buffers[b] for b in {*node.reads(), *node.writes()} if b in program.buffers)
    return sum(min(b.nbytes.hint(), points * b.dtype.itemsize) for b in buffers)


def _at_hand(program: Program, node: LoopNest, name: str) -> set[str]:
    """What ``node`` reads where it reads ``name``, and narrower tensors that it reads elsewhere."""
    width, places = program.buffers[name].dtype.itemsize, {s.index for s in node.loads() if s.buffer == name}
    loads = (s for s in node.loads() if s.buffer != name and s.buffer in program.buffers)
    return {s.buffer for s in loads if s.index in places or program.buffers[s.buffer].dtype.itemsize < width}


def _from_stored(writer: LoopNest, have: set[str], buffers: dict[str, Buffer]) -> tuple[LoopNest, set[str]]:
    """``writer`` with a load for each computed value that it also stores to a tensor in ``have``, and these tensors."""
    body, found = list(writer.body), set[str]()
    for s in writer.stores():
        value, usable = writer.body[s.value], s.buffer in have and not s.reduce and s.buffer not in writer.reads()
        usable = usable and not any(isinstance(a, Ref) for a in s.index.atoms())  # a later point may store there too
        if usable and isinstance(value, Op) and value.dtype == value_dtype(buffers[s.buffer].dtype):
            body[s.value] = Load(s.buffer, s.index, value.dtype)
            found.add(s.buffer)
    return replace(writer, body=tuple(body)), found


def _of_rows(writer: LoopNest, name: str) -> dict[int, Load]:
    """What ``name`` is made from and a row has one of, as loads from buffers that there may be: results of reductions,
    and what was computed once per row and would be for each element (a sine)."""
    if any(isinstance(s, (Scan, Indirect)) for s in writer.body):
        return {}
    level = varying(writer.body, writer.reduced_vars)
    reduced = [False] * len(writer.body)
    found: dict[int, Load] = {}
    at = row_major([a for a in writer.axes if a.kind == "p"])
    for i in needed(writer.body, (i for i, s in enumerate(writer.body) if isinstance(s, Store) and s.buffer == name)):
        s = writer.body[i]
        reduced[i] = isinstance(s, Reduce) or not level[i] and any(reduced[a] for a in stmt_args(s))
        reduced[i] = reduced[i] or not level[i] and bool(writer.reduced) and weight(s) > 2 * LOAD
        for a in stmt_args(s) if level[i] and not isinstance(s, Reduce) else ():
            value = writer.body[a]
            if reduced[a] and isinstance(value, (Reduce, Op)):
                found[a] = Load(f"{name}_row{a}", at, value.dtype)
    return found if len(found) <= MAX_ROWS and all(v.dtype == torch.float32 for v in found.values()) else {}


def _row_buffers(writer: LoopNest, rows: Mapping[int, Load], buffers: dict[str, Buffer]) -> list[Store]:
    """Makes the buffers that another reader has not had made; returns what stores to them."""
    rows = {i: v for i, v in rows.items() if v.buffer not in buffers}
    shape = tuple(a.size for a in writer.axes if a.kind == "p")
    device, strides = buffers[writer.writes()[0]].device, contiguous_strides(shape)
    buffers |= {v.buffer: Buffer(v.buffer, v.dtype, device, shape, strides) for v in rows.values()}
    return [Store(v.buffer, v.index, i) for i, v in rows.items()]


def _computation(writer: LoopNest, name: str, rows: Mapping[int, Load]) -> LoopNest | None:
    """The statements of ``writer`` that make ``name``, elementwise; None if a reduction or a product is among them."""
    stores = [i for i, s in enumerate(writer.body) if isinstance(s, Store) and s.buffer == name]
    if len(stores) != 1 or writer.body[stores[0]].reduce:  # type: ignore[union-attr]
        return None
    whole = tuple(rows.get(i, s) for i, s in enumerate(writer.body))
    live = needed(whole, stores)
    if any(isinstance(whole[i], (Reduce, Scan, Acc)) for i in live):
        return None
    body = select(whole, live)
    store = body[-1]
    assert isinstance(store, Store)
    axes = tuple(Axis(a.var, "p") for a in writer.axes if store.index.has(a.var) or a.size != 1)
    if any(not store.index.has(a.var) for a in axes if a.size != 1):
        return None  # stored once per row: cheap to read
    return LoopNest(writer.name, axes, body, writer.origins)


def _pays(saved: int, slice_: LoopNest, node: LoopNest) -> bool:
    work = [s for s in slice_.body if isinstance(s, Op)]
    most = max(MAX_OPS, PER_BYTE * saved // max(1, slice_.numel.hint()))
    expensive = sum(s.op in EXPENSIVE for s in work)
    fits = len(work) <= most and expensive <= MAX_EXPENSIVE and len(node.body) + len(slice_.body) <= MAX_BODY
    return saved > 0 and fits


def _saved_bytes(
    program: Program, depends: Dependencies, nodes: list[Node], slice_: LoopNest, node: LoopNest, name: str
) -> int:
    """What the load takes and, if this is the last other reader, the store, less what is read instead."""
    buffers = program.buffers
    size = buffers[name].nbytes.hint()
    others = [r for r in depends.readers.get(name, []) if name in nodes[r].reads() and nodes[r] is not node]
    inside = depends.writers[name][0]
    goes = name not in depends.needed and all(r == inside for r in others)
    points = buffers[name].numel.hint()
    have = set(node.reads())
    extra = 0
    for load in {(s.buffer, s.index): s for s in slice_.body if isinstance(s, Load)}.values():
        if load.buffer not in buffers:  # a number per row, stored for this
            extra += 2 * load.dtype.itemsize * product(v.size for v in load.index.variables()).hint()
        elif load.buffer not in have:
            extra += min(buffers[load.buffer].nbytes.hint(), points * buffers[load.buffer].dtype.itemsize)
    return size * (2 if goes else 1) - extra


def drop_stores(program: Program) -> Program:
    """Without stores to temporaries that are not read any more."""
    read = program.output_buffers() | {b for n in program.nodes for b in n.reads()}
    dead = {name for name, b in program.buffers.items() if b.kind == "temp" and name not in read}
    nodes: list[Node] = []
    for n in program.nodes:
        loops = n.epilogue if isinstance(n, Template) else n
        if isinstance(loops, LoopNest) and dead & set(loops.writes()):
            kept = (i for i, s in enumerate(loops.body) if not (isinstance(s, Store) and s.buffer in dead))
            loops = replace(loops, body=eliminate_dead(select(loops.body, kept)))
            if not loops.body:
                continue
            n = replace(n, epilogue=loops) if isinstance(n, Template) else loops
        nodes.append(n)
    return replace(program, nodes=tuple(nodes), buffers=used_buffers(program, nodes))
