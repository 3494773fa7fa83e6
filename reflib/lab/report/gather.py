"""Explanations -> plain data: numbers, text and lists of dicts, which the page draws and `--json` writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from reflib import __version__
from reflib.ir.loops import Loops
from reflib.ir.printer import dtype_name, format_buffer, format_node
from reflib.ir.program import Choice, Dispatch, Extern, Program, Region, walk
from reflib.lab import machine
from reflib.lab.decision_chart import _by_default
from reflib.lab.pictures import SPREAD, megabytes, moved_bytes, op_names, refusals
from reflib.lab.pictures import _count as count
from reflib.lab.pictures import _layout as layout
from reflib.lab.report.subject import Subject
from reflib.lab.report.trial import Trial
from reflib.lab.step_table import _what
from reflib.observe.decisions import _sorted as candidates_in_order
from reflib.observe.decisions import chosen
from reflib.observe.explain import Explanation
from reflib.options import Options
from reflib.timeline import Event, first_start

if TYPE_CHECKING:
    from reflib.lab.report import Request

LANGUAGES = {"triton": "Triton", "cpp": "C++"}


def gather(subject: Subject, request: Request, options: Options, trial: Trial) -> dict[str, Any]:
    """All that the page shows but the date."""
    explained = [Explanation(trial.graphs, i) for i in range(len(trial.graphs))]
    defaults = Options()
    changed = {f.name: getattr(options, f.name) for f in fields(options)}
    changed = {n: v for n, v in changed.items() if v != getattr(defaults, n)}
    graphs = [graph_data(e, i, len(explained)) for i, e in enumerate(explained)]
    return {
        "title": subject.spec,
        "model": _called(subject.model),
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
        "graphs": graphs,
        "totals": _totals(graphs),
        "timeline": _events(explained),
    }


def _called(model: Any) -> str:
    name = getattr(model, "__qualname__", None)
    if name:
        return f"function {name}"
    return f"module {type(model).__qualname__}" + (", training," if getattr(model, "training", False) else "")


def _inputs(subject: Subject) -> list[str]:
    """`float32[4, 128]` or the value, a line an argument."""
    import torch

    def said(x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return f"{dtype_name(x.dtype)}{list(x.shape)} on {x.device}"
        if isinstance(x, list | tuple):
            return f"{type(x).__name__} of {', '.join(map(said, x))}"
        text = repr(x)
        return text if len(text) <= 80 else text[:79] + "…"

    return [said(a) for a in subject.args] + [f"{k}={said(v)}" for k, v in subject.kwargs.items()]


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
    nodes = [n for n in walk(e.chosen.nodes) if not isinstance(n, Dispatch)]
    calls = sum(isinstance(n, Extern) for n in nodes)
    return {
        "operators": sum(n.op == "call_function" for n in e.graph.nodes),
        "nodes": len(e.program.nodes),
        "kernels": len(nodes) - calls,
        "calls": calls,
        "bytes_before": moved_bytes(_by_default(e.program)),
        "bytes_after": moved_bytes(e.fused),
        "peak_bytes": e.memory.peak_bytes,
    }


def _stages(e: Explanation, n: dict[str, int], kernels: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What each stage made, in a few words."""
    lines = sum(len(k["source"].splitlines()) for k in kernels)
    more = sum(k["arm"] > 0 for k in kernels)
    made_kernels = count(len(kernels) - more, "kernel") + (f" and {count(more, 'fallback')}" if more else "")
    measured = sum(len(d.candidates) > 1 for d in e.decisions)
    made = [
        ("capture", count(n["operators"], "ATen operator")),
        ("lower", f"{count(n['nodes'], 'node')}, {megabytes(n['bytes_before'])} to move"),
        ("fuse", f"{count(len(e.groups), 'group')}, {megabytes(n['bytes_after'])} to move"),
        ("choose", f"{count(len(e.decisions), 'decision')}, {measured} with alternatives"),
        ("plan", f"{count(len(e.memory.steps), 'step')}, {megabytes(e.memory.peak_bytes)} at the peak"),
        ("generate", f"{made_kernels}, {count(lines, 'line')}"),
        ("wrap", count(len(e.wrapper.strip().splitlines()), "line")),
    ]
    return [{"name": name, "made": text} for name, text in made]


def _fallbacks(program: Program) -> list[dict[str, Any]]:
    """What stays a call of PyTorch, and why: a row an op and reason."""
    found: dict[tuple[str, str], list[Any]] = {}
    for n in walk(program.nodes):
        if isinstance(n, Extern):
            found.setdefault((str(n.target), n.reason or "no rule"), []).append(n)
    return [
        {"op": op, "reason": reason, "nodes": [n.name for n in nodes], "lines": _lines(nodes)}
        for (op, reason), nodes in found.items()
    ]


def _lines(nodes: Iterable[Any]) -> str:
    """The user's own lines that the nodes came from."""
    return "\n".join(dict.fromkeys(o.source for n in nodes for o in getattr(n, "origins", ()) if o.source))


# -- fusion -----------------------------------------------------------------------------------------
def _members(e: Explanation) -> dict[str, int]:
    return {m: i for i, g in enumerate(e.groups) for m in g.members}


def _own(e: Explanation) -> dict[str, int]:
    return {g.name: i for i, g in enumerate(e.groups)}


