"""An operand that a product computes as it reads it (``Template.prologues``): dequantised weights, a mask, a cast.

The nest is printed like an epilogue, at the operand's own rows and columns: ``y`` and ``x`` are m and k of ``a``, k and
n of ``b``, with the operand's letter behind every name. What does not vary with k is printed before the loop over
depth. Behind the end of a ragged depth the value is made zero, as that of an operand in memory is read.

**Rows that share an address.** Of an index that has a coordinate d only in ``d // c`` (two numbers of 4 bits in one
byte; a scale per group of 128), c neighbours read one element. It is loaded once: as a block of 1 / c of the length,
spread out in registers, or, where c is a multiple of the block's length, as one for the whole block. Loads stay wide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import GenerateError
from ..ir.expr import Atom, BinOp, Expr, IntLike, Var, ceildiv, expr
from ..ir.loops import Load, LoopNest, Op, Store
from ..ir.program import Buffer, View
from ..ir.transforms import substitute, varying
from ..schedule.axes import Space
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
        self.start = "k0" if loop else ""
        self._span(self.depth, "k + k0" if loop else "k")
        for i, inner in enumerate(self.inner):
            if inner and not isinstance(self.space.body[i], Store):
                self.statement(i)
        (store,) = self.space.stores
        dtype = self.p.template.dtype
        text = self.p.convert(self._typed(store.value), self.dtype(store.value), self.view.dtype)
        text = self.p.convert(text, self.view.dtype, dtype)
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
        """A signed one becomes a float by way of bfloat16, which holds all of them: Triton makes four of those from a
        word with 8 instructions on sm_90, where a multiprocessor converts 16 integers per cycle to float32. (And an
        H200's memory delivers 20 bytes per cycle to each.)"""
        super()._op(i, s)
        packed = self.p.target.kind == "cuda" and self.p.target.capability >= 90
        if packed and s.op == "cast" and s.dtype == torch.float32 and self.dtype(s.args[0]) == torch.int8:
            self.lines.pop()
            self._bind(i, f"{self._typed(s.args[0])}.to(tl.bfloat16).to(tl.float32)", self.values[i].dims)

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
        for d, c in found.items():
            if d in dims:
                self._spread(i, d, c, small)

    def _spread(self, i: int, d: str, c: int, small: dict[str, str]) -> None:
        """Statement ``i``'s value, of sides ``small``, with each element along ``d`` there c times."""
        name, at = self.values[i].text, "[:, None, :]" if d == "y" else "[:, :, None]"
        sides = [small["y"], str(c), small["x"]] if d == "y" else [small["y"], small["x"], str(c)]
        small[d] = self._length(d)
        self.put(f"{name} = tl.broadcast_to({name}{at}, [{', '.join(sides)}]).reshape({small['y']}, {small['x']})")
        self.values[i] = Value(name, self.values[i].dims)

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


def tile_space(nest: LoopNest) -> Space:
    """A nest over y, x (and z, the batch). Its axes keep their order: a block has their shape."""
    made = [Var(d, a.size) for d, a in zip("zyx"[3 - len(nest.axes) :], nest.axes)]
    env: dict[Atom, IntLike] = {a.var: expr(v) for a, v in zip(nest.axes, made)}
    return Space("tile", substitute(nest.body, env), **{v.name: v for v in made})


def _quotient(v: Var, c: int) -> Atom:
    return BinOp("//", expr(v), expr(c))
