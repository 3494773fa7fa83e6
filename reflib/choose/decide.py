"""Deciding: every Choice is replaced by the alternative that is best where it stands.

``autotune="off"``: a static rule for matrix products (``matmul.static_tiling``), else the default. Code for a
``target`` that nothing can run on: what is known of such GPUs (``known.Elsewhere``), else the same. Otherwise, for each
Choice in program order:

1. its region is cut out (``region.cut``): the choice and whatever any alternative would fuse with it;
2. candidates: the alternatives; a Template once for every Tiling worth trying; those whose guards do not hold, or that
   could not be traced, are listed with the reason and go no further;
3. every candidate's version of the region is compiled by the later stages and measured, at the traced sizes, or, with
   ranges, at three sizes inside each range: a third and two thirds of the way up on a logarithmic scale, and its top.
   A range goes to the candidate with the best geometric mean;
4. the winner's nodes take the choice's place, and the program is fused again by the caller. A winner that needs more
   than that (guards; option patches; other ranges have other winners) becomes a Dispatch over the region: arms that
   are fused each by itself, neighbouring ranges with one winner merged (``ranges``). An arm whose guards could fail is
   followed by the default for the same range.

Equal regions (the layers of a transformer) are decided once. A choice inside a winner is decided in its turn.

**Who measures.** Worker processes (``tuner``): the requests of all choices go out first, each for its region in the
program as it stands; then winners are put in place one after another. A region that an earlier winner changed (two
products added by one kernel, which the first takes in) is no longer the one that was asked about: it is asked about
again. What no worker can do, because an op or a function that makes inputs lives in this process alone, is measured
here, alone on the device among reflib's processes, and says "not isolated".

**What is known already** is not measured: a ``lookup_table`` of the user's, the store of decisions, an imported table,
in this order. All of them hold names of candidates, and count only where there is a candidate of that name.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
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
from . import known
from .activation import with_activation
from .decision import Candidate, Decision
from .isolation import Isolated, body_of, index_values, isolated, one_value, ops_in, source_of
from .known import Elsewhere
from .lock import device_lock
from .matmul import APART, apart, problem, static_tiling, tilings
from .measure import measure, request
from .ranges import Range, merged, ranges_of, representatives, say_once
from .region import Region, cut, replace_region, splice
from .report import Report, epilogue_verdict
from .report import prune as pruned
from .request import Request
from .tuner import Asked, Prune, Tuner
from .winner import decide as winner_of
from .winner import overall

__all__ = ["Tuning", "decide", "representatives"]

# Options that change how, not what, is compiled and measured.
NOT_IN_KERNELS = {
    "autotune", "verify", "check_nan", "wrapper", "compile_threads", "isolate", "candidate_seconds", "tuning_seconds",
    "tuning_idle_seconds", "tuning_imports", "cache_decisions", "lookup_table", "num_decompose_k_splits",
    "decompose_k_threshold", "c_shims",
}  # fmt: skip
TargetOf = Callable[[torch.device], Target]
Build = Callable[[Program, Options], Callable[[list], Any]]


@dataclass
class Tuning:
    """How candidates are measured. ``tuner``: by worker processes; None: all of it here. ``background``: the program
    runs meanwhile on what the static rule chose, which is then what a winner must beat, and nothing is measured in this
    process. ``known_only``: nothing is measured at all; ``left`` says whether there was something to measure.
    ``meanwhile``: what to do while workers work; it is given the names of nodes that candidates are measured with.
    ``store``: of decisions, or None."""

    tuner: Tuner | None = None
    background: bool = False
    known_only: bool = False
    meanwhile: Callable[[set[str]], None] | None = None
    store: Any = None
    left: bool = False


@dataclass
class _Work:
    """What deciding one program needs everywhere. ``known``: regions decided before, by their text; ``begun``: what was
    asked about others."""

    options: Options
    target_of: TargetOf
    build: Build
    makers: Mapping[str, Callable[..., Any]]
    tuning: Tuning = field(default_factory=Tuning)
    known: dict[str, _Ruling] = field(default_factory=dict)
    begun: dict[str, list[list[_Point]]] = field(default_factory=dict)
    elsewhere: dict[Target, Elsewhere] = field(default_factory=dict)


def decide(
    program: Program,
    options: Options,
    target_of: TargetOf,
    build: Build,
    makers: Mapping[str, Callable[..., Any]],
    tuning: Tuning | None = None,
) -> tuple[Program, tuple[Decision, ...]]:
    """``program`` without a Choice, and what was decided. ``makers``: registered functions that make measuring inputs,
    by the keys in ``Choice.inputs_from``."""
    work = _Work(options, target_of, build, makers, tuning or Tuning())
    measures = options.autotune != "off" and options.target is None
    if measures:
        _begin_all(program, work)
    elif options.autotune != "off":
        say_once("with target= nothing runs, so nothing is measured: choices go by the static rule")
    decisions: list[Decision] = []
    while (choice := next((n for n in program.nodes if isinstance(n, Choice)), None)) is not None:
        target = target_of(program.buffers[choice.outputs[0]].device)
        if measures:
            program, decision = _decide_by_measuring(program, choice, target, work)
        elif options.target is not None and (found := _decide_by_what_is_known(program, choice, target, work)):
            program, decision = found
        else:
            program, decision = _decide_statically(program, choice, target, options)
        logger("choose").info("%s (%s): %s: %s", decision.region, decision.op, decision.winner, decision.reason)
        decisions.append(decision)
    return program, tuple(decisions)


# -- without measuring -----------------------------------------------------------------------------
def _decide_statically(program: Program, choice: Choice, target: Target, options: Options) -> tuple[Program, Decision]:
    unmeasured = {"off": "autotune is off", "background": "until it is measured"}.get(options.autotune, "")
    unmeasured = "nothing is measured for a target that is named" if options.target else unmeasured
    winner, why = _static_winner(program, choice, target, options)
    row = Candidate(winner.name, "heuristic")
    decision = Decision(choice.name, winner.name, (row,), f"{unmeasured}: {why}", op=choice.op)
    return splice(program, choice, winner), decision


def _static_winner(program: Program, choice: Choice, target: Target, options: Options) -> tuple[Alternative, str]:
    for a in choice.alternatives:
        t = _open_template(a)
        tiling = static_tiling(t, _has_epilogue(program, choice, a), target, options) if t is not None else None
        if tiling is not None and not a.guards:
            return with_tiling(a, tiling), "at this size one launch is worth more than the library's kernel"
    return choice.alternatives[0], "the default"


def _has_epilogue(program: Program, choice: Choice, a: Alternative) -> bool:
    """Does an elementwise kernel, and nothing but such, read the result? (Or one is in the alternative itself, of a
    choice that includes its activation.)"""
    if any(isinstance(n, Loops) and not n.reduced for n in a.nodes[1:]):
        return True
    readers = [n for n in program.nodes if set(choice.outputs) & set(n.reads())]
    return bool(readers) and all(isinstance(n, Loops) and not n.reduced for n in readers)


def _open_template(a: Alternative) -> Template | None:
    return next((n for n in a.nodes if isinstance(n, Template) and n.tiling is None), None)


def with_tiling(a: Alternative, tiling: Any) -> Alternative:
    """``a`` with its Template's tiling chosen."""
    nodes = tuple(replace(n, tiling=tiling) if isinstance(n, Template) and n.tiling is None else n for n in a.nodes)
    return replace(a, name=f"{a.name} {tiling}", nodes=nodes)


