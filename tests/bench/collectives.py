"""Ranks on real devices, checked and timed, a process per GPU; on CPUs with gloo, which tries the program itself:

    python -m tests.bench.collectives --out FILE.jsonl [--device cpu] [--world 2] [--seconds 420] [--only times,tune]

Each part runs in processes of its own, with a limit: one that fails or hangs ends alone. ``FILE.jsonl`` has a line per
result, written at once. Exit code: 1 where something is wrong or a part did not end by itself; slow is not wrong.

* ``storage``: sums over symmetric storage at random sizes and dtypes, in calls that follow each other closely, in CUDA
  graphs with other calls between replays, and in compiled programs, which have their buffers there
* ``times``: 1 KB to 1 GB, one-shot and two-shot, in place and copied in, beside NCCL and PyTorch's ``symm_mem`` ops;
  what is compiled where storage has no room
* ``collectives``: functional collectives compiled, under both wrappers
* ``train``: DDP, FSDP2 and DTensor (tensor parallel) as in eager
* ``launches``: of the kernels over storage, several
* ``late``, ``other_size``: one rank does not come, or does something else: an error on all
* ``tune``: an op with candidates, one of which crashes on one rank; the all-reduce's own
* ``six``: six products tuned by all ranks together, beside one rank alone
* ``products``: a 7B model's layers, gather + product and product + scatter: whole, in chunks, through storage

Times: microseconds per call on the slowest rank, calls in a CUDA graph, the median of rounds in which contenders take
turns. Multicast stays off, in NCCL as well.
"""

import argparse
import importlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bench import collectives_right as right
from tests.bench.collectives_right import GROUP, KB, MB, Say, attempt, graph_of

OFF = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
ROUNDS = 9
c = torch.ops._c10d_functional


def device_of(rank: int, kind: str) -> torch.device:
    return torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")


# -- times --------------------------------------------------------------------------------------------------
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

    most = 1024 * MB if device.type == "cuda" else 16 * MB
    planned = storage_of(GROUP, device).copied
    sizes = [KB << i for i in range(0, 21, 2) if KB << i <= most]
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
        if nbytes > planned:
            ways["compiled: chosen without measuring, in place"] = partial(chosen(), x)
        if device.type == "cuda":
            ways |= peers(n, device)
        calls = 1 if device.type == "cpu" else 20 if nbytes <= MB else 5 if nbytes < 256 * MB else 2
        attempt(say, "times", partial(race, ways, device, calls), bytes=nbytes)


