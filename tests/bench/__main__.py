"""Run the sections, print tables, say which promises are kept, write JSON."""

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
        self.device, self.quick, self.out = args.device, args.quick, args.out
        self.match = [w for w in args.match.split(",") if w]
        self.peers = args.peers == "all"
        self.share, self.at_once = args.share, args.at_once
        self.deadline = time.monotonic() + args.budget
        self.promises: list[Promise] = []
        self.found: dict[str, Any] = {"about": about(args.device), "sections": {}, "promises": []}

    @property
    def job(self) -> dict[str, Any]:
        return {
            "device": self.device, "threads": THREADS, "quick": self.quick, "match": self.match,
            "rounds": 10 if self.quick else 25, "seconds": 0.15 if self.quick else 0.4,
        }  # fmt: skip

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(THREADS), **KEEP_PAGES} if self.device == "cpu" else {}

    def one(self, function: str, seconds: float, environment: dict[str, str], **job: Any) -> dict[str, Any]:
        """What a function that yields one row found (see child.py), in at most so many seconds."""
        own = {**self.environment, **environment}
        return children.one(function, {**self.job, **job}, min(self.left, seconds), own)

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


def about(device: str) -> dict[str, Any]:
    import torch

    from reflib.lab import machine

    there = machine.describe(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    return {
        "device": str(there),
        "threads": THREADS if device == "cpu" else None,
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.date.today().isoformat(),
        "load": [round(x, 1) for x in os.getloadavg()],
    }


# --- sections --------------------------------------------------------------------------------
def kernels(bench: Bench) -> None:
    def ceiling() -> list[float]:
        found = bench.one("worker.ceiling", bench.left, {})
        return [found["gbps"]] if "gbps" in found else []

    with children.fresh_caches() as caches:
        copies = ceiling()
        job = {**bench.job, "stop_after": KERNELS_SHARE * bench.left}
        rows = children.section("worker.kernels", job, bench.left, {**bench.environment, **caches}, US)
        copies += ceiling() if bench.left > 10 else []
    best = max(copies, default=None)
    text = f"copy: {', '.join(f'{g:,.0f}' for g in copies)} GB/s (read + write; before and after)\n"
    text += report.kernels_table(rows, best) + "\n" + report.group_lines(rows)
    bench.keep("kernels", {"copy_gbps": copies, "rows": rows},
               report.kernels_promises(rows, best, bench.device), text)  # fmt: skip


def compile_time(bench: Bench) -> None:
    """Cold and warm, ours and theirs in turn, and what PyTorch's own part costs alone."""
    runs = compile_runs(bench, [US, PEER, "aot_eager"])
    medians = {
        w: {k: report.median([r["seconds"] for r in rs if "seconds" in r]) for k, rs in by.items()}
        for w, by in runs.items()
    }
    ratios = {k: report.ratio(medians[US][k], medians[PEER][k]) for k in ("cold", "warm")}
    body = [[w, *report.shown(by, "cold", "warm")] for w, by in {**medians, f"{US} / {PEER}": ratios}.items()]
    lines = [report.table(["first forward and backward of a transformer block", "cold, s", "warm, s"], body)]
    lines.append("(aot_eager: Dynamo and AOTAutograd alone, which both others contain)")
    for who, by in runs.items():
        lines += [line for k, rs in by.items() for r in rs for line in report.errors({f"{who}, {k}": r})]
        stages = next((r["stages"] for r in by["cold"] if r.get("stages")), {})
        lines += [f"  {who}, cold: " + "; ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())]
    where = "GPU" if bench.device == "cuda" else "CPU"
    text = f"{where}: cold first compile of a transformer block against {PEER}"
    found = {"runs": runs, "medians": medians, "ratios": ratios}
    bench.keep("compile", found, [Promise(text, ratios["cold"], "<=", 0.5)], "\n".join(lines))


def compile_runs(bench: Bench, people: list[str]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """{who: {"cold": runs, "warm": runs}}; a warm run finds the caches of the cold one before it."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {w: {"cold": [], "warm": []} for w in people}
    turns = 1 if bench.quick or bench.device == "cuda" else 3
    for turn in range(-1, turns):
        for who in people:
            if turn < 0 and (bench.device == "cuda" or who == people[-1]):
                continue
            with children.fresh_caches() as caches:
                for kind in ("cold", "warm") if turn >= 0 else ("cold",):
                    result = bench.one("compiling.first_step", 180, caches, who=who, model="block")
                    if turn >= 0:  # before that, the compilers' files came off the disk, for nobody
                        runs[who][kind].append(result)
    return runs


def linear(bench: Bench) -> None:
    """1,000 operations against 100, on the CPU."""
    found, lines, ratios = {}, [], {}
    for who in (US, PEER):
        with children.fresh_caches() as caches:
            own = {**caches, "OMP_NUM_THREADS": str(THREADS)}
            found[who] = bench.one("compiling.chains", 300, own, who=who, counts=[100, 1000])
        if "error" not in found[who]:
            few, many = (found[who]["seconds"][count] for count in ("100", "1000"))
            ratios[who] = many / few
            lines.append(f"{who}: 100 ops {few:.2f} s, 1,000 ops {many:.2f} s, ratio {ratios[who]:.1f}")
    promise = Promise("compile time of 1,000 pointwise ops over 100", ratios.get(US), "<=", 12)
    bench.keep("linear", found, [promise], "\n".join([*lines, *report.errors(found)]))


def memory(bench: Bench) -> None:
    with children.fresh_caches() as caches:
        own = {**bench.environment, **caches}
        rows = children.section("worker.memory", bench.job, min(bench.left, 240), own, US)
    bench.keep("memory", rows, report.memory_promises(rows), report.wide_table(rows, "mib", "MiB at peak"))


def import_time(bench: Bench) -> None:
    runs = [bench.one("compiling.import_time", 60, {}) for _ in range(2 if bench.quick else 5)]
    value = report.median([r["seconds"] for r in runs if "seconds" in r])
    promise = Promise("import reflib on top of torch, s", value, "<=", 0.2)
    bench.keep("import", runs, [promise], "not measured" if value is None else f"{value * 1e3:.1f} ms")


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "kernels": kernels, "compile": compile_time, "host": host.section, "memory": memory, "import": import_time,
    "linear": linear, "matmul": matmul.section, "package": package.section,
}  # fmt: skip
SECONDS = {  # not worth starting with less
    "compile": 20, "kernels": 30, "linear": 15, "import": 5, "host": 60, "memory": 20, "matmul": 40, "package": 60,
}  # fmt: skip


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("where", nargs="?", choices=["cpu", "gpu", "cuda"], help="what to measure")
    parser.add_argument("--device", choices=["cpu", "gpu", "cuda"], help="the same")
    parser.add_argument("--only", default="", help=f"some of {', '.join(SECTIONS)}, with commas between")
    parser.add_argument("--match", default="", help="only kernels, matmuls with one of these words in their name")
    parser.add_argument("--out", type=Path, help="write all rows to this JSON file")
    parser.add_argument("--quick", action="store_true", help="few cases, few rounds: does it work?")
    parser.add_argument("--peers", choices=["all", "none"], default="all",
                        help="matmul: none times eager and ours, tuned, without compiling TorchInductor's")  # fmt: skip
    parser.add_argument("--share", type=Path, metavar="DIR",
                        help="matmul: divide the cases with other runs, and go on after them")  # fmt: skip
    parser.add_argument("--at-once", type=int, default=0, metavar="N", help="matmul: processes per GPU")
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
