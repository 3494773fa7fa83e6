"""Explanations -> plain data (numbers, text, lists of dicts) for the page and for `--json`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from reflib import __version__
from reflib.ir.loops import LoopNest
from reflib.ir.printer import dtype_name, format_buffer, format_node
from reflib.ir.program import (
    Choice,
    Extern,
    Program,
    Variants,
    fallback_kernels,
    kernel_nodes,
    kernels_and_calls,
    walk,
)
from reflib.lab import machine
from reflib.lab.decision_chart import _by_default
from reflib.lab.pictures import SPREAD, flows, layout, megabytes, moved_bytes, op_names, refusals
from reflib.lab.report.changes import FORMAT
from reflib.lab.report.subject import Subject
from reflib.lab.report.trial import Trial
from reflib.lab.rows import count
from reflib.lab.step_table import _what
from reflib.observe.decisions import _sorted as candidates_in_order
from reflib.observe.decisions import chosen
from reflib.observe.explain import Explanation
from reflib.observe.ranking import Ranked
from reflib.options import Options
from reflib.timeline import Event, first_start

if TYPE_CHECKING:
    from reflib.lab.report import ReportRequest

INPUTS = 24  # that are listed; a captured graph's parameters are among them
LANGUAGES = {"triton": "Triton", "cpp": "C++"}


def gather(subject: Subject, request: ReportRequest, options: Options, trial: Trial) -> dict[str, Any]:
    """All data of the page except the date."""
    explained = [Explanation(trial.graphs, i) for i in range(len(trial.graphs))]
    defaults = Options()
    changed = {f.name: getattr(options, f.name) for f in fields(options)}
    changed = {n: v for n, v in changed.items() if v != getattr(defaults, n)}
    graphs = [graph_data(e, i, len(explained)) for i, e in enumerate(explained)]
    return {
        "format": FORMAT,
        "title": subject.spec,
        "model": _called(subject.model) if subject.repro is None else "the graph of a repro",
        "inputs": _inputs(subject),
        "command": request.command,
        "seed": request.seed,
        "device": str(trial.device),
        "machine": str(machine.describe(trial.device)),
        "target": options.target or "",
        "versions": {"reflib": __version__, **machine.versions()},
        "options": {n: v if isinstance(v, str | int | float | bool) else str(v) for n, v in changed.items()},
        "first_call_s": trial.seconds,
        "stages_s": sum(e.timeline.only("stage").seconds for e in explained),
        "comparison": trial.comparison,
        "times": trial.times,
        "notes": trial.notes,
        "frames": trial.frames,
        "graph_breaks": trial.graph_breaks,
        "graphs": graphs,
        "ranking": [_ranked(r, graphs[r.graph]) for r in trial.ranking],
        "totals": _totals(graphs),
        "timeline": _events(explained),
    }


def _ranked(r: Ranked, graph: dict[str, Any]) -> dict[str, Any]:
    shown = {k: v for k, v in asdict(r).items() if k != "graph"} | {"above": r.above, "ratio": r.ratio}
    return shown | {"graph": graph["id"], "lines": "\n".join(r.lines)}


def _called(model: Any) -> str:
    name = getattr(model, "__qualname__", None)
    if name:
        return f"function {name}"
    return f"module {type(model).__qualname__}" + (", training," if getattr(model, "training", False) else "")


def _inputs(subject: Subject) -> list[str]:
    """`float32[4, 128]` or the value, one line per argument."""
    import torch

    def described(x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return f"{dtype_name(x.dtype)}{list(x.shape)} on {x.device}"
        if isinstance(x, list | tuple):
            return f"{type(x).__name__} of {', '.join(map(described, x))}"
        text = repr(x)
        return text if len(text) <= 80 else text[:79] + "…"

    found = [described(a) for a in subject.args] + [f"{k}={described(v)}" for k, v in subject.kwargs.items()]
    return found if len(found) <= INPUTS else [*found[:INPUTS], f"and {len(found) - INPUTS} more"]


def _totals(graphs: list[dict[str, Any]]) -> dict[str, int]:
    names = ("operators", "kernels", "calls", "bytes_before", "bytes_after")
    return {n: sum(g["numbers"][n] for g in graphs) for n in names} | {
        "peak_bytes": max(g["numbers"]["peak_bytes"] for g in graphs),
        "decisions": sum(len(d["candidates"]) > 1 for g in graphs for d in g["decisions"]),
    }


# -- one graph --------------------------------------------------------------------------------------
def graph_data(e: Explanation, number: int, among: int) -> dict[str, Any]:
    numbers = _numbers(e)
    kernels = _kernels(e)
    return {
        "id": f"g{number}",
        "name": f"graph {number + 1} of {among}: {e.graph.name}" if among > 1 else e.graph.name,
        "numbers": numbers,
        "stages": _stages(e, numbers, kernels),
        "capture": str(e.graph),
        "program": str(e.program) if e.program is not None else "",
        "fallbacks": _fallbacks(e.program),
        "choices": sum(isinstance(n, Choice) for n in e.program.nodes),
        "fused": str(e.fused),
        "fusion": {"before": picture(e.inlined, _members(e)), "after": picture(e.fused, _own(e))},
        "groups": _groups(e),
        "refusals": refusals(e),
        "refused_pairs": [(r.producer, r.consumer, r.reason.code, r.reason.text) for r in e.refusals],
        "decisions": [_decision(d) for d in e.decisions],
        "memory": _memory(e),
        "kernels": kernels,
        "wrapper": e.wrapper,
        "wrapper_language": "C++" if "#include" in e.wrapper else "Python",
    }


def _numbers(e: Explanation) -> dict[str, int]:
    kernels, calls = kernels_and_calls(e.scheduled.nodes)
    return {
        "operators": sum(n.op == "call_function" for n in e.graph.nodes),
        "nodes": len(e.program.nodes),
        "kernels": kernels,
        "calls": calls,
        "bytes_before": moved_bytes(_by_default(e.program)),
        "bytes_after": moved_bytes(e.fused),
        "peak_bytes": e.memory.peak_bytes,
    }


def _stages(e: Explanation, n: dict[str, int], kernels: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The result of each stage in a few words."""
    lines = sum(len(k["source"].splitlines()) for k in kernels)
    more = sum(k["fallback"] for k in kernels)
    made_kernels = count(len(kernels) - more, "kernel") + (f" and {count(more, 'fallback')}" if more else "")
    measured = sum(len(d.candidates) > 1 for d in e.decisions)
    made = [
        ("capture", count(n["operators"], "ATen operator")),
        ("lower", f"{count(n['nodes'], 'node')}, {megabytes(n['bytes_before'])} to move"),
        ("fuse", f"{count(len(e.groups), 'group')}, {megabytes(n['bytes_after'])} to move"),
        ("autotune", f"{count(measured, 'choice')} decided"),
        ("schedule", f"{count(len(e.decisions) - measured, 'launch configuration')}"),
        ("plan", f"{count(len(e.memory.steps), 'step')}, {megabytes(e.memory.peak_bytes)} at the peak"),
        ("generate", f"{made_kernels}, {count(lines, 'line')}"),
        ("wrap", count(len(e.wrapper.strip().splitlines()), "line")),
    ]
    return [{"name": name, "made": text} for name, text in made]


