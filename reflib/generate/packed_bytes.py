"""Unsigned integers of 8 bits, four to a word, for operands that a product computes (CUDA).

Triton unpacks a block of bytes to one register per element, works there, and packs what is stored: of a product with
weights of 4 bits (two to a byte, one scale per 128), 12 instructions per weight, one of them a conversion that a
multiprocessor does for 16 per cycle. In words, ``&`` and ``>>`` take a quarter of an instruction or a half. A byte
below 128 behind the byte 0x43 is the bfloat16 of 128 + it, so two instructions make two floats of two bytes, and
subtract a zero point (an integer) too. Then it is 4 to 5 instructions.
"""

from collections.abc import Callable

import torch

AND = "and.b32 $0, $1, $2;"
SHIFT = "{ .reg .b32 by, all; and.b32 by, $2, 31; shr.b32 all, $1, by; and.b32 $0, all, $3; }"
FLOATS = """{ .reg .b32 one, low, high; mov.b32 one, 0x3f803f80;
        prmt.b32 low, $2, 0x43, 0x4140; prmt.b32 high, $2, 0x43, 0x4342;
        fma.rn.bf16x2 $0, low, one, $3; fma.rn.bf16x2 $1, high, one, $4; }"""
HELPERS = {
    "and_bytes": f'''
@triton.jit
def and_bytes(x, mask):
    """x & mask, four at a time."""
    return tl.inline_asm_elementwise("{AND}", "=r,r,r", [x, mask], dtype=tl.uint8, is_pure=True, pack=4)
''',
    "shift_bytes": f'''
@triton.jit
def shift_bytes(x, by, kept):
    """x >> by, four at a time. ``kept``: the bits that may be set then."""
    return tl.inline_asm_elementwise(
        "{SHIFT}",
        "=r,r,r,r", [x, by, kept], dtype=tl.uint8, is_pure=True, pack=4,
    )
''',
    "floats_of_bytes": f'''
@triton.jit
def floats_of_bytes(x, plus: tl.constexpr):
    """x + plus, of x below 128: behind 0x43, its bits are those of 128 + x."""
    return tl.inline_asm_elementwise(
        """{FLOATS}""",
        "=&r,=&r,r,r,r",
        [x, tl.full([], plus - 128, tl.float32).to(tl.bfloat16)],
        dtype=tl.bfloat16, is_pure=True, pack=4,
    )
''',
}

# What each computes of arrays, for Triton's interpreter.
MEANING: dict[str, Callable[..., torch.Tensor]] = {
    AND: lambda x, mask: x & mask,
    SHIFT: lambda x, by, kept: (x >> by) & kept,
    FLOATS: lambda x, offset: x.float() + (128 + offset),
}
LARGEST = 127  # of ``floats_of_bytes``; and of what is added, in either direction
