"""One part of a kernel: a Loops printed as the lines of a Triton function.

Every value knows which of the block's dimensions (``x``, ``y``, ``r``) it varies with, hence its shape: a bias read
with ``r`` alone is ``[1, RBLOCK]``, a row's maximum ``[XBLOCK, 1]``, a constant has no shape. Triton broadcasts the
rest. A statement is printed in the pass (``loops.phases``) it belongs to:

* persistent: the row fits one block, so all passes are one straight line of code;
* looped: one ``for`` per pass. What a later pass needs of an earlier one is loaded and computed again, except what a
  reduction gave. A reduction keeps a whole block of partial results and combines them once, after its loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from ..choose.axes import Space, step
from ..errors import GenerateError
from ..ir.expr import Atom, Call, Expr, Ref, Sym, Var, format_expr, max_value, nonneg
from ..ir.loops import Const, Index, Indirect, Load, Op, Reduce, Store, stmt_args
from ..ir.program import Buffer, Config
from .triton_facts import (
    HALF,
    blocks,
    const,
    const_mask,
    extreme_text,
    literal,
    paren,
    phases,
    plain,
    pointer_name,
    varying,
    wants_exact,
)
from .triton_half import Form, cheap_forms
from .triton_ops import LITERAL_OK, TL, Needs, nan_helper, print_cast, print_op

Dims = frozenset[str]
NOTHING: Dims = frozenset()


@dataclass
class Value:
    """A printed value: its name (or literal) and the dimensions it varies with. ``ok``: the name of an index's
    bounds check."""

    text: str
    dims: Dims
    ok: str | None = None


class PartPrinter:
    """Prints one part. ``tag`` ends every name, so that parts of one kernel do not share variables. ``aligned``: the
    buffers that are known to begin at a multiple of 16 bytes."""

    def __init__(
        self,
        space: Space,
        config: Config,
        buffers: dict[str, Buffer],
        needs: Needs,
        tag: str,
        many: bool,
        aligned: Collection[str] = (),
    ):
        self.space, self.config, self.buffers, self.needs, self.tag = space, config, buffers, needs, tag
        self.many = many  # several parts: `pid` was bound by the caller
        self.wide = config.index == "int64"
        self.lines: list[str] = []
        self.indent = ""
        self.acc = "acc"  # what a Template's product is called
        self.values: dict[int, Value] = {}
        self.symbols: set[Sym] = set()
        self.pointers: dict[str, None] = {}
        self.order = {"1d": ("x",), "tile": ("y", "x"), "reduction": ("x", "r")}[space.mode]
        self.block = {"x": config.xblock, "y": dict(config.extras).get("yblock", 1), "r": config.rblock}
        self.vars = {v.name: v for v in (space.x, space.y, space.z, space.r) if v is not None}
        self.masks = {d: self._needs_mask(d) for d in self.order}
        self.peeled = self._peels(aligned)
        self.inside = varying(space)
        self.phase = phases(space)
        self.exact = wants_exact(space, buffers)
        self.forms, self.unread = ({}, set()) if self.exact else cheap_forms(space)
        self.reread: set[int] = set()  # loads that a later pass repeats

    # -- the whole part -------------------------------------------------------------------------
    def print(self) -> list[str]:
        self._prologue()
        looped = self.space.mode == "reduction" and self.config.reduction == "looped"
        if looped:
            self._looped()
        elif self.peeled:
            self._whole_or_last()
        else:
            if self.space.mode == "reduction":
                self._r_block("")
            self.statements()
        return self.lines

    def statements(self) -> None:
        """They alone: the dimensions, their masks, and what a Template made are bound already."""
        for i in range(len(self.space.body)):
            self._statement(i)

    def programs(self) -> Expr:
        """How many programs the part takes."""
        x, y, z = self.space.x, self.space.y, self.space.z
        n = blocks(x.size, self.block["x"])
        if y is not None:
            n = n * blocks(y.size, self.block["y"])
        return n if z is None else n * z.size

    def _prologue(self) -> None:
        """Which x (and y, z) this program computes."""
        pid = f"pid{self.tag}" if self.many else "pid"
        if not self.many:
            self.put(f"pid = tl.program_id(0){'.to(tl.int64)' if self.wide else ''}")
        if self.space.mode == "tile":
            assert self.space.y is not None
            nx, ny = (self.size(blocks(v.size, self.block[v.name])) for v in (self.space.x, self.space.y))
            xpid, rest = (f"{pid} % {paren(nx)}", f"{pid} // {paren(nx)}") if nx != "1" else ("0", pid)
            if self.space.z is None:
                self._range("x", xpid)
                self._range("y", rest)
            else:
                self._range("x", xpid)
                self._range("y", f"{rest} % {paren(ny)}" if ny != "1" else "0")
                self.put(f"z{self.tag} = {rest} // {paren(ny)}" if ny != "1" else f"z{self.tag} = {rest}")
        else:
            self._range("x", pid)

    def _range(self, d: str, pid: str) -> None:
        name, block = d + self.tag, f"{d.upper()}BLOCK"
        self.put(
            f"{name} = ({pid}) * {block} + {self._arange(d)}"
            if " " in pid
            else f"{name} = {pid} * {block} + {self._arange(d)}"
        )
        if self.masks[d] and not self.peeled:
            self._mask(d)

    def _mask(self, d: str) -> None:
        self.put(f"{d}mask{self.tag} = {d}{self.tag} < {self.size(self.vars[d].size)}")

    def _arange(self, d: str) -> str:
        text = f"tl.arange(0, {d.upper()}BLOCK)"
        if len(self.order) == 1:
            return text
        return text + ("[:, None]" if self.order[0] == d else "[None, :]")

    def _r_block(self, start: str) -> None:
        wide = ".to(tl.int64)" if self.wide else ""
        self.put(f"r{self.tag} = {start}{self._arange('r')}{wide}")
        if self.masks["r"]:
            self.put(f"rmask{self.tag} = r{self.tag} < {self.size(self._rsize())}")

    def _rsize(self) -> Expr:
        assert self.space.r is not None
        return self.space.r.size

    def _needs_mask(self, d: str) -> bool:
        n = self.vars[d].size.constant
        if self.block[d] == 1 and d != "r":
            return False  # the grid has exactly as many programs
        return n is None or n % self.block[d] != 0 or n == 0

    def _peels(self, aligned: Collection[str]) -> bool:
        """Is the last block printed apart? In a flat kernel the mask of a size that is no multiple of 16, as far as
        Triton can see, breaks each access of 16 bytes into single elements, dealt out to threads as if it were whole:
        half the bandwidth for a bfloat16. Whole blocks need no mask."""
        n, x = self.space.x.size, self.space.x
        if self.space.mode != "1d" or not self.masks["x"] or self._sixteens(n):
            return False
        if n.constant is not None and n.constant < self.block["x"]:
            return False  # no block is whole
        moves = [s for s in self.space.body if isinstance(s, (Load, Store)) and s.buffer in aligned]
        return any(step(s.index, x) == 1 for s in moves)

    def _sixteens(self, n: Expr) -> bool:
        """Does Triton see that ``n`` is a multiple of 16?"""
        known = dict(self.config.extras).get("divisible", ())
        return all(c % 16 == 0 or any(isinstance(a, Sym) and a.name in known for a in m) for m, c in n.terms)

    def _whole_or_last(self) -> None:
        """The statements twice: without a mask, and for the last block with one."""
        pid = f"pid{self.tag}"
        self.put(f"if {pid} * XBLOCK + XBLOCK <= {self.size(self.space.x.size)}:  # a whole block")
        self._under(False)
        self.put("else:")
        self._under(True)

    def _under(self, mask: bool) -> None:
        self.masks["x"], self.indent, self.values = mask, self.indent + "    ", {}
        if mask:
            self._mask("x")
        self.statements()
        self.indent = self.indent[4:]

    # -- passes ---------------------------------------------------------------------------------
    def _looped(self) -> None:
        """Row statements as early as they can be, one loop per pass, row stores at the end."""
        body = self.space.body
        last = self._place_stores()
        passes = [self._needed(p) for p in range(last + 1)]
        row_stores = [i for i, s in enumerate(body) if isinstance(s, Store) and not self.inside[i]]
        for p, wanted in enumerate(passes):
            for i, s in enumerate(body):
                if not self.inside[i] and not isinstance(s, (Reduce, Store)) and self.phase[i] == p:
                    self._statement(i)
            self.reread = {i for later in passes[p + 1 :] for i in later}
            if wanted:
                self._loop(p, wanted)
        for p in range(last + 1, max([*self.phase, last]) + 1):
            for i, s in enumerate(body):
                if not self.inside[i] and not isinstance(s, (Reduce, Store)) and self.phase[i] == p:
                    self._statement(i)
        for i in row_stores:
            self._statement(i)

    def _place_stores(self) -> int:
        """The number of the last pass. A store to a buffer that is also read waits for it: passes read again."""
        body = self.space.body
        work = [
            self.phase[i]
            for i, s in enumerate(body)
            if isinstance(s, Reduce) or isinstance(s, Store) and self.inside[i]
        ]
        last = max(work, default=0)
        read = {s.buffer for s in body if isinstance(s, Load)}
        for i, s in enumerate(body):
            if isinstance(s, Store) and self.inside[i] and s.buffer in read:
                self.phase[i] = last
        return last

    def _needed(self, p: int) -> list[int]:
        """The statements inside pass ``p``'s loop: what its reductions and stores are made of, in order."""
        body = self.space.body
        found: set[int] = set()
        stack = [
            i
            for i, s in enumerate(body)
            if self.phase[i] == p and (isinstance(s, Reduce) or isinstance(s, Store) and self.inside[i])
        ]
        while stack:
            i = stack.pop()
            if i in found:
                continue
            found.add(i)
            stack += [a for a in stmt_args(body[i]) if self.inside[a]]
        return sorted(found)

    def _loop(self, p: int, wanted: list[int]) -> None:
        body, rn = self.space.body, self.size(self._rsize())
        reduces = [i for i in wanted if isinstance(body[i], Reduce)]
        for i in reduces:
            self._declare(i)
        self.put(f"for r0{self.tag} in range(0, {rn}, RBLOCK):")
        self.indent += "    "
        self._r_block(f"r0{self.tag} + ")
        for i in wanted:
            if isinstance(body[i], Reduce):
                self._accumulate(i)
            else:
                self._statement(i)
        self.indent = self.indent[:-4]
        for i in reduces:
            self._finish(i)
        for i in wanted:  # names inside the loop end with it
            if not isinstance(body[i], Reduce):
                self.values.pop(i, None)

    # -- reductions -----------------------------------------------------------------------------
    def _full(self) -> str:
        return "[XBLOCK, RBLOCK]"

    def _operand(self, i: int, dtype: torch.dtype) -> str:
        """A reduction's argument as a full block of ``dtype``."""
        v = self.values[i]
        if isinstance(self.space.body[i], Const):
            return f"tl.full({self._full()}, {v.text}, {TL[dtype]})"
        text = print_cast(v.text, self.dtype(i), dtype)
        text = f"({text})" if " " in text else text
        return (
            text
            if v.dims == {"x", "r"} or (v.dims == {"r"} and self.block["x"] == 1)
            else f"tl.broadcast_to({text}, {self._full()})"
        )

    def _accumulator(self, s: Reduce) -> tuple[torch.dtype, str, str]:
        """(dtype, identity, helper that combines two) of a reduction other than arg*; bools count as int32."""
        dtype = torch.int32 if s.dtype == torch.bool else s.dtype
        if s.kind in ("argmax", "argmin"):
            dtype = self.dtype(s.args[0])
            dtype = torch.int32 if dtype == torch.bool else dtype
        kind = {"any": "max", "all": "min", "argmax": "max", "argmin": "min"}.get(s.kind, s.kind)
        if kind in ("max", "min"):
            name = "maximum" if kind == "max" else "minimum"
            helper = nan_helper(name, dtype) if dtype.is_floating_point else f"{name}_int"
            if s.kind in ("any", "all"):  # of an empty row: False, True
                return dtype, "0" if kind == "max" else "1", helper
            return dtype, extreme_text(kind, dtype), helper
        return dtype, "0" if kind == "sum" else "1", "sum_of" if kind == "sum" else "product_of"

    def _masked(self, text: str, identity: str) -> str:
        return f"tl.where(rmask{self.tag}, {text}, {identity})" if self.masks["r"] else text

    def _reduce(self, i: int) -> None:
        """All at once: the row is in the block."""
        s = self.space.body[i]
        assert isinstance(s, Reduce)
        dtype, identity, helper = self._accumulator(s)
        value = self._masked(self._operand(s.args[0], dtype), identity)
        if s.kind in ("argmax", "argmin"):
            index = self._masked(self._operand(s.args[1], torch.int64), str(2**63 - 1))
            self._combine_pair(i, value, index)
        else:
            self._combine(i, value, dtype, helper)

    def _declare(self, i: int) -> None:
        s = self.space.body[i]
        assert isinstance(s, Reduce)
        dtype, identity, _ = self._accumulator(s)
        self.put(f"acc{i}{self.tag} = tl.full({self._full()}, {identity}, {TL[dtype]})")
        if s.kind in ("argmax", "argmin"):
            self.put(f"at{i}{self.tag} = tl.full({self._full()}, {2**63 - 1}, tl.int64)")

    def _accumulate(self, i: int) -> None:
        s = self.space.body[i]
        assert isinstance(s, Reduce)
        dtype, identity, helper = self._accumulator(s)
        acc, value = f"acc{i}{self.tag}", self._masked(self._operand(s.args[0], dtype), identity)
        if s.kind in ("argmax", "argmin"):
            index = self._masked(self._operand(s.args[1], torch.int64), str(2**63 - 1))
            at = f"at{i}{self.tag}"
            self.put(f"{acc}, {at} = {self.needs.helper(s.kind + '_of')}({acc}, {at}, {value}, {index})")
        elif helper in ("sum_of", "product_of"):
            keep = "" if dtype.itemsize >= 4 else f".to({TL[dtype]})"
            sign = "+" if helper == "sum_of" else "*"
            self.put(f"{acc} = ({acc} {sign} {value}){keep}" if keep else f"{acc} = {acc} {sign} {value}")
        else:
            self.put(f"{acc} = {self.needs.helper(helper)}({acc}, {value})")

    def _finish(self, i: int) -> None:
        s = self.space.body[i]
        assert isinstance(s, Reduce)
        dtype, _, helper = self._accumulator(s)
        if s.kind in ("argmax", "argmin"):
            self._combine_pair(i, f"acc{i}{self.tag}", f"at{i}{self.tag}")
        else:
            self._combine(i, f"acc{i}{self.tag}", dtype, helper)

    def _combine(self, i: int, value: str, dtype: torch.dtype, helper: str) -> None:
        s, name = self.space.body[i], self._name(i)
        assert isinstance(s, Reduce)
        if helper == "sum_of" and dtype.itemsize >= 4:
            text = f"tl.sum({value}, axis=1, keep_dims=True)"
        else:
            text = f"tl.reduce({value}, 1, {self.needs.helper(helper)}, keep_dims=True)"
        if s.dtype == torch.bool:
            text += " != 0"
        self.put(f"{name} = {text}")
        self.values[i] = Value(name, frozenset("x"))

    def _combine_pair(self, i: int, value: str, index: str) -> None:
        s, name = self.space.body[i], self._name(i)
        assert isinstance(s, Reduce)
        self.put(f"_, {name} = tl.reduce(({value}, {index}), 1, {self.needs.helper(s.kind + '_of')}, keep_dims=True)")
        if s.dtype != torch.int64:
            self.put(f"{name} = {name}.to({TL[s.dtype]})")
        self.values[i] = Value(name, frozenset("x"))

    # -- statements -----------------------------------------------------------------------------
    def _statement(self, i: int) -> None:
        s = self.space.body[i]
        if i in self.unread:
            return
        if isinstance(s, Load):
            self._load(i, s)
        elif isinstance(s, Const):
            self.values[i] = Value(const(s), NOTHING)
        elif i in self.forms:
            self._form(i, self.forms[i])
        elif isinstance(s, Index):
            self._index(i, s)
        elif isinstance(s, Op):
            self._op(i, s)
        elif isinstance(s, Indirect):
            self._indirect(i, s)
        elif isinstance(s, Reduce):
            self._reduce(i)
        elif isinstance(s, Store):
            self._store(s)
        else:
            self.values[i] = Value(self.acc, frozenset(self.order))

    def _bind(self, i: int, text: str, dims: Dims, ok: str | None = None) -> None:
        name = self._name(i)
        self.put(f"{name} = {text}")
        self.values[i] = Value(name, dims, ok)

    def _name(self, i: int) -> str:
        return f"v{i}{self.tag}"

    def dtype(self, i: int) -> torch.dtype:
        return self.space.body[i].dtype  # type: ignore[union-attr]

    def _op(self, i: int, s: Op) -> None:
        values = [self.values[a] for a in s.args]
        dims = frozenset().union(*(v.dims for v in values))
        literals = [isinstance(self.space.body[a], Const) and plain(self.space.body[a]) for a in s.args]
        checked = literals[1:] if s.op == "where" else literals
        inline = s.op in LITERAL_OK and not all(checked) and not (s.op == "where" and literals[0])
        source = self.dtype(s.args[-1])
        args = []
        for a, v, bare in zip(s.args, values, literals):
            constant = isinstance(self.space.body[a], Const)
            if constant and not (inline and bare):
                args.append(f"tl.full([], {v.text}, {TL[self.dtype(a)]})")
            else:
                args.append(v.text)
        self._bind(i, print_op(self.needs, s.op, s.dtype, source, args, self.exact), dims)

    def _form(self, i: int, form: Form) -> None:
        values = [self.values[a] for a in form.args]
        texts = [
            f"tl.full([], {v.text}, tl.float32)" if isinstance(self.space.body[a], Const) else v.text
            for a, v in zip(form.args, values)
        ]
        if form.helper:
            self.needs.helper(form.helper)
        if "libdevice." in form.text:
            self.needs.libdevice = True
        self._bind(i, form.text.format(*texts), frozenset().union(*(v.dims for v in values)))

    def _index(self, i: int, s: Index) -> None:
        """An index as a value; computed in 64 bits unless it is known to be small."""
        top = max_value(s.expr)
        small = top is not None and top < 2**31 and nonneg(s.expr)
        if s.expr.constant is not None:
            self._bind(i, f"tl.full([], {s.expr.constant}, {TL[s.dtype]})", NOTHING)
            return
        text = self.address(s.expr, widen=not small and not self.wide)
        whole = text if text.endswith(".to(tl.int64)") and " " not in text else f"{paren(text)}.to({TL[s.dtype]})"
        if s.dtype != torch.int64 and not whole.endswith(f"({TL[s.dtype]})"):
            whole = f"{paren(text)}.to({TL[s.dtype]})"
        self._bind(i, whole, self._dims(s.expr))

    def _indirect(self, i: int, s: Indirect) -> None:
        """Wrap a negative index; remember whether the result is inside."""
        v, name, size = self.values[s.arg], self._name(i), self.size(s.size)
        text = v.text if not isinstance(self.space.body[s.arg], Const) else f"tl.full([], {v.text}, tl.int64)"
        self.put(f"{name} = tl.where({text} < 0, {text} + {paren(size)}, {text})")
        self.put(f"ok{i}{self.tag} = ({name} >= 0) & ({name} < {size})")
        if not self.wide:
            self.put(f"{name} = {name}.to(tl.int32)")
        self.values[i] = Value(name, v.dims, f"ok{i}{self.tag}")

    # -- memory ---------------------------------------------------------------------------------
    def _access(self, index: Expr, more: Iterable[Value]) -> tuple[str, list[str], Dims]:
        """(offset, masks, dims) of an access whose mask or value also varies with ``more``."""
        dims = self._dims(index)
        masks, all_dims = [], dims
        for v in more:
            all_dims = all_dims | v.dims
        for d in self.order:
            if d in all_dims and self.masks[d]:
                masks.append(f"{d}mask{self.tag}")
        for a in sorted(index.atoms()):
            if isinstance(a, Ref):
                ok = self.values[a.id].ok
                assert ok is not None
                masks.append(ok)
        text = self.address(index)
        if dims != all_dims:  # the pointer must have the whole shape
            zero = "0" if index.constant is None else text
            whole = f"tl.full({self._shape(all_dims)}, {zero}, {'tl.int64' if self.wide else 'tl.int32'})"
            text = whole if index.constant is not None else f"{whole} + {paren(text)}"
        return text, masks, all_dims

    def _shape(self, dims: Dims) -> str:
        return "[" + ", ".join(f"{d.upper()}BLOCK" if d in dims else "1" for d in self.order) + "]"

    def _load(self, i: int, s: Load) -> None:
        buffer = self.buffers[s.buffer]
        pointer = self.pointer(s.buffer)
        more = [] if s.mask is None else [self.values[s.mask]]
        text, masks, dims = self._access(s.index, more)
        conditional = s.mask is not None or any(isinstance(a, Ref) for a in s.index.atoms())
        if s.mask is not None:
            mask = self.values[s.mask]
            masks.append(const_mask(mask.text))
        parts = [f"{pointer} + {paren(text)}" if text != "0" else pointer]
        if masks:
            parts.append("mask=" + " & ".join(masks))
        if conditional:
            other = literal(s.other, s.dtype)
            parts.append(f"other={other}")
        eviction = self._eviction(i, dims)
        if eviction:
            parts.append(f"eviction_policy='{eviction}'")
        call = f"tl.load({', '.join(parts)})"
        if buffer.dtype == torch.bool:
            call += " != 0"
        elif buffer.dtype in HALF:
            call += ".to(tl.float32)"
        self._bind(i, call, dims)

    def _eviction(self, i: int, dims: Dims) -> str:
        """Keep in cache what is read again (a later pass; a weight shared by all rows), let the rest stream through."""
        if self.space.mode != "reduction" or "r" not in dims:
            return ""
        if i in self.reread or ("x" not in dims and self.space.x.size != 1):
            return "evict_last"
        return "evict_first" if self.config.reduction == "looped" else ""

    def _store(self, s: Store) -> None:
        buffer, value = self.buffers[s.buffer], self.values[s.value]
        text, masks, _ = self._access(s.index, [value])
        stored = value.text
        if isinstance(self.space.body[s.value], Const):
            stored = f"tl.full([], {stored}, {TL[self.dtype(s.value)]})"
        if buffer.dtype == torch.bool:
            stored = f"{paren(stored)}.to(tl.int8)"
        elif buffer.dtype in HALF:
            stored = f"{stored}.to({TL[buffer.dtype]})"
        parts = [
            f"{self.pointer(s.buffer)} + {paren(text)}" if text != "0" else self.pointer(s.buffer),
            stored,
        ]
        if masks:
            parts.append("mask=" + " & ".join(masks))
        self.put(f"tl.store({', '.join(parts)})")

    def pointer(self, buffer: str) -> str:
        self.pointers[buffer] = None
        return pointer_name(buffer)

    # -- expressions ----------------------------------------------------------------------------
    def _dims(self, e: Expr) -> Dims:
        out: set[str] = set()
        for a in e.atoms():
            if isinstance(a, Var) and a.name in self.order:
                out.add(a.name)
            elif isinstance(a, Ref):
                out |= self.values[a.id].dims
        return frozenset(out)

    def size(self, e: Expr) -> str:
        """An expression in sizes alone."""
        return self.address(e)

    def address(self, e: Expr, widen: bool = False) -> str:
        def atom(a: Atom) -> str:
            if isinstance(a, Sym):
                self.symbols.add(a)
                return f"{a.name}.to(tl.int64)" if widen else a.name
            if isinstance(a, Var):
                return f"{a.name}{self.tag}.to(tl.int64)" if widen else f"{a.name}{self.tag}"
            if isinstance(a, Ref):
                return f"{self.values[a.id].text}.to(tl.int64)" if widen else self.values[a.id].text
            assert isinstance(a, Call)
            x, y = self.address(a.a, widen), self.address(a.b, widen)
            if a.fn in ("max", "min"):
                return f"tl.{a.fn}imum({x}, {y})"
            x, y = paren(x), paren(y)
            if nonneg(a.a):
                return f"({x} {a.fn} {y})"
            positive = f"({x} % {y} + {y}) % {y}"  # Triton's % has the dividend's sign
            return f"({positive})" if a.fn == "%" else f"(({x} - {positive}) // {y})"

        text = format_expr(e, atom)
        if widen and e.constant is None and ".to(" not in text:
            raise GenerateError(f"cannot widen {e}")
        return text

    def put(self, line: str) -> None:
        self.lines.append(self.indent + line)
