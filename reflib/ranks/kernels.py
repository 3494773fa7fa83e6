"""Sums over symmetric storage on GPUs: one Triton kernel per call, in which ranks meet.

The memory of each rank, whose addresses are in ``table``, begins with words in which ranks meet (``front`` bytes; then
what ``symmetric.Storage`` counts). They are, each 8 bytes::

    heard[block][rank]          where the values of that rank begin: written by the block itself
    flags[3][block][rank]       0, or what that rank says
    calls[block]                how many calls have taken a turn; each block has the number
    words[2][2][rank][...]      of ``flagged``, in turn and per step; the first says what a rank does

**Meeting.** Block i of a rank only reads what the blocks i of all ranks have written, because all cut their values
alike; so it meets only those. It writes into their flags what it says (release: with all that the block stored
before; one thread per rank, so that none waits for another's), and reads from its own what they say (acquire), each
thread for itself; then it leaves 0 there for the next time. A block that waits needs only blocks of the same number,
and GPUs start blocks in order: none waits for one that cannot start.

**A flag is free when it is written**, so no rank waits for an answer, and a CUDA graph may replay the kernel as often
as it likes: a rank that has not taken the flag yet cannot have come to the meeting after, which the writer has left.
(Meetings of a call have numbers of their own.)

**Turns.** What a call leaves for others to read must lie there until they have. The next call uses another place: who
begins the call after the next has left the next, to which all others have come.

======================  ============================================================  ========
kernel                  what a block does                                             meetings
======================  ============================================================  ========
flagged                 writes words with flags to all, adds up what comes            0
pull                    adds up what all have for this rank, where it lies            2
two_shot                adds up this rank's share, which it reads from all; then      2
                        reads the others' sums
landed                  adds up what has been copied here (``products``)              1
======================  ============================================================  ========

**What is said** has two halves: a number for the kind of call (way, bytes, dtype), and where the values lie. Another
kind, or none in time, ends the kernel with an assertion.

**Words with flags.** A meeting is a fence, which waits until all that was written has arrived, and a flag behind it:
two ways through the wires. Small sums go without: each four bytes of values travel with four of the call's number, in
one store of eight, which arrives whole. A thread waits for the words that it adds up, and no block for another. It is
twice the bytes, so up to SENT only. What a call's words say stays until the next but one writes there; each call
has another number, and a kernel ends when it has heard from all ranks, so turns hold as above.

Values are added in the order of ranks, so all ranks have the same bits; halves in float32.

NB: PyTorch's kernels over symmetric memory meet by compare-and-swap on one set of flags, and so wait twice. Flags
beside the data are the idea of NCCL's protocol for small messages, "LL".
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import triton
import triton.language as tl

from .symmetric import SENT, share_of
from .words import hear, put, say, send, sum_of_words, take, took, word_of

UNIT = 16  # bytes: values begin at multiples of this
BLOCKS = tl.constexpr(128)  # for which there are flags
BYTES, PULLED, WARPS, MOST = 8192, 16384, 16, 128  # a launch: bytes per step of a block (of ``pull``), warps, blocks
MEETINGS = tl.constexpr(3)
POLLS_PER_SECOND = 2_000_000  # about; a poll takes half a microsecond or more
AREA, HEAD = 8 << 20, tl.constexpr(256)  # bytes of the words of ``flagged``, per turn; before those of a rank
WORDS, WORD_WARPS = 512, 16  # per step of a block of ``flagged``


def front(size: int) -> int:
    """Bytes in front of the memory of each of ``size`` ranks: 0 at first."""
    return _before_words(size) + 2 * AREA


def _before_words(size: int) -> int:
    """Of these, before the words of ``flagged``."""
    return -(-8 * BLOCKS.value * (size * (1 + MEETINGS.value) + 1) // 4096) * 4096


def all_reduce(how: str, s: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    """Of flat tensors; s: the storage; at most ``s.most(x)`` elements."""
    if how == "one_shot":
        return shares(how, s, x[None], out)
    n, at = x.numel(), s.offset(x)
    share, where = share_of(x, s.size), s.copied if at is None else at
    if _small(how, s, x, share):
        return _flagged(how, s, x, out, share, share, n)
    grid, facts = _launch(s, share, x.dtype)
    what = said(how, n, x.dtype) | where // UNIT
    two_shot[grid](s.table, x, out, what, n, share, SUMS=s.sums, HALF=(s.bytes - s.sums) // 2, COPY=at is None, **facts)


def shares(how: str, s: Any, x: torch.Tensor, out: torch.Tensor) -> None:
    """out = the sum over ranks of what they have for this one; x: per rank, what is for it, or what is for all."""
    n, size, apart = out.numel(), x.element_size(), 0 if len(x) == 1 else x.stride(0) * x.element_size()
    if _small(how, s, x, n):
        return _flagged(how, s, x, out, n, apart // size, (len(x) - 1) * apart // size + n)
    at = s.offset(x)
    if at is None or apart % UNIT:
        at, width = s.copied, -(-n * size // UNIT) * UNIT // size
        s.part(s.rank, at, (len(x), width), x.dtype)[:, :n].copy_(x)
        apart = width * size if len(x) > 1 else 0
    grid, facts = _launch(s, n, x.dtype, PULLED)
    pull[grid](s.table, out, said(how, n, x.dtype) | at // UNIT, n, apart // UNIT, **facts)


def _small(how: str, s: Any, x: torch.Tensor, n: int) -> bool:
    """Does a rank send so few of ``x``, n values to each other, that words with flags are faster?"""
    nbytes = n * x.element_size()
    fits = HEAD.value + 2 * -(-nbytes // (4 * WORDS)) * (4 * WORDS) <= AREA // (2 * s.size)
    return x.element_size() <= 4 and fits and nbytes * (s.size if how == "two_shot" else 1) <= SENT[how]


def _flagged(how: str, s: Any, x: torch.Tensor, out: torch.Tensor, n: int, part: int, total: int) -> None:
    _, facts = _launch(s, 1, x.dtype)
    facts |= {"BLOCK": WORDS, "num_warps": WORD_WARPS}
    grid = (max(1, min(MOST, -(-n * x.element_size() // (4 * WORDS)))),)
    slot = AREA // (2 * s.size) // 16 * 16
    flagged[grid](
        s.memory, s.table, x, out, said(how, out.numel(), x.dtype), n, part, total, TWO=how == "two_shot", SLOT=slot,
        TAKE=take(s.size, slot), FIRST=_before_words(s.size), AREA=AREA, **facts,
    )  # fmt: skip


def landed_sum(s: Any, x: torch.Tensor, out: torch.Tensor, stride: int, what: int) -> None:
    """out = ``x``, this rank's, and what the others have copied to the landing, at multiples of ``stride`` bytes."""
    grid, facts = _launch(s, out.numel(), x.dtype)
    landed[grid](s.table, x, out, what, out.numel(), stride, LANDING=s.copied, **facts)


