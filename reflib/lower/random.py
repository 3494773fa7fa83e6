"""``reflib::random`` as a loop nest: arithmetic on the words of ``ir/random``. ``capture/random`` says where it comes
from, and which numbers these are."""

from collections.abc import Sequence
from typing import Any

import torch

from reflib.capture.random import drawn
from reflib.ir.program import View

from .body import NestBuilder, Value, element


@element("reflib::random")
def random(k: NestBuilder, seed: View, stream: int, kind: str, size: Any, order: Sequence[int], dtype: Any) -> Value:
    key, number = k.load(seed, [0]), k.value(stream, torch.int64)

    def word(at: Any) -> Value:
        return Value(k, k.b.op("philox", key.id, number.id, k.index(at).id, dtype=torch.int32))

    return drawn(kind, dtype, word, k.linear(range(len(k.shape))), lambda value, bits: value.op("shl", bits))
