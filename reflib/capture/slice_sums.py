"""Sums of gradients: of slices of a tensor that a loop goes through, and of a parameter that all its steps read.

**Slices** (``slice_sums``). The gradient of ``x[t]`` is a tensor of x's size, zero outside of row t, and autograd adds
those of all T rows. Written as one expression, each of the T rows' elements asks which of the T terms is not zero
there, and computes them all::

    select_scatter(0, g0, 0, 0) + select_scatter(0, g1, 0, 1) + ..   =   cat([g0[None], g1[None], ..])

Slices that do not overlap make a ``cat``, of which each part may be stored by the kernel that computes it
(``fuse/into_place``). Of a slice that is taken more than once, as where a loop's body has ``x[t]`` twice, the gradients
are added first. No addition is left out but that of zero: only -0.0 + 0.0, which is 0.0, differs.

**Parameters** (``joint_sums``). Autograd reduces each step's gradient to the parameter's shape, and adds the results.
Each of T reductions is a kernel that reads what its step has made, or computes the steps before it again; one reduction
of the steps' sum is one kernel behind those that make them::

    sum(g0, [0]) + sum(g1, [0]) + ..   =   sum(g0 + g1 + .., [0])

Only of terms between which there is no product and no reduction: there a step's kernel ends, and would store what is
to be added for the next one, of which its own sum is a small part.

Neither is done with ``numerics="eager"``: a zero's sign, the order of additions.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.flop_counter import flop_registry

from ..options import Options
from .copies import copied

aten = torch.ops.aten
_ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}
_FULL = {aten.full.default, aten.full_like.default}
_PUT = {aten.select_scatter.default, aten.slice_scatter.default}
_REDUCTIONS = frozenset(
    "sum mean amax amin max min prod any all var var_mean std std_mean argmax argmin logsumexp linalg_vector_norm"
    " cumsum _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm"
    " native_group_norm".split()
)
_WIDE = {torch.float32, torch.float64, torch.bfloat16}
_VIEWS = {aten.view.default, aten.reshape.default, aten.squeeze.dims, aten.squeeze.dim}


@dataclass(frozen=True)
class Slice:
    """All zero but for the sum of ``values`` at ``range(low, high)`` of ``dim``, or in one row of it (``row``)."""

    values: tuple[Node, ...]
    dim: int
    low: int
    high: int
    row: bool


def slice_sums(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it with such sums as ``cat``. module: a functional ATen graph with ``meta["val"]``."""
    if options.numerics == "eager" or not any(n.target in _PUT and _is_zero(n.args[0]) for n in module.graph.nodes):
        return module
    out = copied(module)
    for node in reversed(list(out.graph.nodes)):  # (what is a part of a larger one is dead when its turn comes)
        if node.users and (node.target is aten.slice_scatter.default or is_sum(node) and not is_term(node)):
            _replace(out.graph, node)
    out.recompile()
    return out


def _replace(graph: Graph, node: Node) -> None:
    """``node`` by a ``cat``, and what is dense of it, if two slices or more are found in it. Where they fill the whole,
    what is dense is added to each part, which the kernel that makes it does."""
    dense: list[Node] = []
    slices: list[Slice] = []
    for term in terms(node):
        found = _slices(term)
        together = _together(slices, found) if found else None
        if together is None:
            dense.append(term)
        else:
            slices = together
    gaps = _gaps(node, slices) if len(slices) > 1 else None
    if gaps is None:
        return
    with graph.inserting_before(node):
        if dense and not gaps:
            whole = dense[0]
            for term in dense[1:]:
                whole = call(graph, node, aten.add.Tensor, (whole, term), val(node))
            slices, dense = [_with_dense(graph, node, whole, s) for s in slices], []
        new = _cat(graph, node, slices, gaps)
        if not dense and not gaps and all(s.row for s in slices):
            _flipped(graph, node, slices)
        first = bool(dense) and dense[0] is terms(node)[0]  # whose strides the sum has
        for term in reversed(dense):
            new = call(graph, node, aten.add.Tensor, (term, new) if first else (new, term), val(node))
    node.replace_all_uses_with(new)
    graph.eliminate_dead_code()


def terms(node: Node) -> list[Node]:
    """What is added up, in order. (There may be thousands, one sum in another.)"""
    out, stack = list[Node](), list(node.args if is_sum(node) else [node])
    while stack:
        a = stack.pop()
        if is_sum(a) and once(a):  # type: ignore[arg-type]
            stack += a.args  # type: ignore[union-attr, arg-type]
        else:
            out.append(a)  # type: ignore[arg-type]
    return out[::-1]


def is_term(node: Node) -> bool:
    """Of a larger sum?"""
    return once(node) and any(map(is_sum, node.users))


def is_sum(node: object) -> bool:
    """Of two tensors like the result?"""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.kwargs:
        return False
    whole = val(node)
    return all(
        isinstance(x, torch.Tensor) and x.dtype == whole.dtype and sizes(x) == sizes(whole) for x in map(val, node.args)
    )


def sizes(x: torch.Tensor) -> str:
    """Its shape; to compare symbolic sizes would make a guard of the answer."""
    return str(tuple(x.shape))


