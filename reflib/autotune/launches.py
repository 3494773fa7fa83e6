"""How memory-bound kernels are launched, as decisions: measured, stored, exported and pinned as those of choices are.

``schedule`` cuts every loop nest into blocks by a static model. Where something is measured at all, its choice is the
default of a question, whose other candidates are the few launches that ``schedule.configs`` expects to be near::

    Offer       a scheduled kernel with the launches that it might have       (made by the stage ``schedule``'s modules)
    Question    the kernel as a program by itself; its variants are Variants that differ in the fast kernel's Config
    Outcome     found in a table or the store, or measured: ``points`` and ``tuner`` see no difference to a choice
    Decision    beside the kernel's name its op and sizes as tables have them; the winner's Config takes its place

A kernel is measured alone: what is fused is in it already, and no launch changes what it reads and writes. It is asked
about once where several do the same work on the same sizes (the layers of a transformer), and not at all where it would
take less than ``LEAST_US`` or ``LEAST_SHARE`` of the program's kernels at the memory's full speed: the reason says so.
Kernels inside of a Variants (another winner for other sizes) are launched as they were when that was measured.

With ``autotune="off"`` a ``lookup_table`` counts, and nothing else is looked at; for a target the rules are those of
``decide``, but the store counts only with ``autotune`` (a listing for a target is the same on every machine). In tables
the op is ``launch of add_gelu``, the kernel's name without its number; the sizes are those traced: ``[4096] r[1000]``,
points and what each reduces, then its first tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..fuse.mix_order import column_sums
from ..ir.decision import Decision, Key
from ..ir.loops import LoopNest
from ..ir.program import Buffer, Choice, Config, Program, Variant, Variants
from ..logs import get as logger
from ..options import Options
from . import known
from .points import Work, outcome_of, release, send
from .question import Question, text_of
from .ranges import Range
from .roofline import rates
from .store import Outcome
from .subprogram import Subprogram, sub_program

LEAST_US = 3.0  # at the memory's full speed; a launch alone takes as long
LEAST_SHARE = 1 / 500  # of the bytes that the program's kernels move
OP = "launch of "


@dataclass(frozen=True)
class Offer:
    """``node``: a scheduled kernel. ``launches``: by name, those worth measuring first, the heuristics' own first of
    all, then all that a table may name. ``few``: how many are worth measuring. ``bytes``: that it must move.
    ``why``: measuring it would say nothing."""

    node: Variants
    launches: Mapping[str, Config]
    few: int
    bytes: int
    why: str = ""

    @property
    def parts(self) -> tuple[LoopNest, ...]:
        return tuple(p for p in self.node.variants[0].kernel.parts if isinstance(p, LoopNest))

    def launched(self, c: Config) -> Variants:
        fast, *rest = self.node.variants
        return replace(self.node, variants=(replace(fast, nodes=(replace(fast.kernel, config=c),)), *rest))


@dataclass(frozen=True)
class LaunchQuestion(Question):
    """``region``: of the kernel alone. ``offer``: what it is about; ``candidates``: all its launches, or the few."""

    offer: Offer | None = None

    @cached_property
    def sizes(self) -> str:
        assert self.offer is not None
        parts = self.offer.parts
        points = f"[{sum(p.numel.hint() for p in parts)}]"
        reduced = [f"r[{max(p.rnumel.hint() for p in parts)}]"] if any(p.reduced for p in parts) else []
        tensors = [f"{b.name}[{', '.join(str(e.hint()) for e in b.shape)}]" for b in self._shown]
        return " ".join([points, *reduced, *tensors])

    @cached_property
    def dtypes(self) -> str:
        return " ".join(dict.fromkeys(str(b.dtype).removeprefix("torch.") for b in self._shown))

    @cached_property
    def epilogue(self) -> str:
        return ""

    @property
    def _shown(self) -> list[Buffer]:
        names = dict.fromkeys([*self.choice.reads(), *self.choice.outputs])
        return [self.region.program.buffers[b] for b in names][:4]

    def of_few(self) -> LaunchQuestion:
        """About the launches that are worth measuring alone."""
        assert self.offer is not None
        few = list(self.candidates.items())[: self.offer.few]
        return replace(self, candidates=dict(few))


# -- questions ----------------------------------------------------------------------------------------
def question_about(program: Program, offer: Offer, options: Options, kept: bool) -> LaunchQuestion:
    """``kept``: with a text, by which its answer is known again."""
    region = _alone(program, offer)
    candidates = {Key(name): Variant(name, (offer.launched(c),)) for name, c in offer.launches.items()}
    text = text_of(region, list(candidates)[: offer.few], options, {}) if kept else ""
    return LaunchQuestion(region, candidates, [Range()], text, offer)


def _alone(program: Program, offer: Offer) -> Subprogram:
    """The kernel as a program, with what adds up its partial sums (which rows are in which depends on its launch). What
    is written in part, or over what is read, is an input that is mutated."""
    node = offer.node
    partial = {s.buffer for p in offer.parts for s in column_sums(p)}
    adding = [n for n in program.nodes if partial & set(n.reads())]
    names = {node.name, *(n.name for n in adding)}
    others = {b for n in program.nodes if n.name not in names for b in n.writes()}
    shared = others | {b for p in offer.parts for b in p.reads()}
    made = [b for n in (node, *adding) for b in n.writes() if b not in partial]
    own = tuple(b for b in made if program.buffers[b].kind == "temp" and b not in shared)
    over = [b for b in made if b not in own]
    default = next(iter(offer.launches))
    choice = Choice(node.name, OP + _ops(node), node.outputs, (Variant(default, (node,)),), origins=node.origins)
    alone = sub_program(program, [choice, *adding], own)
    buffers = {**alone.buffers, **{b: replace(program.buffers[b], kind="input") for b in over}}
    inputs = (*over, *(i for i in alone.inputs if i not in over))
    alone = replace(alone, inputs=inputs, buffers=buffers)
    tensors = tuple(i for i in inputs if isinstance(i, str))
    constants = {i: program.constants[i] for i in tensors if program.buffers[i].kind == "const"}
    return Subprogram(choice, tuple(n.name for n in adding), tensors, own, alone, constants)


def _ops(node: Variants) -> str:
    return node.name.partition("_")[2]  # without its number


# -- deciding -----------------------------------------------------------------------------------------
def decide_launches(
    program: Program, decisions: Sequence[Decision], offers: Sequence[Offer], work: Work
) -> tuple[Program, tuple[Decision, ...]]:
    """``program`` with every kernel of ``offers`` launched as is best, and ``decisions``, those about them replaced.
    Sends out all questions before it waits for the first answer."""
    options = work.options
    measures = options.autotune != "off" and options.target is None
    skipped = _not_worth_it(offers, program, work) if measures else {}
    names = {o.node.name: o for o in offers}
    asked = {n: question_about(program, o, options, measures and n not in skipped) for n, o in names.items()}
    answers: dict[str, Outcome | str] = {}  # or why there is none
    unknown: dict[str, LaunchQuestion] = {}
    for name, q in asked.items():
        found = _found(q, work, not skipped.get(name))
        if found is not None:
            answers[name] = found
        elif not measures or name in skipped:
            answers[name] = skipped.get(name, "with target= nothing runs")
        elif work.known_only:
            work.left.append(name)
            answers[name] = "it will be, in the background"
        elif not q.text:
            answers[name] = "it cannot be written as data"
        else:
            unknown.setdefault(q.text, q.of_few())
    try:
        send(enumerate(unknown.values()), work, len(unknown))
        for name, q in asked.items():
            if name not in answers:
                answers[name] = _measured(q.of_few(), work)
    finally:
        release(work)
    return _applied(program, decisions, asked, answers, options)


def _found(q: LaunchQuestion, work: Work, stored: bool) -> Outcome | None:
    """What is known without measuring. ``stored``: look into the store as well."""
    options, store = work.options, work.store if stored else None
    if options.target is None:
        return known.find(q, options, store) if options.lookup_table or store is not None else None
    elsewhere = work.known_of(work.target_of(q.device), options.autotune != "off")
    return elsewhere.find(q) if elsewhere.tables else None


def _measured(q: LaunchQuestion, work: Work) -> Outcome:
    if q.text not in work.known:
        outcome = outcome_of(q, work)
        work.known[q.text] = replace(outcome, reason=f"{outcome.reason}; decided before, for an equal kernel")
        return outcome
    return work.known[q.text]


def _not_worth_it(offers: Sequence[Offer], program: Program, work: Work) -> dict[str, str]:
    """Kernels that need not be measured, and why."""
    us: dict[str, float] = {}
    alike: dict[Any, float] = {}
    for o in offers:
        target = work.target_of(program.buffers[o.node.outputs[0]].device)
        us[o.node.name] = mine = o.bytes / 1e3 / rates(target).memory
        alike[_ops(o.node), o.bytes] = alike.get((_ops(o.node), o.bytes), 0.0) + mine
    out = {}
    for o in offers:
        mine, share = us[o.node.name], alike[_ops(o.node), o.bytes] / max(1e-9, sum(us.values()))
        if o.why or o.few < 2:
            out[o.node.name] = o.why or "no other launch is expected to be near"
        elif mine < LEAST_US:
            out[o.node.name] = f"its {o.bytes / 1e6:.2g} MB take {mine:.1f} us at least, which is too little to matter"
        elif share < LEAST_SHARE:
            out[o.node.name] = f"it moves {share:.2%} of all that kernels move, which is too little to matter"
    return out


def _applied(
    program: Program,
    decisions: Sequence[Decision],
    asked: Mapping[str, LaunchQuestion],
    answers: Mapping[str, Outcome | str],
    options: Options,
) -> tuple[Program, tuple[Decision, ...]]:
    winners: dict[str, Variants] = {}
    made: list[Decision] = []
    for d in decisions:
        q, answer = asked.get(d.region), answers.get(d.region)
        if q is None or q.offer is None:
            made.append(d)
        elif isinstance(answer, Outcome):
            (winner,) = answer.winners
            config = q.offer.launches[str(winner)]
            winners[d.region] = q.offer.launched(config)
            made.append(Decision(
                d.region, (winner,), answer.rows, answer.reason, q.choice.op, q.region.members, q.sizes, config
            ))  # fmt: skip
            logger("autotune").info("%s: %s: %s", d.region, winner, answer.reason)
        elif options.autotune == "off":
            made.append(d)
        else:
            reason = f"{d.reason}; not measured: {answer}"
            made.append(replace(d, reason=reason, op=q.choice.op, sizes=q.sizes))
    return replace(program, nodes=tuple(winners.get(n.name, n) for n in program.nodes)), tuple(made)
