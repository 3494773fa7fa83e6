"""How choices and launches are decided, with the later stages at hand: the compiler ring's side of the seam
``pipeline.CHOOSE``. Choices come first; then, once kernels are scheduled, how each is launched.

``autotune`` may not import the stages that come after it: it is given ``build``, which compiles a candidate's program,
and ``meanwhile``, which compiles what no choice touches. Both go through the pipeline's driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .autotune import Offer, Tuner, Work, decide, decide_launches, new_work
from .background import Background, TunedOrFallback
from .ir.loops import LoopNest
from .ir.program import Program, Variants, kernel_variants
from .options import Options
from .pipeline import CHOOSE, Chosen, Stages, TargetOf, advance, targets
from .schedule import configs
from .timeline import Event

if TYPE_CHECKING:
    from .autotune.pool import Pool
    from .generate.kernel import Kernel

BY_VALUES = "it reads or writes at places that a tensor names: how long that takes depends on its values"


def choose(s: Stages) -> Chosen:
    """``s.program`` with each choice's winner in its place, and the decisions, as ``options.autotune`` says."""
    from .lower.custom_ops import input_makers

    assert s.program is not None
    with _how(s, input_makers()) as work:
        program = s.tuning.asked if s.tuning is not None and _measures(s.options) else asked(s)
        if s.tuning is None:
            work.meanwhile = partial(_build_the_rest, s)
        return decide(program, work)


def launches(s: Stages) -> Chosen:
    """``s.scheduled`` with its kernels launched as is known or measured to be best, and all decisions. With
    ``autotune="off"`` and nothing pinned it is as it was, and nothing is looked at."""
    assert s.scheduled is not None
    off = s.options.autotune == "off" and not s.options.lookup_table
    offers = [] if s.program is None or off else offered(s, s.scheduled)  # (None: a part of a program)
    if not offers:
        return s.scheduled, s.decisions
    with _how(s, {}) as work:
        return decide_launches(s.scheduled, s.decisions, offers, work)


def offered(s: Stages, program: Program) -> list[Offer]:
    """The kernels on GPUs that might be launched in several ways."""
    found = []
    for node in program.nodes:
        if isinstance(node, Variants) and node.of_kernels:
            about = node.variants[0].kernel, program.buffers, s.target_of(program.buffers[node.outputs[0]].device)
            if about[2].is_gpu and all(isinstance(p, LoopNest) for p in about[0].parts):
                few = {configs.name_of(c): c for c in configs.few(*about)}
                more = {configs.name_of(c): c for c in configs.possible(*about)}
                if s.options.batch_invariant:  # another launch may add up rows in another order
                    few, more = ({k: c for k, c in d.items() if c.reduction == "none"} for d in (few, more))
                why = BY_VALUES if configs.by_values(*about[:2]) else ""
                found.append(Offer(node, {**few, **more, **few}, len(few), configs.bytes_moved(*about[:2]), why))
    return found


# -- in the background ------------------------------------------------------------------------------
@dataclass
class Again:
    """Why a program is compiled once more: its choices, in ``asked``, are measured, for ``background``. (``asked`` was
    made before: its constants must not be allocated while the user may be capturing a CUDA graph.)"""

    asked: Program
    background: Background


def tuned(s: Stages, again: Again, until: str = "wrap") -> Stages:
    """The same graph once more, with what is to be decided measured while ``s`` runs."""
    options = s.options.but(isolate=True)
    same = Stages(s.graph, options, s.target_of, s.program, s.before or s.fused, timeline=s.timeline, tuning=again)
    names = ("autotune", "schedule", "plan", "generate", "wrap")
    return advance(same, names[: names.index(until) + 1], "background")


def _measures(options: Options) -> bool:
    return options.autotune != "off" and options.target is None


@contextmanager
def _how(s: Stages, makers: Mapping[str, Callable[..., Any]]) -> Iterator[Work]:
    """How what ``s`` asks is decided: without measuring; by what is known, while the rest is measured in the
    background; by measuring, within what is left of ``tuning_seconds``, with workers unless it is to be done here."""
    new = partial(new_work, s.options, s.target_of, build, makers)
    if not _measures(s.options):
        yield new()
    elif s.options.autotune == "background" and s.tuning is None:
        together = CHOOSE["together"]
        yield (work := new(known_only=True, store=_store(s.options), together=together))
        if work.left and s.swap is None:
            program, turn = asked(s), together.turn(s.program, s.graph.name, s.options)
            s.swap = lambda call: TunedOrFallback(call, Background(s, lambda b: tuned(s, Again(program, b)), turn))
    else:
        with _measuring(s) as how:
            yield new(together=CHOOSE["together"], **how)


