"""Results that eager returns as views of another kind: another dtype, a complex number's parts, conjugated or negated
lazily.

No kernel reads one dtype as another, so inside a graph such a view is a copy (``views.REINTERPRET``). A result of the
graph is read by the caller: it is made by the view op itself, called at the end, and shares its storage with other
results as eager's does. What is saved for a backward stays a copy: the storage seen may be larger. Each result is a
tensor of its own.
"""

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from reflib.capture.graph import Graph
from reflib.ir.program import View, full_view

from .context import LoweringContext
from .extern import extern
from .lower import Lowering, origin
from .views import REINTERPRET, alias, is_view_op

aten = torch.ops.aten
LAZY = {aten._conj.default: torch.Tensor.is_conj, aten._neg_view.default: torch.Tensor.is_neg}


def as_views(low: Lowering, graph: Graph, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The program's outputs, for the graph's results in the same order. (Plugs into ``lower.OUTPUTS``.)"""
    nodes = pytree.tree_leaves(graph.module.graph.output_node().args, is_leaf=lambda x: x is None)
    results, made = nodes[: len(nodes) - graph.saved], dict[Node, View]()

    def seen(node: Node) -> Any:
        """``node``'s value as a view, but for what is lazy about it."""
        source = _source(node)
        if source is None or (base := seen(source)) is low.values[source] and node.target not in REINTERPRET:
            return low.values[node]
        if node not in made:
            made[node] = _view(low, node, source, base)
        return made[node]

    def result(node: Any, value: Any) -> Any:
        if not isinstance(node, Node) or (view := seen(node)) is value:
            return value
        for op, is_so in LAZY.items():
            if is_so(node.meta["val"]):
                view = extern(_context(low, node), op, (view,), {}, "a result that is a view")
        return view

    return _each_its_own(low, results, tuple(map(result, results, outputs))) + outputs[len(results) :]


def _each_its_own(low: Lowering, nodes: list[Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Two results that are all of one tensor (``y, y.view_as(y)``) are two tensors to the caller, who may resize one.
    (Results that are inputs are made anew by AOTAutograd.)"""
    first, out = dict[View, Any](), list(values)
    for i, (node, v) in enumerate(zip(nodes, values)):
        if not isinstance(v, View) or low.buffers[v.buffer].kind != "temp" or v != full_view(low.buffers[v.buffer]):
            continue
        if first.setdefault(v, node) is not node:
            out[i] = extern(_context(low, node), aten.alias.default, (v,), {}, "a result that is a view")
    return tuple(out)


def _source(node: Node) -> Node | None:
    """What ``node``, or the op that it is one of the results of, is a view of."""
    op = node.args[0] if node.target is operator.getitem else node
    if not isinstance(op, Node) or op.op != "call_function" or not op.args or not isinstance(op.args[0], Node):
        return None
    fakes = [n.meta.get("val") for n in (node, op.args[0])]
    if any(not isinstance(f, torch.Tensor) or f.layout != torch.strided for f in fakes):
        return None
    seen, source = fakes
    if op.target in REINTERPRET and op.target not in LAZY:
        return None if source.is_conj() or source.is_neg() else op.args[0]
    one = seen.untyped_storage()._cdata == source.untyped_storage()._cdata
    return op.args[0] if op.target in LAZY or is_view_op(op.target) and one else None


def _view(low: Lowering, node: Node, source: Node, base: View) -> View:
    cx = _context(low, node)
    given = source.op == "placeholder" and node.target in LAZY and LAZY[node.target](source.meta["val"])
    if node.target in LAZY and not given:
        return base  # (an input that is conjugated or negated is no plain memory: the op makes it that)
    if node.target not in REINTERPRET:
        return alias(cx, base, source.meta["val"], node.meta["val"])
    return extern(cx, node.target, (base, *low.arguments(node.args[1:])), {}, "a result that is a view")


def _context(low: Lowering, node: Node) -> LoweringContext:
    return LoweringContext(low, node, node.meta["val"], origin(node), node.name)
