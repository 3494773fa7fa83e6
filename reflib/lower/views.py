"""View ops: another reading of the same storage, so no node at all.

Every view's sizes and strides are in its fake tensor, and so is how far its first element lies from its base's.
One rule serves them all: view, permute, expand, slice, select, squeeze, unfold, diagonal, as_strided, split ...
"""

from __future__ import annotations

from typing import Any

import torch

from reflib.ir.program import View

from .context import Context
from .rules import RULES, Unsupported, rule

aten = torch.ops.aten

# Views that reinterpret the element type. Made by copying: no kernel of ours reads one dtype as another.
REINTERPRET = {
    aten.view.dtype: aten.view_copy.dtype,
    aten.view_as_real.default: aten.view_as_real_copy.default,
    aten.view_as_complex.default: aten.view_as_complex_copy.default,
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


def is_view_op(op: Any) -> bool:
    """Does the schema say that the result aliases an argument, which is not written to?"""
    if (
        not isinstance(op, torch._ops.OpOverload)
        or op.namespace not in ("aten", "prims")
        or op in REINTERPRET
    ):
        return False
    if op is aten._unsafe_view.default:
        return True
    returns = [r.alias_info for r in op._schema.returns]
    return bool(returns) and all(r is not None and not r.is_write for r in returns)


def view(cx: Context, base: View, *_: Any, **__: Any) -> Any:
    """The rule of all view ops. If eager would copy here (a reshape that cannot be a view), so do we."""
    node = cx.node.args[0] if cx.node.args else cx.node.kwargs["self"]
    if not isinstance(node, torch.fx.Node):
        raise Unsupported("a view of no tensor in the graph")
    source = node.meta["val"]
    fakes = cx.fakes
    if any(f.layout != torch.strided for f in (source, *fakes)):
        raise Unsupported("sparse layout")
    if any(not same_storage(f, source) for f in fakes):
        return RULES[aten.clone.default](cx, base)
    flat, spec = torch.utils._pytree.tree_flatten(cx.fake)
    return torch.utils._pytree.tree_unflatten([alias(cx, base, source, f) for f in flat], spec)


def alias(cx: Context, base: View, source: torch.Tensor, fake: torch.Tensor) -> View:
    """``base``, seen as ``fake`` sees the storage of ``source``."""
    if fake.dtype != base.dtype:
        raise Unsupported(f"a view of {base.dtype} as {fake.dtype}")
    s = cx.low.symbols
    moved = fake.storage_offset() - source.storage_offset()
    return View(
        base.buffer, s.exprs(fake.shape), s.exprs(fake.stride()), base.offset + s.expr(moved), base.dtype
    )


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


@rule("alias_copy", "view_copy.default", "expand_copy", "permute_copy", "slice_copy", "select_copy")
def unused_copy(cx: Context, base: View, *_: Any, **__: Any) -> Any:
    raise Unsupported("a copying view")
