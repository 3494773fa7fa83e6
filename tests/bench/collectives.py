"""Ranks on real devices, checked and timed, a process per GPU; on CPUs with gloo, which tries the program itself:

    python -m tests.bench.collectives --out FILE.jsonl [--device cpu] [--world 2] [--seconds 235] [--only times,tune]

Each part runs in processes of its own, with a limit: one that fails or hangs ends alone. ``FILE.jsonl`` has a line per
result, written at once. Exit code: 1 where something is wrong or a part did not end by itself; slow is not wrong.

* ``storage``: sums over symmetric storage at random sizes and dtypes, in calls that follow each other closely, in CUDA
  graphs with other calls between replays, and in compiled programs, which have their buffers there
* ``times``: 1 KB to 256 MB, one-shot and two-shot, in place and copied in, beside NCCL and PyTorch's ``symm_mem`` ops
* ``collectives``: functional collectives compiled, under both wrappers
* ``train``: DDP, FSDP2 and DTensor (tensor parallel) as in eager
* ``launches``: of the kernels over storage, several
* ``tune``: an op with candidates, one of which crashes on one rank; the all-reduce's own
* ``products``: a 7B model's layers, gather + product and product + scatter, in chunks and not

Times: microseconds per call on the slowest rank, calls in a CUDA graph, the median of rounds in which contenders take
turns. Multicast stays off, in NCCL as well.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

OFF = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
KB, MB = 1 << 10, 1 << 20
GROUP = "0"  # of all ranks
ROUNDS = 9
c = torch.ops._c10d_functional
Say = Callable[..., None]


def device_of(rank: int, kind: str) -> torch.device:
    return torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")


# -- right? -------------------------------------------------------------------------------------------------
def part_of(rank: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What ``rank`` has: any rank can make it."""
    g = torch.Generator(device).manual_seed(1000 * rank + n)
    return (torch.randn(n, generator=g, dtype=torch.float64, device=device) * 10).to(dtype)


def storage(say: Say, rank: int, size: int, device: torch.device) -> None:
    from reflib.ranks.reduce import EMPTY, REDUCE
    from reflib.ranks.symmetric import DTYPES, HOW

    rng, wrong, count = random.Random(0), [], 0
    large = 5_000_001 if device.type == "cuda" else 50_001
    for n in (0, 1, 2, 3, 7, 255, 256, 257, 1000, 4095, 4097, 30_001, large // 5, large):
        for dtype in DTYPES:
            parts = [part_of(r, n, dtype, device) for r in range(size)]
            exact = torch.stack([p.double() for p in parts]).sum(0)
            allowed = 2 * float((sum(parts[1:], parts[0]).double() - exact).abs().max()) + 1e-5 if n else 0.0
            for how in HOW:
                x, there = parts[rank], rng.random() < 0.5 and n * 8 < 16 * MB
                if there:
                    x = EMPTY([n], dtype, device, 256 * rng.randrange(1000) + 4096 * rank, GROUP).copy_(x)
                found = REDUCE(x, how, GROUP)
                error = float((found.double() - exact).abs().max()) if n else 0.0
                first = found.clone()
                dist.broadcast(first, 0)
                count += 1
                if not error <= allowed or not torch.equal(first, found):
                    wrong.append(f"{how} {n} {dtype} {'in place' if there else 'copied'}: {error}, allowed {allowed}")
    say("random sizes", wrong=wrong, count=count)
    for how in HOW:
        say("in a row", how=how, **in_a_row(how, rank, size, device))
    if device.type == "cuda":
        say("in CUDA graphs", wrong=in_graphs(rank, size, device))
    for options in ({}, {"wrapper": "cpp"}, *([{"cuda_graphs": True}] if device.type == "cuda" else [])):
        attempt(say, "compiled", partial(in_programs, rank, size, device, options), **options)


def attempt(say: Say, what: str, call: Callable[[], dict[str, Any]], **facts: Any) -> None:
    """An error is a row. (If only one rank has it, the others wait until the part's time is over.)"""
    try:
        say(what, **facts, **call())
    except Exception as e:
        say(what, **facts, wrong=[f"{type(e).__name__}: {e}"[:1500]], trace=traceback.format_exc()[-1500:])


def in_a_row(how: str, rank: int, size: int, device: torch.device, count: int = 400) -> dict[str, Any]:
    """Calls in the same memory that the host does not wait for, ranks out of step."""
    from reflib.ranks.reduce import EMPTY, REDUCE

    rng, wrong = random.Random(rank), torch.zeros(2, device=device)
    for n in (50, 70_000):
        there, other = EMPTY([n], torch.float32, device, 0, GROUP), torch.empty(n, device=device)
        for i in range(count):
            x = (there, other)[i % 3 % 2]
            x.fill_(i + rank)
            if rng.random() < 0.2 and device.type == "cuda":
                torch.cuda._sleep(rng.randrange(200_000))  # cycles
            wrong[i % 3 % 2] += (REDUCE(x, how, GROUP) != size * i + size * (size - 1) / 2).any()
    return {"wrong": [f"{int(w)} {what}" for w, what in zip(wrong, ("in place", "copied"), strict=True) if w]}


def in_graphs(rank: int, size: int, device: torch.device) -> list[str]:
    """Two graphs whose arguments lie at different places, replayed with other calls between."""
    from reflib.ranks.reduce import EMPTY, REDUCE

    wrong: dict[str, torch.Tensor] = {}
    rng, total = random.Random(rank), size * (size - 1) / 2
    x = EMPTY([3000], torch.float32, device, 1 << 16, GROUP)
    y, step = torch.empty(70_000, device=device), torch.zeros((), device=device)

    def first() -> torch.Tensor:
        x.fill_(rank).add_(step)
        return REDUCE(x, "one_shot", GROUP)

    def second() -> torch.Tensor:
        y.fill_(rank).sub_(step)
        return REDUCE(REDUCE(y, "two_shot", GROUP), "one_shot", GROUP)

    replay = {f.__name__: graph_of(f) for f in (first, second)}
    for i in range(200):
        step.fill_(i)
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(200_000))
        ways = random.Random(i).sample(["first", "second", "eager"], 3)
        for way in ways:
            if way == "eager":
                found, want = REDUCE(torch.full([77], float(i), device=device), "one_shot", GROUP), size * i
            else:
                found, want = replay[way](), size * i + total if way == "first" else size * (total - size * i)
            wrong[way] = wrong.get(way, 0) + (found != want).any()
    return [f"{way}: {int(w)} of 200" for way, w in wrong.items() if int(w)]


