"""Can another process measure this request? Only what it can have: plain data, and the user's ops and functions.

A worker has PyTorch's ops, and those of modules it can import: an op that a library registers is found by the module of
its function, or in a file that the user names (``Options.tuning_imports``). One that is defined in a notebook's cell or
in a function's body exists here only: it is sent by value (``by_value``).
"""

import contextlib
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.weak import WeakTensorKeyDictionary

from ..options import Options
from . import by_value
from .request import Request

LARGEST = 2**20  # elements of a constant that are looked at
BUILT_IN = ("aten", "prims", "prim")
COMMUNICATE = ("_c10d_functional", "symm_mem")
LOADED_BY_TORCH = ("quantized", "mkldnn", "c10d", "fbgemm", *COMMUNICATE)  # libraries of ops that need no import


def isolated(
    request: Request, constants: Mapping[str, Any], options: Options, makers: Mapping[str, Any] | None = None
) -> Request | str:
    """The request for a worker; or why none can have it, and what to do. ``constants``: name of an input -> the tensor
    that the program holds for it. One that is filled with one value (a bias of zeros) is so there. The values of others
    matter if they are an index, or what a candidate alone holds; if not, they are made anew. ``makers``: functions that
    make inputs, by their keys."""
    if any(p["constants"] for p in request.programs.values()):
        return "a candidate holds an object of this process"
    if any('"triton_kernel_wrapper_' in json.dumps(p["nodes"]) for p in request.programs.values()):
        return (
            "a candidate launches a Triton kernel, which it knows by its number in this process: make that an op with "
            "torch.library.triton_op"
        )
    specs: list[Any] = []
    sent: dict[str | None, Any] = {}
    right = json.dumps(request.programs[request.reference]["nodes"]) if request.reference in request.programs else ""
    for s in request.inputs:
        if s.maker is not None and s.name in constants:
            fill = one_value(constants[s.name])
            s = replace(s, fill=fill)
            if fill is None and not (constants[s.name].dtype.is_floating_point and f'"{s.name}"' in right):
                values = values_of(constants[s.name])
                if values is None:
                    return f"the values of {s.name}, a constant of the program, matter, and there are very many"
                sent[s.maker] = _Values(values)
            else:
                s = replace(s, maker=None)
        elif s.maker is not None:
            sent[s.maker] = (makers or {}).get(s.maker)
        specs.append(s)
    try:
        functions, ops = by_value.packed(sent, "a function that makes inputs") if sent else (b"", [])
        imports = _imports({op for p in request.programs.values() for op in ops_in(p["nodes"])}, ops, options)
    except by_value.CannotSend as e:
        return f"{e}: define it in a module, or name a file that defines it in tuning_imports"
    return replace(request, inputs=tuple(specs), makers=functions, imports=imports)


def _imports(ops: Collection[str], defined: Collection[str], options: Options) -> tuple[str | bytes, ...]:
    """What a worker imports for the operators ``ops`` (``ns.name.overload``); ``defined`` (``ns::name``) are sent."""
    imports: dict[str | bytes, None] = dict.fromkeys(options.tuning_imports)
    local = set(defined)
    for name in sorted(ops):
        where = home_of(name)
        if where:
            imports[where] = None
        elif where is None and not options.tuning_imports:
            local.add("::".join(name.replace("::", ".").split(".")[:2]))
    if local:
        imports[by_value.packed_ops(sorted(local))] = None
    return tuple(imports)


@dataclass(frozen=True)
class _Values:
    """A function that makes an input: it has these values."""

    values: torch.Tensor

    def __call__(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(self.values)


# -- constants --------------------------------------------------------------------------------------
# Remembered: reading a constant waits for its device, which only the thread that compiles may do (a read by another
# thread would break a graph that the user is capturing).
_fills: Any = WeakTensorKeyDictionary()
_values_kept: Any = WeakTensorKeyDictionary()


def one_value(t: torch.Tensor) -> float | None:
    """The value of all elements of a real tensor, if they are all the same. Read once."""
    if t not in _fills:
        _fills[t] = _one_value(t)
    return _fills[t]


def digest_of(t: torch.Tensor) -> str:
    """A digest of a tensor's elements. Made once."""
    return _kept(t)[0]


def values_of(t: torch.Tensor) -> torch.Tensor | None:
    """A tensor's elements, on the CPU; None if there are too many to send to a process."""
    return _kept(t)[1]


def _kept(t: torch.Tensor) -> tuple[str, torch.Tensor | None]:
    if t not in _values_kept:
        with unset_fake_temporarily():
            here = t.detach().cpu().contiguous()
            digest = hashlib.sha256(here.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            _values_kept[t] = digest, here.clone() if here.numel() <= LARGEST else None
    return _values_kept[t]


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
    file; of a collective the sizes of the process groups. None if that cannot be found."""
    space, function = _function_of(op)
    if function is not None:
        return source_of(function)
    if space in COMMUNICATE:  # (with how many others, its arguments do not say)
        groups = torch.distributed.distributed_c10d._world.pg_names
        return repr(sorted((name, g.size()) for g, name in groups.items()))
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
    return function.__module__ if not local and importable(function.__module__) else None


@cache
def importable(module: str) -> bool:
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
