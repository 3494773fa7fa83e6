"""Loop nests that draw random numbers of one seed have nothing else in common.

Neighbours are found by the buffers that they share, and every random op of a graph reads the same number. One kernel
for two of them would move 8 bytes less, and could no longer join the kernels that read what one of them makes.
"""

import torch

from ..ir.program import Extern
from .legality import Cluster, FusionContext
from .result import Reason


def seed_rule(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    """Plugs into ``fuse.RULES``. A seed is a single int64 that a call draws, and both read (``capture/random``)."""
    small, large = (a.outside, b.outside) if len(a.outside) < len(b.outside) else (b.outside, a.outside)
    seeds = 0
    for name in small:
        if name in large:
            if not _is_seed(name, a, b, c):
                return None
            seeds += 1
    return Reason("space", "they have nothing but a seed in common") if seeds else None


def _is_seed(name: str, a: Cluster, b: Cluster, c: FusionContext) -> bool:
    buffer = c.program.buffers[name]
    if buffer.dtype != torch.int64 or buffer.numel != 1 or name in a.writes or name in b.writes:
        return False
    calls = (n for n in c.program.nodes if isinstance(n, Extern))
    return any(n.target is torch.ops.aten.randint.low and name in n.writes() for n in calls)
