"""Composite ops taken apart in another way than torch does it."""

from collections.abc import Callable, Mapping
from ctypes import c_float
from functools import partial
from math import prod
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm, suggest_memory_format
from torch.fx.experimental.symbolic_shapes import statically_known_true

from reflib.capture.interpolation import LINEAR, NEAREST

from .rules import overloads

aten = torch.ops.aten
Parts = Callable[..., Any]


def own_parts(table: Mapping[Any, Parts]) -> dict[Any, Parts]:
    """What replaces entries of torch's table (plugs into ``lower.PARTS``)."""
    means = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
    legit = "_native_batch_norm_legit"
    norms = overloads("native_batch_norm", legit, f"{legit}_no_training", f"{legit}_functional")
    log_sigmoid = aten.log_sigmoid_forward.default
    nearests = get_decompositions([getattr(aten, name).default for name in NEAREST])
    unpools = {aten.max_unpool2d.default: 2, aten.max_unpool3d.default: 3}
    return {
        **{op: partial(no_integers, table[op]) for op in overloads(*_NO_INTEGERS) if op in table},
        **{op: partial(max_unpool, dims) for op, dims in unpools.items()},
        **{op: partial(counted_wide, table[op]) for op in means},
        **{op: partial(linspace, table[op]) for op in overloads("linspace") if op in table},
        **get_decompositions([getattr(aten, name).default for name in LINEAR]),
        **{op: partial(nearest, parts) for op, parts in nearests.items()},
        **{op: partial(pixels, table[op]) for op in (aten.pixel_shuffle.default, aten.pixel_unshuffle.default)},
        aten.channel_shuffle.default: partial(channels, table[aten.channel_shuffle.default]),
        **{op: partial(laid_out, table[op]) for op in _OF_TWO if op in table},
        **{op: partial(row_major, table[op], suggest_memory_format) for op in norms if op in table},
        log_sigmoid: partial(row_major, table[log_sigmoid], lambda t: torch.contiguous_format),
        aten.take.default: take,
        aten._unique.default: unique,
        aten.stack.default: partial(stack, table[aten.stack.default]),
        **{op: partial(into_own_places, op) for op in overloads("diagonal_scatter", "select_scatter", "slice_scatter")},
    }


_OF_TWO = (
    *(aten.heaviside.default, aten.logaddexp.default, aten.logaddexp2.default, aten.xlogy.Tensor),
    aten.special_xlog1py.default,
)


