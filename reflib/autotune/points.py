"""Measuring a question: one request for each set of sizes (a point), by worker processes or in this one.

A question with ranges is measured at three sizes inside each range (``ranges.representatives``), any other at the
traced sizes. ``begin`` sends the requests to the worker processes and returns; ``outcome_of`` waits for the results.
What no worker can do, because it cannot be sent there, is not measured: a candidate that crashes would end the user's
process. The static rule's choice stays, and a warning says so. ``Options(isolate=False)`` measures everything here,
alone on the device among reflib's processes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..errors import ReflibError
from ..ir.decision import Candidate, Key
from ..ir.program import Program, Template, holds, node_symbols
from ..ir.rename import with_hints
from ..options import Options
from ..target import Target
from . import known
from .isolation import isolated
from .known import Elsewhere
from .lock import device_lock
from .matmul import problem
from .measure import measure, request
from .parts import joined
from .question import Question
from .ranges import Range
from .report import Report, epilogue_verdict
from .report import prune as pruned
from .request import Request, Result
from .store import Outcome, Store, keeps_decisions, store
from .subprogram import splice
from .tuner import Asked, Prune, Tuner
from .winner import overall, pick_winner

_said: set[str] = set()  # why candidates are not measured: each reason is said once

TargetOf = Callable[[torch.device], Target]
Build = Callable[[Program, Options], Callable[[list], Any]]


class Alone:
    """What one process does where several do it together: ``ranks.tune``, whose functions take the place of these.

    Candidates that communicate (``talks``) are measured by all ranks, with ``known_to_all`` and ``measured_by_all``.
    Other questions are measured by one rank for all."""

    def talks(self, q: Question) -> bool:
        """Do its candidates communicate?"""
        return False

    def order(self, count: int) -> Iterable[int]:
        """The numbers of so many questions, as they are to be sent."""
        return range(count)

    def deal(self, questions: Iterable[tuple[int, Question]], count: int, kept: Callable[[Question], Key]) -> Any:
        """Each with the parts (``parts``) that it is measured in, and those that this process is to do."""
        return ((q, [q], [q]) for _, q in questions)

    def claim(self, q: Question, work: Work) -> bool:
        """Does this process do it?"""
        return True

    def settle(self, q: Question, work: Work) -> Outcome | None:
        """Another's outcome; None: measure it here."""

    def publish(self, q: Question, outcome: Outcome) -> None:
        """Tell the others."""

    def release(self, q: Question) -> None:
        """This process was to do it, and has not."""


@dataclass
class Work:
    """What deciding programs needs everywhere. ``makers``: registered functions that make measuring inputs, by the keys
    in ``Choice.inputs_from``. ``plain``: a program with its choices decided by the static rule; ``static``: the key
    that the static rule chooses.

    How candidates are measured. ``tuner``: by worker processes; None: all of it here. ``background``: the graph's
    name, the same on all ranks, if the program runs meanwhile on what the static rule chose, which a winner must beat;
    nothing is measured in this process. ``known_only``: nothing is measured at all; ``left``: what there was to
    measure. ``meanwhile``: what to do while workers work; it is given the names of nodes that candidates are measured
    with. ``together``: with other processes (``Alone``, ``ranks.tune``).

    What is known so far. ``known``: outcomes of earlier questions, by their text; ``nested``: winners among registered
    ops inside of candidates, by choice. ``parts``: of a question whose answer is not known; by the text of each:
    ``begun``: points of each range that were sent to be measured here, and ``owed``: what other processes wait for;
    ``answered``: by this one, before it was needed here."""

    options: Options
    target_of: TargetOf
    build: Build
    makers: Mapping[str, Callable[..., Any]]
    plain: Callable[[Program, Work], Program]
    static: Callable[[Question, Work], Key]
    tuner: Tuner | None = None
    background: str = ""
    known_only: bool = False
    meanwhile: Callable[[set[str]], None] | None = None
    store: Store | None = None
    together: Any = field(default_factory=Alone)
    left: list[str] = field(default_factory=list)
    known: dict[str, Outcome] = field(default_factory=dict)
    elsewhere: dict[Target, Elsewhere] = field(default_factory=dict)
    nested: dict[str, Key] = field(default_factory=dict)
    parts: dict[str, list[Question]] = field(default_factory=dict)
    begun: dict[str, list[list[Point]]] = field(default_factory=dict)
    owed: dict[str, Question] = field(default_factory=dict)
    answered: dict[str, tuple[Outcome, list[Point]]] = field(default_factory=dict)

    def inside(self, options: Options | None = None) -> Work:
        """The same for a program inside of this one."""
        return replace(self, options=options or self.options, meanwhile=None, nested={}, parts={}, begun={}, owed={},
                       answered={})  # fmt: skip

    def known_of(self, target: Target, stored: bool = True) -> Elsewhere:
        """What is known about GPUs such as the target. ``stored``: from the store of decisions too."""
        if target not in self.elsewhere:
            kept = store() if stored and keeps_decisions(self.options) else None
            self.elsewhere[target] = Elsewhere(target, self.options, self.store or kept)
        return self.elsewhere[target]


