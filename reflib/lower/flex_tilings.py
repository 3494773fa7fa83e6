"""Tilings of fused attention: what to take unmeasured, first, and what else is worth measuring."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from reflib.errors import OptionError
from reflib.ir.expr import Expr
from reflib.ir.flex import INPUTS, FlexKernel, FlexTiling
from reflib.ir.loops import Load
from reflib.ir.transforms import varying
from reflib.target import Target

LARGEST_HEAD = 256
LEAST_BLOCK = 16  # queries or keys: what tensor cores take
ONE_ORDER = 64  # of those that are walked along, at most, where their sums have one order

Row = tuple[int, int, int, int]  # m, n, warps, stages
# By kind and the larger head size: the first is the default. (64 rows of "decode" would be products of a warp group on
# Hopper: one call was wrong so on an H200, in either half precision, with a last block of keys that is not whole; the
# same text is right in Triton's interpreter. Not explained.)
HOPPER: dict[tuple[str, int], Sequence[Row]] = {
    ("forward", 64): [(128, 128, 4, 3), (128, 64, 4, 3), (128, 128, 8, 3), (128, 64, 4, 4), (64, 128, 4, 3)],
    ("forward", 128): [(128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3)],
    ("forward", 256): [(64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 3)],
    ("decode", 64): [(32, 128, 4, 3)],
    ("decode", 128): [(32, 64, 4, 3)],
    ("decode", 256): [(32, 32, 4, 3)],
    ("dq", 64): [(128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    ("dq", 128): [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 128, 8, 2)],
    ("dq", 256): [(64, 64, 8, 1), (64, 32, 4, 2), (64, 64, 4, 1)],
    ("dkv", 64): [(64, 128, 8, 3), (64, 128, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 4, 2)],
    ("dkv", 128): [(64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)],
    ("dkv", 256): [(64, 64, 8, 1), (32, 64, 8, 1), (32, 64, 4, 1)],
}
AMPERE: dict[tuple[str, int], Sequence[Row]] = {
    ("forward", 64): [(128, 64, 4, 3), (128, 32, 4, 4), (128, 128, 8, 2), (64, 64, 4, 3)],
    ("forward", 128): [(128, 64, 8, 3), (128, 32, 4, 3), (64, 64, 4, 3), (128, 32, 8, 4)],
    ("forward", 256): [(64, 32, 4, 2), (128, 32, 8, 2), (32, 64, 4, 2)],
    ("decode", 64): [(32, 128, 4, 3)],
    ("decode", 128): [(32, 64, 4, 3)],
    ("decode", 256): [(32, 32, 4, 3)],
    ("dq", 64): [(64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 4, 3)],
    ("dq", 128): [(64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 3)],
    ("dq", 256): [(64, 32, 4, 1), (64, 32, 8, 1), (32, 32, 4, 1)],
    ("dkv", 64): [(64, 64, 4, 2), (64, 128, 8, 2), (32, 128, 4, 3)],
    ("dkv", 128): [(64, 64, 4, 2), (32, 128, 8, 2), (32, 64, 4, 3)],
    ("dkv", 256): [(32, 64, 8, 1), (32, 64, 4, 1), (32, 32, 4, 1)],
}
# Without tensor cores a block's product is in registers: it must be small.
FULL: dict[tuple[str, int], Sequence[Row]] = {
    ("forward", 64): [(64, 32, 4, 2), (128, 32, 4, 2), (32, 64, 4, 2)],
    ("forward", 128): [(32, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)],
    ("forward", 256): [(32, 32, 4, 1), (16, 32, 4, 1)],
    ("decode", 64): [(32, 32, 4, 2)],
    ("decode", 128): [(32, 32, 4, 2)],
    ("decode", 256): [(16, 32, 4, 1)],
    ("dq", 64): [(32, 32, 4, 1), (32, 32, 4, 2), (16, 16, 4, 1)],
    ("dq", 128): [(32, 32, 4, 1), (16, 16, 4, 1)],
    ("dq", 256): [(16, 16, 4, 1)],
    ("dkv", 64): [(32, 32, 4, 1), (32, 32, 4, 2), (16, 16, 4, 1)],
    ("dkv", 128): [(32, 32, 4, 1), (16, 16, 4, 1)],
    ("dkv", 256): [(16, 16, 4, 1)],
}


def tilings(kernel: FlexKernel, heads: tuple[int, int], target: Target) -> list[FlexTiling]:
    """Candidates for heads of these sizes (of queries, and of values), the best guess first: in the order of the
    tables, but those that fit with fewer stages only come after the others. Where the slot reads something for each
    score, Triton keeps that in shared memory as well: then those come last that leave room for few warps."""
    found: dict[FlexTiling, tuple[bool, bool]] = {}
    asked = dict(kernel.asked)
    for listed in (replace(t, **asked) for t in _listed(kernel, heads, target)):
        t, reads = listed, _read(kernel, listed) >= listed.m * listed.n
        while (
            "num_stages" not in asked
            and t.num_stages > (2 if _fits(kernel, t, heads, target) else 1)
            and not (_fits(kernel, t, heads, target) and (not reads or _busy(kernel, t, heads, target)))
        ):
            t = replace(t, num_stages=t.num_stages - 1)
        if _fits(kernel, t, heads, target):
            found.setdefault(t, (reads and not _busy(kernel, t, heads, target), t != listed))
    least = replace(FlexTiling(LEAST_BLOCK, LEAST_BLOCK, 4, 1), **asked)
    if not found and asked and not _fits(kernel, least, heads, target):
        size = shared_bytes(kernel, least, heads, target)
        raise OptionError(
            f"flex_attention's kernel_options ask for a tiling of {least}, which takes {size} bytes of shared memory; "
            f"{target.arch} has {target.shared}: give smaller blocks or fewer num_stages, or leave them out"
        )
    return sorted(found, key=lambda t: found[t]) or [least]


def _fits(kernel: FlexKernel, t: FlexTiling, heads: tuple[int, int], target: Target) -> bool:
    return shared_bytes(kernel, t, heads, target) <= target.shared


def _busy(kernel: FlexKernel, t: FlexTiling, heads: tuple[int, int], target: Target) -> bool:
    """Has a multiprocessor's shared memory room for programs of eight warps in all?"""
    return t.num_warps * (target.shared // shared_bytes(kernel, t, heads, target)) >= 8


def _listed(kernel: FlexKernel, heads: tuple[int, int], target: Target) -> Iterator[FlexTiling]:
    largest = max(heads)
    table = HOPPER if _from_shared(target) else AMPERE
    if kernel.dtype == torch.float32:
        table = FULL
    listed = table[kernel.kind, 64 if largest <= 64 else 128 if largest <= 128 else 256]
    if kernel.one_order:
        yield _in_one_order(kernel, listed, target)
        return
    for m, n, warps, stages in listed:
        queries, keys = (a.size for a in kernel.slot.axes[2:])
        m, n = _covering(m, queries * kernel.packed), _covering(n, keys)
        block_q, block_k = kernel.blocks
        if block_q:  # a block of the mask is whole blocks of scores
            m, n = m if kernel.kind == "decode" else _dividing(m, block_q), _dividing(n, block_k)
        yield FlexTiling(m, n, warps, stages if target.kind == "cuda" else 1)


def _in_one_order(kernel: FlexKernel, listed: Sequence[Row], target: Target) -> FlexTiling:
    """What is walked along is added up block by block: its block follows from the table alone. The other side's may be
    half of 128 where that covers a known length: a warp group of Hopper's has 64 rows either way."""
    walked, kept = (0, 1) if kernel.kind == "dkv" else (1, 0)
    row = next(r for r in listed if r[walked] <= ONE_ORDER)
    length = kernel.slot.axes[2 + kept].size.constant
    if row[kept] == 128 and kernel.dtype != torch.float32 and _from_shared(target) and 0 < (length or 0) <= 64:
        return FlexTiling(*((64, row[1]) if kept == 0 else (row[0], 64)), 4, row[3])
    return FlexTiling(*row[:3], row[3] if target.kind == "cuda" else 1)


def _covering(most: int, size: Expr) -> int:
    """As large as a length that is known, where that is short."""
    return most if size.constant is None else max(LEAST_BLOCK, min(most, 1 << (size.constant - 1).bit_length()))


def _dividing(most: int, size: int) -> int:
    """The largest power of two that divides ``size`` and is at most ``most``."""
    return min(most, size & -size)


def shared_bytes(kernel: FlexKernel, t: FlexTiling, heads: tuple[int, int], target: Target) -> int:
    """What a program's blocks take: those it keeps, and as many of those it walks along as are on their way, what the
    slot reads for each score among them. (Hopper's and data-centre Blackwell's products read one while another arrives:
    one more.)"""
    d, e = (1 << max(4, (n - 1).bit_length()) for n in heads)
    kept, moving = (t.n, t.m) if kernel.kind == "dkv" else (t.m, t.n)
    forward = kernel.kind in ("forward", "decode")
    resident = kept * (d if forward else d + e)
    product = 0 if forward else t.m * t.n * (2 if kernel.kind == "dkv" else 1)
    coming = max(1, t.num_stages - (not _from_shared(target)))
    return (resident + product + coming * moving * (d + e)) * kernel.dtype.itemsize + coming * _read(kernel, t)


def _from_shared(target: Target) -> bool:
    """Do its products read operands from shared memory?"""
    return 90 <= target.capability < 120


def _read(kernel: FlexKernel, t: FlexTiling) -> int:
    """Bytes that the slot reads for a block of scores."""
    body = kernel.slot.body
    sides = {a.var: size for a in kernel.slot.axes if (size := {"m": t.m, "n": t.n}.get(a.var.name))}
    along = [varying(body, {v}) for v in sides]
    walked = 0 if kernel.kind == "dkv" else 1
    return sum(
        s.dtype.itemsize * prod(size for size, inner in zip(sides.values(), along) if inner[i])
        for i, s in enumerate(body)
        if isinstance(s, Load) and s.buffer not in INPUTS and along[walked][i]
    )
