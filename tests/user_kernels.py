"""Functions that launch Triton kernels of their own, each with arguments and the same function in PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch._higher_order_ops import while_loop
from triton.language.extra import libdevice

import reflib
from reflib.ir.program import Extern
from reflib.ir.user_kernel import UserKernel
from tests import user_kernel_helpers as helpers
from tests.user_kernel_helpers import scaled as tripled

Tensor = torch.Tensor
FACTOR = tl.constexpr(2)
BLOCK_SIZE = 64
large = 2**31 + 16


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def scaled(x):
    return x * FACTOR


@triton.jit
def mixed_kernel(
    x: tl.pointer_type(tl.float32), flags, out, n: tl.int64, scale, one, wide, none, negate, shift: tl.float64,
    BLOCK: tl.constexpr = BLOCK_SIZE,
) -> None:
    """Constants of two modules with one name, helper functions likewise, and an argument; arguments of all types."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n.to(tl.int64)
    v = tripled(tl.load(x + i, mask=mask)) + helpers.shift(scaled(tl.load(x + i * one, mask=mask)), scale)
    v += tripled(1.0) + libdevice.sqrt(scale) + (wide // 2**30).to(tl.float32)
    v += shift.to(tl.float32) * helpers.Numbers.one
    if none is not None:
        v = v * 100
    if negate:
        v = -v
    if tl.program_id(0) * BLOCK >= n:
        return
    keep = ~tl.load(flags + i, mask=mask, other=True)
    tl.store(out + i, tl.where(keep, v, 0.0), mask=mask)


@triton.jit
def both_kernel(x, total, largest, rows, columns, stride, BLOCK: tl.constexpr):
    row, part = tl.program_id(1), tl.program_id(0)
    i = part * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * stride + i, mask=i < columns, other=0.0)
    parts = tl.num_programs(0)
    tl.store(total + row * parts + part, tl.sum(v))
    tl.store(largest + row * parts + part, tl.max(tl.where(i < columns, v, float("-inf"))) + tl.program_id(2))


@triton.jit
def matrix_kernel(a, out, M: tl.constexpr = 16, N: tl.constexpr = 32):
    row = tl.program_id(0) * M
    out.store([row, 0], a.load([row, 0]) * 2)


@triton.jit
def tuples_kernel(inputs, outputs, n: tl.int64, BLOCK: tl.constexpr, LAST: tl.constexpr = 1):
    """Tensors and numbers in tuples."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    by = inputs[1]
    x, y = inputs[0]
    v = tl.load(x + i, mask=i < n) * by[0] + tl.load(y + i, mask=i < n)
    tl.store(outputs[0] + i, v, mask=i < n.to(tl.int64))
    tl.store(outputs[LAST] + i, v + len(outputs), mask=i < n)


@triton.autotune(
    [triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128}, num_warps=4, num_stages=2)],
    key=["n"], reset_to_zero=["total"], restore_value=["y"],
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def sums_kernel(y, total, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Adds 1 to y, and up all of it: twice in a row it would be wrong."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(y + i) + 1 if EVEN else tl.load(y + i, mask=i < n, other=-1.0) + 1
    tl.store(y + i, v, mask=i < n)
    tl.atomic_add(total, tl.sum(v))


def grid(n: Any) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


def plain(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[grid(x.numel())](x * 2, y, out, x.numel(), BLOCK=64)
    return out.relu()


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    """A launch and an allocation for each of ``weights``."""
    for w in weights:
        out = torch.empty_like(x)
        add_kernel[grid(x.numel())](x, w, out, x.numel(), BLOCK=256)
        x = out
    return x


def in_place(x: Tensor, y: Tensor) -> Tensor:
    """``x`` is written to, and is an argument twice."""
    add_kernel[grid(x.numel())](x, y, x, x.numel(), BLOCK=64)
    return x - y


def chained(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Slices in and out; the second launch reads what the first wrote, what neither writes stays."""
    out, more = x.new_zeros(x.numel() + 4), x.clone()
    n = x.numel() - 4
    add_kernel[(4, 1)](x[4:], y, out[3:], n, BLOCK=64, num_warps=2)
    add_kernel[(4,)](out[4:], y[1:], more[2:], n, BLOCK=64, num_stages=5)
    return out, more + 1


