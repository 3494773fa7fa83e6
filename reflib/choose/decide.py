"""Deciding: every Choice is replaced by the alternative that is best where it stands.

``autotune="off"``, or code for a ``target`` that nothing can run on: a static rule for matrix products
(``matmul.static_tiling``), else the default. Otherwise, for each Choice in program order:

1. its region is cut out (``region.cut``): the choice and whatever any alternative would fuse with it;
2. candidates: the alternatives; a Template once for every Tiling worth trying; those whose guards do not hold, or that
   could not be traced, are listed with the reason and go no further;
3. every candidate's version of the region is compiled by the later stages (``build``) and measured (``measure``), at
   the traced sizes, or, with ranges, at three sizes inside each range: a third and two thirds of the way up on a
   logarithmic scale, and its top. A range goes to the candidate with the best geometric mean;
4. the winner's nodes take the choice's place, and the program is fused again by the caller. A winner that needs more
   than that (guards; option patches; other ranges have other winners) becomes a Dispatch over the region: arms that
   are fused each by itself, neighbouring ranges with one winner merged (``ranges``). An arm whose guards could fail is
   followed by the default for the same range.

Equal regions (the layers of a transformer) are decided once. A choice inside a winner is decided in its turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import ReflibError
from ..fuse import fuse
from ..ir.data import encode, to_data
from ..ir.loops import Loops
from ..ir.program import (
    Alternative,
    Buffer,
    Choice,
    Dispatch,
    DispatchArm,
    Extern,
    Node,
    Program,
    Template,
    holds,
    node_symbols,
)
from ..ir.rename import renamed, with_hints
from ..logs import get as logger
from ..options import Options
from ..target import Target
from .activation import with_activations
from .decision import Candidate, Decision
from .matmul import static_tiling, tilings
from .measure import measure, request
from .ranges import Range, merged, ranges_of, representatives, say_once
from .region import Region, cut, replace_region, splice
from .winner import decide as winner_of
from .winner import overall

__all__ = ["decide", "representatives"]

TargetOf = Callable[[torch.device], Target]
Build = Callable[[Program, Options], Callable[[list], Any]]


@dataclass
class _Work:
    """What deciding one program needs everywhere. ``known``: regions decided before, by their text."""

    options: Options
    target_of: TargetOf
    build: Build
    makers: Mapping[str, Callable[..., Any]]
    known: dict[str, _Ruling] = field(default_factory=dict)


def decide(
    program: Program, options: Options, target_of: TargetOf, build: Build, makers: Mapping[str, Callable[..., Any]]
) -> tuple[Program, tuple[Decision, ...]]:
    """``program`` without a Choice, and what was decided. ``makers``: registered functions that make measuring inputs,
    by the keys in ``Choice.inputs_from``."""
    work = _Work(options, target_of, build, makers)
    measures = options.autotune != "off" and options.target is None
    if measures:
        program = with_activations(program)
        if options.autotune == "background":
            say_once('autotune="background" is not in this version of reflib: measuring comes before the first call')
    elif options.autotune != "off":
        say_once("with target= nothing runs, so nothing is measured: choices go by the static rule")
    decisions: list[Decision] = []
    while (choice := next((n for n in program.nodes if isinstance(n, Choice)), None)) is not None:
        target = target_of(program.buffers[choice.outputs[0]].device)
        if measures:
            program, decision = _decide_by_measuring(program, choice, target, work)
        else:
            program, decision = _decide_statically(program, choice, target, options)
        logger("choose").info("%s (%s): %s: %s", decision.region, decision.op, decision.winner, decision.reason)
        decisions.append(decision)
    return program, tuple(decisions)


# -- without measuring -----------------------------------------------------------------------------
def _decide_statically(program: Program, choice: Choice, target: Target, options: Options) -> tuple[Program, Decision]:
    default = choice.alternatives[0]
    unmeasured = "autotune is off" if options.autotune == "off" else "nothing is measured for a target that is named"
    winner, reason = default, f"{unmeasured}: the default"
    for a in choice.alternatives:
        t = _open_template(a)
        tiling = static_tiling(t, _has_epilogue(program, choice), target, options) if t is not None else None
        if tiling is not None and not a.guards:
            winner = with_tiling(a, tiling)
            reason = f"{unmeasured}: at this size one launch is worth more than the library's kernel"
            break
    row = Candidate(winner.name, "heuristic")
    return splice(program, choice, winner), Decision(choice.name, winner.name, (row,), reason, op=choice.op)


def _has_epilogue(program: Program, choice: Choice) -> bool:
    """Does an elementwise kernel, and nothing but such, read the result?"""
    readers = [n for n in program.nodes if set(choice.outputs) & set(n.reads())]
    return bool(readers) and all(isinstance(n, Loops) and not n.reduced for n in readers)


def _open_template(a: Alternative) -> Template | None:
    return next((n for n in a.nodes if isinstance(n, Template) and n.tiling is None), None)


def with_tiling(a: Alternative, tiling: Any) -> Alternative:
    """``a`` with its Template's tiling chosen."""
    nodes = tuple(replace(n, tiling=tiling) if isinstance(n, Template) and n.tiling is None else n for n in a.nodes)
    return replace(a, name=f"{a.name} {tiling}", nodes=nodes)


