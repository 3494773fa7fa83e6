"""What a package contains, as data: the dataclasses below, and their JSON.

``read`` is the inverse of ``write``, and checks that each value is of its field's type. Names that become parts of
paths, of C or of CMake are ``Word``s or ``Member``s, all other text is printable: no user of a manifest checks names.
``opened`` is the only way to a file's manifest; ``checks.py`` has the rest of what it holds.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NewType

import torch

from ..errors import DeviceError, PackageError, ReflibError
from ..ir.data import decode, encode
from ..ir.expr import Expr, Sym
from ..wrap.convention import Convention
from . import archive
from .archive import Entry
from .weights import Span, Weight

HOST = 4  # version of the interface between a compiled wrapper and the process: wrap/host.h

Data = NewType("Data", object)  # encoded by ir/data.py; decoded where it is used, for it may name ops
Word = Annotated[str, re.compile(r"\w+", re.ASCII)]
TABLES = "reflib_tables"  # of a wrapper, a string: ``tables_digest``
Member = Annotated[str, re.compile(archive.NAME.pattern + "|", re.ASCII)]  # "": none


@dataclass(frozen=True)
class Signature(Convention):
    """How a captured graph is called; ``in_spec`` and ``out_spec`` are torch's JSON text of them (``trees.py``), and
    GPUs are cuda:0.

    names: of the arguments by position, as in the model. results: how Python reads each result. conditions: the guards,
        in terms of arguments.
    """

    names: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelEntry:
    """A kernel as it is launched. ``image``: the member with its machine code. ``symbol``: its function's name there.
    ``threads``, ``shared`` (bytes), ``early``: of a launch on a GPU. ``late``: a fallback, loaded when a call first
    needs it. ``checked``: on a CPU, it reports an index outside its tensor, which ``where`` says the place of.
    ``bytes``: of the machine code."""

    name: Word
    image: Member
    symbol: Word
    threads: int = 0
    shared: int = 0
    early: bool = False
    late: bool = False
    checked: bool = False
    where: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class PackagedVariant:
    """The code for one architecture; the predicate of this variant is the GPU. ``arch``: "sm_90", "gfx942", "cpu", or
    "ptx". ``made_for``: the architecture that the program was compiled for (of PTX: the one in its text). ``program``:
    a key of ``Manifest.programs``.

    wrapper, text, python: members: the compiled host code, its source, and the part of it in Python (or ""). graph: its
        name. fallback: the member with the same steps in Python, for machines where nothing can call the compiled code.
    table: the kernels by the numbers that the wrapper uses. (An empty kernel is not in ``kernels``.)
    functions: of the Python text, by the numbers that the wrapper uses. names: the values they refer to. needs: the
        functions that every call needs, and the op of each.
    objects: results that are no tensors. symbols: C functions that it calls. constants: weights that it holds, and the
        kind of device of each.
    cpu: features of the processor that its CPU kernels use. driver: for PTX, the least version of the CUDA driver, and
        its branch.
    unrecorded: with the option ``cuda_graphs``, why its calls are not recorded; "": they are.
    workspace: bytes of temporaries and results at once, at the exported sizes. arena: by device, the bytes allocated
        for all that only kernels touch, as a formula of the sizes (with the option ``arena``).
    """

    arch: Word
    made_for: Word
    program: Word
    wrapper: Member
    text: Member
    fallback: Member
    graph: Word
    kernels: tuple[KernelEntry, ...]
    table: tuple[Word, ...]
    python: Member = ""
    functions: tuple[Word, ...] = ()
    needs: dict[Word, str] = field(default_factory=dict)
    names: dict[str, Data] = field(default_factory=dict)
    objects: tuple[Data, ...] = ()
    symbols: tuple[Word, ...] = ()
    constants: tuple[tuple[str, str], ...] = ()
    cpu: tuple[str, ...] = ()
    driver: tuple[int, str] | None = None
    unrecorded: str = ""
    workspace: int = 0
    arena: dict[Word, str] = field(default_factory=dict)

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
    ``weights.safetensors``, see weights.py. ``groups``: process groups, by name. ``metadata``: of the user's."""

    format: int
    host: int
    system: str
    machine: str
    images: str
    versions: dict[str, str]
    options: dict[str, Data]
    source: str
    programs: dict[Word, Signature]
    variants: tuple[PackagedVariant, ...]
    weights: tuple[Weight, ...]
    spans: tuple[Span, ...]
    libraries: tuple[Library, ...]
    entries: tuple[Entry, ...] = ()
    libc: str = ""
    groups: dict[str, Group] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def variant(self, arch: str) -> PackagedVariant:
        return next(v for v in self.variants if v.arch == arch)

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(v.arch for v in self.variants)


