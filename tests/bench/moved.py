"""Kernels and bytes of memory-bound functions, against the least that must move. No GPU is needed, nothing is computed.

    python -m tests.bench.moved [functions|unseen|unseen_losses] [--only NAME ...] [--dtype bfloat16] [--out FILE.json]
    python -m tests.bench.moved --compare BEFORE.json AFTER.json

A row per function and mode: kernels and, behind a plus, calls of PyTorch; MB that they read and
write by ``observe.ranking``, each element once per kernel. ``again``: what looped kernels read of a row in rounds after
the first. ``least``: inputs read once and results written once; of a backward also the gradients, and what it reads of
what the forward saved or of the inputs, whichever is less.
"""

import argparse
import contextlib
import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

import reflib
from reflib.ir.loops import Load, LoopNest, Reduce, Store, stmt_args
from reflib.ir.program import Extern, fallback_kernels
from reflib.ir.transforms import phases
from reflib.observe.ranking import _bytes, _nodes, _operands, _points, names_of, work

Row = dict[str, Any]


@contextlib.contextmanager
def no_numbers(dtype: torch.dtype) -> Iterator[None]:
    """Tensors of random numbers without numbers: their pages are never touched."""
    with (
        mock.patch.object(torch, "randn", lambda *shape: torch.empty(shape, dtype=dtype)),
        mock.patch.object(torch, "randint", lambda low, high, size: torch.zeros(size, dtype=torch.int64)),
    ):
        yield


def looked_at(model: Any, mode: str, dtype: torch.dtype) -> Row:
    with no_numbers(dtype):
        module, _ = model.build(True)
        meta = model.build(True)[0].to("meta")
    training = mode == "training"
    module.requires_grad_(training).train(training)
    with torch.set_grad_enabled(training):
        graphs = reflib.explain(module, target="sm_90").graphs
        results = [t for t in tree_leaves(meta()) if isinstance(t, torch.Tensor)]
    nodes = [(s.scheduled, n) for s in graphs for n in steps(s)]
    calls = sum(isinstance(n, Extern) for _, n in nodes)
    return {
        "kernels": len(nodes) - calls, "calls": calls, "moved": sum(work(p, n)[0] for p, n in nodes),
        "again": sum(again(p, n) for p, n in nodes), "least": least(graphs, results),
        "steps": [f"{names_of(n)[0]}{_shape(n)} {work(p, n)[0] / 1e6:.0f}" for p, n in nodes],
    }  # fmt: skip


def steps(s: Any) -> list[Any]:
    """What runs, with aligned inputs."""
    return [n for n in _nodes(s.plan.steps) if n.name not in fallback_kernels(s.scheduled.nodes)]


def _shape(node: Any) -> str:
    if isinstance(node, Extern):
        return ""
    c, grid = node.config, [p.numel.hint() for p in node.parts if isinstance(p, LoopNest)]
    rows = [p.rnumel.hint() for p in node.parts if isinstance(p, LoopNest)]
    return f"[{c.reduction} x{c.xblock} r{c.rblock} w{c.num_warps} of {max(grid, default=0)}x{max(rows, default=0)}]"


def again(program: Any, node: Any) -> int:
    """Bytes that a looped kernel reads in more rounds over its rows than one."""
    if isinstance(node, Extern) or node.config.reduction != "looped":
        return 0
    total = 0
    for part in node.parts:
        if not isinstance(part, LoopNest):
            continue
        body, rows = part.body, {a.var for a in part.axes if a.kind == "r"}
        rounds, wanted = phases(body), set[tuple[int, int]]()
        for i, s in enumerate(body):
            if isinstance(s, Reduce) or (isinstance(s, Store) and any(s.index.has(v) for v in rows)):
                todo = list(stmt_args(s))
                while todo:
                    j = todo.pop()
                    if isinstance(body[j], Load) and any(body[j].index.has(v) for v in rows):
                        wanted.add((j, rounds[i]))
                    if not isinstance(body[j], Reduce):
                        todo += stmt_args(body[j])
        for j in {j for j, _ in wanted}:
            times = len({r for k, r in wanted if k == j}) - 1
            total += times * _bytes(program, {body[j].buffer: _points(part, body[j])})
    return total


