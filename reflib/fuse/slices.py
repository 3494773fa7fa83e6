"""Chains of writes to slices: what is read from them, and where they are stored.

Captured graphs are functional: ``x[:, i] = v`` is ``x_new = select_scatter(x_old, v)``, and lowered it is a loop nest
over all of ``x``: ``x_new[e] = v if e in slice else x_old[e]``. A recurrence makes a chain of n of these, each read by
the next step. Two passes, each linear in n, keep that from costing n copies (or selects n deep).

This one is about reads. A load at an element that lies in the slice reads ``v`` instead, and one that lies outside
``x_old``; that may be the next such write, so the load goes down the chain until bounds decide nothing. Then only whole
reads of ``x_new`` are left, and most links of a chain have none. The walk is logarithmic where slices are written in
order: a link also points several links back (``Write.back``), with the range that all links in between write to. (A
copy with gaps, which ``v`` mostly is, since it has the slice's strides, is read where it was copied from.)

Which of the whole copies that are left become stores to slices: ``slice_stores``.

NB: TorchInductor reinplaces ``select_scatter`` in a pass over the FX graph, one kernel or more per write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ..ir.expr import Atom, BinOp, Expr, IntLike, Var, expr, mod, nonneg
from ..ir.loops import BodyBuilder, Const, Load, LoopNest, Op, Stmt, Store, map_stmt
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import divisions
from ..options import Options
from ..target import Target
from .decided import integer
from .dependencies import dependencies, remove_dead
from .result import Fused

Key = TypeVar("Key")


@dataclass(eq=False)
class Write:
    """``node`` stores to every element of ``buffer``: ``new`` where dimension ``dim`` is in ``range(low, high, step)``,
    else ``old``; both in terms of the node's axes. ``base``: what made ``old``, if that is such a write to a buffer of
    the same layout. ``axes``: the loop variable of each dimension (None: a dimension of size 1).
    ``back``: a link further down the chain; all links from this one to before that one write inside ``hull``."""

    position: int
    node: LoopNest
    store: Store
    dim: int
    low: Expr
    high: Expr
    step: int
    new: Load | Const
    old: Load | Const
    axes: tuple[Var | None, ...]
    base: Write | None = None
    depth: int = 0
    back: Write | None = None
    hull: tuple[int, int] | None = None

    @property
    def buffer(self) -> str:
        return self.store.buffer

    def holds(self, at: Expr) -> bool | None:
        """Is position ``at`` of the dimension in the slice? None: not known."""
        away, left = at - self.low, self.high - 1 - at
        phase = mod(away, expr(self.step)).constant
        if (away.constant or 0) < 0 or (left.constant or 0) < 0 or phase not in (0, None):
            return False
        if nonneg(away) and nonneg(left):
            return True if phase == 0 else None
        return False if nonneg(-away - 1) or nonneg(-left - 1) else None

    def follow(self, base: Write) -> None:
        """Set ``base`` and ``back``: to where ``base`` points back to if the last two steps were of one length, so that
        a chain of n links is crossed in O(log n) steps (Myers, An applicative random-access stack, 1983)."""
        self.base, self.depth = base, base.depth + 1
        far = base.back
        even = far is not None and far.back is not None and base.depth - far.depth == far.depth - far.back.depth
        links = [self, base, far] if even else [self]
        self.back = far.back if even and far is not None else base  # type: ignore[union-attr]
        hulls = [w.hull if w is not self else w.own for w in links if w is not None]
        if all(h is not None for h in hulls) and all(w.dim == self.dim for w in links if w is not None):
            self.hull = min(h[0] for h in hulls), max(h[1] for h in hulls)  # type: ignore[index]

    @property
    def own(self) -> tuple[int, int] | None:
        low, high = self.low.constant, self.high.constant
        return None if low is None or high is None else (low, high)

    def skips(self, at: Expr) -> bool:
        """Is the position outside of what all links before ``back`` write?"""
        c = at.constant
        return c is not None and self.hull is not None and not self.hull[0] <= c < self.hull[1]


def slices(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results, read from where they were before they were written to a slice. Assumes a legal order; nodes and
    buffers that are not needed any more are removed."""
    program = fused.program
    whole = program.output_buffers()
    for _ in range(2):
        reads = _Reads(program, frozenset(whole))
        nodes = [reads.resolved(i, n) if isinstance(n, LoopNest) else n for i, n in enumerate(program.nodes)]
        if not reads.writes:
            return fused
        whole |= reads.undecided
    program = remove_dead(replace(program, nodes=tuple(nodes)))
    return replace(fused, program=program)


