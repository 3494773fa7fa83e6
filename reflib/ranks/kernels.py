"""All-reduce over symmetric storage on GPUs: one Triton kernel per call, in which ranks meet.

The memory of each rank, whose addresses are in ``table``, begins with words in which ranks meet (``front`` bytes; then
what ``symmetric.Storage`` counts). They are, each 8 bytes::

    heard[block][rank]          where the values of that rank begin: written by the block itself
    flags[3][block][rank]       0, or what that rank says

**Meeting.** Block i of a rank only reads what the blocks i of all ranks have written, because all cut their values
alike; so it meets only those. It writes into their flags what it says (release: with all that the block stored
before), and takes from its own what they say (acquire), which leaves 0 for the next time. The meetings of a call, at
most three, have flags of their own. A flag is free when it is written: a rank that has not taken it yet cannot have
come to the meeting after, which the writer has left. So no rank waits for an answer, and a CUDA graph may replay the
kernel as often as it likes. A block that waits needs only blocks of the same number, and GPUs start blocks in order:
none waits for one that cannot start.

**What is said** has two halves: a number for the kind of call (way, bytes, dtype), and where the values lie. Another
kind, or none in time, ends the kernel with an assertion.

Values are added in the order of ranks, so all ranks have the same bits; halves in float32.

NB: PyTorch's kernels over symmetric memory meet by compare-and-swap on one set of flags, and so wait twice.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import triton
import triton.language as tl

from .symmetric import share_of

UNIT = 16  # bytes: values begin at multiples of this
BLOCKS = tl.constexpr(128)  # for which there are flags
BYTES, WARPS, MOST = 8192, 16, 128  # a launch: bytes per step of a block, its warps, blocks
MEETINGS = 3
POLLS_PER_SECOND = 2_000_000  # about; a poll takes half a microsecond or more


def front(size: int) -> int:
    """Bytes in front of the memory of each of ``size`` ranks: 0 at first."""
    return -(-8 * BLOCKS.value * size * (1 + MEETINGS) // 4096) * 4096


def all_reduce(how: str, s: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    """Of flat tensors; s: the storage; x: there, or at most as large as the space for copies."""
    n, size, at = x.numel(), x.element_size(), s.offset(x)
    per_block = BYTES // size
    share = n if how == "one_shot" else share_of(x, s.size)
    grid = (max(1, min(MOST, -(-share // per_block))),)
    where = s.copied if at is None else at
    kind = zlib.crc32(f"{how} {n} {x.dtype}".encode()) >> 1 | 1  # 31 bits
    said = kind << 32 | where // UNIT + 1
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    facts = {
        "COPY": at is None, "RANK": s.rank, "WORLD": s.size, "FRONT": s.front, "BLOCK": per_block,
        "POLLS": min(2**31 - 1, int(s.limit * POLLS_PER_SECOND)),
        "WIDE": getattr(tl, str(wide).removeprefix("torch.")),
    }  # fmt: skip
    options = {"num_warps": WARPS, "debug": True, "sanitize_overflow": False}  # (debug: assertions are compiled)
    if how == "one_shot":
        one_shot[grid](s.table, x, out, said, n, **facts, **options)
    else:
        two_shot[grid](s.table, x, out, said, n, share, SUMS=s.sums, **facts, **options)


@triton.jit
def meet(
    table, said, number: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, POLLS: tl.constexpr, FRONT: tl.constexpr,
):  # fmt: skip
    """This block and those of its number on other ranks. What each says is in ``heard`` then, as an address."""
    block = tl.program_id(0)
    first = 8 * WORLD * (BLOCKS * (1 + number) + block)  # of this block's flags in this meeting
    own = tl.load(table + RANK)
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        other = (RANK + step) % WORLD
        flag = (tl.load(table + other) + first + 8 * RANK).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(flag, said, sem="release", scope="sys")
    for step in tl.static_range(1, WORLD):
        other = (RANK + WORLD - step) % WORLD
        flag = (own + first + 8 * other).to(tl.pointer_type(tl.int64))
        polls = 0
        heard = tl.atomic_xchg(flag, 0, sem="acquire", scope="sys")
        while (heard == 0) & (polls < POLLS):
            heard = tl.atomic_xchg(flag, 0, sem="acquire", scope="sys")
            polls += 1
        tl.device_assert(heard != 0, "reflib: a rank did not come to an all-reduce over symmetric storage in time")
        tl.device_assert((heard >> 32) == (said >> 32), "reflib: ranks exchange different things in symmetric storage")
        if number == 0:
            _tell(own, table, other, heard, block, WORLD, FRONT)
    if number == 0:
        _tell(own, table, RANK, said, block, WORLD, FRONT)
    tl.debug_barrier()


@triton.jit
def _tell(own, table, rank, said, block, WORLD: tl.constexpr, FRONT: tl.constexpr):
    address = tl.load(table + rank) + FRONT + ((said & 0xFFFFFFFF) - 1) * 16
    tl.store((own + 8 * (WORLD * block + rank)).to(tl.pointer_type(tl.int64)), address)


@triton.jit
def _values(own, rank, like, WORLD: tl.constexpr):
    """Where a rank's values begin."""
    heard = (own + 8 * (WORLD * tl.program_id(0) + rank)).to(tl.pointer_type(tl.int64))
    return tl.multiple_of(tl.load(heard).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _total(own, i, here, like, WIDE: tl.constexpr, WORLD: tl.constexpr):
    total = tl.load(_values(own, 0, like, WORLD) + i, here).to(WIDE)
    for rank in tl.static_range(1, WORLD):
        total += tl.load(_values(own, rank, like, WORLD) + i, here).to(WIDE)
    return total.to(like.dtype.element_ty)


@triton.jit
def _own_values(own, said, like, FRONT: tl.constexpr):
    address = own + FRONT + ((said & 0xFFFFFFFF) - 1) * 16
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit(do_not_specialize=["said"])
def one_shot(
    table, x, out, said, n,
    COPY: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, FRONT: tl.constexpr, BLOCK: tl.constexpr,
    POLLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out = the sum over ranks of their values. COPY: ``x`` is not in storage; it goes where ``said`` says."""
    own = tl.load(table + RANK)
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    if COPY:
        values = _own_values(own, said, out, FRONT)
        for start in range(first, n, step):
            i = start + tl.arange(0, BLOCK)
            tl.store(values + i, tl.load(x + i, i < n), i < n)
    meet(table, said, 0, RANK, WORLD, POLLS, FRONT)
    for start in range(first, n, step):
        i = start + tl.arange(0, BLOCK)
        tl.store(out + i, _total(own, i, i < n, out, WIDE, WORLD), i < n)
    meet(table, said, 2, RANK, WORLD, POLLS, FRONT)  # then none reads any more


@triton.jit(do_not_specialize=["said"])
def two_shot(
    table, x, out, said, n, share, SUMS: tl.constexpr,
    COPY: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, FRONT: tl.constexpr, BLOCK: tl.constexpr,
    POLLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same: each rank adds up its ``share`` of the values, into SUMS; then all read all sums."""
    own = tl.load(table + RANK)
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    if COPY:
        values = _own_values(own, said, out, FRONT)
        for start in range(first, share, step):
            i = start + tl.arange(0, BLOCK)
            for rank in tl.static_range(WORLD):
                here = (i < share) & (i + rank * share < n)
                tl.store(values + rank * share + i, tl.load(x + rank * share + i, here), here)
    meet(table, said, 0, RANK, WORLD, POLLS, FRONT)
    sums = tl.multiple_of((own + FRONT + SUMS).to(tl.pointer_type(out.dtype.element_ty)), 16)
    for start in range(first, share, step):
        i = start + tl.arange(0, BLOCK)
        here = (i < share) & (i + RANK * share < n)
        tl.store(sums + i, _total(own, i + RANK * share, here, out, WIDE, WORLD), here)
    meet(table, said, 1, RANK, WORLD, POLLS, FRONT)
    for start in range(first, share, step):
        i = start + tl.arange(0, BLOCK)
        for rank in tl.static_range(WORLD):
            here = (i < share) & (i + rank * share < n)
            theirs = (tl.load(table + rank) + FRONT + SUMS).to(tl.pointer_type(out.dtype.element_ty))
            tl.store(out + rank * share + i, tl.load(tl.multiple_of(theirs, 16) + i, here), here)
    meet(table, said, 2, RANK, WORLD, POLLS, FRONT)
