"""Many launches of one kernel: what the heuristics choose beside what they might have.

    python -m tests.bench.launches generate FILE.json.gz [--only softmax,pool]     on any machine
    python -m tests.bench.launches measure FILE.json.gz RESULTS.jsonl [--seconds 100]   on a CUDA GPU
    python -m tests.bench.launches report FILE.json.gz RESULTS.jsonl

``generate`` compiles functions for sm_90 and prints each kernel under many Configs. ``measure`` runs them, 15 processes
compiling and one at a time on the device: ten launches in a CUDA graph, the least of four replays; 2,905 kernels take
40 seconds on an H200 with 16 cores. ``report`` prints, per kernel, the heuristic's launch, the best ones, and at the
end how much slower than the best are the heuristic's launch and the best of those that ``autotune`` measures (geometric
means). ``schedule.heuristics`` and ``schedule.configs`` have their numbers from this.
"""

import argparse
import fcntl
import gzip
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import reflib
from reflib.generate.triton import generate_triton
from reflib.ir.program import kernel_variants
from reflib.lab.ratio_chart import geometric_mean
from reflib.schedule.configs import every, few, name_of
from reflib.target import parse_target
from tests.loading import load_file

POINTS = 2**24  # of a function's main tensor
MOST = 40  # launches per kernel
SMALL = 2**19  # points under which a kernel takes little time: a few launches are enough
LAUNCHES, REPLAYS = 10, 4
WORKERS = 15

Row = dict[str, Any]


# -- functions ------------------------------------------------------------------------------------------
def half(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16).uniform_(-1, 1).requires_grad_(grad)


def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, True))


