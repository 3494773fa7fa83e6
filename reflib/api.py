"""``reflib.compile``: the pipeline for users, with a faster way to call what it compiled, and for exported programs.

(Not compile.py: a module of that name would shadow the function.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .errors import OptionError
from .options import Options
from .pipeline import Backend, Stages, before_autograd, eager, run
from .target import parse_target

if TYPE_CHECKING:
    from .wrap.convention import Convention


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
    from .background import tunings
    from .fast_path import add_fast_path

    begin(opts)
    tuned: list[Any] = []
    backend = Backend(opts, lambda s: tuned.extend(filter(None, [getattr(s.call, "background", None)])))
    compiled = add_fast_path(torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph), backend)
    tunings[compiled] = tuned
    return compiled


def compile_exported(program: Any, options: Options) -> Callable[..., Any]:
    """An ExportedProgram as a plain callable of its own arguments, parameters held inside."""
    from .wrap.exported import ExportedCallable, expect_apart, names_of, weights_of

    stages, convention, program = exported_stages(program, options)
    plain: Any = eager(stages.graph) if stages.call is None else stages.call
    call: Any = plain if stages.call is None else Backend(options).around(plain, stages, ())
    weights = weights_of(program)
    assert stages.program is not None
    expect_apart(convention, stages.program, weights)
    graphed: tuple[Any, ...] = ()
    if hasattr(call, "unchecked"):  # a ``cuda_graphs.Graphed``
        call.unchecked = frozenset(i for i, name in enumerate(convention.inputs) if not name)
        graphed = (lambda: call.recorded), call
    return ExportedCallable(convention, weights, plain if graphed else call, names_of(program), *graphed)


def exported_stages(program: Any, options: Options) -> tuple[Stages, Convention, Any]:
    """(its stages, how it is called, the program that was compiled: with fewer ops). No Dynamo guards such a call, so
    the wrapper checks what torch.export found out about sizes."""
    from .capture.exported import exported_graph
    from .lower import decompositions
    from .observed import exported as observed_export
    from .wrap.convention import of_exported, without_tokens
    from .wrap.guards import checked

    table, rewrite = decompositions(options), partial(before_autograd, options=options)
    graph, program = exported_graph(program, table, rewrite)
    with observed_export(graph, program, options) as seen:
        lowered = run(graph, options, until="lower")
        assert lowered.program is not None
        plain = without_tokens(program, lowered.program)
        convention = of_exported(program, plain)
        stages = run(graph, options, program=checked(plain, convention))
        stages.timeline[:0] = lowered.timeline
        seen.append(stages)
    return stages, convention, program


def begun(
    compile: Callable[..., Any], backend: Backend, module: torch.fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """``compile``, with what its graph's first call needs started before."""
    if backend.options.target is None:
        begin(backend.options, {t.device.type for t in inputs if isinstance(t, torch.Tensor)})
    with _uncollected(backend.options):
        return compile(backend, module, inputs)


def through(advance: Callable[..., Stages], s: Stages, stages: Sequence[str]) -> Stages:
    """The stages of a graph, backward graphs too, which autograd compiles later. Plugs into ``pipeline.RUN``."""
    with _uncollected(s.options):
        return advance(s, stages)


@contextmanager
def _uncollected(options: Options) -> Iterator[None]:
    """Python collects no cycles meanwhile. Nearly all that a compilation makes lives until its end, and each full
    collection walks torch's modules as well: a quarter of a second, an eighth of GPT-2's compile time. (Tuning takes
    longer, and has tensors of its own.)"""
    pause = options.autotune == "off" and gc.isenabled()
    if pause:
        gc.disable()
    try:
        yield
    finally:
        if pause:
            gc.enable()


def begin(options: Options, devices: Iterable[str] = ()) -> None:
    """Start in the background what the first call on such devices needs, before a graph is captured."""
    from .wrap.build import begin

    for device in devices:
        begin(device)
    if options.autotune == "blocking":
        from .tuning import expect_tuning

        expect_tuning(options)
