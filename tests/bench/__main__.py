"""Run the sections, print tables, say which promises are kept, write JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import children, host, matmul, package, report
from .contenders import PEER, US
from .report import Promise

THREADS = 2
# glibc gives a large tensor's pages back to the system when it is freed, and getting them again costs several
# times what the kernel does. For everybody alike, it keeps them here.
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
KERNELS_SHARE = 0.6  # of the time left: no further case is begun after that


class Bench:
    """What the sections share. ``found`` is the JSON file, written again after each section."""

    def __init__(self, args: argparse.Namespace):
        self.device, self.quick, self.out, self.busy = args.device, args.quick, args.out, args.busy
        self.match = [w for w in args.match.split(",") if w]
        self.threads = 1 if args.busy else THREADS
        self.peers = args.peers == "all"
        self.peer_cache, self.peers_at_once = args.peer_cache, args.peers_at_once
        self.deadline = time.monotonic() + args.budget
        self.promises: list[Promise] = []
        self.found: dict[str, Any] = {"about": about(args.device, self.threads), "sections": {}, "promises": []}
        self.ceiling: float | None = None

    @property
    def job(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "threads": self.threads,
            "busy": self.busy and self.device == "cpu",
            "quick": self.quick,
            "match": self.match,
            "rounds": 10 if self.quick else 25,
            "seconds": 0.15 if self.quick else 0.4,
        }

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.threads), **KEEP_PAGES} if self.device == "cpu" else {}

    def keep(self, name: str, rows: Any, promises: list[Promise], text: str) -> None:
        print(f"\n== {name} ==\n{text}", flush=True)
        self.promises += promises
        self.found["sections"][name] = rows
        self.found["promises"] = [p.to_data() for p in self.promises]
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self.found, indent=1, sort_keys=True) + "\n")


def cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


def about(device: str, threads: int) -> dict[str, Any]:
    import torch

    from reflib.lab import machine

    there = machine.describe(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    return {
        "device": str(there),
        "threads": threads if device == "cpu" else None,
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.date.today().isoformat(),
        "load": [round(x, 1) for x in os.getloadavg()],
    }


# --- sections --------------------------------------------------------------------------------
def kernels(bench: Bench) -> None:
    def ceiling() -> list[float]:
        return [
            r["gbps"] for r in children.section("ceiling", bench.job, bench.left, bench.environment) if r.get("gbps")
        ]

    with children.fresh_caches() as caches:
        before = ceiling()
        job = {**bench.job, "stop_after": KERNELS_SHARE * bench.left}
        rows = children.section("kernels", job, bench.left, {**bench.environment, **caches})
        after = ceiling() if bench.left > 10 else []
    bench.ceiling = max([*before, *after], default=None)
    text = f"copy: {', '.join(f'{g:,.0f}' for g in [*before, *after])} GB/s (read + write; before and after)\n"
    text += report.kernels_table(rows, bench.ceiling) + "\n" + report.group_lines(rows)
    bench.keep("kernels", {"copy_gbps": [*before, *after], "rows": rows},
               report.kernels_promises(rows, bench.ceiling, bench.device), text)  # fmt: skip


def compile_time(bench: Bench) -> None:
    """Cold and warm, ours and theirs in turn, and what PyTorch's own part costs alone."""
    runs = compile_runs(bench, [US, PEER, "aot_eager"])
    medians = {
        w: {k: report.median([r["seconds"] for r in rs if "seconds" in r]) for k, rs in by.items()}
        for w, by in runs.items()
    }
    ratio = {k: divide(medians[US][k], medians[PEER][k]) for k in ("cold", "warm")}
    body = [[w, *(f"{v:.2f}" if v else "-" for v in by.values())] for w, by in medians.items()]
    body.append([f"{US} / {PEER}", *(f"{v:.2f}" if v else "-" for v in ratio.values())])
    lines = [report.table(["first forward and backward of a transformer block", "cold, s", "warm, s"], body)]
    lines.append("(aot_eager: Dynamo and AOTAutograd alone, which both others contain)")
    for who, by in runs.items():
        lines += [f"  {who}, {k}: {r['error']}" for k, rs in by.items() for r in rs if "error" in r]
    for who, by in runs.items():
        stages = next((r["stages"] for r in by["cold"] if r.get("stages")), {})
        lines += [f"  {who}, cold: " + "; ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())]
    where = "GPU" if bench.device == "cuda" else "CPU"
    text = f"{where}: cold first compile of a transformer block against {PEER}"
    found = {"runs": runs, "medians": medians, "ratios": ratio}
    bench.keep("compile", found, [Promise(text, ratio["cold"], "<=", 0.5)], "\n".join(lines))


def compile_runs(bench: Bench, people: list[str]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """{who: {"cold": runs, "warm": runs}}; a warm run finds the caches of the cold one before it."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {w: {"cold": [], "warm": []} for w in people}
    turns = 1 if bench.quick or bench.device == "cuda" else 3
    for turn in range(-1, turns):
        for who in people:
            if turn < 0 and (bench.device == "cuda" or who == people[-1]):
                continue
            job = {"what": "first_step", "who": who, "model": "block", **bench.job}
            with children.fresh_caches() as caches:
                for kind in ("cold", "warm") if turn >= 0 else ("cold",):
                    result = children.one_job(job, min(bench.left, 180), {**bench.environment, **caches})
                    if turn >= 0:  # before that, the compilers' files came off the disk, for nobody
                        runs[who][kind].append(result)
    return runs


def divide(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def linear(bench: Bench) -> None:
    """1,000 operations against 100, on the CPU."""
    counts = [100, 1000]
    found, lines, ratios = {}, [], {}
    for who in (US, PEER):
        with children.fresh_caches() as caches:
            job = {"what": "chains", "who": who, "counts": counts, **bench.job}
            found[who] = children.one_job(job, min(bench.left, 300), {**caches, "OMP_NUM_THREADS": str(THREADS)})
        if "error" in found[who]:
            lines.append(f"{who}: {found[who]['error']}")
            continue
        seconds = found[who]["seconds"]
        ratios[who] = seconds["1000"] / seconds["100"]
        lines.append(
            f"{who}: 100 ops {seconds['100']:.2f} s, 1,000 ops {seconds['1000']:.2f} s, ratio {ratios[who]:.1f}"
        )
    promise = Promise("compile time of 1,000 pointwise ops over 100", ratios.get(US), "<=", 12)
    bench.keep("linear", found, [promise], "\n".join(lines))


def memory(bench: Bench) -> None:
    with children.fresh_caches() as caches:
        rows = children.section("memory", bench.job, min(bench.left, 240), {**bench.environment, **caches})
    bench.keep("memory", rows, report.memory_promises(rows), report.wide_table(rows, "mib", "MiB at peak"))


def import_time(bench: Bench) -> None:
    runs = [children.one_job({"what": "import"}, 60, {}) for _ in range(2 if bench.quick else 5)]
    value = report.median([r["seconds"] for r in runs if "seconds" in r])
    promise = Promise("import reflib on top of torch, s", value, "<=", 0.2)
    bench.keep("import", runs, [promise], "not measured" if value is None else f"{value * 1e3:.1f} ms")


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "kernels": kernels,
    "compile": compile_time,
    "host": host.section,
    "memory": memory,
    "import": import_time,
    "linear": linear,
    "matmul": matmul.section,
    "package": package.section,
}
SECONDS = {
    "compile": 20,
    "kernels": 30,
    "linear": 15,
    "import": 5,
    "host": 60,
    "memory": 20,
    "matmul": 40,
    "package": 60,
}  # not worth starting with less


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("where", nargs="?", choices=["cpu", "gpu", "cuda"], help="what to measure")
    parser.add_argument("--device", choices=["cpu", "gpu", "cuda"], help="the same")
    parser.add_argument("--only", default="", help=f"some of {', '.join(SECTIONS)}, with commas between")
    parser.add_argument("--match", default="", help="only kernels, matmuls with one of these words in their name")
    parser.add_argument("--out", type=Path, help="write all rows to this JSON file")
    parser.add_argument("--quick", action="store_true", help="few cases, few rounds: does it work?")
    parser.add_argument("--busy", action="store_true", help="CPU kernels by processor time of one thread")
    parser.add_argument("--peers", choices=["all", "none"], default="all",
                        help="matmul: none times eager and ours, tuned, without compiling TorchInductor's")  # fmt: skip
    parser.add_argument("--peer-cache", type=Path, metavar="DIR", help="matmul: keep TorchInductor's caches there")
    parser.add_argument("--peers-at-once", type=int, default=0, metavar="N", help="matmul: TorchInductors compiling")
    parser.add_argument("--budget", type=float, default=3600, help="seconds for all of it")
    args = parser.parse_args(words)
    args.device = "cuda" if (args.where or args.device or "cpu") in ("gpu", "cuda") else "cpu"
    args.only = [s for s in args.only.split(",") if s]
    if unknown := [s for s in args.only if s not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return args


def main(words: list[str]) -> int:
    args = parse(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children are ended on the way out
    if args.device == "cuda" and not cuda_available():
        print("PyTorch sees no CUDA device here; `python -m tests.bench cpu` needs none", file=sys.stderr)
        return 2
    bench = Bench(args)
    print("\n".join(f"{k}: {v}" for k, v in bench.found["about"].items()))
    for name, section in SECTIONS.items():
        if args.only and name not in args.only:
            continue
        if bench.left < SECONDS[name]:
            print(f"\n== {name} ==\nleft out: no time left")
            continue
        start = time.monotonic()
        section(bench)
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
    print("\n" + "\n".join(map(str, bench.promises)))
    return 0 if all(p.kept for p in bench.promises) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