def cases() -> Iterator[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]]:
    for n in (3, 17, 49, 64, 103, 168, 256, 401, 520, 768, 1024, 1365, 2048, 3001, 4096, 8192, 11312, 16384, 92605):
        m = POINTS // n
        yield f"rms_norm {n}", lambda x, w, n=n: F.rms_norm(x, (n,), w), (half(m, n), half(n))
        yield f"softmax {n}", lambda x: x.softmax(-1), (half(m, n, grad=True),)
        yield f"sum {n}", lambda x: x.sum(-1), (half(m, n),)
    for n in (103, 256, 781, 2304, 4096, 11312):
        args = half(POINTS // n, n, grad=True), half(n, grad=True), half(n, grad=True)
        yield f"layer_norm {n}", lambda x, w, b, n=n: F.layer_norm(x, (n,), w, b), args
    for m, n in ((824, 12093), (2808, 6416), (32768, 1024), (9934, 512), (200000, 24)):
        yield f"columns {m}x{n}", lambda x: (x * x).sum(0), (half(m, n),)
    for shape in ((3000, 24, 14, 14), (64, 256, 28, 28), (839, 128, 7, 7), (64, 64, 56, 56)):
        args = half(*shape, grad=True), half(shape[1], grad=True), half(shape[1], grad=True)
        yield f"batch_norm {shape}", batch_norm, args
        last = args[0].detach().to(memory_format=torch.channels_last).requires_grad_()
        yield f"batch_norm {shape} last", batch_norm, (last, *args[1:])
    yield "mse", lambda x, y: F.mse_loss(x.sigmoid(), y), (half(1368, 2608), half(1368, 2608))
    yield "add", lambda x, y: (x + y).relu(), (half(4096, 4096), half(4096, 4096))
    yield "max_pool", lambda x: F.max_pool2d(x, 2), (half(281, 32, 31, 31, grad=True),)
    yield "overlapping max_pool", lambda x: F.max_pool2d(x, 3, 2, 1), (half(32, 64, 112, 112, grad=True),)
    yield "avg_pool", lambda x: F.avg_pool2d(x.relu(), 3, 2, 1), (half(64, 64, 56, 56, grad=True),)
    yield "upsample", lambda x: F.interpolate(x, scale_factor=2).relu(), (half(4, 128, 112, 112),)
    yield "heads", lambda x: x.view(4093, -1, 8).transpose(0, 1).contiguous() * 2, (half(4093, 4096, grad=True),)
    yield "cat", lambda x, y: torch.cat([x.relu(), y * 2], -1), (half(20000, 571), half(20000, 571))
    yield "transpose", lambda x, y: x.t() + y, (half(3906, 4001), half(4001, 3906))
    yield "row_scale", lambda x, s: x * s.sigmoid()[:, None], (half(113042, 128), half(113042))
    yield "embedding", lambda w, i: F.embedding(i, w) * 2, (half(13300, 256), torch.randint(13300, (53200,)))


# -- launches -------------------------------------------------------------------------------------------
def generate(file: Path, only: list[str]) -> None:
    rng, target, rows = random.Random(0), parse_target("sm_90"), []
    for name, fn, args in cases():
        if only and not any(part in name for part in only):
            continue
        torch._dynamo.reset()
        for number, graph in enumerate(reflib.explain(fn, *args, target="sm_90").graphs):
            program = graph.scheduled
            assert program is not None
            for node in kernel_variants(program.nodes):
                variant, kernel = node.variants[0], node.variants[0].kernel
                if len(kernel.parts) > 1 or not hasattr(kernel.parts[0], "rnumel"):
                    continue
                (part,) = kernel.parts
                points = (part.numel * part.rnumel).hint()
                more = every(kernel.config, part.rnumel.hint())
                more = rng.sample(more, min(len(more), MOST if points >= SMALL else 8))
                aligned = tuple(a.what for a in variant.predicate if a.kind == "aligned")
                near = few(kernel, program.buffers, target)
                for k, config in enumerate(dict.fromkeys([*near, *more])):
                    code = generate_triton("kernel", (part,), config, program.buffers, target, aligned)
                    buffers = [(str(d).split(".")[1], program.buffers[b].extent.hint()) for b, d in code.buffers]
                    rows.append({
                        "kernel": f"{name} {'backward ' if number else ''}{kernel.name}", "chosen": k == 0,
                        "near": k < len(near), "launch": name_of(config),
                        "source": code.source, "buffers": buffers, "grid": code.grid.hint(), "warps": config.num_warps,
                    })  # fmt: skip
    file.write_bytes(gzip.compress(json.dumps(rows).encode()))
    print(f"{len(rows)} launches of {len({r['kernel'] for r in rows})} kernels in {file}")


# -- measuring ------------------------------------------------------------------------------------------
def measure(file: Path, results: Path, seconds: float) -> None:
    rows = json.loads(gzip.decompress(file.read_bytes()))
    order = sorted(range(len(rows)), key=lambda i: (not rows[i]["chosen"], random.Random(i).random()))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        end, lock = time.time() + seconds, Path(folder, "lock")
        lock.touch()
        results.write_text("", encoding="utf-8")
        shares = [[(i, rows[i]) for i in order[n::WORKERS]] for n in range(WORKERS)]
        workers = [context.Process(target=worker, args=(share, folder, lock, results, end)) for share in shares]
        for w in workers:
            w.start()
        for w in workers:
            w.join(max(1.0, end + 30 - time.time()))
            w.kill()


def worker(rows: list[tuple[int, Row]], folder: str, lock: Path, results: Path, end: float) -> None:
    tensors: dict[tuple[str, int], torch.Tensor] = {}
    with lock.open("w") as alone, results.open("a", encoding="utf-8") as out:
        for i, row in rows:
            if time.time() > end:
                break
            try:
                found = {"us": time_one(i, row, folder, tensors, alone)}
            except Exception as error:  # one that does not fit does not stop the rest
                found = {"error": f"{type(error).__name__}: {error}"[:200]}
            finally:
                fcntl.flock(alone, fcntl.LOCK_UN)
            out.write(json.dumps({"i": i, **found}) + "\n")
            out.flush()


def time_one(i: int, row: Row, folder: str, tensors: dict[tuple[str, int], torch.Tensor], alone: Any) -> float:
    path = Path(folder, f"k{i}.py")
    path.write_text(row["source"], encoding="utf-8")
    module = load_file(path)
    args = [buffer(tensors, dtype, k, size) for k, (dtype, size) in enumerate(row["buffers"])]

    def launch() -> None:
        module.kernel[(row["grid"],)](*args, num_warps=row["warps"], num_stages=1)

    module.kernel.warmup(*args, grid=(row["grid"],), num_warps=row["warps"], num_stages=1)
    fcntl.flock(alone, fcntl.LOCK_EX)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    times = []
    for _ in range(1 + REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / LAUNCHES)
    return min(times[1:])


def buffer(tensors: dict[tuple[str, int], torch.Tensor], dtype: str, k: int, size: int) -> torch.Tensor:
    """Random floats, zeros of other dtypes; the ``k``-th argument of each kernel is one tensor."""
    found = tensors.get((dtype, k))
    if found is None or found.numel() < size:
        kind = getattr(torch, dtype)
        made = torch.randn(size, device="cuda") if kind.is_floating_point else torch.zeros(size, device="cuda")
        tensors[dtype, k] = found = made.to(kind)
    return found


# -- results --------------------------------------------------------------------------------------------
def report(file: Path, results: Path) -> None:
    rows = json.loads(gzip.decompress(file.read_bytes()))
    by: dict[str, list[Row]] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        if "us" in found:
            row = rows[found["i"]] | found
            by.setdefault(row["kernel"], []).append(row)
    ratios, tuned = [], []
    for name, launches in by.items():
        best = sorted(launches, key=lambda r: r["us"])
        for chosen in (r for r in launches if r["chosen"]):
            ratios.append(chosen["us"] / best[0]["us"])
            tuned.append(min(r["us"] for r in launches if r["near"]) / best[0]["us"])
            others = "; ".join(f"{r['us']:.1f} ({r['launch']})" for r in best[:3])
            print(f"{ratios[-1]:.2f}  {name:50} {chosen['us']:7.1f} us ({chosen['launch']}) | {others}")
    if ratios:
        means = [geometric_mean(each) for each in (ratios, tuned)]
        print(f"{len(ratios)} kernels: the heuristics' launch takes {means[0]:.3f} times the best one's time, "
              f"the best of those that are measured {means[1]:.3f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["generate", "measure", "report"])
    parser.add_argument("file", type=Path)
    parser.add_argument("results", type=Path, nargs="?", default=Path("launches.jsonl"))
    parser.add_argument("--only", default="", help="parts of names, with commas between")
    parser.add_argument("--seconds", type=float, default=100.0)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.what == "generate":
        generate(args.file, args.only.split(",") if args.only else [])
    elif args.what == "measure":
        measure(args.file, args.results, args.seconds)
    else:
        report(args.file, args.results)


if __name__ == "__main__":
    main()