def _slices(node: object) -> list[Slice] | None:
    """Of a tensor that is zero elsewhere; those of a slice that is itself such a sum, if they divide one dimension."""
    if not isinstance(node, Node):
        return None
    if is_sum(node):
        parts = [None if is_sum(t) else _slices(t) for t in terms(node)]
        return _together([], [s for p in parts if p for s in p]) if all(parts) else None
    if node.target not in _PUT or node.kwargs:
        return None
    (base, value, *at), whole = node.args, val(node)
    dim = at[0] % whole.dim() if at else 0  # type: ignore[operator]
    size = whole.shape[dim]
    if not (_is_zero(base) and isinstance(value, Node) and isinstance(size, int) and val(value).dtype == whole.dtype):
        return None
    row = node.target is aten.select_scatter.default
    if not all(a is None or isinstance(a, int) for a in at[1:]):
        return None
    if row:
        return [Slice((value,), dim, at[1] % size, at[1] % size + 1, True)]  # type: ignore[operator]
    low, high, step = slice(*at[1:]).indices(size)
    inner = _slices(value) if once(value) else None
    if step != 1 or low >= high:
        return None
    if inner and all(s.dim == dim for s in inner):
        return [replace(s, low=s.low + low, high=s.high + low) for s in inner]
    return [Slice((value,), dim, low, high, False)]


def _together(slices: list[Slice], more: list[Slice]) -> list[Slice] | None:
    """Both, in order, with equal slices as one; None if not all are of one dimension, or one overlaps another.
    slices: in order already."""
    out = list(slices)
    for s in more:
        at = bisect_left(out, s.low, key=lambda x: x.low)
        same = at < len(out) and replace(out[at], values=s.values) == s
        if any(x.dim != s.dim or s.low < x.high and x.low < s.high for x in out[max(0, at - 1) : at + 1]) and not same:
            return None
        out[at : at + same] = [replace(s, values=(*out[at].values, *s.values)) if same else s]
    return out


def once(node: Node) -> bool:
    """Is its value used once? (By ``new_zeros``, only its dtype and its device are.)"""
    return sum(not _is_zero(u) for u in node.users) == 1


def _is_zero(node: object) -> bool:
    return isinstance(node, Node) and (
        node.target in _ZEROS or node.target in _FULL and node.args[1] == 0  # type: ignore[comparison-overlap]
    )


def _gaps(node: Node, slices: list[Slice]) -> list[tuple[int, int]] | None:
    """What is between the slices; None if it cannot be made, since another size is not known."""
    shape = val(node).shape
    ends = [0, *(x for s in slices for x in (s.low, s.high)), shape[slices[0].dim]]
    gaps = [(a, b) for a, b in zip(ends[::2], ends[1::2]) if a < b]
    return gaps if not gaps or all(isinstance(n, int) for n in shape) else None


def _cat(graph: Graph, node: Node, slices: list[Slice], gaps: list[tuple[int, int]]) -> Node:
    whole, dim = val(node), slices[0].dim
    parts: dict[int, Node] = {}
    for low, high in gaps:
        shape = [*whole.shape[:dim], high - low, *whole.shape[dim + 1 :]]
        how = {"dtype": whole.dtype, "device": whole.device}
        parts[low] = call(graph, node, aten.full.default, (shape, 0), whole.new_zeros(shape), how)
    for s in slices:
        part = s.values[0]
        for more in s.values[1:]:
            part = added(graph, node, part, more)
        if s.row:
            part = call(graph, node, aten.unsqueeze.default, (part, dim), val(part).unsqueeze(dim))
        parts[s.low] = part
    return call(graph, node, aten.cat.default, ([p for _, p in sorted(parts.items())], dim), whole)


def _with_dense(graph: Graph, node: Node, dense: Node, s: Slice) -> Slice:
    """With what ``dense`` adds to it: ``dense + cat(..)`` would choose a part at each element of the whole."""
    part = val(dense).narrow(s.dim, s.low, s.high - s.low)
    new = call(graph, node, aten.slice.Tensor, (dense, s.dim, s.low, s.high), part)
    if s.row:
        new = call(graph, node, aten.squeeze.dim, (new, s.dim), part.squeeze(s.dim))
    return replace(s, values=(new, *s.values))


def _flipped(graph: Graph, node: Node, slices: list[Slice]) -> None:
    """Rows in reverse, where those are what is used (a loop back in time, over ``x.flip(0)``)."""
    dim, last = slices[0].dim, slices[-1].high
    back = [replace(s, low=last - s.high, high=last - s.low) for s in reversed(slices)]
    for user in list(node.users):
        if user.target is aten.flip.default and [d % val(node).dim() for d in user.args[1]] == [dim]:  # type: ignore
            user.replace_all_uses_with(_cat(graph, user, back, []))


# -- of a parameter -----------------------------------------------------------------------------------------------
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
            _join(node, groups)
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


def _join(node: Node, groups: list[list[Node]]) -> None:
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


# -- parts of both --------------------------------------------------------------------------------------------------
def call(graph: Graph, like: Node, op: object, args: tuple, val: torch.Tensor, kwargs: dict | None = None) -> Node:
    new = graph.call_function(op, args, kwargs)  # type: ignore[arg-type]
    new.meta = {**like.meta, "val": val}
    return new


def added(graph: Graph, like: Node, a: Node, b: Node) -> Node:
    """Their sum, with the strides that it has: not an operand's, whose elements may be one in memory (``expand``)."""
    return call(graph, like, aten.add.Tensor, (a, b), aten.add.Tensor(val(a), val(b)))


def val(node: object) -> torch.Tensor:
    return node.meta["val"] if isinstance(node, Node) else node  # type: ignore[return-value]