def _fallbacks(program: Program) -> list[dict[str, Any]]:
    """Ops that remain calls of PyTorch: one row per op and reason."""
    found: dict[tuple[str, str], list[Any]] = {}
    for n in walk(program.nodes):
        if isinstance(n, Extern):
            found.setdefault((str(n.target), n.reason or "no rule"), []).append(n)
    return [
        {"op": op, "reason": reason, "nodes": [n.name for n in nodes], "lines": _lines(nodes)}
        for (op, reason), nodes in found.items()
    ]


def _lines(nodes: Iterable[Any]) -> str:
    """The user's source lines of the nodes."""
    return "\n".join(dict.fromkeys(o.source for n in nodes for o in getattr(n, "origins", ()) if o.source))


# -- fusion -----------------------------------------------------------------------------------------
def _members(e: Explanation) -> dict[str, int]:
    return {m: i for i, g in enumerate(e.groups) for m in g.members}


def _own(e: Explanation) -> dict[str, int]:
    return {g.name: i for i, g in enumerate(e.groups)}


def picture(program: Program, group: dict[str, int]) -> dict[str, Any]:
    """Nodes with coordinates, and edges, for `drawing.graph`. `group`: node -> number of its group."""
    places = _spine(program)
    nodes = [
        {"name": n.name, "ops": op_names(n), "call": isinstance(n, Extern), "group": group.get(n.name),
         "at": places[n.name], "lines": _lines([n])}
        for n in program.nodes
    ]  # fmt: skip
    known = {n.name for n in program.nodes}
    inputs = [
        {"name": b, "at": at, "what": format_buffer(program.buffers[b])} for b, at in places.items() if b not in known
    ]
    edges: dict[tuple[str, str], dict[str, Any]] = {}
    for start, name, b, size in flows(program, places):
        edge = edges.setdefault((start, name), {"from": start, "to": name, "buffers": [], "bytes": 0})
        edge["buffers"].append(b)
        edge["bytes"] += size
    return {"nodes": nodes, "inputs": inputs, "edges": list(edges.values())}


def _spine(program: Program) -> dict[str, tuple[float, float]]:
    """Depths as in the lab; at equal depth, nodes are in the middle, below their inputs, and program inputs right."""
    depth = {name: y for name, (_, y) in layout(program).items()}
    nodes = {n.name: n for n in program.nodes}
    writer = {b: n.name for n in reversed(program.nodes) for b in n.writes()}
    places: dict[str, tuple[float, float]] = {}
    for y in sorted(set(depth.values())):
        row = [name for name in depth if depth[name] == y]
        inside, beside = [n for n in row if n in nodes], [n for n in row if n not in nodes]

        def above(name: str) -> float:
            found = [places[writer[b]][0] for b in nodes[name].reads() if writer.get(b) in places]
            return sum(found) / len(found) if found else 0.0

        inside.sort(key=above)
        start = -(len(inside) - 1) / 2
        for i, name in enumerate(inside + beside):
            places[name] = ((start + i) * SPREAD, y)
    return places


