"""What ``Options(assert_indirect_indexing=True)`` costs: the same functions with and without, on a CUDA GPU.

    python -m tests.bench.asserts [--rounds 25]

Prints, per function, the device's time of both and their ratio, then the geometric mean. The option should be on by
default where that is under 1.02.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import reflib
from reflib.lab.ratio_chart import geometric_mean
from reflib.timing import Graphs, graph_sampler, interleave, side_stream

Case = tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]


def cases() -> Iterator[Case]:
    """Reads and writes of rows and of elements, of 32 MB and of 1 MB, bandwidth or latency bound."""
    at = partial(torch.randint, device="cuda")
    for rows in (4096, 131072):
        w, i = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16), at(rows, (rows,))
        yield f"embedding {rows}", lambda w, i: F.embedding(i, w) * 2, (w, i)
        yield f"index_select columns {rows}", lambda w, j: w.index_select(1, j) + 1, (w, at(256, (256,)))
        yield f"gather {rows}", lambda w, j: torch.gather(w, 1, j).relu(), (w, at(256, (rows, 64)))
        yield f"index_put {rows}", lambda w, i: torch.zeros_like(w).index_put((i,), w), (w, i)
        yield f"index_add {rows}", lambda w, i: torch.zeros_like(w.float()).index_add(0, i, w.float()), (w, i)
        yield f"cross_entropy {rows}", lambda w, i: F.cross_entropy(w.float(), i % 256), (w, i)


def measure(rounds: int) -> None:
    ratios: list[float] = []
    with side_stream(torch.device("cuda", 0)):
        compare(rounds, ratios)
    print(f"geometric mean {geometric_mean(ratios):.3f}, greatest {max(ratios):.3f}")


def compare(rounds: int, ratios: list[float]) -> None:
    graphs = Graphs()
    print(f"{'':28}{'off us':>10}{'on us':>10}{'ratio':>8}")
    for name, fn, args in cases():
        torch._dynamo.reset()
        ways = {on: reflib.compile(fn, assert_indirect_indexing=on, dynamic=False) for on in (False, True)}
        for f in ways.values():
            f(*args)
        samplers = {on: graph_sampler(partial(f, *args), graphs) for on, f in ways.items()}
        us = {on: statistics.median(s) * 1e6 for on, s in interleave(samplers, rounds, budget_s=5).items()}
        ratios.append(us[True] / us[False])
        print(f"{name:28}{us[False]:10.2f}{us[True]:10.2f}{ratios[-1]:8.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    measure(parser.parse_args().rounds)


if __name__ == "__main__":
    main()