def picture(program: Program, group: dict[str, int]) -> dict[str, Any]:
    """Nodes with their places and what flows between them, for `drawing.graph`. `group`: node -> group's number."""
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
    writer: dict[str, str] = {}
    edges: dict[tuple[str, str], dict[str, Any]] = {}
    for node in program.nodes:
        for b in node.reads():
            start = writer.get(b, b)
            if start in places and start != node.name:
                size = program.buffers[b].nbytes.hint()
                edge = edges.setdefault((start, node.name), {"from": start, "to": node.name, "buffers": [], "bytes": 0})
                edge["buffers"].append(b)
                edge["bytes"] += size
        writer.update(dict.fromkeys(node.writes(), node.name))
    return {"nodes": nodes, "inputs": inputs, "edges": list(edges.values())}


def _spine(program: Program) -> dict[str, tuple[float, float]]:
    """The lab's depths; of what is equally deep, nodes are in the middle, below what they read, inputs to the right."""
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
    """A row a group: what is in it, which bytes it moves, and how many its members would have moved by themselves."""
    fused = {n.name: n for n in e.fused.nodes}
    before = {n.name: n for n in e.inlined.nodes}
    rows = []
    for i, g in enumerate(e.groups):
        node = fused[g.name]
        members = [before[m] for m in g.members if m in before]
        rows.append(
            {
                "number": i, "name": g.name, "kind": g.kind, "members": len(g.members), "ops": op_names(node),
                "moved": _moved(e.fused, [node]), "apart": _moved(e.inlined, members),
                "lines": _lines(members or [node]),
            }
        )  # fmt: skip
    return rows


def _moved(program: Program, nodes: Iterable[Any]) -> int:
    touched = (b for n in nodes for b in {*n.reads(), *n.writes()} if b in program.buffers)
    return sum(program.buffers[b].nbytes.hint() for b in touched)


# -- decisions, memory, kernels, time ---------------------------------------------------------------
def _decision(d: Any) -> dict[str, Any]:
    winners = set(str(d.winner).split(" | "))
    listed = candidates_in_order(d) if len(d.candidates) > 1 else d.candidates
    names = ("name", "status", "time_us", "warm_us", "cold_us", "spread", "error", "why", "where")
    return {
        "region": d.region, "op": d.op, "chosen": chosen(d), "reason": d.reason, "members": list(d.members),
        "sizes": d.sizes, "config": str(d.config) if d.config is not None else "",
        "candidates": [{n: getattr(c, n) for n in names} | {"won": c.name in winners} for c in listed],
    }  # fmt: skip


def _memory(e: Explanation) -> dict[str, Any]:
    """A moment a node: which buffers are there while it runs."""
    ops = {n.name: _ops(n) for n in e.chosen.nodes}
    moments = [
        {"label": m.label, "ops": ops.get(m.label, []), "bytes": m.bytes, "live": [list(pair) for pair in m.live]}
        for m in e.memory.moments
    ]
    made = {b: n.name for n in reversed(e.chosen.nodes) for b in n.writes()}
    peak = max(range(len(moments)), key=lambda i: moments[i]["bytes"], default=None)
    at_peak = sorted(moments[peak]["live"], key=lambda pair: -pair[1]) if peak is not None else []
    return {
        "peak_bytes": e.memory.peak_bytes, "allocations": e.memory.allocations, "reuses": e.memory.reuses,
        "moments": moments, "peak": peak,
        "at_peak": [{"buffer": b, "bytes": n, "made_by": made.get(b, "its workspace")} for b, n in at_peak],
        "steps": "\n".join(_what(s) for s in e.memory.steps),
    }  # fmt: skip


def _ops(node: Any) -> list[str]:
    if isinstance(node, Region):
        return list(dict.fromkeys(name for p in node.arms[0].parts for name in op_names(p)))
    return op_names(node)


def _kernels(e: Explanation) -> list[dict[str, Any]]:
    """Each kernel with the IR that it was generated from; arms after the first serve where its assumptions fail."""
    regions = {n.name: n for n in walk(e.chosen.nodes) if isinstance(n, Region)}
    number = _own(e)
    rows = []
    for (name, arm), kernel in (e.stages.kernels or {}).items():
        parts = regions[name].arms[arm].parts if name in regions else ()
        first = [p for p in parts if p.name in number]
        rows.append(
            {
                "name": kernel.name, "region": name, "arm": arm, "language": LANGUAGES[kernel.language],
                "ops": list(dict.fromkeys(op for p in parts for op in op_names(p))), "lines": _lines(parts),
                "group": number[first[0].name] if first else None, "groups": [p.name for p in parts],
                "ir": "\n".join(format_node(p) for p in parts), "source": kernel.source,
                "launch": _launch(kernel), "linked": len(parts) == 1 and isinstance(parts[0], Loops),
            }
        )  # fmt: skip
    return rows


def _launch(kernel: Any) -> str:
    if kernel.language != "triton":
        return ""
    return f"grid {kernel.grid}, {count(kernel.num_warps, 'warp')}, {count(kernel.num_stages, 'stage')}"


def _events(explained: list[Explanation]) -> list[dict[str, Any]]:
    """All graphs' events on one axis, seconds after the first."""
    found: list[tuple[str, Event]] = [(e.graph.name, event) for e in explained for event in e.timeline]
    begin = first_start(event for _, event in found)
    return [
        {"graph": graph, "name": v.name, "start": v.start - begin, "seconds": v.seconds, "kind": v.kind,
         "track": v.track, "region": v.region, "status": v.status}
        for graph, v in found
    ]  # fmt: skip
