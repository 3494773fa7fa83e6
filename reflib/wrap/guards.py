"""Conditions on sizes that torch.export assumed and does not check: every call of the graph must meet them.

``guards_of`` reads them from the exported program. ``checked`` adds them, and the ranges of sizes, to the compiled
program as checks, so every wrapper tests them: Python, C++, a package's, and an exported C++ program's.
"""

import contextlib
from dataclasses import replace
from typing import Any

import sympy
import torch

from ..capture.exported import ranges_of
from ..errors import ReflibError
from ..ir.expr import Expr, Sym, expr, nonneg
from ..ir.program import Assume, Program
from ..lower.rules import Unsupported
from ..lower.symbols import Symbols
from .convention import Convention, Guard, Source, expect_told, sources


def guards_of(exported: Any) -> tuple[Guard, ...]:
    """What torch.export assumed of sizes by taking a branch (``if x.shape[0] > y.shape[0]``), beyond their ranges. Only
    of the arguments' sizes: the graph itself asserts what depends on data.

    Raises ReflibError for a condition that is not made of sums, products, quotients and comparisons.
    """
    sizes = [s for n in exported.graph.nodes if n.op == "placeholder" for s in _symbolic(n.meta.get("val"))]
    if not sizes:
        return ()
    env, known = sizes[0].node.shape_env, set().union(*(s.node.expr.free_symbols for s in sizes))
    symbols = Symbols(ranges_of(exported))
    out: dict[Guard, None] = {}
    for g in env.guards:
        for e in g.expr.args if isinstance(g.expr, sympy.And) else (g.expr,):
            if e.free_symbols and e.free_symbols <= known:
                guard = _guard(e, symbols, env)
                if not _always(guard):
                    out[guard] = None
    return tuple(out)


def _always(g: Guard) -> bool:
    """Does it hold for all sizes within their ranges?"""
    if g.what.constant is not None:
        return g.holds({})
    return g.kind == "at_least" and nonneg(g.what)


def _symbolic(val: Any) -> list[Any]:
    sizes = (*val.shape, *val.stride()) if isinstance(val, torch.Tensor) and val.layout is torch.strided else (val,)
    return [s for s in sizes if isinstance(s, torch.SymInt) and s.node.expr.free_symbols]


_RELATIONS = {
    sympy.GreaterThan: ("at_least", lambda a, b: a - b), sympy.StrictGreaterThan: ("at_least", lambda a, b: a - b - 1),
    sympy.LessThan: ("at_least", lambda a, b: b - a), sympy.StrictLessThan: ("at_least", lambda a, b: b - a - 1),
    sympy.Equality: ("equal", lambda a, b: a - b), sympy.Unequality: ("differs", lambda a, b: a - b),
}  # fmt: skip


def _guard(e: Any, symbols: Symbols, env: Any) -> Guard:
    if type(e) in _RELATIONS:
        kind, difference = _RELATIONS[type(e)]
        with contextlib.suppress(Unsupported):
            return Guard(kind, difference(*(symbols.from_sympy(a, env) for a in e.args)), str(e))
    raise ReflibError(f"it was exported where {e} holds of its sizes, which cannot be checked when it is called")


# -- as checks of the program ------------------------------------------------------------------------------
def checked(program: Program, c: Convention) -> Program:
    """``program`` with checks: of the ranges of sizes and ints, and of the guards.

    Raises ReflibError if a guard or a size has a symbol that no argument determines.
    """
    known = sources(c.arguments)
    told = {s.symbol for s in known}
    for a in c.arguments:
        for e in a.tensor.shape if a.tensor is not None else ():
            expect_told(e, told, f"the size {e} of argument {a.name}")
    for g in c.guards:
        expect_told(g.what, told, f"it was exported where {g.text} holds of its sizes, which")
    within = [_within(s, *_limits_of(s, known, program, c)) for s in known]
    return replace(program, checks=(*(w for w in within if w[0]), *(((g.fact,), g.text) for g in c.guards)))


def _limits_of(s: Source, known: tuple[Source, ...], program: Program, c: Convention) -> tuple[int, int | None, str]:
    """The symbol's range, and a note. An int argument can be anything, so it is limited such that 64 bits hold the
    sizes computed from it, what is checked of it and what is returned."""
    least, most = c.ranges.get(s.symbol.name, (-(2**63), None))
    if s.what != "value":
        return least, most, ""
    ints = {o.symbol for o in known if o.what == "value"}
    sizes = [e for b in program.buffers.values() for e in (*b.shape, *b.strides)]
    others = [g.what for g in c.guards] + [e for e in program.outputs if isinstance(e, Expr) and e != expr(s.symbol)]
    bits = [min(48, _bits(e, ints)) for e in sizes if s.symbol in e.symbols()]
    bits += [_bits(e, ints) for e in others if s.symbol in e.symbols()]
    large = 2 ** min(bits, default=63)
    if least >= -large and (most if most is not None else 2**63 - 1) <= large:
        return least, most, ""
    note = f", so that 64 bits hold what is made of argument {c.arguments[s.argument].name},"
    return max(least, -large), large if most is None else min(most, large), note


def _bits(e: Expr, ints: set[Sym]) -> int:
    """How many bits each of ``ints`` may have so that 64 hold ``e``. (The sizes in a product belong to one tensor in
    memory: 31 bits for all of them.)"""
    out, terms = [62], (len(e.terms) - 1).bit_length()
    for atoms, factor in e.terms:
        symbols = [expr(atom).symbols() for atom in atoms]
        if count := sum(len(some & ints) for some in symbols):
            room = 62 - terms - (abs(factor) - 1).bit_length() - 31 * any(some - ints for some in symbols)
            out.append(max(room, 0) // count)
    return min(out)


def _within(s: Source, least: int, most: int | None, note: str) -> tuple[tuple[Assume, ...], str]:
    """The range as facts. (A size is never below zero; an int may be.)"""
    size = expr(s.symbol)
    low = least > (0 if s.what == "size" and s.times > 0 and s.plus <= 0 else -(2**63))
    facts = [Assume("at_least", size, least)] if low else []
    facts += [Assume("at_most", size, most)] if most is not None else []
    low_end, high_end = f"{least} <= " if low else "", "" if most is None else f" <= {most}"
    return tuple(facts), f"{low_end}{s.symbol.name}{high_end}{note}"
