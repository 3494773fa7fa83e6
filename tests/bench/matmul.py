"""The section ``matmul``: several processes share one queue of cases. Each compiles (TorchInductor's candidates and
ours), and one at a time measures.

    python -m tests.bench gpu --only matmul --match splitk --budget 560 --out splitk.json
    python -m tests.bench gpu --only matmul --match splitk+64x --peers none --budget 110        ours and eager alone
    CUDA_VISIBLE_DEVICES=3 python -m tests.bench gpu --only matmul --share sets --out sets/3.json --budget 240
                                  one of several, a GPU each, that divide the cases; run again, they go on
    python -m tests.bench.matmul splitk.jsonl long.jsonl ...      tables of what several runs left
    python -m tests.bench.matmul splitk.jsonl long.jsonl ... --record notebooks/recorded/matmul.h200.json
                                  the same as rows that notebooks show (without files: sets and cells anew)

Rows go to OUT.jsonl as soon as they are known, so a run that is cut short loses only the cases it was at. A case is
timed while no other process of the run measures (reflib's ``device_lock``), and beside a reference kernel (quiet.py).
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import children, matmul_report
from .contenders import PEER_MAX, TUNED

Row = dict[str, Any]
PEER_SHARE = 0.65  # of the time: after that the peer compiles for no further case, so that ours reaches all
STALL = 120  # seconds without a row
AT_ONCE = 4  # processes per GPU
ROUNDS = 15  # as many as in the tuner's race: what is measured keeps others from measuring


def section(bench: Any) -> None:
    """``bench``: what __main__ shares among its sections."""
    from . import matmul_cases

    words = bench.match
    every = matmul_cases.cases(bench.device, bench.quick and not words)
    sets = {name: picked for name, found in every.items() if (picked := matmul_cases.chosen(found, words))}
    over = finished(bench.share.glob("*.jsonl"), bench.peers) if bench.share else set()
    names = [name for name in matmul_cases.mixed(sets.values()) if name not in over]
    with children.fresh_caches() as caches, tempfile.TemporaryDirectory(prefix="reflib-claims-") as folder:
        claims = bench.share / "claims" if bench.share else Path(folder)
        claims.mkdir(exist_ok=True)
        rows = run(bench, names, claims, {**bench.environment, **caches}, open_journal(bench)) if names else []
    for name, found in sets.items():
        mine = [row for row in rows if row.get("set") == name]
        text, promises = matmul_report.of_set(name, mine, len(every[name]), bench.device, bench.peers)
        bench.keep(f"matmul {name}", {"planned": [c.name for c in found], "rows": mine}, promises, text)


def finished(paths: Iterable[Path], peers: bool) -> set[str]:
    """The cases that these journals have, with the peer (or without, if it is not asked for)."""
    whole = [line for path in paths for line in path.read_text().rpartition("\n")[0].splitlines()]
    rows = [json.loads(line) for line in whole]
    beside = {row["case"] for row in rows if row.get("who") == PEER_MAX and row["kind"] in ("row", "prepared")}
    return {row["case"] for row in rows if row["kind"] == "done" and (row["case"] in beside or not peers)}


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


def run(
    bench: Any, names: list[str], claims: Path, environment: dict[str, str], keep: Callable[[Row], None]
) -> list[Row]:
    """The rows of several processes that share the cases. What kills one is a row, and another takes its place."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = 1 if bench.device == "cpu" else bench.at_once or max(1, min(AT_ONCE, cores // 3, len(names)))
    each = max(1, cores // at_once)
    environment = {**environment, "TORCHINDUCTOR_COMPILE_THREADS": str(each)}
    left, now = max(0.0, bench.left - 10), time.time()
    rounds = min(ROUNDS, bench.job["rounds"])
    job = {**bench.job, "rounds": rounds, "cases": names, "claims": str(claims), "compile_threads": each,
           "peers": bench.peers, "skip": [], "first": [], "peers_until": now + PEER_SHARE * left,
           "until": now + left - 10}  # fmt: skip
    deadline = time.monotonic() + left
    rows: list[Row] = []
    lock, stopped = threading.Lock(), threading.Event()

    def add(row: Row) -> None:
        with lock:
            rows.append(row)
            keep(row)

    def one_after_another(job: Row) -> None:
        for _ in range(children.ATTEMPTS):
            ended = children.follow("matmul_worker.measured", job, environment, deadline, add, STALL, stopped)
            if ended.late or not ended.problem or not ended.at:
                return
            add(died(ended))
            job = after(job, ended)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(one_after_another, [job] * at_once))
        finally:  # also when this process is told to end
            stopped.set()
    return rows


def died(ended: children.Ended) -> Row:
    """The row of a process that a contender killed; while all are timed in turn it counts as ours."""
    who = TUNED if ended.at["who"] == "timing" else ended.at["who"]
    return {**ended.at, "kind": "row", "us": None, "note": ended.problem, "who": who}


def after(job: Row, ended: children.Ended) -> Row:
    """What the next process does: this case again without that contender, if one did it, then cases of no process."""
    if ended.at["who"] == "timing":
        return {**job, "first": []}
    return {**job, "first": [ended.at["case"]], "skip": [*job["skip"], [ended.at["case"], ended.at["who"]]]}


def main(words: list[str]) -> None:
    """A recording of the rows in these files, or tables of them; of a case that is in several, the last counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.matmul")
    parser.add_argument("files", nargs="*", metavar="FILE.jsonl")
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
