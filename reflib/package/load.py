"""Loading a package: check it, choose the variant for the device, map the weights, bind the tables.

A loaded package is called as a compiled ExportedProgram is (``wrap/exported.py``): from C to C++, without Dynamo.
Nothing is written to disk: code is unpacked in memory, machine code for the driver, host code into an anonymous file,
because the system's loader maps files. Weights on a CPU are the mapped pages themselves, so processes on a host share
them; pages that a process writes to (buffers that the model updates) become its own.
"""

from __future__ import annotations

import copy
import ctypes
import difflib
import functools
import importlib
import itertools
import os
import platform
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import toolchain
from ..errors import PackageError, ReflibError
from ..ir.data import decode
from ..target import device_target
from ..wrap import host
from ..wrap.convention import Convention
from ..wrap.exported import ExportedCallable
from ..wrap.runtime import namespace
from ..wrap.wrap import Wrapped
from ..wrap.zeros import zeros
from . import archive, in_python, manifest, trees, weights
from .architectures import variant_for
from .build import cpu_features
from .rank_files import check_groups, own_file


def load(
    path: str | os.PathLike[str], device: torch.device | str | int | None = None, verify: bool | str = True,
    sha256: str | None = None, model: str | None = None,
) -> Model:  # fmt: skip
    """The package at ``path`` as a callable, with the arguments that the model was exported with.

    device: where to run (an int: that GPU). None: the current GPU if the package has code for GPUs and there is one,
        else the CPU.
    verify: True checks every member against its digest; "code" skips the weights, which are most of the bytes.
    sha256: the digest that the file must have. A package is code: load those that you trust.
    model: of a file with several (``reflib.join_packages``), the one with this name.

    A model that communicates is loaded by all ranks at once, each its own file.

    Raises PackageError: what is wrong with the file, or why it does not suit this machine and what would. Called with
    other arguments than it was made for, the model raises ReflibError, naming the argument.
    """
    wanted = _wanted(device)
    path, sha256 = own_file(path, sha256)
    with manifest.opened(path, verify, sha256, model) as (file, about):
        return _model(file, about, wanted, _Memory())


def load_models(
    path: str | os.PathLike[str], device: torch.device | str | int | None = None, verify: bool | str = True,
    sha256: str | None = None,
) -> dict[str, Model]:  # fmt: skip
    """All models of a file that ``reflib.join_packages`` wrote, by name, as :func:`reflib.load` loads one. Weights that
    several have are in memory once, so ``load_constants`` of one is for all; buffers that a model writes to are its
    own."""
    wanted, memory = _wanted(device), _Memory()
    with manifest.open_archive(path, verify, sha256) as file:
        if not (names := manifest.models(file)):
            raise PackageError("it holds one model, without a name: reflib.load(path) loads it")
        return {n: _model(copy.copy(file), manifest.of_model(file, n), wanted, memory) for n in names}


@dataclass
class _Memory:
    """Of models that share weights: the storages of spans of the file, and their copies on the GPU, by address."""

    storages: dict[weights.Span, torch.UntypedStorage] = field(default_factory=dict)
    moved: dict[int, torch.Tensor] = field(default_factory=dict)


def _model(file: archive.Archive, m: manifest.Manifest, wanted: torch.device | None, memory: _Memory) -> Model:
    _suits_host(m)
    check_groups(m.groups)
    where = _device(m, wanted)
    return Model(file, m, _variant(m, where), where, memory)


