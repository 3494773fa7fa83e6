"""Can another process measure this request? Only what it can have: plain data, and ops that it can import.

A worker has PyTorch's ops, and those of modules it can import: an op that a library registers is found by the module of
its function; one that is defined in a notebook's cell or in a function's body exists here only, unless the user names a
file that registers it (``Options.tuning_imports``).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.weak import WeakTensorKeyDictionary

from ..options import Options
from .request import Request

LARGEST = 2**20  # elements of a constant that are looked at
BUILT_IN = ("aten", "prims", "prim")
LOADED_BY_TORCH = ("quantized", "mkldnn", "c10d", "fbgemm")  # libraries of ops that need no import


@dataclass(frozen=True)
class Isolated:
    """``request`` as a worker gets it, and what it imports first: names of modules, paths of files."""

    request: Request
    imports: tuple[str, ...]


def isolated(request: Request, constants: Mapping[str, Any], options: Options) -> Isolated | str:
    """The request for a worker; or why none can have it. ``constants``: name of an input -> the tensor that the program
    holds for it. One that is filled with one value (a bias of zeros) is so there; of others a float's values do not
    matter and are made anew, an index's do."""
    if any(p["constants"] for p in request.programs.values()):
        return "a candidate holds an object of this process"
    specs = []
    for s in request.inputs:
        if s.maker is not None and s.name in constants:
            fill = one_value(constants[s.name])
            if fill is None and not constants[s.name].dtype.is_floating_point:
                return f"the values of {s.name}, a constant of the program, matter"
            s = replace(s, maker=None, fill=fill)
        elif s.maker is not None:
            return f"a function of this process makes the input {s.name}"
        specs.append(s)
    imports = dict.fromkeys(options.tuning_imports)
    for name in sorted({op for p in request.programs.values() for op in ops_in(p["nodes"])}):
        where = home_of(name)
        if where is None and not options.tuning_imports:
            return f"{name} is defined where no worker can import it; name a file that registers it in tuning_imports"
        if where:
            imports[where] = None
    return Isolated(replace(request, inputs=tuple(specs)), tuple(imports))


# -- constants --------------------------------------------------------------------------------------
# Remembered: reading a constant waits for its device, which only the thread that compiles may do (a read by another
# thread would break a graph that the user is capturing).
_fills: Any = WeakTensorKeyDictionary()
_indices: Any = WeakTensorKeyDictionary()


def one_value(t: torch.Tensor) -> float | None:
    """The value of all elements of a real tensor, if they are all the same. Read once."""
    if t not in _fills:
        _fills[t] = _one_value(t)
    return _fills[t]


def index_values(t: torch.Tensor) -> str:
    """A digest of an integer tensor's elements. Made once."""
    if t not in _indices:
        with unset_fake_temporarily():
            _indices[t] = hashlib.sha256(t.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    return _indices[t]


def _one_value(t: torch.Tensor) -> float | None:
    if not 0 < t.numel() <= LARGEST or t.dtype.is_complex or t.device.type == "meta":
        return None
    with unset_fake_temporarily():  # compiling goes on under a fake mode
        first = t.detach().flatten()[0]
        return float(first.item()) if bool((t == first).all()) else None  # (NaN is never equal)


# -- ops --------------------------------------------------------------------------------------------
def ops_in(data: Any) -> Iterator[str]:
    """Names of the operators in a program's data that do not come with PyTorch."""
    if isinstance(data, dict):
        if data.get("_") == "op" and data["value"].split(".")[0].split("::")[0] not in BUILT_IN:
            yield data["value"]
        data = list(data.values())
    if isinstance(data, list):
        for v in data:
            yield from ops_in(v)


def _function_of(op: str) -> tuple[str, Any]:
    """The op's namespace, and the Python function that it was made of, if it was."""
    from torch._library.custom_ops import OPDEFS

    space, _, rest = op.replace("::", ".").partition(".")
    found = OPDEFS.get(f"{space}::{rest.split('.')[0]}")
    return space, None if found is None else found._init_fn


def body_of(op: str) -> str | None:
    """A text that differs between versions of an op: its function's source and file; of an op from C++ the library's
    file. None if that cannot be found."""
    space, function = _function_of(op)
    if function is not None:
        return source_of(function)
    library = getattr(sys.modules.get(space), "__file__", None)
    if library is None:
        return None
    stat = os.stat(library)
    return f"{library} {stat.st_size} {stat.st_mtime_ns}"


def source_of(fn: Any) -> str | None:
    """A digest of a function's text and, if there is one, of the whole file it is in (what it calls may be there)."""
    if fn is None:
        return ""
    try:
        text = inspect.getsource(fn)
        file = inspect.getsourcefile(fn)
    except (OSError, TypeError):
        return None
    with contextlib.suppress(OSError):
        text += Path(file or "").read_text()
    cells = [c.cell_contents for c in getattr(fn, "__closure__", None) or ()]
    held = [source_of(x) if callable(x) else repr(x) for x in cells]
    return hashlib.sha256(repr((text, held)).encode()).hexdigest()


def home_of(op: str) -> str | None:
    """What to import so that ``op`` is registered: a module's name, "" if nothing (a library that reflib or torch load
    anyway), None if there is no such module."""
    space, function = _function_of(op)
    if function is None:  # from C++: the package of that name, if one is loaded (torchvision::nms)
        if getattr(sys.modules.get(space), "__file__", None):
            return space
        return "" if space in LOADED_BY_TORCH and hasattr(torch.ops, space) else None
    local = "<locals>" in function.__qualname__ or function.__module__ == "__main__"
    return function.__module__ if not local and _importable(function.__module__) else None


@cache
def _importable(module: str) -> bool:
    """Would ``import module`` find, in another process, the file that it is here? (What was loaded by its path alone
    has a spec as well, but is not found by its name.)"""
    here = getattr(sys.modules.get(module), "__file__", None)
    try:
        spec = PathFinder.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None or here is None:
        return spec is not None
    if "." not in module:
        return spec.origin is not None and Path(spec.origin) == Path(here)
    return any(Path(here).is_relative_to(folder) for folder in spec.submodule_search_locations or ())
