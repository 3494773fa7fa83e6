"""Random numbers inside loop nests: ``%i = op philox %seed %stream %index : int32``.

Word ``index`` (at least 0) of a stream of random 32-bit words: a function of its three operands (int64) alone, without
a state. So a loop nest with it may be fused, cut and run again as any other: a backward that computes a dropout's mask
again gets the forward's. Uniform and normal numbers are arithmetic on such words (``lower/random``).

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11,
doi:10.1145/2063384.2063405), a block cipher with the seed as its key. It encrypts the counter (index // 4, stream) to
four words, of which word index % 4 is taken. The same bits come from this module, from C++ (``cpp_header.h``) and from
Triton (``generate/triton_numeric``); neighbours in a thread share a counter, which compilers see.
"""

import torch

from .ops import OPS, OpSpec

ROUNDS = 10
MULTIPLIERS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # of the paper's table 2 and section 3
_WORD = 0xFFFFFFFF


def philox(seed: torch.Tensor, stream: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The meaning of the op, in 64-bit integers that wrap around."""
    a, b, c, d = _low(index >> 2), _high(index >> 2), _low(stream), torch.zeros_like(index)
    keys = [_low(seed), _high(seed)]
    for _ in range(ROUNDS):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = _high(q) ^ b ^ keys[0], _low(q), _high(p) ^ d ^ keys[1], _low(p)
        keys = [_low(k + step) for k, step in zip(keys, STEPS, strict=True)]
    which = index & 3
    word = torch.where(which == 0, a, torch.where(which == 1, b, torch.where(which == 2, c, d)))
    return torch.where(word > _WORD >> 1, word - (_WORD + 1), word).to(torch.int32)


def _low(x: torch.Tensor) -> torch.Tensor:
    return x & _WORD


def _high(x: torch.Tensor) -> torch.Tensor:
    return (x >> 32) & _WORD


OPS["philox"] = OpSpec("philox", 3, "int", "given", philox)