# -- for a target ----------------------------------------------------------------------------------
def _decide_by_what_is_known(
    program: Program, choice: Choice, target: Target, work: _Work
) -> tuple[Program, Decision] | None:
    """The winner in place, if one is known of GPUs such as the target. A product with its activation behind it may be
    known as one choice (as it is measured), or by itself."""
    if target not in work.elsewhere:
        work.elsewhere[target] = Elsewhere(target, work.options, work.tuning.store or _kept(work.options))
    elsewhere = work.elsewhere[target]
    if not elsewhere.tables:
        return None
    joined = with_activation(program, choice)
    for asked in (program,) if joined is program else (joined, program):
        whole = next(n for n in asked.nodes if isinstance(n, Choice) and n.name == choice.name)
        if not elsewhere.mentions(whole.op, _sizes(asked, whole), _dtypes(asked, whole)):
            continue
        region = cut(asked, whole, work.options, target)
        candidates, ranges = _expand(region, target, work), ranges_of(whole)
        found = elsewhere.find(_about(region, ""), [c.name for c in candidates], len(ranges))
        if found is not None:
            return _ruled(asked, region, candidates, ranges, _Ruling(*found), target, work)
    return None


def _kept(options: Options) -> Any:
    from .store import store

    return store() if options.keeps_decisions() else None


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
    region, candidates, ranges, key = _question(program, choice, target, work)
    before = work.known.get(key) if key else None
    if before is None and key and work.tuning.known_only:  # a region that an earlier winner changed
        _begin(region, candidates, ranges, key, work)
        before = work.known.get(key)
    if before is None and work.tuning.known_only:
        work.tuning.left = True
        return _decide_statically(program, choice, target, work.options)
    ruling = before or _rule(region, candidates, ranges, key, work)
    if key and before is None:
        work.known[key] = replace(ruling, reason=f"{ruling.reason}; decided before, for an equal region")
    return _ruled(program, region, candidates, ranges, ruling, target, work)


