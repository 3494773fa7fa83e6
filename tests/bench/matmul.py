"""The section ``matmul``: a set at a time, first TorchInductor's compiling in several children, then timing alone.

    python -m tests.bench gpu --only matmul --match splitk --budget 560 --out splitk.json
    python -m tests.bench gpu --only matmul --match splitk+fp16 --peers none --budget 110       ours and eager alone
    python -m tests.bench.matmul splitk.jsonl long.jsonl ...      tables of what several runs left
    python -m tests.bench.matmul splitk.jsonl long.jsonl ... --record notebooks/recorded/matmul.h200.json
                                                                  the same as rows that notebooks show

Rows go to OUT.jsonl as soon as they are known, so a run that is cut short loses only the case it was at.
Nothing of the first phase is left when the second begins, and the second looks for neighbours (quiet.py).
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import children, matmul_report
from .contenders import TUNED

Row = dict[str, Any]
WEIGHT = {"splitk": 1.0, "long": 0.7, "llm": 1.6}  # of the time, where several sets share a run
PREPARE_SHARE = 0.5  # of a set's time: the peer may not compile for longer


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
    threads = max(1, cores // at_once)  # the same in both phases: it is in the caches' keys
    environment = {**environment, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    job = {**bench.job, "cases": names, "done": [], "skip": [], "ready": [], "peers": bench.peers}
    stall = 60 if bench.quick else 120
    rows: list[Row] = []
    if bench.peers:
        rows = prepare(job, at_once, environment, start + PREPARE_SHARE * seconds, stall, keep)
        job["ready"] = [r["case"] for r in rows if r.get("compile_s") is not None]
        # a case whose peer was not reached is timed last, without it; that a peer failed is its result
        reached = {r["case"] for r in rows}
        job["cases"] = sorted(names, key=lambda n: n not in reached)
        print(f"prepared {len(reached)} of {len(names)} cases with {at_once} processes, "
              f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
        children.end_all()
    left = start + seconds - time.monotonic()
    job["until"] = time.time() + max(0.0, left)  # it stops by itself, between cases
    return rows + children.section("matmul_worker.timed", job, left + 20, environment, TUNED, keep, stall)


def prepare(
    job: Row, at_once: int, environment: dict[str, str], deadline: float, stall: float, keep: Callable[[Row], None]
) -> list[Row]:
    """The rows of ``at_once`` processes that share the cases. What kills one is a row, and another takes its place."""
    rows: list[Row] = []
    lock, stopped = threading.Lock(), threading.Event()

    def add(row: Row) -> None:
        with lock:
            rows.append(row)
            keep(row)

    def one_after_another(job: Row) -> None:
        for _ in range(children.ATTEMPTS):
            ended = children.follow("matmul_worker.prepare", job, environment, deadline, add, stall, stopped)
            if ended.late or not ended.problem:
                return
            if ended.at:  # the claim stays: nobody tries this case again
                add({**ended.at, "kind": "prepared", "compile_s": None, "note": ended.problem})

    with tempfile.TemporaryDirectory(prefix="reflib-claims-") as claims, ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(one_after_another, [{**job, "claims": claims}] * at_once))
        finally:  # also when this process is told to end
            stopped.set()
    return rows


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
