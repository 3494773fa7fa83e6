"""Runs the kernels over symmetric storage in Triton's interpreter, all ranks' memory in this process: a program of its
own, because the interpreter must be chosen before Triton is imported.

    TRITON_INTERPRET=1 python tests/symmetric_interpreting.py SEED

Prints what is wrong, a line each.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import torch

from reflib.lab.triton_child import complete_the_interpreter
from reflib.ranks import reduce
from reflib.ranks.symmetric import ALIGN, DTYPES, PAGE, Storage

BYTES = 1 << 16
GUARD = 64


def ranks_of(size: int) -> list[Any]:
    """What each rank has of ``symmetric._Device``."""
    whole = [torch.full([PAGE + BYTES], 255, dtype=torch.uint8) for _ in range(size)]
    table = torch.tensor([w.data_ptr() for w in whole])
    peers = [w[PAGE:] for w in whole]
    gpu = SimpleNamespace(type="cuda")
    ranks = [SimpleNamespace(rank=r, size=size, device=gpu, table=table, peers=peers) for r in range(size)]
    for s in ranks:
        s.part = lambda *args, s=s: Storage.part(s, *args)
        s.planned, s.copied, s.sums = 0, BYTES // 2, BYTES // 4 * 3
        s.header = whole[s.rank][:8].view(torch.int64)
    return ranks


def problems(rng: random.Random) -> list[str]:
    size, dtype, n = rng.choice((2, 3, 4)), rng.choice(DTYPES), rng.choice((1, 7, rng.randrange(8, 1024)))
    ranks, places = ranks_of(size), [ALIGN * rng.randrange(32) for _ in range(size)]
    parts = [(torch.randn(n, dtype=torch.float64) * 10).to(dtype) for _ in ranks]
    for s, x, at in zip(ranks, parts, places, strict=True):
        s.header.fill_(at)
        s.part(s.rank, at, [n], dtype).copy_(x)
    exact = torch.stack([p.double() for p in parts]).sum(0)
    eager = (sum(parts[1:], parts[0]).double() - exact).abs().max()
    outs = {how: [torch.full([n + 2 * GUARD], 77, dtype=dtype) for _ in ranks] for how in ("one", "two")}
    share = -(-n * dtype.itemsize // (size * ALIGN)) * ALIGN // dtype.itemsize
    for s, out in zip(ranks, outs["one"], strict=True):
        reduce._add(s, [], out[GUARD:-GUARD], 0)
        start = min(n, s.rank * share)
        reduce._add(s, [], s.part(s.rank, s.sums, (min(n - start, share),), dtype), start)
    for s, out in zip(ranks, outs["two"], strict=True):
        reduce._gather(s, out[GUARD:-GUARD], share)
    what, wrong = f"{size} ranks, {n} {dtype}", []
    for how, each in outs.items():
        for out in each:
            if not torch.equal(out, each[0]) or (out[GUARD:-GUARD].double() - exact).abs().max() > 2 * eager + 1e-5:
                wrong.append(f"{how}: {what}")
            if not bool((torch.cat([out[:GUARD], out[-GUARD:]]) == 77).all()):
                wrong.append(f"{how} writes outside: {what}")
    if not all(torch.equal(s.part(s.rank, at, [n], dtype), x) for s, x, at in zip(ranks, parts, places, strict=True)):
        wrong.append(f"an argument is written to: {what}")
    return wrong


if __name__ == "__main__":
    complete_the_interpreter()
    seed = int(sys.argv[1])
    torch.manual_seed(seed)
    rng = random.Random(seed)
    print(*(text for _ in range(25) for text in problems(rng)), sep="\n")
