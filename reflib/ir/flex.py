"""Fused attention with the user's functions in it, as plain data: what an Extern calls that launches such a kernel.

``kind``: ``forward``, ``decode`` (forward for few queries), ``dq`` (the gradient of the queries) or ``dkv`` (of keys
and values). The Extern's ``kwargs`` name what the kernel is given and writes:

    q, k, v                     [B, H, M, D], [B or 1, H / groups, N, D], [B or 1, H / groups, N, E], any strides
    out, lse, top               results of forward; lse and top (the largest score) in base 2, optional
    acc, total, top             results of decode with several splits, of each, float32: [B, H, splits, M, E] and
                                [B, H, splits, M] (``lower.flex_decode``)
    do, lse, delta              backward: the gradient of out; delta is what all entries of a row of do @ v.T have too
                                much
    dq, dk, dv                  results of backward
    num, idx                    blocks that the mask cuts: how many of them a row (dkv: a column) has, and which
    full_num, full_idx          of those that it leaves whole; without any of the four, every block is visited
    captured                    tensors that the slot reads
    sizes                       symbols that the slot uses

**The slot** is a loop nest over (b, h, m, n), one point of the matrix of scores. It loads ``score`` and ``grad``
(the gradient of its result) and stores ``modified`` (the score function's result), ``mask`` and ``of_score`` (the
gradient of ``score``). What it does not store is the identity, or true everywhere. Any other buffer's name in it is
a number: that one of ``captured``. To some of these ``dq`` adds (``Store.reduce``): gradients of captured tensors.
"""

from dataclasses import dataclass

import torch

from .expr import Expr
from .loops import LoopNest
from .user_kernel import Launched

INPUTS = ("score", "grad")
RESULTS = ("modified", "mask", "of_score")


@dataclass(frozen=True, slots=True)
class FlexTiling:
    """A program's block of scores is ``m`` x ``n``."""

    m: int
    n: int
    num_warps: int = 4
    num_stages: int = 3

    def __str__(self) -> str:
        return f"{self.m}x{self.n} w{self.num_warps} s{self.num_stages}"


@dataclass(frozen=True, slots=True)
class FlexKernel(Launched):
    """``blocks``: queries and keys per block of the mask; (0, 0): it has none. ``strides``: of ``captured``, as the
    slot reads them. ``exact``: may a last bit of ``modified`` show? ``one_order``: are sums to have the same order
    whatever the sizes but those of heads? ``packed``: query heads whose queries are rows of one block (decode).
    ``splits``: programs that a row's keys are divided among (decode). ``asked``: fields of the tiling that the user's
    call sets. ``tiling``: None until chosen."""

    kind: str
    slot: LoopNest
    dtype: torch.dtype
    scale: float
    groups: int = 1
    blocks: tuple[int, int] = (0, 0)
    precision: str = "ieee"
    strides: tuple[tuple[Expr, ...], ...] = ()
    exact: bool = False
    one_order: bool = False
    packed: int = 1
    splits: int = 1
    asked: tuple[tuple[str, int], ...] = ()
    tiling: FlexTiling | None = None

    @property
    def __name__(self) -> str:  # type: ignore[override]
        if self.kind == "decode":
            return "flex_decoding"
        return "flex_attention" if self.kind == "forward" else f"flex_attention_{self.kind}"

    @property
    def how(self) -> str:  # type: ignore[override]
        if self.kind != "decode":
            return Launched.how
        rows = f"; the queries of {self.packed} heads are rows of one block" if self.packed > 1 else ""
        return f"few queries: a row's keys are divided among {self.splits} programs{rows}"

    def __str__(self) -> str:
        return f"{self.__name__}({self.tiling or 'no tiling chosen'})"

    def stores(self, what: str) -> bool:
        return what in self.slot.writes()