_NO_INTEGERS = (
    *("_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
    *("glu", "frac", "binary_cross_entropy", "smooth_l1_loss", "huber_loss"),
)


def no_integers(parts: Parts, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of integers the op is kept: where eager has no kernel for them, its call says so. (torch's parts compute.)"""
    return parts(x, *args, **kwargs) if x.is_floating_point() or x.is_complex() else NotImplemented


def laid_out(parts: Parts, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As eager lays out one op of ``x`` and ``y``: torch's parts decide it anew for each of theirs."""
    order, _ = compute_elementwise_output_logical_to_physical_perm(*torch.broadcast_tensors(x, y))
    back = [order.index(d) for d in range(len(order))]
    return parts(x, y).permute(order).contiguous().permute(back)


def stack(parts: Parts, tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Parts of length 1: what reads one of them, or picks one by a number, knows where. (Of torch's parts, joined along
    a dimension that is split afterwards, it does not; but they have eager's strides where tensors lie otherwise.)"""
    if not all(t.is_contiguous() for t in tensors):
        return parts(tensors, dim)
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim)


def pixels(parts: Parts, x: torch.Tensor, factor: int) -> torch.Tensor:
    """Eager's result lies like ``x`` on a CPU, as torch's parts have it, and is contiguous on a GPU."""
    return parts(x, factor).contiguous() if x.is_cuda else parts(x, factor)


def nearest(parts: Parts, x: torch.Tensor, sizes: list[Any], *scales: float | None) -> torch.Tensor:
    """By whole factors every element is repeated, at places that follow from its own: no position is computed, none is
    unknown. (Of torch's parts each output is read at a number that was converted from floating point.)"""
    given = [*scales, *[None] * (len(sizes) - len(scales))]
    factors = [_whole_factor(m, n, scale) for m, n, scale in zip(x.shape[2:], sizes, given)]
    order = suggest_memory_format(x) if x.dim() > 3 else torch.contiguous_format
    if None in factors or set(factors) == {1}:
        out = parts(x, sizes, *scales)
        return out if x.dim() == 4 else out.contiguous(memory_format=order)  # (torch lays out those of 4)
    few = x.is_cuda and x.dim() == 4 and x.shape[1] < 4  # eager's result is contiguous then
    last = order is not torch.contiguous_format and not few
    x, times = (x.movedim(1, -1), [1, *factors, 1]) if last else (x, [1, 1, *factors])
    apart = x.reshape([s for m in x.shape for s in (m, 1)]).expand([s for m, k in zip(x.shape, times) for s in (m, k)])
    out = apart.reshape([m * k for m, k in zip(x.shape, times)]).contiguous()  # (else a view, of sizes 1)
    return out.movedim(-1, 1) if last else out


def _whole_factor(m: Any, n: Any, scale: float | None) -> int | None:
    """The number k of outputs per input, ``n`` of ``m``, if output i reads input i // k also in float32, in which eager
    computes where that is: at i or at i + 0.5."""
    known = isinstance(m, int) and isinstance(n, int) and m > 0
    k = int(scale or 0) if not known else n // m
    if k < 1 or scale not in (None, k) or not statically_known_true(n == m * k):
        return None
    step = c_float(1 / k).value  # (positions are off by n / k * 2**-23 at most: only whole ones can be another's)
    below = known and n < 2**22 and all(int(c_float(i * step).value) == i // k for i in range(0, n, k))
    return k if k & (k - 1) == 0 or below else None


def channels(parts: Parts, x: torch.Tensor, groups: int) -> torch.Tensor:
    """Eager's result on a CPU is new, and lies like ``x``; on a GPU it is contiguous, and ``x`` itself where nothing
    moves. (torch's parts take any ``x`` as it is then.)"""
    if 0 in x.shape:
        return parts(x, groups)
    parts(x, groups)  # for its errors
    groups_first = x.unflatten(1, (groups, -1)).transpose(1, 2)
    if x.is_cuda:
        return groups_first.contiguous().flatten(1, 2)
    return groups_first.flatten(1, 2).clone(memory_format=suggest_memory_format(x))


def row_major(parts: Parts, order: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Eager's results on a CPU are contiguous, in ``order``; torch's parts keep any strides of ``x``."""
    out = parts(x, *args, **kwargs)
    return out if x.is_cuda else tuple(t.contiguous(memory_format=order(t)) for t in out)


def into_own_places(op: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """An expanded tensor is copied first, as in eager; then the op is kept. (In torch 2.11 it has, by its meta
    function, the strides of what it is of: elements in one place, of which one is stored to.)"""
    overlaps = 0 not in x.shape and any(isinstance(s, int) and s == 0 and n != 1 for n, s in zip(x.shape, x.stride()))
    return op(x.clone(), *args, **kwargs) if overlaps else NotImplemented


def take(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """A new tensor, also where the index is one number: torch's parts then select, which is a view."""
    return aten.index.Tensor(x.reshape(-1), [indices])


def unique(x: torch.Tensor, *how: bool, **named: bool) -> tuple[torch.Tensor, ...]:
    """(In torch 2.11 the length of this one's result is that for an input of zeros.)"""
    return aten._unique2(x, *how, **named)[:2]


def max_unpool(dims: int, x: torch.Tensor, indices: torch.Tensor, output_size: list[int], *_: Any) -> torch.Tensor:
    """By channel, so that an index is checked, and laid out in memory as the operator's result is. (torch's parts index
    all channels as one: what is out of range in one writes to another.)"""
    if 0 in output_size:
        return x.new_zeros((*x.shape[:-dims], *output_size))
    flat = x.new_zeros((*x.shape[:-dims], prod(output_size)))
    out = flat.scatter(-1, indices.flatten(-dims), x.flatten(-dims)).unflatten(-1, output_size)
    return out.contiguous(memory_format=suggest_memory_format(x)) if dims == 2 and not x.is_cuda else out


def linspace(parts: Parts, start: Any, end: Any, steps: int, *, dtype: Any = None, **how: Any) -> torch.Tensor:
    """Of integers: like eager's kernels, between ends that are integers, in float64 on a CPU, in float32 on a GPU."""
    if dtype is None or dtype.is_floating_point or dtype.is_complex or steps < 2:
        return parts(start, end, steps, dtype=dtype, **how)
    first, last = (x.to(dtype).double() if isinstance(x, torch.Tensor) else float(int(x)) for x in (start, end))
    i = torch.arange(steps, device=how.get("device"))
    step, single = (last - first) / (steps - 1), i.is_cuda
    if single:
        step = step.float().double() if isinstance(step, torch.Tensor) else c_float(step).value
    out = torch.where(i < steps // 2, first + i.double() * step, last - (steps - 1 - i).double() * step)
    return (out.float() if single else out).to(dtype)


def counted_wide(parts: Parts, x: torch.Tensor, target: torch.Tensor, weight: Any, *how: int) -> Any:
    """A mean loss, and its number of rows or sum of weights, which torch's parts add in ``x``'s dtype: bfloat16 has no
    4,784. Like eager's kernels, in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    found = parts(x.to(wide), target, None if weight is None else weight.to(wide), *how)
    return tuple(t.to(x.dtype) for t in found)
