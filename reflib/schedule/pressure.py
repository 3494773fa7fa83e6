"""Launches of kernels that compute much: as many elements per thread as its registers hold, and the code of all of them
as fits the instruction cache.

``heuristics`` and ``uneven`` count bytes, since a kernel that waits for memory wants much in flight. A body of many
steps has many values alive at once, of each element that its thread has; long before registers do not hold them, few
warps run on a multiprocessor, so that nothing hides what an exponential or a division waits for (an asymmetric loss
over rows of 5,624 with 16 elements per thread: 255 registers, 47 us on an H100 where TorchInductor takes 37).

A thread's elements are computed one after another by code of their own. Most operations take one instruction or two,
those of NVIDIA's library 20 to 200, inlined. Code that does not fit the instruction cache is fetched from L2 again by
each program (three ``lgamma`` and six logarithms per element, rows of 3,072: 219 KB with 16 elements per thread, and
296 us on an H100 where TorchInductor takes about 110; with 4 elements it is a quarter of that code).

A program of 1,024 threads with more than 32 registers each has a multiprocessor to itself: nothing is read while its
warps wait for each other's sums. So a row in registers is given to 512 threads if these hold it (the gradient of a
weight's standardization, rows of 6,400 bf16: 268 us on an H200 with 1,024 threads of 48 registers, one program; 512
take 63, two programs).

Where columns are reduced, fewer elements are fewer rows at a time, in a loop: a program of 8 columns would read parts
of sectors. Where memory runs across rows that are in registers, more threads hold as many of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..ir.instructions import INSTRUCTIONS
from ..ir.loops import Const, Op, Reduce, Store, stmt_args, stmt_exprs
from ..ir.program import Config
from ..ir.transforms import varying
from ..target import Target
from .uneven import across

MOST, FEW = 96, 64  # values of a thread: beyond the first, as many as the second
DIVIDED = 16  # elements of a thread that one number divides: 128 x 128 bf16 take 39 registers so, 84 with 32 of them
SHORT = 8  # elements of a row that one thread has, and rows that share what it computes of them
HEAVY = 24  # instructions, more than loads and casts
LINE = 32  # neighbours that are reduced over a stride: fewer would read parts of sectors
HALF = (torch.float16, torch.bfloat16)
CODE = 4096  # instructions of 16 bytes: half of the 128 KB that a multiprocessor of an H100 caches


def relieve(config: Config, t: Any, target: Target) -> Config:
    """``config`` with fewer elements per thread, if they take too many registers or too much code."""
    values, instructions, threads = live(t.space), code(t.space), config.num_warps * target.warp
    if config.reduction == "persistent" and config.xblock == 1 and _divided(t):
        while config.rblock > DIVIDED * threads and threads < 1024:
            config, threads = replace(config, num_warps=2 * config.num_warps), 2 * threads

    def too_many(most: int) -> bool:
        elements = config.xblock * config.rblock
        return elements * values > most * threads or elements * instructions > CODE * threads

    if not too_many(MOST):
        return _shared(config, t, target)
    line = LINE if config.reduction != "none" and t.columns() else 1
    whole = config.reduction == "persistent" and config.xblock == 1 and t.passes > 1
    while too_many(MOST if whole and threads == 512 else FEW) and config.xblock * config.rblock > threads:
        if config.xblock > line and threads < 1024 and across(config, t):
            config, threads = replace(config, num_warps=2 * config.num_warps), 2 * threads
        elif config.xblock > line:
            config = replace(config, xblock=config.xblock // 2)
        elif config.reduction == "persistent" and t.passes > 1:
            if threads < 1024:
                config, threads = replace(config, num_warps=2 * config.num_warps), 2 * threads
            elif line == 1:
                break
            else:
                line = 1
        else:
            config = replace(config, reduction="looped", rblock=config.rblock // 2)
    return config


def _shared(config: Config, t: Any, target: Target) -> Config:
    """More rows per thread, where what all rows have in common (of a codebook's levels, their inverse tangents) takes
    longer to compute than what differs. A thread does so once for its rows, which a row of few elements leaves few."""
    x, r, threads = t.space.x, t.space.r, config.num_warps * target.warp
    if config.reduction != "persistent" or r is None or config.rblock > SHORT:
        return config
    level = varying(t.space.body, [x])
    once, each = (code(t.space, [v is differs for v in level]) for differs in (False, True))
    rows = max(1, config.xblock * config.rblock // threads // min(config.rblock, SHORT))
    most = min(x.size.hint() // target.units, MOST * threads // (config.rblock * max(1, live(t.space))))
    while once > HEAVY and 2 * once > rows * each and rows < SHORT and 2 * config.xblock <= most:
        config, rows = replace(config, xblock=2 * config.xblock), 2 * rows
    return config


def code(space: Any, among: Sequence[bool] = ()) -> int:
    """Instructions that one element takes, about, of all statements or those ``among`` them. (Integers are divided by
    constants, which takes few.)"""
    ops = (s.op if isinstance(s, Op) and s.dtype.is_floating_point else "" for s in space.body)
    counted = zip(ops, _wide(space), among or (True,) * len(space.body))
    return sum(INSTRUCTIONS.get(op, 1) for op, wide, of_these in counted if wide and of_these)


def _wide(space: Any) -> list[bool]:
    """For each statement: is it a value per element?"""
    inner = set(space.variables) if space.r is None else {space.r}
    wide: list[bool] = []
    for s in space.body:
        of_element = any(inner & e.variables() for e in stmt_exprs(s)) or any(wide[a] for a in stmt_args(s))
        wide.append(of_element and not isinstance(s, (Const, Store, Reduce)))
    return wide


def _divided(t: Any) -> bool:
    """Are a row's elements divided by one number, exactly? That has no branch, so all of them are under way at once."""
    wide, body, r = _wide(t.space), t.space.body, t.space.r
    by = [s.args[1] for s, w in zip(body, wide) if w and isinstance(s, Op) and s.op == "div"]
    divided = any(not wide[b] and not isinstance(body[b], Const) for b in by)
    return divided and any(s.index.has(r) and t.buffers[s.buffer].dtype not in HALF for s in t.space.stores)


def live(space: Any) -> int:
    """The most values, of one element each, that are alive at once, if the statements run in their order."""
    body, wide = space.body, _wide(space)
    last = list(range(len(body)))
    for i, s in enumerate(body):
        for a in stmt_args(s):
            last[a] = i
    ends: dict[int, int] = {}
    now = most = 0
    for i, s in enumerate(body):
        if wide[i] and getattr(s, "dtype", None) != torch.bool:  # a bit takes none
            now += 1
            ends[last[i]] = ends.get(last[i], 0) + 1
        most = max(most, now)
        now -= ends.pop(i, 0)
    return most
