"""The stages in order, in one driver that can start and stop at any of them.

    capture -> lower -> fuse -> autotune -> schedule -> plan -> generate -> wrap

PyTorch captures, and calls ``run`` with each graph: so ``STAGES`` begins with ``lower``.

``run`` takes one captured graph through them; ``advance`` is the driver, which tuning uses as well (``tuning.py``), for
parts of a program and for the same program again. ``dynamo_backend`` is the entry point for
``torch.compile(model, backend="reflib")``; ``reflib.compile`` is in ``api.py``. What kind of wrapper, which target,
whether to measure: decided here, once, from the Options, and passed down as values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch

from .errors import ReflibError
from .logs import Event
from .logs import get as logger
from .options import Options
from .seams import Seam
from .target import Target, device_target, parse_target

if TYPE_CHECKING:
    from .capture import Graph
    from .fuse import Fused
    from .generate.kernel import Kernel
    from .ir.program import Program
    from .plan import Plan

TargetOf = Callable[[torch.device], Target]
Call = Callable[[list], Any]
Chosen = tuple["Program", tuple[Any, ...]]  # a program without choices, and the decisions

# Replaces each Choice of ``s.program`` by its best variant: (Stages) -> Chosen, under "choose". It may set ``s.swap``,
# ``s.names`` and ``s.built``. Programs without choices need none; the core's rules make no Choice. Under "launches":
# ``s.scheduled`` launched as is best, and all decisions; none: as heuristics say. Under "order": ``s.scheduled`` in an
# order that needs less memory; under "fused": ``s.fused`` so grouped. Under "plan": it and its plan. Under
# "together": for several processes.
CHOOSE = Seam("pipeline.CHOOSE")
# Around compiling Dynamo's graphs: (compile, Backend, GraphModule, inputs) -> callable; compile takes the last three.
COMPILE = Seam("pipeline.COMPILE")
# Around the stages of a graph: (advance, Stages, names of stages) -> Stages.
RUN = Seam("pipeline.RUN")
# Tools that are asked for what to keep of a compilation (``observed.py`` says how). The core has none.
OBSERVE = Seam("pipeline.OBSERVE")
# Rewrites of Dynamo's or torch.export's graph, before autograd sees it: (GraphModule, Options) -> GraphModule, the one
# given or another. The core has none.
CAPTURED = Seam("pipeline.CAPTURED")
# Rewrites of a functional ATen graph, of inference or forward and backward in one, before it is cut or lowered:
# (GraphModule, Options, is the target a GPU?) -> GraphModule. The core has none.
REWRITES = Seam("pipeline.REWRITES")
# What goes around a callable that Dynamo or autograd calls: (callable, Dynamo's GraphModule or the Stages of one of its
# graphs, inputs, Options) -> callable.
AROUND = Seam("pipeline.AROUND")
# Checks of a program after each stage, under ``Options(verify=True)``: (Program) -> None, raising VerifyError.
VERIFY = Seam("pipeline.VERIFY")


@dataclass
class Stages:
    """All that one program went through. A stage that was not reached is None."""

    graph: Any  # as captured; None for a part of a program
    options: Options
    target_of: TargetOf  # what to generate for each device
    program: Program | None = None
    fused: Fused | None = None
    inlined: Program | None = None  # with the winners of its choices, if it had any; ``fused`` is of this then
    before: Fused | None = None  # the first fusion, with choices in it, if something is measured meanwhile
    once: bool = False  # fused once: when its choices are decided
    scheduled: Program | None = None
    decisions: tuple[Any, ...] = ()
    plan: Plan | None = None
    kernels: dict[str, Kernel] | None = None
    wrapper: str | None = None
    call: Call | None = None
    timeline: list[Event] = field(default_factory=list)  # what ran when
    tuning: Any = None  # what CHOOSE needs to know, where a program is compiled again
    swap: Callable[[Call], Call] | None = None  # around ``call``: replaces it by a tuned one while the program runs
    names: dict[tuple[str, ...], str] = field(default_factory=dict)  # of kernels built while choices were measured
    built: dict[Kernel, Any] = field(default_factory=dict)


def run(
    graph: Graph, options: Options, until: str = "wrap", program: Program | None = None,
    target_of: TargetOf | None = None,
) -> Stages:  # fmt: skip
    """Take ``graph`` through the stages up to and including ``until``.

    With ``options.target`` set the code is generated for that target and nothing is built. ``program``: what ``lower``
    made of the graph. ``target_of``: what to generate for each device (default: as the options and this machine say).
    Raises a ReflibError; a bug in a rule is a LoweringError naming the op and the user's line.
    """
    if until not in STAGES:
        raise ReflibError(f"no stage {until!r:.200}; the stages are {', '.join(STAGES)}")
    s = Stages(graph, options, target_of or targets(options), program)
    wanted = STAGES[program is not None : STAGES.index(until) + 1]
    s.once = options.autotune == "off" and "autotune" in wanted
    through = reduce(lambda inner, around: partial(around, inner), RUN.values(), advance)
    through(s, [stage for stage in wanted if stage != "wrap" or options.target is None])
    if s.swap is not None and s.call is not None:
        s.call = s.swap(s.call)
    return s


def advance(s: Stages, stages: Iterable[str], track: str = "main") -> Stages:
    """The driver: ``s`` through these stages, in their order. ``track``: of the timeline, "" for none."""
    for stage in stages:
        start = time.perf_counter()
        _STAGE[stage](s)
        if track:
            record(s, stage, start, track)
    return s


def record(s: Stages, stage: str, start: float, track: str = "main") -> None:
    """``stage``, which began at ``start``, has ended: into the timeline and the log."""
    seconds = time.perf_counter() - start
    s.timeline.append(Event(stage, start, seconds, track=track))
    logger("compile").info("%s: %s took %.1f ms", s.graph.name, stage, seconds * 1e3)


def targets(options: Options) -> TargetOf:
    """The target that the options name, for every device; else the device itself. Where nothing prints code for CPUs,
    a GPU's code is generated for them, for Triton's interpreter (TRITON_INTERPRET=1)."""
    from .generate import PRINTERS

    if options.target is not None:
        fixed = parse_target(options.target)
        return lambda device: fixed
    interpreted = {} if "cpu" in PRINTERS else {"cpu": parse_target("sm_90")}
    return lambda device: interpreted.get(device.type) or device_target(device.type, device.index or 0)


def before_autograd(module: torch.fx.GraphModule, options: Options) -> torch.fx.GraphModule:
    """``module`` after every rewrite for which autograd comes later; it may be changed itself."""
    for rewrite in CAPTURED.values():
        module = rewrite(module, options)
    return module


def rewritten(module: torch.fx.GraphModule, options: Options, target_of: TargetOf) -> torch.fx.GraphModule:
    """``module`` after every rewrite; it is not changed itself."""
    values = (n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder")
    gpu = any(target_of(v.device).is_gpu for v in values if isinstance(v, torch.Tensor) and v.dim())
    for rewrite in REWRITES.values():
        module = rewrite(module, options, gpu)
    return module


# -- the stages -------------------------------------------------------------------------------------
def _lower(s: Stages) -> None:
    from .lower import lower

    graph = s.graph
    if graph.name == "inference":
        graph = replace(graph, module=rewritten(graph.module, s.options, s.target_of))
    s.program = lower(graph, s.options)
    if s.options.target is not None:
        s.program = _retarget(s.program, parse_target(s.options.target))
    _verify(s, s.program)


def _fuse(s: Stages) -> None:
    from .fuse import fuse
    from .ir.program import Choice

    program = s.inlined or s.program
    assert program is not None
    if s.once and s.inlined is None and any(isinstance(n, Choice) for n in program.nodes):
        return
    target = s.target_of(main_device(program))
    s.fused = fuse(program, s.options, target)
    if "fused" in CHOOSE:
        s.fused = CHOOSE["fused"](s, target)
    _verify(s, s.fused.program)


def _autotune(s: Stages) -> None:
    """Decide the choices, inline the winners, fuse what that gives."""
    from .ir.program import Choice, walk

    assert s.program is not None
    if any(isinstance(n, Choice) for n in walk(s.program.nodes)):
        s.before = s.fused
        s.inlined, s.decisions = CHOOSE["choose"](s)
        _verify(s, s.inlined)
        _fuse(s)


def _schedule(s: Stages) -> None:
    from .schedule import schedule

    assert s.fused is not None
    s.scheduled, kernels = schedule(s.fused, s.options, s.target_of, s.names)
    s.decisions += kernels
    if "launches" in CHOOSE:
        s.scheduled, s.decisions = CHOOSE["launches"](s)
    _verify(s, s.scheduled)


def _plan(s: Stages) -> None:
    from .plan import plan

    assert s.scheduled is not None
    if "order" in CHOOSE:
        s.scheduled = CHOOSE["order"](s)
        _verify(s, s.scheduled)
    own = "plan" in CHOOSE
    s.scheduled, s.plan = CHOOSE["plan"](s) if own else (s.scheduled, plan(s.scheduled, s.options))


def _generate(s: Stages) -> None:
    from .generate import generate

    assert s.scheduled is not None
    s.kernels = generate(s.scheduled, s.target_of)


def _wrap(s: Stages) -> None:
    from .wrap import wrap

    assert s.scheduled is not None and s.plan is not None and s.kernels is not None
    s.wrapper, s.call = wrap(s.scheduled, s.plan, s.kernels, s.options, built=s.built)


_RUN = (_lower, _fuse, _autotune, _schedule, _plan, _generate, _wrap)
_STAGE: dict[str, Callable[[Stages], None]] = {stage.__name__[1:]: stage for stage in _RUN}
STAGES = tuple(_STAGE)


def _verify(s: Stages, program: Program) -> None:
    if s.options.verify:
        for check in VERIFY.values():
            check(program)


def _retarget(program: Program, target: Target) -> Program:
    """The same program with its tensors on the target's kind of device: for looking at, not for running."""
    device = torch.device("cuda", 0) if target.is_gpu else torch.device("cpu")

    def moved(n: Any) -> Any:
        variants = tuple(
            replace(v, buffers=tuple(replace(b, device=device) for b in v.buffers), nodes=tuple(map(moved, v.nodes)))
            for v in getattr(n, "variants", ())
        )
        return replace(n, variants=variants) if variants else n

    buffers = {name: replace(b, device=device) for name, b in program.buffers.items()}
    return replace(program, buffers=buffers, nodes=tuple(map(moved, program.nodes)))


