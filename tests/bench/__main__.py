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

from . import children, host, matmul, package
from .report import Promise

THREADS = 2
# glibc gives a large tensor's pages back to the system when it is freed, and getting them again costs several
# times what the kernel does. Here it keeps them, for all contenders.
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**33)}


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


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "host": host.section, "matmul": matmul.section, "package": package.section,
}  # fmt: skip
SECONDS = {"host": 60, "matmul": 40, "package": 60}  # not worth starting with less


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("where", nargs="?", choices=["cpu", "gpu", "cuda"], help="what to measure")
    parser.add_argument("--device", choices=["cpu", "gpu", "cuda"], help="the same")
    parser.add_argument("--only", default="", help=f"some of {', '.join(SECTIONS)}, with commas between")
    parser.add_argument(
        "--match", default="", help="only matmuls, and programs of host, with one of these words in their name"
    )
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