def graph_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def in_programs(rank: int, size: int, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    from reflib.ranks.candidates import by_the_group
    from reflib.ranks.reduce import REDUCE

    def fn(x: Any, w: Any, add: Any = None) -> Any:
        add = add or (lambda t, how: REDUCE(t, how, GROUP))
        a, b = add(x * 2 + 1, "one_shot"), add(x @ w, "two_shot")
        d = add((b - a).relu(), "one_shot").sin()
        return add(d, "one_shot") + d, d

    torch._dynamo.reset()
    compiled, wrong = torch.compile(fn, backend="reflib", options=options, dynamic=not options.get("cuda_graphs")), []
    for n in (40, 33, 1100, 40):
        for again in range(4):
            torch.manual_seed(n + again + 99 * rank)
            x, w = torch.randn(n, 24, device=device), torch.randn(24, 24, device=device) / 5
            for got, want in zip(compiled(x, w), fn(x, w, lambda t, how: by_the_group(t, GROUP)), strict=True):
                if not torch.allclose(got, want, rtol=1e-3, atol=1e-3):
                    wrong.append(f"{n}: {float((got - want).abs().max())}")
    return {"wrong": wrong}


def collectives(say: Say, rank: int, size: int, device: torch.device) -> None:
    def many(x: Any) -> Any:
        y = x * 2 + 1
        waited = c.wait_tensor
        a = waited(c.all_reduce(y, "sum", GROUP)) + 1
        b = waited(c.all_gather_into_tensor(y, size, GROUP)).relu()
        d = waited(c.reduce_scatter_tensor(y, "sum", size, GROUP)) * 3
        e = waited(c.broadcast(y, size - 1, GROUP)).sin()
        part = x.shape[0] // size
        f = waited(c.all_to_all_single(y, [part] * size, [part] * size, GROUP)) - 1
        g = waited(c.all_reduce(y, "max", GROUP))
        return a, b, d, e, f, g

    for wrapper in ("python", "cpp"):
        for dtype in (torch.float32, torch.bfloat16):
            torch._dynamo.reset()
            fn = torch.compile(many, backend="reflib", options={"wrapper": wrapper})

            def run(fn: Any = fn, dtype: torch.dtype = dtype) -> dict[str, Any]:
                wrong = []
                for n in (4, 64, 4, 1024):
                    x = part_of(rank, n * size * 32, dtype, device).view(n * size, 32)
                    for i, (got, want) in enumerate(zip(fn(x), many(x), strict=True)):
                        if got.stride() != want.stride() or not torch.allclose(got, want, rtol=2e-2, atol=2e-2):
                            wrong.append(f"result {i} of {n} rows")
                return {"wrong": wrong}

            attempt(say, "functional collectives", run, wrapper=wrapper, dtype=str(dtype))


def train(say: Say, rank: int, size: int, device: torch.device) -> None:
    from tests import rank_tasks

    for parallel in (rank_tasks.data_parallel, rank_tasks.sharded, rank_tasks.tensor_parallel):
        for wrapper in ("python", "cpp"):
            torch._dynamo.reset()

            def run(parallel: Any = parallel, wrapper: str = wrapper) -> dict[str, Any]:
                return {"collectives": rank_tasks.train(parallel, wrapper, device), "wrong": []}

            attempt(say, parallel.__name__, run, wrapper=wrapper)


def tune(say: Say, rank: int, size: int, device: torch.device) -> None:
    import reflib
    from reflib.ranks import candidates
    from tests import rank_tasks

    def faults() -> dict[str, Any]:
        winner, rows, total, reason = rank_tasks.tune("by_gather", "crashes", "by_reduce", device=device)
        statuses = {k: v[0] for k, v in rows.items()}
        wrong = [] if total == size else ["the process group does not add up any more"]
        wrong += [] if winner in ("by_gather", "by_reduce") else [f"{winner} won"]
        wrong += [f"crashes: {statuses['crashes']}"] if statuses["crashes"] not in ("crashed", "error", "hung") else []
        return {"wrong": wrong, "winner": winner, "rows": rows, "reason": reason}

    attempt(say, "a candidate crashes", faults)
    for nbytes in (16 * KB, 4 * MB):

        def own(nbytes: int = nbytes) -> dict[str, Any]:
            x = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device)
            e = reflib.explain(
                lambda x: candidates.all_reduce(x * 2, GROUP) + 1, x,
                autotune="blocking", cache_decisions=False, dynamic=False,
            )  # fmt: skip
            (d,) = [d for d in e.decisions if "all_reduce" in d.op]
            rows = {r.name: (r.status, r.time_us, r.why) for r in d.candidates}
            return {"winner": str(d.winner), "rows": rows, "wrong": [k for k, r in rows.items() if r[0] != "ok"]}

        attempt(say, "all_reduce tuned", own, bytes=nbytes)


