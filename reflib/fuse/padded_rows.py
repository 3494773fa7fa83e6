"""Loops over rows that have padding in memory go over the padding too.

Products of padded operands (``lower/padding``) leave rows of 777 elements in buffers whose rows have 784. A loop over
777 masks off what is behind, and Triton reads and writes 16 bytes at once only where a mask is one for all of them: so
it goes element by element though each row begins at a multiple of 16 bytes. Over all 784 there is nothing to mask::

    for r < 777:  s = sum(x[784*i + r])         for r < 784:  s = sum(x[784*i + r] if r < 777 else 0)
                  y[784*i + r] = x / s                        y[784*i + r] = x / s if r < 777 else 0

What the padding holds is read and has no effect: reductions leave it out. Zeros are written there, which is what
padding has to hold where a product sums over it; the kernel that filled it is then not needed. What has rows without
padding is read under a mask as before.

**When.** All that varies along the row is stored to padded rows, in whose padding nothing else stores anything but
zeros, or is reduced. No scans and no indices from memory: they would meet numbers that are none.

NB: TorchInductor pads the rows of temporaries as well (``comprehensive_padding``), and masks their padding off.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..ir.expr import Atom, IntLike, Var, expr, nonneg, product
from ..ir.loops import BodyBuilder, Const, Indirect, Load, LoopNest, Op, Reduce, Scan, Store, map_stmt
from ..ir.ops import identity
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import eliminate_dead, varying
from ..options import Options
from ..target import Target
from .result import Fused

BYTES = 16
SHORTEST = 64  # elements: of a short row the padding would be much
KINDS = "sum", "max", "min", "any", "all"


def padded_rows(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results; for GPUs."""
    if not target.is_gpu:
        return fused
    program = fused.program
    for name in [n.name for n in program.nodes]:
        node = next((n for n in program.nodes if n.name == name), None)
        if not isinstance(node, LoopNest):
            continue
        for axis in node.axes:
            if (to := _padding(node, axis.var, program)) is not None:
                program = _without_fills(program, _over(node, axis.var, to, program.buffers), to)
                break
    return fused if program is fused.program else fused.regrouped(program)


@dataclass(frozen=True)
class _Padding:
    """``row``, ``length``: elements of a row without and with it. ``filled``: buffers in which it gets zeros."""

    row: int
    length: int
    filled: tuple[str, ...]


def _padding(loops: LoopNest, var: Var, program: Program) -> _Padding | None:
    """To what length the row along ``var`` may be extended; None if it may not, or need not be."""
    n = var.size.constant
    if n is None or n < SHORTEST or any(isinstance(s, (Scan, Indirect)) for s in loops.body):
        return None
    moves, along = varying(loops.body, [var]), {a.var for a in loops.axes if a.kind == "r"}
    moved: list[Load | Store] = [*loops.loads(), *loops.stores()]
    found = [s for s in moved if _begins(s, var, program.buffers[s.buffer], n)]
    lengths = {program.buffers[s.buffer].shape[-1].constant for s in found}
    if len(lengths) != 1 or (length := lengths.pop()) is None:
        return None
    stores = [s for s in loops.stores() if var not in along or s.index.has(var) or moves[s.value]]
    reduced = all(s.kind in KINDS for s in loops.body if isinstance(s, Reduce) and (var in along or moves[s.args[0]]))
    if not reduced or any(s not in found or s.reduce or not _is_free(program, loops, s.buffer, n) for s in stores):
        return None
    return _Padding(n, length, tuple(dict.fromkeys(s.buffer for s in stores)))


def _begins(s: Load | Store, var: Var, buffer: Buffer, n: int) -> bool:
    """Does the row begin where one of ``buffer``'s does, each a multiple of BYTES, and leave a little of it?"""
    length = buffer.shape[-1].constant if buffer.shape else None
    if length is None or not n < length < n + BYTES or length * buffer.dtype.itemsize % BYTES:
        return False
    whole = buffer.extent == product(buffer.shape) and buffer.strides[-1] == 1
    rest = s.index - expr(var)
    return whole and not rest.has(var) and rest % length == 0


def _is_free(program: Program, loops: LoopNest, name: str, n: int) -> bool:
    """Is ``name`` our own, a float, and its rows' padding nothing's but for zeros?"""
    buffer = program.buffers[name]
    others = [m for m in program.nodes if name in m.writes() and m.name != loops.name]
    own = buffer.kind == "temp" and name not in program.output_buffers() and buffer.dtype.is_floating_point
    return own and all(isinstance(m, LoopNest) and _zeros(m, name, buffer, n) is not None for m in others)


def _zeros(loops: LoopNest, name: str, buffer: Buffer, n: int) -> int | None:
    """How many rows' padding it fills with zeros; None if it writes something else there."""
    rows, length = 0, buffer.shape[-1]
    for s in loops.stores():
        if s.buffer == name:
            value, at = loops.body[s.value], s.index % length
            if isinstance(value, Op) and value.op in ("to_f16", "to_bf16"):
                value = loops.body[value.args[0]]
            if not isinstance(value, Const) or value.value != 0 or s.reduce or not nonneg(at - n):
                return None
            rows += int(loops.numel.constant or 0) // (int(length) - n)
    return rows


def _over(loops: LoopNest, var: Var, to: _Padding, buffers: Mapping[str, Buffer]) -> LoopNest:
    """``loops`` over the padding too."""
    longer, b = Var(var.name, expr(to.length)), BodyBuilder()
    env: dict[Atom, IntLike] = {var: expr(longer)}
    reduced = any(a.var == var and a.kind == "r" for a in loops.axes)
    inside = b.op("lt", b.index(expr(longer)), b.const(to.row, torch.int64))
    ids: dict[int, int] = {}

    def only(value: int, other: float | bool) -> int:
        return b.op("where", inside, value, b.const(other, b.dtype(value)))

    for i, s in enumerate(loops.body):
        new = map_stmt(s, ids, env)
        if isinstance(s, Load) and isinstance(new, Load) and s.index.has(var):
            if not _begins(s, var, buffers[s.buffer], to.row):
                new = replace(new, mask=inside if new.mask is None else b.op("and", inside, new.mask))
        elif isinstance(new, Reduce) and reduced:
            new = replace(new, args=tuple(only(a, identity(new.kind, new.dtype)) for a in new.args))
        elif isinstance(new, Store) and new.index.has(longer):
            new = replace(new, value=only(new.value, 0.0))
        ids[i] = b.add(new)
    axes = tuple(replace(a, var=longer) if a.var == var else a for a in loops.axes)
    return replace(loops, axes=axes, body=tuple(b.body))


def _without_fills(program: Program, loops: LoopNest, to: _Padding) -> Program:
    """With ``loops`` in the place of what it was made of, and without what fills the padding of all its rows."""
    points = loops.numel * (loops.rnumel if any(a.size == to.length for a in loops.reduced) else 1)
    nodes: list[Node] = []
    for m in program.nodes:
        if m.name == loops.name:
            m = loops
        elif isinstance(m, LoopNest):
            gone = {b for b in {*to.filled} & {*m.writes()} if points == program.buffers[b].numel}
            gone = {b for b in gone if _zeros(m, b, program.buffers[b], to.row) == points // to.length}
            kept = tuple(s for s in m.body if not (isinstance(s, Store) and s.buffer in gone))
            if not any(isinstance(s, Store) for s in kept):
                continue
            m = replace(m, body=eliminate_dead(kept)) if gone else m
        nodes.append(m)
    return replace(program, nodes=tuple(nodes))
