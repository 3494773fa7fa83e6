"""The library that registers an op, for the error message of loading a package that calls it.

The dispatcher keeps the file and line of each registration: of ``torch.library.Library(...)`` in Python, of
``TORCH_LIBRARY`` in C++, where the path is text in the compiled library. ``custom_op`` and ``torch.library.define`` go
through torch's own Python; then the module of the function tells, or the place of ``register_fake``. Folders belong to
this machine and are left out.
"""

import ctypes
import mmap
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from .manifest import Library

_REGISTERED = re.compile(r"registered at (.+?):\d+(?= ::|$)", re.M)
_TORCH = Path(torch.__file__).parent
_IN_BETWEEN = (str(_TORCH / "library.py"), str(_TORCH / "_library") + os.sep)  # torch's own, for other callers


def library_of(op: torch._ops.OpOverload, symbol: str = "") -> Library:
    """``symbol``: the C function that is called instead of the op (``Options.c_shims``)."""
    module, file = "", ""
    for source in _sources(op):
        if source.endswith(".py"):
            module = next((n for n, m in _modules() if _said(m, "__file__") == source), "")
        elif Path(source).suffix:  # "<string>" has none, nor has "/dev/null" of a torch without messages
            module, file = _compiled(source)
        if module or file:
            break
    if symbol:
        file = next((Path(p).name for p in _loaded() if _has_function(p, symbol)), file)
    return Library(str(op), module, file, symbol)


def _sources(op: torch._ops.OpOverload) -> list[str]:
    """Files with registrations of the op: the op itself first, its fake implementation last."""
    name, overload = op._schema.name, op._schema.overload_name
    function = getattr(torch._library.custom_ops.OPDEFS.get(name), "_init_fn", None)
    text = torch._C._dispatch_dump(f"{name}.{overload}" if overload else name)
    entry = torch._library.simple_registry.singleton.find(name)
    fake = getattr(entry.fake_impl.kernel, "source", "").rpartition(":")[0]
    module = _said(sys.modules.get(getattr(function, "__module__", "")), "__file__")
    found = dict.fromkeys([module or "", *_REGISTERED.findall(text), fake])
    return [f for f in found if f and not f.startswith(_IN_BETWEEN)]


def _modules() -> list[tuple[str, Any]]:
    """The imported modules that another process can import."""
    return [(name, m) for name, m in [*sys.modules.items()] if name not in ("__main__", "__mp_main__")]


def _compiled(source: str) -> tuple[str, str]:
    """(module to import, file of the library) compiled from the source."""
    for path in _loaded():
        if _has_text(path, source):
            return _package_at(os.path.dirname(path)), Path(path).name
    for name, module in _modules():
        path = _said(module, "__file__") or ""
        if path.endswith((".so", ".pyd")) and not path.startswith(f"{_TORCH}{os.sep}") and _has_text(path, source):
            return name, Path(path).name
    return "", ""


def _package_at(folder: str) -> str:
    """The imported package in this folder: importing it loads its library (as torchvision does)."""
    there = os.path.realpath(folder)

    def lies_there(module: Any) -> bool:
        return any(os.path.realpath(p) == there for p in _said(module, "__path__") or ())

    return next((n for n, m in _modules() if lies_there(m)), "")


def _said(module: Any, name: str) -> Any:
    """An attribute that a module already has: reading it does not import a lazy one."""
    return getattr(module, "__dict__", {}).get(name)


def _loaded() -> list[str]:
    return sorted(map(str, torch.ops.loaded_libraries))


def _has_function(path: str, symbol: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(path), symbol)
    except OSError:  # its file is gone
        return False


def _has_text(path: str, text: str) -> bool:
    """Does the file contain it as a C string?"""
    try:
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(text.encode() + b"\0") >= 0
    except (OSError, ValueError):  # gone; empty
        return False