def mixed(x: Tensor, flags: Tensor) -> Tensor:
    out = torch.empty_like(x)
    n = x.numel()
    mixed_kernel[(5,)](x, flags, out, n, 0.25, 1, large, None, True, shift=1.25, BLOCK=64)
    return out + 1


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs, a grid of three dimensions, an input with gaps between its rows."""
    rows, columns = x.shape
    total, largest = x.new_empty(rows, 2), torch.empty_strided((rows, 2), (2, 1), device=x.device)
    both_kernel[lambda meta: (2, rows, 1)](
        x, total, largest, rows, columns, x.stride(0), BLOCK=triton.next_power_of_2(columns) // 2
    )
    return total.sum(1), largest.amax(1)


def tuples(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x)
    tuples_kernel[grid(x.numel())](((x * 2, y), (3.0, None)), outputs=(out, y), n=x.numel(), BLOCK=64)
    return out, y + 1


def described(x: Tensor) -> Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    out = torch.empty_like(x)
    a, b = (TensorDescriptor.from_tensor(t, [16, 32]) for t in (x, out))
    matrix_kernel[(x.shape[0] // 16,)](a, b, 16, 32)
    return out + 1


@torch.library.triton_op("user_kernels::describing", mutates_args=())
def describing(x: Tensor) -> Tensor:
    """Descriptors, here one of columns, which PyTorch captures under Dynamo only; an argument has its default."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, columns = x.shape
    out = x.new_empty(rows, 32)
    a = TensorDescriptor(x, [rows, 32], [columns, 1], [16, 32])
    b = TensorDescriptor.from_tensor(out, [16, 32])
    torch.library.wrap_triton(matrix_kernel)[lambda meta: (triton.cdiv(rows, meta["M"]),)](a, b, M=16)
    return out


def described_in_an_op(x: Tensor) -> Tensor:
    return describing(x) - 1


def summed(y: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.zeros(1, device=y.device)
    sums_kernel[grid(y.numel())](y, total, y.numel())
    return total * 2, y + 1


def branching(x: Tensor, y: Tensor) -> Tensor:
    x = torch.cond(x.sum() > y.sum(), lambda x, y: plain(x, y) - 3, lambda x, y: x - y, (x, y))
    first = x.new_zeros((), dtype=torch.int64)
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, plain(x, y)), (first, x))[1]


def eager_branching(x: Tensor, y: Tensor) -> Tensor:
    x = (x * 2 + y).relu() - 3 if x.sum() > y.sum() else x - y
    for _ in range(3):
        x = (x * 2 + y).relu()
    return x


def eager_in_place(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x - y


def eager_chained(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out, n = x.new_zeros(x.numel() + 4), x.numel() - 4
    out[3 : 3 + n] = x[4:] + y[:n]
    more = x.clone()
    more[2 : 2 + n] = out[4 : 4 + n] + y[1 : 1 + n]
    return out, more + 1


def eager_mixed(x: Tensor, flags: Tensor) -> Tensor:
    v = x * 3 + x * 6 + 0.25 + 3 + 0.5 + 2 + 1.25
    return torch.where(flags, 0.0, -v) + 1


def eager_both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(1), x.amax(1)


def eager_tuples(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = x * 2 * 3 + y
    y.copy_(out + 2)
    return out, y + 1


def eager_summed(y: Tensor) -> tuple[Tensor, Tensor]:
    y += 1
    return y.sum().view(1) * 2, y + 1


Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]


def cases() -> dict[str, Case]:
    """By name: the function, the same in PyTorch alone, arguments."""
    torch.manual_seed(0)
    x, y, flags = torch.randn(203), torch.randn(203), torch.rand(203) > 0.5
    return {
        "plain": (plain, lambda x, y: (x * 2 + y).relu(), (x, y)),
        "in place": (in_place, eager_in_place, (x, y)),
        "chained": (chained, eager_chained, (x, y)),
        "mixed": (mixed, eager_mixed, (x, flags)),
        "both": (both, eager_both, (torch.randn(9, 100)[:, :90],)),
        "tuples": (tuples, eager_tuples, (x, y)),
        "described": (described, lambda x: x * 2 + 1, (torch.randn(48, 32),)),
        "described in an op": (described_in_an_op, lambda x: x[:, :32] * 2 - 1, (torch.randn(48, 64),)),
        "branching": (branching, eager_branching, (x + 1, y)),
        "summed": (summed, eager_summed, (y,)),
    }


# -- what became of them -----------------------------------------------------------------------------------
def explain(fn: Any, *args: Any, **options: Any) -> Any:
    return reflib.explain(fn, *args, **{"target": "sm_90", "verify": True, **options})


def launches(e: Any) -> list[Extern]:
    return [n for n in e.program.nodes if isinstance(n, Extern) and isinstance(n.target, UserKernel)]


def kernel(e: Any, name: str) -> Any:
    return next(k for k in e.kernels if k.name.partition("_")[2].startswith(name))
