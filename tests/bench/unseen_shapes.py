"""What the functions of ``unseen`` are given, and the table that they are added to.

``m`` and ``n`` are rows and columns; sizes are drawn at random with a fixed seed.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.bench.functions import SMALL, Entry, image, rand

Tensors = Callable[[random.Random, int, int], list[Tensor]]
TABLE: dict[str, Entry] = {}
WORDS, ROW, SHORT, FEW = (1000, 130000), (64, 16384), (16, 512), (8, 96)  # columns


def add(
    name: str, tensors: Tensors, fn: Callable[..., Any], columns: tuple[int, int] = ROW, train: bool = True
) -> None:
    assert name not in TABLE
    TABLE[name] = Entry(lambda g, m, n: (fn, tensors(g, m, n)), columns, train)


def of(tensors: Tensors, columns: tuple[int, int] = ROW, train: bool = True) -> Callable[..., Any]:
    def keep(fn: Callable[..., Any]) -> Callable[..., Any]:
        add(fn.__name__, tensors, fn, columns, train)
        return fn

    return keep


# -- shapes ---------------------------------------------------------------------------------------------
def tensor(spec: str, known: dict[str, int]) -> Tensor:
    """ "m,n": random numbers of that shape, of a normal distribution; "u:m,n": of a uniform one; "m,n<k": random
    integers below k. Sizes are terms of ``known``."""
    kind, _, rest = spec.rpartition(":")
    shape, _, below = rest.partition("<")
    size = [max(1, int(eval(d, {}, known))) for d in shape.split(",")]
    if below:
        return torch.randint(0, max(1, int(eval(below, {}, known))), size)
    return torch.rand(*size) if kind == "u" else rand(*size)


def of_shapes(*shapes: str) -> Tensors:
    """As ``tensor`` makes them, of about m * n elements each: b,s,n rows in sequences of length s;  q,s,h,d heads;
    a,h,s,s scores of attention;  k,k a square;  t."""

    def tensors(g: random.Random, m: int, n: int) -> list[Tensor]:
        s = min(m, g.choice([64, 77, 128, 197, 256, 512])) if m * n > SMALL else 8
        h = g.choice([2, 4, 8, 12, 16]) if m * n > SMALL else 2
        d = g.choice([32, 64, 80, 96, 128]) if m * n > SMALL else 8
        t = m * n
        known = {"m": m, "n": n, "s": s, "b": max(1, m // s), "h": h, "d": d, "t": t, "k": math.isqrt(t)}
        known |= {"q": t // (h * s * d), "a": t // (h * s * s)}
        return [tensor(spec, known) for spec in shapes]

    return tensors


X, XY, XYZ = of_shapes("m,n"), of_shapes("m,n", "m,n"), of_shapes("m,n", "m,n", "m,n")
XT, XW = of_shapes("m,n", "m<n"), of_shapes("m,n", "n")
LOGITS = of_shapes("b,s,n", "b,s<n")
HEADS = of_shapes("q,s,h,d")  # (batch, length, heads, size)
SCORES = of_shapes("a,h,s,s")  # of attention


def images(*more: str) -> Tensors:
    """(batch, channels, height, width), sides even, and tensors named by letters of these."""

    def tensors(g: random.Random, m: int, n: int) -> list[Tensor]:
        b, c, h, _ = image(g, m * n)
        known = {"b": b, "c": c, "h": h + h % 2}
        return [rand(*(int(eval(d, {}, known)) for d in spec.split(","))) for spec in ("b,c,h,h", *more)]

    return tensors


def parameters(count: int) -> Tensors:
    """``count`` lists of tensors of a layer's sizes: weights, gradients, states ..."""

    def tensors(g: random.Random, m: int, n: int) -> list[Tensor]:
        shapes = [(max(1, m // 4), n), (n,), (max(1, m // 4),), (max(1, m // 16), n), (max(1, m // 2), n)]
        return [rand(*shape) for _ in range(count) for shape in shapes]

    return tensors


def lists(tensors: tuple[Tensor, ...], count: int) -> list[list[Tensor]]:
    size = len(tensors) // count
    return [list(tensors[i * size : (i + 1) * size]) for i in range(count)]
