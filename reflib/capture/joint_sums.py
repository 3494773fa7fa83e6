"""Sums of sums over the same dimensions: the gradient of a parameter that every step of a loop reads.

Autograd reduces each step's gradient to the parameter's shape, and adds the results. Each of T reductions is a kernel
that reads what its step has made, or computes the steps before it again; one reduction of the steps' sum is one kernel
behind those that make them::

    sum(g0, [0]) + sum(g1, [0]) + ..   =   sum(g0 + g1 + .., [0])

Only of terms between which there is no product and no reduction: there a step's kernel ends, and would store what is
to be added for the next one, of which its own sum is a small part.
The numbers are added in another order, so not with ``numerics="eager"``.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from ..options import Options
from .copies import copied
from .slice_sums import added, call, is_sum, is_term, once, sizes, terms, val

aten = torch.ops.aten
_REDUCTIONS = frozenset(
    "sum mean amax amin max min prod any all var var_mean std std_mean argmax argmin logsumexp linalg_vector_norm"
    " cumsum _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm"
    " native_group_norm".split()
)
_WIDE = {torch.float32, torch.float64, torch.bfloat16}
_VIEWS = {aten.view.default, aten.reshape.default, aten.squeeze.dims, aten.squeeze.dim}


def joint_sums(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it with such sums as one. module: a functional ATen graph with ``meta["val"]``."""
    if options.numerics == "eager" or not any(
        is_sum(n) and not is_term(n) and _joint(n, {}) for n in module.graph.nodes
    ):
        return module
    out = copied(module)
    stages = _stages(out.graph)
    for node in list(out.graph.nodes):
        if is_sum(node) and not is_term(node) and (groups := _joint(node, stages)):
            _replace(node, groups)
    out.graph.eliminate_dead_code()
    out.recompile()
    return out


def _joint(node: Node, stages: dict[Node, int]) -> list[list[Node]]:
    """The terms of ``node`` that may be one reduction, two or more."""
    groups: dict[Any, list[Node]] = {}
    for term in terms(node):
        total = _reduction(term)
        if total is not None and (total is term or all(isinstance(n, int) for n in val(node).shape)):
            x = total.args[0]
            of = (str(total.args[1:]), str(total.kwargs), val(x).dtype, sizes(val(x)), stages.get(x, 0))  # type: ignore
            groups.setdefault(of, []).append(term)
    return [g for g in groups.values() if len(g) > 1]


def _reduction(term: object) -> Node | None:
    """The sum that ``term`` is, or is a view of, if nothing else reads it. Of floats whose partial sums, which may be
    stored, do not overflow: not of float16, nor of what is added in a wider dtype."""
    while isinstance(term, Node) and once(term) and term.target in _VIEWS:
        term = term.args[0]
    if not isinstance(term, Node) or term.target is not aten.sum.dim_IntList or not once(term):
        return None
    x = val(term.args[0])
    return term if x.dtype in _WIDE and x.dtype == val(term).dtype else None


def _replace(node: Node, groups: list[list[Node]]) -> None:
    joined = {t for g in groups for t in g}
    new = [t for t in terms(node) if t not in joined]
    with node.graph.inserting_before(node):
        for group in reversed(groups):
            found = [_reduction(t) for t in group]
            x = found[0].args[0]  # type: ignore[union-attr]
            for more in found[1:]:
                x = added(node.graph, node, x, more.args[0])  # type: ignore[union-attr, arg-type]
            total = node.graph.node_copy(found[0])  # type: ignore[arg-type]
            total.args = (x, *total.args[1:])
            if sizes(val(total)) != sizes(val(node)):
                total = call(node.graph, node, aten.view.default, (total, list(val(node).shape)), val(node))
            new.insert(0, total)
        total = new[0]
        for term in new[1:]:
            total = call(node.graph, node, aten.add.Tensor, (total, term), val(node))
    node.replace_all_uses_with(total)


def _stages(graph: torch.fx.Graph) -> dict[Node, int]:
    """By node: how many products and reductions are one behind another before it, itself included."""
    out: dict[Node, int] = {}
    for n in graph.nodes:
        packet = getattr(n.target, "overloadpacket", None)
        ends = packet in flop_registry or getattr(packet, "__name__", "") in _REDUCTIONS
        out[n] = max((out[a] for a in n.all_input_nodes), default=0) + ends
    return out
