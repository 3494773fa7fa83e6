"""Where tools watch a compilation: what they are is plugged in, and imported only when one is asked for.

In ``pipeline.OBSERVE``: "repro", around compiling as in ``pipeline.COMPILE`` but with a folder after the inputs, writes
a compilation as a file that repeats it, where ``Options(repro=...)`` or ``REFLIB_REPRO`` names a folder; "failed",
(GraphModule, inputs, Options, the error) -> None, does so where compiling failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import OptionError
from .logs import get as logger
from .pipeline import OBSERVE

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from .pipeline import Backend


def observed(
    compile: Callable[..., Any], backend: Backend, module: GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """``compile``, watched if that is asked for."""
    folder = backend.options.repro or os.environ.get("REFLIB_REPRO")
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


def folder(value: object) -> str:
    """``Options.repro`` that is given. Raises OptionError unless it is the name of a folder."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise OptionError(f"option repro={value!r}: must be None or the name of a folder")
    return str(value)