@contextmanager
def _measuring(s: Stages) -> Iterator[dict[str, Any]]:
    from .wrap.zeros import zeros

    store, background = _store(s.options), "" if s.tuning is None else s.tuning.background.name
    track = "background" if background else "main"
    tuner = _tuner(s, store)
    if tuner is not None:
        tuner.deadline -= sum(e.seconds for e in s.timeline if e.name == "autotune" and e.track == track)
        if background:
            s.tuning.background.tuners.append(tuner)
    # Measuring here captures CUDA graphs, which end with it. (In the background nothing is measured here, and graphs
    # that are captured meanwhile are the user's.)
    with nullcontext() if background else zeros.for_a_while():
        try:
            yield {"tuner": tuner, "background": background, "store": store}
        finally:
            if tuner is not None:
                tuner.close()


# -- stages -----------------------------------------------------------------------------------------
def build(program: Program, options: Options) -> Callable[[list], Any]:
    """A small program as a callable: what ``autotune`` measures candidates with. Choices inside a candidate are decided
    by the static rule. Returns at once; kernels compile in the background, the first call waits for them."""
    s = advance(
        _part(program, options, targets(options)), ("fuse", "autotune", "schedule", "plan", "generate", "wrap"), ""
    )
    assert s.call is not None
    return s.call


def generated(program: Program, options: Options, target_of: TargetOf) -> tuple[Program, dict[str, Kernel]]:
    """A small program, scheduled, and its kernels' sources: the part of ``build`` that needs no device."""
    s = advance(_part(program, options, target_of), ("fuse", "autotune", "schedule", "generate"), "")
    assert s.scheduled is not None and s.kernels is not None
    return s.scheduled, s.kernels


def _part(program: Program, options: Options, target_of: TargetOf) -> Stages:
    return Stages(None, options.but(autotune="off", lookup_table=None), target_of, program)


def expect_tuning(options: Options) -> None:
    """Wake the workers, whose imports take seconds, while Dynamo is imported and the graph captured: if it may have
    choices that are to be measured at once, and none are known."""
    if options.autotune == "blocking" and options.isolate and options.target is None:
        store = _store(options)
        if store is None or store.empty():
            _workers(options).wake()


def asked(s: Stages) -> Program:
    """The program as its choices are decided: operands that a product may compute are among the variants and, where
    something is measured, the library's own epilogues."""
    from .autotune.activation import with_activations
    from .autotune.prologue import with_prologues

    assert s.program is not None
    program = with_prologues(s.program, s.options.autotune != "off" or s.options.lookup_table is not None)
    return with_activations(program) if _measures(s.options) else program


def _build_the_rest(s: Stages, touched: set[str]) -> None:
    """While choices are being measured: build the kernels that no choice touches."""
    from .wrap.build import start_building

    start = time.perf_counter()
    before = s.before
    assert before is not None
    ours = {g.name for g in before.groups if touched.isdisjoint(g.members)}
    nodes = tuple(n for n in before.program.nodes if isinstance(n, LoopNest) and n.name in ours)
    combined = tuple(names for names in before.combined if ours.issuperset(names))
    fused = replace(before, program=replace(before.program, nodes=nodes), combined=combined)
    options = s.options.but(verify=False)  # a part of a program, which reads what no node in it writes
    rest = advance(Stages(None, options, s.target_of, fused=fused), ("schedule", "generate"), "")
    assert rest.scheduled is not None and rest.kernels is not None
    s.names = {n.outputs: n.name for n in kernel_variants(rest.scheduled.nodes)}
    s.built = dict(start_building(rest.scheduled, rest.kernels, s.options))
    if s.built:
        s.timeline.append(Event("kernels without a choice", start, time.perf_counter() - start, "compile"))


def _store(options: Options) -> Any:
    from .autotune.store import keeps_decisions, store

    return store() if keeps_decisions(options) else None


def _tuner(s: Stages, store: Any) -> Tuner | None:
    """What sends candidates to worker processes; None where everything is measured in this one."""
    if not s.options.isolate:
        return None
    assert s.program is not None
    kinds = {b.device.type: b.device for b in s.program.buffers.values() if b.device.type != "cpu"}
    found = {kind: asdict(s.target_of(device)) for kind, device in kinds.items()}
    return Tuner(_workers(s.options), s.options, found, s.timeline, store)


def _workers(options: Options) -> Pool:
    """The processes that tune, for the whole of this one."""
    from .autotune.pool import pool

    workers = pool(options.compile_threads)
    workers.idle_seconds = options.tuning_idle_seconds
    return workers
