"""Who runs: eager, TorchInductor (as it comes, and searching harder on a GPU), reflib."""

from collections.abc import Callable
from typing import Any

import torch

US, PEER, EAGER = "reflib", "Inductor", "eager"
PEER_MAX = "Inductor max"
TUNED = "reflib tuned"  # it measures its candidates (autotune="blocking"); US takes the static choice


def names(device: str, quick: bool, searching: bool = True) -> list[str]:
    """The contenders of a section; the last peer searches among kernels, so only where that is cheap."""
    return [EAGER, PEER, *([PEER_MAX] if device == "cuda" and searching and not quick else []), US]


def compiled(who: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` as this contender runs it. Nothing is compiled before the first call."""
    if who == EAGER:
        return fn
    if who == US:
        import reflib

        return reflib.compile(fn, dynamic=False)
    mode = "max-autotune-no-cudagraphs" if who == PEER_MAX else None
    return torch.compile(fn, dynamic=False, mode=mode)
