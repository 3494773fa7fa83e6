"""The stages in order, in one function that can stop after any of them.

    capture -> lower -> fuse -> choose -> plan -> generate -> wrap

``run`` takes one captured graph through them. ``compile`` is the door for users; ``dynamo_backend`` the one for
``torch.compile(model, backend="reflib")``. What kind of wrapper, which target, whether to measure: ``run`` decides it
here, once, from the Options, and passes values down.

(Not compile.py: a module of that name would shadow the function ``reflib.compile``.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .background import Background, Swapping, of_compiled
from .errors import OptionError, ReflibError
from .logs import get as logger
from .options import Options
from .target import Target, device_target, parse_target
from .timeline import Event

if TYPE_CHECKING:
    from .capture import Graph
    from .choose import Tuner, Tuning
    from .choose.pool import Pool
    from .fuse import Fused
    from .generate.kernel import Kernel
    from .ir.program import Program
    from .plan import Plan
    from .wrap.convention import Convention

TargetOf = Callable[[torch.device], Target]
STAGES = ("lower", "fuse", "choose", "plan", "generate", "wrap")


@dataclass
class Stages:
    """All that one graph went through. A stage that was not reached is None. ``timeline``: what ran when."""

    graph: Graph
    options: Options
    program: Program | None = None
    fused: Fused | None = None
    asked: Program | None = None  # as choices are measured: the library's own epilogues are among the alternatives
    inlined: Program | None = None  # after the choices in it, if any, were decided; fused then holds the second fusion
    before: Fused | None = None  # the first fusion, with choices in it; None where there was no choice
    chosen: Program | None = None
    decisions: tuple[Any, ...] = ()
    plan: Plan | None = None
    kernels: dict[tuple[str, int], Kernel] | None = None
    wrapper: str | None = None
    call: Callable[[list], Any] | None = None
    timeline: list[Event] = field(default_factory=list)
    left: bool = False  # whether something is left to be measured while the program runs
    names: dict[tuple[str, ...], str] = field(default_factory=dict)  # of kernels built while choices were measured
    built: dict[Kernel, Any] = field(default_factory=dict)


def run(
    graph: Graph,
    options: Options,
    until: str = "wrap",
    program: Program | None = None,
    target_of: TargetOf | None = None,
) -> Stages:
    """Take ``graph`` through the stages up to and including ``until``.

    With ``options.target`` set the code is generated for that target and nothing is built. ``program``: what ``lower``
    made of the graph. ``target_of``: what to generate for each device (default: as the options and this machine say).
    Raises a ReflibError; a bug in a rule is a LoweringError naming the op and the user's line.
    """
    if until not in STAGES:
        raise ReflibError(f"no stage {until!r}; the stages are {', '.join(STAGES)}")
    s = Stages(graph, options, program)
    target_of = target_of or _target_chooser(options)
    for stage in STAGES[program is not None : STAGES.index(until) + 1]:
        start = time.perf_counter()
        if stage == "wrap" and options.target is not None:
            break
        _STAGE[stage](s, target_of)
        _record(s, stage, start)
    if s.left and s.call is not None:
        s.call = Swapping(s.call, Background(s, lambda background: _tuned(s, target_of, background)))
    return s


def _record(s: Stages, stage: str, start: float, track: str = "main") -> None:
    seconds = time.perf_counter() - start
    s.timeline.append(Event(stage, start, seconds, track=track))
    logger("compile").info("%s: %s took %.1f ms", s.graph.name, stage, seconds * 1e3)


def _target_chooser(options: Options) -> TargetOf:
    if options.target is not None:
        fixed = parse_target(options.target)
        return lambda device: fixed
    return lambda device: device_target(device.type, device.index or 0)


def _lower(s: Stages, target_of: TargetOf) -> None:
    from .lower import lower

    s.program = lower(s.graph, s.options)
    if s.options.target is not None:
        s.program = _retarget(s.program, parse_target(s.options.target))
    _verify(s, s.program)


def _fuse(s: Stages, target_of: TargetOf) -> None:
    from .fuse import fuse

    assert s.program is not None
    s.fused = fuse(s.program, s.options, target_of(_main_device(s.program)))
    _verify(s, s.fused.program)


def _choose(s: Stages, target_of: TargetOf) -> None:
    from .choose import Tuning
    from .choose.activation import with_activations

    options = s.options
    measures = options.autotune != "off" and options.target is None
    if not measures or not _has_choices(s):
        return _decide(s, target_of, Tuning())
    assert s.program is not None
    s.asked = with_activations(s.program)
    store = _store(options)
    if options.autotune == "background":  # what is known already is used; the rest is measured while this runs
        tuning = Tuning(known_only=True, store=store)
        _decide(s, target_of, tuning)
        s.left = tuning.left
    else:
        tuner = _tuner(s, target_of, store)

        def meanwhile(touched: set[str]) -> None:
            _build_the_rest(s, target_of, touched)

        try:
            _decide(s, target_of, Tuning(tuner, store=store, meanwhile=meanwhile))
        finally:
            if tuner is not None:
                tuner.close()


def _has_choices(s: Stages) -> bool:
    from .ir.program import Choice

    return s.program is not None and any(isinstance(n, Choice) for n in s.program.nodes)


def _decide(s: Stages, target_of: TargetOf, tuning: Tuning) -> None:
    """Decide the choices (``decide`` waits for workers), inline the winners, fuse again, choose kernels."""
    from .choose import choose, decide
    from .fuse import fuse
    from .lower.custom_ops import input_makers
    from .wrap.runtime import zeros

    assert s.program is not None and s.fused is not None
    if _has_choices(s):
        s.before = s.fused
        # Measuring here captures graphs, which end with it. (In the background nothing is measured here, and graphs
        # that are captured meanwhile are the user's.)
        with nullcontext() if tuning.background else zeros.for_a_while():
            program = s.asked or s.program
            s.inlined, s.decisions = decide(program, s.options, target_of, build, input_makers(), tuning)
        _verify(s, s.inlined)
        s.fused = fuse(s.inlined, s.options, target_of(_main_device(s.inlined)))
        _verify(s, s.fused.program)
    s.chosen, kernels = choose(s.fused, s.options, target_of, s.names)
    s.decisions += kernels
    _verify(s, s.chosen)


def _store(options: Options) -> Any:
    from .choose.store import store

    return store() if options.keeps_decisions() else None


def _tuner(s: Stages, target_of: TargetOf, store: Any) -> Tuner | None:
    """What sends candidates to worker processes; None where everything is measured in this one."""
    from .choose import Tuner

    options = s.options
    if not options.isolate:
        return None
    assert s.program is not None
    kinds = {b.device.type: b.device for b in s.program.buffers.values() if b.device.type != "cpu"}
    targets = {kind: asdict(target_of(device)) for kind, device in kinds.items()}
    return Tuner(_workers(options), options, targets, s.timeline, store)


def _workers(options: Options) -> Pool:
    """The processes that tune, for the whole of this one."""
    from .choose.pool import pool

    workers = pool(options.compile_threads)
    workers.idle_seconds = options.tuning_idle_seconds
    return workers


def expect_tuning(options: Options) -> None:
    """Wake the workers, whose imports take seconds, while Dynamo is imported and the graph captured: if it may have
    choices that are to be measured at once, and none are known."""
    if options.autotune == "blocking" and options.isolate and options.target is None:
        store = _store(options)
        if store is None or store.empty():
            _workers(options).wake()


def _build_the_rest(s: Stages, target_of: TargetOf, touched: set[str]) -> None:
    """While choices are being measured: build the kernels that no choice has to do with."""
    from .choose import choose
    from .choose.choose import writes_of
    from .generate import generate
    from .ir.loops import Loops
    from .ir.program import regions
    from .wrap.wrap import start_building

    start = time.perf_counter()
    assert s.before is not None
    ours = {g.name for g in s.before.groups if touched.isdisjoint(g.members)}
    nodes = tuple(n for n in s.before.program.nodes if isinstance(n, Loops) and n.name in ours)
    combined = tuple(names for names in s.before.combined if ours.issuperset(names))
    free = replace(s.before, program=replace(s.before.program, nodes=nodes), combined=combined)
    chosen, _ = choose(free, s.options, target_of)
    s.names = {writes_of(r.arms[0].parts): r.name for r in regions(chosen.nodes)}
    s.built = dict(start_building(chosen, generate(chosen, target_of), s.options))
    if s.built:
        s.timeline.append(Event("kernels without a choice", start, time.perf_counter() - start, "compile"))


def _tuned(s: Stages, target_of: TargetOf, background: Background) -> Stages:
    """The same graph once more, with its choices measured while ``s`` runs."""
    from .choose import Tuning

    again = Stages(s.graph, s.options.but(isolate=True), s.program, s.before, timeline=s.timeline, asked=s.asked)
    start = time.perf_counter()
    store = _store(s.options)
    background.tuner = _tuner(again, target_of, store)
    assert background.tuner is not None
    try:
        _decide(again, target_of, Tuning(background.tuner, background=True, store=store))
    finally:
        background.tuner.close()
    _record(again, "choose", start, "background")
    for stage in ("plan", "generate", "wrap"):
        start = time.perf_counter()
        _STAGE[stage](again, target_of)
        _record(again, stage, start, "background")
    return again


def build(program: Program, options: Options) -> Callable[[list], Any]:
    """The later stages for a small program: what ``choose`` measures candidates with. Choices inside a candidate are
    decided by the static rule. Returns at once; kernels compile in the background, the first call waits for them."""
    from .plan import plan
    from .wrap import wrap

    chosen, kernels = generated(program, options, _target_chooser(options))
    return wrap(chosen, plan(chosen, options), kernels, options)[1]


def generated(
    program: Program, options: Options, target_of: TargetOf
) -> tuple[Program, dict[tuple[str, int], Kernel]]:
    """A small program's regions, and their kernels' sources: the part of ``build`` that needs no device."""
    from .choose import choose, decide
    from .fuse import fuse
    from .generate import generate

    program, _ = decide(program, options.but(autotune="off"), target_of, build, {})
    fused = fuse(program, options, target_of(_main_device(program)))
    chosen, _ = choose(fused, options, target_of)
    return chosen, generate(chosen, target_of)


def _plan(s: Stages, target_of: TargetOf) -> None:
    from .plan import plan

    assert s.chosen is not None
    s.plan = plan(s.chosen, s.options)


def _generate(s: Stages, target_of: TargetOf) -> None:
    from .generate import generate

    assert s.chosen is not None
    s.kernels = generate(s.chosen, target_of)


def _wrap(s: Stages, target_of: TargetOf) -> None:
    from .wrap import wrap

    assert s.chosen is not None and s.plan is not None and s.kernels is not None
    s.wrapper, s.call = wrap(s.chosen, s.plan, s.kernels, s.options, built=s.built)


_STAGE = {"lower": _lower, "fuse": _fuse, "choose": _choose, "plan": _plan, "generate": _generate, "wrap": _wrap}


def _verify(s: Stages, program: Program) -> None:
    if s.options.verify:
        from .ir.verify import verify

        verify(program)


def _retarget(program: Program, target: Target) -> Program:
    """The same program with its tensors on the target's kind of device: for looking at, not for running."""
    device = torch.device("cuda", 0) if target.is_gpu else torch.device("cpu")

    def moved(n: Any) -> Any:
        ways = tuple(
            replace(a, buffers=tuple(replace(b, device=device) for b in a.buffers), nodes=tuple(map(moved, a.nodes)))
            for a in getattr(n, "alternatives", ())
        )
        return replace(n, alternatives=ways) if ways else n

    buffers = {name: replace(b, device=device) for name, b in program.buffers.items()}
    return replace(program, buffers=buffers, nodes=tuple(map(moved, program.nodes)))


