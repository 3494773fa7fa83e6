"""Symbolic sizes: sympy expressions of torch's ShapeEnv, as our Expr.

What an Expr cannot say (a true division, a bitwise and ...) becomes an *opaque* symbol: a name for a value that an
Extern node computes by calling the Python function which made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import sympy
import torch
from torch.utils._sympy.symbol import SymT, symbol_is_type

from reflib.ir.expr import Expr, Sym, ceildiv, expr, floordiv, maximum, minimum, mod, nonneg, product

from .rules import Unsupported

_FLOAT_KINDS = (SymT.FLOAT, SymT.UNBACKED_FLOAT)
_HUGE = 2**62  # torch writes "no upper bound" as an infinity or as about the greatest int64


class Symbols:
    """Converts. Holds every symbol met so far, and the opaque ones by the sympy expression they stand for. ``ranges``:
    of symbols by name, where they are other than what the ShapeEnv says (``Graph.ranges``)."""

    def __init__(self, ranges: Mapping[str, tuple[int, int | None]] | None = None) -> None:
        self.ranges = ranges or {}
        self.known: dict[str, Sym] = {}  # by name
        self.opaque: dict[Any, Sym | Expr] = {}  # by sympy expression
        self._converted: dict[Any, Expr] = {}
        self.floats: set[str] = set()  # names of symbols whose value is a float
        self.formulas: dict[str, Any] = {}  # opaque floats: their sympy expression and its ShapeEnv
        self.bound: set[str] = set()  # names of symbols whose value is known by now, at run time

    def inside(self, mine: Mapping[Any, Sym | Expr]) -> Symbols:
        """The same symbols for a graph traced in another ShapeEnv. ``mine``: ours by its sympy symbols."""
        out = Symbols(self.ranges)
        out.known, out.floats, out.formulas, out.bound = self.known, self.floats, self.formulas, self.bound
        out.opaque = dict(mine)
        return out

    def expr(self, value: Any) -> Expr:
        """An int, SymInt or Expr as an Expr; raises Unsupported if it has none."""
        if isinstance(value, Expr):
            return value
        if isinstance(value, int):
            return expr(int(value))
        if isinstance(value, torch.SymInt):
            if value.node.hint == 1 and torch.fx.experimental.symbolic_shapes.statically_known_true(value == 1):
                return expr(1)  # a guard says so, not its expression
            return self.from_sympy(value.node.expr, value.node.shape_env)
        raise Unsupported(f"{value!r} is not an integer")

    def expressible(self, value: Any) -> bool:
        try:
            self.expr(value)
        except Unsupported:
            return False
        return True

    def bind(self, *exprs: Expr) -> None:
        """The symbols in ``exprs`` have values from here on."""
        self.bound |= {s.name for e in exprs for s in e.symbols()}

    def all_bound(self, *exprs: Expr) -> bool:
        return all(s.name in self.bound for e in exprs for s in e.symbols())

    def exprs(self, values: Any) -> tuple[Expr, ...]:
        return tuple(self.expr(v) for v in values)

    def from_sympy(self, e: Any, env: Any) -> Expr:
        """``e`` as an Expr. Raises Unsupported for functions our index expressions do not have."""
        found = self._converted.get(e)
        if found is None:
            found = self._converted[e] = self._convert(e, env)
        return found

    def _convert(self, e: Any, env: Any) -> Expr:
        if e in self.opaque:
            return expr(self.opaque[e])
        if isinstance(e, sympy.Integer):
            return expr(int(e))
        if isinstance(e, sympy.Symbol):
            return expr(self.symbol(e, env))

        def args() -> list[Expr]:
            return [self.from_sympy(a, env) for a in e.args]

        name = type(e).__name__
        if isinstance(e, sympy.Add):
            return sum(args(), expr(0))
        if isinstance(e, sympy.Mul):
            return product(args())
        if isinstance(e, sympy.Pow) and isinstance(e.args[1], sympy.Integer) and 0 <= int(e.args[1]) <= 16:
            return product([self.from_sympy(e.args[0], env)] * int(e.args[1]))
        if name in ("FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing"):
            self._check_divisors(e.args[1:], env)
            return _division(name, *args())
        if name in ("Max", "Min"):
            return reduce(maximum if name == "Max" else minimum, args())
        if name == "Identity":
            return args()[0]
        if name in ("CeilToInt", "FloorToInt") and type(e.args[0]).__name__ == "IntTrueDiv":
            self._check_divisors(e.args[0].args[1:], env)
            n, d = (self.from_sympy(a, env) for a in e.args[0].args)
            return _division("CeilDiv" if name == "CeilToInt" else "FloorDiv", n, d)
        raise Unsupported(f"the size {e} is not made of + * // % max min")

    def _check_divisors(self, divisors: Any, env: Any) -> None:
        """Ours must be positive. Zero they are not: torch divided by them when tracing."""
        for d in divisors:
            lower = env.bound_sympy(d).lower if env is not None else None
            if not nonneg(self.from_sympy(d, env)) and (lower is None or not lower >= 0):
                raise Unsupported(f"the divisor {d} of a size may be negative")

    def symbol(self, s: Any, env: Any) -> Sym:
        """The Sym for a sympy symbol, with its range and traced value from the ShapeEnv."""
        name = str(s)
        if name not in self.known:
            lo, hi = self.ranges.get(name) or _bounds(env.var_to_range.get(s) if env is not None else None)
            self.known[name] = Sym(name, lo, hi, _hint(s, env))
            if symbol_is_type(s, _FLOAT_KINDS):
                self.floats.add(name)
        return self.known[name]

    def define(self, name: str, value: Any) -> Sym:
        """A new opaque symbol standing for ``value`` (a SymInt, SymFloat or SymBool)."""
        node = value.node
        if isinstance(value, torch.SymInt):
            lo, hi = _bounds(node.shape_env.bound_sympy(node.expr))
            sym = Sym(name, lo, hi, node.hint if isinstance(node.hint, int) else None)
            self.opaque[node.expr] = sym
            self._converted.clear()
        else:
            sym = Sym(name, 0, None, None)
            if isinstance(value, torch.SymFloat):
                self.floats.add(name)
                self.formulas[name] = node.expr, node.shape_env
        self.known[name] = sym
        return sym

    def is_float(self, e: Expr) -> bool:
        return any(s.name in self.floats for s in e.symbols())


def _division(name: str, a: Expr, b: Expr, c: Expr | None = None) -> Expr:
    if name == "CeilDiv":
        return ceildiv(a, b)
    if name in ("Mod", "PythonMod"):
        return mod(a, b)
    quotient = floordiv(a, b)
    return quotient if c is None else mod(quotient, c)


def _bounds(r: Any) -> tuple[int, int | None]:
    """(lo, hi) of a ValueRanges; what is not an int64 is unbounded."""
    if r is None:
        return 0, None
    lo = int(r.lower) if getattr(r.lower, "is_Integer", False) else -_HUGE
    hi = int(r.upper) if getattr(r.upper, "is_Integer", False) and int(r.upper) < _HUGE else None
    return lo, hi


def _hint(s: Any, env: Any) -> int | None:
    name = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"  # renamed after torch 2.11
    table = getattr(env, name, None) or {}
    value = table.get(s)
    return int(value) if value is not None and getattr(value, "is_Integer", False) else None
