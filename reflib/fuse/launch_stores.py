"""Where a Triton kernel of the user's stores: one ``tl.store`` per argument, to every element exactly once?

The kernel's statements are followed over values that are known before it runs. A number is an expression in the
program's sizes and in *points*: a program's place in the grid, an element's place in its block (the same in all
blocks of a shape), a loop's iteration::

    row = tl.program_id(0)                                row                   of the grid's first axis
    for start in range(0, n, BLOCK):                      start = BLOCK*j       an iteration
        i = start + tl.arange(0, BLOCK)                   i = BLOCK*j + e       an element
        tl.store(out + row * n + i, v, mask=i < n)        places n*row + i, where n - i > 0

Anything else (what is loaded, computed, or made by a function) has no known value. That is enough for places and
masks of most kernels, and whatever the argument is used for besides is found, and refused.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ir.expr import ONE, ZERO, Expr, Var, ceildiv, expr, maximum, minimum, nonneg
from ..ir.program import Extern
from ..ir.user_kernel import UserKernel
from .launch_cover import NotSimple, Number, Stored, at_least_0, positive


@dataclass(frozen=True)
class Mask:
    """True where all of ``positive`` are greater than 0."""

    positive: tuple[Expr, ...]
    points: frozenset[Var] = frozenset()
    rank: int = 0


@dataclass(frozen=True)
class Fixed:
    """A constant that is no number."""

    value: Any


@dataclass(frozen=True)
class Place:
    """The argument plus a number."""

    at: Number


@dataclass(frozen=True)
class Unknown:
    """``lost``: it may be a place."""

    lost: bool = False


KNOWN, LOST = Unknown(), Unknown(True)
_KEYWORDS = {"pointer", "value", "mask", "cache_modifier", "eviction_policy"}
_SAME = ("tl.multiple_of", "tl.max_contiguous", "tl.max_constancy", "tl.constexpr")
_OF_NUMBERS = ("tl.cdiv", "triton.cdiv", "min", "tl.minimum", "max", "tl.maximum")
_RANGES = ("range", "tl.range", "tl.static_range")
_COMPARED = {ast.Lt: (-1, 0), ast.LtE: (-1, 1), ast.Gt: (1, 0), ast.GtE: (1, 1)}


def the_store(x: Extern, argument: str) -> Stored:
    """The store to ``argument`` (the kernel's name for it). Raises NotSimple."""
    kernel = x.target
    assert isinstance(kernel, UserKernel)
    return _Walk(kernel, x.args, dict(x.kwargs)["grid"], argument).stored()


# -- the kernel ---------------------------------------------------------------------------------------------
class _Walk:
    """Follows the kernel's statements. ``around``: what bounds the iterations of the loops around."""

    def __init__(self, kernel: UserKernel, args: Sequence[Any], grid: Sequence[Expr], argument: str):
        self.argument, self.grid = argument, grid
        self.env: dict[str, Any] = {}
        self.found: Stored | None = None
        self.types: list[ast.expr] = []
        self.around: list[tuple[frozenset[Var], tuple[Expr, ...]]] = []
        self.rest: list[tuple[frozenset[Var], tuple[Expr, ...]]] = []  # of programs that have not returned
        self.inside = ""  # of what that may run or not
        self.loops = 0
        self.seen: dict[ast.expr, Any] = {}  # values in the statement that is followed
        module = ast.parse(kernel.source)
        for s in module.body:
            if isinstance(s, ast.Assign):
                self.statement(s)
        (function,) = (f for f in module.body if isinstance(f, ast.FunctionDef) and f.name == kernel.function)
        self.body = function.body
        given = {str(c[0])[:-1]: c[1:] for c in kernel.call}
        a = function.args
        pairs = [*zip([*a.posonlyargs, *a.args][::-1], a.defaults[::-1]), *zip(a.kwonlyargs, a.kw_defaults)]
        values = {p.arg: self.value(d) for p, d in pairs if d is not None}
        values |= {name: self._given(pieces, args) for name, pieces in given.items()}
        values[argument] = Place(Number(ZERO))
        self.env |= values

    def _given(self, pieces: Sequence[str | int], args: Sequence[Any]) -> Any:
        first = pieces[0]
        if isinstance(first, int):
            simple = isinstance(args[first], Expr) and all(
                p in ("", ".to(tl.int64)", ".to(tl.int32)") for p in pieces[1:]
            )
            return Number(args[first]) if simple else KNOWN
        whole = len(pieces) == 1
        return self.value(ast.parse(first, mode="eval").body) if whole and isinstance(first, str) else KNOWN

    def stored(self) -> Stored:
        self.block(self.body)
        if self.found is None:
            raise NotSimple(f"it has no tl.store to {self.argument}")
        return replace(self.found, types=self.types)

    # -- statements -------------------------------------------------------------------------------------
    def block(self, body: Sequence[ast.stmt]) -> None:
        for s in body:
            self.statement(s)

    def statement(self, s: ast.stmt) -> None:
        self.seen = {}
        if isinstance(s, ast.Assign):
            value = self.value(s.value)
            for t in s.targets:
                self.assign(t, value)
        elif isinstance(s, ast.AnnAssign) and s.value is not None:
            self.assign(s.target, self.value(s.value))
        elif isinstance(s, ast.AugAssign):
            before = ast.copy_location(ast.Name(s.target.id, ast.Load()), s) if isinstance(s.target, ast.Name) else None
            if before is None:
                raise NotSimple("it assigns to a part of something")
            self.assign(s.target, self.value(ast.copy_location(ast.BinOp(before, s.op, s.value), s)))
        elif isinstance(s, ast.Expr):
            self.value(s.value)
        elif isinstance(s, ast.If):
            self._if(s)
        elif isinstance(s, ast.For):
            self._for(s)
        elif isinstance(s, ast.While):
            self._repeated(s, "a while loop")
        elif isinstance(s, (ast.Return, ast.Break, ast.Continue)):
            if self.inside or self.around or s is not self.body[-1]:
                raise NotSimple("it may return, or leave a loop, early")
        elif not isinstance(s, ast.Pass):
            self._mention(s)
            self._forget(s)

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(value, Place):
            raise NotSimple(f"it keeps {self.argument} in a tuple")
        else:
            for n in ast.walk(target):
                if isinstance(n, ast.Name):
                    self.env[n.id] = KNOWN

    def _if(self, s: ast.If) -> None:
        test = self.value(s.test)
        known = self._truth(test)
        self.place_used(test, f"`if {ast.unparse(s.test)}`")
        if known is not None:
            self.block(s.body if known else s.orelse)
            return
        returns = isinstance(s.body[0], ast.Return) and not s.orelse and not self.inside and not self.around
        if returns and isinstance(test, Mask) and len(test.positive) == 1:
            self.rest.append((test.points, (1 - test.positive[0],)))  # what comes after runs where it is false
            return
        before, outside = dict(self.env), self.inside
        self.inside = f"`if {ast.unparse(s.test)}`"
        for part in (s.body, s.orelse):
            self.env = dict(before)
            self.block(part)
        self.inside = outside
        self.env = before
        self._forget(s)

    def _for(self, s: ast.For) -> None:
        call = s.iter
        known = isinstance(call, ast.Call) and ast.unparse(call.func) in _RANGES and isinstance(s.target, ast.Name)
        known = known and not any(k.arg in ("arg1", "arg2", "step") for k in call.keywords)  # type: ignore[attr-defined]
        parts = [self.value(a) for a in call.args] if isinstance(call, ast.Call) and known else []
        if not 1 <= len(parts) <= 3 or s.orelse or not all(isinstance(p, Number) and p.rank == 0 for p in parts):
            self._repeated(s, "a loop of unknown length")
            return
        zero, one = Number(ZERO), Number(ONE)
        start, stop, step = [zero, *parts, one] if len(parts) == 1 else [*parts, one][:3]
        least = start.value.subs(dict.fromkeys(start.value.variables(), 0))
        plain = nonneg(start.value - least) and not stop.points and not step.points and nonneg(step.value - 1)
        if not plain:
            self._repeated(s, "a loop of unknown length")
            return
        self._forget(s)
        j = Var(f"j{self.loops}", ceildiv(stop.value - least, step.value))
        self.loops += 1
        value = start.value + step.value * expr(j)
        points = start.points | {j}
        bound = (stop.value - value,) if start.points else ()  # else the number of iterations says it
        assert isinstance(s.target, ast.Name)
        self.env[s.target.id] = Number(value, points)
        self.around.append((points, bound))
        self.block(s.body)
        self.around.pop()
        self._forget(s)

    def _repeated(self, s: ast.For | ast.While, what: str) -> None:
        self._forget(s)
        outside, self.inside = self.inside, what
        for e in (s.test,) if isinstance(s, ast.While) else (s.iter,):
            self.value(e)
        self.around.append((frozenset(), ()))
        self.block([*s.body, *s.orelse])
        self.around.pop()
        self.inside = outside
        self._forget(s)

    def _forget(self, s: ast.stmt) -> None:
        """What is assigned in ``s`` has one of several values."""
        names = {n.id for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        assigned = [a for a in ast.walk(s) if isinstance(a, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and a.value]
        places = {n for n, v in self.env.items() if isinstance(v, Place) or v is LOST}
        for _ in assigned:  # as often as a place may be handed on
            for a in assigned:
                if places & _names(a.value):
                    places |= _names(*(a.targets if isinstance(a, ast.Assign) else [a.target]))
        self.env |= {n: LOST if n in places else KNOWN for n in names}

    def _mention(self, node: ast.AST) -> None:
        for n in ast.walk(node):
            if isinstance(n, ast.Name) and n.id in self.env:
                self.place_used(self.env[n.id], f"a {type(node).__name__}")

    # -- expressions ------------------------------------------------------------------------------------
    def value(self, e: ast.expr) -> Any:
        if e not in self.seen:
            method = getattr(self, f"_{type(e).__name__.lower()}", self._rest)
            self.seen[e] = method(e)
        return self.seen[e]

    def place_used(self, value: Any, by: str) -> None:
        if isinstance(value, Place) or value is LOST:
            raise NotSimple(f"it uses {self.argument} in {by}")

    def _rest(self, e: ast.AST, by: str = "") -> Any:
        """No known value; nothing inside may be a place."""
        for child in ast.iter_child_nodes(e):
            if isinstance(child, (ast.expr, ast.keyword)):
                inner = self.value(child.value if isinstance(child, ast.keyword) else child)
                self.place_used(inner, by or f"`{ast.unparse(e)}`")
            else:
                self._mention(child)
        return KNOWN

    def _name(self, e: ast.Name) -> Any:
        return self.env.get(e.id, KNOWN)

    def _namedexpr(self, e: ast.NamedExpr) -> Any:
        raise NotSimple(f"it assigns inside of an expression: `{ast.unparse(e)}`")

    def _constant(self, e: ast.Constant) -> Any:
        return Number(expr(e.value), fixed=True) if type(e.value) is int else Fixed(e.value)

    def _attribute(self, e: ast.Attribute) -> Any:
        inner = e.value
        typed = e.attr == "element_ty" and isinstance(inner, ast.Attribute) and inner.attr == "dtype"
        if typed and isinstance(self.value(inner.value), Place):  # type: ignore[attr-defined]
            self.types.append(e)
            return KNOWN
        return self._rest(e)

    def _unaryop(self, e: ast.UnaryOp) -> Any:
        v = self.value(e.operand)
        if isinstance(e.op, ast.USub) and isinstance(v, Number):
            return replace(v, value=-v.value)
        if isinstance(e.op, ast.Not) and (known := self._truth(v)) is not None:
            return Fixed(not known)
        return self._rest(e)

    def _binop(self, e: ast.BinOp) -> Any:
        a, b = self.value(e.left), self.value(e.right)
        places = [isinstance(v, Place) for v in (a, b)]
        if any(places) and not all(places):
            if not isinstance(e.op, ast.Add) and not (isinstance(e.op, ast.Sub) and places[0]):
                raise NotSimple(f"it uses {self.argument} in `{ast.unparse(e)}`")
            place, other = (a, b) if places[0] else (b, a)
            if not isinstance(other, Number):
                if other is LOST:
                    self.place_used(other, f"`{ast.unparse(e)}`")
                raise NotSimple(f"where it stores is not known before it runs: `{ast.unparse(e)}`")
            return Place(self._sum(place.at, other, -1 if isinstance(e.op, ast.Sub) else 1))
        if isinstance(a, Number) and isinstance(b, Number):
            return self._arithmetic(e.op, a, b)
        if isinstance(e.op, ast.BitAnd) and all(isinstance(v, (Mask, Fixed)) for v in (a, b)):
            return self._both(a, b)
        return self._rest(e)

    def _sum(self, a: Number, b: Number, sign: int = 1) -> Number:
        return Number(a.value + sign * b.value, a.points | b.points, max(a.rank, b.rank), a.fixed and b.fixed)

    def _arithmetic(self, op: ast.operator, a: Number, b: Number) -> Any:
        like = self._sum(a, b)
        if isinstance(op, ast.Add):
            return like
        if isinstance(op, ast.Sub):
            return replace(like, value=a.value - b.value)
        if isinstance(op, ast.Mult):
            return replace(like, value=a.value * b.value)
        if isinstance(op, (ast.FloorDiv, ast.Mod)) and at_least_0(a.value) and positive(b.value):
            return replace(like, value=a.value // b.value if isinstance(op, ast.FloorDiv) else a.value % b.value)
        return KNOWN

    def _both(self, a: Any, b: Any) -> Any:
        masks = [v for v in (a, b) if isinstance(v, Mask)]
        if any(isinstance(v, Fixed) and v.value is not True for v in (a, b)) or not masks:
            return KNOWN
        points = frozenset().union(*(m.points for m in masks))
        return Mask(tuple(e for m in masks for e in m.positive), points, max(m.rank for m in masks))

    def _boolop(self, e: ast.BoolOp) -> Any:
        known = [self._truth(self.value(v)) for v in e.values]
        if None not in known:
            return Fixed(all(known) if isinstance(e.op, ast.And) else any(known))
        return self._rest(e)

    def _compare(self, e: ast.Compare) -> Any:
        if len(e.ops) != 1:
            return self._rest(e)
        op, a, b = e.ops[0], self.value(e.left), self.value(e.comparators[0])
        if (
            isinstance(op, (ast.Is, ast.IsNot))
            and isinstance(b, Fixed)
            and b.value is None
            and not isinstance(a, Unknown)
        ):
            return Fixed((isinstance(a, Fixed) and a.value is None) == isinstance(op, ast.Is))
        if isinstance(op, (ast.Eq, ast.NotEq)) and all(isinstance(v, Fixed) for v in (a, b)):
            return Fixed((a.value == b.value) == isinstance(op, ast.Eq))
        if not isinstance(a, Number) or not isinstance(b, Number):
            return self._rest(e)
        if a.fixed and b.fixed and (d := (a.value - b.value).constant) is not None:
            of = {ast.Lt: d < 0, ast.LtE: d <= 0, ast.Gt: d > 0, ast.GtE: d >= 0, ast.Eq: d == 0, ast.NotEq: d != 0}
            return Fixed(of[type(op)]) if type(op) in of else KNOWN
        if type(op) not in _COMPARED:
            return KNOWN
        sign, more = _COMPARED[type(op)]
        return Mask(((a.value - b.value) * sign + more,), a.points | b.points, max(a.rank, b.rank))

    def _truth(self, v: Any) -> bool | None:
        """Of what Triton knows when it compiles: it looks at one branch only."""
        if isinstance(v, Fixed):
            return bool(v.value)
        return bool(v.value.constant) if isinstance(v, Number) and v.fixed and v.value.constant is not None else None

    def _ifexp(self, e: ast.IfExp) -> Any:
        known = self._truth(self.value(e.test))
        return self._rest(e) if known is None else self.value(e.body if known else e.orelse)

    def _subscript(self, e: ast.Subscript) -> Any:
        """``[:, None]``: the axes of a block, counted from the right, move."""
        v = self.value(e.value)
        parts = e.slice.elts if isinstance(e.slice, ast.Tuple) else [e.slice]
        new = [isinstance(p, ast.Constant) and p.value is None for p in parts]
        whole = [isinstance(p, ast.Slice) and p.lower is p.upper is p.step is None for p in parts]
        if not isinstance(v, (Number, Mask, Place)) or not all(a or b for a, b in zip(new, whole)):
            return self._rest(e)
        if isinstance(v, Place):
            return Place(self._moved(v.at, whole))
        return self._moved(v, whole)

    def _moved(self, v: Any, whole: list[bool]) -> Any:
        if sum(whole) != v.rank:
            return KNOWN
        to = {str(v.rank - k): len(whole) - at for k, at in enumerate(i for i, w in enumerate(whole) if w)}
        env: dict[Any, Any] = {}
        for p in v.points:
            axis, _, size = p.name[1:].partition("_")
            if p.name[0] == "e":
                env[p] = expr(Var(f"e{to[axis]}_{size}", p.size))
        points = frozenset(q for p in v.points for q in expr(p).subs(env).variables())
        if isinstance(v, Mask):
            return Mask(tuple(e.subs(env) for e in v.positive), points, len(whole))
        return replace(v, value=v.value.subs(env), points=points, rank=len(whole))

    # -- calls ------------------------------------------------------------------------------------------
    def _call(self, e: ast.Call) -> Any:
        name = ast.unparse(e.func)
        if name == "tl.store":
            return self._store(e)
        if isinstance(e.func, ast.Attribute) and e.func.attr == "to":
            v, kind = self.value(e.func.value), ast.unparse(e.args[0]) if e.args else ""
            if isinstance(v, Number) and kind in ("tl.int64", "tl.int32") and not e.keywords:
                return replace(v, fixed=False)
        if isinstance(e.func, ast.Attribute):
            self.place_used(self.value(e.func.value), f"`{ast.unparse(e)}`")
        args = [self.value(a) for a in e.args] + [self.value(k.value) for k in e.keywords]
        if any(isinstance(a, Place) or a is LOST for a in args):
            if name == "tl.load":
                raise NotSimple(f"it loads from {self.argument} as well")
            raise NotSimple(f"it gives {self.argument} to {name}")
        if name in ("tl.program_id", "tl.num_programs") and len(args) == 1 and isinstance(args[0], Number):
            return self._program(args[0].value.constant, name)
        if name in _SAME and args:
            return args[0]
        if name == "tl.full" and len(args) == 3 and ast.unparse(e.args[0]) == "()" and isinstance(args[1], Number):
            return replace(args[1], fixed=False)
        if not args or not all(isinstance(a, Number) for a in args):
            return self._rest(e)
        return self._of_numbers(name, args)

    def _program(self, axis: int | None, name: str) -> Any:
        if axis not in (0, 1, 2):
            return KNOWN
        size = self.grid[axis]
        if name == "tl.num_programs":
            return Number(size)
        v = Var(f"p{axis}", size)
        return Number(expr(v), frozenset({v})) if size != 1 else Number(ZERO)

    def _of_numbers(self, name: str, args: list[Number]) -> Any:
        a, b = args[0], args[-1]
        if name == "tl.arange" and len(args) == 2 and (size := (b.value - a.value).constant) is not None:
            e = Var(f"e1_{size}", expr(size))
            return Number(a.value + (expr(e) if size > 1 else 0), frozenset({e} if size > 1 else ()), 1)
        if len(args) != 2:
            return KNOWN
        like = self._sum(a, b)
        of = {"cdiv": ceildiv, "min": minimum, "minimum": minimum, "max": maximum, "maximum": maximum}
        if name not in _OF_NUMBERS or "cdiv" in name and not (nonneg(a.value) and nonneg(b.value - 1)):
            return KNOWN
        return replace(like, value=of[name.rpartition(".")[2]](a.value, b.value), fixed=False)

    def _store(self, e: ast.Call) -> Any:
        given = dict(zip(("pointer", "value", "mask"), e.args)) | {str(k.arg): k.value for k in e.keywords}
        where = self.value(given.pop("pointer")) if "pointer" in given else LOST
        if not isinstance(where, Place):
            for v in given.values():
                self.place_used(self.value(v), f"`{ast.unparse(e)}`")
            self.place_used(where, "a store whose place changes")
            return KNOWN
        if len(e.args) > 3 or not given.keys() <= _KEYWORDS or "value" not in given:
            raise NotSimple(f"`{ast.unparse(e)}` is not a plain store")
        self.place_used(self.value(given["value"]), f"`{ast.unparse(e)}`")
        if self.found is not None:
            raise NotSimple(f"it stores to {self.argument} in more than one place")
        if self.inside:
            raise NotSimple(f"it stores to {self.argument} inside of {self.inside}")
        mask = self.value(given["mask"]) if "mask" in given else Fixed(None)
        if not isinstance(mask, Mask) and not (isinstance(mask, Fixed) and mask.value in (None, True)):
            raise NotSimple(f"its mask is not known before it runs: `{ast.unparse(given['mask'])}`")
        positive = mask.positive if isinstance(mask, Mask) else ()
        points = where.at.points | (mask.points if isinstance(mask, Mask) else frozenset())
        for more, bound in (*self.around, *self.rest):
            positive, points = (*positive, *bound), points | more
        for axis, size in enumerate(self.grid):
            points |= {Var(f"p{axis}", size)} if size != 1 else set()
        self.found = Stored(e, isinstance(mask, Mask), where.at, positive, frozenset(points))
        return KNOWN


def _names(*nodes: ast.AST | None) -> set[str]:
    return {n.id for node in nodes if node is not None for n in ast.walk(node) if isinstance(n, ast.Name)}