class Model:
    """A loaded package. Call it as the model that it was made from; inference only. ``inspect.signature`` shows the
    arguments: those that it was exported with, by position or by keyword as they were then.

    path, device, variant (the architecture's name), manifest: what was loaded. ``unload()`` releases everything:
    weights, machine code, the file; so does the end of ``with reflib.load(path) as model:``.

    Any number of threads may call it at once, unless the model writes to its buffers or arguments: then calls must
    follow one another, as those of the original model. It belongs to its process: another process, started with
    "spawn", loads the file itself. (A fork of a process that has run code for CPUs hangs in OpenMP, as it does in eager
    mode.) Code that ``torch.compile`` compiles calls it unchanged.
    """

    __slots__ = ("__call__", "__dict__", "__weakref__")
    __call__: Callable[..., Any]

    def __init__(
        self, file: archive.Archive, about: manifest.Manifest, variant: manifest.PackagedVariant,
        device: torch.device, memory: _Memory,
    ):  # fmt: skip
        self.path, self.device, self.manifest, self.variant = Path(file.path), device, about, variant.arch
        self._workspace, self._file = variant.workspace, file
        program = about.programs[variant.program]
        convention = convention_of(program, device)
        state = _weights(file, about, convention, variant, device, memory)
        libraries = _Libraries()
        try:
            graph = _graph(file, about, variant, program, state, device, libraries)
        except BaseException:
            libraries.close()
            raise
        self._state, self._convention = state, convention
        call, recorded = Wrapped(lambda: graph, checks_inputs=host.extension() is not None), None
        if about.options.get("cuda_graphs"):
            from .recorded import recorded_calls

            recorded = recorded_calls(graph, convention, variant, device, f"the model of {self.path.name}")
        given = (lambda: recorded, recorded) if recorded is not None else (None, None)
        self._exported = ExportedCallable(convention, state, call, program.names, *given)
        self.__signature__ = self._exported.__signature__
        self.__call__ = _untraced(self._exported.open())
        _untraced(self._exported._slow)  # the slow path of the line above

    def get_constant_fqns(self) -> list[str]:
        """Names of its parameters and buffers, as in the ``state_dict`` of the model that it was made from."""
        return [name for name in self._convention.inputs if name]

    def load_constants(self, constants: Mapping[str, torch.Tensor], check_full_update: bool = True) -> None:
        """New values for parameters and buffers, by name: copied into the loaded tensors, so what shares memory changes
        together, the file does not, and later calls use them. The caller's tensors are not kept.

        check_full_update: each of ``get_constant_fqns()`` must be given (a tied one once). Raises PackageError, before
        anything is copied, for a name that the model has not, a missing one, and a tensor of other sizes or dtype.
        """
        held = {name: self._state[name] for name in self.get_constant_fqns()}
        if unknown := sorted(constants.keys() - held.keys()):
            near = ", ".join(difflib.get_close_matches(unknown[0], held, 3, 0)) or "none"
            raise PackageError(f"{self.path.name} has no parameter or buffer {unknown[0]!r}; it has {near}")
        place = {name: (t.data_ptr(), t.shape, t.stride()) for name, t in held.items()}  # (tied: the same)
        missing = ", ".join(sorted(n for n in held if place[n] not in {place[name] for name in constants})[:5])
        if missing and check_full_update:
            way = "check_full_update=False updates a part"
            raise PackageError(f"{self.path.name} also has {missing}, which is not given; {way}")
        for name, value in constants.items():
            if _described(value) != _described(held[name]):
                raise PackageError(f"{name} is {_described(held[name])}; given is {_described(value)}")
        with torch.no_grad():
            for name, value in constants.items():
                held[name].copy_(value)

    def get_metadata(self) -> dict[str, str]:
        """What ``aot_compile`` was given as ``metadata``."""
        return dict(self.manifest.metadata)

    def memory_metrics(self) -> dict[str, int]:
        """Bytes: ``weights`` (on the device, shared ones once), ``workspace`` (temporaries and results at once, as
        planned for the exported sizes), ``peak`` (both)."""
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._state.values()}
        total = sum(held.values())
        return {"weights": total, "workspace": self._workspace, "peak": total + self._workspace}

    def unload(self) -> None:
        """Release everything, except what unreturned calls and a kept ``__call__`` use. Later calls raise; returned
        tensors stay valid. Waits for the GPU to finish its work."""
        path = self.path

        def gone(*args: Any, **kwargs: Any) -> Any:
            raise PackageError(f"{path} was unloaded; load it again")

        self.__call__ = gone
        exported = self.__dict__.pop("_exported", None)
        try:
            if exported is not None and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a stream may still read the weights, or run the code
        finally:
            if exported is not None:
                exported.close()
                exported.__call__ = gone  # breaks its cycle with the entry that it chose
            self._state = {}
            self._file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.unload()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # of copy and pickle
        what = f"{self.path.name} is loaded, with machine code and mapped memory: it cannot be copied or pickled"
        raise PackageError(f"{what}; call reflib.load({str(self.path)!r}) again, in the other process")

    def __repr__(self) -> str:
        return f"<{self.path.name}: {self.variant} on {self.device}>"


def _described(x: Any) -> str:
    return f"a tensor {tuple(x.shape)} of {x.dtype}" if isinstance(x, torch.Tensor) else f"{x!r:.40}"