# -- by measuring ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Ruling:
    """What was decided for a region: winners, a range each; everything that was measured for it; and why."""

    winners: tuple[str, ...]
    rows: tuple[Candidate, ...]
    reason: str


@dataclass(frozen=True)
class _Found:
    """What was measured at one point."""

    rows: tuple[Candidate, ...]
    winner: str
    reason: str


def _decide_by_measuring(program: Program, choice: Choice, target: Target, work: _Work) -> tuple[Program, Decision]:
    region = cut(program, choice, work.options, target)
    candidates = _expand(choice, target, work.options)
    ranges = ranges_of(choice)
    key = _key(region, candidates, work.options)
    known = work.known.get(key) if key else None
    ruling = known or _rule(region, candidates, ranges, work)
    if key:
        work.known[key] = ruling
    decision = Decision(
        choice.name,
        " | ".join(dict.fromkeys(ruling.winners)),
        (*ruling.rows, *(Candidate(name, status, why=why) for name, status, why in choice.failed)),
        ruling.reason + ("; decided before, for an equal region" if known else ""),
        op=choice.op,
        members=region.members,
        sizes=_sizes(region),
    )
    by_name = {a.name: a for a in candidates}
    return _apply(program, region, [by_name[w] for w in ruling.winners], ranges, target, work), decision


def _rule(region: Region, candidates: list[Alternative], ranges: list[Range], work: _Work) -> _Ruling:
    """Measure in every range."""
    found = [_measure_range(region, candidates, r, work) for r in ranges]
    reasons = [f"{r.label}: {reason}" if r.label else reason for r, (_, _, reason) in zip(ranges, found)]
    rows = tuple(row for _, more, _ in found for row in more)
    return _Ruling(tuple(winner for winner, _, _ in found), rows, "; ".join(reasons))


def _expand(choice: Choice, target: Target, options: Options) -> list[Alternative]:
    out: list[Alternative] = []
    for a in choice.alternatives:
        t = _open_template(a)
        if t is None:
            out.append(a)
        else:
            out += [with_tiling(a, tiling) for tiling in tilings(t, target, options)]
    return out


def _measure_range(
    region: Region, candidates: list[Alternative], r: Range, work: _Work
) -> tuple[str, list[Candidate], str]:
    """(name of the winner, rows, reason). With several points: the best geometric mean among those right at all."""
    results = [_measure_point(region, candidates, point, work) for point in r.points]
    rows = [replace(row, where=_where(r, point)) for point, found in zip(r.points, results) for row in found.rows]
    if len(results) == 1:
        return results[0].winner, rows, results[0].reason
    results = [x for x in results if any(row.time_us for row in x.rows)] or results  # where there was room for any
    means = [overall(c.name, [row for x in results for row in x.rows if row.name == c.name]) for c in candidates]
    winner, reason = winner_of(means, candidates[0].name, region.choice.min_speedup)
    return winner, rows, f"over {len(results)} sizes, geometric means: {reason}"


def _measure_point(region: Region, candidates: list[Alternative], point: dict[str, int], work: _Work) -> _Found:
    """Measure the candidates that are valid at these sizes."""
    choice, default = region.choice, candidates[0]
    values = {s.name: point.get(s.name, s.hint or 1) for s in node_symbols(choice)}
    left_out = [Candidate(a.name, "guard", why="what it assumes of the sizes does not hold here")
                for a in candidates if not all(holds(g, values) for g in a.guards)]  # fmt: skip
    gone = {c.name for c in left_out}
    programs = {
        a.name: with_hints(_without_choices(splice(region.program, choice, a), work), point)
        for a in candidates if a.name not in gone
    }  # fmt: skip
    options = work.options.but(autotune="off")
    made_by = {**{b: f"constant {b}" for b in region.constants}, **dict(choice.inputs_from)}
    try:
        asked = request(
            programs, default.name, sizes=point, weights=region.program.weights, makers=made_by,
            options=options, patches={a.name: dict(a.patches) for a in candidates if a.patches and a.name not in gone},
            min_speedup=choice.min_speedup, graph_timing=choice.graph_timing,
        )  # fmt: skip
    except ReflibError as e:  # an operator that has no name
        rows = (Candidate(default.name, "unmeasured", why=str(e)),)
        return _Found(rows, default.name, f"the region cannot be measured: {e}")
    makers = {key: work.makers[key] for _, key in choice.inputs_from if key in work.makers}
    makers |= {made_by[b]: lambda like, value=value: value.detach() for b, value in region.constants.items()}
    result = measure(asked, work.build, makers)
    return _Found((*result.rows, *left_out), result.winner, result.reason)


