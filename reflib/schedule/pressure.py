"""Launches of kernels that compute much: as many elements per thread as its registers hold.

``heuristics`` and ``uneven`` count bytes, since a kernel that waits for memory wants much in flight. A body of many
steps has many values alive at once, of each element that its thread has; those that registers do not hold are kept in
memory, and long before that few warps run on a multiprocessor, so that nothing hides what an exponential or a division
waits for (an asymmetric loss over rows of 5,624 with 16 elements per thread: 255 registers, 47 us on an H100 where
TorchInductor takes 37 in two kernels).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..ir.loops import Const, Reduce, Store, stmt_args, stmt_exprs
from ..ir.program import Config
from ..target import Target

MOST, FEW = 96, 64  # values of a thread: beyond the first, as many as the second


def relieve(config: Config, t: Any, target: Target) -> Config:
    """``config`` with fewer elements per thread, if they take too many registers; ``t``: a ``heuristics.Traffic``."""
    values, threads = live(t.space), config.num_warps * target.warp
    if config.xblock * config.rblock * values <= MOST * threads:
        return config
    while config.xblock * config.rblock * values > FEW * threads:
        if config.xblock > 1:
            config = replace(config, xblock=config.xblock // 2)
        elif config.reduction == "persistent" and t.passes > 1:
            if threads >= 1024:
                break
            config, threads = replace(config, num_warps=2 * config.num_warps), 2 * threads
        elif config.rblock > threads:
            config = replace(config, reduction="looped", rblock=config.rblock // 2)
        else:
            break
    return config


def live(space: Any) -> int:
    """The most values, of one element each, that are alive at once, if the statements run in their order."""
    body = space.body
    inner = set(space.variables) if space.r is None else {space.r}
    wide = [False] * len(body)  # one per element, and not a bit
    last = list(range(len(body)))
    for i, s in enumerate(body):
        for a in stmt_args(s):
            last[a] = i
        if isinstance(s, (Const, Store, Reduce)):
            continue
        wide[i] = any(inner & e.variables() for e in stmt_exprs(s)) or any(wide[a] for a in stmt_args(s))
    ends: dict[int, int] = {}
    now = most = 0
    for i, s in enumerate(body):
        if wide[i] and getattr(s, "dtype", None) != torch.bool:
            now += 1
            ends[last[i]] = ends.get(last[i], 0) + 1
        most = max(most, now)
        now -= ends.pop(i, 0)
    return most