def _ruled(
    program: Program, region: Region, candidates: list[Alternative], ranges: list[Range], ruling: _Ruling,
    target: Target, work: _Work,
) -> tuple[Program, Decision]:  # fmt: skip
    choice = region.choice
    decision = Decision(
        choice.name,
        " | ".join(dict.fromkeys(ruling.winners)),
        (*ruling.rows, *(Candidate(name, status, why=why) for name, status, why in choice.failed)),
        ruling.reason,
        op=choice.op,
        members=region.members,
        sizes=_sizes(region.program, choice),
    )
    by_name = {a.name: a for a in candidates}
    return _apply(program, region, [by_name[w] for w in ruling.winners], ranges, target, work), decision


def _question(
    program: Program, choice: Choice, target: Target, work: _Work
) -> tuple[Region, list[Alternative], list[Range], str]:
    """What there is to decide, and a text that is equal for equal questions."""
    region = cut(program, choice, work.options, target)
    candidates = _expand(region, target, work)
    return region, candidates, ranges_of(choice), _key(region, candidates, work.options, work.makers)


def _begin_all(program: Program, work: _Work) -> None:
    """Ask about every choice whose answer is not known, then do something else."""
    tuning, touched = work.tuning, set()
    if tuning.tuner is not None or tuning.store is not None or work.options.lookup_table is not None:
        for choice in program.nodes:
            if isinstance(choice, Choice):
                target = work.target_of(program.buffers[choice.outputs[0]].device)
                region, candidates, ranges, key = _question(program, choice, target, work)
                touched |= {choice.name, *region.members}
                if key and key not in work.known and key not in work.begun:
                    _begin(region, candidates, ranges, key, work)
    if tuning.meanwhile is not None and work.begun:
        tuning.meanwhile(touched)


def _begin(region: Region, candidates: list[Alternative], ranges: list[Range], key: str, work: _Work) -> None:
    """Look it up, or ask."""
    found = known.find(_about(region, key), [c.name for c in candidates], len(ranges), work.options, work.tuning.store)
    if found is not None:
        winners, rows, reason = found
        work.known[key] = _Ruling(winners, rows, reason)
    elif not work.tuning.known_only:
        work.begun[key] = [[_ask(region, candidates, point, key, work) for point in r.points] for r in ranges]


def _about(region: Region, key: str) -> known.About:
    device = region.program.buffers[region.choice.outputs[0]].device
    sizes, dtypes = _sizes(region.program, region.choice), _dtypes(region.program, region.choice)
    ops = dict.fromkeys(o.op for n in region.program.nodes if n.name in region.members for o in n.origins)
    return known.About(key, device, region.choice.op, sizes, dtypes, " ".join(ops))


