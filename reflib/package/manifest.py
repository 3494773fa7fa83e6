"""What a package contains, as data: the dataclasses below, and their JSON.

``read`` is the inverse of ``write``. ``opened`` is the only way to a file's manifest: its digest is checked by then, so
it is what ``write`` wrote, and is not checked further.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NewType

import torch

from ..errors import DeviceError, PackageError, ReflibError
from ..ir.data import decode, encode
from ..ir.expr import Expr, Sym
from ..wrap.convention import Argument, Guard, Output
from . import archive
from .archive import Entry
from .weights import Span, Weight

HOST = 4  # version of the interface between a compiled wrapper and the process: wrap/host.h

Data = NewType("Data", object)  # encoded by ir/data.py; decoded where it is used, for it may name ops


@dataclass(frozen=True)
class Program:
    """How a captured graph is called: a ``wrap.convention.Convention``, but ``arguments_tree`` and ``result_tree`` are
    torch's pytree specs, as JSON text, and GPUs are cuda:0.

    names: of the arguments by position, as in the model. results: how Python reads each result. conditions: the guards,
        in terms of arguments.
    """

    inputs: tuple[str, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    arguments_tree: str
    result_tree: str
    ranges: dict[str, tuple[int, int | None]]
    devices: tuple[str, ...]
    guards: tuple[Guard, ...] = ()
    written: tuple[Output, ...] = ()
    names: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelEntry:
    """A kernel as it is launched. ``image``: the member with its machine code. ``symbol``: its function's name there.
    ``threads``, ``shared`` (bytes), ``early``: of a launch on a GPU. ``late``: a fallback, loaded when a call first
    needs it. ``checked``: on a CPU, it reports an index outside its tensor. ``bytes``: of the machine code."""

    name: str
    image: str
    symbol: str
    threads: int = 0
    shared: int = 0
    early: bool = False
    late: bool = False
    checked: bool = False
    bytes: int = 0


@dataclass(frozen=True)
class PackagedVariant:
    """The code for one architecture; the predicate of this variant is the GPU. ``arch``: "sm_90", "gfx942", "cpu", or
    "ptx". ``made_for``: the architecture that the program was compiled for (of PTX: the one in its text). ``program``:
    a key of ``Manifest.programs``.

    wrapper, text, python: members: the compiled host code, its source, and the part of it in Python (or ""). graph: its
        name.
    table: the kernels by the numbers that the wrapper uses. (An empty kernel is not in ``kernels``.)
    functions: of the Python text, by the numbers that the wrapper uses. names: the values they refer to. needs: the
        functions that every call needs, and the op of each.
    objects: results that are no tensors. symbols: C functions that it calls. constants: weights that it holds, and the
        kind of device of each.
    cpu: features of the processor that its CPU kernels use. driver: for PTX, the least version of the CUDA driver, and
        its branch.
    workspace: bytes of temporaries and results at once, at the exported sizes. arena: by device, the bytes allocated
        for all that only kernels touch, as a formula of the sizes (with the option ``arena``).
    """

    arch: str
    made_for: str
    program: str
    wrapper: str
    text: str
    graph: str
    kernels: tuple[KernelEntry, ...]
    table: tuple[str, ...]
    python: str = ""
    functions: tuple[str, ...] = ()
    needs: dict[str, str] = field(default_factory=dict)
    names: dict[str, Data] = field(default_factory=dict)
    objects: tuple[Data, ...] = ()
    symbols: tuple[str, ...] = ()
    constants: tuple[tuple[str, str], ...] = ()
    cpu: tuple[str, ...] = ()
    driver: tuple[int, str] | None = None
    workspace: int = 0
    arena: dict[str, str] = field(default_factory=dict)

    @property
    def shared(self) -> int:
        """Bytes of shared memory that its largest kernel needs."""
        return max((k.shared for k in self.kernels), default=0)


@dataclass(frozen=True)
class Library:
    """What registers an op that the package calls, as far as is known: each field but ``op`` may be "".

    module: a Python module to import. file: a compiled library, without its folder. symbol: a C function
        (``Options.c_shims``), which is called instead of the op; the op itself, where it is registered, only explains
        why the function failed.
    """

    op: str
    module: str = ""
    file: str = ""
    symbol: str = ""

    @property
    def remedy(self) -> str:
        """What to do before the package is loaded."""
        if self.module:
            return f"import {self.module}"
        if self.file:
            return f"torch.ops.load_library({self.file!r})"
        return f"import or load what registers {self.op.replace('.', '::', 1).removesuffix('.default')}"


@dataclass(frozen=True)
class Group:
    """A process group that the model communicates in: which of its ranks this package is for, of how many, and what
    they start, in order (``ranks.agree``)."""

    rank: int
    size: int
    starts: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """``system``, ``machine``: of the host code: "Linux", "x86_64". ``libc``: the least version of the C library.
    ``images``: "fatbin" or "table". ``source``: a digest of the captured graphs. ``weights``, ``spans``: the tensors in
    ``weights.safetensors``, see weights.py. ``groups``: process groups, by name."""

    format: int
    host: int
    system: str
    machine: str
    images: str
    versions: dict[str, str]
    options: dict[str, Data]
    source: str
    programs: dict[str, Program]
    variants: tuple[PackagedVariant, ...]
    weights: tuple[Weight, ...]
    spans: tuple[Span, ...]
    libraries: tuple[Library, ...]
    entries: tuple[Entry, ...] = ()
    libc: str = ""
    groups: dict[str, Group] = field(default_factory=dict)

    def variant(self, arch: str) -> PackagedVariant:
        return next(v for v in self.variants if v.arch == arch)

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(v.arch for v in self.variants)


def write(x: Any) -> Any:
    """The manifest, or a part of it, as JSON data. Raises ReflibError for a value that ``ir/data.py`` cannot encode."""
    if hasattr(x, "__dataclass_fields__") and not isinstance(x, Expr | Sym):
        return {f.name: write(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, (tuple, list)):
        return [write(item) for item in x]
    return {k: write(v) for k, v in x.items()} if isinstance(x, dict) else encode(x)


def read(data: Any) -> Manifest:
    """The inverse of ``write``. Raises PackageError, or the ReflibError of what cannot be decoded."""
    try:
        return _read(Manifest, data)
    except ReflibError:
        raise
    except Exception as e:  # what the file holds instead may fail in any way
        raise PackageError(f"its manifest is none of reflib's ({type(e).__name__}: {e}); build it again") from e


def _read(want: Any, data: Any) -> Any:
    """``data`` as a ``want``: a dataclass, a type, a tuple or a dict of such, or one of them or None."""
    if want in (Any, Expr, torch.dtype, torch.device):
        return decode(data)
    if hasattr(want, "__dataclass_fields__"):
        hints = _hints(want)
        return want(**{key: _read(hints[key], value) for key, value in data.items()})
    origin, args = typing.get_origin(want), typing.get_args(want)
    if origin in (types.UnionType, typing.Union):
        return None if data is None else _read(args[0], data)
    if origin is tuple:
        kinds = [args[0]] * len(data) if args[-1] is Ellipsis else args
        return tuple(_read(k, v) for k, v in zip(kinds, data, strict=True))
    return {k: _read(args[1], v) for k, v in data.items()} if origin is dict else data


_hints = functools.cache(typing.get_type_hints)


def models(file: archive.Archive) -> tuple[str, ...]:
    """The names of the models in a file of several; none in a package of one."""
    return tuple(file.manifest["models"]) if isinstance(file.manifest.get("models"), dict) else ()


def of_model(file: archive.Archive, model: str | None) -> Manifest:
    """The manifest of the file, or of one of its models (``join.py``)."""
    there = models(file)
    if model is None and there:
        raise PackageError(f"it holds {len(there)} models, {', '.join(there)}: name one, model={there[0]!r}")
    if model is not None and model not in there:
        raise PackageError(f"it has no model {model!r:.80}; it holds {', '.join(there) or 'one, without a name'}")
    data = file.manifest if model is None else file.manifest["models"][model]
    return read({**data, "entries": file.manifest["entries"]})


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str], verify: bool | str = True, sha256: str | None = None, model: str | None = None
) -> Iterator[tuple[archive.Archive, Manifest]]:
    """The package at ``path``, open, and its manifest; that of a ``model``, of a file with several. As
    ``open_archive``."""
    with open_archive(path, verify, sha256) as file:
        yield file, of_model(file, model)


@contextlib.contextmanager
def open_archive(
    path: str | os.PathLike[str], verify: bool | str = True, sha256: str | None = None
) -> Iterator[archive.Archive]:
    """The file at ``path``, open. Closed on an exception. Errors of the block name the path."""
    file = archive.open(path, verify, sha256)
    try:
        yield file
    except BaseException as e:
        file.close()
        if isinstance(e, ReflibError) and not isinstance(e, DeviceError):
            raise PackageError(f"{path}: {archive.printable(str(e))}") from e
        raise
