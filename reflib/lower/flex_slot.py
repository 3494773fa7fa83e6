"""The user's functions of scores and masks as the slot of a fused kernel: one loop nest (``ir.flex``).

Each comes as a graph over one element of the matrix of scores. It is traced and lowered as any implementation is
(``subgraph``), over tensors without dimensions: what comes out is one loop nest without axes per op. Joined, with
``score`` and the coordinates in the place of the first arguments, they are the slot: values that several functions
compute, such as what a score function and its gradient have in common, are there once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reflib.ir.expr import Atom, Expr, IntLike, Ref, Sym, Var, expr, nonneg
from reflib.ir.flex import INPUTS, RESULTS
from reflib.ir.loops import Axis, BodyBuilder, Const, Index, Indirect, Load, LoopNest, Op, Stmt, Store, map_stmt
from reflib.ir.program import Extern, View, full_view
from reflib.ir.transforms import join, needed, select

from .context import LoweringContext
from .subgraph import Refused, variant

COORDINATES = "bhmn"


@dataclass
class Slot:
    """A slot in the making, for scores of shape ``sizes``. ``captured``: the tensors that it reads or adds to, by
    number. ``sums``: those that it adds to."""

    cx: LoweringContext
    sizes: tuple[Expr, ...]
    captured: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vars = tuple(Var(n, size) for n, size in zip(COORDINATES, self.sizes))
        self.at = expr(self.vars[2]) * self.sizes[3] + expr(self.vars[3])
        self.parts: list[LoopNest] = []
        self.given: dict[str, View] = {}
        self.drop: set[str] = set()
        b = BodyBuilder()
        for name in ("score", "grad"):
            self._give(b, name, b.load(name, self.at, torch.float32), torch.float32)
        for v in self.vars:
            self._give(b, v.name, b.index(expr(v), torch.int32), torch.int32)
        self.parts.append(LoopNest("given", (), tuple(b.body)))

    def _give(self, b: BodyBuilder, name: str, value: int, dtype: torch.dtype) -> None:
        """An argument: a tensor without dimensions, that no other node has."""
        self.given[name] = view = self.cx.temp(f"slot_{name}", (), dtype)
        b.store(view.buffer, 0, value)
        self.drop.add(view.buffer)

    def add(self, result: str, fn: Callable[..., Any], arguments: Sequence[str], more: Sequence[Any]) -> None:
        """``result``, one of ``ir.flex.RESULTS``, is ``fn`` of ``arguments`` (names of what is given) and ``more``.
        Raises Refused for what is no loop nest."""
        dtype = torch.bool if result == "mask" else torch.float32
        out = self.cx.temp(f"slot_{result}", (), dtype)
        cx = replace(self.cx, fake=self.cx.fakes[0].new_empty((), dtype=dtype))
        v = variant(cx, "", result, lambda *a: fn(*a).clone(), (*(self.given[n] for n in arguments), *more), {}, [out])
        if v.predicate:
            raise Refused("unsupported", f"{_TEXT[result]} is traced for some of the sizes only")
        if other := [n for n in v.nodes if not isinstance(n, LoopNest) or n.axes]:
            target = getattr(other[0], "target", None)
            raise Refused("unsupported", f"{_TEXT[result]} calls {target}" if target else f"{_TEXT[result]} has loops")
        self.parts += v.nodes  # type: ignore[arg-type]
        b = BodyBuilder()
        b.store(result, self.at, b.load(out.buffer, 0, dtype))
        self.parts.append(LoopNest(result, (), tuple(b.body)))
        self.drop |= {out.buffer, *(b.name for b in v.buffers)}

    def add_sum(
        self, out: View, like: Any, fn: Callable[..., Any], arguments: Sequence[str], more: Sequence[Any]
    ) -> tuple[list[LoopNest], list[LoopNest]]:
        """``out``, like the fake tensor ``like``, is the sum of ``fn``, zeros with a term somewhere, over all scores.
        Returns what runs before (it fills with zeros) and after (it rounds). Raises Refused for what is not so."""
        v = variant(replace(self.cx, fake=like), "", "sum", fn, (*(self.given[n] for n in arguments), *more), {}, [out])
        if v.predicate or not all(isinstance(n, LoopNest) for n in v.nodes):
            called = next((n.target for n in v.nodes if isinstance(n, Extern)), "a choice")
            raise Refused("unsupported", f"the gradient of a captured tensor calls {called}")
        nests: tuple[LoopNest, ...] = v.nodes  # type: ignore[assignment]
        sums = {s.buffer for n in nests for s in n.stores() if s.reduce}
        inner, later = set(self.drop), set[str]()  # what the slot makes, and what is made of sums
        before, after = list[LoopNest](), list[LoopNest]()
        for n in nests:
            late = not (sums | later).isdisjoint(n.reads())
            kept = {s.buffer for s in n.stores() if not s.reduce}
            if not n.axes and not late and sums.isdisjoint(kept):
                self.parts.append(n)
                inner |= kept
            elif inner.isdisjoint(n.reads()):
                (after if late else before).append(n)
                later |= {*n.writes()} if late else set()
            else:
                raise Refused("unsupported", "the gradient of a captured tensor has loops")
        if not sums or out.buffer in inner:
            raise Refused("unsupported", "the gradient of a captured tensor is no sum of terms at places")
        self.sums += sorted(sums)
        self.drop |= inner
        self.cx.low.buffers.update({b.name: b for b in v.buffers if b.name not in inner})
        return before, after

    def finish(self) -> LoopNest:
        """All of it. What is the identity, or always true, is not stored."""
        body = _known_indices(join([(p, {}) for p in self.parts], self.drop))
        stores = [i for i, s in enumerate(body) if isinstance(s, Store) and not _nothing(body, s)]
        body = tuple(self._numbered(s) for s in select(body, needed(body, stores)))
        return LoopNest("slot", tuple(Axis(v, "p") for v in self.vars), body, (self.cx.origin,))

    def forget(self) -> None:
        """Its own tensors are no part of the program."""
        for b in self.drop:
            self.cx.low.buffers.pop(b, None)

    def _numbered(self, s: Stmt) -> Stmt:
        if not isinstance(s, (Load, Store)) or s.buffer in (*INPUTS, *RESULTS):
            return s
        if s.buffer not in self.captured:
            self.captured.append(s.buffer)
        return replace(s, buffer=str(self.captured.index(s.buffer)))

    def views(self) -> tuple[View, ...]:
        return tuple(full_view(self.cx.low.buffers[b]) for b in self.captured)


_TEXT = {"modified": "the score function", "mask": "the mask function", "of_score": "the score function's gradient"}
assert set(_TEXT) == set(RESULTS)


def symbols_of(slot: LoopNest) -> tuple[Sym, ...]:
    return tuple(slot.symbols())


def without_sums(slot: LoopNest) -> LoopNest:
    stores = [i for i, s in enumerate(slot.body) if isinstance(s, Store) and not s.reduce]
    return replace(slot, body=select(slot.body, needed(slot.body, stores)))


def _nothing(body: Sequence[Stmt], s: Store) -> bool:
    """Is what is stored what it would be anyway?"""
    value = body[s.value]
    if s.reduce:
        return False
    if s.buffer == "mask":
        return isinstance(value, Const) and bool(value.value)
    return isinstance(value, Load) and value.buffer == ("grad" if s.buffer == "of_score" else "score")


def _known_indices(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Coordinates used as indices, as they are where they cannot be out of bounds: neither checked nor wrapped. Other
    indices of 32 bits stay so."""
    out = BodyBuilder()
    ids: dict[int, int] = {}
    known: dict[int, Expr] = {}
    for i, s in enumerate(body):
        if isinstance(s, Indirect):
            narrow = _narrow(out.body, ids[s.arg])
            arg = out.body[narrow]
            if isinstance(arg, Index) and nonneg(arg.expr) and nonneg(s.size - 1 - arg.expr):
                known[i], ids[i] = arg.expr, narrow
                continue
            ids[i] = out.add(replace(s, arg=narrow))
            continue
        env: dict[Atom, IntLike] = {
            a: known[a.id] for e in _exprs(s) for a in e.atoms() if isinstance(a, Ref) and a.id in known
        }
        ids[i] = out.add(map_stmt(_replaced(s, env), ids))
    return tuple(out.body)


def _narrow(body: Sequence[Stmt], i: int) -> int:
    """The 32-bit value that ``i`` is a wider copy of, or itself."""
    s = body[i]
    wider = isinstance(s, Op) and s.op == "cast" and s.dtype == torch.int64
    return s.args[0] if wider and _dtype(body, s.args[0]) == torch.int32 else i  # type: ignore[union-attr]


def _dtype(body: Sequence[Stmt], i: int) -> torch.dtype:
    return body[i].dtype  # type: ignore[union-attr]


def _exprs(s: Stmt) -> list[Expr]:
    return [s.index] if isinstance(s, (Load, Store)) else [s.expr] if isinstance(s, Index) else []


def _replaced(s: Stmt, env: dict[Atom, IntLike]) -> Stmt:
    if not env:
        return s
    if isinstance(s, (Load, Store)):
        return replace(s, index=s.index.subs(env))
    assert isinstance(s, Index)
    return replace(s, expr=s.expr.subs(env))