def _rule(region: Region, candidates: list[Alternative], ranges: list[Range], key: str, work: _Work) -> _Ruling:
    """The answers for every range; here ``choose`` waits for workers."""
    if key not in work.begun:  # a region that an earlier winner changed, or that has no text
        if key:
            _begin(region, candidates, ranges, key, work)
            if key in work.known:
                return work.known[key]
        else:
            work.begun[key] = [[_ask(region, candidates, point, "", work) for point in r.points] for r in ranges]
    start = time.perf_counter()
    asked = work.begun.pop(key)
    found = [_measure_range(region, candidates, r, points, work) for r, points in zip(ranges, asked)]
    reasons = [f"{r.label}: {reason}" if r.label else reason for r, (_, _, reason) in zip(ranges, found)]
    rows = tuple(row for _, more, _ in found for row in more)
    ruling = _Ruling(tuple(winner for winner, _, _ in found), rows, "; ".join(reasons))
    complete = all(point.complete for points in asked for point in points)
    if key and complete and work.tuning.store is not None and any(r.time_us for r in rows):
        about = _about(region, key)
        known.keep(about, ruling.winners, ruling.rows, ruling.reason, time.perf_counter() - start, work.tuning.store)
        for point in (p for points in asked for p in points):
            work.tuning.store.drop_rows(point.row_key)
    return ruling


def _expand(region: Region, target: Target, work: _Work) -> list[Alternative]:
    """The alternatives, a Template once for each tiling; the best two of each kind also with their epilogue in kernels
    of its own, for those where what the compiler says leaves open which is faster."""
    pruned_first = work.options.isolate or work.options.autotune == "background"  # else both would always be measured
    out: list[Alternative] = []
    for a in region.choice.alternatives:
        t = _open_template(a)
        if t is None:
            out.append(a)
            continue
        both = pruned_first and target.is_gpu and _has_epilogue(region.program, region.choice, a)
        seen: dict[str, int] = {}
        for tiling in tilings(t, target, work.options):
            out.append(with_tiling(a, tiling))
            seen[tiling.kind] = seen.get(tiling.kind, 0) + 1
            if both and seen[tiling.kind] <= 2 and tiling.kind != "split":
                out.append(apart(out[-1]))
    return out


@dataclass
class _Point:
    """The question at one point. ``asked``: workers were asked; else ``request`` is measured here, with ``makers``, or
    there is nothing to measure: ``found``. ``why_here``: why no worker can do it."""

    default: str
    left_out: tuple[Candidate, ...] = ()
    asked: Asked | None = None
    request: Request | None = None
    makers: dict[str, Any] = field(default_factory=dict)
    found: _Found | None = None
    why_here: str = ""
    complete: bool = True  # what was found is all that can be
    row_key: str = ""  # of the store, for rows of a question that is not answered yet


def _measure_range(
    region: Region, candidates: list[Alternative], r: Range, points: list[_Point], work: _Work
) -> tuple[str, list[Candidate], str]:
    """(name of the winner, rows, reason). With several points: the best geometric mean among those right at all."""
    results = [_answer(point, work) for point in points]
    rows = [replace(row, where=_where(r, point)) for point, found in zip(r.points, results) for row in found.rows]
    if len(results) == 1:
        return results[0].winner, rows, results[0].reason
    results = [x for x in results if any(row.time_us for row in x.rows)] or results  # where there was room for any
    means = [overall(c.name, [row for x in results for row in x.rows if row.name == c.name]) for c in candidates]
    winner, reason = winner_of(means, points[0].default, region.choice.min_speedup)
    return winner, rows, f"over {len(results)} sizes, geometric means: {reason}"