def chosen() -> Callable[..., Any]:
    """reflib's op in a program that does not need its argument any more."""
    from reflib.ranks import candidates

    torch._dynamo.reset()
    options = {"autotune": "blocking", "cache_decisions": False}
    return torch.compile(
        lambda x: x.copy_(candidates.all_reduce(x, GROUP)), backend="reflib", options=options, dynamic=False
    )


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
    gathers = {"whole": r.gather_then_multiply, "through storage": r.gather_through_storage}
    scatters = {
        "whole": r.multiply_then_scatter, "in storage": r.scatter_in_storage,
        "through storage": r.scatter_through_storage,
    }  # fmt: skip
    for chunks in r.CHUNKS:
        gathers[f"{chunks} chunks"] = partial(r.gather_in_chunks, chunks=chunks)
        scatters[f"{chunks} chunks"] = partial(r.scatter_in_chunks, chunks=chunks)
    for tokens in (2048 // small, 8192 // small):
        layers = {
            "qkv": (gathers, tokens // size, wide, 3 * wide // size),
            "up and gate": (gathers, tokens // size, wide, 2 * inner),
            "attention's out": (scatters, tokens, wide // size, wide),
            "down": (scatters, tokens, inner, wide),
        }
        for name, layer in layers.items():
            attempt(say, "products", partial(one_layer, size, device, *layer), layer=name, tokens=tokens)


def one_layer(size: int, device: torch.device, fns: dict[str, Any], m: int, k: int, n: int) -> dict[str, Any]:
    x, w = (torch.randn(s, device=device, dtype=torch.bfloat16) / k**0.25 for s in ((m, k), (k, n)))
    ways: dict[str, Callable[[], Any]] = {"eager": partial(fns["whole"], x, w, GROUP)}
    want, wrong = ways["eager"](), []
    scatters = want.shape[0] < m
    for label, fn in fns.items():
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, w, fn=fn: fn(x, w, GROUP), backend="reflib", dynamic=False, fullgraph=True)
        ways[label] = partial(compiled, x, w)
        error = float((ways[label]() - want).abs().max() / want.abs().max())
        wrong += [f"{label}: {error}"] if not error < 0.03 else []
    if device.type == "cuda":
        ways |= fused(scatters, x, w)
    ways["product alone"] = partial(torch.mm, x if scatters else x.repeat(size, 1), w)
    return {**race(ways, device, 5 if device.type == "cuda" else 1), "wrong": wrong}


SQUARE = [(1024 + 256 * i, 1024 + 256 * i, 2048 + 128 * i) for i in range(6)]  # rows, and sizes of a layer
LAYERS = [
    (4096, k, n) for k, n in ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096), (4096, 32000), (4096, 512))
]


def six(say: Say, rank: int, size: int, device: torch.device) -> None:
    """Seconds until all ranks have compiled six products, and of these, until they have the decisions (the stage
    ``autotune``): the first rank alone, then all, each for other numbers of rows. What compilers or libraries set up
    once is not counted. Twice: one rank may use all cores, as processes of one host do; each has its share of them, as
    launchers bind processes, or ranks of several hosts have."""
    from reflib.autotune.pool import pool

    cores = sorted(os.sched_getaffinity(0))
    tuned_by_one_and_all(say, rank, device, SQUARE, "small", 2)
    pool().close()
    os.sched_setaffinity(0, cores[rank::size] or cores)
    tuned_by_one_and_all(say, rank, device, SQUARE, "small, cores shared out", 2, 256)
    tuned_by_one_and_all(say, rank, device, LAYERS, "of a 7B model, cores shared out", 0)
    pool().close()
    os.sched_setaffinity(0, cores)


def tuned_by_one_and_all(
    say: Say, rank: int, device: torch.device, sizes: Any, kind: str, warm: int, rows: int = 0
) -> None:
    import reflib
    from reflib.ranks import share

    small, kept = 1 if device.type == "cuda" else 16, share.sharing
    whole, tuning, spent = dict[str, float](), dict[str, float](), dict[str, Any]()
    for who, more, count in (("nobody", 0, warm), ("alone", 64, 6), ("all", 128, 6))[warm == 0 :]:
        given = [((m + rows + more) // small, k // small, n // small) for m, k, n in sizes[:count]]
        args = [torch.randn(s, device=device, dtype=torch.bfloat16) for m, k, n in given for s in ((m, k), (k, n))]

        def fn(*args: Any) -> Any:
            return [(x @ w).relu() for x, w in zip(args[::2], args[1::2], strict=True)]

        if who != "all":
            share.sharing = lambda: None
        dist.barrier()
        begun, mine = time.perf_counter(), 0.0
        if who != "alone" or rank == 0:
            e = reflib.explain(fn, *args, autotune="blocking", cache_decisions=False, dynamic=False)
            mine = sum(x.seconds for x in e.timeline if x.kind == "stage" and x.name == "autotune")
            kinds = [(x.name if x.kind == "stage" else x.kind, x.seconds) for x in e.timeline]
            spent[who] = {k: round(sum(s for n, s in kinds if n == k), 1) for k in sorted({n for n, _ in kinds})}
        tuning[who] = -agreed(-mine, device)
        sync(device)
        share.sharing, whole[who] = kept, time.perf_counter() - begun
    for what, s in (("compiled", whole), ("decided", tuning)):
        ratio = round(s["all"] / max(s["alone"], 1e-9), 2)
        say(f"six products {kind}", until=what, **{k: round(v, 2) for k, v in s.items()}, ratio=ratio)
    say(f"six products {kind}", seconds_of_the_first_rank=spent)


def fused(scatters: bool, x: Any, w: Any) -> dict[str, Callable[[], Any]]:
    """PyTorch's, over its symmetric memory."""
    importlib.import_module("torch.distributed._symmetric_memory")
    ops = torch.ops.symm_mem
    if scatters:
        return {"torch": lambda: ops.fused_matmul_reduce_scatter(x, w, "sum", 0, GROUP)}
    return {"torch": lambda: ops.fused_all_gather_matmul(x, [w], 0, GROUP)}


# -- parts --------------------------------------------------------------------------------------------------
PARTS: dict[str, tuple[Callable[..., None], int]] = {  # and seconds
    "storage": (right.storage, 90), "tune": (right.tune, 100), "train": (right.train, 60),
    "collectives": (right.collectives, 60), "times": (times, 40), "launches": (launches, 50),
    "products": (products, 120), "six": (six, 90),
    **{how: (partial(right.fault, how), 40) for how in ("late", "other_size")},
}  # fmt: skip
TIMED = ("times", "launches", "products", "six")  # alone, after the others, which run at once (on GPUs)


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
        rank=args.rank, world_size=args.world, timeout=timedelta(seconds=PARTS[args.part][1]),
    )  # fmt: skip

    def say(what: str, **facts: Any) -> None:
        """Of the first rank, everything; of others what is wrong."""
        if args.rank == 0 or facts.get("wrong"):
            row = {"part": args.part, "what": what, "rank": args.rank, **facts}
            row["at_s"] = round(time.perf_counter() - began, 1)
            print(json.dumps(row), flush=True)

    PARTS[args.part][0](say, args.rank, args.world, device)
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
    p.add_argument("--seconds", type=float, default=420.0)
    p.add_argument("--only", default=",".join(PARTS))
    p.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    for name in ("--rank", "--port"):
        p.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.part:
        run_rank(args)
    last, bad, wanted = time.monotonic() + args.seconds, 0, args.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        p.error(f"--only: {', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    checks = [part for part in wanted if part not in TIMED]

    def run(part: str) -> list[dict[str, Any]]:
        left = min(PARTS[part][1] * (1 if args.device == "cuda" else 4), last - time.monotonic())
        return run_part(part, args, left) if left > 10 else [{"part": part, "wrong": ["no time"]}]

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
