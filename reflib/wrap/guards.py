"""What torch.export found out about sizes, and did not check: conditions that every call of the graph must meet."""

from __future__ import annotations

import contextlib
from typing import Any

import sympy
import torch

from ..errors import ReflibError
from ..ir.expr import nonneg
from ..lower.rules import Unsupported
from ..lower.symbols import Symbols
from .convention import Guard


def guards_of(exported: Any) -> tuple[Guard, ...]:
    """What torch.export found out about sizes by taking one way and not another (``if x.shape[0] > y.shape[0]``),
    beyond their ranges. Of the arguments' sizes only: what depends on data the graph asserts itself.

    Raises ReflibError for one that is not made of sums, products, quotients and comparisons.
    """
    sizes = [s for n in exported.graph.nodes if n.op == "placeholder" for s in _symbolic(n.meta.get("val"))]
    if not sizes:
        return ()
    env, known = sizes[0].node.shape_env, set().union(*(s.node.expr.free_symbols for s in sizes))
    symbols = Symbols()
    out: dict[Guard, None] = {}
    for g in env.guards:
        for e in g.expr.args if isinstance(g.expr, sympy.And) else (g.expr,):
            if e.free_symbols and e.free_symbols <= known:
                guard = _guard(e, symbols, env)
                if guard.kind != "at_least" or not nonneg(guard.what):
                    out[guard] = None
    return tuple(out)


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
