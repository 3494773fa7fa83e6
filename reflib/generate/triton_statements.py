"""Statements of a loop body as the lines of a Triton function.

Each value has the block dimensions (``x``, ``y``, ``r``) that it varies with, hence its shape: a bias read with ``r``
alone is ``[1, RBLOCK]``, a row's maximum ``[XBLOCK, 1]``, a constant has no shape. Triton broadcasts the rest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..errors import GenerateError
from ..ir.expr import Atom, BinOp, Expr, Ref, Sym, Var, format_expr, max_value, nonneg
from ..ir.loops import Const, Index, Indirect, Load, Op, Store
from ..ir.program import Buffer, Config
from ..schedule.axes import Space
from .triton_facts import HALF, Form, const_mask, exact_values, literal, paren, plain, pointer_name
from .triton_ops import CHEAP, TL, Needs, print_op, takes_literal

Dims = frozenset[str]
NOTHING: Dims = frozenset()
ORDER = {"1d": ("x",), "tile": ("y", "x"), "reduction": ("x", "r")}  # of a block's dimensions, by the space's mode


@dataclass
class Value:
    """A printed value: its name (or literal), the dimensions it varies with, and ``ok``, its bounds check."""

    text: str
    dims: Dims
    ok: str | None = None


class StatementPrinter:
    """Prints the body of ``space``, where the dimensions and their masks are bound: in an epilogue, say. ``masks``: by
    dimension, whether it has one. ``tag`` ends every name, so that parts of one kernel do not share variables."""

    def __init__(
        self,
        space: Space,
        config: Config,
        buffers: dict[str, Buffer],
        needs: Needs,
        masks: Mapping[str, bool],
        tag: str = "",
    ):
        self.space, self.config, self.buffers, self.needs, self.tag = space, config, buffers, needs, tag
        self.masks = dict(masks)
        self.wide = config.index == "int64"
        self.lines: list[str] = []
        self.indent = ""
        self.acc = "acc"  # the name of a Template's product
        self.values: dict[int, Value] = {}
        self.symbols: set[Sym] = set()
        self.pointers: dict[str, None] = {}
        self.order = ORDER[space.mode][:: -1 if dict(config.extras).get("across") == config.reduction else 1]
        every = {i for i, s in enumerate(space.body) if getattr(s, "op", "") != "rsqrt"}  # tl.rsqrt is eager's there
        self.exact = every if "exact" in dict(config.extras) else exact_values(space, buffers)
        self.forms, self.unread = CHEAP["forms"](space, self.exact, config) if "forms" in CHEAP else ({}, set())
        self.reread: set[int] = set()  # loads that a later pass repeats

    def statements(self) -> None:
        for i in CHEAP["order"](self.space, self.config) if "order" in CHEAP else range(len(self.space.body)):
            self.statement(i)

    def statement(self, i: int) -> None:
        s = self.space.body[i]
        if i in self.unread:
            return
        if isinstance(s, Load):
            self._load(i, s)
        elif isinstance(s, Const):
            self.values[i] = Value(literal(s.value, s.dtype), NOTHING)
        elif i in self.forms:
            self._form(i, self.forms[i])
        elif isinstance(s, Index):
            self._index(i, s)
        elif isinstance(s, Op):
            self._op(i, s)
        elif isinstance(s, Indirect):
            self._indirect(i, s)
        elif isinstance(s, Store):
            self._store(s)
        else:
            self.values[i] = Value(self.acc, frozenset(self.order))

    def _bind(self, i: int, text: str, dims: Dims, ok: str | None = None) -> None:
        name = self.name(i)
        self.put(f"{name} = {text}")
        self.values[i] = Value(name, dims, ok)

    def _typed(self, i: int) -> str:
        """Statement ``i``'s value; a literal with its dtype."""
        text = self.values[i].text
        return f"tl.full([], {text}, {TL[self.dtype(i)]})" if isinstance(self.space.body[i], Const) else text

    def name(self, i: int) -> str:
        return f"v{i}{self.tag}"

    def dtype(self, i: int) -> torch.dtype:
        return self.space.body[i].dtype  # type: ignore[union-attr]

    def _op(self, i: int, s: Op) -> None:
        values = [self.values[a] for a in s.args]
        dims = frozenset().union(*(v.dims for v in values))
        literals = [isinstance(self.space.body[a], Const) and plain(self.space.body[a]) for a in s.args]
        checked = literals[1:] if s.op == "where" else literals
        source = self.dtype(s.args[-1])
        inline = takes_literal(s.op, source) and not all(checked) and not (s.op == "where" and literals[0])
        args = [v.text if inline and bare else self._typed(a) for a, v, bare in zip(s.args, values, literals)]
        self._bind(i, print_op(self.needs, s.op, s.dtype, source, args, i in self.exact), dims)

    def _form(self, i: int, form: Form) -> None:
        values = [self.values[a] for a in form.args]
        texts = map(self._typed, form.args)
        if form.helper:
            self.needs.helper(form.helper)
        if "libdevice." in form.text:
            self.needs.libdevice = True
        self._bind(i, form.text.format(*texts), frozenset().union(*(v.dims for v in values)))

    def _index(self, i: int, s: Index) -> None:
        """An index as a value; computed in 64 bits unless it is known to be small."""
        top = max_value(s.expr)
        small = top is not None and top < 2**31 and nonneg(s.expr + 2**31)
        if s.expr.constant is not None:
            self._bind(i, f"tl.full([], {s.expr.constant}, {TL[s.dtype]})", NOTHING)
            return
        text = self.address(s.expr, widen=not small and not self.wide)
        cast = f".to({TL[s.dtype]})"
        self._bind(i, text if text.endswith(cast) and " " not in text else paren(text) + cast, self._dims(s.expr))

    def _indirect(self, i: int, s: Indirect) -> None:
        """Wrap a negative index; remember whether the result is inside. (If that is not known.)"""
        v, name, size = self.values[s.arg], self.name(i), self.size(s.size)
        text, want = self._typed(s.arg), "tl.int64" if self.wide else "tl.int32"
        ok = f"ok{i}{self.tag}" if s.checked else None
        if s.checked and s.wraps:
            self.put(f"{name} = tl.where({text} < 0, {text} + {paren(size)}, {text})")
            text = name
        if s.checked:
            self.put(f"{ok} = ({text} >= 0) & ({text} < {size})")
        if isinstance(s.checked, str):  # not beyond the block's end, where there may be anything
            masks = [f"{d}mask{self.tag}" for d in self.order if d in v.dims and self.masks[d]]
            self.put(f"tl.device_assert({ok}, {s.checked!r}, {' & '.join(masks) or None})")
        if TL[self.dtype(s.arg)] != want:
            self.put(f"{name} = {text}.to({want})")
            text = name
        self.values[i] = Value(text, v.dims, ok)

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
            if isinstance(a, Ref) and (ok := self.values[a.id].ok) is not None:
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
        call, dims = self._load_call(i, s)
        self._bind(i, self._widened(call, s), dims)

    def _widened(self, text: str, s: Load) -> str:
        """What was loaded, in the dtype of values."""
        dtype = self.buffers[s.buffer].dtype
        return f"{text} != 0" if dtype == torch.bool else f"{text}.to(tl.float32)" if dtype in HALF else text

    def _load_call(self, i: int, s: Load) -> tuple[str, Dims]:
        more = [] if s.mask is None else [self.values[s.mask]]
        text, masks, dims = self._access(s.index, more)
        conditional = s.mask is not None or any(isinstance(a, Ref) and self.values[a.id].ok for a in s.index.atoms())
        if s.mask is not None:
            masks.append(const_mask(self.values[s.mask].text))
        parts = [self._place(s.buffer, text)]
        if masks:
            parts.append("mask=" + " & ".join(masks))
        if conditional:
            parts.append(f"other={literal(s.other, s.dtype)}")
        eviction = self._eviction(i, s.buffer, dims)
        if eviction:
            parts.append(f"eviction_policy='{eviction}'")
        return f"tl.load({', '.join(parts)})", dims

    def _eviction(self, i: int, buffer: str, dims: Dims) -> str:
        """Keep in cache what is read again (a later pass; a weight shared by all rows), let stream through what is not:
        neither a table nor a window, of which the same cache lines are read by the next loads."""
        if self.space.mode != "reduction" or "r" not in dims:
            return ""
        if i in self.reread or ("x" not in dims and self.space.x.size != 1):
            return "evict_last"
        read = {s.index for s in self.space.body if isinstance(s, Load) and s.buffer == buffer}
        once = len(read) == 1 and not any(isinstance(a, Ref) for e in read for a in e.atoms())
        return "evict_first" if self.config.reduction == "looped" and once else ""

    def _store(self, s: Store) -> None:
        buffer, value = self.buffers[s.buffer], self.values[s.value]
        rows = frozenset(self.order) - {"r"}
        everywhere = [Value("", rows)] if s.reduce else []  # each of them adds, whatever that depends on
        text, masks, _ = self._access(s.index, [value, *everywhere])
        stored = self._typed(s.value)
        if buffer.dtype == torch.bool:
            stored = f"{paren(stored)}.to(tl.int8)"
        elif buffer.dtype in HALF:
            stored = f"{stored}.to({TL[buffer.dtype]})"
        parts = [self._place(s.buffer, text), stored]
        if masks:
            parts.append("mask=" + " & ".join(masks))
        if s.reduce:
            parts.append("sem='relaxed'")
        self.put(f"{'tl.atomic_add' if s.reduce else 'tl.store'}({', '.join(parts)})")

    def _place(self, buffer: str, offset: str) -> str:
        return self.pointer(buffer) if offset == "0" else f"{self.pointer(buffer)} + {paren(offset)}"

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
            assert isinstance(a, BinOp)
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
