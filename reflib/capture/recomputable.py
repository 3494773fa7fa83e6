"""What the backward may compute again from what it has, beside the ops on torch's list: mostly data that is moved.

AOTAutograd's min-cut saves the result of an op that is not on its list (``partitioners.get_default_op_list``), however
cheap it is. So ``(x + b).chunk(2)`` stores both halves of a sum of inputs, and an activation behind a concatenation or
a padding stores that. Here these are part of the kernel that reads them: views cost nothing, and a concatenation of a
few tensors, a padding and a ``roll`` are other places to read from. Two are left out. The parts of a concatenation of
integers are mostly narrower than it, and would be stored for this alone; what reads ``flip`` is often a scan or a
reduction, which would read wide inputs in two rounds.

Others on no list of torch's are elementwise, or make a tensor from nothing: torch's is of what TorchInductor's
decompositions leave, which reflib lowers as they are.

One value is not computed again though it could be: that of which the gradient of a maximum asks where it is equal to
the maximum (``_met``). Two kernels may round what leads to it at different places, and then it is equal nowhere: the
gradient, divided by how often it is, would be NaN. The forward has both in one kernel, and saves a bit per element.

NB: TorchInductor takes torch's list.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch import partitioners
from torch._functorch.partitioners import get_aten_target

from .products import BACKWARD

aten = torch.ops.aten
VIEWS = (aten.split_with_sizes, aten.unbind, aten.diagonal, aten.transpose, aten.unfold)
MOVED = (aten.constant_pad_nd, aten.roll, aten._unsafe_index, aten.index_select, aten.im2col, aten.repeat)
WHOLE = (
    aten.eye, aten.tril, aten.ones_like, aten.new_ones, aten.new_full, aten.fill, aten._prelu_kernel, aten.hardswish,
    aten.hardswish_backward, aten.hardsigmoid_backward, aten.hardtanh_backward, aten.leaky_relu_backward,
    aten.softplus_backward, aten.floor_divide,
)  # fmt: skip
WINDOWS = tuple(  # kernels of ours, which compute what they read
    getattr(aten, f"{name}pool{n}d{kind}")
    for name, kind in (("max_", "_with_indices"), ("avg_", ""), ("adaptive_max_", ""), ("_adaptive_avg_", ""))
    for n in (2, 3)
)
SAME = (aten.view, aten.expand, aten.unsqueeze, aten.squeeze, aten.permute, aten.alias, *VIEWS)
CHOSEN = (  # of which each result is one of the operands, perhaps with another sign
    *SAME, aten.where, aten.masked_fill, aten.maximum, aten.minimum, aten.clamp, aten.clamp_min, aten.clamp_max,
    aten.relu, aten.neg, aten.abs, aten.full, aten.full_like, aten.scalar_tensor, aten.arange,
)  # fmt: skip
COUNTED = (  # of integers and bools
    aten.add, aten.sub, aten.mul, aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne, aten.logical_not,
    aten.logical_and, aten.logical_or, aten.bitwise_not, aten.bitwise_and, aten.bitwise_or,
)  # fmt: skip
EXTREMES = (aten.amax, aten.amin, aten.max, aten.min)
FEW = 4  # tensors of a concatenation

_ours = threading.local()
_torchs = partitioners.get_default_op_list


class Ops(partitioners.OpTypes):
    """torch's, but for concatenations, of which the number of tensors counts, and for what is split."""

    def is_fusible(self, node: torch.fx.Node) -> bool:
        return _short_cat(node) or super().is_fusible(node) and not _biased(node)

    def is_recomputable(self, node: torch.fx.Node) -> bool:
        return _short_cat(node) or super().is_recomputable(node) and not _biased(node) and not _met(node)

    def is_view(self, node: torch.fx.Node) -> bool:
        return super().is_view(node) and not _biased(node)


def _biased(node: torch.fx.Node) -> bool:
    """Is it a part of a convolution with a bias? That is added by the kernel that reads the convolution (``lower``),
    so the sum is in memory only if it is saved."""
    source = node.args[0] if get_aten_target(node) in VIEWS else None
    if not isinstance(source, torch.fx.Node) or source.target is not aten.convolution.default:
        return False
    return source.args[2] is not None


def _met(node: torch.fx.Node) -> bool:
    """Is it, or a view of it, compared for equality with its own maximum or minimum? What inputs are chosen for is the
    same wherever it is computed."""
    seen, todo = {node}, [node]
    for each in todo:
        for user in each.users:
            if user.target is aten.eq.Tensor and any(_extreme(a) for a in user.args):
                return not _exact(node)
            if get_aten_target(user) in SAME and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def _exact(node: torch.fx.Node) -> bool:
    """Does nothing that inputs go through on the way to it round them?"""
    seen, todo = {node}, [node]
    for n in todo:
        if n.op == "placeholder":
            continue
        value, target = n.meta.get("val"), get_aten_target(n)
        whole = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
        exact = target in CHOSEN or target in COUNTED and whole or _widens(n)
        if not exact:
            return False
        more = [a for a in n.all_input_nodes if a not in seen]
        seen.update(more)
        todo += more
    return True


def _widens(node: torch.fx.Node) -> bool:
    """A cast of which each value is one of the new dtype as well."""
    if node.target is not aten._to_copy.default:
        return False
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    return before == after or before.is_floating_point and torch.promote_types(before, after) == after


def _extreme(value: Any) -> bool:
    while isinstance(value, torch.fx.Node) and get_aten_target(value) in SAME:
        value = value.args[0]
    return isinstance(value, torch.fx.Node) and get_aten_target(value) in EXTREMES


def _short_cat(node: torch.fx.Node) -> bool:
    few = node.target is aten.cat.default and len(node.args[0]) <= FEW  # type: ignore[arg-type]
    return few and node.meta["val"].dtype.is_floating_point


def op_list() -> partitioners.OpTypes:
    """Replaces torch's: the same outside of ``with_more``."""
    ops = _torchs()
    if not getattr(_ours, "on", False):
        return ops
    more = {*VIEWS, *MOVED, *WHOLE}
    return Ops(
        ops.fusible_ops | more | {*WINDOWS, BACKWARD}, ops.compute_intensive_ops, ops.random_ops,
        ops.view_ops | {*VIEWS}, ops.recomputable_ops | more,
    )  # fmt: skip


def with_more(compile: Callable[..., Any], backend: Any, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """``compile``, these ops being on the list for what this thread cuts in forward and backward."""
    partitioners.get_default_op_list = op_list
    before, _ours.on = getattr(_ours, "on", False), True
    try:
        return compile(backend, module, inputs)
    finally:
        _ours.on = before
