"""View ops: another reading of the same storage, so no node at all.

Every view's sizes and strides are in its fake tensor, and so is how far its first element lies from its base's.
One rule serves them all: view, permute, expand, slice, select, squeeze, unfold, diagonal, as_strided, split ...
(``as_strided`` with an offset in a storage: ``strided``.)
"""

from typing import Any

import torch

from reflib.ir.program import View

from .body import nest
from .context import LoweringContext, unflatten
from .rules import RULES, Unsupported

aten = torch.ops.aten

# Views that reinterpret the element type. Made by copying: no kernel of ours reads one dtype as another.
REINTERPRET = {
    aten.view.dtype: aten.view_copy.dtype,
    aten.view_as_real.default: aten.view_as_real_copy.default,
    aten.view_as_complex.default: aten.view_as_complex_copy.default,
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten._neg_view_copy.default,
}


# Ops whose schema says view, and which copy when eager has to.
MAY_COPY = {"reshape", "reshape_as", "contiguous", "to", "flatten", "ravel", "resolve_conj", "resolve_neg"}


def _name(op: Any) -> str:
    return op._schema.name.partition("::")[2]


def is_view_op(op: Any) -> bool:
    """Does the schema say that the result aliases an argument, which is not written to?"""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims") or op in REINTERPRET:
        return False
    if _name(op) in ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"):  # their schemas do not say it
        return True
    returns = [r.alias_info for r in op._schema.returns]
    return bool(returns) and all(r is not None and not r.is_write for r in returns)


def view(cx: LoweringContext, base: View, *_: Any, **__: Any) -> Any:
    """The rule of all view ops. If eager would copy here (a reshape that cannot be a view), so do we."""
    node = cx.node.args[0] if cx.node.args else cx.node.kwargs["self"]
    if not isinstance(node, torch.fx.Node):
        raise Unsupported("a view of no tensor in the graph")
    source, fakes = node.meta["val"], cx.fakes
    if any(f.layout != torch.strided for f in (source, *fakes)):
        raise Unsupported("sparse layout")
    if _name(cx.node.target) in MAY_COPY and fakes[0].untyped_storage()._cdata != source.untyped_storage()._cdata:
        return copied(cx, base)
    flat, spec = torch.utils._pytree.tree_flatten(cx.fake)
    return torch.utils._pytree.tree_unflatten([alias(cx, base, source, f) for f in flat], spec)


def alias(cx: LoweringContext, base: View, source: torch.Tensor, fake: torch.Tensor) -> View:
    """``base``, seen as ``fake`` sees the storage of ``source``."""
    if fake.dtype != base.dtype:
        raise Unsupported(f"a view of {base.dtype} as {fake.dtype}")
    s = cx.low.symbols
    shape, strides = s.exprs(fake.shape), s.exprs(fake.stride())
    moved = s.expr(fake.storage_offset() - source.storage_offset())
    if not s.all_bound(*shape, *strides, moved):
        raise Unsupported("a view at a place known only to torch")
    return View(base.buffer, shape, strides, base.offset + moved, base.dtype)


def copying(op: Any) -> Any:
    """The variant of a view op that copies, for a view that has to be a call: calls return new storage."""
    if not is_view_op(op):
        return op
    packet = getattr(aten, _name(op) + "_copy", None)
    return getattr(packet, op._overloadname, op)


def copied(cx: LoweringContext, base: View) -> View:
    """A copy in the output's shape, element by element in row-major order."""
    if cx.shape == base.shape:
        return RULES[aten.clone.default](cx, base)
    return nest(cx, lambda k: k.load(base, unflatten(k.linear(range(len(k.shape))), base.shape)))
