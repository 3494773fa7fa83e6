"""Updates of a few elements at positions held in tensors: a key-value cache and its new row.

Captured graphs are functional: ``cache.index_copy_(2, position, k)`` is ``new = index_copy(cache, 2, position, k)``,
and ``copy_(cache, new)`` at the end. Such an op is lowered as two loop nests: all of ``cache`` copied to ``new``, then
the new values stored at their positions, which fuses with what computes them. ``fuse.in_place`` drops the copies.

Only where that may be possible: else ATen's own op, a copy and a kernel as well, stays.

With several values for one element any of them is stored, as eager says of itself; where the user wants it
deterministic, ATen is called. A negative position counts from the end, where eager's index_copy and scatter raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reflib.ir.expr import Expr, expr
from reflib.ir.program import View

from .body import NestBuilder, Value, fit
from .context import LoweringContext
from .rules import Unsupported, overloads, rule

aten = torch.ops.aten
UPDATES = frozenset(overloads("index_copy", "index_put", "_unsafe_index_put", "scatter"))


def reaches_input(node: torch.fx.Node) -> bool:
    """Is the result, perhaps updated again, copied onto an input in the end?"""
    todo, seen = [node], {node}
    while todo:
        n = todo.pop()
        for user in n.users:
            if user.target is aten.copy_.default and user.args[1] is n:
                return True
            if user.target in UPDATES and user.args[0] is n and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def _may_be_in_place(node: torch.fx.Node) -> bool:
    first = node.args[0]
    assert isinstance(first, torch.fx.Node)
    alone = first.op == "call_function" and len(first.users) == 1
    return not torch.are_deterministic_algorithms_enabled() and (alone or reaches_input(node))


def updated(
    cx: LoweringContext, x: View, shape: Sequence[Any], place: Callable[[NestBuilder], list[Expr]], new: Any
) -> View:
    """``x`` with ``new`` (a view of ``shape``, or a number) at ``place`` of each of its elements."""
    if not _may_be_in_place(cx.node):
        raise Unsupported("library call")
    out = cx.out()
    whole = NestBuilder(cx, out.shape)
    whole.store(out, whole.load(x))
    whole.finish()
    k = NestBuilder(cx, shape)
    value: Value | Any = k.load(new) if isinstance(new, View) else fit(new, out.dtype)
    k.store(out, value, place(k))
    k.finish()
    return out


@rule("index_copy.default")
def index_copy(cx: LoweringContext, x: View, dim: int, index: View, source: View) -> View:
    if not x.shape or not source.shape:
        raise Unsupported("library call")
    d = dim % len(x.shape)

    def place(k: NestBuilder) -> list[Expr]:
        at = k.indirect(k.load(index, [k.coords[d]][: len(index.shape)]), x.shape[d])
        return [at if i == d else c for i, c in enumerate(k.coords)]

    return updated(cx, x, source.shape, place, source)


def index_put(cx: LoweringContext, x: View, indices: Sequence[View | None], values: View) -> View:
    """Without accumulation. The positions' own dimensions stand where the first of them is, or in front."""
    used = [d for d, i in enumerate(indices) if i is not None]
    tables = [i for i in indices if i is not None]
    if not used or any(i.dtype not in (torch.int32, torch.int64) for i in tables):
        raise Unsupported("library call")
    common = _broadcast([i.shape for i in tables])
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    others = [x.shape[d] for d in range(len(x.shape)) if d not in used]
    shape = [*others[:first], *common, *others[first:]]

    def place(k: NestBuilder) -> list[Expr]:
        own = k.coords[first : first + len(common)]
        rest = iter(k.coords[:first] + k.coords[first + len(common) :])
        out = []
        for d, size in enumerate(x.shape):
            i = indices[d] if d < len(indices) else None
            out.append(next(rest) if i is None else k.indirect(k.load(i, own), size))
        return out

    return updated(cx, x, shape, place, values)


def scatter(cx: LoweringContext, x: View, dim: int, index: View, new: Any) -> View:
    """Several positions per row."""
    if not x.shape or len(index.shape) != len(x.shape):
        raise Unsupported("library call")
    d = dim % len(x.shape)

    def place(k: NestBuilder) -> list[Expr]:
        at = k.indirect(k.load(index, k.coords), x.shape[d])
        return [at if i == d else c for i, c in enumerate(k.coords)]

    if isinstance(new, View):  # its first elements, as many as there are positions
        new = View(new.buffer, index.shape, new.strides, new.offset, new.dtype)
    return updated(cx, x, index.shape, place, new)


def _broadcast(shapes: Sequence[Sequence[Expr]]) -> list[Expr]:
    out: list[Expr] = []
    for d in range(1, max(map(len, shapes)) + 1):
        sizes = {s[-d] for s in shapes if len(s) >= d}
        wide = [s for s in sizes if s != 1]
        if len(wide) > 1:
            raise Unsupported("library call")
        out.insert(0, wide[0] if wide else expr(1))
    return out