def _groups(e: Explanation) -> list[dict[str, Any]]:
    """One row per group: its members, the bytes it moves, and the bytes that its members would move separately."""
    fused = {n.name: n for n in e.fused.nodes}
    before = {n.name: n for n in e.inlined.nodes}
    rows = []
    for i, g in enumerate(e.groups):
        node = fused[g.name]
        members = [before[m] for m in g.members if m in before]
        rows.append(
            {
                "number": i, "name": g.name, "kind": g.kind, "members": len(g.members), "ops": op_names(node),
                "moved": moved_bytes(e.fused, [node]), "apart": moved_bytes(e.inlined, members),
                "lines": _lines(members or [node]),
            }
        )  # fmt: skip
    return rows


# -- decisions, memory, kernels, time ---------------------------------------------------------------
def _decision(d: Any) -> dict[str, Any]:
    listed = candidates_in_order(d) if len(d.candidates) > 1 else d.candidates
    names = ("name", "status", "time_us", "warm_us", "cold_us", "spread", "error", "why", "where")
    return {
        "region": d.region, "op": d.op, "chosen": chosen(d), "reason": d.reason, "members": list(d.members),
        "sizes": d.sizes, "config": str(d.config) if d.config is not None else "",
        "measured": len(d.candidates) > 1,
        "candidates": [{n: getattr(c, n) for n in names} | {"won": c.key in d.winners} for c in listed],
    }  # fmt: skip


def _memory(e: Explanation) -> dict[str, Any]:
    """The live buffers while each node runs."""
    ops = {n.name: _ops(n) for n in e.scheduled.nodes}
    moments: list[dict[str, Any]] = [
        {"label": m.label, "ops": ops.get(m.label, []), "bytes": m.bytes, "live": [list(pair) for pair in m.live]}
        for m in e.memory.moments
    ]
    made = {b: n.name for n in reversed(e.scheduled.nodes) for b in n.writes()}
    peak = max(range(len(moments)), key=lambda i: moments[i]["bytes"], default=None)
    at_peak = sorted(moments[peak]["live"], key=lambda pair: -pair[1]) if peak is not None else []
    return {
        "peak_bytes": e.memory.peak_bytes, "allocations": e.memory.allocations, "reuses": e.memory.reuses,
        "moments": moments, "peak": peak,
        "at_peak": [{"buffer": b, "bytes": n, "made_by": made.get(b, "its workspace")} for b, n in at_peak],
        "steps": "\n".join(_what(s) for s in e.memory.steps),
    }  # fmt: skip


def _ops(node: Any) -> list[str]:
    if isinstance(node, Variants) and node.of_kernels:
        return list(dict.fromkeys(name for p in node.variants[0].kernel.parts for name in op_names(p)))
    return op_names(node)


def _kernels(e: Explanation) -> list[dict[str, Any]]:
    """Each kernel with its IR. Fallbacks run if the predicate of the fast kernel fails."""
    nodes, fallbacks = {n.name: n for n in kernel_nodes(e.scheduled.nodes)}, fallback_kernels(e.scheduled.nodes)
    number = _own(e)
    rows = []
    for name, kernel in (e.stages.kernels or {}).items():
        parts = nodes[name].parts if name in nodes else ()
        first = [p for p in parts if p.name in number]
        rows.append(
            {
                "name": name, "fallback": name in fallbacks, "language": LANGUAGES[kernel.language],
                "ops": list(dict.fromkeys(op for p in parts for op in op_names(p))), "lines": _lines(parts),
                "group": number[first[0].name] if first else None, "groups": [p.name for p in parts],
                "ir": "\n".join(format_node(p) for p in parts), "source": kernel.source,
                "launch": _launch(kernel), "linked": len(parts) == 1 and isinstance(parts[0], LoopNest),
            }
        )  # fmt: skip
    return rows


def _launch(kernel: Any) -> str:
    if kernel.language != "triton":
        return ""
    return f"grid {kernel.grid}, {count(kernel.num_warps, 'warp')}, {count(kernel.num_stages, 'stage')}"


def _events(explained: list[Explanation]) -> list[dict[str, Any]]:
    """The events of all graphs, in seconds after the first."""
    found: list[tuple[str, Event]] = [(e.graph.name, event) for e in explained for event in e.timeline]
    begin = first_start(event for _, event in found)
    return [
        {"graph": graph, "name": v.name, "start": v.start - begin, "seconds": v.seconds, "kind": v.kind,
         "track": v.track, "region": v.region, "status": v.status}
        for graph, v in found
    ]  # fmt: skip
