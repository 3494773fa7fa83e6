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
   are fused each by itself, neighbouring ranges with one winner merged, the default last where guards could fail.

Equal regions (the layers of a transformer) are decided once. A choice inside a winner is decided in its turn.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from ..errors import ReflibError
from ..fuse import fuse
from ..ir.data import encode, to_data
from ..ir.expr import Expr, expr
from ..ir.loops import Loops
from ..ir.program import (
    Alternative,
    Assume,
    Buffer,
    Choice,
    Dispatch,
    DispatchArm,
    Extern,
    Node,
    Program,
    Template,
    holds,
)
from ..ir.rename import renamed, with_hints
from ..logs import get as logger
from ..options import Options
from ..target import Target
from .activation import with_activations
from .decision import Candidate, Decision
from .matmul import static_tiling, tilings
from .measure import measure, request
from .region import Region, cut, node_symbols, replace_region, splice

TargetOf = Callable[[torch.device], Target]
Build = Callable[[Program, Options], Callable[[list], Any]]


@dataclass
class _Work:
    """What deciding one program needs everywhere. ``known``: regions decided before, by their text."""

    options: Options
    target_of: TargetOf
    build: Build
    makers: Mapping[str, Callable[..., Any]]
    known: dict[str, dict[str, Any]] = field(default_factory=dict)


def decide(
    program: Program, options: Options, target_of: TargetOf, build: Build, makers: Mapping[str, Callable[..., Any]]
) -> tuple[Program, tuple[Decision, ...]]:
    """``program`` without a Choice, and what was decided. ``makers``: registered functions that make measuring inputs,
    by the keys in ``Choice.inputs_from``."""
    work = _Work(options, target_of, build, makers)
    if options.autotune != "off" and options.target is not None:
        _say_once("with target= nothing runs, so nothing is measured: choices go by the static rule")
    if options.autotune != "off" and options.target is None:
        program = with_activations(program)
    if options.autotune == "background" and options.target is None:
        _say_once('autotune="background" is not in this version of reflib: measuring comes before the first call')
    decisions: list[Decision] = []
    while (choice := next((n for n in program.nodes if isinstance(n, Choice)), None)) is not None:
        target = target_of(program.buffers[choice.outputs[0]].device)
        if options.autotune == "off" or options.target is not None:
            program, decision = _decide_statically(program, choice, target, options)
        else:
            program, decision = _decide_by_measuring(program, choice, target, work)
        logger("choose").info("%s (%s): %s: %s", decision.region, decision.op, decision.winner, decision.reason)
        decisions.append(decision)
    return program, tuple(decisions)


@cache
def _say_once(message: str) -> None:
    logger("choose").warning(message)


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
class _Range:
    """Sizes to decide for at once. ``least``, ``most``: its first and last (None: open). ``points``: symbol values to
    measure at."""

    most: int | None
    points: tuple[dict[str, int], ...]
    label: str = ""
    least: int = 1


@dataclass(frozen=True)
class _Found:
    """What was measured at one point."""

    rows: tuple[Candidate, ...]
    winner: str
    reason: str


def _decide_by_measuring(program: Program, choice: Choice, target: Target, work: _Work) -> tuple[Program, Decision]:
    region = cut(program, choice, work.options, target)
    candidates = _expand(choice, target, work.options)
    ranges = _ranges(choice)
    key = _key(region, candidates, work.options)
    found = work.known.get(key) if key else None
    if found is None:
        found = {"rows": [], "winners": [], "reasons": []}
        for r in ranges:
            winner, rows, reason = _measure_range(region, candidates, r, work)
            found["winners"].append(winner)
            found["rows"] += rows
            found["reasons"].append(f"{r.label}: {reason}" if r.label else reason)
        if key:
            work.known[key] = found
        again = ""
    else:
        again = "; decided before, for an equal region"
    rows = [*found["rows"], *(Candidate(name, status, why=why) for name, status, why in choice.failed)]
    by_name = {a.name: a for a in candidates}
    winners = [by_name[name] for name in found["winners"]]
    name = " | ".join(dict.fromkeys(found["winners"]))
    decision = Decision(
        choice.name, name, tuple(rows), "; ".join(found["reasons"]) + again, op=choice.op, members=region.members,
        sizes=_sizes(region),
    )  # fmt: skip
    return _apply(program, region, winners, ranges, target, work), decision


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
    region: Region, candidates: list[Alternative], r: _Range, work: _Work
) -> tuple[str, list[Candidate], str]:
    """(name of the winner, rows, reason). With several points: the best geometric mean among those right at all."""
    default = candidates[0]
    results = [_measure_point(region, candidates, p, work) for p in r.points]
    rows = [replace(row, where=_where(r, p)) for p, result in zip(r.points, results) for row in result.rows]
    if len(results) == 1:
        return results[0].winner, rows, results[0].reason
    results = [x for x in results if any(row.time_us for row in x.rows)] or results  # where there was room for any
    times = {c.name: [_time(result, c.name) for result in results] for c in candidates}
    means = {n: math.exp(sum(map(math.log, ts)) / len(ts)) for n, ts in times.items() if all(ts)}
    if not means:
        return default.name, rows, "no candidate could be measured at every size: the default stays"
    best = min(means, key=lambda n: means[n])
    if best == default.name or default.name not in means:
        return best, rows, f"{means[best]:.1f} us, geometric mean of {len(results)} sizes: the fastest"
    spread = max(row.spread or 0.0 for result in results for row in result.rows if row.name in (best, default.name))
    ratio = means[default.name] / means[best]
    if ratio < max(region.choice.min_speedup, 1 + spread):
        reason = f"{best} would be {ratio:.2f}x as fast, which is not beyond the spread ({spread:.0%}) or the threshold"
        return default.name, rows, reason
    return best, rows, f"{best} is {ratio:.2f}x as fast as {default.name} over {len(results)} sizes"


