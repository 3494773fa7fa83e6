"""Convolutions whose windows do not overlap, of few channels, are products of patches: the first layer of a ViT.

cuDNN's tensor-core kernels read channels by eights, so that three are padded to eight: a convolution of patches then
multiplies by zeros, and copies its input to do so. As a product it reads each pixel once (bfloat16, H100: 409 -> 56 us
for CLIP's 32 x 32, 348 -> 53 for ViT's 16 x 16, with a workspace of 6 instead of 28 MB)::

    y[b, o, i, j] = sum over c, u, v of x[b, c, i k + u, j k + v] w[o, c, u, v]
                  = patches[b i j, c u v] @ w[o, c u v].T

The patches are a copy of ``x`` in another order. The gradients are products as well: of the weights
``grad.T @ patches``, of the input ``grad @ w``, put back in order. In half precision only: float32
convolutions may use tf32 where products by default do not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node

from ..options import Options
from .copies import copied
from .slice_sums import call, val

aten = torch.ops.aten
FEW = 8  # channels that one access reads, as 16 bytes


def patches(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it with products in place of such convolutions.

    module: a functional ATen graph with ``meta["val"]``, of inference or forward and backward in one."""
    if not gpu or not any(map(_is_of_patches, module.graph.nodes)):
        return module
    mode = detect_fake_mode([n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"])
    if mode is None:
        return module
    out = copied(module)
    with mode, torch.no_grad():
        for node in list(filter(_is_of_patches, out.graph.nodes)):
            with out.graph.inserting_before(node):
                replace = _forward if node.target is aten.convolution.default else _backward
                replace(_Patches(out.graph, node))
    out.graph.eliminate_dead_code()
    out.recompile()
    return out


def _is_of_patches(node: Node) -> bool:
    """Each element of the input is read once, channels are few, and sizes but for the batch's are known."""
    if node.target is aten.convolution.default:
        x, w, _, stride, padding, dilation, transposed, _, groups = node.args
    elif node.target is aten.convolution_backward.default:
        _, x, w, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    else:
        return False
    x, w = val(x), val(w)
    kernel = tuple(w.shape[2:])
    if transposed or groups != 1 or x.dtype not in (torch.float16, torch.bfloat16) or not x.shape[1] % FEW:
        return False
    if not all(isinstance(n, int) for n in (*x.shape[1:], *w.shape)) or x.dim() != w.dim() or w.numel() == 0:
        return False
    alike = list(stride) == list(kernel) and not any(padding) and all(d == 1 for d in dilation)  # type: ignore
    whole = all(n and n % k == 0 for n, k in zip(x.shape[2:], kernel, strict=True))
    return alike and whole and any(k > 1 for k in kernel)


class _Patches:
    """A convolution, or its backward, and what is made of its operands before it."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        self.x, self.w = node.args[:2] if node.target is aten.convolution.default else node.args[1:3]  # type: ignore
        self.kernel = tuple(val(self.w).shape[2:])
        self.grid = [n // k for n, k in zip(val(self.x).shape[2:], self.kernel, strict=True)]
        self.dims = len(self.kernel)

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = target(*torch.fx.map_arg(args, val), **kwargs)
        return call(self.graph, self.node, target, args, made, kwargs)

    def copy(self, x: Node, order: Sequence[int], shape: Sequence[int]) -> Node:
        """``x``, its dimensions in this order, as a tensor of its own."""
        turned = self.op(aten.permute.default, x, list(order))
        whole = self.op(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self.op(aten.view.default, whole, list(shape))

    def rows(self) -> Node:
        """[batch and places, channels and places in a patch]"""
        d, w = self.dims, val(self.w)
        cut = [n for pair in zip(self.grid, self.kernel, strict=True) for n in pair]
        apart = self.op(aten.view.default, self.x, [-1, w.shape[1], *cut])
        order = [0, *range(2, 2 + 2 * d, 2), 1, *range(3, 3 + 2 * d, 2)]
        return self.copy(apart, order, [-1, w[0].numel()])

    def weights(self) -> Node:
        """[output channels, channels and places in a patch]"""
        w = val(self.w)
        whole = self.op(aten.clone.default, self.w, memory_format=torch.contiguous_format)
        return self.op(aten.view.default, self.w if w.is_contiguous() else whole, [w.shape[0], -1])

    def like(self, made: Node, old: torch.Tensor) -> Node:
        """``made`` with the strides that ``old`` has."""
        if val(made).stride() == old.stride():
            return made
        last = torch.channels_last if old.dim() == 4 else torch.channels_last_3d
        order = torch.contiguous_format if old.is_contiguous() or old.dim() == 3 else last
        return self.op(aten.clone.default, made, memory_format=order)


def _forward(p: _Patches) -> None:
    bias, d = p.node.args[2], p.dims
    out = p.op(aten.mm.default, p.rows(), p.op(aten.t.default, p.weights()))
    if bias is not None:
        out = p.op(aten.add.Tensor, out, bias)
    placed = p.op(aten.view.default, out, [-1, *p.grid, val(p.w).shape[0]])
    placed = p.op(aten.permute.default, placed, [0, d + 1, *range(1, d + 1)])
    p.node.replace_all_uses_with(p.like(placed, val(p.node)))


def _backward(p: _Patches) -> None:
    grad, mask, d, w = p.node.args[0], p.node.args[-1], p.dims, val(p.w)
    rows = p.copy(grad, [0, *range(2, 2 + d), 1], [-1, w.shape[0]])  # type: ignore[arg-type]
    made: list[Node | None] = [None, None, None]
    if mask[0]:  # type: ignore[index]
        apart = p.op(aten.view.default, p.op(aten.mm.default, rows, p.weights()), [-1, *p.grid, w.shape[1], *p.kernel])
        order = [0, d + 1, *(n for i in range(d) for n in (1 + i, 2 + d + i))]
        made[0] = p.copy(apart, order, [-1, *val(p.x).shape[1:]])
    if mask[1]:  # type: ignore[index]
        made[1] = p.op(aten.view.default, p.op(aten.mm.default, p.op(aten.t.default, rows), p.rows()), list(w.shape))
    if mask[2]:  # type: ignore[index]
        made[2] = p.op(aten.sum.dim_IntList, grad, [0, *range(2, 2 + d)])
    for user in list(p.node.users):
        new = made[user.args[1]]  # type: ignore[index]
        if new is not None:
            user.replace_all_uses_with(p.like(new, val(user)))
