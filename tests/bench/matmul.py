"""The section ``matmul``: a set at a time, first TorchInductor's compiling in several children, then timing alone.

    python -m tests.bench gpu --only matmul --match splitk --budget 560 --out splitk.json
    python -m tests.bench gpu --only matmul --match splitk+fp16 --peers none --budget 110       ours and eager alone
    python -m tests.bench.matmul splitk.jsonl long.jsonl ...      tables of what several runs left
    python -m tests.bench.matmul splitk.jsonl long.jsonl ... --record notebooks/recorded/matmul.h200.json
                                                                  the same as rows that notebooks show

Rows go to OUT.jsonl as soon as they are known, so a run that is cut short loses only the case it was at.
Nothing of the first phase is left when the second begins, and the second looks for neighbours (quiet.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import children, matmul_report
from .contenders import TUNED

Row = dict[str, Any]
WEIGHT = {"splitk": 1.0, "long": 0.7, "llm": 1.6}  # of the time, where several sets share a run
PREPARE_SHARE = 0.5  # of a set's time: the peer may not compile for longer
ATTEMPTS = 8  # a process that a contender killed is started again without that contender
MODULE = "tests.bench.matmul_worker"


@dataclass
class Run:
    """One set on its way. ``rows``: all found so far; ``keep`` gets each at once."""

    job: dict[str, Any]
    environment: dict[str, str]
    stall: float
    keep: Callable[[Row], None]
    rows: list[Row] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    def add(self, row: Row) -> None:
        with self.lock:
            self.rows.append(row)
            self.keep(row)


def section(bench: Any) -> None:
    """``bench``: what __main__ shares among its sections."""
    from . import matmul_cases

    words = bench.match
    every = matmul_cases.cases(bench.device, bench.quick and not words)
    sets = {name: picked for name, found in every.items() if (picked := matmul_cases.chosen(found, words))}
    journal = open_journal(bench)
    with children.fresh_caches() as caches:
        if bench.peer_cache:
            caches |= peer_caches(bench.peer_cache)
        for i, (name, found) in enumerate(sets.items()):
            left = list(sets)[i:]
            seconds = max(0.0, bench.left - 10) * WEIGHT[name] / sum(WEIGHT[n] for n in left)
            rows = run_set(bench, [c.name for c in found], seconds, {**bench.environment, **caches}, journal)
            text, promises = matmul_report.of_set(name, rows, len(every[name]), bench.device, bench.peers)
            bench.keep(f"matmul {name}", {"planned": [c.name for c in found], "rows": rows}, promises, text)


def peer_caches(folder: Path) -> dict[str, str]:
    """TorchInductor's and Triton's caches at a place of the user's choice. (reflib's stay fresh: we compile anew.)"""
    named = {n: folder.resolve() / n.lower() for n in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    for path in named.values():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {n: str(p) for n, p in named.items()}


def open_journal(bench: Any) -> Callable[[Row], None]:
    """What writes a row to OUT.jsonl and a line to the terminal."""
    file = None
    if bench.out:
        bench.out.parent.mkdir(parents=True, exist_ok=True)
        file = bench.out.with_suffix(".jsonl").open("a", encoding="utf-8")

    def keep(row: Row) -> None:
        if file:
            file.write(json.dumps(row) + "\n")
            file.flush()
        if line := matmul_report.progress(row):
            print(line, flush=True)

    keep({"kind": "about", **bench.found["about"], "where": bench.device, "quick": bench.quick, "peers": bench.peers})
    return keep


# --- a set ------------------------------------------------------------------------------------
def run_set(
    bench: Any, names: list[str], seconds: float, environment: dict[str, str], keep: Callable[[Row], None]
) -> list[Row]:
    """Compile, then time, within ``seconds``."""
    start = time.monotonic()
    cores = os.cpu_count() or 1
    at_once = bench.peers_at_once or max(1, min(5, cores // 3, len(names)))
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores // at_once))}  # the same in both phases: it is in keys
    job = {**bench.job, "cases": names, "done": [], "skip": [], "ready": [], "at_once": at_once,
           "peers": bench.peers}  # fmt: skip
    run = Run(job, {**environment, **threads}, 60 if bench.quick else 120, keep)
    if not bench.peers:
        time_cases(run, start + seconds)
        return run.rows
    with tempfile.TemporaryDirectory(prefix="reflib-claims-") as claims:
        job["claims"] = claims
        prepare(run, at_once, start + PREPARE_SHARE * seconds)
    prepared = [r for r in run.rows if r["kind"] == "prepared"]
    job["ready"] = [r["case"] for r in prepared if r.get("compile_s") is not None]
    # a case whose peer was not reached is timed last, without it; one whose peer failed is timed, that is its result
    reached = {r["case"] for r in prepared}
    job["cases"] = [n for n in names if n in reached] + [n for n in names if n not in reached]
    print(f"prepared {len(reached)} of {len(names)} cases with {at_once} processes, "
          f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
    children.end_all()
    time_cases(run, start + seconds)
    return run.rows


def prepare(run: Run, at_once: int, deadline: float) -> None:
    def one() -> None:
        for _ in range(ATTEMPTS):
            problem, last, timed_out = watch("prepare", run, deadline)
            if not problem or timed_out:
                return
            if last:  # the claim stays: nobody tries this case again
                run.add({"kind": "prepared", **last, "compile_s": None, "note": problem})

    threads = [threading.Thread(target=one) for _ in range(at_once)]
    for t in threads:
        t.start()
    try:
        for t in threads:
            t.join()
    finally:  # also when this process is told to end
        run.stopped.set()
        for t in threads:
            t.join()
        run.stopped.clear()


def time_cases(run: Run, deadline: float) -> None:
    for _ in range(ATTEMPTS):
        run.job["until"] = time.time() + max(0.0, deadline - time.monotonic())
        problem, last, timed_out = watch("time", run, deadline + 20)  # it stops by itself, between cases
        if not problem or timed_out:
            return
        run.job["done"] = [r["case"] for r in run.rows if r["kind"] == "done"]
        if not last:
            run.add({"kind": "row", "case": "-", "set": "-", "who": TUNED, "us": None, "note": problem})
            return
        run.add({"kind": "row", "us": None, "note": problem, **last, "who": _blamed(last["who"])})
        if last["who"] == "timing":
            run.job["done"].append(last["case"])
        else:
            run.job["skip"].append([last["case"], last["who"]])


def _blamed(who: str) -> str:
    return TUNED if who == "timing" else who  # nobody can tell; a promise counts what is wrong with ours


def watch(what: str, run: Run, deadline: float) -> tuple[str, Row | None, bool]:
    """One child until it ends, stalls or is out of time: (problem or "", what it was at, whether time was out)."""
    with tempfile.TemporaryDirectory(prefix="reflib-job-") as folder:
        job, results, errors = (Path(folder, n) for n in ("job.json", "rows.jsonl", "stderr"))
        job.write_text(json.dumps(run.job))
        words = [what, str(job), str(results)]
        with errors.open("wb") as err, children.started(MODULE, words, run.environment, err) as child:
            tail, last, heard = Tail(results), None, time.monotonic()
            while True:
                code, now = child.poll(), time.monotonic()
                for row in tail.read():
                    heard = now
                    if row["kind"] == "trying":
                        last = {"case": row["case"], "who": row["who"], "set": row["case"].split()[0]}
                    else:
                        run.add(row)
                if code is not None:
                    return (children.why(code, errors.read_text(errors="replace")) if code else ""), last, False
                if now > deadline or run.stopped.is_set():
                    return "out of time", last, True
                if now - heard > run.stall:
                    return f"hung: nothing for {run.stall:.0f} s", last, False
                time.sleep(0.1)


class Tail:
    """The lines that a file has got since the last look."""

    def __init__(self, path: Path):
        self.path, self.place = path, 0

    def read(self) -> list[Row]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.place)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.place += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


def main(words: list[str]) -> None:
    """A recording of the rows in these files, or tables of them; of a case that is in several, the last counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.matmul")
    parser.add_argument("files", nargs="+", metavar="FILE.jsonl")
    parser.add_argument("--record", type=Path, metavar="FOLDER/matmul.GPU.json")
    given = parser.parse_args(words)
    if given.record:
        from . import matmul_record

        matmul_record.record(given.files, given.record)
    else:
        tables(given.files)


def tables(paths: list[str]) -> None:
    from . import matmul_cases

    rows = [json.loads(line) for p in paths for line in Path(p).read_text().splitlines()]
    about = next((r for r in rows if r["kind"] == "about"), {})
    device = about.get("where", "cuda")
    print("\n".join(f"{k}: {v}" for k, v in about.items() if k != "kind"))
    for name, found in matmul_cases.cases(device).items():
        mine = [r for r in rows if r.get("set") == name]
        if mine:
            text, promises = matmul_report.of_set(name, mine, len(found), device, about.get("peers", True))
            print(f"\n== {name} ==\n{text}\n" + "\n".join(map(str, promises)))


if __name__ == "__main__":
    main(sys.argv[1:])
