"""reflib: the readable Inductor. A small deep-learning compiler, and the notebooks that teach it.

>>> import torch, reflib
>>> f = torch.compile(model, backend="reflib")       # doctest: +SKIP

``reflib/pipeline.py`` has the stages in order. Everything here is imported when first used, so that
``import reflib`` costs next to nothing.
"""

from typing import TYPE_CHECKING, Any

from . import plugins as plugins  # fills the core's seams, by name; imports nothing else

__version__ = "0.1.0"

_EXPORTS = {
    "ReflibError": "errors",
    "OptionError": "errors",
    "PackageError": "errors",
    "RegistrationError": "errors",
    "Options": "options",
    "compile": "api",  # not compile.py: importing a submodule would shadow the function
    "explain": "observe",
    "register_custom_op_autotuning": "lower.custom_ops",
    "CustomOpConfig": "lower.custom_ops",
    "BatchVariantWarning": "lower.one_order",
    "tuning_progress": "background",
    "wait_for_tuning": "background",
    "aot_compile": "aot",
    "load": "package.load",
    "load_models": "package.load",
    "join_packages": "package.join",
}

if TYPE_CHECKING:
    from .aot import aot_compile
    from .api import compile
    from .background import tuning_progress, wait_for_tuning
    from .errors import OptionError, PackageError, ReflibError, RegistrationError
    from .lower.custom_ops import CustomOpConfig, register_custom_op_autotuning
    from .lower.one_order import BatchVariantWarning
    from .observe.explain import explain
    from .options import Options
    from .package.join import join_packages
    from .package.load import load, load_models

__all__ = [
    "BatchVariantWarning", "CustomOpConfig", "OptionError", "Options", "PackageError", "ReflibError",
    "RegistrationError", "aot_compile", "compile", "explain", "join_packages", "load", "load_models",
    "register_custom_op_autotuning", "tuning_progress", "wait_for_tuning",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _EXPORTS:
        return getattr(import_module("." + _EXPORTS[name], __name__), name)
    raise AttributeError(f"module 'reflib' has no attribute {name!r}")