def _untraced(f: Any) -> Any:
    """``f``, skipped by Dynamo together with all that it calls: a package is compiled already. (As
    ``torch.compiler.disable`` does, which imports Dynamo. Dynamo cannot trace what is not Python.)"""
    function, frames = getattr(f, "__func__", f), torch._C._dynamo.eval_frame
    if hasattr(function, "__code__"):
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = "a loaded package is compiled already"
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return f


# -- does it suit this machine? -------------------------------------------------------------------------
def _suits_host(m: manifest.Manifest) -> None:
    here = platform.system(), platform.machine()
    if (m.system, m.machine) != here:
        raise PackageError(
            f"its host code is for {m.system} on {m.machine}, and this is {here[0]} on {here[1]}: build it there"
        )
    if m.host != manifest.HOST:
        built, newer = m.versions.get("reflib", "?"), "a newer" if m.host > manifest.HOST else "an older"
        what = f"it was built by {newer} reflib ({built}), which calls host code in another way"
        raise PackageError(f"{what}: {'upgrade reflib' if m.host > manifest.HOST else 'build it again'}")
    if missing := host.lacking():
        raise PackageError(f"torch {torch.__version__} has no {missing}: packages need torch 2.11 or later")
    for lib in m.libraries:
        if lib.module.startswith("reflib."):  # ours: importing it registers the op
            try:
                importlib.import_module(lib.module)
            except ImportError as e:
                raise PackageError(f"it calls {lib.op} of {lib.module}, which this reflib has not: {e}") from e
        if not lib.symbol and not _registered(lib.op):
            raise PackageError(f"it calls {lib.op}, which is not registered here: first {lib.remedy}")


def _registered(op: str) -> bool:
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    try:
        getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError):
        return False
    return True


def _wanted(device: torch.device | str | int | None) -> torch.device | None:
    """load's ``device``."""
    try:
        if type(device) is int:  # a GPU, even where torch uses another accelerator or none
            return torch.device("cuda", device)
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as e:
        raise PackageError(f"device={device!r:.80} is no device: packages run on 'cpu' and 'cuda' ('cuda:1')") from e


