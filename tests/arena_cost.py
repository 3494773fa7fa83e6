"""Host time per call with and without ``Options(arena=True)``: ``python -m tests.arena_cost [cpu|cuda]``.

A program of 32 small kernels, each with a buffer of its own shape. On a CPU: processor time with one thread, kernels
included; on a GPU: time until all is launched. The four contenders take turns; the median of ROUNDS samples is printed.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

import reflib

ROUNDS, CALLS = 41, 300


class Small(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(16):
            x = torch.softmax(x, -1).sum(0)[:, None] * torch.arange(1.0, 9 + i, device=x.device)
        return x


def main(device: str) -> None:
    torch.set_num_threads(1)
    x = torch.randn(8, 8, device=device)
    program, want = torch.export.export(Small(), (x,)), Small()(x)
    calls = {(w, a): reflib.compile(program, wrapper=w, arena=a) for w in ("python", "cpp") for a in (False, True)}
    for call in calls.values():
        torch.testing.assert_close(call(x), want)
    clock = time.process_time if device == "cpu" else time.perf_counter
    found: dict[tuple[str, bool], list[float]] = {which: [] for which in calls}
    for _ in range(ROUNDS):
        for which, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            for _ in range(CALLS):
                call(x)
            found[which].append((clock() - start) / CALLS * 1e6)
    for (wrapper, arena), us in found.items():
        print(f"{wrapper}, arena={arena}: {statistics.median(us):.2f} µs per call, least {min(us):.2f}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["cpu"]))
