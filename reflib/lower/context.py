"""LoweringContext: what a rule sees of the lowering it is part of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from reflib.ir.expr import Expr, IntLike, expr, mod
from reflib.ir.loops import Origin
from reflib.ir.program import Buffer, Extern, View, full_view

from .rules import RULES

if TYPE_CHECKING:
    from .lower import Lowering

aten = torch.ops.aten


@dataclass(frozen=True)
class LoweringContext:
    """One graph node being lowered. ``fake``: its ``meta["val"]`` (or one element of it, for list ops)."""

    low: Lowering
    node: torch.fx.Node
    fake: Any
    origin: Origin
    name: str

    # -- the result -----------------------------------------------------------------------------
    @property
    def fakes(self) -> list[torch.Tensor]:
        """The output's fake tensors, flat."""
        flat = torch.utils._pytree.tree_leaves(self.fake)
        return [t for t in flat if isinstance(t, torch.Tensor)]

    @property
    def dtype(self) -> torch.dtype:
        return self.fakes[0].dtype

    @property
    def device(self) -> torch.device:
        return self.fakes[0].device

    @property
    def on_gpu(self) -> bool:
        """Will it run on a GPU? ``target`` retargets programs captured on a CPU after lowering."""
        return (self.low.options.target or self.device.type) != "cpu"

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.low.symbols.exprs(self.fakes[0].shape)

    def out(self, i: int = 0) -> View:
        """A new buffer for output ``i``, with eager's sizes and strides."""
        name = self.name if len(self.fakes) == 1 else f"{self.name}_{i}"
        return full_view(self.low.new_buffer(name, self.fakes[i]))

    def temp(self, what: str, shape: Sequence[IntLike], dtype: torch.dtype, device: Any = None) -> View:
        """A new contiguous buffer for an intermediate value."""
        name, sizes = self.low.unique(f"{self.name}_{what}"), tuple(expr(s) for s in shape)
        buffer = Buffer(name, dtype, device or self.device, sizes, contiguous_strides(sizes))
        self.low.buffers[buffer.name] = buffer
        return full_view(buffer)

    # -- other ops ------------------------------------------------------------------------------
    def call(self, target: Any, *args: Any, fake: Any = None, name: str | None = None, **kwargs: Any) -> Any:
        """Lower another op's call as part of this one, for a result like ``fake``."""
        name, fake = self.low.unique(name or self.name), self.fake if fake is None else fake
        cx = LoweringContext(self.low, self.node, fake, self.origin, name)
        return RULES[target](cx, *args, **kwargs)

    def readable(self, view: View) -> View:
        """``view`` where a kernel can read it as its own dtype: a buffer seen as another dtype is copied."""
        buffer = self.low.buffers[view.buffer]
        if buffer.dtype != view.dtype:
            view = self.extern_to(aten.clone.default, (view,), {}, view, buffer.device)
        return view

    def float_tensor(self, value: Expr, device: torch.device) -> View:
        """A float known at run time only, as a one-element float64 tensor: kernels take sizes and tensors."""
        like, kwargs = View("", (), (), expr(0), torch.float64), {"dtype": torch.float64, "device": device}
        return self.extern_to(aten.scalar_tensor.default, (value,), kwargs, like, device)

    def extern_to(self, target: Any, args: tuple, kwargs: dict, like: View, device: torch.device) -> View:
        """Call ``target`` for a new contiguous buffer of ``like``'s shape and dtype."""
        out = self.temp("copy", like.shape, like.dtype, device)
        name, named = self.low.next_node(), tuple(kwargs.items())
        self.low.nodes.append(Extern(name, target, args, named, (out.buffer,), origins=(self.origin,)))
        return out


def contiguous_strides(shape: Sequence[Expr]) -> tuple[Expr, ...]:
    """Row-major strides; like torch's, a size of 0 or 1 counts as 1."""
    strides, step = [], expr(1)
    for size in reversed(shape):
        strides.append(step)
        step = step * (size if size != 0 else 1)
    return tuple(reversed(strides))


def unflatten(position: Expr, shape: Sequence[Expr]) -> list[Expr]:
    """Coordinates of a row-major position."""
    return [mod(position // stride, size) for size, stride in zip(shape, contiguous_strides(shape))]