@dataclass
class Point:
    """A question at one set of sizes. ``asked``: worker processes measure it; else ``request`` is measured here, with
    ``makers``, or there is nothing to measure: ``found``. ``alone``: why no worker can do it."""

    default: Key
    left_out: tuple[Candidate, ...] = ()
    request: Request | None = None
    makers: dict[str, Any] = field(default_factory=dict)
    asked: Asked | None = None
    found: Result | None = None
    alone: str = ""
    row_key: str = ""  # of the store, for rows of an unfinished measurement


def begin(questions: Iterable[tuple[int, Question]], work: Work, count: int = 1) -> None:
    """Look each of about ``count`` numbered ones up, or send it to be measured."""

    def unknown() -> Iterator[tuple[int, Question]]:
        for i, q in questions:
            found = known.find(q, work.options, work.store) if q.text else None
            if work.together.talks(q):
                found = work.together.known_to_all(q, found, work)
            if found is not None:
                work.known[q.text] = found
            elif not work.known_only:
                yield i, q

    send(unknown(), work, count)


def send(questions: Iterable[tuple[int, Question]], work: Work, count: int) -> None:
    """Send each of about ``count`` to be measured, or those parts of it that this process is to do."""

    def alone() -> Iterator[tuple[int, Question]]:
        for i, q in questions:
            if work.together.talks(q):
                work.parts[q.text] = [q]
                ask(q, work)
            else:
                yield i, q

    for q, parts, own in work.together.deal(alone(), count, partial(_default, work=work)):
        work.parts[q.text] = parts
        for part in own:
            if work.together.claim(part, work):
                ask(part, work)


def _default(q: Question, work: Work) -> Key:
    """The candidate that others must beat: in the background what runs now, if it is one of them."""
    static = work.static(q, work) if work.background else q.default
    return static if static in q.candidates else q.default


def ask(q: Question, work: Work) -> None:
    """Send it to be measured, at every point of its ranges."""
    if not work.together.talks(q):
        work.owed[q.text] = q
    work.begun[q.text] = [[_ask(q, point, work) for point in r.points] for r in q.ranges]


def outcome_of(q: Question, work: Work) -> Outcome:
    """The winner of every range; here ``autotune`` waits for workers."""
    if q.text not in work.parts:  # a question that an earlier winner changed, or that has no text
        begin([(0, q)], work)
        if q.text in work.known:
            return work.known[q.text]
    found = [_outcome_of(part, work) for part in work.parts.pop(q.text)]
    outcomes, here = [outcome for outcome, _ in found], [point for _, points in found for point in points]
    outcome = outcomes[0] if len(outcomes) == 1 else joined(q, outcomes, _default(q, work))
    store = work.store
    whole = all(p.found is not None and p.found.complete for p in here)
    if q.text and store is not None and whole and any(r.time_us for r in outcome.rows):
        known.keep(q, outcome, store)
        for point in here:
            store.drop_rows(point.row_key)
    return outcome


