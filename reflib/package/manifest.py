"""What is in a package, as data: the dataclasses below, and their JSON.

``read`` takes whatever JSON there is and gives a Manifest in which every field has the type that is written here, and
every name of a member is one that the file has; or raises PackageError, naming the field. What code is called with is
checked when it is called, so nothing here is believed further than its type.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from ..errors import PackageError
from .archive import Entry

HOST = 1  # of what a compiled wrapper and the process know of each other: wrap/host.h

Data = Any  # what ir/data.py encodes; decoded where it is used


@dataclass(frozen=True)
class Tensor:
    """One that is expected. ``shape``, ``strides``: index expressions. ``device``: "cpu" or "cuda"."""

    dtype: str
    shape: Data
    strides: Data
    device: str


@dataclass(frozen=True)
class Argument:
    """Of the caller's, in the order of the flattened arguments. ``tensor``: None for one that is no tensor; then
    ``value`` is what it must be."""

    name: str
    tensor: Tensor | None = None
    value: Data = None


@dataclass(frozen=True)
class Weight:
    """A tensor in ``weights.safetensors``. ``kind``: parameter, buffer or constant."""

    name: str
    kind: str


@dataclass(frozen=True)
class Output:
    """What a result of the graph is: the caller's ("result"), or a new value for the weight ``target`` ("weight") or
    for the caller's argument ``target`` ("argument"); "same": what the caller gets is that argument."""

    kind: str
    target: str = ""


@dataclass(frozen=True)
class Guard:
    """See wrap/convention.py."""

    kind: str
    what: Data
    text: str