# -- fast? --------------------------------------------------------------------------------------------------
def race(contenders: dict[str, Callable[[], Any]], device: torch.device, calls: int) -> dict[str, float | str]:
    """Microseconds by contender, or why there are none."""
    found: dict[str, float | str] = {}
    ready: dict[str, Callable[[], Any]] = {}
    for name, call in contenders.items():
        why = ""
        try:
            call()
            sync(device)
            ready[name] = repeated(call, calls, device)
        except Exception as e:
            why = f"{type(e).__name__}: {e}"[:300]
        if agreed(float(not why), device) < 1:
            ready.pop(name, None)
            found[name] = why or "not on another rank"
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(ROUNDS):
        for name, call in ready.items():
            times[name].append(one_round(call, device) / calls)
    for name, each in times.items():
        mine = torch.tensor(each, dtype=torch.float64, device=device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        found[name] = round(statistics.median(mine.tolist()), 2)
    return found


def repeated(call: Callable[[], Any], calls: int, device: torch.device) -> Callable[[], Any]:
    def many() -> None:
        for _ in range(calls):
            call()

    return graph_of(many) if device.type == "cuda" else many


def one_round(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds; begins on all ranks at about the same time."""
    dist.barrier()
    sync(device)
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    call()
    events[1].record()
    sync(device)
    return events[0].elapsed_time(events[1]) * 1e3


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def agreed(value: float, device: torch.device) -> float:
    t = torch.tensor([value], device=device)
    dist.all_reduce(t, dist.ReduceOp.MIN)
    return float(t.item())


def times(say: Say, rank: int, size: int, device: torch.device) -> None:
    from reflib.ranks.reduce import EMPTY, REDUCE
    from reflib.ranks.symmetric import HOW
    from reflib.ranks.symmetric import storage as storage_of

    most = 256 * MB if device.type == "cuda" else MB
    planned = storage_of(GROUP, device).copied
    sizes = [KB << i for i in range(0, 19, 2) if KB << i <= most]
    for nbytes in sizes:
        n = nbytes // 2
        x = torch.zeros(n, dtype=torch.bfloat16, device=device)
        ways: dict[str, Callable[[], Any]] = {
            "the group's, in place": partial(dist.all_reduce, x),
            "the group's, functional": lambda x=x: c.wait_tensor(c.all_reduce(x, "sum", GROUP)),  # type: ignore[misc]
        }
        there = EMPTY([n], x.dtype, device, 0, GROUP).zero_() if nbytes <= planned else None
        for how in HOW:
            ways[f"{how}, copied"] = partial(REDUCE, x, how, GROUP)
            if there is not None:
                ways[f"{how}, in place"] = partial(REDUCE, there, how, GROUP)
        if device.type == "cuda":
            ways |= peers(n, device)
        calls = 1 if device.type == "cpu" else 20 if nbytes <= MB else 5 if nbytes < 256 * MB else 2
        attempt(say, "times", partial(race, ways, device, calls), bytes=nbytes)


def launches(say: Say, rank: int, size: int, device: torch.device) -> None:
    """Launches of the kernels over storage: those in ``kernels`` come first."""
    from reflib.ranks import kernels
    from reflib.ranks.reduce import EMPTY, REDUCE
    from reflib.ranks.symmetric import HOW

    if device.type == "cpu":
        return
    chosen = kernels.BYTES, kernels.WARPS, kernels.MOST
    more = [(8192, 16, 24), (8192, 16, 64), (4096, 8, 128), (16384, 16, 128), (16384, 32, 64), (32768, 16, 128)]
    for nbytes in (4 * KB, 256 * KB, MB, 4 * MB, 16 * MB):
        x = EMPTY([nbytes // 2], torch.bfloat16, device, 0, GROUP).zero_()
        ways: dict[str, Callable[[], Any]] = {}
        for launch in (chosen, *more):
            for how in HOW:

                def call(launch: Any = launch, how: str = how, x: Any = x) -> Any:
                    kernels.BYTES, kernels.WARPS, kernels.MOST = launch
                    return REDUCE(x, how, GROUP)

                ways[f"{how} {launch}"] = call
        attempt(say, "launches", partial(race, ways, device, 20 if nbytes <= MB else 5), bytes=nbytes)


def peers(n: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """PyTorch's ops over symmetric memory."""
    from torch.distributed import _symmetric_memory as symmetric

    x = symmetric.empty(n, dtype=torch.bfloat16, device=device).zero_()
    symmetric.rendezvous(x, GROUP)
    return {
        "torch one_shot": partial(torch.ops.symm_mem.one_shot_all_reduce, x, "sum", GROUP),
        "torch two_shot, in place": partial(torch.ops.symm_mem.two_shot_all_reduce_, x, "sum", GROUP),
    }


def products(say: Say, rank: int, size: int, device: torch.device) -> None:
    """Llama-2-7B: 4,096 features, 11,008 in a feed-forward layer."""
    from reflib.ranks import candidates as r

    small = 1 if device.type == "cuda" else 64
    wide, inner = 4096 // small, 11008 // size // small
    for tokens in (2048 // small, 8192 // small):
        layers = {
            "qkv": (r.gather_then_multiply, r.gather_in_chunks, tokens // size, wide, 3 * wide // size),
            "up and gate": (r.gather_then_multiply, r.gather_in_chunks, tokens // size, wide, 2 * inner),
            "attention's out": (r.multiply_then_scatter, r.scatter_in_chunks, tokens, wide // size, wide),
            "down": (r.multiply_then_scatter, r.scatter_in_chunks, tokens, inner, wide),
        }
        for name, layer in layers.items():
            attempt(say, "products", partial(one_layer, size, device, *layer), layer=name, tokens=tokens)


def one_layer(size: int, device: torch.device, plain: Any, chunked: Any, m: int, k: int, n: int) -> dict[str, Any]:
    x, w = (torch.randn(s, device=device, dtype=torch.bfloat16) / k**0.25 for s in ((m, k), (k, n)))
    ways: dict[str, Callable[[], Any]] = {"eager": partial(plain, x, w, GROUP)}
    want, wrong = ways["eager"](), []
    for label, fn in [("whole", plain), *((f"{k} chunks", partial(chunked, chunks=k)) for k in (2, 4))]:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, w, fn=fn: fn(x, w, GROUP), backend="reflib", dynamic=False, fullgraph=True)
        ways[label] = partial(compiled, x, w)
        error = float((ways[label]() - want).abs().max() / want.abs().max())
        wrong += [f"{label}: {error}"] if not error < 0.03 else []
    scatters = m % size == 0 and want.shape[0] < m
    if device.type == "cuda":
        ways |= fused(scatters, x, w)
    ways["product alone"] = partial(torch.mm, x if scatters else x.repeat(size, 1), w)
    return {**race(ways, device, 5 if device.type == "cuda" else 1), "wrong": wrong}


def fused(scatters: bool, x: Any, w: Any) -> dict[str, Callable[[], Any]]:
    """PyTorch's, over its symmetric memory."""
    importlib.import_module("torch.distributed._symmetric_memory")
    ops = torch.ops.symm_mem
    if scatters:
        return {"torch": lambda: ops.fused_matmul_reduce_scatter(x, w, "sum", 0, GROUP)}
    return {"torch": lambda: ops.fused_all_gather_matmul(x, [w], 0, GROUP)}


# -- parts --------------------------------------------------------------------------------------------------
PARTS = {  # seconds
    "storage": 60, "tune": 100, "train": 60, "collectives": 60, "times": 40, "launches": 50, "products": 60,
}  # fmt: skip
TIMED = ("times", "launches", "products")  # alone, after the others, which run at once (on GPUs)


def run_rank(args: argparse.Namespace) -> None:
    """One rank of one part."""
    device = device_of(args.rank, args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    began = time.perf_counter()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{args.port}",
        rank=args.rank, world_size=args.world, timeout=timedelta(seconds=PARTS[args.part]),
    )  # fmt: skip

    def say(what: str, **facts: Any) -> None:
        """Of the first rank, everything; of others what is wrong."""
        if args.rank == 0 or facts.get("wrong"):
            row = {"part": args.part, "what": what, "rank": args.rank, **facts}
            row["at_s"] = round(time.perf_counter() - began, 1)
            print(json.dumps(row), flush=True)

    globals()[args.part](say, args.rank, args.world, device)
    dist.barrier()
    sync(device)
    say("done")
    sys.stdout.flush()
    os._exit(0)  # (no thread of a pool is waited for)


def run_part(part: str, args: argparse.Namespace, limit: float) -> list[dict[str, Any]]:
    """Its rows, and one that says how it ended."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "tests.bench.collectives", "--device", args.device, "--part", part]
    command += ["--world", str(args.world), "--port", str(port)]
    logs = [Path(f"{args.out}.{part}.{r}.log") for r in range(args.world)]
    started, processes = time.monotonic(), []
    for r, log in enumerate(logs):
        with log.open("w") as out:
            processes.append(
                subprocess.Popen(
                    [*command, "--rank", str(r)], env=os.environ | OFF, stdout=out, stderr=out, start_new_session=True
                )
            )
    while any(p.poll() is None for p in processes) and time.monotonic() - started < limit:
        time.sleep(0.1)
        if any(p.poll() for p in processes):  # one has failed: the others notice soon, or never
            limit = min(limit, time.monotonic() - started + 10)
    codes = [p.poll() for p in processes]
    for p in processes:
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    rows = [json.loads(line) for log in logs for line in log.read_text().splitlines() if line.startswith('{"part"')]
    end: dict[str, Any] = {"part": part, "what": "end", "codes": codes, "seconds": round(time.monotonic() - started, 1)}
    if any(codes) or None in codes:
        end["wrong"] = [f"codes {codes} (None: killed after {limit:.0f} s)"]
        end["logs"] = [log.read_text()[-3000:] for log in logs]
    return [*rows, end]


def shown(row: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in row.items() if k not in ("trace", "logs"))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", default="collectives.jsonl")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--world", type=int, default=2)
    p.add_argument("--seconds", type=float, default=235.0)
    p.add_argument("--only", default=",".join(PARTS))
    p.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    for name in ("--rank", "--port"):
        p.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.part:
        run_rank(args)
    last, bad, wanted = time.monotonic() + args.seconds, 0, args.only.split(",")
    checks = [part for part in wanted if part not in TIMED]

    def run(part: str) -> list[dict[str, Any]]:
        left = last - time.monotonic()
        return run_part(part, args, min(PARTS[part], left)) if left > 10 else [{"part": part, "wrong": ["no time"]}]

    with Path(args.out).open("w") as out, ThreadPoolExecutor(len(PARTS) if args.device == "cuda" else 1) as pool:
        for rows in itertools.chain(pool.map(run, checks), map(run, (part for part in wanted if part in TIMED))):
            for row in rows:
                out.write(json.dumps(row) + "\n")
                bad += bool(row.get("wrong"))
                print(shown(row), *(row.get("logs", ()) if row.get("wrong") else ()), sep="\n", flush=True)
            out.flush()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
