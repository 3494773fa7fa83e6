"""reflib: the readable Inductor. A small deep-learning compiler, and the notebooks that teach it.

>>> import torch, reflib
>>> f = torch.compile(model, backend="reflib")       # doctest: +SKIP

See ``reflib.compile`` for the stages in order. Everything here is imported when first used, so that
``import reflib`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "ReflibError": "errors",
    "OptionError": "errors",
    "PackageError": "errors",
    "Options": "options",
    "compile": "pipeline",  # not compile.py: importing a submodule would shadow the function
    "explain": "observe",
}

if TYPE_CHECKING:
    from .errors import OptionError, PackageError, ReflibError
    from .observe.explain import explain
    from .options import Options
    from .pipeline import compile

__all__ = ["OptionError", "Options", "PackageError", "ReflibError", "compile", "explain"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _EXPORTS:
        return getattr(import_module("." + _EXPORTS[name], __name__), name)
    raise AttributeError(f"module 'reflib' has no attribute {name!r}")