def _main_device(program: Program) -> torch.device:
    """The device most kernels of a program run on: a GPU if there is one in it."""
    devices = {b.device for b in program.buffers.values()}
    gpus = sorted((d for d in devices if d.type != "cpu"), key=str)
    return gpus[0] if gpus else torch.device("cpu")


# -- the doors --------------------------------------------------------------------------------------
class Backend:
    """A ``torch.compile`` backend with its options. ``on_stages`` is told of every graph (``explain`` listens)."""

    def __init__(self, options: Options, on_stages: Callable[[Stages], None] | None = None):
        self.options = options
        self.on_stages = on_stages
        self.tunings: list[Background] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from .capture import dynamo_graph_to_aten
        from .lower import decompositions
        from .wrap import begin

        if self.options.target is None:
            for device in {t.device.type for t in inputs if isinstance(t, torch.Tensor)}:
                begin(device)
            expect_tuning(self.options)
        return dynamo_graph_to_aten(module, inputs, decompositions(), self._compile)

    def _compile(self, graph: Graph, inputs: Sequence[Any]) -> Callable[[list], Any]:
        stages = run(graph, self.options)
        if self.on_stages is not None:
            self.on_stages(stages)
        if (background := getattr(stages.call, "background", None)) is not None:
            self.tunings.append(background)
        return stages.call if stages.call is not None else _eager(graph)


