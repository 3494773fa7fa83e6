"""Masks that loads do without, where what is read beside is in the buffer and little.

The parts of a concatenation and of a padding are read under masks::

    cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1)      x[i, 0] if j < 1;  x[i, j] if j >= 1;  x[i, j - 1] if j >= 1

Triton reads 16 bytes at once only where their mask is one for all. ``x[i, j]`` exists for each j; without its mask it
takes one instruction for four elements. Where j < 1 it is also ``x[i, 0]``, which then is no load of its own. (What is
not in the buffer for some point, such as ``x[i, j - 1]``, keeps its mask; so does what most points do not read.)

A number that a tensor names for a whole row (``x * scale[group][:, None]``) is masked off where the position is out of
range. Triton has each element load it, and compute all that follows, by itself; at a position that is put inside
instead, neighbours share that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir.bounds import max_value
from ..ir.expr import Expr, Ref, expr, nonneg
from ..ir.loops import BodyBuilder, Indirect, Load, LoopNest, Op, Stmt, map_stmt
from ..ir.program import Buffer
from ..ir.transforms import eliminate_dead, varying
from ..options import Options
from ..target import Target
from .decided import excess, narrowed, without_selects
from .result import Fused

MOST = 0.9  # of the points, at which a mask holds


def unmask(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results; for GPUs."""
    if not target.is_gpu:
        return fused
    return fused.mapped(lambda n: _unmasked(n, fused.program.buffers))


def _unmasked(loops: LoopNest, buffers: Mapping[str, Buffer]) -> LoopNest:
    body, stored = loops.body, set(loops.writes())
    loads = [s for s in loops.loads() if s.buffer not in stored]
    free = {(s.buffer, s.index) for s in loads if s.mask is None}
    for load in loads:
        if load.mask is not None and _share(body, load.mask) >= MOST and nonneg(load.index):
            free |= {(load.buffer, load.index)} if nonneg(buffers[load.buffer].extent - 1 - load.index) else set()
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(body):
        if isinstance(s, Load) and s.mask is not None and (at := _equal(body, s, free)) is not None:
            value = b.add(map_stmt(replace(s, index=at, mask=None, other=0), ids))
            ids[i] = b.op("where", ids[s.mask], value, b.const(s.other, s.dtype))
        elif isinstance(s, Load) and _per_row(loops, i, s):
            ids[i] = _inside(b, map_stmt(s, ids))  # type: ignore[arg-type]
        else:
            ids[i] = b.add(map_stmt(s, ids))
    return loops if tuple(b.body) == body else replace(loops, body=without_selects(eliminate_dead(tuple(b.body))))


def _share(body: Sequence[Stmt], mask: int) -> float:
    """At which part of the points a mask that compares positions holds, about; 0: not known."""
    s = body[mask]
    if isinstance(s, Op) and s.op == "and":
        return _share(body, s.args[0]) * _share(body, s.args[1])
    if (spare := excess(body, s)) is None:
        return 0
    most, few = max_value(spare), max_value(-spare)
    return 0 if most is None or few is None else min(1, max(0, (most + 1) / max(1, most + few + 1)))


def _equal(body: Sequence[Stmt], s: Load, free: set[tuple[str, Expr]]) -> Expr | None:
    """The index of an element that needs no mask, and is the one that ``s`` reads where its mask holds."""
    if (s.buffer, s.index) in free:
        return s.index
    narrow, _ = narrowed(body, s.mask)
    fixed = {v: e.subs(dict.fromkeys(e.variables(), 0)) for v, e in narrow.items() if not _moves(e)}
    alike = (at for name, at in free if fixed and name == s.buffer and at.subs(fixed) == s.index.subs(fixed))
    return next(alike, None)


def _moves(e: Expr) -> bool:
    return any(v.size != 1 for v in e.variables())


# -- a number per row -----------------------------------------------------------------------------------
def _per_row(loops: LoopNest, i: int, s: Load) -> bool:
    """Is it one for all of a row, at positions that are masked off where they are out of range?"""
    body, row = loops.body, [a.var for a in loops.axes if a.size != 1][-1:]
    found = [body[a.id] for a in s.index.atoms() if isinstance(a, Ref)]
    checked = all(isinstance(f, Indirect) and f.checked is True and nonneg(f.size - 1) for f in found)
    plain = s.mask is None and not s.index.variables() and not loops.reduced
    return bool(found and checked and plain and row) and not varying(body, row)[i]


def _inside(b: BodyBuilder, s: Load) -> int:
    """``s`` at positions that are put inside, or 0 where that changes them."""
    index, inside = s.index, None
    for ref in [a for a in s.index.atoms() if isinstance(a, Ref)]:
        found = b.body[ref.id]
        assert isinstance(found, Indirect)
        at, dtype = found.arg, b.dtype(found.arg)
        zero, size = b.const(0, dtype), b.index(found.size, dtype)
        at = b.op("where", b.op("lt", at, zero), b.op("add", at, size), at) if found.wraps else at
        ok = b.op("and", b.op("ge", at, zero), b.op("lt", at, size))
        inside = ok if inside is None else b.op("and", inside, ok)
        put = b.add(replace(found, arg=b.op("where", ok, at, zero), checked=False))
        index = index.subs({ref: expr(Ref(put, found.size))})
    assert inside is not None
    return b.op("where", inside, b.add(replace(s, index=index)), b.const(0, s.dtype))