def tables_digest(
    inputs: int, outputs: int, table: Sequence[str], kernels: Collection[str], functions: Sequence[str], objects: int,
    symbols: Sequence[str], constants: Sequence[tuple[str, Sequence[int], Sequence[int]]],
) -> str:  # fmt: skip
    """Of what a wrapper reaches by number, unchecked: it holds this digest (``TABLES``), and is not called with tables
    that have another. ``kernels``: those of the table that are not empty. ``constants``: dtype, sizes and strides."""
    numbered = list(table), sorted(kernels), list(functions), list(symbols)
    layouts = [(dtype, list(shape), list(strides)) for dtype, shape, strides in constants]
    return hashlib.sha256(repr((inputs, outputs, objects, *numbered, layouts)).encode()).hexdigest()


def tables_line(digest: str) -> str:
    """What a wrapper's text ends with. (Weak: a project of several wrappers links them all.)"""
    return f'extern "C" __attribute__((weak, used)) const char {TABLES}[] = "{digest}";\n'


def tables_of(m: Manifest, v: PackagedVariant) -> str:
    """The digest of the tables that the manifest gives."""
    p, by_name = m.programs[v.program], {w.name: w for w in m.weights}
    held = [by_name[name] for name, _ in v.constants]
    return tables_digest(
        len(p.inputs), len(p.outputs), v.table, [k.name for k in v.kernels], v.functions, len(v.objects), v.symbols,
        [(w.dtype, w.shape, w.strides) for w in held],
    )  # fmt: skip


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
        found = decode(data)
        return found if want is Any else _typed(want, found)
    if hasattr(want, "__dataclass_fields__"):
        hints = _hints(want)
        return want(**{key: _read(hints[key], value) for key, value in data.items()})
    origin, args = typing.get_origin(want), typing.get_args(want)
    if origin in (types.UnionType, typing.Union):
        return None if data is None else _read(args[0], data)
    if origin is tuple:
        data = _typed(list, data)
        kinds = [args[0]] * len(data) if args[-1] is Ellipsis else args
        return tuple(_read(k, v) for k, v in zip(kinds, data, strict=True))
    if origin is dict:
        return {_read(args[0], k): _read(args[1], v) for k, v in _typed(dict, data).items()}
    return data if want is Data else _name(args[1], data) if origin is Annotated else _typed(want, data)


def _typed(want: type, data: Any) -> Any:
    if type(data) is not want:
        raise TypeError(f"{data!r:.80} where a {want.__name__} is expected")
    if isinstance(data, str) and not data.isprintable():  # a terminal would obey it
        raise ValueError(f"{data!r:.80} has control characters")
    if isinstance(data, int) and not -(2**63) <= data < 2**63:
        raise ValueError("a number of more than 64 bits")
    return data


def _name(pattern: re.Pattern[str], data: Any) -> str:
    if not pattern.fullmatch(_typed(str, data)):
        raise ValueError(f"the name {data!r:.80}")
    return data


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def models(file: archive.Archive) -> tuple[str, ...]:
    """The names of the models in a file of several; none in a package of one."""
    return tuple(file.manifest["models"]) if isinstance(file.manifest.get("models"), dict) else ()


def of_model(file: archive.Archive, model: str | None) -> Manifest:
    """The checked manifest of the file, or of one of its models (``join.py``)."""
    from .checks import check  # (which is in terms of the classes above)

    there = models(file)
    if model is None and there:
        raise PackageError(f"it holds {len(there)} models, {', '.join(there)}: name one, model={there[0]!r}")
    if model is not None and model not in there:
        raise PackageError(f"it has no model {model!r:.80}; it holds {', '.join(there) or 'one, without a name'}")
    data = file.manifest if model is None else file.manifest["models"][model]
    about = read({**data, "entries": file.manifest["entries"]} if isinstance(data, dict) else data)
    own = [
        e for e in file.entries.values() if model is None or e.name.partition("/")[2].partition("/")[0] in ("", model)
    ]
    check(about, {e.name: e.unpacked for e in own})
    return about


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str], verify: bool | str = True, sha256: str | None = None, model: str | None = None
) -> Iterator[tuple[archive.Archive, Manifest]]:
    """The package at ``path``, open, and its checked manifest; that of a ``model``, of a file with several. As
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
        if isinstance(e, (ValueError, TypeError, LookupError, AttributeError, AssertionError)):  # by what it says
            said = archive.printable(f"{type(e).__name__}: {e}")
            raise PackageError(f"{path}: its manifest does not fit together ({said:.300}); build it again") from e
        raise
