"""Which overload of an op writes its results into given memory: so that ``plan`` chooses their storage, and
``fuse.into_place`` may choose a part of a larger buffer.

Found by schema: the same arguments, then one that is written to per result (``topk.values`` of ``topk``), which is a
list where the result is one. Of PyTorch's own ops only those count that have a kernel for it on the device: the others
are generated, compute new tensors and copy them. An op of the user's says so itself (``torch.Tag.out``), or by the name
that PyTorch's have, ``out`` or ``..._out``. A tagged one that fits no other overload is an error, and that the op
returns what it was given is checked at each call.

Not for results that are unused or whose sizes only the call tells, or random ops.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ..c_shims import op_of
from ..errors import LoweringError
from ..ir.out_lists import item
from .context import LoweringContext, contiguous_strides
from .extern import OUT_VARIANTS, used_results

TAG = getattr(torch.Tag, "out", None)  # (torch 2.11 has no such tag)
LIST = "List[Tensor]"
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_UNCHECKED = (torch.ops.aten.max.default, torch.ops.aten.min.default)  # of nothing: an error, but of ``unary_out`` -inf


def out_variant(cx: LoweringContext, target: Any, fakes: list[Any]) -> tuple[Any, tuple[str, ...]] | None:
    """(the overload, its arguments for the results), or None."""
    if not isinstance(target, torch._ops.OpOverload) or not fakes:
        return None
    if not all(isinstance(f, torch.Tensor) and f.layout is torch.strided and f.device.type in _KEYS for f in fakes):
        return None
    op = overload(target, fakes[0].device.type)
    whole = len(used_results(cx, fakes)) == len(fakes)  # (an unused one may not be as its meta function says)
    if op is None or not whole or any(_unknown(cx, f) for f in fakes) or _has_function(cx, target):
        return None
    names, s = tuple(_names(op, cx.fake, len(fakes))), cx.low.symbols
    plain = all(s.exprs(f.stride()) == contiguous_strides(s.exprs(f.shape)) for f in fakes)
    return (op, names) if len(names) == len(fakes) and (plain or op is target or any_strides(target, op)) else None


def _names(op: torch._ops.OpOverload, fake: Any, results: int) -> Iterator[str]:
    """Per result, the argument, or the item of one, for it."""
    made = [a for a in op._schema.arguments if a.is_out]
    whole = [fake] if len(made) == 1 else fake
    for a, f in zip(made, whole if isinstance(whole, (list, tuple)) else ()):
        if str(a.type) == LIST and isinstance(f, (list, tuple)):
            yield from (item(a.name, i) for i in range(len(f)))
        else:
            yield a.name


def any_strides(target: Any, out: Any) -> bool:
    """Does the overload write to tensors of any strides? Not all that take them do: ``_softmax.out`` does not look."""
    return out in OUT_VARIANTS.values() or torch.Tag.pointwise in target.tags


def _unknown(cx: LoweringContext, fake: torch.Tensor) -> bool:
    """Does only the call tell one of its sizes?"""
    sizes = [n for n in (*fake.shape, *fake.stride()) if isinstance(n, torch.SymInt)]
    return any(str(x).startswith("u") for n in sizes for x in n.node.expr.free_symbols) or any(
        not cx.low.symbols.expressible(n) for n in sizes
    )


def _has_function(cx: LoweringContext, target: Any) -> bool:
    """Did the user declare a C function for it? It returns new tensors."""
    return any(op_of(name) is target for name, _ in cx.low.options.c_shims)


def overload(op: torch._ops.OpOverload, device: str) -> torch._ops.OpOverload | None:
    """``topk.values`` for ``topk.default``; ``op`` itself, if it is such a one."""
    # (the packet's own list is of the overloads that there were at its first use)
    return _overload(op, device, tuple(torch._C._jit_get_operation(op._schema.name)[1]))


@functools.cache
def _overload(op: torch._ops.OpOverload, device: str, names: tuple[str, ...]) -> torch._ops.OpOverload | None:
    schema, own = op._schema, op.namespace != "aten"
    if torch.Tag.nondeterministic_seeded in op.tags or any(str(r.type) not in ("Tensor", LIST) for r in schema.returns):
        return None
    if own and TAG in op.tags:
        return op
    if op in _UNCHECKED or schema.is_mutable or any(r.alias_info is not None for r in schema.returns):
        return None
    packet = getattr(getattr(torch.ops, op.namespace), schema.name.partition("::")[2])
    found = [getattr(packet, name or "default") for name in names]
    writing = [c for c in found if (TAG in c.tags or _by_name(c, device) if own else _writes_itself(c, device))]
    for candidate in writing:
        if _takes(candidate._schema, schema):
            return candidate
    for candidate in writing if own else ():
        if TAG in candidate.tags and not any(_takes(candidate._schema, other._schema) for other in found):
            raise LoweringError(
                f"{candidate}: it is tagged torch.Tag.out and fits no other overload: {candidate._schema} must take "
                f"the arguments of {schema}, then memory for each of its results"
            )
    return None


def _writes_itself(op: torch._ops.OpOverload, device: str) -> bool:
    known = any(a.is_out for a in op._schema.arguments)  # (TorchScript's own overloads are none of the dispatcher's)
    return known and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _KEYS[device])


def _by_name(op: torch._ops.OpOverload, device: str) -> bool:
    """Does an op of the user's look like an out variant, without the tag?"""
    name, schema = op._schema.overload_name, op._schema
    made, returns = [a for a in schema.arguments if a.is_out], schema.returns
    given = len(returns) in (0, len(made)) and all(map(_is_returned, made, returns))
    there = torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), _KEYS[device])
    return (name == "out" or name.endswith("_out")) and given and there


def _is_returned(a: Any, r: Any) -> bool:
    """(The schema of a list does not tell its alias set.)"""
    known = r.alias_info is not None and r.alias_info.is_write
    return known and r.alias_info.before_set == a.alias_info.before_set


def _takes(out: Any, functional: Any) -> bool:
    """The same arguments, and memory for each result?"""
    plain = [(a.name, str(a.type)) for a in out.arguments if not a.is_out]
    made = [str(a.type) for a in out.arguments if a.is_out]
    same = plain == [(a.name, str(a.type)) for a in functional.arguments]
    return same and made == [str(r.type) for r in functional.returns] and bool(made)
