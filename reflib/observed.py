"""Where tools watch a compilation: what they are is plugged in, and imported only when one is asked for.

``REPRO`` writes a compilation as a file that repeats it: into the folder of ``Options(repro=...)`` or ``REFLIB_REPRO``,
and into the cache's where compiling failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import OptionError
from .logs import get as logger
from .seams import Seam

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from .pipeline import Backend

# "observed": around compiling, as in pipeline.COMPILE, with a folder after it; "failed": (GraphModule, inputs, Options,
# the error) -> None. None: nothing is written.
REPRO = Seam("observed.REPRO")


def observed(
    compile: Callable[..., Any], backend: Backend, module: GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """``compile``, watched if that is asked for."""
    folder = backend.options.repro or os.environ.get("REFLIB_REPRO")
    try:
        if folder and "observed" in REPRO:
            return REPRO["observed"](compile, backend, module, inputs, folder)
        return compile(backend, module, inputs)
    except Exception as error:
        if "failed" in REPRO:
            try:
                REPRO["failed"](module, inputs, backend.options, error)
            except Exception as e:
                logger("repro").warning("no repro was written: %s", e)
        raise


def folder(value: object) -> str:
    """``Options.repro`` that is given. Raises OptionError unless it is the name of a folder."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise OptionError(f"option repro={value!r}: must be None or the name of a folder")
    return str(value)
