"""How choices are decided, with the later stages at hand: the compiler ring's side of the seam ``pipeline.CHOOSE``.

``autotune`` may not import the stages that come after it: it is given ``build``, which compiles a candidate's program,
and ``meanwhile``, which compiles what no choice touches. Both go through the pipeline's driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .autotune import Tuner, Tuning, decide
from .background import Background, TunedOrFallback
from .ir.program import Program, kernel_variants
from .options import Options
from .pipeline import Chosen, Stages, TargetOf, advance, targets
from .timeline import Event

if TYPE_CHECKING:
    from .autotune.pool import Pool
    from .generate.kernel import Kernel


def choose(s: Stages) -> Chosen:
    """``s.program`` with each choice's winner in its place, and the decisions, as ``options.autotune`` says."""
    assert s.program is not None
    options = s.options
    if options.autotune == "off" or options.target is not None:
        return _decide(s, s.program, Tuning())
    store = _store(options)
    if options.autotune == "background":  # what is known already is used; the rest is measured while this runs
        asked, tuning = _asked(s), Tuning(known_only=True, store=store)
        chosen = _decide(s, asked, tuning)
        if tuning.left:
            s.swap = lambda call: TunedOrFallback(call, Background(s, lambda background: tuned(s, asked, background)))
        return chosen
    tuner = _tuner(s, store)
    try:
        return _decide(s, _asked(s), Tuning(tuner, store=store, meanwhile=lambda touched: _build_the_rest(s, touched)))
    finally:
        if tuner is not None:
            tuner.close()


def tuned(s: Stages, asked: Program, background: Background) -> Stages:
    """The same graph once more, with its choices measured while ``s`` runs. (``asked`` was made before: its constants
    must not be allocated while the user may be capturing a CUDA graph.)"""
    store = _store(s.options)

    def measured(again: Stages) -> Chosen:
        background.tuner = _tuner(again, store)
        assert background.tuner is not None
        try:
            return _decide(again, asked, Tuning(background.tuner, background=True, store=store))
        finally:
            background.tuner.close()

    options = s.options.but(isolate=True)
    again = Stages(s.graph, options, s.target_of, s.program, s.before, timeline=s.timeline, choose=measured)
    return advance(again, ("autotune", "schedule", "plan", "generate", "wrap"), "background")


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
    def statically(s: Stages) -> Chosen:
        return decide(program, options.but(autotune="off"), target_of, build, {})

    return Stages(None, options, target_of, program, choose=statically)


def expect_tuning(options: Options) -> None:
    """Wake the workers, whose imports take seconds, while Dynamo is imported and the graph captured: if it may have
    choices that are to be measured at once, and none are known."""
    if options.autotune == "blocking" and options.isolate and options.target is None:
        store = _store(options)
        if store is None or store.empty():
            _workers(options).wake()


def _decide(s: Stages, program: Program, tuning: Tuning) -> Chosen:
    """``decide``, which waits for workers. Measuring here captures CUDA graphs, which end with it. (In the background
    nothing is measured here, and graphs that are captured meanwhile are the user's.)"""
    from .lower.custom_ops import input_makers
    from .wrap.zeros import zeros

    with nullcontext() if tuning.background else zeros.for_a_while():
        return decide(program, s.options, s.target_of, build, input_makers(), tuning)


def _asked(s: Stages) -> Program:
    """The program as its choices are measured: the library's own epilogues are among the variants."""
    from .autotune.activation import with_activations

    assert s.program is not None
    return with_activations(s.program)


def _build_the_rest(s: Stages, touched: set[str]) -> None:
    """While choices are being measured: build the kernels that no choice touches."""
    from .ir.loops import LoopNest
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
    from .autotune.store import store

    return store() if options.keeps_decisions() else None


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