def _outcome_of(q: Question, work: Work) -> tuple[Outcome, list[Point]]:
    """Of a question or a part of one; and the points that were measured here."""
    if q.text in work.answered:
        return work.answered.pop(q.text)
    if q.text not in work.begun:  # (there are several)
        for own in list(work.owed.values()):  # before this process waits, what others wait for
            work.answered[own.text] = _outcome_of(own, work)
        if (theirs := work.together.settle(q, work)) is not None:
            return theirs, []
        ask(q, work)
    asked = work.begun.pop(q.text)
    found = [measure_range(q, r, points, work) for r, points in zip(q.ranges, asked)]
    reasons = [f"{r.label}: {reason}" if r.label else reason for r, (_, _, reason) in zip(q.ranges, found)]
    rows = tuple(row for _, more, _ in found for row in more)
    outcome = Outcome(tuple(winner for winner, _, _ in found), rows, "; ".join(reasons))
    work.together.publish(q, outcome)
    work.owed.pop(q.text, None)
    return outcome, [point for points in asked for point in points]


def release(work: Work) -> None:
    """What was asked and not answered: a question that an earlier winner changed, or one that failed."""
    for q in work.owed.values():
        work.together.release(q)
    work.owed.clear()


def measure_range(q: Question, r: Range, points: list[Point], work: Work) -> tuple[Key, list[Candidate], str]:
    """(winner, rows, reason). With several points: the best geometric mean among those that are right at all points."""
    results = [_answer(q, point, work) for point in points]
    places = [_where(at) if r.label or at else "" for at in r.points]
    rows = [replace(row, where=place) for place, found in zip(places, results) for row in found.rows]
    if len(results) == 1:
        return q.named[results[0].winner], rows, results[0].reason
    results = [x for x in results if any(row.time_us for row in x.rows)] or results  # where there was room for any
    means = [overall(key, [row for x in results for row in x.rows if row.key == key]) for key in q.candidates]
    winner, reason = pick_winner(means, str(points[0].default), q.choice.min_speedup)
    return q.named[winner], rows, f"over {len(results)} sizes, geometric means: {reason}"


def _where(point: Mapping[str, int]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(point.items()))


# -- asking --------------------------------------------------------------------------------------------
def _ask(q: Question, sizes: dict[str, int], work: Work) -> Point:
    """Send the candidates that are valid at these sizes to be measured."""
    choice = q.choice
    values = {s.name: sizes.get(s.name, s.hint or 1) for s in node_symbols(choice)}
    of_sizes = {key: [g for g in a.predicate if g.kind != "aligned"] for key, a in q.candidates.items()}
    valid = {k: q.candidates[k] for k, facts in of_sizes.items() if all(holds(g, values) for g in facts)}
    left_out = tuple(Candidate(key, "guard", why="what it assumes of the sizes does not hold here")
                     for key in q.candidates if key not in valid)  # fmt: skip
    default = key if (key := _default(q, work)) in valid else q.default
    programs = {
        str(key): with_hints(work.plain(splice(q.region.program, choice, a), work), sizes) for key, a in valid.items()
    }
    made_by = {**{b: f"constant {b}" for b in q.region.constants}, **dict(choice.inputs_from)}
    try:
        asked = request(
            programs, str(default), str(q.default), keys=q.named, sizes=sizes, weights=q.region.program.weights,
            makers=made_by, options=work.options.but(autotune="off", lookup_table=None),
            patches={str(key): dict(a.patches) for key, a in valid.items() if a.patches},
            min_speedup=choice.min_speedup, graph_timing=choice.graph_timing, paired=bool(work.background),
        )  # fmt: skip
    except ReflibError as e:  # an operator that has no name
        found = Result((Candidate(default, "unmeasured", why=str(e)),), str(default), f"it cannot be measured: {e}")
        return Point(default, left_out, found=found)
    makers = {k: work.makers[k] for _, k in choice.inputs_from if k in work.makers}
    makers |= {made_by[b]: lambda like, value=value: value.detach() for b, value in q.region.constants.items()}
    point = Point(default, left_out, asked, makers)
    if work.tuner is not None and not work.together.talks(q):
        _send(q, sizes, point, work.tuner, work)
    return point


