"""Words that GPUs write into each other's memory: the PTX for it, and values as words.

A *flag* is 8 bytes, which come after all that was written before (``say``: release; ``hear``: acquire). A word *with* a
flag is 8 bytes too, four of values and four that say to which call they belong (``send``, ``take``): it arrives whole,
so nothing has to come before or after it.
"""

from __future__ import annotations

import triton
import triton.language as tl

SAY = tl.constexpr("""{
.reg .pred mine;
.reg .b32 thread;
mov.b32 thread, %tid.x;
setp.lt.u32 mine, thread, $3;
@mine st.release.sys.global.b64 [$1], $2;
mov.b32 $0, 0;
}""")
HEAR = tl.constexpr("""{
.reg .pred again;
.reg .b32 left;
mov.b32 left, $2;
next:
sub.u32 left, left, 1;
ld.acquire.sys.global.b64 $0, [$1];
setp.eq.s64 again, $0, 0;
setp.ne.and.b32 again, left, 0, again;
@again bra next;
}""")


@triton.jit
def say(address, said, WORLD: tl.constexpr):
    """One thread per rank, of the first warp."""
    tl.inline_asm_elementwise(SAY, "=r,l,l,r", [address, said, WORLD], tl.int32, is_pure=False, pack=1)


@triton.jit
def hear(address, POLLS: tl.constexpr):
    """What is there as soon as it is not 0; all warps look."""
    return tl.inline_asm_elementwise(HEAR, "=&l,l,r", [address, POLLS], tl.int64, is_pure=False, pack=1)


SEND = tl.constexpr("""{
.reg .b64 word;
mov.b64 word, {$2, $3};
st.relaxed.sys.global.b64 [$1], word;
mov.b32 $0, 0;
}""")


def take(size: int, slot: int) -> str:
    """PTX: the words of ``size`` ranks, ``slot`` bytes apart, read until all have the flag; then how often it may still
    be tried. (No thread waits for another one; and the reads are under way together.)"""
    flag, polls, ranks = f"${size + 2}", f"${size + 3}", range(size)
    lines = [".reg .pred again;", f".reg .b64 word<{size}>;", f".reg .b32 flag<{size}>;"]
    lines += [f"mov.b32 ${size}, {polls};", "next:", f"sub.u32 ${size}, ${size}, 1;"]
    lines += [f"ld.relaxed.sys.global.b64 word{r}, [${size + 1} + {r * slot}];" for r in ranks]
    lines += [f"mov.b64 {{${r}, flag{r}}}, word{r};" for r in ranks]
    lines += [f"setp.ne.b32 again, flag0, {flag};"]
    lines += [f"setp.ne.or.b32 again, flag{r}, {flag}, again;" for r in ranks[1:]]
    lines += [f"setp.ne.and.b32 again, ${size}, 0, again;", "@again bra next;"]
    return "\n".join(["{", *lines, "}"])


@triton.jit
def send(address, word, flag):
    tl.inline_asm_elementwise(SEND, "=r,l,r,r", [address, word, flag], tl.int32, is_pure=False, pack=1)


@triton.jit
def took(address, flag, TAKE: tl.constexpr, POLLS: tl.constexpr, WORLD: tl.constexpr):
    """Of each rank, the word that it has sent; and 0 if not all came in time."""
    return tl.inline_asm_elementwise(
        TAKE, "=&r," * (WORLD + 1) + "l,r,r", [address, flag, POLLS], (tl.int32,) * (WORLD + 1), is_pure=False, pack=1
    )


@triton.jit
def word_of(x, i, first, n, total):
    """Four bytes of the n values from ``first`` on; what is not among them, or the ``total``, is 0."""
    if x.dtype.element_ty.primitive_bitwidth == 32:
        word = tl.load(x + first + i, (i < n) & (first + i < total), 0).to(tl.int32, bitcast=True)
    else:
        word = tl.zeros_like(i)
        for half in tl.static_range(2):
            at = 2 * i + half
            value = tl.load(x + first + at, (at < n) & (first + at < total), 0).to(tl.uint16, bitcast=True)
            word |= value.to(tl.int32) << 16 * half
    return word


@triton.jit
def _half(word, half: tl.constexpr, like):
    if like.dtype.element_ty.primitive_bitwidth == 32:
        value = word.to(like.dtype.element_ty, bitcast=True)
    else:
        value = (word >> 16 * half).to(tl.uint16).to(like.dtype.element_ty, bitcast=True)
    return value


@triton.jit
def sum_of_words(words, like, WIDE: tl.constexpr, WORLD: tl.constexpr):
    halves: tl.constexpr = 32 // like.dtype.element_ty.primitive_bitwidth
    found = tl.zeros_like(words[0])
    for half in tl.static_range(halves):
        total = _half(words[0], half, like).to(WIDE)
        for rank in tl.static_range(1, WORLD):
            total += _half(words[rank], half, like).to(WIDE)
        value = total.to(like.dtype.element_ty)
        if halves == 1:
            found = value.to(tl.int32, bitcast=True)
        else:
            found |= value.to(tl.uint16, bitcast=True).to(tl.int32) << 16 * half
    return found


@triton.jit
def put(out, word, i, first, n, total):
    halves: tl.constexpr = 32 // out.dtype.element_ty.primitive_bitwidth
    for half in tl.static_range(halves):
        at = halves * i + half
        tl.store(out + first + at, _half(word, half, out), (at < n) & (first + at < total))