def _time(result: _Found, name: str) -> float:
    row = next((c for c in result.rows if c.name == name), None)
    return row.time_us if row is not None and row.status == "ok" and row.time_us else 0.0


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


def _where(r: _Range, point: dict[str, int]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(point.items())) if r.label or point else ""


# -- ranges ----------------------------------------------------------------------------------------
def _ranges(choice: Choice) -> list[_Range]:
    r = choice.ranges
    if r is None:
        return [_Range(None, ({},))]
    now = r.size.constant
    symbol = next(iter(r.size.symbols()), None)
    if now is not None or symbol is None or len(r.size.symbols()) != 1:
        if now is not None and now > r.upper:
            message = "%s = %d is outside the sizes that were tuned, 1 to %d: the nearest range serves"
            logger("choose").warning(message, r.what, now, r.upper)
        return [_Range(None, ({},))]
    out: list[_Range] = []
    least, first, last = 1, *_reach(r.size)
    for most in (*r.splits, None):
        top = r.upper if most is None else most
        if top >= first and (last is None or least <= last):  # other sizes cannot come
            most = None if last is not None and top >= last else most
            ends = max(least, first), top if last is None else min(top, last)
            points = sorted({_symbol_value(r.size, v) for v in representatives(*ends)})
            out.append(_Range(most, tuple({symbol.name: v} for v in points), _label(r.what, least, most), least))
        least = top + 1
    return out or [_Range(None, ({},))]


def _reach(size: Expr) -> tuple[int, int | None]:
    """The least and the largest value of a size that is a symbol; None: no limit is known."""
    symbol = next(iter(size.symbols()))
    return (symbol.lo, symbol.hi) if size == expr(symbol) else (1, None)


def _label(what: str, least: int, most: int | None) -> str:
    return f"{what} >= {least}" if most is None else f"{least} <= {what} <= {most}"


def representatives(least: int, most: int) -> list[int]:
    """Three sizes inside least..most: a third and two thirds of the way up on a logarithmic scale, and the top. Those
    inside are round where there is room (three binary digits), as the sizes are that people use: a size that nothing
    divides would rule out every candidate that asks for a divisor.

    >>> representatives(5, 128), representatives(129, 4096)
    ([14, 40, 128], [384, 1280, 4096])
    """
    if most <= least:
        return [least]
    inside = (_rounded(least * (most / least) ** f) for f in (1 / 3, 2 / 3))
    return sorted({*(min(max(least, size), most) for size in inside), most})


def _rounded(size: float) -> int:
    unit = 1 << max(0, int(size).bit_length() - 3)
    return round(size / unit) * unit


def _symbol_value(size: Expr, value: int) -> int:
    """The symbol's value for which ``size`` (linear in one symbol) is about ``value``."""
    symbol = next(iter(size.symbols()))
    zero, one = (int(size.evaluate({symbol.name: v})) for v in (0, 1))
    return max(1, symbol.lo, (value - zero) // max(1, one - zero))


# -- putting winners in place ----------------------------------------------------------------------
def _apply(
    program: Program, region: Region, winners: list[Alternative], ranges: list[_Range], target: Target, work: _Work
) -> Program:
    choice = region.choice
    merged: list[tuple[Alternative, _Range]] = []
    for winner, r in zip(winners, ranges):
        if merged and merged[-1][0].name == winner.name:
            least, points = merged[-1][1].least, merged[-1][1].points[-1:] + r.points[-1:]
            label = _label(choice.ranges.what, least, r.most) if choice.ranges else r.label
            merged[-1] = (winner, replace(r, points=points, label=label, least=least))
        else:
            merged.append((winner, r))
    r0 = choice.ranges
    late = {s for n in program.nodes if isinstance(n, Extern) for s, _, _ in n.symbols}  # not known at the first step
    if r0 is not None and r0.size.constant is None and not late & r0.size.symbols():
        program = replace(program, tuned=(*program.tuned, (r0.size, 1, r0.upper, r0.what, choice.op)))
    only = merged[0][0] if len(merged) == 1 else None
    if only is not None and not only.guards and not only.patches:
        return splice(program, choice, only)
    if merged[-1][0].guards:
        merged.append((choice.alternatives[0], _Range(None, ({},), "else")))
    size = choice.ranges.size if choice.ranges else None
    arms: list[DispatchArm] = []
    buffers: list[Buffer] = []
    for i, (winner, r) in enumerate(merged):
        nodes, temps = _arm_nodes(region, winner, r, i, target, work)
        predicate = winner.guards
        if r.most is not None and size is not None:
            predicate = (Assume("at_most", size, r.most), *predicate)
        arms.append(DispatchArm(predicate, tuple(nodes), f"{r.label}: {winner.name}" if r.label else winner.name))
        buffers += temps
    node = Dispatch(choice.name, region.outputs, tuple(arms), choice.origins)
    return replace_region(program, region, node, buffers)


def _arm_nodes(
    region: Region, winner: Alternative, r: _Range, number: int, target: Target, work: _Work
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