def _ask(region: Region, candidates: list[Alternative], point: dict[str, int], key: str, work: _Work) -> _Point:
    """Send the candidates that are valid at these sizes to be measured."""
    choice, tuning = region.choice, work.tuning
    values = {s.name: point.get(s.name, s.hint or 1) for s in node_symbols(choice)}
    left_out = tuple(Candidate(a.name, "guard", why="what it assumes of the sizes does not hold here")
                     for a in candidates if not all(holds(g, values) for g in a.guards))  # fmt: skip
    gone = {c.name for c in left_out}
    default = candidates[0].name
    if tuning.background:  # what runs now, and is to be beaten
        device = region.program.buffers[choice.outputs[0]].device
        static = _static_winner(region.program, choice, work.target_of(device), work.options)[0].name
        default = static if static in {c.name for c in candidates} - gone else default
    programs = {
        a.name: with_hints(_without_choices(splice(region.program, choice, a), work), point)
        for a in candidates if a.name not in gone
    }  # fmt: skip
    made_by = {**{b: f"constant {b}" for b in region.constants}, **dict(choice.inputs_from)}
    try:
        asked = request(
            programs, default, candidates[0].name, sizes=point, weights=region.program.weights, makers=made_by,
            options=work.options.but(autotune="off", lookup_table=None),
            patches={a.name: dict(a.patches) for a in candidates if a.patches and a.name not in gone},
            min_speedup=choice.min_speedup, graph_timing=choice.graph_timing, paired=tuning.background,
        )  # fmt: skip
    except ReflibError as e:  # an operator that has no name
        rows = (Candidate(default, "unmeasured", why=str(e)),)
        return _Point(default, left_out, found=_Found(rows, default, f"the region cannot be measured: {e}"))
    makers = {k: work.makers[k] for _, k in choice.inputs_from if k in work.makers}
    makers |= {made_by[b]: lambda like, value=value: value.detach() for b, value in region.constants.items()}
    if tuning.tuner is None:
        return _Point(default, left_out, request=asked, makers=makers)
    alone = isolated(asked, region.constants, work.options)
    if not isinstance(alone, Isolated):
        return _Point(default, left_out, request=asked, makers=makers, why_here=alone)
    label = f"{choice.op} {_sizes(region.program, choice)}" + (f" at {_where_point(point)}" if point else "")
    about = known.key_of(_about(region, key)) if key else ""
    row_key = f"{about} {_where_point(point)}" if about else ""
    prune = _pruning(region, candidates, alone.request, work)
    handle = tuning.tuner.ask(row_key, alone.request, label, alone.imports, prune)
    return _Point(default, left_out, handle, asked, makers, row_key=row_key)


def _pruning(region: Region, candidates: list[Alternative], request: Request, work: _Work) -> Prune | None:
    """Which candidates need not be measured, by what the compiler says of their kernels and by what they must do at
    least (``report``). An epilogue apart is compiled only where the kernel with it spills, or registers limit how many
    of it run at once: shared memory it needs as much of either way."""
    device = region.program.buffers[region.choice.outputs[0]].device
    target = work.target_of(device)
    if not target.is_gpu:
        return None
    templates = {a.name: t for a in candidates for t in a.nodes if isinstance(t, Template) and t.tiling is not None}
    cold = sum(s.nbytes for s in request.inputs if s.role == "weight")

    def prune(
        name: str, reports: Mapping[str, list[Report] | None], best: tuple[str, float] | None
    ) -> str | None:
        t = templates.get(name)
        if t is None or t.tiling is None:
            return ""
        kind = [r for n, r in reports.items() if n != name and r and n in templates
                and templates[n].tiling.kind == t.tiling.kind]  # type: ignore[union-attr]  # fmt: skip
        mine = reports.get(name) or []
        why = pruned(mine, target, kind, (problem(t), t.tiling), best, cold)
        if why or not t.closed:
            return why
        whole = name.removesuffix(APART)
        fused = reports.get(whole)
        if not fused:  # not compiled yet; or it cannot be, or has no kernel
            return "" if whole in reports else None
        saved = 2 * t.dtype.itemsize * math.prod(problem(t).sizes[:3])
        if not mine and (fused[0].spills or "registers" in fused[0].limit):
            return ""  # compile it, and compare
        verdict, reason = epilogue_verdict(fused[0], mine[0] if mine else fused[0], saved)
        return f"its epilogue is fused unmeasured: {reason}" if verdict == "fuse" else ""

    return prune