@dataclass(frozen=True)
class Program:
    """How a captured graph is called. ``inputs``: of the graph, in order: a weight's name, or "" for the next argument
    of the caller's. ``arguments_tree``, ``result_tree``: torch's pytree specs, as its JSON text. ``ranges``: of the
    sizes that may change, by symbol: [least, most or None]. ``devices``: the kind of device on which each of the
    graph's inputs lies, "" for what is no tensor. ``names``: of the arguments by position, as the model has them."""

    inputs: tuple[str, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    arguments_tree: str
    result_tree: str
    ranges: dict[str, tuple[int, int | None]]
    devices: tuple[str, ...]
    guards: tuple[Guard, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """As it is launched. ``image``: the member that holds its machine code. ``symbol``: its function's name there.
    ``threads``, ``shared`` (bytes), ``early``: of a launch on a GPU. ``late``: a fallback that few calls need.
    ``checked``: on a CPU, it says when an index is outside its tensor. ``bytes``: of the machine code."""

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
class Arm:
    """The code for one architecture. ``arch``: "sm_90", "gfx942", "cpu", or "ptx". ``made_for``: what the program was
    compiled for (of PTX: the architecture whose text it is). ``program``: a key of ``Manifest.programs``.

    wrapper, text, python: members: the compiled host code, its source, and what of it is Python (or ""). graph: its
        name.
    table: the kernels by the numbers that the wrapper calls them. (An empty one is not in ``kernels``.)
    functions: of the Python text, by the numbers that the wrapper calls them. names: what they refer to. needs: those
        that no call can do without, and the op that wants them.
    objects: results that are no tensors. symbols: C functions that it calls. constants: weights that it holds, and the
        kind of device where.
    cpu: features of the processor that its CPU kernels use. driver: for PTX, the least version of the CUDA driver, and
        its branch.
    workspace: bytes of temporaries and results at once, at the sizes that it was exported with.
    units: multiprocessors that it was planned for.
    """

    arch: str
    made_for: str
    program: str
    wrapper: str
    text: str
    graph: str
    kernels: tuple[Kernel, ...]
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
    units: int = 0


@dataclass(frozen=True)
class Library:
    """What registers an op that the package calls, as far as is known: each but ``op`` may be "".

    module: of Python's, to be imported. file: of a compiled library, without its folder. script: a Python file that is
        no module. symbol: a C function (``Options.c_shims``): it is what is called; the op itself, if there is one,
        only says why the function failed.
    """

    op: str
    module: str = ""
    file: str = ""
    script: str = ""
    symbol: str = ""

    @property
    def remedy(self) -> str:
        """What to do before the package is loaded."""
        if self.module:
            return f"import {self.module}"
        if self.script:
            return f"run what defines it ({self.script})"
        if self.file:
            return f"torch.ops.load_library({self.file!r})"
        return f"import or load what registers {self.op.replace('.', '::', 1).removesuffix('.default')}"


@dataclass(frozen=True)
class Manifest:
    """``system``, ``machine``: of the host code: "Linux", "x86_64". ``libc``: the least version of the C library.
    ``images``: "fatbin" or "table". ``source``: a digest of the captured graphs. ``weights``: rows that weights.pack
    made."""

    format: int
    host: int
    system: str
    machine: str
    images: str
    versions: dict[str, str]
    options: dict[str, Data]
    source: str
    programs: dict[str, Program]
    arms: tuple[Arm, ...]
    weights: tuple[Weight, ...]
    rows: tuple[dict[str, Data], ...]
    libraries: tuple[Library, ...]
    entries: tuple[Entry, ...] = ()
    libc: str = ""

    def arm(self, arch: str) -> Arm:
        return next(a for a in self.arms if a.arch == arch)

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(a.arch for a in self.arms)


def write(manifest: Manifest) -> dict[str, Any]:
    """As JSON data."""
    return dataclasses.asdict(manifest)


def read(data: Any) -> Manifest:
    """From JSON data. Raises PackageError."""
    m: Manifest = _read(Manifest, data, "manifest")
    have = {e.name for e in m.entries}
    if not m.arms or len(set(m.archs)) != len(m.arms):
        raise PackageError(f"manifest: it has {len(m.arms)} arms; each is for an architecture of its own")
    for arm in m.arms:
        if arm.program not in m.programs:
            raise PackageError(f"manifest: the arm {arm.arch} is of a program {arm.program!r}, which is not there")
        for name in (arm.wrapper, arm.text, arm.python, *(k.image for k in arm.kernels)):
            if name and name not in have:
                raise PackageError(f"manifest: the arm {arm.arch} names {name!r}, which the file does not have")
    known = {w.name for w in m.weights}
    for key, p in m.programs.items():
        if missing := [n for n in p.inputs if n and n not in known]:
            raise PackageError(f"manifest: the program {key!r} needs the weight {missing[0]!r}, which is not there")
        if sum(not n for n in p.inputs) != len(p.arguments):
            given = f"{len(p.arguments)} arguments"
            raise PackageError(f"manifest: the program {key!r} has {given}, its graph another number")
        if len(p.devices) != len(p.inputs):
            raise PackageError(f"manifest: the program {key!r} has {len(p.inputs)} inputs on {len(p.devices)} devices")
        targets = {"weight": known, "argument": {a.name for a in p.arguments}}
        for o in p.outputs:
            if o.kind != "result" and o.target not in targets.get(o.kind.replace("same", "argument"), ()):
                what = f"{o.kind} {o.target!r}"
                raise PackageError(f"manifest: the program {key!r} has a result for {what}, which is not there")
    return m


def _read(want: Any, data: Any, where: str) -> Any:
    """``data`` as a ``want``: a dataclass, a type, a tuple or a dict of such, or either of two."""
    if want is Any:
        return data
    if dataclasses.is_dataclass(want):
        return _dataclass(want, data, where)
    origin, args = typing.get_origin(want), typing.get_args(want)
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        return _read(next(a for a in args if a is not types.NoneType), data, where)
    if origin is tuple:
        _expect(isinstance(data, (list, tuple)), "a list", data, where)
        kinds = [args[0]] * len(data) if args[-1] is Ellipsis else list(args)
        _expect(len(kinds) == len(data), f"{len(kinds)} items", data, where)
        return tuple(_read(k, d, f"{where}[{i}]") for i, (k, d) in enumerate(zip(kinds, data)))
    if origin is dict:
        _expect(isinstance(data, dict), "an object", data, where)
        return {k: _read(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if want is float and type(data) is int:
        data = float(data)
    _expect(type(data) is want, f"a {want.__name__}", data, where)
    if want is int:
        _expect(-(2**63) <= data < 2**63, "a number of 64 bits", data, where)
    return data


_hints = functools.cache(typing.get_type_hints)


def _dataclass(cls: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), "an object", data, where)
    hints = _hints(cls)
    values = {}
    for f in dataclasses.fields(cls):
        if f.name in data:
            values[f.name] = _read(hints[f.name], data[f.name], f"{where}.{f.name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise PackageError(f"{where} has no {f.name!r}: this is no package of reflib's, or it is damaged")
    return cls(**values)


def _expect(good: bool, what: str, data: Any, where: str) -> None:
    if not good:
        said = repr(data)
        raise PackageError(f"{where}: expected {what}, found {said if len(said) < 60 else said[:57] + '...'}")
