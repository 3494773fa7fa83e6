"""``reflib::random`` as a loop nest: arithmetic on the words of ``ir/random``. ``capture/random`` says where it comes
from, and what the same numbers are in eager PyTorch."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from reflib.capture.random import DIGITS
from reflib.ir.program import View

from .body import NestBuilder, Value, element

_WORD = 0xFFFFFFFF


@element("reflib::random")
def random(k: NestBuilder, seed: View, stream: int, kind: str, size: Any, order: Sequence[int], dtype: Any) -> Value:
    key, number = k.load(seed, [0]), k.value(stream, torch.int64)
    position = k.linear(range(len(k.shape)))

    def word(index: Any) -> Value:
        return Value(k, k.b.op("philox", key.id, number.id, k.index(index).id, dtype=torch.int32))

    first, second = 2 * position, 2 * position + 1
    if kind == "uniform":
        if dtype != torch.float64:
            return (word(position) & (2 ** DIGITS[dtype] - 1)).to(torch.float32) * 2.0 ** -DIGITS[dtype]
        high, low = (word(first) & 0x3FFFFFF).to(dtype), (word(second) & 0x7FFFFFF).to(dtype)
        return high * 2.0**-26 + low * 2.0**-53
    if kind == "normal":  # Box and Muller, "A note on the generation of random normal deviates", 1958
        wide, words, least = (torch.float64, 4, 2.0**-32) if dtype == torch.float64 else (torch.float32, 2, 1)
        radius, angle, *more = ((word(words * position + i).to(torch.int64) & _WORD).to(wide) for i in range(words))
        if more:  # the digits of a float64 that the first words do not fill
            radius, angle = radius + more[0] * 2.0**-32, angle + more[1] * 2.0**-32
        return (((radius + least) * 2.0**-32).op("log") * -2).sqrt() * (angle * (math.tau * 2.0**-32)).op("cos")
    low, high = word(first).to(torch.int64) & _WORD, word(second).to(torch.int64) & (_WORD >> 1)
    return low | high.op("shl", 32)
