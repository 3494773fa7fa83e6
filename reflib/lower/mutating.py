"""Custom ops that write to their arguments, which PyTorch made functional (``auto_functionalized_v2``).

Each tensor that is written to is copied, and the op, a call, is given the copies. ``fuse.in_place`` drops a copy whose
original is not needed any more: the op then writes to what the user gave it. What an op with ``torch.Tag.out`` writes
to it does not read: nothing is copied, and ``plan`` allocates it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import (
    auto_functionalized_v2,
    get_mutable_args,
    read_view_information_from_args,
)

from ..ir.program import View, full_view
from .body import nest
from .context import LoweringContext
from .extern import extern
from .out_variants import TAG
from .rules import RULES, Unsupported


def functionalized(cx: LoweringContext, op: Any, **kwargs: Any) -> tuple[Any, ...]:
    """(what the op returns, each base's new value). An argument, or an item of one, is a view of one of the bases."""
    if not isinstance(op, torch._ops.OpOverload):
        raise Unsupported("no op of PyTorch's")
    names, types = get_mutable_args(op)
    if TAG in op.tags:
        made = {f"_{n}_{what}" for n in names for what in ("size", "stride", "dtype", "device")}
        given = {k: v for k, v in kwargs.items() if k not in made and k != "_all_bases"}
        return extern(cx, op, (), given, "custom op")
    fakes = dict(torch.fx.node.map_arg(dict(cx.node.kwargs), _fake))
    bases = list(fakes["_all_bases"])
    views = read_view_information_from_args(names, types, fakes, bases)
    new = [_copy(cx, v, b) for v, b in zip(kwargs["_all_bases"], bases, strict=True)]

    def viewed(info: Any) -> Any:
        if isinstance(info, list):
            return [viewed(item) for item in info]
        return None if info is None else _viewed(cx, new[info.base_index], bases[info.base_index], info, bases)

    given = {k: v for k, v in kwargs.items() if k in fakes and k != "_all_bases"}
    given |= {name: viewed(info) for name, info in views.items()}
    return (*_called(cx, op, given, len(new)), *new)


def _fake(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, torch.fx.Node) else node


def _copy(cx: LoweringContext, v: View, fake: torch.Tensor) -> View:
    new = full_view(cx.low.new_buffer(cx.low.unique(cx.name), fake))
    return nest(cx, lambda k: k.load(v), new)


def _viewed(cx: LoweringContext, new: View, base: torch.Tensor, info: Any, bases: list[torch.Tensor]) -> View:
    t = info.regenerate_view(bases)
    (offset,) = cx.low.symbols.exprs([t.storage_offset() - base.storage_offset()])
    return View(new.buffer, cx.low.symbols.exprs(t.shape), cx.low.symbols.exprs(t.stride()), offset, t.dtype)


def _called(cx: LoweringContext, op: Any, kwargs: dict[str, Any], written: int) -> tuple[Any, ...]:
    fakes = cx.fake[: len(cx.fake) - written]
    inner = replace(cx, fake=fakes[0] if len(fakes) == 1 else fakes)
    value = extern(inner, op, (), kwargs, "custom op")
    return (value,) if len(fakes) == 1 else tuple(value)


RULES[auto_functionalized_v2] = functionalized
