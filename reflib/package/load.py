"""Loading a package: check it, pick the arm for the device, map the weights, bind the tables.

A loaded package is called as a compiled ExportedProgram is: by ``host.entry``, from C to C++, without Dynamo. Nothing
is written to disk: code is unpacked in memory, machine code for the driver, host code into an anonymous file, since the
system's loader wants to have it in one. Weights on a CPU are the mapped pages themselves, so processes on a
host share them; what a process writes to (buffers that the model updates) becomes its own, page by page.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import platform
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from .. import toolchain
from ..errors import DeviceError, PackageError, ReflibError
from ..ir.data import decode
from ..ir.expr import Expr
from ..target import device_target
from ..wrap import host
from ..wrap.convention import Argument, Convention, Expected, Guard, Output
from ..wrap.exported import ExportedCallable
from ..wrap.runtime import namespace, zeros
from . import archive, elf, manifest, trees, weights
from .architectures import arm_for
from .build import cpu_features


def load(
    path: str | os.PathLike[str], device: torch.device | str | int | None = None, verify: bool | str = True,
    sha256: str | None = None,
) -> Model:  # fmt: skip
    """The package at ``path`` as a callable, with the arguments that the model was exported with.

    device: where it shall run (an int: that GPU). None: the current GPU if the package has code for GPUs and there is
        one, else the CPU.
    verify: True checks every byte against its digest; "code" leaves the weights out, which are most of the bytes.
    sha256: the digest that the file must have. A package is code: load those that you trust.

    Raises PackageError: what is wrong with the file, or why it does not suit this machine and what would. Called with
    other arguments than it was made for, the model raises ReflibError, naming the argument.
    """
    asked = _asked(device)
    file = archive.open(path, verify, sha256)
    try:
        about = manifest.read(file.manifest)
        _suits_host(about)
        where = _device(about, asked)
        return Model(file, about, _arm(about, where), where)
    except BaseException as e:
        file.close()
        if not isinstance(e, _SENSELESS) or isinstance(e, (PackageError, DeviceError)):
            raise
        raise PackageError(f"{path}: its manifest does not make sense ({type(e).__name__}: {e}): build it again") from e


# what reading raises where a manifest has the right types and means nothing
_SENSELESS = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError, ReflibError,
)  # fmt: skip


class Model:
    """A loaded package. Call it as the model that it was made from; inference only. ``inspect.signature`` shows the
    arguments: those that it was exported with, by position or by keyword as they were then.

    path, device, arm (the architecture's name), manifest: what was loaded. ``unload()`` gives everything back: weights,
    machine code, the file; so does the end of ``with reflib.load(path) as model:``.

    Any number of threads may call it at once, but for a model that writes to its buffers, or to its arguments: then
    calls are to be one after another, as those of the model that it was made from. It belongs to its process: another
    one, which is to be started with "spawn", loads the file for itself. (A fork of a process that has run code for CPUs
    hangs in OpenMP, as it does in eager mode.) Code that ``torch.compile`` compiles calls it as it is.
    """

    __slots__ = ("__call__", "__dict__", "__weakref__")
    __call__: Callable[..., Any]

    def __init__(self, file: archive.Archive, about: manifest.Manifest, arm: manifest.Arm, device: torch.device):
        self.path, self.device, self.manifest, self.arm = Path(file.path), device, about, arm.arch
        self._arm, self._file = arm, file
        program = about.programs[arm.program]
        convention = convention_of(program, device)
        state = _weights(file, about, convention, arm, device)
        libraries = _Libraries()
        try:
            graph = _graph(file, about, arm, program, state, device, libraries)
        except BaseException:
            libraries.close()
            raise
        self._state = state
        self._exported = ExportedCallable(convention, state, _Loaded(graph), program.names)
        self.__signature__ = self._exported.__signature__
        self.__call__ = _untraced(self._exported.open())
        _untraced(self._exported._long)  # where the way above sends what it does not take

    def memory_metrics(self) -> dict[str, int]:
        """Bytes: ``weights`` (what they hold on the device, shared ones once), ``workspace`` (temporaries and results
        at once, as planned for the sizes that the model was exported with), ``peak`` (both)."""
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._state.values()}
        total = sum(held.values())
        return {"weights": total, "workspace": self._arm.workspace, "peak": total + self._arm.workspace}

    def unload(self) -> None:
        """Give everything back (but to calls that have not returned, and to who kept ``__call__``). It cannot be called
        any more; tensors that it returned stay good. Waits for a GPU to end what it was told to do."""
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
                exported.__call__ = gone  # it refers to itself, by the way in that it chose
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
        return f"<{self.path.name}: {self.arm} on {self.device}>"


def _untraced(f: Any) -> Any:
    """``f``, which Dynamo leaves alone, and all that it calls: a package is compiled already. (As
    ``torch.compiler.disable`` has it, which imports Dynamo. What is no Python Dynamo cannot trace.)"""
    function, frames = getattr(f, "__func__", f), torch._C._dynamo.eval_frame
    if hasattr(function, "__code__"):
        function._torchdynamo_disable = True
        function._torchdynamo_disable_msg = "a loaded package is compiled already"
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return f


class _Loaded:
    """A graph, as ``ExportedCallable`` wants it: what ``wrap.Wrapped`` is to one that was just compiled."""

    checks_inputs = True

    def __init__(self, graph: Callable[[list], tuple]):
        self.graph = graph

    def __call__(self, args: list) -> tuple:
        return self.graph(args)

    def load(self) -> Callable[[list], tuple]:
        return self.graph


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


def _asked(device: torch.device | str | int | None) -> torch.device | None:
    try:
        if type(device) is int:  # of a GPU, also where torch thinks of another accelerator, or has none
            return torch.device("cuda", device)
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise PackageError(f"device={device!r:.80} is no device: packages run on 'cpu' and 'cuda' ('cuda:1')") from e


def _device(m: manifest.Manifest, asked: torch.device | None) -> torch.device:
    """Where it shall run."""
    gpu = any(a != "cpu" for a in m.archs)
    there = torch.cuda.is_available()
    if asked is None:
        if gpu and there:
            return torch.device("cuda", torch.cuda.current_device())
        if "cpu" in m.archs or not gpu:
            return torch.device("cpu")
        none = "this machine has no GPU that PyTorch can use"
        raise PackageError(f"it holds code for {_said(m)}, and {none}; {_remedy('cpu')}")
    if asked.type not in ("cpu", "cuda"):
        raise PackageError(f"packages run on cpu and cuda devices, not on {asked}")
    if asked.type == "cpu" and "cpu" not in m.archs:
        raise PackageError(f"it holds code for {_said(m)}, none for a CPU; {_remedy('cpu')}")
    if asked.type == "cuda" and not gpu:
        raise PackageError(f"it holds code for {_said(m)}, none for a GPU; {_remedy('sm_90')}")
    if asked.type == "cuda":
        if not there:
            none = "this machine has no GPU that PyTorch can use"
            raise PackageError(f"device {asked}: {none} (torch {torch.__version__})")
        index = torch.cuda.current_device() if asked.index is None else asked.index
        if index >= torch.cuda.device_count():
            raise PackageError(f"there is no {asked}; this machine has {torch.cuda.device_count()} GPUs")
        return torch.device("cuda", index)
    return asked


def _arm(m: manifest.Manifest, device: torch.device) -> manifest.Arm:
    """The arm for the device; or why none."""
    arm = m.arm("cpu") if device.type == "cpu" else _gpu_arm(m, device)
    if missing := sorted(set(arm.cpu) - have) if (have := cpu_features()) else []:
        raise PackageError(f"its CPU code uses {', '.join(missing)}, which this CPU does not have; {_remedy('cpu')}")
    return arm


def _gpu_arm(m: manifest.Manifest, device: torch.device) -> manifest.Arm:
    here = device_target("cuda", device.index or 0)
    if here.kind == "hip":
        raise PackageError(f"this GPU is a {here.arch}: reflib compiles for AMD GPUs but cannot run there yet")
    arm = arm_for(m, here.capability, here.shared, os.environ.get("CUDA_FORCE_PTX_JIT") == "1")
    name = torch.cuda.get_device_name(device)
    if arm is None:
        gpu = f"this {name} ({here.arch})"
        raise PackageError(f"it holds code for {_said(m)}; none of it runs on {gpu}; {_remedy(here.arch)}")
    if arm.arch == "ptx" and arm.driver is not None:
        version, branch = arm.driver
        have_driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: version)()
        if have_driver < version:
            raise PackageError(
                f"this {name} ({here.arch}) needs its assembly text (PTX), which wants a driver of {branch} or later "
                f"(CUDA {version // 1000}.{version % 1000 // 10}); this one takes CUDA {have_driver // 1000}."
                f"{have_driver % 1000 // 10}: update the driver, or {_remedy(here.arch)}"
            )
    return arm


def _said(m: manifest.Manifest) -> str:
    names = [f"PTX of {a.made_for} for later GPUs" if a.arch == "ptx" else a.arch for a in m.arms]
    return ", ".join(names)


def _remedy(arch: str) -> str:
    return f"build it again with archs=[..., {arch!r}]"


# -- its parts ------------------------------------------------------------------------------------------
def convention_of(p: manifest.Program, device: torch.device) -> Convention:
    """From the manifest's words. What was for a GPU is for ``device``."""
    arguments = tuple(
        Argument(a.name, None if a.tensor is None else _expected(a.tensor, device), decode(a.value))
        for a in p.arguments
    )
    outputs = tuple(Output(o.kind, o.target) for o in p.outputs)
    given = sum(o.kind in ("result", "same") for o in outputs)
    return Convention(
        p.inputs, arguments, outputs, trees.arguments(p.arguments_tree, len(arguments)),
        trees.tree(p.result_tree, given, "results"), p.ranges, p.devices, tuple(map(_guard, p.guards)),
    )  # fmt: skip


def _guard(g: manifest.Guard) -> Guard:
    what = decode(g.what)
    if not isinstance(what, Expr) or g.kind not in ("at_least", "equal", "differs"):
        raise PackageError("a condition on its sizes is none: build it again")
    return Guard(g.kind, what, g.text)


def _expected(t: manifest.Tensor, device: torch.device) -> Expected:
    dtype = getattr(torch, t.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PackageError(f"torch {torch.__version__} has no dtype {t.dtype!r}")
    if t.device not in ("cpu", "cuda"):
        raise PackageError(f"an argument is expected on {t.device!r:.80}: packages run on cpu and cuda devices")
    shape, strides = decode(t.shape), decode(t.strides)
    if not _indices(shape) or not _indices(strides) or len(shape) != len(strides):
        raise PackageError("an argument's shape and strides are not as many sizes: build it again")
    return Expected(dtype, device if t.device == "cuda" else torch.device("cpu"), shape, strides)


def _indices(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(e, Expr) for e in x)


def _weights(
    file: archive.Archive, m: manifest.Manifest, c: Convention, arm: manifest.Arm, device: torch.device
) -> dict[str, torch.Tensor]:
    """The tensors that the arm's program needs, where it needs them. What shares storage goes on sharing it."""
    wanted = {name: kind for name, kind in zip(c.inputs, c.devices) if name} | dict(arm.constants)
    mapped = weights.mapped(file.view("weights.safetensors"), m.rows)
    if missing := sorted(set(wanted) - set(mapped)):
        raise PackageError(f"the weight {missing[0]!r} is not in the file")
    on_device: dict[int, torch.Tensor] = {}
    out = {}
    for name, kind in wanted.items():
        t = mapped[name]
        out[name] = _moved(t, device, on_device) if kind == "cuda" else t
    return out


def _moved(t: torch.Tensor, device: torch.device, moved: dict[int, torch.Tensor]) -> torch.Tensor:
    """``t`` on the device, in the copy of its storage there."""
    storage = t.untyped_storage()
    key = storage.data_ptr()
    if key not in moved:
        moved[key] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).to(device)
    there = torch.empty(0, dtype=t.dtype, device=device)
    return there.set_(moved[key].untyped_storage(), t.storage_offset(), t.shape, t.stride())


class _Libraries:
    """Shared objects that were loaded for one package, from anonymous files in memory."""

    def __init__(self) -> None:
        self.handles: list[int] = []

    def open(self, name: str, data: memoryview) -> ctypes.CDLL:
        if bytes(data[:4]) != b"\xcf\xfa\xed\xfe" and (fault := elf.fault(data)):  # the other: macOS's
            raise PackageError(f"{name} in it {fault}: build it again")
        try:
            lib = self._open(name, data)
        except OSError as e:
            raise PackageError(f"its host code cannot be loaded here: {e}") from e
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
    """A path of the open file ``number`` that nobody has used: the loader gives again what it has under a path, and
    numbers come back. ("./" and "/" are written, and mean nothing: a counter in binary.)"""
    bits = f"{next(_loads):b}"
    return f"/proc/self/fd/{''.join('./' if b == '1' else '/' for b in bits)}{number}"


class _Wrapper(host.WrapperLibrary):
    """What ``host.graph`` wants of a compiled wrapper. A graph keeps it as long as it may be called; then the libraries
    are closed."""

    def __init__(self, lib: ctypes.CDLL, libraries: _Libraries):
        self.entry = ctypes.cast(lib.reflib_call, ctypes.c_void_p).value
        weakref.finalize(self, libraries.close).atexit = False  # other code may still call it then


def _graph(
    file: archive.Archive, m: manifest.Manifest, arm: manifest.Arm, program: manifest.Program,
    state: Mapping[str, torch.Tensor], device: torch.device, libraries: _Libraries,
) -> Callable[[list], tuple]:  # fmt: skip
    by_name = {k.name: k for k in arm.kernels}
    if any(k.image.endswith(".so") for k in arm.kernels):
        _openmp()
    cpu: dict[str, ctypes.CDLL] = {}

    def facts(k: manifest.Kernel) -> tuple:
        if not k.image.endswith(".so"):
            return bytes(file.view(k.image)), k.symbol, k.shared, k.threads, int(k.early), device.index or 0
        if k.image not in cpu:
            cpu[k.image] = libraries.open(k.image, file.view(k.image))
        return ctypes.cast(getattr(cpu[k.image], k.symbol), ctypes.c_void_p).value, k.checked

    listed = [(name, by_name.get(name)) for name in arm.table]
    kernels = [(name, None if k is None or k.late else facts(k)) for name, k in listed]
    loaders = [None if k is None or not k.late else functools.partial(_untraced(facts), k) for _, k in listed]
    names = namespace() | {n: decode(v) for n, v in arm.names.items()}
    python = bytes(file.view(arm.python)).decode() if arm.python else ""
    python = python.replace("torch.device('cuda:0')", f"torch.device('{device}')")
    for lib in m.libraries:
        if lib.symbol and not _registered(lib.op):  # bound in the text for the error of its C function alone
            python = python.replace(f" = torch.ops.{lib.op}\n", f" = only_in_c({lib.op!r}, {lib.symbol!r})\n")
    try:
        functions = host.functions_of(python, names | {"only_in_c": _only_in_c}, arm.functions)
    except Exception as e:  # it is code, which may raise anything
        raise PackageError(f"its Python text cannot be run ({type(e).__name__}: {e}): build it again") from e
    if absent := [s for s in arm.symbols if not host.address(s)]:
        what = f"it calls the C function {absent[0]}, which no library here has"
        known = next((lib for lib in m.libraries if lib.symbol == absent[0]), manifest.Library(""))
        first = f"torch.ops.load_library({known.file!r})" if known.file else "torch.ops.load_library the one that does"
        raise PackageError(f"{what}: first {first}")
    return host.graph(
        _Wrapper(libraries.open(arm.wrapper, file.view(arm.wrapper)), libraries), arm.graph, len(program.inputs),
        len(program.outputs), kernels, loaders, list(map(_untraced, functions)), [decode(o) for o in arm.objects],
        [state[name] for name, _ in arm.constants], arm.symbols, zeros, device.index or 0, unloads=True,
    )  # fmt: skip


def _only_in_c(op: str, symbol: str) -> Callable[..., Any]:
    """In the place of an op that is not registered here, because its C function is called instead."""

    def failed(*args: Any, **kwargs: Any) -> NoReturn:
        raise ReflibError(f"the C function {symbol} failed; {op}, which would say why, is not registered here")

    return failed


def _openmp() -> None:
    """The runtime that kernels for CPUs find their threads in: torch's own, else the system's."""
    for path in (*map(str, toolchain.torch_openmp()), "libgomp.so.1"):
        try:
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
