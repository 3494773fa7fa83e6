"""PyTorch's OpInfo samples against reflib.

python -m tests.opinfo                          everything (hours); goes on where it stopped
python -m tests.opinfo --limit 8 --modes forward --dtypes float32
python -m tests.opinfo --only softmax,var --fresh
python -m tests.opinfo --shard 2/4 --out shard2.jsonl
python -m tests.opinfo --device cuda --jobs 10 --out cuda.jsonl
python -m tests.opinfo --show 'nn.functional.gelu|float32|forward|0'
python -m tests.opinfo --report                 the table again, from the results file
"""

import argparse
import fnmatch
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

FEW = 4  # samples of each group that come before all others


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__.splitlines()[0])
    p.add_argument("--pick", type=int, default=0, help="another seed: which samples of a group come first, at random")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--dtypes", default="float32,int64,bool,bfloat16")
    p.add_argument("--modes", default="forward,backward")
    p.add_argument("--only", default="", help="op names or patterns, by commas")
    p.add_argument("--limit", type=int, default=0, help="most samples of an op, spread evenly (0: all)")
    p.add_argument("--batch", type=int, default=96, help="samples to one process")
    p.add_argument("--jobs", type=int, default=1)
    p.add_argument("--seconds", type=float, default=float("inf"), help="stop then; a later call goes on")
    p.add_argument("--shard", default="1/1")
    p.add_argument("--seed", type=int, default=20240, help="of the samples' random numbers")
    p.add_argument(
        "--until", choices=("lower", "fuse", "schedule", "wrap"), default="wrap", help="interpret that stage's program"
    )
    p.add_argument("--out", type=Path, default=Path("_build/opinfo.jsonl"))
    p.add_argument("--known", type=Path, default=Path(), help="results of other shards or earlier, not to be had again")
    p.add_argument("--fresh", action="store_true", help="forget earlier results")
    p.add_argument("--again", default="", help="statuses to try again: wrong,error,crash,timeout")
    p.add_argument("--report", action="store_true")
    p.add_argument("--show", metavar="KEY")
    a = p.parse_args()
    a.until_time = time.monotonic() + a.seconds
    if a.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # OpInfos use a GPU where there is one, which no fork survives
    if a.show:
        from .show import show

        return show(a.show)
    results = {} if a.fresh else read(a.out)
    if a.again:
        results = {k: r for k, r in results.items() if r["status"] not in a.again.split(",")}
    if a.fresh or a.again:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text("".join(json.dumps(r) + "\n" for r in results.values()))
    if not a.report:
        run(a, {**read(a.known), **results})
        results = read(a.out)
    return report(results)


def read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {r["key"]: r for r in rows}


def run(a: argparse.Namespace, results: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)  # no pool of threads before the fork
    import torch._dynamo

    from tests.overheads import without_overheads

    from .samples import groups
    from .workers import run_tasks

    without_overheads()
    patterns = [x for x in a.only.split(",") if x]

    def wanted(name: str) -> bool:
        return not patterns or any(fnmatch.fnmatchcase(name, x) for x in patterns)

    found = groups(a.dtypes.split(","), a.modes.split(","), wanted, a.device, a.seed)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    start = last = time.monotonic()
    with a.out.open("a") as out:

        def tell(result: Any) -> None:
            nonlocal last
            counts[result.status] += 1
            out.write(json.dumps(asdict(result)) + "\n")
            out.flush()
            if result.status not in ("ok", "skip", "excluded"):
                print(f"{result.status:8} {result.key}  {' '.join(result.why.split())[:300]}", flush=True)
            n, now = sum(counts.values()), time.monotonic()
            if now - last > 30:
                last = now
                print(f"[{n} in {now - start:.0f} s] {dict(counts)}", file=sys.stderr, flush=True)

        tasks = make_tasks(found, a.limit, a.batch, set(results), a.shard, a.pick)
        run_tasks(tasks, a.jobs, tell, a.until, a.device, a.until_time - time.monotonic())
    print(f"{sum(counts.values())} samples in {time.monotonic() - start:.0f} s")


def make_tasks(
    groups: list[Any], limit: int, batch: int, done: set[str], shard: str = "1/1", pick: int = 0
) -> Iterator[Any]:
    """Tasks of about ``batch`` samples each, done ones left out; made as they are asked for, since counting a GPU's
    samples takes a minute. A few samples of every group come first: a run that is stopped has seen some of everything.
    """
    from .samples import samples, spread
    from .workers import Task

    at, of = map(int, shard.split("/"))
    groups = groups[at - 1 :: of]
    random.Random(7 + pick).shuffle(groups)
    done = set(done)
    for most in (limit,) if limit else (FEW, 0):
        parts, size = [], 0
        for group in groups:
            if most == FEW and not limit and f"{group.name}|0" in done:
                continue  # an earlier run has seen some
            count = len(samples(group))
            first = random.Random(f"{pick} {group.name}").sample(range(count), min(count, most)) if pick else []
            numbers = [n for n in first or spread(count, most) if f"{group.name}|{n}" not in done]
            done.update(f"{group.name}|{n}" for n in numbers)
            while numbers:
                take = numbers[: batch - size]
                numbers = numbers[len(take) :]
                parts.append((group, tuple(take)))
                size += len(take)
                if size >= batch:
                    yield Task(tuple(parts))
                    parts, size = [], 0
        if parts:
            yield Task(tuple(parts))


def report(results: dict[str, dict[str, Any]]) -> int:
    """The table; 1 if anything is wrong."""
    rows: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    seen: dict[tuple[str, str], set[str]] = defaultdict(set)
    calls: Counter[str] = Counter()
    for r in results.values():
        op, dtype, mode, _ = r["key"].split("|")
        rows[mode, dtype][r["status"]] += 1
        seen[mode, dtype].add(op)
        if r["calls"]:
            rows[mode, dtype]["fallbacks"] += 1
        calls.update(r["calls"].keys())
    names = ("ok", "wrong", "error", "crash", "timeout", "excluded", "skip", "fallbacks")
    print(f"{'':18}{'ops':>6}{'samples':>9}" + "".join(f"{n:>10}" for n in names))
    bad = 0
    for (mode, dtype), c in sorted(rows.items(), reverse=True):
        total = sum(v for k, v in c.items() if k != "fallbacks")
        print(f"{mode:9}{dtype:9}{len(seen[mode, dtype]):6}{total:9}" + "".join(f"{c[n]:10}" for n in names))
        bad += c["wrong"] + c["error"] + c["crash"] + c["timeout"]
    print(
        "fallbacks: samples that call ATen somewhere. Most often: "
        + ", ".join(f"{k} {v}" for k, v in calls.most_common(20))
    )
    why = Counter(r["why"].partition(" || ")[2][:110] for r in results.values() if r["status"] == "excluded")
    print("excluded, for aot_eager: " + "; ".join(f"{n} {k}" for k, n in why.most_common(6)))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
