"""Sizes that depend on data, of which the program has found out what they must be.

``torch._check(y.shape[0] == 3)``, for a ``y`` whose size depends on data, makes PyTorch put 3 for the size everywhere:
in the results of the very op that finds it out, and in the assertion, which is then ``True``. Here the op's result gets
a size of its own again, which is compared with what it must be, and all that comes later sees a view of that size::

    y = nonzero(x)  # of u0 rows, not 3
    _assert_scalar(sym_size(y, 0) == 3, ...)
    checked = as_strided(y, [3, 1], [1, 3])
"""

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import CallMethodKey, free_unbacked_symbols
from torch.utils import _pytree as pytree

from ..options import Options
from .copies import copied

aten = torch.ops.aten


def check_sizes(module: torch.fx.GraphModule, options: Options, gpu: bool) -> torch.fx.GraphModule:
    """Plugs into ``pipeline.REWRITES``. Another module, if anything in it has to be checked."""
    if not any(_found_out(n) for n in module.graph.nodes):
        return module
    module = copied(module)
    for node in list(module.graph.nodes):
        for place in _found_out(node):
            _check(node, *place)
    module.recompile()
    return module


def _found_out(node: Node) -> list[tuple[Any, ...]]:
    """Where the result of ``node`` has numbers that only it can tell, though the graph has others there: (), or (the
    dimension,) of a tensor, after the number of one of several results."""
    places: dict[tuple[Any, ...], None] = {}
    env = _env(node)
    for symbol, path in (node.meta.get("unbacked_bindings") or {}).items():
        known = symbol if env is None else env.replacements.get(symbol, symbol)
        if not free_unbacked_symbols(known):  # (nor is it the same symbol by another name)
            output = [k.idx for k in path[:1] if isinstance(k, pytree.SequenceKey)]
            match path[len(output) :]:
                case ():
                    places[(*output,)] = None
                case (CallMethodKey(name="size"), pytree.SequenceKey(idx=dim), *_):
                    places[(*output, dim)] = None
    return list(places)


def _env(node: Node) -> Any:
    """The ShapeEnv of its values."""
    for v in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(v, torch.SymInt):
            return v.node.shape_env
        if isinstance(v, torch.Tensor) and hasattr(v, "fake_mode"):
            return v.fake_mode.shape_env
    return None


def _check(node: Node, *place: int) -> None:
    results = node.meta["val"]
    if isinstance(results, (tuple, list)):
        output, *dim = place
        for item in [u for u in node.users if u.target is operator.getitem and u.args[1] == output]:
            _one(item, *dim)
            node.meta["val"] = [item.meta["val"] if i == output else v for i, v in enumerate(node.meta["val"])]
    else:
        _one(node, *place)
    node.meta["unbacked_bindings"] = {}


def _one(node: Node, *dim: int) -> None:
    """The result (its size in ``dim``) becomes a number of its own, which is compared with what the graph has there."""
    old, env = node.meta["val"], _env(node)
    users = list(node.users)
    with env.ignore_fresh_unbacked_symbols():
        new = env.create_unbacked_symint()
    at = number = node
    want = _plain(old.shape[dim[0]] if dim else old)
    if dim:
        sizes = [new if d == dim[0] else n for d, n in enumerate(old.shape)]
        if (made := _of_sizes(old, sizes)) is None:
            return
        node.meta["val"] = made
        at = number = _after(at, aten.sym_size.int, (node, dim[0]), new)
    else:
        node.meta["val"] = new
    at = _after(at, operator.eq, (number, want), new == want)
    text = f"Runtime assertion failed: torch._check says that what {node.target} finds is {want}"
    at = _after(at, aten._assert_scalar.default, (at, text), None)
    if dim:
        given = [number if d == dim[0] else _plain(n) for d, n in enumerate(old.shape)]
        checked = _after(at, aten.as_strided.default, (node, given, list(map(_plain, old.stride()))), old)
    for user in users:
        if dim:
            user.replace_input_with(node, checked)
        elif isinstance(want, int):
            user.args, user.kwargs = torch.fx.map_arg((user.args, user.kwargs), lambda n: want if n is node else n)


def _of_sizes(old: torch.Tensor, sizes: list[Any]) -> torch.Tensor | None:
    """Like ``old``, but of other sizes; None if it is not laid out by rows or, as nonzero's result, by columns."""
    with old.fake_mode:  # type: ignore[attr-defined]
        if old.is_contiguous():
            return torch.empty(sizes, dtype=old.dtype, device=old.device)
        if old.dim() == 2 and old.mT.is_contiguous():
            return torch.empty(sizes[::-1], dtype=old.dtype, device=old.device).mT
    return None


def _plain(n: Any) -> Any:
    """An int, if it is one."""
    known = n.node.maybe_as_int() if isinstance(n, torch.SymInt) else n
    return n if known is None else known


def _after(at: Node, target: Any, args: tuple[Any, ...], val: Any) -> Node:
    with at.graph.inserting_after(at):
        node = at.graph.call_function(target)
    node.args = args  # (at once it would warn of SymInts, which ``lower`` takes)
    node.meta = {"val": val, **{k: at.meta[k] for k in ("stack_trace",) if k in at.meta}}
    return node
