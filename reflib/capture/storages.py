"""What a captured graph knows of storages: which tensors are views of one, and from where in it elements are counted.

``as_strided`` may count from the begin of its operand's storage. What an argument is a view of is first known at the
call, so the argument must then be as far from there as at capture.
"""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def reaches_beyond(view: Any, base: Any) -> bool:
    """Has ``view`` elements in the storage of ``base`` that are not in ``base``, or is that not known?"""
    if storage_of(view) is None or storage_of(view) != storage_of(base):
        return False  # (the base was given another one since)
    (start, end), (low, high) = _bytes(view), _bytes(base)
    return start < end and (start < low or end > high or not _among(view, base))


def storage_of(x: Any) -> int | None:
    """A tensor's, as a number; None of what has none of its own."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or is_traceable_wrapper_subclass(x):
        return None
    return x.untyped_storage()._cdata


def _bytes(t: torch.Tensor) -> tuple[int, int]:
    """Where in its storage it begins and ends; of sizes that may change, as they are now."""
    shape, strides, start = ([_now(n) for n in ns] for ns in (t.shape, t.stride(), [t.storage_offset()]))
    last = sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else -1
    return start[0] * t.element_size(), (start[0] + last + 1) * t.element_size()


def _among(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Is what lies between elements of ``base`` no element of ``view``? Both are tensors of one storage and extent.

    Counted in the strides of ``base`` as in a number's digits: a stride of ``view`` is a multiple of one of them, and
    what is added to a digit does not carry."""
    dims = sorted(((_now(s), _now(n) - 1) for n, s in zip(base.shape, base.stride()) if s != 0), reverse=True)
    if sum(s * last for s, last in dims) + 1 == math.prod(last + 1 for _, last in dims):
        return True  # (nothing lies between them)
    if view.element_size() != base.element_size():
        return False
    left, room = _now(view.storage_offset()) - _now(base.storage_offset()), {}
    for s, last in dims:
        digit = min(left // s, last)
        left, room[s] = left - digit * s, last - digit
    for n, step in ((_now(n), _now(s)) for n, s in zip(view.shape, view.stride()) if n != 1):
        on = next((s for s in room if step % s == 0 and (n - 1) * step // s <= room[s]), None)
        if on is None:
            return False
        room[on] -= (n - 1) * step // on
    return left == 0


def _now(n: Any) -> int:
    return (n.node.hint or 0) if isinstance(n, torch.SymInt) else n


# -- in a graph, of Dynamo's or of torch.export's ------------------------------------------------------------------
def value(node: Any) -> Any:
    """A fake tensor, a symbolic number, or what ``node`` is if it is no node."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, torch.fx.Node) else node


def strided(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The calls of ``as_strided``, also of the graphs in it."""
    graphs = [m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule)]
    return [n for g in graphs for n in g.nodes if n.op.startswith("call") and "as_strided" in str(n.target)]


def root(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor that ``node`` is a view of, through others."""
    found, storage = node, storage_of(value(node))
    while (of := _operand(node)) is not None:
        node = of
        if (there := storage_of(value(node))) is not None:  # (else one of several, as of a split)
            if there != storage:
                break
            found = node
    return found


def _operand(node: torch.fx.Node) -> torch.fx.Node | None:
    """Its first one, which may be given by name."""
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return first if isinstance(first, torch.fx.Node) else None


def counted_from(module: torch.fx.GraphModule) -> list[int]:
    """The inputs, tensors, from the begin of whose storage elements are counted. Those of a graph in this one may be
    any."""
    counting = list(filter(_counts, strided(module)))
    roots = {root(of) for n in counting if (of := _operand(n)) is not None}
    inside = any(n.graph is not module.graph for n in counting)
    given = enumerate(n for n in module.graph.nodes if n.op == "placeholder")
    return [i for i, n in given if storage_of(value(n)) is not None and (inside or n in roots)]


def _counts(node: torch.fx.Node) -> bool:
    at = 4 if "scatter" in str(node.target) else 3
    return node.kwargs.get("storage_offset", node.args[at] if len(node.args) > at else None) is not None
