"""Where tools watch a compilation: what they are is plugged in, and imported only when one is asked for.

In ``pipeline.OBSERVE``: "repro", around compiling as in ``pipeline.COMPILE`` but with a folder after the inputs, writes
a compilation as a file that repeats it, where ``Options(repro=...)`` or ``REFLIB_REPRO`` names a folder; "failed",
(GraphModule, inputs, Options, the error) -> None, does so where compiling failed; "exported", (Graph, ExportedProgram,
Options, [Stages], error or None) -> None, does both of an exported program. "trace", around compiling too, records how
long it took; "traced", (callable, what as in ``pipeline.AROUND``, Options) -> callable, each of its calls; "logs",
(Stages) -> None, writes what TORCH_LOGS and TORCH_TRACE ask for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import tracing
from .errors import OptionError
from .logs import get as logger
from .pipeline import OBSERVE, Stages

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from .capture import Graph
    from .options import Options
    from .pipeline import Backend


def observed(
    compile: Callable[..., Any], backend: Backend, module: GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """``compile``, watched if that is asked for."""
    folder = backend.options.repro or os.environ.get("REFLIB_REPRO")
    if tracing.folder(backend.options) and "trace" in OBSERVE:
        compile = OBSERVE["trace"](compile)
    try:
        if folder and "repro" in OBSERVE:
            return OBSERVE["repro"](compile, backend, module, inputs, folder)
        return compile(backend, module, inputs)
    except Exception as error:
        if "failed" in OBSERVE:
            try:
                OBSERVE["failed"](module, inputs, backend.options, error)
            except Exception as e:
                logger("repro").warning("no repro was written: %s", e)
        raise


@contextlib.contextmanager
def exported(graph: Graph, program: Any, options: Options) -> Iterator[list[Stages]]:
    """Around compiling an exported program's graph; yields where its Stages go. A repro, if that is asked for or it
    fails."""
    seen: list[Stages] = []
    failure: Exception | None = None
    try:
        yield seen
    except Exception as error:
        failure = error
        raise
    finally:
        if "exported" in OBSERVE and (failure or options.repro or os.environ.get("REFLIB_REPRO")):
            try:
                OBSERVE["exported"](graph, program, options, seen, failure)
            except Exception as e:
                logger("repro").warning("no repro was written: %s", e)


def traced(call: Callable[..., Any], what: Any, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Plugs into ``pipeline.AROUND``: ``call`` itself, unless a trace is wanted. torch's own logs are written here."""
    if isinstance(what, Stages) and "logs" in OBSERVE and _torch_logs():
        OBSERVE["logs"](what)
    if options.target is not None or not tracing.folder(options) or "traced" not in OBSERVE:
        return call
    return OBSERVE["traced"](call, what, options)


def _torch_logs() -> bool:
    """Does TORCH_LOGS or TORCH_TRACE ask for anything?"""
    from torch._logging import _internal as torch_logging

    structured = any(getattr(h, "root_dir", None) for h in torch_logging.trace_log.handlers)  # TORCH_TRACE's
    return structured or bool(torch_logging.log_state.artifact_names)


def folder(value: object, name: str = "repro") -> str:
    """``Options.repro`` that is given. Raises OptionError unless it is the name of a folder."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise OptionError(f"option {name}={value!r:.200}: must be None or the name of a folder")
    return str(value)


def trace_folder(value: object) -> str:
    """``Options.trace`` that is given, in the same way."""
    return folder(value, "trace")