def least(graphs: Any, results: list[torch.Tensor]) -> int:
    """See the module."""
    last = graphs[-1].scheduled
    read = sum(_most_read(graphs[0]).values())
    total = read + sum(t.nbytes for t in results)
    if len(graphs) > 1:
        taken = _most_read(graphs[-1])
        given = sum(n for b, n in taken.items() if b.startswith("tangents"))
        total += given + min(read, sum(taken.values()) - given)
        total += sum(last.buffers[b].nbytes.hint() for b in last.output_buffers() if b not in last.inputs)
    return total


def _most_read(s: Any) -> dict[str, int]:
    """Of each input, the most bytes that one kernel touches."""
    out: dict[str, int] = {}
    p = s.scheduled
    for node in steps(s):
        found: dict[str, int] = {}
        if isinstance(node, Extern):
            found = _operands(node, p)
        else:
            for part in node.parts:
                if isinstance(part, Extern):
                    continue
                loops = part if isinstance(part, LoopNest) else part.epilogue
                for x in loops.body:
                    if isinstance(x, Load):
                        found[x.buffer] = found.get(x.buffer, 0) + _points(loops, x)
                if part is not loops:
                    for v in (v for v in (part.a, part.b) if part.prologue(v) is None):
                        found[v.buffer] = p.buffers[v.buffer].numel.hint()
                    for nest, x in ((made, x) for made in part.prologues for x in made.loads()):
                        found[x.buffer] = found.get(x.buffer, 0) + _points(nest, x)
        for b, n in ((b, n) for b, n in found.items() if b in p.inputs):
            out[b] = max(out.get(b, 0), _bytes(p, {b: n}))
    return out


def table(args: argparse.Namespace) -> list[Row]:
    rows = []
    for m in importlib.import_module(f"tests.bench.{args.set}").MODELS:
        for mode in m.modes:
            if not args.only or m.name.split()[0] in args.only:
                row = {"model": m.name, "mode": mode}
                try:
                    row |= looked_at(m, mode, getattr(torch, args.dtype))
                except Exception as error:
                    row |= {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
                rows.append(row)
                print(line(row), flush=True)
    return rows


def ratio(row: Row) -> float:
    return row["moved"] / max(1, row["least"])


def line(row: Row) -> str:
    if "error" in row:
        return f"{row['mode']:10} {row['model']:34} {row['error']}"
    count = f"{row['kernels']}+{row['calls']}"
    sizes = f"{row['moved'] / 1e6:8.1f} {row['again'] / 1e6:8.1f} {row['least'] / 1e6:8.1f} MB {ratio(row):5.2f}"
    return f"{row['mode']:10} {row['model']:34} {count:>6} {sizes}"


def sizes(row: Row) -> tuple[float, ...]:
    """What should not grow. What is read again mostly comes from a cache, but not for nothing."""
    return row["kernels"], row["calls"], row["moved"] + row["again"] / 4


def compare(before: str, after: str) -> None:
    """Rows whose kernels or bytes differ; "worse" where kernels, calls or bytes have grown."""
    old, new = ({(r["model"], r["mode"]): r for r in json.loads(Path(p).read_text())} for p in (before, after))
    for key in sorted(set(old) & set(new)):
        a, b = old[key], new[key]
        if [x for x in a.items() if x[0] != "steps"] != [x for x in b.items() if x[0] != "steps"]:
            grown = "error" in b or "error" not in a and any(y > x * 1.001 for x, y in zip(sizes(a), sizes(b)))
            print(f"{'worse' if grown else 'better'}\n  {line(a)}\n  {line(b)}")
    print(f"{len(set(old) & set(new))} rows compared, {len(set(old) ^ set(new))} in one only")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.moved", description=__doc__)
    parser.add_argument("set", nargs="?", default="unseen", choices=["functions", "unseen", "unseen_losses"])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", nargs=2, metavar="FILE.json")
    args = parser.parse_args(words)
    if args.compare:
        return compare(*args.compare)
    warnings.filterwarnings("ignore")
    rows = table(args)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print("\nmost above the least:")
    for row in sorted((r for r in rows if "error" not in r), key=ratio, reverse=True)[:40]:
        print(line(row), *row["steps"], sep="\n        ")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