def _without_choices(program: Program, work: _Work) -> Program:
    """Choices inside an implementation (its own matrix products) are decided by the static rule while it is measured.
    (Once it has won and is in place, they are measured in their turn.)"""
    return decide(program, work.options.but(autotune="off"), work.target_of, work.build, {})[0]


def _where(r: Range, point: dict[str, int]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(point.items())) if r.label or point else ""


# -- putting winners in place ----------------------------------------------------------------------
def _apply(
    program: Program, region: Region, winners: list[Alternative], ranges: list[Range], target: Target, work: _Work
) -> Program:
    choice, default = region.choice, region.choice.alternatives[0]
    serving = merged(winners, ranges, choice.ranges)
    program = _noting_what_was_tuned(program, choice)
    only = serving[0][0] if len(serving) == 1 else None
    if only is not None and not only.guards and not only.patches:
        return splice(program, choice, only)
    ways: list[tuple[Alternative, Range]] = []
    for i, (winner, r) in enumerate(serving):
        winner = replace(winner, guards=tuple(g for g in winner.guards if not r.implies(g, choice.ranges)))
        ways.append((winner, r))
        following = serving[i + 1][0].name if i + 1 < len(serving) else ""
        if winner.guards and following != default.name:  # where they fail the default runs, not the next range's winner
            ways.append((default, replace(r, label=f"{r.label}, else" if r.label else "else")))
    arms: list[DispatchArm] = []
    buffers: list[Buffer] = []
    for winner, r in ways:
        nodes, temps = _arm_nodes(region, winner, r, len(arms), target, work)
        label = f"{r.label}: {winner.name}" if r.label else winner.name
        arms.append(DispatchArm((*r.predicate(choice.ranges), *winner.guards), tuple(nodes), label, winner.patches))
        buffers += temps
    node = Dispatch(choice.name, region.outputs, tuple(arms), choice.origins)
    return replace_region(program, region, node, buffers)


def _noting_what_was_tuned(program: Program, choice: Choice) -> Program:
    """``program``, which will say so when a call's size is outside, if the size is known at its first step."""
    r = choice.ranges
    late = {s for n in program.nodes if isinstance(n, Extern) for s, _, _ in n.symbols}
    if r is None or r.size.constant is not None or late & r.size.symbols():
        return program
    return replace(program, tuned=(*program.tuned, (r.size, 1, r.upper, r.what, choice.op)))


def _arm_nodes(
    region: Region, winner: Alternative, r: Range, number: int, target: Target, work: _Work
) -> tuple[list[Node], list[Buffer]]:
    """The region with the winner in it, decided inside, fused for the range's last representative size, its
    temporaries renamed so that arms do not share names."""
    program = _without_choices(splice(region.program, region.choice, winner), work)
    options = work.options.but(**dict(winner.patches))
    program = fuse(with_hints(program, r.points[-1]), options, target).program
    keep = {*region.inputs, *region.outputs}
    names = {b: f"{b}_arm{number}" for b in program.buffers if b not in keep}
    names |= {n.name: f"{n.name}_arm{number}" for n in program.nodes}
    nodes, buffers = renamed(program.nodes, [b for n, b in program.buffers.items() if n in names], names)
    return nodes, buffers


# -- recognising equal regions ---------------------------------------------------------------------
def _key(region: Region, candidates: list[Alternative], options: Options) -> str:
    """A text equal for regions that do the same to other tensors: names are replaced by their order of appearance,
    origins left out. Empty where an operator has no name."""
    try:
        data = json.dumps([_anonymous(to_data(region.program)), [encode(c.name) for c in candidates]])
    except ReflibError:
        return ""
    names = {*region.program.buffers, *(n.name for n in region.program.nodes)}
    names |= {b.name for a in region.choice.alternatives for b in a.buffers}
    names |= {n.name for a in region.choice.alternatives for n in a.nodes}
    seen: dict[str, str] = {}

    def short(m: re.Match[str]) -> str:
        word = m.group(1)
        return f'"#{seen.setdefault(word, str(len(seen)))}"' if word in names else m.group(0)

    return re.sub(r'"([^"\\]*)"', short, data)


def _anonymous(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _anonymous(v) for k, v in data.items() if k not in ("origins", "reason")}
    return [_anonymous(v) for v in data] if isinstance(data, list) else data


def _sizes(region: Region) -> str:
    """The shapes of what goes in, for people: ``x[32, 4096] w[4096, 32]``."""
    out = []
    for name in region.choice.reads()[:4]:
        b = region.program.buffers.get(name)
        if b is not None:
            out.append(f"{name}[{', '.join(map(str, b.shape))}]")
    return " ".join(out)
