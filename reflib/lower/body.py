"""Writing a LoopNest: :class:`Value`, so that a rule reads like the formula it computes, and :class:`NestBuilder`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Union

import torch

from reflib.ir.expr import ZERO, Expr, IntLike, Var, expr, product
from reflib.ir.loops import Axis, BodyBuilder, LoopNest
from reflib.ir.ops import BUFFER_DTYPES, OPS, value_dtype
from reflib.ir.program import View

from .rules import NUMBER, Unsupported, rule

if TYPE_CHECKING:
    from .context import LoweringContext

Scalar = Union["Value", Expr, float, int, bool]


def _binary(name: str) -> Callable[[Value, Scalar], Value]:
    return lambda self, other: self.op(name, other)


def _reversed(name: str) -> Callable[[Value, Scalar], Value]:
    return lambda self, other: self.like(other).op(name, self)


def _unary(name: str) -> Callable[[Value], Value]:
    return lambda self: self.op(name)


class Value:
    """A statement's value. Arithmetic and comparisons append statements; a plain number next to a Value becomes a
    constant of its dtype. Casts are explicit: operands of one operation must agree in dtype."""

    __slots__ = ("id", "kernel")

    def __init__(self, kernel: NestBuilder, id: int):
        self.kernel, self.id = kernel, id

    @property
    def dtype(self) -> torch.dtype:
        return self.kernel.b.dtype(self.id)

    def op(self, name: str, *others: Scalar) -> Value:
        """``OPS[name](self, *others)``; Unsupported if the op does not take this dtype."""
        if not _takes(OPS[name].kind, self.dtype):
            raise Unsupported(f"{name} of {self.dtype}")
        args = [self.id, *(self.kernel.value(o, self.dtype).id for o in others)]
        return Value(self.kernel, self.kernel.b.op(name, *args))

    def to(self, dtype: torch.dtype) -> Value:
        """The value as ``dtype``. A half dtype rounds, and the value stays float32."""
        return Value(self.kernel, self.kernel.b.cast(self.id, dtype))

    def like(self, number: Scalar) -> Value:
        return self.kernel.value(number, self.dtype)

    __add__, __sub__, __mul__, __truediv__ = _binary("add"), _binary("sub"), _binary("mul"), _binary("div")
    __radd__, __rsub__, __rmul__ = _reversed("add"), _reversed("sub"), _reversed("mul")
    __rtruediv__ = _reversed("div")
    __and__, __or__, __xor__ = _binary("and"), _binary("or"), _binary("xor")
    __lt__, __le__, __gt__, __ge__ = _binary("lt"), _binary("le"), _binary("gt"), _binary("ge")
    eq, ne, maximum, minimum = _binary("eq"), _binary("ne"), _binary("maximum"), _binary("minimum")
    __neg__, __invert__ = _unary("neg"), _unary("not")
    exp, log1p, tanh, sigmoid = _unary("exp"), _unary("log1p"), _unary("tanh"), _unary("sigmoid")
    erf, sqrt, log, cos = _unary("erf"), _unary("sqrt"), _unary("log"), _unary("cos")

    def abs(self) -> Value:
        return self.op("abs") if self.dtype not in (torch.bool, torch.uint8) else self

    def isnan(self) -> Value:
        return self.op("isnan") if self.dtype.is_floating_point else self.kernel.value(False, torch.bool)


def where(cond: Value, a: Scalar, b: Scalar) -> Value:
    """``a`` where ``cond``, else ``b``; one of them may be a number."""
    k = cond.kernel
    dtype = a.dtype if isinstance(a, Value) else b.dtype  # type: ignore[union-attr]
    return Value(k, k.b.op("where", cond.id, k.value(a, dtype).id, k.value(b, dtype).id))


def _takes(kind: str, dtype: torch.dtype) -> bool:
    return {
        "float": dtype.is_floating_point,
        "int": not dtype.is_floating_point and dtype != torch.bool,
        "bool": dtype == torch.bool,
        "intbool": not dtype.is_floating_point,
        "number": dtype != torch.bool,
        "any": True,
    }[kind]


class NestBuilder:
    """One LoopNest in the making, over the points of ``shape``; the dimensions in ``reduced`` are r axes.

    ``coords``: one index expression per dimension (0 for a dimension of size 1, which needs no axis).
    """

    def __init__(self, cx: LoweringContext, shape: Sequence[IntLike], reduced: Iterable[int] = (), device: Any = None):
        self.cx = cx
        self.b = BodyBuilder()
        self.shape = tuple(expr(s) for s in shape)
        self.reduced = frozenset(reduced)
        self.device = cx.device if device is None else device
        self.axes: list[Axis] = []
        self.coords: list[Expr] = []
        number = cx.low.next_kernel()
        for d, size in enumerate(self.shape):
            if size == 1:
                self.coords.append(ZERO)
                continue
            var = Var(f"i{d}_{number}", size)
            self.axes.append(Axis(var, "r" if d in self.reduced else "p"))
            self.coords.append(expr(var))

    # -- values ---------------------------------------------------------------------------------
    def value(self, x: Scalar, dtype: torch.dtype) -> Value:
        """A number, size or Value as a Value of ``dtype`` (of a half dtype: rounded)."""
        if isinstance(x, Value):
            return x if x.dtype == dtype else x.to(dtype)
        if isinstance(x, Expr) and x.constant is not None:
            x = x.constant
        if isinstance(x, Expr):
            return self._size(x, value_dtype(dtype)).to(dtype)
        if isinstance(x, complex):
            raise Unsupported("complex numbers")
        return Value(self, self.b.const(fit(x, dtype), value_dtype(dtype)))

    def _size(self, x: Expr, dtype: torch.dtype) -> Value:
        symbols = self.cx.low.symbols
        if not symbols.is_float(x):
            return Value(self, self.b.index(x)).to(dtype)
        formula = symbols.formulas.get(str(x))
        if formula is not None:
            try:
                return self._formula(*formula).to(dtype)
            except Unsupported:
                pass
        tensor = self.cx.float_tensor(x, self.device)
        return Value(self, self.b.load(tensor.buffer, ZERO, torch.float64)).to(dtype)

    def _formula(self, e: Any, env: Any) -> Value:
        """Float arithmetic on sizes (``1 / n``), redone in the kernel in float64, as Python would do it."""
        name = type(e).__name__
        if name in ("IntTrueDiv", "FloatTrueDiv"):
            return self._formula(e.args[0], env) / self._formula(e.args[1], env)
        if name == "ToFloat":
            return self._formula(e.args[0], env)
        if e.is_Float:
            return self.value(float(e), torch.float64)
        if (e.is_Add or e.is_Mul) and not e.is_integer:
            first, *rest = [self._formula(a, env) for a in e.args]
            for v in rest:
                first = first + v if e.is_Add else first * v
            return first
        whole = self.cx.low.symbols.from_sympy(e, env)
        if self.cx.low.symbols.is_float(whole):
            raise Unsupported(f"the number {e}")
        return self.index(whole).to(torch.float64)

    def index(self, e: IntLike) -> Value:
        """An integer expression (of coordinates and sizes) as an int64 value."""
        return Value(self, self.b.index(expr(e)))

    def indirect(self, value: Value, size: IntLike, wraps: bool = False) -> Expr:
        """A value read from a tensor, checked against ``size``, as an index. ``wraps``: negative ones from the end."""
        o, said = self.cx.origin, self.cx.low.options.assert_indirect_indexing
        return self.b.indirect(value.id, size, f"index out of range: {o.op} {o.source}" if said else True, wraps)

    def reduce(self, kind: str, *values: Value, dtype: torch.dtype | None = None) -> Value:
        dtype = dtype or (torch.int64 if kind.startswith("arg") else values[0].dtype)
        if not any(a.kind == "r" for a in self.axes):  # every reduced dimension has size 1
            return values[0] - values[0] if kind == "m2" else values[-1].to(dtype)
        return Value(self, self.b.reduce(kind, *(v.id for v in values), dtype=dtype))

    # -- memory ---------------------------------------------------------------------------------
    def at(self, view: View, coords: Sequence[IntLike] | None = None) -> Expr:
        """``view``'s element at ``coords`` (default: this kernel's, broadcast), as an offset in its buffer."""
        own = self.coords if coords is None else [expr(c) for c in coords]
        n, out = len(view.shape), view.offset
        assert n <= len(own), f"a view of {n} dimensions read at {len(own)} coordinates"
        wide = (self.shape if coords is None else view.shape)[-n:]
        for c, size, stride, w in zip(own[len(own) - n :], view.shape, view.strides, wide):
            if size != 1 and (size == w or size.hint() != 1 or w.hint() == 1):  # (else torch has guarded that it is 1)
                out = out + c * stride
        return out

    def load(
        self, view: View, coords: Sequence[IntLike] | None = None, mask: Value | None = None, other: Any = 0
    ) -> Value:
        """Read one element, in its value dtype. ``mask``: read only where it is true, else ``other`` (a number)."""
        known = self.cx.low.uniform.get(view.buffer)
        dtype = value_dtype(check_dtype(view.dtype))
        if known is not None and (mask is None or known == other):
            return self.value(known, dtype)
        view = self.cx.readable(view)
        if mask is not None:
            other = fit(other, dtype)
        if self.cx.low.buffers[view.buffer].device != self.device:
            if "argument" not in NUMBER:
                raise Unsupported("a tensor on another device")
            number = NUMBER["argument"](self, view)
            return number if mask is None else where(mask, number, other)
        index = self.at(view, coords)
        return Value(self, self.b.load(view.buffer, index, dtype, None if mask is None else mask.id, other))

    def store(self, view: View, value: Scalar, coords: Sequence[IntLike] | None = None) -> None:
        """Write one element, cast (a half dtype: rounded) to the view's dtype."""
        dtype = check_dtype(view.dtype)
        value = self.value(value, value_dtype(dtype))
        if (o := self.cx.low.options).numerics == "eager" or o.batch_invariant:  # rounded for what is fused, too
            value = value.to(dtype)
        self.b.store(view.buffer, self.at(view, coords), value.id)

    def finish(self) -> None:
        """Append the LoopNest to the program."""
        name = self.cx.low.next_node()
        self.cx.low.nodes.append(LoopNest(name, tuple(self.axes), tuple(self.b.body), (self.cx.origin,)))

    def linear(self, dims: Iterable[int]) -> Expr:
        """The position among the points of ``dims``, row-major."""
        out = ZERO
        for d in dims:
            out = out * self.shape[d] + self.coords[d]
        return out

    def count(self, dims: Iterable[int]) -> Expr:
        return product(self.shape[d] for d in dims)