def _send(q: Question, sizes: dict[str, int], point: Point, tuner: Tuner, work: Work) -> None:
    """To worker processes, if they can do it."""
    assert point.request is not None
    sent = isolated(point.request, q.region.constants, work.options, point.makers)
    if isinstance(sent, str):
        point.alone = sent
        return
    where = _where(sizes)
    label = f"{q.choice.op} {q.sizes}" + (f" at {where}" if where else "")
    limit = work.options.candidate_seconds  # what hung may need more
    point.row_key = f"{q.store_key} {where} {limit:g} s" if q.text else ""
    prune = _pruning(q, work.target_of(q.device))
    point.asked = tuner.ask(point.row_key, sent, label, prune)


def _pruning(q: Question, target: Target) -> Prune | None:
    """Which candidates need not be measured, by the compiler's report of their kernels. A candidate with its epilogue
    apart is compiled only where the kernel with it spills, or registers alone limit how many of its blocks run at once:
    it needs as much shared memory either way."""
    if not target.is_gpu:
        return None
    tiled = {key: t for key, a in q.candidates.items() for t in a.nodes if isinstance(t, Template) and t.tiling}

    def prune(name: str, reports: Mapping[str, list[Report] | None]) -> str | None:
        key = q.named[name]
        t = tiled.get(key)
        if t is None or t.tiling is None:
            return ""
        known = {q.named[n]: r for n, r in reports.items()}
        siblings = [r for k, r in known.items() if k != key and r and k.tiling and k.tiling.kind == t.tiling.kind]
        mine = known.get(key) or []
        why = pruned(mine, target, siblings)
        return why if why or not key.apart else _epilogue_pruned(key, t, known, mine)

    return prune


def _epilogue_pruned(key: Key, t: Template, known: Mapping[Key, list[Report] | None], mine: list[Report]) -> str | None:
    """Why ``key``, whose epilogue is apart, need not be measured, given the kernel with the epilogue in it."""
    whole = replace(key, apart=False)
    fused = known.get(whole)
    if not fused:  # not compiled yet; or it cannot be, or has no kernel
        return "" if whole in known else None
    if not mine and (fused[0].spills or fused[0].limit == "registers"):
        return ""  # compile it, and compare
    saved = 2 * t.dtype.itemsize * math.prod(problem(t).sizes[:3])
    verdict, reason = epilogue_verdict(fused[0], mine[0] if mine else fused[0], saved)
    return f"its epilogue is fused unmeasured: {reason}" if verdict == "fuse" else ""


# -- results -------------------------------------------------------------------------------------------
def _answer(q: Question, point: Point, work: Work) -> Result:
    """Wait for it, or measure here."""
    found = point.found
    if found is None and work.together.talks(q):
        found = work.together.measured_by_all(q, point, work)
    if found is None and point.asked is not None:
        assert work.tuner is not None
        found = work.tuner.wait(point.asked)
        if point.asked.unknown_op:
            point.alone, found = point.asked.unknown_op, None
    if found is None:
        found = _not_measured(q, point, work) if point.alone else _measured_here(point, work)
    point.found = found
    return replace(found, rows=(*found.rows, *point.left_out))


def _not_measured(q: Question, point: Point, work: Work) -> Result:
    """What runs without tuning stays."""
    r = point.request
    assert r is not None
    static = str(work.static(q, work))
    stays = static if static in r.programs else str(point.default)
    if point.alone not in _said:
        _said.add(point.alone)
        warnings.warn(f"candidates for {q.choice.op} are not measured, {stays} stays: {point.alone}", stacklevel=2)
    why = f"{point.alone} (isolate=False: measured in this process, which ends with a candidate that crashes)"
    rows = tuple(Candidate(r.key(name), "skipped", why=why) for name in r.programs)
    return Result(rows, stays, f"{stays} stays, unmeasured: {point.alone}", complete=False)


def _measured_here(point: Point, work: Work) -> Result:
    r = point.request
    assert r is not None
    with device_lock(next((s.device for s in r.inputs if s.is_tensor), "cpu")):
        result = measure(r, work.build, point.makers)
    return replace(result, complete=result.complete and not any(row.status == "skipped" for row in result.rows))
