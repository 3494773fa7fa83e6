"""LoopNest: the one form of every computation that a kernel is generated for.

Grammar::

    loops ::= name [axis ...] { stmt ... }
    axis  ::= var < size : p            parallel: one result (or row) per value
            | var < size : r            reduced over
    stmt  ::= %i = load   buffer[expr] (if %j else const)   : dtype
            | %i = const  literal                           : dtype
            | %i = index  expr                              : dtype     an integer expression as a value
            | %i = acc                                      : dtype     a Template's product (in its epilogue only)
            | %i = op     name %j ...                       : dtype     see ops.OPS
            | %i = indirect %j < size (unchecked)           : int64     a value to be used in an index expression
            | %i = reduce kind %j ...                       : dtype     over all r axes; see ops.REDUCTIONS
            | %i = scan   kind %j ...                       : dtype     along the r axis; see scans.SCANS
            | store buffer[expr] = %j
            | store buffer[expr] += %j                                  column sums, in pieces: see below
            | store buffer[expr] atomic += %j                           added to what is there: see below

Meaning: for every point of the parallel axes, execute the statements in order; a statement whose value
depends on an r axis is executed for every point of the r axes as well; a ``reduce`` combines all of these.
A statement may come after a reduce and depend both on its result and on the r axes (softmax's
``exp(x - max)``): the generators decide whether that means one pass over data held in registers
(persistent) or another loop (looped). Nothing else is needed for elementwise work before and after reductions.
A ``scan`` has a value at each point of a single r axis: what a ``reduce`` of the points up to it would give.

* ``%i`` is the position of the statement in the body (static single assignment; stores have no value).
* An index is linear: the offset *in elements* from the buffer's start, strides already multiplied in.
* ``load ... if %j else c``: reads only where %j is true; the value is ``c`` elsewhere.
* ``indirect``: adds ``size`` where the value is negative. Then 0 <= value < size holds; all else is an error (CPU:
  IndexOutOfRange; GPU: the access is masked off), or means that nothing is stored there and no value loaded matters
  (``skips``). It appears in expressions as ``Ref(i, size)``. ``unchecked``: 0 <= value < size is known. (%j may be an
  int32.) ``checked`` may be the text of an assertion, which a GPU makes then.
* ``store b[e] += %j``: per index e the sum of %j over all points with that index, parallel ones included. ``b`` has
  more rows than one, and e counts from the start of each: the sum of column e is divided among the rows as the
  generator likes (one row per program), so only the sum of all rows has a meaning. Nothing else touches these columns.
* ``store b[e] atomic += %j``: at every point of the parallel axes %j, which no r axis varies, is added to element e, in
  any order. An earlier node has filled ``b``; no other statement of this loop nest touches it. (GPU only.)
* A fused kernel is again a LoopNest: bodies joined, loads of what was just stored replaced by the value. So one
  verifier, one interpreter and one printer serve every stage from ``lower`` to ``schedule``.

NB: TorchInductor writes bodies as Python closures called with a handler; printing one means running it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from .expr import Atom, Expr, IntLike, Ref, Var, expr, product
from .ops import OPS


@dataclass(frozen=True, slots=True)
class Load:
    buffer: str
    index: Expr
    dtype: torch.dtype  # value dtype: float32 for half buffers
    mask: int | None = None
    other: float | int | bool = 0


@dataclass(frozen=True, slots=True)
class Const:
    value: float | int | bool
    dtype: torch.dtype

    def __eq__(self, other: object) -> bool:  # 0.0 and -0.0, True and 1 differ; nan equals itself
        return isinstance(other, Const) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, torch.dtype]:
        return repr(self.value), self.dtype


@dataclass(frozen=True, slots=True)
class Index:
    expr: Expr
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Acc:
    """What a Template has computed for this point of its axes, before rounding. Only in a Template's epilogue, a
    LoopNest over exactly the Template's axes."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Op:
    op: str
    args: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Indirect:
    arg: int
    size: Expr
    checked: bool | str = True
    wraps: bool = True  # whether negative ones count from the end
    skips: bool = False
    dtype: ClassVar[torch.dtype] = torch.int64


@dataclass(frozen=True, slots=True)
class Reduce:
    kind: str
    args: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Scan:
    kind: str
    args: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Store:
    buffer: str
    index: Expr
    value: int
    reduce: str = ""  # "sum": +=; "atomic"


Stmt = Load | Const | Index | Acc | Op | Indirect | Reduce | Scan | Store


@dataclass(frozen=True, slots=True)
class Axis:
    var: Var
    kind: str  # "p" | "r"

    @property
    def size(self) -> Expr:
        return self.var.size


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node came from: the ATen op and the user's source line ("file.py:12 in forward: x = ...")."""

    op: str
    source: str = ""


@dataclass(frozen=True)
class LoopNest:
    """See the module docstring. ``axes`` are in natural (row-major) order, p and r mixed as in the source."""

    name: str
    axes: tuple[Axis, ...]
    body: tuple[Stmt, ...]
    origins: tuple[Origin, ...] = ()

    def __str__(self) -> str:
        from .printer import format_loop_nest

        return format_loop_nest(self)

    @property
    def parallel(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind == "p")

    @property
    def reduced(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind == "r")

    @property
    def numel(self) -> Expr:
        """Points of the parallel axes."""
        return product(a.size for a in self.parallel)

    @property
    def rnumel(self) -> Expr:
        return product(a.size for a in self.reduced)

    @property
    def reduced_vars(self) -> set[Var]:
        return {a.var for a in self.axes if a.kind == "r"}

    @cached_property
    def _accesses(self) -> tuple[list[Any], ...]:
        loads, stores = ([s for s in self.body if isinstance(s, kind)] for kind in (Load, Store))
        return loads, stores, *([*dict.fromkeys(s.buffer for s in found)] for found in (loads, stores))

    def loads(self) -> list[Load]:
        return [*self._accesses[0]]

    def stores(self) -> list[Store]:
        return [*self._accesses[1]]

    def reads(self) -> list[str]:
        """Buffers read, each once, in order."""
        return [*self._accesses[2]]

    def writes(self) -> list[str]:
        return [*self._accesses[3]]

    def symbols(self) -> list[Any]:
        """Size symbols used anywhere, sorted by name."""
        used = [*(a.size for a in self.axes), *(e for s in self.body for e in stmt_exprs(s))]
        return sorted({s for e in used for s in e.symbols()})