def _answer(point: _Point, work: _Work) -> _Found:
    """Wait for it, or measure here."""
    if point.found is not None:
        return point.found
    if point.asked is not None:
        assert work.tuning.tuner is not None
        result = work.tuning.tuner.wait(point.asked)
        if not point.asked.unknown_op:
            point.complete = result.complete
            return _Found((*result.rows, *point.left_out), result.winner, result.reason)
        point.why_here = point.asked.unknown_op
    assert point.request is not None
    if work.tuning.background:
        point.complete = False
        why = f"{point.why_here}; nothing is measured in this process while the program runs"
        rows = tuple(Candidate(name, "skipped", why=why) for name in point.request.programs)
        return _Found((*rows, *point.left_out), point.default, f"{point.default} stays: {why}")
    device = next((s.device for s in point.request.inputs if s.is_tensor), "cpu")
    with device_lock(device):
        result = measure(point.request, work.build, point.makers)
    rows = result.rows
    point.complete = not any(r.status == "skipped" for r in rows)
    if point.why_here:
        note = f"not isolated: {point.why_here}"
        rows = tuple(replace(r, why="; ".join(filter(None, (r.why, note)))) for r in rows)
    return _Found((*rows, *point.left_out), result.winner, result.reason)


def _where(r: Range, point: dict[str, int]) -> str:
    return _where_point(point) if r.label or point else ""


def _where_point(point: Mapping[str, int]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(point.items()))


def _without_choices(program: Program, work: _Work) -> Program:
    """Choices inside an implementation (its own matrix products) are decided by the static rule while it is measured.
    (Once it has won and is in place, they are measured in their turn.)"""
    return decide(program, work.options.but(autotune="off"), work.target_of, work.build, {})[0]


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
def _key(
    region: Region, candidates: list[Alternative], options: Options, makers: Mapping[str, Callable[..., Any]]
) -> str:
    """A text equal for regions that do the same to other tensors: names are replaced by their order of appearance,
    origins left out. What ops of the user's compute, and what makes inputs, is in it as source. Empty where an operator
    has no name, or its source cannot be known: such a decision is not kept."""
    try:
        code = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in NOT_IN_KERNELS}
        values = [_value(t) for t in region.constants.values()]
        program = to_data(region.program)
        bodies = [body_of(op) for op in sorted(set(ops_in(program["nodes"])))]
        bodies += [source_of(makers.get(k)) for _, k in region.choice.inputs_from]
        if None in bodies:
            return ""
        data = json.dumps([_anonymous(program), [encode(c.name) for c in candidates], code, values, bodies])
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


def _value(t: Any) -> Any:
    """What a candidate may rely on: a constant that is one value everywhere, and the values of an index."""
    if not isinstance(t, torch.Tensor):
        return None
    fill = one_value(t)
    if fill is not None or t.dtype.is_floating_point or t.dtype.is_complex:
        return fill
    return index_values(t)


def _anonymous(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _anonymous(v) for k, v in data.items() if k not in ("origins", "reason")}
    return [_anonymous(v) for v in data] if isinstance(data, list) else data


def _sizes(program: Program, choice: Choice) -> str:
    """The shapes of what goes in, for people: ``x[32, 4096] w[4096, 32]``."""
    return " ".join(f"{b}[{', '.join(map(str, program.buffers[b].shape))}]" for b in _tensors(program, choice))


def _dtypes(program: Program, choice: Choice) -> str:
    found = dict.fromkeys(str(program.buffers[b].dtype).removeprefix("torch.") for b in _tensors(program, choice))
    return " ".join(found)


def _tensors(program: Program, choice: Choice) -> list[str]:
    return [b for b in choice.reads()[:4] if b in program.buffers]