def main_device(program: Program) -> torch.device:
    """The device most kernels of a program run on: a GPU if there is one in it."""
    gpus = {b.device for b in program.buffers.values() if b.device.type != "cpu"}
    return min(gpus, key=str, default=torch.device("cpu"))


# -- entry points -----------------------------------------------------------------------------------
class Backend:
    """A ``torch.compile`` backend with its options. ``on_stages`` is called with every graph's Stages."""

    def __init__(self, options: Options, on_stages: Callable[[Stages], Any] = lambda s: None):
        self.options = options
        self.on_stages = on_stages

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compile = reduce(lambda inner, around: partial(around, inner), COMPILE.values(), Backend._module)
        return compile(self, module, inputs)

    def _module(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from .capture import dynamo_graph_to_aten
        from .lower import decompositions

        module = before_autograd(module, self.options)
        rewrite = partial(rewritten, options=self.options, target_of=targets(self.options))
        call = dynamo_graph_to_aten(module, inputs, decompositions(self.options), self._compile, rewrite)
        return self.around(call, module, inputs)

    def _compile(self, graph: Graph, inputs: Sequence[Any]) -> Callable[[list], Any]:
        stages = run(graph, self.options)
        self.on_stages(stages)
        return self.around(stages.call, stages, inputs) if stages.call is not None else eager(graph)

    def around(self, call: Callable[..., Any], what: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return reduce(lambda inner, around: around(inner, what, inputs, self.options), AROUND.values(), call)


def eager(graph: Graph) -> Callable[[list], Any]:
    """With a ``target`` nothing is built: the captured graph itself runs, so that what surrounds it can go on."""
    return lambda args: torch.fx.Interpreter(graph.module).boxed_run(args)


def dynamo_backend(module: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The ``torch_dynamo_backends`` entry point: ``torch.compile(model, backend="reflib", options=..., mode=...)``."""
    options = Options.make(kwargs.pop("options", None), kwargs.pop("mode", None), **kwargs)
    return Backend(options)(module, inputs)
