"""Numbers that C++ computes without Python: sizes among the results, comparisons of sizes, assertions of these.

Python's integers do not overflow: where a symbol is so large that C++'s could, Python computes.
"""

from __future__ import annotations

import json
import operator
from typing import TYPE_CHECKING, Any

import torch

from ..ir.expr import BinOp, Expr, Sym, expr
from ..ir.program import Extern

if TYPE_CHECKING:
    from .cpp import CppPrinter

SIGNS = {operator.ge: ">=", operator.gt: ">", operator.le: "<=", operator.lt: "<", operator.eq: "==", operator.ne: "!="}
LIMITS = (2**31, 2**20, 2**15)


def put_size(printer: CppPrinter, i: int, o: Expr) -> None:
    """Result ``i``, which is computed from sizes."""
    if (small := _small(printer, [o])) is None:
        printer.result_in_python(i, o, [], "a size among the results")
        return
    printer.put(f"if ({small}) out[{i}] = integer({printer.size(o)});")
    printer.put("else")
    printer.result_in_python(i, o, [], "")


def compared(printer: CppPrinter, x: Extern, again: list[str]) -> list[str] | None:
    """Lines for a comparison, a ``not``, or an assertion; None for another call. ``again``: the call in Python."""
    if x.target is torch.ops.aten._assert_scalar.default:
        held = expr(x.args[0]).atom
        if not isinstance(held, Sym) or held.name not in printer.numbers:
            return None
        n, kind = printer.name(held.name), printer.name(f"{held.name} kind")
        said = [f"run.step({json.dumps(t)});" for t in x.args[1:2] if isinstance(t, str) and t.isprintable()]
        return [f"if (!{n} || {kind} == VALUE_FLOAT) {{", *("  " + line for line in (*said, *again)), "}"]
    if x.target not in (*SIGNS, operator.not_) or x.kwargs or not all(isinstance(a, (int, Expr, Sym)) for a in x.args):
        return None
    ((sym, _, _),), args = x.symbols, [expr(a) for a in x.args]
    n, kind = printer.name(sym.name), printer.name(f"{sym.name} kind")
    if x.target is operator.not_:
        truth = args[0].atom
        if not isinstance(truth, Sym) or truth.name not in printer.numbers:
            return None
        small, value = f"{printer.name(f'{truth.name} kind')} == VALUE_BOOL", f"!{printer.name(truth.name)}"
    else:
        found = _small(printer, args)
        if found is None or len(args) != 2:
            return None
        small, value = found, f"{printer.size(args[0])} {SIGNS[x.target]} {printer.size(args[1])}"
    line = f"{n} = {value}, {kind} = VALUE_BOOL;"
    return [line] if small == "true" else [f"if ({small}) {{", f"  {line}", "} else {", *("  " + a for a in again), "}"]


def _small(printer: CppPrinter, values: list[Expr]) -> str | None:
    """A condition in C++, by which no step of computing ``values`` overflows; None where there is none."""
    if any(s.name in printer.numbers for e in values for s in e.symbols()):
        return None
    values = [e for e in values if not isinstance(e.atom, Sym)]  # (which is never too large)
    symbols = sorted({s.name for e in values for s in e.symbols()})
    most = next((m for m in LIMITS if all((size := _most(e, m)) is not None and size < 2**63 for e in values)), None)
    if most is None:
        return None
    return " && ".join(f"within({printer.name(s)}, {most})" for s in symbols) or "true"


def _most(e: Expr, limit: int) -> int | None:
    """What ``e`` and all that it is computed from is at most, as all symbols are, without their signs."""
    total = 0
    for atoms, count in e.terms:
        size = abs(count)
        for a in atoms:
            inner = _most_of_atom(a, limit)
            if inner is None:
                return None
            size *= max(inner, 1)
        total += size
    return total


def _most_of_atom(a: Any, limit: int) -> int | None:
    if isinstance(a, Sym):
        return limit
    if not isinstance(a, BinOp) or (a.fn in ("//", "%") and not a.b.constant):
        return None  # a division by zero is Python's to refuse
    inner = [_most(e, limit) for e in (a.a, a.b)]
    return None if None in inner else max(inner)  # type: ignore[type-var]
