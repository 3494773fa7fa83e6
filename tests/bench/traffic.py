"""The model of memory traffic against the clock: random loop nests, each in several orders, on a CUDA GPU.

    python -m tests.bench.traffic [--nests 80] [--out FILE.json]

Each nest reads two to six tensors of random layouts and broadcasts and writes one. Each of its orders (and the tile,
where ``layout`` takes one) becomes a kernel; its time is compared with what ``ir.traffic`` says. Printed: the rank
correlation (Spearman) over all kernels and within nests, and how much slower the order taken is than the fastest.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from triton_cases import Case, compile_all

from reflib.generate.kernel import Kernel
from reflib.ir.expr import Var, expr
from reflib.ir.loops import Axis, BodyBuilder, LoopNest
from reflib.ir.traffic import accesses, cheapest_last, cost, cost_of_order
from reflib.schedule import axes as scheduled
from reflib.target import parse_target

POINTS = 2**24
ORDERS = 5  # of a nest, beside the one taken


def random_nest(rng: random.Random, points: int = POINTS) -> Case:
    """Sizes of real layouts (channels, heads, odd images), scaled so that there are about ``points``."""
    sizes = [rng.choice([3, 8, 12, 49, 56, 64, 197, 256, 768, 1000]) for _ in range(rng.choice([2, 3, 3, 4]))]
    while math.prod(sizes) > 2 * points and len(sizes) > 2:
        sizes.pop()
    sizes[0] = max(2, sizes[0] * points // math.prod(sizes))
    loops = [Axis(Var(name, expr(n)), "p") for name, n in zip("abcd", sizes)]
    b, tensors = BodyBuilder(), {}

    def dense(chosen: Sequence[Axis], name: str, dtype: torch.dtype) -> Any:
        e, step = expr(0), 1
        for a in chosen:
            e, step = e + expr(a.var) * step, step * int(a.size)
        tensors[name] = torch.zeros(step, dtype=dtype)
        return e

    value = None
    for k in range(rng.choice([2, 2, 3, 6])):
        inside = loops if k == 0 or rng.random() < 0.4 else rng.sample(loops, rng.randrange(1, len(loops)))
        at = dense(rng.sample(inside, len(inside)), f"x{k}", rng.choice([torch.bfloat16, torch.float32]))
        loaded = b.load(f"x{k}", at, torch.float32)
        value = loaded if value is None else b.op("add", value, loaded)
    assert value is not None
    b.store("out", dense(rng.sample(loops, len(loops)), "out", torch.bfloat16), value)
    return Case((LoopNest("nest", tuple(loops), tuple(b.body)),), tensors)


def kernels(case: Case, number: int, rng: random.Random, target: str) -> list[tuple[Kernel, float, bool]]:
    """(kernel, what the model says, is it the one taken) of several orders; the first is the one taken."""
    (nest,) = case.parts
    moved = accesses(nest.body, case.buffers)
    own = cheapest_last(nest.axes, moved)
    every = [list(p) for p in itertools.permutations(nest.axes)]
    out = []
    for k, order in enumerate([own, *rng.sample(every, min(ORDERS, len(every)))]):
        choose = forced({a.var.name: i for i, a in enumerate(order)}) if k else scheduled.cheapest_last
        one_dimension = mock.patch.object(scheduled, "_tile_sides", lambda *_: None)
        with one_dimension, mock.patch.object(scheduled, "cheapest_last", choose):
            out.append((case.kernel(f"n{number}_{k}", target), cost_of_order(moved, order), k == 0))
    tiled = case.kernel(f"n{number}_tile", target)
    if "YBLOCK" in tiled.source:
        space = scheduled.layout(nest, case.buffers)
        assert space.y is not None
        sides = {v: min(scheduled.TILE, v.size.hint()) for v in (space.x, space.y)}
        out = [(k, c, False) for k, c, _ in out]
        out.insert(0, (tiled, cost(accesses(space.body, case.buffers), sides), True))
    return out


def forced(place: dict[str, int]) -> Any:
    """Instead of ``cheapest_last``: by the places of axes' names; a merged axis has several, joined by _."""
    return lambda axes, _: sorted(axes, key=lambda a: min(place[part] for part in a.var.name.split("_")))


def microseconds(case: Case, kernel: Kernel, binary: Any, repeat: int = 12) -> float:
    from reflib.wrap.cuda_launch import load

    tensors = {n: t.cuda() for n, t in case.tensors.items()}
    launch, grid = load(binary), int(kernel.grid.evaluate({}))
    args = [tensors[b].data_ptr() for b, _ in kernel.buffers]
    stream = torch.cuda.current_stream().cuda_stream
    found = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch(stream, grid, *args)
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return min(found)


def ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    out = [0.0] * len(values)
    for place, i in enumerate(order):
        out[i] = float(place)
    return out


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's."""
    return statistics.correlation(ranks(a), ranks(b))


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.traffic", description=__doc__)
    parser.add_argument("--nests", type=int, default=80)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    target = f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
    rng, rows = random.Random(0), []
    cases = [random_nest(rng) for _ in range(args.nests)]
    made = [kernels(case, i, rng, target) for i, case in enumerate(cases)]
    binaries = compile_all((k for group in made for k, _, _ in group), parse_target(target))
    for case, group in zip(cases, made):
        points = int(case.parts[0].numel)
        for k, c, taken in group:
            us = microseconds(case, k, binaries[k.name])
            rows.append({"nest": k.name.split("_")[0], "kernel": k.name, "cost": c * points, "us": us, "taken": taken})
    nests = [[r for r in rows if r["nest"] == n] for n in dict.fromkeys(r["nest"] for r in rows)]
    within = [correlation([r["cost"] for r in g], [r["us"] for r in g]) for g in nests if len(g) > 2]
    lost = [next(r["us"] for r in g if r["taken"]) / min(r["us"] for r in g) for g in nests]
    print(f"{len(rows)} kernels of {len(nests)} nests; rank correlation "
          f"{correlation([r['cost'] for r in rows], [r['us'] for r in rows]):.2f}, "
          f"within nests {statistics.mean(within):.2f}")  # fmt: skip
    print(f"the order taken over the fastest: median {statistics.median(lost):.2f}, worst {max(lost):.2f}")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
