"""Sums at places that tensors name, a strip of their columns after another, so that they stay in a cache.

Rows are added to rows in any order (``scatters``). A tensor of sums that is larger than the L2 cache then goes through
memory for each addition, beside being filled and read::

    s[v, d] = 0;  s[at[i], d] += u[i, d];  y[v, d] = s[v, d]        of S bytes, additions of A:  2 S + 2 A

But columns have nothing to do with each other. In strips of ``CACHE`` bytes, of which only one is there at a time, all
of this happens in the cache; what is added is read once, as before, and memory has no more than that and ``y``::

    for strip:  s[v, c] = 0;  s[at[i], c] += u[i, strip + c];  y[v, strip + c] = s[v, c]

(The gradient of 49,024 rows of 2,344 bfloat16 that were taken from 12,256: 1.2 GB of 1.5 GB.) Each strip is three
launches. A row's piece has whole cache lines, so what is read beside the sums is read no worse. An H200's cache adds
0.8 numbers per ns, which in memory takes half as long again: so of what is added only a third is saved. (12.6 million
numbers added to a table of 94 MB: 68 us, and 97 in strips.)

NB: TorchInductor adds in float32 to memory, or calls ATen, which sorts the places first.
"""

from collections.abc import Iterator
from dataclasses import replace

from ..ir.expr import Atom, IntLike, Ref, divide_exact, expr
from ..ir.loops import Axis, Load, LoopNest, Store
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import substitute
from ..lower.context import contiguous_strides
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, used_buffers
from .mapping import fresh
from .places import LAUNCH
from .result import Fused, Group

CACHE = 24 << 20  # bytes: half of an L2, through which what is added passes as well
PIECE = 64  # elements of a row at least, and a multiple of these


def strips(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. Assumes a legal order; for GPUs."""
    program = fused.program
    if not target.is_gpu or not any(s.reduce == "atomic" for n in _loops(program) for s in n.stores()):
        return fused
    d, buffers, nodes = dependencies(program), dict(program.buffers), dict[int, list[LoopNest]]()
    for b in program.buffers.values():
        positions = _sum(program, d, b)
        if positions and nodes.keys().isdisjoint(positions):
            made = _cut(b, [program.nodes[p] for p in positions], b.name in d.needed)  # type: ignore[misc]
            if made:
                strip, found = made
                buffers[b.name] = strip
                nodes |= {p: [] for p in positions} | {positions[-1]: found}
    if not nodes:
        return fused
    of = {g.name: g for g in fused.groups}
    everything: list[Node] = []
    groups: list[Group] = []
    for p, node in enumerate(program.nodes):
        everything += nodes.get(p, [node])
        groups += [_group(of, n) for n in nodes[p]] if p in nodes else [of[node.name]]
    program = replace(program, nodes=tuple(everything), buffers=buffers)
    return replace(fused, program=replace(program, buffers=used_buffers(program, everything)), groups=tuple(groups))


def _loops(program: Program) -> Iterator[LoopNest]:
    return (n for n in program.nodes if isinstance(n, LoopNest))


def _group(of: dict[str, Group], strip: LoopNest) -> Group:
    """The first strip stands for what all are made of."""
    whole, _, number = strip.name.rpartition("_strip")
    return replace(of[whole], name=strip.name, members=of[whole].members if number == "0" else (strip.name,))


def _sum(program: Program, d: Dependencies, b: Buffer) -> list[int]:
    """The positions of what fills a large tensor, adds to it, and, of a temporary, once reads it, where the last of
    them stands these could all be, even after it; else none."""
    writers, readers = d.writers.get(b.name, []), d.readers.get(b.name, [])
    needed = b.name in d.needed
    if b.kind != "temp" or len(writers) < 2 or len(readers) != (not needed) or readers and readers[0] < writers[-1]:
        return []
    if b.nbytes.hint() <= CACHE or b.strides != contiguous_strides(b.shape) or len(b.shape) < 2:
        return []
    positions = [*writers, *readers]
    end = positions[-1]
    for p in positions:
        n = program.nodes[p]
        if not isinstance(n, LoopNest) or n.reduced or set(n.reads()) & set(n.writes()):
            return []
        if p not in readers and set(n.writes()) != {b.name}:
            return []
        if any(d.written_between(r, p, end + 1) for r in n.reads()):
            return []
    filled = program.nodes[writers[0]].stores()  # type: ignore[union-attr]
    if any(isinstance(a, Ref) for s in filled for a in s.index.atoms()):
        return []  # few rows of it
    adds = [s for p in writers[1:] for s in program.nodes[p].stores()]  # type: ignore[union-attr]
    return positions if all(s.reduce == "atomic" for s in adds) else []


def _cut(b: Buffer, nodes: list[LoopNest], needed: bool) -> tuple[Buffer, list[LoopNest]] | None:
    """A strip's buffer (of what is ``needed``, the whole), and the nodes of all strips; None if that does not pay."""
    length, rows = b.shape[-1].constant, [(n, _along(n, b)) for n in nodes]
    if length is None or any(a is None for _, a in rows):
        return None
    most = CACHE // (b.nbytes.hint() // length) // PIECE * PIECE
    if most < PIECE or most >= length:
        return None
    width = -(-length // -(-length // most) // PIECE) * PIECE
    count = -(-length // width)
    added = sum(n.numel.hint() for n in nodes if any(s.reduce for s in n.stores())) * b.dtype.itemsize
    saved = 2 * added // 3 if needed else 2 * added // 3 + 2 * b.nbytes.hint()  # the cache adds 3.2 bytes per ns
    if saved < LAUNCH[True] * (count - 1) * len(nodes):
        return None
    shape = b.shape if needed else (*b.shape[:-1], expr(width))
    strip = replace(b, shape=shape, strides=contiguous_strides(shape))
    found = []
    for low in range(0, length, width):
        for n, a in rows:
            assert a is not None
            new = _strip(n, a, b, strip, low, min(width, length - low))
            if new is None:
                return None
            found.append(replace(new, name=f"{n.name}_strip{low // width}"))
    return strip, found


def _along(n: LoopNest, b: Buffer) -> Axis | None:
    """The axis that goes along ``b``'s rows, wherever the node has an element of it."""
    used = {s.index for s in n.body if isinstance(s, (Load, Store)) and s.buffer == b.name}
    for a in n.axes:
        whole = divide_exact(a.size, b.shape[-1])
        if whole is not None and whole != 0 and all(i.coefficient(a.var) == 1 for i in used):
            return a
    return None


def _strip(n: LoopNest, a: Axis, b: Buffer, strip: Buffer, low: int, size: int) -> LoopNest | None:
    """``n`` for ``size`` columns from ``low``; ``strip``: what it has of ``b``, if that is not the whole."""
    length, width, rows = b.shape[-1], strip.shape[-1], divide_exact(a.size, b.shape[-1])
    assert rows is not None
    row, column = fresh(rows), fresh(expr(size))
    above = expr(0) if rows == 1 else expr(row) * length
    here = expr(0) if size == 1 else expr(column)
    env: dict[Atom, IntLike] = {a.var: above + low + here}
    body = list(substitute(n.body, env))
    for i, s in enumerate(n.body):
        if isinstance(s, (Load, Store)) and s.buffer == b.name and width != length:
            rest = divide_exact(s.index - expr(a.var) + above, length)
            if rest is None:
                return None
            body[i] = replace(s, index=rest * width + here)
    inner = [Axis(v, "p") for v in (row, column) if v.size != 1]
    axes = tuple(x for old in n.axes for x in (inner if old is a else [old]))
    return replace(n, axes=axes, body=tuple(body))
