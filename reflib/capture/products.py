"""The gradient of a cumulative product as one scan: ``reflib::cumprod_backward``.

PyTorch divides: with ``w = grad * y`` the gradient of ``y = cumprod(x)`` at k is the sum of w from k on, over x[k].
That fails where an x is 0. Eager mode tests for zeros, which waits for the GPU; a captured graph cannot, and has three
scans, an argmax, a gather and a scatter. Without the division, zeros are no special case::

    later[k] = grad[k] + x[k + 1] * later[k + 1]        a linear recurrence, from the row's end
    gradient[k] = y[k - 1] * later[k]

Each element of ``grad``, ``x`` and ``y`` is read once, in one kernel. The terms are those of the sum above, each
without the factor x[k] and the division by it. On a GPU parts of a row are combined in float32, as in a scan of
products: where the product of a part overflows (65 factors of 4), the result may be infinite or NaN though y is finite.

torch.cumprod is replaced before autograd sees it. Not where rows are few and long: the scan of a recurrence is not cut
into pieces (``fuse/split_scans``). ``numerics="eager"`` and ``batch_invariant`` keep PyTorch's formula.

NB: TorchInductor compiles the formula with all its cases.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..options import Options
from .attention import argument, graphs
from .random import LIBRARY
from .storages import value

LIBRARY.define("cumprod_backward(Tensor grad, Tensor x, Tensor y, int dim) -> Tensor")
BACKWARD = torch.ops.reflib.cumprod_backward
LONG, FEW = 16384, 256
TRANSFORMS = ("torch._C._functorch", "torch._functorch.predispatch")  # modules of the functions that begin one


def _in_steps(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    """The op in eager PyTorch, one element of all rows at a time."""
    if x.dim() == 0 or x.shape[dim] < 2:
        return grad.clone()
    later, out = torch.zeros_like(grad.select(dim, 0)), []
    after = [torch.zeros_like(later), *x.unbind(dim)[:0:-1]]
    before = [torch.ones_like(later), *y.unbind(dim)[:-1]]
    for g, factor, product in zip(grad.unbind(dim)[::-1], after, before[::-1]):
        later = g + factor * later
        out.append(product * later)
    return torch.empty_like(x).copy_(torch.stack(out[::-1], dim))


LIBRARY.impl("cumprod_backward", _in_steps, "CompositeExplicitAutograd")
LIBRARY.impl("cumprod_backward", lambda grad, x, y, dim: torch.empty_like(x), "Meta")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        y = torch.cumprod(x, dim)
        ctx.save_for_backward(x, y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return BACKWARD(grad, *ctx.saved_tensors, ctx.dim), None


def cumprod(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _Product.apply(x if dtype is None else x.to(dtype), int(dim))


def products(module: GraphModule, options: Options) -> GraphModule:
    """``module``, a graph of torch's functions with fake tensors in ``meta``, with ``cumprod`` of above in place of
    torch's (plugs into ``pipeline.CAPTURED``)."""
    if options.numerics == "eager" or options.batch_invariant:
        return module
    if any(getattr(n.target, "__module__", "") in TRANSFORMS for inner in graphs(module) for n in inner.graph.nodes):
        return module
    for inner in graphs(module):
        for node in inner.graph.nodes:
            if node.target in (torch.cumprod, torch.Tensor.cumprod, "cumprod") and _gains(node):
                node.op, node.target = "call_function", cumprod
        inner.recompile()
    return module


def _gains(node: Node) -> bool:
    made, dim = value(node), value(argument(node, 1, "dim"))
    if not isinstance(made, torch.Tensor) or not made.requires_grad or made.is_complex() or "out" in node.kwargs:
        return False
    if not isinstance(dim, (int, torch.SymInt)) or not set(node.kwargs) <= {"dim", "dtype"}:
        return False
    length = made.shape[int(dim)] if made.dim() else 1
    length = length if isinstance(length, int) else 1
    return length < LONG or made.numel() >= FEW * length