# -- reads ------------------------------------------------------------------------------------------
class _Reads:
    """The writes so far, by buffer; a load of one is resolved as far as bounds decide. ``copies``: loads of these read
    another buffer at the same place; since when, the loop variables, the load.

    ``whole``: buffers that are in memory anyway. One is read where the value in its slice is nearly all of it: the
    inside of a box, which a slice per dimension leaves, would be in memory as well. ``undecided``: where loads end."""

    def __init__(self, program: Program, whole: frozenset[str] = frozenset()):
        self.program, self.depends = program, dependencies(program)
        self.whole, self.undecided = whole, set[str]()
        self.writes: dict[str, Write] = {}
        self.copies: dict[str, tuple[int, tuple[Var | None, ...], Load]] = {}

    def resolved(self, position: int, node: LoopNest) -> LoopNest:
        """``node`` with the loads replaced that can be; then, if it is a write itself, remembered."""
        if any(b in self.writes or b in self.copies for b in node.reads()):
            node = self._replace(position, node)
        self._find_copy(position, node)
        write = find_write(self.program, position, node)
        if write is not None and len(self.depends.writers[write.buffer]) == 1:
            self.writes[write.buffer] = write
            base = self.writes.get(write.old.buffer) if isinstance(write.old, Load) else None
            if base is not None and continues(self.program, write, base.buffer):
                write.follow(base)
        return node

    def _replace(self, position: int, node: LoopNest) -> LoopNest:
        b = BodyBuilder()
        ids: dict[int, int] = {}
        for i, s in enumerate(node.body):
            new = map_stmt(s, ids)
            source = self._source(position, new) if isinstance(new, Load) else new
            if isinstance(source, Const) and isinstance(new, Load) and new.mask is not None:
                ids[i] = b.op("where", new.mask, b.add(source), b.const(new.other, new.dtype))
            else:
                ids[i] = b.add(source)
        return replace(node, body=tuple(b.body)) if tuple(b.body) != node.body else node

    def _source(self, position: int, load: Load) -> Stmt:
        """What ``load`` reads: itself, another load, or a constant."""
        load = self._copied(position, load)
        write = self.writes.get(load.buffer)
        coords: list[Expr] | None = None
        while write is not None:
            coords = coords or coordinates(load.index, self.program.buffers[write.buffer])
            if coords is None:
                return load
            while write.back is not None and write.skips(coords[write.dim]):
                write = write.back
            load = replace(load, buffer=write.buffer)
            inside = write.holds(coords[write.dim])
            value = write.new if inside else write.old
            if inside is None or value.dtype != load.dtype:
                self.undecided.add(write.buffer)
                return load
            if inside and isinstance(value, Load) and write.buffer in self.whole and self._most(write, value):
                return load
            if isinstance(value, Const):
                return value
            if self.depends.written_between(value.buffer, write.position, position + 1):
                return load
            if not inside and write.base is not None:
                write = write.base
                load = replace(load, buffer=write.buffer)
                continue
            load = self._copied(
                position, replace(load, buffer=value.buffer, index=_at(value.index, write.axes, coords))
            )
            write, coords = self.writes.get(load.buffer), None
        return load

    def _most(self, write: Write, value: Load) -> bool:
        """Is the slice more than half of what it is written to?"""
        size = write.high - write.low
        return (2 * size - write.step * self.program.buffers[write.buffer].shape[write.dim]).hint() > 0

    def _find_copy(self, position: int, node: LoopNest) -> None:
        """Remember ``node`` if it copies a write, or copies something to a buffer with gaps."""
        found = whole_copy(self.program, node)
        if found is None or len(self.depends.writers[found[2].buffer]) != 1:
            return
        axes, load, store = found
        buffer, source = self.program.buffers[store.buffer], self.program.buffers[load.buffer]
        gaps = buffer.extent != buffer.numel and nonneg(buffer.extent - source.extent)
        if buffer.kind == "temp" and (gaps or load.buffer in self.writes):
            self.copies[store.buffer] = position, axes, load

    def _copied(self, position: int, load: Load) -> Load:
        """``load``, from where the buffer was copied from."""
        made, axes, source = self.copies.get(load.buffer, (0, (), load))
        if source is load or self.depends.written_between(source.buffer, made, position + 1):
            return load
        coords = coordinates(load.index, self.program.buffers[load.buffer])
        if coords is None:
            return load
        return replace(load, buffer=source.buffer, index=_at(source.index, axes, coords))