def nest(cx: LoweringContext, value: Callable[[NestBuilder], Scalar], out: View | None = None) -> View:
    """One LoopNest over the points of ``out`` (None: the op's result), which stores ``value(builder)`` there."""
    device = None if out is None else cx.low.buffers[out.buffer].device
    out = cx.out() if out is None else out
    k = NestBuilder(cx, out.shape, device=device)
    k.store(out, value(k))
    k.finish()
    return out


def element(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the rule of the named ops by what it computes: ``fn(k, *args)``, the value at the point ``k.coords``."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        @rule(*names)
        @functools.wraps(fn)
        def lower_op(cx: LoweringContext, *args: Any, **kwargs: Any) -> View:
            return nest(cx, lambda k: fn(k, *args, **kwargs))

        return fn

    return register


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in BUFFER_DTYPES:
        raise Unsupported(f"dtype {str(dtype).removeprefix('torch.')}")
    return dtype


def fit(x: Any, dtype: torch.dtype) -> Any:
    """A Python number as a constant of ``dtype``: integers wrap, as torch's do."""
    if isinstance(x, complex):
        raise Unsupported("complex numbers")
    if dtype == torch.bool:
        return bool(x)
    if dtype.is_floating_point:
        return float(x) if dtype == value_dtype(dtype) else float(torch.tensor(float(x)).to(dtype))
    if isinstance(x, float) and not math.isfinite(x):
        raise Unsupported(f"{x} as {dtype}")
    info = torch.iinfo(dtype)
    x = int(x)
    return x if info.min <= x <= info.max else (x - info.min) % (info.max - info.min + 1) + info.min