def _device(m: manifest.Manifest, wanted: torch.device | None) -> torch.device:
    """Where to run."""
    for_gpus, none = any(a != "cpu" for a in m.archs), "this machine has no GPU that PyTorch can use"
    there = torch.cuda.is_available()
    if wanted is None:
        if for_gpus and there:
            return torch.device("cuda", torch.cuda.current_device())
        if "cpu" in m.archs or not for_gpus:
            return torch.device("cpu")
        raise PackageError(f"it holds code for {_listed(m)}, and {none}; {_remedy('cpu')}")
    if wanted.type not in ("cpu", "cuda"):
        raise PackageError(f"packages run on cpu and cuda devices, not on {wanted}")
    if wanted.type == "cpu":
        if "cpu" not in m.archs:
            raise PackageError(f"it holds code for {_listed(m)}, none for a CPU; {_remedy('cpu')}")
        return wanted
    if not for_gpus:
        raise PackageError(f"it holds code for {_listed(m)}, none for a GPU; {_remedy('sm_90')}")
    if not there:
        raise PackageError(f"device {wanted}: {none} (torch {torch.__version__})")
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise PackageError(f"there is no {wanted}; this machine has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def _variant(m: manifest.Manifest, device: torch.device) -> manifest.PackagedVariant:
    """The variant for the device. Raises PackageError if there is none."""
    v = m.variant("cpu") if device.type == "cpu" else _gpu_variant(m, device)
    if missing := sorted(set(v.cpu) - have) if (have := cpu_features()) else []:
        raise PackageError(f"its CPU code uses {', '.join(missing)}, which this CPU does not have; {_remedy('cpu')}")
    return v


def _gpu_variant(m: manifest.Manifest, device: torch.device) -> manifest.PackagedVariant:
    here = device_target("cuda", device.index or 0)
    if here.kind == "hip":
        raise PackageError(f"this GPU is a {here.arch}: reflib compiles for AMD GPUs but cannot run there yet")
    v = variant_for(m, here.capability, here.shared, os.environ.get("CUDA_FORCE_PTX_JIT") == "1")
    gpu = f"this {torch.cuda.get_device_name(device)} ({here.arch})"
    if v is None:
        raise PackageError(f"it holds code for {_listed(m)}; none of it runs on {gpu}; {_remedy(here.arch)}")
    if v.arch == "ptx" and v.driver is not None:
        version, branch = v.driver
        have = getattr(torch._C, "_cuda_getDriverVersion", lambda: version)()
        if have < version:
            raise PackageError(
                f"{gpu} needs its assembly text (PTX), which needs a driver of {branch} or later "
                f"(CUDA {version // 1000}.{version % 1000 // 10}); this one supports CUDA {have // 1000}."
                f"{have % 1000 // 10}: update the driver, or {_remedy(here.arch)}"
            )
    return v


def _listed(m: manifest.Manifest) -> str:
    return ", ".join(f"PTX of {v.made_for} for later GPUs" if v.arch == "ptx" else v.arch for v in m.variants)


def _remedy(arch: str) -> str:
    return f"build it again with archs=[..., {arch!r}]"


# -- its parts ------------------------------------------------------------------------------------------
def convention_of(p: manifest.Signature, device: torch.device) -> Convention:
    """From the manifest. What was for a GPU is for ``device``."""
    arguments = tuple(
        replace(a, tensor=replace(a.tensor, device=device)) if a.tensor and a.tensor.device.type == "cuda" else a
        for a in p.arguments
    )
    in_spec, out_spec = trees.tree(p.in_spec, len(arguments)), trees.tree(p.out_spec, len(p.outputs))
    return replace(p, arguments=arguments, in_spec=in_spec, out_spec=out_spec)


def _weights(
    file: archive.Archive, m: manifest.Manifest, c: Convention, v: manifest.PackagedVariant, device: torch.device,
    memory: _Memory,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The tensors that the variant's program needs, on their devices. What shares storage still shares it."""
    needed = {name: kind for name, kind in zip(c.inputs, c.devices) if name} | dict(v.constants)
    mapped = weights.mapped(file.view("weights.safetensors"), m.weights, m.spans, memory.storages)
    return {name: _moved(mapped[name], device, memory.moved) if kind == "cuda" else mapped[name]
            for name, kind in needed.items()}  # fmt: skip


def _moved(t: torch.Tensor, device: torch.device, moved: dict[int, torch.Tensor]) -> torch.Tensor:
    """``t`` on the device, in the copy of its storage there."""
    storage = t.untyped_storage()
    key = storage.data_ptr()
    if key not in moved:
        moved[key] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).to(device)
    there = torch.empty(0, dtype=t.dtype, device=device)
    return there.set_(moved[key].untyped_storage(), t.storage_offset(), t.shape, t.stride())


class _Libraries:
    """Shared libraries loaded for one package, from anonymous files in memory."""

    def __init__(self) -> None:
        self.handles: list[int] = []

    def open(self, name: str, data: memoryview) -> ctypes.CDLL:
        try:
            lib = self._open(name, data)
        except OSError as e:
            raise PackageError(f"its host code {name} cannot be loaded here: {e}") from e
        self.handles.append(lib._handle)
        return lib

    @staticmethod
    def _open(name: str, data: memoryview) -> ctypes.CDLL:
        if hasattr(os, "memfd_create"):
            number = os.memfd_create(f"reflib {name}", os.MFD_CLOEXEC)
            with os.fdopen(number, "wb") as f:
                f.write(data)
                f.flush()
                return ctypes.CDLL(_new_name(number))
        with tempfile.NamedTemporaryFile(suffix=Path(name).suffix) as f:
            f.write(data)
            f.flush()
            return ctypes.CDLL(f.name)

    def close(self) -> None:
        import _ctypes

        while self.handles:
            _ctypes.dlclose(self.handles.pop())


_loads = itertools.count()


def _new_name(number: int) -> str:
    """A path of the open file ``number`` that was not used before: the loader returns the library that it has under a
    path, and numbers of files repeat. ("./" and "/" mean nothing in a path: they write a counter in binary.)"""
    bits = f"{next(_loads):b}"
    return f"/proc/self/fd/{''.join('./' if b == '1' else '/' for b in bits)}{number}"


def _graph(
    file: archive.Archive, m: manifest.Manifest, v: manifest.PackagedVariant, program: manifest.Signature,
    state: Mapping[str, torch.Tensor], device: torch.device, libraries: _Libraries,
) -> Callable[[list], tuple]:  # fmt: skip
    by_name = {k.name: k for k in v.kernels}
    if any(k.image.endswith(".so") for k in v.kernels):
        _load_openmp()
    cpu: dict[str, ctypes.CDLL] = {}

    def facts(k: manifest.KernelEntry) -> tuple:
        if not k.image.endswith(".so"):
            return bytes(file.view(k.image)), k.symbol, k.shared, k.threads, int(k.early), device.index or 0
        if k.image not in cpu:
            cpu[k.image] = libraries.open(k.image, file.view(k.image))
        if (made := getattr(cpu[k.image], k.symbol, None)) is None:
            raise PackageError(f"its library {k.image} has no function {k.symbol}; build the package again")
        return ctypes.cast(made, ctypes.c_void_p).value, k.checked

    _check_symbols(m, v)
    if host.extension() is None:
        names = _names(v) | in_python.names(v, state, device, facts)
        (call,) = _run(file, v.fallback, names, m, device, ("call",))
        weakref.finalize(call, libraries.close).atexit = False
        return call
    listed = [(name, by_name.get(name)) for name in v.table]
    kernels = [(name, None if k is None or k.late else facts(k)) for name, k in listed]
    loaders = [None if k is None or not k.late else functools.partial(_untraced(facts), k) for _, k in listed]
    functions = _run(file, v.python, _names(v), m, device, v.functions)
    library = libraries.open(v.wrapper, file.view(v.wrapper))
    _check_tables(m, v, library)
    weakref.finalize(library, libraries.close).atexit = False  # (the graph keeps it; other code may call it then)
    return host.graph(
        library, v.graph, len(program.inputs), len(program.outputs), kernels, loaders, functions,
        [decode(o) for o in v.objects], [state[name] for name, _ in v.constants], v.symbols, zeros, device.index or 0,
        unloads=True,
    )  # fmt: skip


def _names(v: manifest.PackagedVariant) -> dict[str, Any]:
    return namespace() | {n: decode(x) for n, x in v.names.items()} | {"only_in_c": _only_in_c}


def _run(
    file: archive.Archive, member: str, names: dict[str, Any], m: manifest.Manifest, device: torch.device,
    wanted: Sequence[str],
) -> list[Callable[..., Any]]:  # fmt: skip
    """Functions that a member defines, which is text in Python."""
    text = bytes(file.view(member)).decode() if member else ""
    text = text.replace("torch.device('cuda:0')", f"torch.device('{device}')")
    for lib in m.libraries:
        if lib.symbol and not _registered(lib.op):  # the op would only explain an error of its C function
            text = text.replace(f" = torch.ops.{lib.op}\n", f" = only_in_c({lib.op!r}, {lib.symbol!r})\n")
    try:
        return list(map(_untraced, host.functions_of(text, names, wanted)))
    except Exception as e:  # it is code, which may raise anything
        raise PackageError(f"its Python text cannot be run ({type(e).__name__}: {e}): build it again") from e


def _check_tables(m: manifest.Manifest, v: manifest.PackagedVariant, library: ctypes.CDLL) -> None:
    try:
        found = (ctypes.c_char * 64).in_dll(library, manifest.TABLES).raw
    except ValueError:
        found = b""
    if found != manifest.tables_of(m, v).encode():
        raise PackageError(f"the tables of its variant {v.arch} are not those that its host code uses; build it again")


def _check_symbols(m: manifest.Manifest, v: manifest.PackagedVariant) -> None:
    if absent := [s for s in v.symbols if not host.address(s)]:
        what = f"it calls the C function {absent[0]}, which no library here has"
        known = next((lib for lib in m.libraries if lib.symbol == absent[0]), manifest.Library(""))
        first = f"torch.ops.load_library({known.file!r})" if known.file else "torch.ops.load_library the one that does"
        raise PackageError(f"{what}: first {first}")


def _only_in_c(op: str, symbol: str) -> Callable[..., Any]:
    """Stands in for an op that is not registered here, because its C function is called instead."""

    def failed(*args: Any, **kwargs: Any) -> NoReturn:
        raise ReflibError(f"the C function {symbol} failed; {op}, which would say why, is not registered here")

    return failed


def _load_openmp() -> None:
    """The runtime of kernels for CPUs: torch's own, else the system's."""
    for path in (*map(str, toolchain.torch_openmp()), "libgomp.so.1"):
        try:
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