def whole_copy(program: Program, node: Node) -> tuple[tuple[Var | None, ...], Load, Store] | None:
    """The loop variable of each dimension, the load and the store of a node that only copies, to all of a buffer."""
    if not isinstance(node, LoopNest) or len(node.body) != 2 or node.reduced:
        return None
    load, store = node.body
    if not (isinstance(load, Load) and isinstance(store, Store)) or load.mask is not None:
        return None
    buffer = program.buffers[store.buffer]
    axes = whole_dimensions(buffer, node, store)
    return None if axes is None or buffer.dtype != program.buffers[load.buffer].dtype else (axes, load, store)


def copied_from(program: Program, node: Node, load: Load) -> Load | None:
    """``load``, of what ``node`` copied, from where it copied that; None if it does anything else."""
    found = whole_copy(program, node)
    coords = None if found is None else coordinates(load.index, program.buffers[load.buffer])
    if found is None or coords is None:
        return None
    return replace(load, buffer=found[1].buffer, index=_at(found[1].index, found[0], coords))


def _at(index: Expr, axes: tuple[Var | None, ...], coords: list[Expr]) -> Expr:
    """``index``, over loops along a buffer's dimensions, at one element of it."""
    env: dict[Atom, IntLike] = {v: c for v, c in zip(axes, coords, strict=True) if v is not None}
    return index.subs(env)


def coordinates(index: Expr, buffer: Buffer) -> list[Expr] | None:
    """The position in each dimension of the element at ``index``; None if the strides do not determine it, or only with
    // and % that ``index`` does not have (under a mask, it may reach beyond a row), or if there are no elements."""
    if any(size == 0 for size in buffer.shape):
        return None
    dims = [d for d, size in enumerate(buffer.shape) if size != 1]
    dims.sort(key=lambda d: -buffer.strides[d].hint())
    below = expr(1)
    for d in reversed(dims):
        if not nonneg(buffer.strides[d] - below):
            return None
        below = below + (buffer.shape[d] - 1) * buffer.strides[d]
    places = {buffer.strides[d]: (d, buffer.shape[d]) for d in dims}
    if (plain := one_each(index, places)) is not None:
        return [plain.get(d, expr(0)) for d in range(len(buffer.shape))]
    out, divided = [expr(0)] * len(buffer.shape), divisions(index)
    for n, d in enumerate(dims):
        quotient = index // buffer.strides[d]
        out[d] = quotient if n == 0 else quotient % buffer.shape[d]
        if divisions(out[d]) > divided:
            return None
        index = index % buffer.strides[d]
    return out


def one_each(index: Expr, places: Mapping[Expr, tuple[Key, Expr]]) -> dict[Key, Expr] | None:
    """By stride, a key and a size: the keys' variables, if ``index`` is a sum of loop variables, each of one of the
    sizes, times its stride. Most are, and to divide takes long."""
    left, out = dict(places), dict[Key, Expr]()
    for m, c in index.terms:
        found = left.pop(expr(c), None) if len(m) == 1 and isinstance(m[0], Var) else None
        if found is None or m[0].size != found[1]:  # type: ignore[attr-defined]
            return None
        out[found[0]] = expr(m[0])
    return out | {key: expr(0) for key, _ in left.values()}


