"""Fused attention for the sweep, TorchInductor's beside it.

    reflib sweep --models tests/bench/flex.py --dtype bfloat16 --out runs/flex

(What each tiling takes: ``autotune="blocking"`` measures them, and ``explain(...).decisions`` has the times.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from reflib.sweep import Model

# B, H, heads of keys, S, D
SHAPES = [(4, 16, 16, 4096, 64), (4, 16, 16, 4096, 128), (1, 16, 16, 8192, 128), (8, 32, 8, 2048, 128)]
SMALL = (1, 2, 1, 256, 64)
WINDOW = 1024


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def window(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j < WINDOW)


def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + torch.exp2(-0.5 * (h + 1)) * (j - i)


KINDS: dict[str, tuple[Any, Any]] = {  # "bias": of each head and distance, learned
    "noop": (None, None), "causal": (None, causal), "window": (None, window), "alibi": (alibi, causal),
    "bias": (None, causal),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, kind: str, b: int, h: int, hk: int, s: int, d: int):
        super().__init__()
        self.score, self.allowed = KINDS[kind]
        self.q, self.k, self.v = (nn.Parameter(torch.randn(b, heads, s, d)) for heads in (h, hk, hk))
        self.table = nn.Parameter(torch.randn(h, s)) if kind == "bias" else None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Wherever the module is moved, its mask is made."""
        super()._apply(fn, recurse)
        s = self.q.shape[2]
        self.mask = self.allowed and create_block_mask(self.allowed, None, None, s, s, device=self.q.device)
        return self

    def forward(self) -> torch.Tensor:
        gqa = self.q.shape[1] != self.k.shape[1]
        cpu = self.q.device.type == "cpu"  # where PyTorch refuses to be asked for gradients
        q, k, v, table = (t.detach() if cpu and t is not None else t for t in (self.q, self.k, self.v, self.table))
        score = self.score if table is None else lambda s, b, h, i, j: s + table[h, (i - j).abs()]
        return flex_attention(q, k, v, score, self.mask, enable_gqa=gqa)


def _model(kind: str, shape: tuple[int, ...]) -> Model:
    name = f"flex {kind} {'x'.join(map(str, shape))}"
    modes = ("inference", "training") if torch.cuda.is_available() else ("inference",)
    return Model(name, lambda real: (Attention(kind, *(shape if real else SMALL)), ()), modes=modes)


MODELS = [_model(kind, shape) for shape in SHAPES for kind in (KINDS if shape == SHAPES[0] else ("causal",))]
