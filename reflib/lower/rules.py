"""The registry of lowering rules, and the exception a rule raises for a case it does not cover.

A rule is a function ``rule(cx, *args, **kwargs) -> value`` whose parameters are those of the op's schema, in order.
``cx`` is the :class:`~reflib.lower.context.LoweringContext` of the node being lowered. Tensors arrive as
:class:`~reflib.ir.program.View`, symbolic integers as :class:`~reflib.ir.expr.Expr`, all else as it is in the graph.
It emits nodes through ``cx`` and returns a View (or an Expr, or a list of these).
"""

from collections.abc import Callable
from typing import Any

import torch

from reflib.seams import Seam

# Modules of further rules, imported with the stage; none: ops without a rule are calls of ATen.
MODULES = Seam("lower.MODULES")
# (cx, target, args, kwargs, usual) -> the value of a call; ``usual()`` lowers it by its rule. The first one is used;
# none: ``usual()``.
CALLS = Seam("lower.CALLS")
OUTPUTS = Seam("lower.OUTPUTS")  # (Lowering, Graph, the program's outputs) -> those to be used instead
# () -> names: further ops that stay whole when a model is captured.
WHOLE = Seam("lower.WHOLE")
# (NestBuilder, View) -> Value: "argument", one number of the CPU's read on a GPU. None: its readers become calls.
NUMBER = Seam("lower.NUMBER")
# For "eager" numerics. "rule": (cx, target, usual rule or None) -> the one to use. "parts": of decompositions.
LIKE_EAGER = Seam("lower.LIKE_EAGER")
# (table of decompositions) -> those to be used instead; none: torch's
PARTS = Seam("lower.PARTS")


class Unsupported(Exception):
    """Raised by a rule for a case it does not cover: the op becomes an Extern call, with this text as the reason."""


RULES: dict[Any, Callable[..., Any]] = {}


def overloads(*names: str) -> list[Any]:
    """``"add.Tensor"`` is ``torch.ops.aten.add.Tensor``; ``"add"`` is every overload of it that returns new tensors.
    Names this version of torch does not have are left out."""
    out: list[Any] = []
    for name in names:
        namespace, _, rest = name.rpartition("::")
        packet_name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace or "aten"), packet_name, None)
        if packet is None:
            continue
        for o in [overload] if overload else packet.overloads():
            op = getattr(packet, o, None)
            if op is not None and (overload or not (op._schema.is_mutable or o.endswith("out"))):
                out.append(op)
    return out


def rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for the named ops (see :func:`overloads`)."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            found = overloads(name)
            for op in found:
                RULES[op] = fn
            if not found and "::" in name:  # an op that a part of torch not yet imported will define
                RULES[name.replace("::", ".") + ".default"] = fn
        return fn

    return register


def rule_of(target: Any) -> Callable[..., Any] | None:
    """The rule for an op, or None."""
    return RULES.get(target) or RULES.get(str(target))
