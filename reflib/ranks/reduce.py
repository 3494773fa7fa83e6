"""Sums over symmetric storage (``symmetric``). All-reduce, in two ways:

* **one-shot**: each rank reads all ranks' values and adds them up: one step, N times the bytes of the result read.
* **two-shot**: each rank adds up its share of the values, then all read all shares: a barrier more, about twice the
  bytes of the result read, however many ranks there are.

and reduce-scatter, the first step of two-shot. On a CPU the reads are PyTorch's. On a GPU they are kernels
(``kernels``); up to SENT bytes are sent to the others instead: nothing need lie in storage for that, and no rank asks
for what it waits for. All ranks have the same bits: values are added in the order of ranks,
halves in float32 and rounded once.

``reflib::all_reduce`` is the op to call (``candidates``): the process group's own, and the two as candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..lower.context import LoweringContext
from ..lower.extern import extern
from ..lower.rules import RULES
from .meeting import RanksError
from .symmetric import DTYPES, HOW, SENT, Storage, share_of, storage

_library = torch.library.Library("reflib", "FRAGMENT")
_library.define("symmetric_all_reduce(Tensor x, str how, str group_name) -> Tensor")
_library.define("symmetric_reduce_scatter(Tensor x, str group_name) -> Tensor")
_library.define("symmetric_empty(SymInt[] size, ScalarType dtype, Device device, SymInt at, str group_name) -> Tensor")


@torch.library.impl(_library, "symmetric_all_reduce", "CompositeExplicitAutograd")
def _all_reduce(x: torch.Tensor, how: str, group_name: str) -> torch.Tensor:
    if how not in HOW or x.dtype not in DTYPES:
        known = f"{', '.join(HOW)} for {', '.join(map(str, DTYPES))}"
        raise RanksError(f"symmetric storage has {known}; not {how} for {x.dtype}")
    s, values = storage(group_name, x.device), x.contiguous()
    out = torch.empty_like(values)
    if s.size == 1 or x.numel() == 0:
        return out.copy_(values)
    add: Any = partial(_on_device, how) if s.device.type == "cuda" else one_shot if how == "one_shot" else two_shot
    flat, result = values.view(-1), out.view(-1)
    most = s.most(flat)
    for start in range(0, flat.numel(), most):
        add(s, flat[start : start + most], result[start : start + most])
    return out


@torch.library.register_fake("reflib::symmetric_all_reduce", lib=_library)
def _all_reduce_fake(x: torch.Tensor, how: str, group_name: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.how = inputs[1:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return REDUCE(grad, *ctx.how), None, None


torch.library.register_autograd("reflib::symmetric_all_reduce", _backward, setup_context=_keep, lib=_library)


@torch.library.impl(_library, "symmetric_reduce_scatter", "CompositeExplicitAutograd")
def _reduce_scatter(x: torch.Tensor, group_name: str) -> torch.Tensor:
    s = storage(group_name, x.device)
    if x.dtype not in DTYPES or x.dim() == 0 or x.shape[0] % s.size:
        raise RanksError(
            f"a reduce-scatter over symmetric storage takes {', '.join(map(str, DTYPES))}, and rows for {s.size} ranks "
            f"alike; not {tuple(x.shape)} of {x.dtype}"
        )
    values = x.contiguous()
    out = torch.empty_like(values[: x.shape[0] // s.size])
    if s.size == 1 or x.numel() == 0:
        return out.copy_(values)
    parts, result = values.view(s.size, -1), out.view(-1)
    most = s.most(parts, s.size)
    for start in range(0, result.numel(), most):
        scatter(s, parts[:, start : start + most], result[start : start + most])
    return out


@torch.library.register_fake("reflib::symmetric_reduce_scatter", lib=_library)
def _reduce_scatter_fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    from .candidates import size_of

    return x.new_empty(x.shape[0] // size_of(group_name), *x.shape[1:])


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group_name = inputs[1]


def _scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
    from .candidates import gathered

    return gathered(grad, ctx.group_name), None


torch.library.register_autograd(
    "reflib::symmetric_reduce_scatter", _scatter_backward, setup_context=_keep_group, lib=_library
)


@torch.library.impl(_library, "symmetric_empty", "CompositeExplicitAutograd")
def _empty(size: list[int], dtype: torch.dtype, device: torch.device, at: int, group_name: str) -> torch.Tensor:
    """Memory at ``at`` of the planned part; memory of its own where sizes have grown out of that."""
    s, n = storage(group_name, device), dtype.itemsize
    for length in size:
        n *= length
    if at + n > s.copied:
        return torch.empty(size, dtype=dtype, device=device)
    return s.part(s.rank, s.planned + at, size, dtype)


REDUCE, EMPTY = torch.ops.reflib.symmetric_all_reduce.default, torch.ops.reflib.symmetric_empty.default
SCATTER = torch.ops.reflib.symmetric_reduce_scatter.default


def communicates(cx: LoweringContext, *args: Any, **kwargs: Any) -> Any:
    """A call that has communicated when it returns."""
    return extern(cx, cx.node.target, args, kwargs, "communicates", effect=True)


RULES.update({str(op): communicates for op in (REDUCE, SCATTER)})


def read_in_place(call: Any, device: torch.device) -> bool:
    """Do all ranks read the argument of this call where it lies? (On a GPU, small ones are sent instead.)"""
    if call.target not in (REDUCE, SCATTER):
        return False
    x = call.args[0]
    nbytes = math.prod(e.hint() for e in x.shape) * x.dtype.itemsize
    return device.type == "cpu" or nbytes > SENT["reduce-scatter" if call.target is SCATTER else call.args[1]]


# -- on flat tensors ----------------------------------------------------------------------------------------
def _on_device(how: str, s: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    from . import kernels

    with torch.cuda.device(s.device):
        s.in_order()
        kernels.all_reduce(how, s, x, out)


def one_shot(s: Storage, x: torch.Tensor, out: torch.Tensor) -> None:
    with s.exchange(x, "one_shot") as offsets:
        _add(s, offsets, out, 0)


def two_shot(s: Storage, x: torch.Tensor, out: torch.Tensor) -> None:
    n, share = x.numel(), share_of(x, s.size)
    with s.exchange(x, "two_shot") as offsets:
        start = min(n, s.rank * share)
        own = s.part(s.rank, s.sums, (min(n - start, share),), x.dtype)
        _add(s, offsets, own, start)
        s.barrier()
        _gather(s, out, share)


def scatter(s: Any, parts: torch.Tensor, out: torch.Tensor) -> None:
    """out = the sum over ranks of what they have for this one; parts: per rank, what is for it."""
    if s.device.type == "cuda":
        with torch.cuda.device(s.device):
            from . import kernels

            s.in_order()
            kernels.shares("reduce-scatter", s, parts, out)
        return
    x = parts.contiguous()
    with s.exchange(x, "reduce-scatter") as offsets:
        _add(s, offsets, out, s.rank * out.numel())


def _add(s: Storage, offsets: list[int], out: torch.Tensor, start: int) -> None:
    """The sum over ranks of their values from ``start`` on."""
    if out.numel():
        at = start * out.element_size()
        added([s.part(r, o + at, out.shape, out.dtype) for r, o in enumerate(offsets)], out)


def added(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """out = the sum of ``parts``, in their order."""
    wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
    first, *others = parts
    total = out if wide == out.dtype else torch.empty_like(out, dtype=wide)
    torch.add(first.to(wide), others[0], out=total)
    for other in others[1:]:
        total.add_(other)
    if total is not out:
        out.copy_(total)


def _gather(s: Storage, out: torch.Tensor, share: int) -> None:
    """All ranks' sums, one after the other."""
    for rank, part in enumerate(out.split(share)):
        part.copy_(s.part(rank, s.sums, part.shape, out.dtype))