def stmt_exprs(s: Stmt) -> list[Expr]:
    """The index expressions in a statement."""
    if isinstance(s, (Load, Store)):
        return [s.index]
    if isinstance(s, Index):
        return [s.expr]
    return [s.size] if isinstance(s, Indirect) else []


def stmt_args(s: Stmt) -> tuple[int, ...]:
    """Positions of the statements whose values ``s`` uses, those inside index expressions included."""
    refs = tuple(a.id for e in stmt_exprs(s) for a in e.atoms() if isinstance(a, Ref))
    if isinstance(s, Load):
        return refs if s.mask is None else (*refs, s.mask)
    if isinstance(s, (Op, Reduce, Scan)):
        return s.args
    if isinstance(s, Indirect):
        return (s.arg,)
    if isinstance(s, Store):
        return (*refs, s.value)
    return refs


def map_stmt(s: Stmt, ids: Mapping[int, int], env: Mapping[Atom, IntLike] | None = None) -> Stmt:
    """``s`` with value positions renamed by ``ids`` and atoms replaced by ``env`` (other Refs follow ``ids``)."""
    full: dict[Atom, IntLike] = dict(env or {})
    for e in stmt_exprs(s):
        for a in e.atoms():
            if isinstance(a, Ref) and a not in full:
                full[a] = expr(Ref(ids[a.id], a.size.subs(env or {})))
    if isinstance(s, Load):
        return replace(s, index=s.index.subs(full), mask=None if s.mask is None else ids[s.mask])
    if isinstance(s, (Op, Reduce, Scan)):
        return replace(s, args=tuple(ids[a] for a in s.args))
    if isinstance(s, Index):
        return replace(s, expr=s.expr.subs(full))
    if isinstance(s, Indirect):
        return replace(s, arg=ids[s.arg], size=s.size.subs(full))
    if isinstance(s, Store):
        return replace(s, index=s.index.subs(full), value=ids[s.value])
    return s


class BodyBuilder:
    """Appends statements; one that is there already keeps its position (common subexpression elimination).

    Lowering rules are written with its methods (``op``, ``const``, ``cast`` ...).
    """

    def __init__(self) -> None:
        self.body: list[Stmt] = []
        self._seen: dict[Stmt, int] = {}

    def add(self, s: Stmt) -> int:
        """Append ``s`` (or find its equal) and return its position; what is rounded already is not rounded again."""
        if isinstance(s, Op) and s.op in ("to_f16", "to_bf16") and getattr(self.body[s.args[0]], "op", "") == s.op:
            return s.args[0]
        found = self._seen.get(s)
        if found is not None:
            return found
        self.body.append(s)
        if isinstance(s, Store):  # a later load of this buffer may read something else
            self._seen = {k: v for k, v in self._seen.items() if not (isinstance(k, Load) and k.buffer == s.buffer)}
        else:
            self._seen[s] = len(self.body) - 1
        return len(self.body) - 1

    def dtype(self, value: int) -> torch.dtype:
        return self.body[value].dtype  # type: ignore[union-attr]

    def load(self, buffer: str, index: IntLike, dtype: torch.dtype, mask: int | None = None, other: Any = 0) -> int:
        return self.add(Load(buffer, expr(index), dtype, mask, other))

    def const(self, value: float | int | bool, dtype: torch.dtype) -> int:
        if dtype.is_floating_point:
            value = float(value)
        elif dtype == torch.bool:
            value = bool(value)
        else:
            value = int(value)
        return self.add(Const(value, dtype))

    def index(self, e: IntLike, dtype: torch.dtype = torch.int64) -> int:
        return self.add(Index(expr(e), dtype))

    def op(self, name: str, *args: int, dtype: torch.dtype | None = None) -> int:
        """Apply ``OPS[name]``; ``dtype`` is needed for ``cast`` alone."""
        spec = OPS[name]
        if spec.result == "bool":
            dtype = torch.bool
        elif spec.result == "same":
            dtype = self.dtype(args[-1])
        assert dtype is not None
        return self.add(Op(name, args, dtype))

    def cast(self, value: int, dtype: torch.dtype) -> int:
        """``value`` as ``dtype``; half dtypes round and stay float32."""
        if dtype in (torch.float16, torch.bfloat16):
            value = self.cast(value, torch.float32)
            return self.op("to_f16" if dtype == torch.float16 else "to_bf16", value)
        return value if self.dtype(value) == dtype else self.op("cast", value, dtype=dtype)

    def indirect(
        self, value: int, size: IntLike, checked: bool | str = True, wraps: bool = True, skips: bool = False
    ) -> Expr:
        """``value`` (any integer dtype) checked against ``size``, for use in an index."""
        at = Indirect(self.cast(value, torch.int64), expr(size), checked, wraps, skips)
        return expr(Ref(self.add(at), expr(size)))

    def reduce(self, kind: str, *args: int, dtype: torch.dtype) -> int:
        return self.add(Reduce(kind, args, dtype))

    def store(self, buffer: str, index: IntLike, value: int, reduce: str = "") -> int:
        return self.add(Store(buffer, expr(index), value, reduce))
