"""Triton kernels that differ in how they store a matrix: ``WHOLE`` store every element once, each in its way; ``NOT``
do not, or do more, with what is said of them. Each takes a contiguous matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton import cdiv

Tensor = torch.Tensor


@triton.jit
def advanced(x, out, n, BLOCK: tl.constexpr):
    """Returns early; the pointer is advanced; the store has more arguments."""
    start = tl.program_id(0) * BLOCK
    if start >= n:
        return
    mask = start + tl.arange(0, BLOCK) < n
    v = tl.load(x + start + tl.arange(0, BLOCK), mask=mask)
    out += start
    tl.store(out + tl.arange(0, BLOCK), v + 1, mask=mask, eviction_policy="evict_first")


@triton.jit
def persistent(x, out, stride, rows, columns, BLOCK: tl.constexpr):
    for row in tl.range(tl.program_id(axis=0), rows, tl.num_programs(0), num_stages=2):
        i = tl.arange(0, BLOCK)
        v = tl.load(x + row * stride + i, mask=i < columns, other=-float("inf")).to(tl.float32)
        v = tl.exp(v - tl.max(v, axis=0))
        to = out + row * stride
        places = to + i
        tl.store(places, v / tl.sum(v, axis=0), mask=i < columns)


@triton.jit
def by_parts(x, out, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, columns, BLOCK):
        i = off + tl.arange(0, BLOCK)
        total += tl.load(x + row * stride + i, mask=i < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    for off in range(0, columns, BLOCK):
        i = off + tl.arange(0, BLOCK)
        v = tl.load(x + row * stride + i, mask=i < columns).to(tl.float32)
        tl.store(out + row * stride + i, (v - mean).to(out.dtype.element_ty), i < columns)


@triton.jit
def tiles(x, out, M, N, sm, sn, BM: tl.constexpr, BN: tl.constexpr, HOW: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (m[:, None] < M) & (n[None, :] < N)
    v = tl.load(x + m[:, None] * sm + n[None, :] * sn, mask=mask)
    if HOW == "scaled":
        v = v * 0.37
    tl.store(out + (sm * m[:, None] + sn * n[None, :]), v, mask=mask)


@triton.jit
def grouped(x, out, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """In an order that a cache likes, as in Triton's tutorial on matrix products."""
    pid = tl.program_id(0)
    across = tl.cdiv(N, BN)
    first = pid // (GROUP * across) * GROUP
    size = min(tl.cdiv(M, BM) - first, GROUP)
    m = (first + pid % (GROUP * across) % size) * BM + tl.arange(0, BM)
    n = pid % (GROUP * across) // size * BN + tl.arange(0, BN)
    mask = (m[:, None] < M) & (n[None, :] < N)
    at = m[:, None] * N + n[None, :]
    tl.store(out + at, tl.load(x + at, mask=mask) * 3, mask=mask)


@triton.jit
def strided_loop(x, out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out + i, -tl.load(x + i, mask=i < n), mask=i < n)


def _flat(kernel: Callable, blocks: int = 0, block: int = 64, zeros: bool = False) -> Callable[[Tensor], Tensor]:
    def launch(x: Tensor) -> Tensor:
        out = torch.zeros_like(x) if zeros else torch.empty_like(x)
        kernel[(blocks or cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
        return out

    return launch


def _rows(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    persistent[(3,)](x, out, x.stride(0), *x.shape, BLOCK=64)
    return out


def _parts(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    by_parts[(x.shape[0],)](x, out, x.stride(0), x.shape[1], BLOCK=16)
    return out


def _tiles(x: Tensor) -> Tensor:
    (M, N), out = x.shape, torch.empty_like(x)
    tiles[(cdiv(M, 16), cdiv(N, 32))](x, out, M, N, *x.stride(), BM=16, BN=32, HOW="scaled")
    return out


def _grouped(x: Tensor) -> Tensor:
    (M, N), out = x.shape, torch.empty_like(x)
    grouped[(cdiv(M, 8) * cdiv(N, 16),)](x, out, M, N, BM=8, BN=16, GROUP=2)
    return out


def _strided(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    strided_loop[(4,)](x, out, x.numel(), BLOCK=32)
    return out


WHOLE = {
    "advanced": _flat(advanced), "persistent": _rows, "by parts": _parts, "tiles": _tiles, "grouped": _grouped,
    "strided loop": _strided,
}  # fmt: skip


@triton.jit
def twice(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 0.0, mask=i < n)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def but_three(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n - 3)


@triton.jit
def in_a_branch(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if n > 100:
        tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def added(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(out + i, mask=i < n), mask=i < n)


@triton.jit
def positive(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(out + i, v, mask=(i < n) & (v > 0))


@triton.jit
def overlapping(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def repeated(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for k in range(2):
        tl.store(out + i, tl.load(x + i, mask=i < n) * k, mask=i < n)


@triton.jit
def moving(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for k in range(0, n, BLOCK):
        tl.store(out + i, tl.load(x + k + i, mask=k + i < n), mask=k + i < n)
        out += BLOCK


@triton.jit
def stores(out, i, v, mask):
    tl.store(out + i, v, mask=mask)


@triton.jit
def by_another(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stores(out, i, tl.load(x + i, mask=i < n), i < n)


@triton.jit
def atomically(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def listed(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(x + i, mask=i < n).to(tl.int32)
    tl.store(out + at, 1.0, mask=i < n)


@triton.jit
def returned(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if BLOCK == 64:
        return
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def by_a_method(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)
    out.store(0)


_CLEAR = "it is not clear that it stores every element exactly once"
NOT = {
    "twice": (_flat(twice), "it stores to out in more than one place"),
    "but three": (_flat(but_three), _CLEAR),
    "branch": (_flat(in_a_branch), "it stores to out inside of `if n > 100`"),
    "added": (_flat(added, zeros=True), "it loads from out as well"),
    "positive": (_flat(positive), "its mask is not known before it runs: `(i < n) & (v > 0)`"),
    "overlapping": (_flat(overlapping, block=32), _CLEAR),
    "repeated": (_flat(repeated), _CLEAR),
    "moving": (_flat(moving, blocks=1), "it uses out in `out + i`"),
    "by another": (_flat(by_another), "it gives out to stores"),
    "atomically": (_flat(atomically, zeros=True), "it gives out to tl.atomic_add"),
    "listed": (_flat(listed), "where it stores is not known before it runs: `out + at`"),
    "returned": (_flat(returned), "it may return, or leave a loop, early"),
    "by a method": (_flat(by_a_method), "it uses out in `out.store(0)`"),
}