def meeting(s: Any, number: int, what: int) -> None:
    """Ranks meet, each in the order of its current stream."""
    _, facts = _launch(s, 1, torch.int64)
    names = ("RANK", "WORLD", "POLLS", "FRONT", "debug", "sanitize_overflow")
    meet_alone[(1,)](s.table, what, NUMBER=number, **{k: facts[k] for k in names}, num_warps=1)


def said(how: str, n: int, dtype: torch.dtype) -> int:
    """What a rank says of a call: not 0; the lower half is free for a place."""
    return (zlib.crc32(f"{how} {n} {dtype}".encode()) >> 1 | 1) << 32  # 31 bits


def _launch(s: Any, n: int, dtype: torch.dtype, nbytes: int = 0) -> tuple[tuple[int], dict[str, Any]]:
    per_block = (nbytes or BYTES) // dtype.itemsize
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return (max(1, min(MOST, -(-n // per_block))),), {
        "RANK": s.rank, "WORLD": s.size, "FRONT": s.front, "BLOCK": per_block,
        "POLLS": min(2**31 - 1, int(s.limit * POLLS_PER_SECOND)),
        "WIDE": getattr(tl, str(wide).removeprefix("torch.")),
        "num_warps": WARPS, "debug": True, "sanitize_overflow": False,  # (debug: assertions are compiled)
    }  # fmt: skip


# -- meeting ----------------------------------------------------------------------------------------------
@triton.jit
def meet(
    table, said, number, TELL: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, POLLS: tl.constexpr, FRONT: tl.constexpr, apart=0,
):  # fmt: skip
    """This block and those of its number on other ranks: a lane per rank, this one among them. What the next rank is
    told is ``apart`` behind. TELL: what each says is in ``heard`` then, as an address."""
    rank, one_each = tl.arange(0, 32) % WORLD, tl.arange(0, 32) < WORLD
    own, theirs = tl.load(table + RANK), tl.load(table + rank)
    flags = 8 * WORLD * (BLOCKS * (1 + number) + tl.program_id(0))
    tl.debug_barrier()
    say(theirs + flags + 8 * RANK, said + rank * apart, WORLD)
    flags = own + flags + 8 * rank
    heard = hear(flags, POLLS)
    tl.device_assert(heard != 0, "reflib: a rank did not come to an exchange over symmetric storage in time")
    tl.device_assert((heard >> 32) == (said >> 32), "reflib: ranks exchange different things in symmetric storage")
    tl.debug_barrier()
    tl.store(flags.to(tl.pointer_type(tl.int64)), 0, one_each)
    if TELL:
        place = own + 8 * (WORLD * tl.program_id(0) + rank)
        tl.store(place.to(tl.pointer_type(tl.int64)), theirs + FRONT + (heard & 0xFFFFFFFF) * 16, one_each)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["said"])
def meet_alone(
    table, said, NUMBER: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, POLLS: tl.constexpr, FRONT: tl.constexpr,
):  # fmt: skip
    meet(table, said, NUMBER, False, RANK, WORLD, POLLS, FRONT)


@triton.jit
def _values(own, like, WORLD: tl.constexpr):
    """Where the values of each rank begin."""
    heard, found = (own + 8 * WORLD * tl.program_id(0)).to(tl.pointer_type(tl.int64)), ()
    for rank in tl.static_range(WORLD):
        found += (_at(tl.load(heard + rank), like),)  # type: ignore[assignment]
    return found


@triton.jit
def _at(address, like):
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _calls(own, WORLD: tl.constexpr):
    return (own + 8 * WORLD * BLOCKS * (1 + MEETINGS)).to(tl.pointer_type(tl.int64))


@triton.jit
def _took_turn(own, calls, WORLD: tl.constexpr):
    """Each block counts for itself, and for those that this call has not."""
    i = tl.arange(0, BLOCKS)
    tl.store(_calls(own, WORLD) + i, calls + 1, i % tl.num_programs(0) == tl.program_id(0))


# -- sums -------------------------------------------------------------------------------------------------
@triton.jit
def _total(values, i, here, WIDE: tl.constexpr, WORLD: tl.constexpr):
    total = tl.load(values[0] + i, here).to(WIDE)
    for rank in tl.static_range(1, WORLD):
        total += tl.load(values[rank] + i, here).to(WIDE)
    return total.to(values[0].dtype.element_ty)


@triton.jit(do_not_specialize=["said", "apart"])
def pull(
    table, out, said, n, apart, RANK: tl.constexpr, WORLD: tl.constexpr, FRONT: tl.constexpr, BLOCK: tl.constexpr,
    POLLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out = the sum over ranks of the ``n`` values where they say. What is for another rank is ``apart`` * 16 bytes
    behind what is for the one before."""
    meet(table, said, 0, True, RANK, WORLD, POLLS, FRONT, apart)
    values = _values(tl.load(table + RANK), out, WORLD)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out + i, _total(values, i, i < n, WIDE, WORLD), i < n)
    meet(table, said, 1, False, RANK, WORLD, POLLS, FRONT)  # then none reads any more


@triton.jit(do_not_specialize=["said"])
def landed(
    table, x, out, said, n, stride, LANDING: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, FRONT: tl.constexpr, BLOCK: tl.constexpr,
    POLLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out = x and, when all have come, what lies in the landing."""
    own, values = tl.load(table + RANK), ()
    meet(table, said, 2, False, RANK, WORLD, POLLS, FRONT)
    for rank in tl.static_range(WORLD):  # the first place there is of the rank before
        if rank == RANK:
            values += (x,)  # type: ignore[assignment]
        else:
            before = (RANK + WORLD - rank) % WORLD - 1
            values += (_at(own + FRONT + LANDING + before * stride, x),)  # type: ignore[assignment]
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out + i, _total(values, i, i < n, WIDE, WORLD), i < n)


@triton.jit(do_not_specialize=["said"])
def two_shot(
    table, x, out, said, n, share, SUMS: tl.constexpr, HALF: tl.constexpr, COPY: tl.constexpr,
    RANK: tl.constexpr, WORLD: tl.constexpr, FRONT: tl.constexpr, BLOCK: tl.constexpr,
    POLLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out = the sum over ranks of their values: each adds up its ``share``, into SUMS or HALF behind it; then all read
    all sums. COPY: ``x`` is not in storage; it goes where ``said`` says."""
    own = tl.load(table + RANK)
    calls = tl.load(_calls(own, WORLD) + tl.program_id(0))
    where = FRONT + SUMS + calls % 2 * HALF
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    if COPY:
        values = _at(own + FRONT + (said & 0xFFFFFFFF) * 16, out)
        for start in range(first, share, step):
            i = start + tl.arange(0, BLOCK)
            for rank in tl.static_range(WORLD):
                here = (i < share) & (i + rank * share < n)
                tl.store(values + rank * share + i, tl.load(x + rank * share + i, here), here)
    meet(table, said, 0, True, RANK, WORLD, POLLS, FRONT)
    sums, values = _at(own + where, out), _values(own, out, WORLD)
    for start in range(first, share, step):
        i = start + tl.arange(0, BLOCK)
        here = (i < share) & (i + RANK * share < n)
        tl.store(sums + i, _total(values, i + RANK * share, here, WIDE, WORLD), here)
    meet(table, said, 1, False, RANK, WORLD, POLLS, FRONT)  # then none reads values any more
    for start in range(first, share, step):
        i = start + tl.arange(0, BLOCK)
        for other in tl.static_range(WORLD):  # (each rank begins with another one: none is asked by all at once)
            rank = (RANK + other) % WORLD
            here = (i < share) & (i + rank * share < n)
            tl.store(out + rank * share + i, tl.load(_at(tl.load(table + rank) + where, out) + i, here), here)
    _took_turn(own, calls, WORLD)


@triton.jit
def _all(table, WORLD: tl.constexpr):
    """Where each rank's memory begins."""
    found = ()
    for rank in tl.static_range(WORLD):
        found += (tl.load(table + rank),)  # type: ignore[assignment]
    return found


@triton.jit(do_not_specialize=["said", "n", "part", "total"], do_not_specialize_on_alignment=["x", "out"])
def flagged(
    memory, table, x, out, said, n, part, total, TWO: tl.constexpr, SLOT: tl.constexpr, TAKE: tl.constexpr,
    FIRST: tl.constexpr, AREA: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, FRONT: tl.constexpr,
    BLOCK: tl.constexpr, POLLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out = the sum over ranks of the ``n`` values that are for this one: for the rank r, those of x from ``part`` * r
    on, and before ``total``. TWO: then all ranks get all sums, in parts of ``n``. ``memory``: this rank's. (What is
    read is read before anything is sent: a load does not overtake a store.)"""
    block, own, lane = tl.program_id(0), memory.to(tl.int64), tl.arange(0, BLOCK)
    calls, theirs = tl.load(_calls(own, WORLD) + block), _all(table, WORLD)
    turn, flag = FIRST + calls % 2 * AREA, (calls + 1).to(tl.int32)
    mine, second = turn + SLOT * RANK, WORLD * SLOT + HEAD
    n_words, step = tl.cdiv(n * out.dtype.element_ty.primitive_bitwidth, 32), tl.num_programs(0) * BLOCK
    kind, late = (said >> 32).to(tl.int32), tl.zeros([BLOCK], tl.int1)
    for start in range(block * BLOCK, n_words, step):
        words = ()
        for rank in tl.static_range(WORLD):
            words += (word_of(x, start + lane, part * rank, n, total),)  # type: ignore[assignment]
        for other in tl.static_range(WORLD):
            place = mine + HEAD + 8 * (start + lane)
            send(theirs[(RANK + other) % WORLD] + place, words[(RANK + other) % WORLD], flag)
    if block == 0:  # all ranks do the same; of each slot, the first word says what
        for other in tl.static_range(WORLD):
            send(theirs[other] + mine + 0 * tl.arange(0, 32), kind, flag)
        kinds = took(own + turn + 0 * tl.arange(0, 32), flag, TAKE, POLLS, WORLD)
        same = kinds[0] == kind
        for rank in tl.static_range(1, WORLD):
            same &= kinds[rank] == kind
        tl.device_assert(same | (kinds[WORLD] == 0), "reflib: ranks exchange different things in symmetric storage")
    for start in range(block * BLOCK, n_words, step):
        words = took(own + turn + HEAD + 8 * (start + lane), flag, TAKE, POLLS, WORLD)
        word = sum_of_words(words, out, WIDE, WORLD)
        late |= words[WORLD] == 0
        if TWO:
            for other in tl.static_range(1, WORLD + 1):
                send(theirs[(RANK + other) % WORLD] + mine + second + 8 * (start + lane), word, flag)
        else:
            put(out, word, start + lane, 0, n, n)
    if TWO:
        for start in range(block * BLOCK, n_words, step):
            words = took(own + turn + second + 8 * (start + lane), flag, TAKE, POLLS, WORLD)
            late |= words[WORLD] == 0
            for rank in tl.static_range(WORLD):
                put(out, words[rank], start + lane, n * rank, n, total)
    tl.device_assert(~late, "reflib: a rank did not come to an exchange over symmetric storage in time")
    _took_turn(own, calls, WORLD)
