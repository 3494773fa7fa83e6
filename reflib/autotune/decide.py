"""Deciding: every Choice is replaced by the variant that is best where it stands.

``autotune="off"``: a static rule for matmuls (``matmul.static_tiling``), else the default. Code for a ``target`` that
nothing can run on: what is known of such GPUs (``known.Elsewhere``), else the same. Otherwise, for each Choice in
program order:

1. the choice and whatever any variant would fuse with it are cut out, and the candidates listed (``question``);
2. candidates whose predicate does not hold, or that could not be traced, are listed with the reason and go no further;
3. every other candidate's version is compiled by the later stages and measured (``points``), at the traced sizes, or,
   with ranges, at three sizes inside each range: a third and two thirds of the way up on a logarithmic scale, and its
   top. A range goes to the candidate with the best geometric mean;
4. the winner's nodes take the choice's place, and the program is fused by the caller. A winner that needs more
   than that (a predicate; option patches; other ranges have other winners) becomes a Variants node in place of the
   subprogram, each variant fused by itself, neighbouring ranges with one winner merged (``ranges``). A variant whose
   predicate could fail is followed by the default for the same range.

Equal questions (the layers of a transformer) are decided once. A choice inside a winner is decided in its turn. A
candidate that calls another registered op is measured with what is best of that op there.

The requests of all choices go out to worker processes first (``tuner``), each for its question in the program as it
stands; then winners are put in place one after another. A question that an earlier winner changed (two matmuls added by
one kernel, which the first takes in) is sent again. What is known already is not measured (``known``): a
``lookup_table`` of the user's, the store of decisions, an imported table, in this order.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..fuse import fuse
from ..ir.decision import Candidate, Decision, Key
from ..ir.program import Buffer, Choice, Extern, Node, Program, Template, Variant, Variants
from ..ir.regions import Region, block, by_itself
from ..ir.rename import renamed, with_hints
from ..logs import get as logger
from ..options import Options
from ..target import Target
from .activation import with_activation
from .epilogue import epilogue_of
from .matmul import arithmetic_takes_longer, best_tiling, open_template, static_tiling, with_tiling
from .points import Build, TargetOf, Work, begin, outcome_of, release
from .prologue import cannot_lose
from .question import Question, dtypes_of, groups_of, question_of, sizes_of
from .ranges import Range, inner_of, key_of, merged, representatives, say_once
from .roofline import tensor_cores
from .store import Outcome
from .subprogram import Subprogram, replace_region, splice

__all__ = ["decide", "new_work", "representatives", "with_tiling"]


def new_work(
    options: Options, target_of: TargetOf, build: Build, makers: Mapping[str, Callable[..., Any]], **how: Any
) -> Work:
    """``how`` candidates are measured: see ``Work``."""
    return Work(options, target_of, build, makers, plain, static, **how)


def decide(program: Program, work: Work) -> tuple[Program, tuple[Decision, ...]]:
    """``program`` without a Choice, and what was decided."""
    options, target_of = work.options, work.target_of
    program, decisions = _in_blocks(program, work)
    measures = options.autotune != "off" and options.target is None
    try:
        if measures:
            _in_candidates(program, work)
            _begin_all(program, work)
        elif options.autotune != "off":
            say_once("with target= nothing runs, so nothing is measured: choices go by the static rule")
        while (choice := next((n for n in program.nodes if isinstance(n, Choice)), None)) is not None:
            target = target_of(program.buffers[choice.outputs[0]].device)
            if measures:
                program, decision = _decide_by_measuring(program, choice, target, work)
            elif options.target is not None and (found := _decide_by_what_is_known(program, choice, target, work)):
                program, decision = found
            else:
                program, decision = _decide_statically(program, choice, target, options)
            logger("autotune").info("%s (%s): %s: %s", decision.region, decision.op, decision.winner, decision.reason)
            decisions.append(decision)
    finally:
        release(work)
    return program, tuple(decisions)


def _in_blocks(program: Program, work: Work) -> tuple[Program, list[Decision]]:
    """Choices in branches and bodies of loops: each block is a program by itself, measured as if it ran each time."""
    buffers, nodes, decisions = dict(program.buffers), list(program.nodes), list[Decision]()
    for i, n in enumerate(nodes):
        if isinstance(n, Region):
            variants = []
            for v in n.variants:
                inner, more = decide(block(n, v, buffers), work.inside())
                buffers |= {name: b for name, b in inner.buffers.items() if name not in buffers}
                variants.append(replace(v, nodes=inner.nodes))
                decisions += more
            nodes[i] = replace(n, variants=tuple(variants))
    return replace(program, buffers=buffers, nodes=tuple(nodes)), decisions


def _in_candidates(program: Program, work: Work) -> None:
    """Into ``work.nested``: the winners of registered ops that candidates call, each candidate by itself."""
    for choice in [n for n in program.nodes if isinstance(n, Choice)]:
        for v in choice.variants:
            if any(isinstance(n, Choice) and n.custom for n in v.nodes):
                made = {b for n in v.nodes for b in n.writes()}
                buffers = program.buffers | {b.name: b for b in v.buffers}
                _, more = decide(by_itself(v.nodes, buffers, made, choice.outputs), work.inside())
                work.nested |= {d.region: d.winners[0] for d in more if d.winners}


def plain(program: Program, work: Work) -> Program:
    """Choices inside an implementation (its matmuls, not registered ops) are decided by the static rule while it is
    measured. (Once it has won and is in place, they are measured in their turn.)"""
    nested = work.nested
    while choice := next((n for n in program.nodes if isinstance(n, Choice) and n.name in nested), None):
        known = (v for v in choice.variants if not v.predicate and key_of(v) == nested[choice.name])
        program = splice(program, choice, next(known, choice.variants[0]))
    return decide(program, work.inside(work.options.but(autotune="off")))[0]


def static(q: Question, work: Work) -> Key:
    return key_of(_static_winner(q.region.program, q.choice, work.target_of(q.device))[0])


# -- without measuring -----------------------------------------------------------------------------
def _decide_statically(program: Program, choice: Choice, target: Target, options: Options) -> tuple[Program, Decision]:
    unmeasured = {"off": "autotune is off", "background": "until it is measured"}.get(options.autotune, "")
    unmeasured = "nothing is measured for a target that is named" if options.target else unmeasured
    winner, why = _static_winner(program, choice, target)
    key = key_of(winner)
    rows = (Candidate(key, "heuristic"), *_failed(choice))
    return splice(program, choice, winner), Decision(choice.name, (key,), rows, f"{unmeasured}: {why}", op=choice.op)


def _failed(choice: Choice) -> tuple[Candidate, ...]:
    return tuple(Candidate(Key(name), status, why=why) for name, status, why in choice.failed)


def _static_winner(program: Program, choice: Choice, target: Target) -> tuple[Variant, str]:
    for a in choice.variants:
        t = None if a.predicate else open_template(a)
        if t is not None and t.prologues and (computed := _computed(program, choice, a, t, target)) is not None:
            return computed, "few rows: computing an operand as it is read moves the fewest bytes"
    for a in choice.variants:
        t = None if a.predicate else open_template(a)
        if t is None or t.prologues:
            continue
        tiling = static_tiling(t, partial(epilogue_of, program, choice, a), target)
        if tiling is not None:
            return with_tiling(a, tiling), "at this size one launch is worth more than the library's kernel"
    return choice.variants[0], "the default"


def _computed(program: Program, choice: Choice, a: Variant, t: Template, target: Target) -> Variant | None:
    if not cannot_lose(program, a) or not tensor_cores(target):
        return None
    behind = epilogue_of(program, choice, a)
    best = best_tiling(t, behind.moved if behind else 0, target)
    return None if best is None or arithmetic_takes_longer(t, best, target) else with_tiling(a, best)


# -- for a target ----------------------------------------------------------------------------------
def _decide_by_what_is_known(
    program: Program, choice: Choice, target: Target, work: Work
) -> tuple[Program, Decision] | None:
    """The winner in place, if one is known of GPUs such as the target. A matmul with its activation behind it may be
    known as one choice (as it is measured), or by itself."""
    elsewhere = work.known_of(target)
    if not elsewhere.tables:
        return None
    joined = with_activation(program, choice)
    for tried in (program,) if joined is program else (joined, program):
        whole = next(n for n in tried.nodes if isinstance(n, Choice) and n.name == choice.name)
        if not elsewhere.mentions(whole.op, sizes_of(tried, whole), dtypes_of(tried, whole)):
            continue
        q = question_of(tried, whole, target, work.options, work.makers)
        if (found := elsewhere.find(q)) is not None:
            return _decided(tried, q, found, target, work)
    return None


# -- by measuring ----------------------------------------------------------------------------------
def _begin_all(program: Program, work: Work) -> None:
    """Send out every question whose answer is not known, then do something else."""
    touched, seen = set[str](), set[str]()
    different = _different(program)

    def questions() -> Iterator[tuple[int, Question]]:
        numbers = work.together.order(len(different))
        names = {n.name for n in different}
        others = [n for n in program.nodes if isinstance(n, Choice) and n.name not in names]
        for i, choice in [*((i, different[i]) for i in numbers), *enumerate(others, len(different))]:
            target = work.target_of(program.buffers[choice.outputs[0]].device)
            q = question_of(program, choice, target, work.options, work.makers)
            touched.update({choice.name, *q.region.members})
            if q.text and q.text not in work.known and q.text not in seen:
                seen.add(q.text)
                yield i, q

    if work.tuner is not None or work.store is not None or work.options.lookup_table is not None:
        begin(questions(), work, len(different))
    if work.meanwhile is not None and work.begun:
        work.meanwhile(touched)


def _different(program: Program) -> list[Choice]:
    """The choices that one process can measure, as far as they differ in what they compute, or its sizes."""
    buffers, found = program.buffers, dict[Any, Choice]()
    for n in program.nodes:
        if isinstance(n, Choice) and not groups_of(n):
            found.setdefault((n.op, *(buffers[b].shape for b in n.reads() if b in buffers)), n)
    return list(found.values())


def _decide_by_measuring(program: Program, choice: Choice, target: Target, work: Work) -> tuple[Program, Decision]:
    q = question_of(program, choice, target, work.options, work.makers)
    before = work.known.get(q.text) if q.text else None
    if before is None and work.known_only:
        if q.text:  # a question that an earlier winner changed may be known
            begin([(0, q)], work)
            before = work.known.get(q.text)
        if before is None:
            work.left.append(choice.name)
            return _decide_statically(program, choice, target, work.options)
    outcome = before or outcome_of(q, work)
    if q.text and before is None:
        work.known[q.text] = replace(outcome, reason=f"{outcome.reason}; decided before, for an equal region")
    return _decided(program, q, outcome, target, work)


def _decided(program: Program, q: Question, outcome: Outcome, target: Target, work: Work) -> tuple[Program, Decision]:
    decision = Decision(
        q.choice.name, outcome.winners, (*outcome.rows, *_failed(q.choice)), outcome.reason, op=q.choice.op,
        members=q.region.members, sizes=q.sizes,
    )  # fmt: skip
    winners = [q.candidates[key] for key in outcome.winners]
    return _apply(program, q.region, winners, q.ranges, target, work), decision


# -- putting winners in place ----------------------------------------------------------------------
def _apply(
    program: Program, region: Subprogram, winners: list[Variant], ranges: list[Range], target: Target, work: Work
) -> Program:
    choice, default = region.choice, region.choice.variants[0]
    serving = merged(winners, ranges, choice.ranges)
    program = _noting_what_was_tuned(program, choice)
    only = serving[0][0] if len(serving) == 1 else None
    if only is not None and not only.predicate and not only.patches:
        return splice(program, choice, only)
    ways: list[tuple[Variant, Range]] = []
    for i, (winner, r) in enumerate(serving):
        winner = replace(winner, predicate=tuple(g for g in winner.predicate if not r.implies(g, choice.ranges)))
        ways.append((winner, r))
        following = key_of(serving[i + 1][0]) if i + 1 < len(serving) else None
        if winner.predicate and following != key_of(default):  # where they fail the default runs, not the next winner
            ways.append((default, replace(r, label=f"{r.label}, else" if r.label else "else")))
    variants: list[Variant] = []
    buffers: list[Buffer] = []
    for winner, r in ways:
        nodes, temps = _variant_nodes(region, winner, r, len(variants), target, work)
        name = f"{r.label}: {key_of(winner)}" if r.label else str(key_of(winner))
        predicate = (*r.predicate(choice.ranges), *winner.predicate)
        variants.append(Variant(name, tuple(nodes), predicate, patches=winner.patches))
        buffers += temps
    node = Variants(choice.name, region.outputs, tuple(variants), choice.origins)
    return replace_region(program, region, node, buffers)


def _noting_what_was_tuned(program: Program, choice: Choice) -> Program:
    """``program``, which will log a call whose size is outside, if the size is known at its first step."""
    late = {s for n in program.nodes if isinstance(n, Extern) for s, _, _ in n.symbols}
    for r in (choice.ranges, inner_of(choice.ranges)):
        if r is not None and r.size.constant is None and not late & r.size.symbols():
            program = replace(program, tuned=(*program.tuned, (r.size, 1, r.upper, r.what, choice.op)))
    return program


def _variant_nodes(
    region: Subprogram, winner: Variant, r: Range, number: int, target: Target, work: Work
) -> tuple[list[Node], list[Buffer]]:
    """The region with the winner in it, decided inside, fused for the range's last representative size, its
    temporaries renamed so that variants do not share names."""
    program = plain(splice(region.program, region.choice, winner), work)
    options = work.options.but(**dict(winner.patches))
    program = fuse(with_hints(program, r.points[-1]), options, target).program
    keep = {*region.inputs, *region.outputs}
    names = {b: f"{b}_variant{number}" for b in program.buffers if b not in keep}
    names |= {n.name: f"{n.name}_variant{number}" for n in program.nodes}
    nodes, buffers = renamed(program.nodes, [b for n, b in program.buffers.items() if n in names], names)
    return nodes, buffers
