"""An operand that a product computes as it reads it (``Template.prologues``): dequantised weights, a mask, a cast.

The nest is printed like an epilogue, at the operand's own rows and columns: ``y`` and ``x`` are m and k of ``a``, k and
n of ``b``, with the operand's letter behind every name. What does not vary with k is printed before the loop over
depth. Behind the end of a ragged depth the value is made zero, as that of an operand in memory is read.

**Rows that share an address.** Of an index that has a coordinate d only in ``d // c`` (two numbers of 4 bits in one
byte; a scale per group of 128), c neighbours read one element. It is loaded once: as a block of 1 / c of the length,
spread out in registers, or, where c is a multiple of the block's length, as one for the whole block. Loads stay wide.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from ..errors import GenerateError
from ..ir.expr import Atom, BinOp, Expr, IntLike, Var, ceildiv, expr
from ..ir.loops import Const, Index, Load, LoopNest, Op, Stmt, Store, stmt_args
from ..ir.program import Buffer, View
from ..ir.transforms import substitute, varying
from ..schedule.axes import Space
from .packed_bytes import LARGEST
from .triton_facts import paren
from .triton_ops import TL
from .triton_statements import StatementPrinter, Value

if TYPE_CHECKING:
    from .matmul_printer import MatmulPrinter


class OperandPrinter(StatementPrinter):
    """Prints the nest of one operand, ``a`` or ``b``, into the lines of ``p``."""

    def __init__(self, p: MatmulPrinter, name: str, v: View):
        nest = p.template.prologue(v)
        assert nest is not None
        if p.tiling.warps_k != 1 or p.tiling.kind == "persistent":
            raise GenerateError(f"{p.template.name}: a tiling of {p.tiling} cannot compute its operand {name}")
        self.p, self.operand, self.view = p, name, v
        self.depth = "x" if name == "a" else "y"
        letters = "mk" if name == "a" else "kn"
        self.side = dict(zip("yx", letters))
        self.block = {d: {"m": p.tiling.m, "n": p.tiling.n, "k": p.tiling.k}[s] for d, s in self.side.items()}
        device = next(iter(p.buffers.values())).device
        buffers = {**p.buffers, v.buffer: Buffer(v.buffer, v.dtype, device, v.shape, v.strides)}  # as it were in memory
        masks = {d: p.body.masks.get({"m": "y", "n": "x"}.get(s, ""), False) for d, s in self.side.items()}
        super().__init__(tile_space(nest), p.config, buffers, p.needs, masks, f"_{name}")
        self.lines, self.symbols, self.pointers = p.body.lines, p.body.symbols, p.body.pointers
        self.folded: set[str] = set()
        self.short: dict[int, tuple[str, int]] = {}  # values in blocks of 1 / c of the length along d: (d, c)

    # -- in the order of the text -------------------------------------------------------------------
    def before(self, ragged: bool) -> None:
        """What does not vary with the depth."""
        self.masks[self.depth] = ragged
        self.indent = self.p.body.indent
        other = "y" if self.depth == "x" else "x"
        if self.p.batch != 1 and self.space.z is not None:
            self.put(f"z{self.tag} = z")
        self._span(other, self.side[other])
        self.inner = varying(self.space.body, {getattr(self.space, self.depth)})
        for i in range(len(self.space.body)):
            if not self.inner[i] and not isinstance(self.space.body[i], Store):
                self.statement(i)

    def inside(self, loop: bool) -> str:
        """A block's value, at depth ``k`` behind ``k0``."""
        self.indent = self.p.body.indent
        self.start, first = "k0" if loop else "", len(self.lines)
        self._span(self.depth, "k + k0" if loop else "k")
        for i, inner in enumerate(self.inner):
            if inner and not isinstance(self.space.body[i], Store):
                self.statement(i)
        (store,) = self.space.stores
        self._whole(store.value)
        dtype = self.p.template.dtype
        text = self.p.convert(self._typed(store.value), self.dtype(store.value), self.view.dtype)
        text = self.p.convert(text, self.view.dtype, dtype)
        self.lines[first:] = _used(self.lines[first:], text)
        shape = f"[{self._length('y')}, {self._length('x')}]"
        if self.values[store.value].dims != frozenset("yx"):
            text = f"tl.broadcast_to({text}, {shape})"
        if self.masks[self.depth]:
            text = f"tl.where({self.depth}mask{self.tag}, {text}, tl.full([], 0, {TL[dtype]}))"
        return text

    def _span(self, d: str, at: str) -> None:
        name = f"{d}{self.tag}"
        self.put(f"{name} = {paren(at)}{'[:, None]' if d == 'y' else '[None, :]'}")
        if self.masks[d]:
            self.put(f"{d}mask{self.tag} = {name} < {self.size(self._size(d))}")

    def _size(self, d: str) -> Expr:
        return {"m": self.p.m, "n": self.p.n, "k": self.p.k}[self.side[d]]

    def _length(self, d: str) -> str:
        return f"{self.side[d].upper()}BLOCK"

    def _shape(self, all_dims: frozenset[str]) -> str:
        return "[" + ", ".join(self._length(d) if d in all_dims else "1" for d in self.order) + "]"

    # -- integers of 8 bits -------------------------------------------------------------------------
    def _op(self, i: int, s: Op) -> None:
        super()._op(i, s)
        if (text := self._of_bytes(s)) is not None:
            self.lines.pop()
            self._bind(i, text, self.values[i].dims)

    def _of_bytes(self, s: Op) -> str | None:
        """``s`` in fewer instructions, if it is of bytes, unsigned ones in words (``packed_bytes``). A signed one
        becomes a float by way of bfloat16, which holds all of them: Triton makes four of those from a word with 8
        instructions on sm_90, where a multiprocessor converts 16 integers per cycle to float32. (And an H200's memory
        delivers 20 bytes per cycle to each.)"""
        target, first, *more = self.p.target, *s.args
        capability = target.capability if target.kind == "cuda" else 0
        to_float = s.op == "cast" and s.dtype == torch.float32
        if to_float and self.dtype(first) == torch.int8 and capability >= 90:
            return f"{self._typed(first)}.to(tl.bfloat16).to(tl.float32)"
        if capability < 80:
            return None
        if s.dtype == torch.float32 and (found := self._bytes_plus(s)) is not None:
            return f"{self.p.helper('floats_of_bytes')}({self._typed(found[0])}, {found[1]}).to(tl.float32)"
        if s.dtype != torch.uint8 or not more or not isinstance(self.space.body[more[-1]], Const):
            return None
        x, by = map(self._typed, s.args[:2])
        if s.op == "and":
            return f"{self.p.helper('and_bytes')}({x}, {by})"
        if s.op == "shr":
            return f"{self.p.helper('shift_bytes')}({x}, {by}, tl.full([], {255 >> self._most(more[0])}, tl.uint8))"
        return None

    def _bytes_plus(self, s: Op) -> tuple[int, int] | None:
        """(x, c), if ``s`` is x + c, of small bytes x and a small integer c."""
        body = self.space.body
        if s.op == "cast" and self.dtype(s.args[0]) == torch.uint8 and self._most(s.args[0]) <= LARGEST:
            return s.args[0], 0
        inner, by = (body[a] for a in s.args) if s.op in ("add", "sub") else (None, None)
        if isinstance(inner, Op) and inner.op == "cast" and isinstance(by, Const) and float(by.value).is_integer():
            found, c = self._bytes_plus(inner), int(by.value) * (1 if s.op == "add" else -1)
            return (found[0], c) if found is not None and abs(c) <= LARGEST else None
        return None

    def _most(self, i: int) -> int:
        """What statement ``i``, a uint8, is at most."""
        s = self.space.body[i]
        if isinstance(s, Const):
            return int(s.value)
        if isinstance(s, Op) and s.op == "where":
            return max(self._most(a) for a in s.args[1:])
        if isinstance(s, Op) and s.op == "and":
            return min(self._most(a) for a in s.args)
        if isinstance(s, Op) and s.op == "shr" and isinstance(by := self.space.body[s.args[1]], Const):
            return self._most(s.args[0]) >> int(by.value)
        return 255

    # -- values that neighbours share ---------------------------------------------------------------
    def statement(self, i: int) -> None:
        """Ops of values that the same neighbours share have one too: they are computed as short blocks."""
        s = self.space.body[i]
        shared = {self.short[a] for a in stmt_args(s) if a in self.short}
        if shared:
            d = next(iter(shared))[0]
            alike = all(a in self.short or d not in self.values[a].dims for a in stmt_args(s))
            if isinstance(s, Op) and i not in self.forms and len(shared) == 1 and alike:
                self.short[i] = shared.pop()
            elif (joined := self._joined(s)) is not None:
                self._bind(i, joined, self.values[s.args[1]].dims)  # type: ignore[union-attr]
                return
            else:
                for a in stmt_args(s):
                    self._whole(a)
        super().statement(i)

    def _joined(self, s: Stmt) -> str | None:
        """The text of ``where(d % 2 < 1, x, y)`` of values that each two neighbours along d share."""
        if not isinstance(s, Op) or s.op != "where" or not all(a in self.short for a in s.args[1:]):
            return None
        test, x, y = s.args
        (d, c), dims = self.short[x], self.values[x].dims
        made = self.space.body[test]
        if c != 2 or self.short[y] != (d, c) or self.values[y].dims != dims or not isinstance(made, Op):
            return None
        at, one = (self.space.body[a] for a in made.args) if len(made.args) == 2 else (None, None)
        if made.op != "lt" or not isinstance(at, Index) or at.expr != expr(self._var(d)) % 2:
            return None
        if not isinstance(one, Const) or one.value != 1:
            return None
        order = ".permute(0, 2, 1)" if d == "y" else ""
        sides = [self._length(side) if side in dims else "1" for side in "yx"]
        return f"tl.join({self.values[x].text}, {self.values[y].text}){order}.reshape({', '.join(sides)})"

    def _whole(self, i: int) -> None:
        """Statement ``i``'s value for each neighbour."""
        if i in self.short:
            (d, c), dims = self.short.pop(i), self.values[i].dims
            sides = {side: self._length(side) if side in dims else "1" for side in self.order}
            before, name = self.values[i].text, f"{self.name(i)}_all"
            self._spread(before, name, d, c, sides | {d: f"{sides[d]} // {c}"})
            self.values[i] = Value(name, dims)

    # -- addresses that neighbours share ------------------------------------------------------------
    def _load(self, i: int, s: Load) -> None:
        found = {d: c for d in self.order if s.mask is None and (c := self._shared(s.index, d))}
        if not found:
            super()._load(i, s)
            return
        env: dict[Atom, IntLike] = {}
        dims = set(self._dims(s.index))
        small = {d: self._length(d) if d in dims else "1" for d in self.order}
        masks = [f"{d}mask{self.tag}" for d in self.order if d in dims and d not in found and self.masks[d]]
        for d, c in found.items():
            env[_quotient(self._var(d), c)] = expr(Var(self._fold(d, c), ceildiv(self._size(d), c)))
            whole = c % self.block[d] == 0
            if self.masks[d] and (not whole or d == self.depth):  # (split-K goes past the end in whole blocks)
                masks.append(f"({d}over{c}{self.tag} < {self.size(ceildiv(self._size(d), c))})")
            if whole:
                dims.discard(d)
                small[d] = "1"
                continue
            small[d] = f"{self._length(d)} // {c}"
        place = self._place(s.buffer, self.address(s.index.subs(env)))
        text = self._widened(f"tl.load({place}{', mask=' + ' & '.join(masks) if masks else ''})", s)
        self._bind(i, text, frozenset(dims))
        spread = [(d, c) for d, c in found.items() if d in dims]
        if len(spread) == 1:
            self.short[i] = spread[0]
            return
        for d, c in spread:
            self._spread(self.name(i), self.name(i), d, c, small)

    def _spread(self, of: str, name: str, d: str, c: int, small: dict[str, str]) -> None:
        """``name``: the value ``of``, of sides ``small``, with each element along ``d`` there c times."""
        at = "[:, None, :]" if d == "y" else "[:, :, None]"
        sides = [small["y"], str(c), small["x"]] if d == "y" else [small["y"], small["x"], str(c)]
        small[d] = self._length(d)
        self.put(f"{name} = tl.broadcast_to({of}{at}, [{', '.join(sides)}]).reshape({small['y']}, {small['x']})")

    def _var(self, d: str) -> Var:
        return getattr(self.space, d)  # type: ignore[no-any-return]

    def _shared(self, index: Expr, d: str) -> int:
        """c, if ``index`` has ``d`` in ``d // c`` alone, c and the block's length dividing each other; else 0."""
        v, length = self._var(d), self.block[d]
        found = {a.b.constant for a in index.atoms() if isinstance(a, BinOp) and a.fn == "//" and a.a == expr(v)}
        if len(found) != 1 or not isinstance(c := found.pop(), int) or c < 2 or length % c and c % length:
            return 0
        return 0 if index.subs({_quotient(v, c): 0}).has(v) else c

    def _fold(self, d: str, c: int) -> str:
        """The name of ``d // c`` in a block."""
        name = f"{d}over{c}"
        if name not in self.folded:
            self.folded.add(name)
            whole = c % self.block[d] == 0
            start = {"m": "tile_m * MBLOCK", "n": "tile_n * NBLOCK", "k": self._start()}[self.side[d]]
            along = f"tl.arange(0, {self._length(d)} // {c}){'[:, None]' if d == 'y' else '[None, :]'}"
            at = f"{paren(start)} // {c}"
            self.put(f"{name}{self.tag} = {at}" + ("" if whole else f" + {along}{self.p.wide}"))
        return name

    def _start(self) -> str:
        """A block's first depth."""
        return " + ".join(t for t in (self.p.first, self.start) if t) or "0"


def _used(lines: list[str], text: str) -> list[str]:
    """Those of values that ``text`` or a later one has."""
    kept: list[str] = []
    for line in reversed(lines):
        made = re.match(r" *(v\d+\w*) = ", line)
        if made is None or any(re.search(rf"\b{made[1]}\b", later) for later in (text, *kept)):
            kept.append(line)
    return kept[::-1]


def tile_space(nest: LoopNest) -> Space:
    """A nest over y, x (and z, the batch). Its axes keep their order: a block has their shape."""
    made = [Var(d, a.size) for d, a in zip("zyx"[3 - len(nest.axes) :], nest.axes)]
    env: dict[Atom, IntLike] = {a.var: expr(v) for a, v in zip(nest.axes, made)}
    return Space("tile", substitute(nest.body, env), **{v.name: v for v in made})


def _quotient(v: Var, c: int) -> Atom:
    return BinOp("//", expr(v), expr(c))