def same_layout(a: Buffer, b: Buffer) -> bool:
    """Is every element of one where it is in the other?"""
    return (a.shape, a.strides, a.dtype, a.device) == (b.shape, b.strides, b.dtype, b.device)


def continues(program: Program, write: Write, base: str) -> bool:
    """Is ``old`` the same element of ``base``, which has the same layout?"""
    same = same_layout(program.buffers[write.buffer], program.buffers[base])
    return same and isinstance(write.old, Load) and write.old.index == write.store.index


# -- what is a write to a slice ---------------------------------------------------------------------
def find_write(program: Program, position: int, node: LoopNest) -> Write | None:
    """``node`` as a Write; None if it does anything else as well."""
    body = node.body
    store = body[-1] if body else None
    if not isinstance(store, Store) or node.reduced or sum(isinstance(s, (Load, Store)) for s in body) > 3:
        return None
    select = body[store.value]
    if not (isinstance(select, Op) and select.op == "where"):
        return None
    mask, new, old = select.args[0], body[select.args[1]], body[select.args[2]]
    if isinstance(new, Load) and new.mask not in (None, mask) or not isinstance(new, (Load, Const)):
        return None
    if not (isinstance(old, Const) or isinstance(old, Load) and old.mask is None):
        return None
    loaded = [s.buffer for s in (new, old) if isinstance(s, Load)]
    if any(program.buffers[b].dtype != program.buffers[store.buffer].dtype for b in loaded):
        return None  # what is stored is rounded
    axes = whole_dimensions(program.buffers[store.buffer], node, store)
    region = None if axes is None else region_of(body, mask)
    if axes is None or region is None or region[0] not in axes:
        return None
    var, low, high, step = region
    return Write(position, node, store, axes.index(var), low, high, step, new, old, axes)


def whole_dimensions(buffer: Buffer, node: LoopNest, store: Store) -> tuple[Var | None, ...] | None:
    """The loop variable of each dimension; None if the node does not store the whole buffer in order."""
    rest = [a.var for a in node.axes]
    out: list[Var | None] = []
    index = expr(0)
    for size, stride in zip(buffer.shape, buffer.strides, strict=True):
        var = None if size == 1 or not rest else rest.pop(0)
        if var is not None and var.size != size or var is None and size != 1:
            return None
        out.append(var)
        index = index + (expr(0) if var is None else expr(var) * stride)
    return None if rest or store.index != index else tuple(out)


def region_of(body: tuple[Stmt, ...], mask: int) -> tuple[Var, Expr, Expr, int] | None:
    """``(v, low, high, step)`` of comparisons that hold exactly for v in range(low, high, step), which is not empty."""
    todo, tests = [mask], []
    while todo:
        s = body[todo.pop()]
        if not isinstance(s, Op) or len(s.args) != 2:
            return None
        if s.op == "and":
            todo += s.args
        else:
            tests.append((s.op, integer(body[s.args[0]]), integer(body[s.args[1]])))
    found = {v for _, a, _ in tests if a is not None for v in a.variables()}
    if len(found) != 1:
        return None
    (var,) = found
    low, high, every = expr(0), var.size, None
    for op, a, b in tests:
        if a is None or b is None or b.variables():
            return None
        at, more = a.atom, a - expr(var)  # (a pad compares the position in what is padded)
        if op in ("ge", "lt", "eq") and not more.variables():
            b = b - more
            low = low if op == "lt" else b
            high = b if op == "lt" else b + 1 if op == "eq" else high
        elif op == "eq" and isinstance(at, BinOp) and at.fn == "%" and at.b.constant and b == 0 and every is None:
            every = at
        else:
            return None
    step = 1 if every is None else int(every.b)
    if every is not None and (every.a - expr(var) + low).constant is None:
        return None
    if every is not None and int(every.a - expr(var) + low) % step or not nonneg(high - low - 1):
        return None
    return var, low, high, step