def _eager(graph: Graph) -> Callable[[list], Any]:
    """With a ``target`` nothing is built: the captured graph itself runs, so that what surrounds it can go on."""

    def call(args: list) -> Any:
        values = list(args)
        args.clear()
        return torch.fx.Interpreter(graph.module).boxed_run(values)

    return call


def dynamo_backend(module: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The ``torch_dynamo_backends`` entry point: ``torch.compile(model, backend="reflib", options=..., mode=...)``."""
    options = Options.make(kwargs.pop("options", None), kwargs.pop("mode", None), **kwargs)
    return Backend(options)(module, inputs)


def compile(
    model: Any, dynamic: bool | None = None, fullgraph: bool = False, mode: str | None = None, **options: Any
) -> Callable[..., Any]:
    """Compile a function, a module or an ExportedProgram.

    model: a callable; or a ``torch.export.ExportedProgram``, which is compiled now and called without Dynamo, for
        inference: its results carry no gradients.
    dynamic, fullgraph, mode: as in ``torch.compile`` (dynamic=None: sizes become symbols when they change).
    options: fields of :class:`reflib.Options`.

    Returns a callable. Raises OptionError for a bad option, before anything is captured. (Through ``torch.compile``
    Dynamo wraps what a backend raises in its own BackendCompilerFailed.)
    """
    opts = Options.make(options, mode)
    if opts.target is not None:
        parse_target(opts.target)
    if isinstance(model, torch.export.ExportedProgram):
        if dynamic is not None:
            raise OptionError(
                "dynamic= has no effect on an ExportedProgram: its dynamic shapes were fixed by torch.export"
            )
        return compile_exported(model, opts)
    from .capture.door import door

    expect_tuning(opts)
    backend = Backend(opts)
    compiled = door(torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph), backend)
    of_compiled[compiled] = backend.tunings
    return compiled


def compile_exported(program: Any, options: Options) -> Callable[..., Any]:
    """An ExportedProgram as a plain callable of its own arguments, parameters held inside."""
    from .wrap.exported import ExportedCallable, names_of, weights_of

    stages, convention, program = exported_stages(program, options)
    call = stages.call or _eager(stages.graph)
    return ExportedCallable(convention, weights_of(program), call, names_of(program))


def exported_stages(program: Any, options: Options) -> tuple[Stages, Convention, Any]:
    """(its stages, how it is called, the program that was compiled: with fewer ops). No Dynamo guards such a call, so
    the wrapper checks what torch.export found out about sizes."""
    from .capture import exported_graph
    from .lower import decompositions
    from .wrap.convention import of_exported, without_tokens
    from .wrap.guards import checked

    graph, program = exported_graph(program, decompositions())
    lowered = run(graph, options, until="lower")
    assert lowered.program is not None
    plain = without_tokens(program, lowered.program)
    convention = of_exported(program, plain)
    stages = run(graph, options, program=checked(plain, convention))
    stages.timeline[:0] = lowered.timeline
    return stages, convention, program
