"""The process's side of C++ wrappers: build them, fill their tables in, call them.

``host.c`` becomes a CPython extension, compiled once through the cache: it needs Python's headers and no others.
PyTorch's functions are found by name in the libraries that torch has loaded.

Where the extension cannot be built (no Python.h), ``host_ctypes.py`` does its work; where this torch or Python lays its
objects out in another way than is known, torch's own functions make handles. Without a compiler, or with an older
torch, ``why_not`` says so, and wrappers are in Python.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import cache, toolchain
from ..errors import ArgumentError, DeviceError, IndexOutOfRange, ReflibError, ToolchainError
from ..logs import get as logger
from .cuda_launch import DRIVER_SOURCE, libcuda
from .native import C_HEAD, build_extension, once

HERE = Path(__file__).parent
HEADERS = {n: (HERE / n).read_text() for n in ("wrapper.h", "host.h")}  # as this process's printer knows them
# in the order of `Torch` in host.h: (name, library)
FUNCTIONS = (
    ("aoti_torch_empty_strided", "cpu"),
    ("aoti_torch__reinterpret_tensor", "cpu"),
    ("aoti_torch_new_tensor_handle", "cpu"),
    ("aoti_torch_delete_tensor_object", "cpu"),
    ("aoti_torch_get_data_ptr", "cpu"),
    ("aoti_torch_get_sizes", "cpu"),
    ("aoti_torch_get_strides", "cpu"),
    ("aoti_torch_get_dim", "cpu"),
    ("aoti_torch_get_dtype", "cpu"),
    ("aoti_torch_get_device_type", "cpu"),
    ("aoti_torch_get_device_index", "cpu"),
    ("torch_call_dispatcher", "cpu"),
    ("torch_new_list_reserve_size", "cpu"),
    ("torch_list_push_back", "cpu"),
    ("torch_new_string_handle", "cpu"),
    ("aoti_record_function_start", "optional"),
    ("aoti_record_function_end", "optional"),
    ("_ZN2at15get_num_threadsEv", "cpu"),
    ("aoti_torch_get_current_cuda_stream", "cuda"),
    ("aoti_torch_get_current_device_index", "optional"),
    ("aoti_torch_create_cuda_guard", "cuda"),
    ("aoti_torch_delete_cuda_guard", "cuda"),
    ("torch_exception_get_what_without_backtrace", "optional"),
)
# in the order of `eager` in host_entry.c
ENTRY_FUNCTIONS = (
    "aoti_torch_grad_mode_is_enabled", "aoti_torch_grad_mode_set_enabled", "aoti_torch_get_layout",
    "aoti_torch_layout_strided", "_ZN2at6native6is_negERKNS_6TensorE",
    "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE",
    "_ZN2at8autocast20set_autocast_enabledEN3c1010DeviceTypeEb",
)  # fmt: skip
WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"  # THPVariable_Wrap(const at::TensorBase&)
# by FAILED_... in host.h, and one more
ERRORS = (
    ReflibError, RuntimeError, DeviceError, IndexOutOfRange, ArgumentError, ReflibError, ReflibError,
    torch.OutOfMemoryError,
)  # fmt: skip
OUT_OF_MEMORY = len(ERRORS) - 1
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-fwrapv", "-w")


@functools.cache
def _library(name: str) -> ctypes.CDLL | None:
    """One of torch's own libraries, which is loaded already."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.so"))
    except OSError:
        return None


def address(name: str) -> int:
    """Of a function of PyTorch's C interface, or of a library that the user loaded; 0 if none has that name."""
    known = [_library(library) for library in ("torch_cpu", "torch_cuda", "torch_python")]
    for lib in (*known, ctypes.CDLL(None), *(_loaded(path) for path in sorted(torch.ops.loaded_libraries))):
        if lib is not None and hasattr(lib, name):
            return ctypes.cast(getattr(lib, name), ctypes.c_void_p).value or 0
    return 0


def _loaded(path: str) -> ctypes.CDLL | None:
    """A library of the user's, loaded by ``torch.ops.load_library``."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # its file is gone
        return None


def build_extension_now() -> ModuleType:
    """``host.c``, compiled (through the cache) and imported. Raises ToolchainError."""
    head = C_HEAD + "#include <pthread.h>\n#include <stdarg.h>\n"
    text = (HERE / "host.c").read_text().replace('#include "host.h"', HEADERS["host.h"])
    text = text.replace('#include "host_entry.c"', (HERE / "host_entry.c").read_text())
    return build_extension("_reflib_host", head + DRIVER_SOURCE + text, ["-ldl", "-lpthread"])


@once
def extension() -> ModuleType | str:
    """The extension; or why there is none (then ctypes does its work)."""
    try:
        module = build_extension_now()
    except ToolchainError as e:
        logger("wrapper").info("calls of C++ wrappers go through ctypes: %s", e)
        return str(e)
    aoti = torch._C._aoti
    known = _layout_is_known(module)
    module.setup(
        torch.Tensor, tuple(address(n) for n, _ in FUNCTIONS), address(WRAP) if known else 0, ERRORS,
        described, None if known else aoti.unsafe_alloc_void_ptrs_from_tensors,
        aoti.alloc_tensors_by_stealing_from_void_ptrs,
    )  # fmt: skip
    if _entry_functions():
        module.setup_entry(torch.nn.Parameter, _entry_functions())
    if torch.cuda.is_available():
        module.open(libcuda())
    return module


def _layout_is_known(module: ModuleType) -> bool:
    """Is a tensor's at::Tensor right behind its object's head? ``_cdata`` is what an at::Tensor holds."""
    plain, parameter = torch.empty(1), torch.nn.Parameter(torch.empty(1))
    return all(module.is_at(t, t._cdata) for t in (plain, parameter, plain.view(1)))


@functools.cache
def _entry_functions() -> tuple[int, ...]:
    """Addresses; none at all if this torch does not have them all."""
    found = tuple(address(n) for n in ENTRY_FUNCTIONS)
    return found if all(found) else ()


def described(x: Any) -> str:
    """What came, for the message of what was expected."""
    try:
        return f"{x.dtype} {list(x.shape)}, strides {list(x.stride())}, on {x.device}"
    except Exception:  # no tensor, or a sparse one, which has no strides
        return type(x).__name__


def why_not() -> str:
    """Why there can be no C++ wrapper in this process; "" if there can."""
    try:
        toolchain.find_compiler()
    except ToolchainError as e:
        return str(e)
    missing = lacking()
    return f"torch {torch.__version__} has no {missing} (2.11 or later is needed)" if missing else ""


@functools.cache
def lacking() -> str:
    """A function of PyTorch's that wrappers need and this torch does not have."""
    return next((n for n, where in FUNCTIONS if where == "cpu" and not address(n)), "")


class WrapperLibrary:
    """A compiled wrapper, loaded. ``entry``: the address of ``reflib_call``."""

    def __init__(self, path: Path):
        self.path = path
        self._handle = ctypes.CDLL(str(path))
        self.entry = ctypes.cast(self._handle.reflib_call, ctypes.c_void_p).value


def compile_wrapper(source: str) -> WrapperLibrary:
    """The text as a loaded library, through the cache. Raises ToolchainError."""
    return WrapperLibrary(build_wrapper(source))


def build_wrapper(source: str, more: tuple[str, ...] = ()) -> Path:
    """The text as a library's file, through the cache. ``more``: flags. Raises ToolchainError."""
    command, flags = toolchain.find_compiler(), (*FLAGS, *more)
    k = cache.key("wrapper", toolchain._without_comments(source), HEADERS, command, toolchain.compiler().version, flags)
    path = cache.get("wrapper", k)
    if path is None:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="reflib-") as folder:
            text, made = Path(folder, "wrapper.cpp"), Path(folder, "wrapper.so")
            for name, header in HEADERS.items():
                Path(folder, name).write_text(header)
            text.write_text(source)
            toolchain.must_run([*command, *flags, str(text), "-o", str(made)])
            path = cache.put("wrapper", k, made, ".so")
    return path


def graph(
    library: WrapperLibrary,
    name: str,
    inputs: int,
    outputs: int,
    kernels: Sequence[tuple[str, tuple | None]],
    loaders: Sequence[Callable[[], tuple] | None],
    functions: Sequence[Callable[..., tuple]],
    objects: Sequence[Any],
    constants: Sequence[torch.Tensor],
    symbols: Sequence[str],
    zeros: Callable[[int, int, int], torch.Tensor],
    gpu: int = 0,
    unloads: bool = False,
) -> Callable[[list], tuple]:
    """The wrapper as a callable: a list of inputs, which it empties, to a tuple of outputs.

    kernels: name and facts, (address, checked) or (image, entry, shared, threads, early, device); None: a loader gives
    them when the kernel is first called. functions: the pieces that are Python's. gpu: which one the wrapper calls 0.
    unloads: machine code is given back when nobody has the graph any more; else a CUDA graph may go on with it.
    """
    native = extension()
    if not isinstance(native, str):
        return native.graph(
            name, library.entry, inputs, outputs, tuple(kernels), tuple(loaders), tuple(functions), tuple(objects),
            tuple(constants), tuple(address(s) for s in symbols), zeros, library, gpu, unloads,
        )  # fmt: skip
    from .host_ctypes import CtypesGraph

    return CtypesGraph(
        library, name, inputs, outputs, kernels, loaders, functions, objects, constants, symbols, zeros, gpu
    )  # fmt: skip


def entry(
    graph: Callable[[list], tuple],
    head: Sequence[torch.Tensor],
    kinds: bytes,
    one: bool,
    slow: Callable[..., Any],
) -> Callable[..., Any]:
    """What a compiled program is called by: arguments by position, which go to ``graph`` behind ``head``. Gradients and
    autocast are off meanwhile.

    kinds: a letter for each argument: t, a tensor whose memory says what it is; i, an int; -, what the graph does not
    look at. one: the result is the graph's only output, not the tuple. slow: gets every call of another kind, and those
    whose arguments the graph refuses.
    """
    native = extension()
    if not isinstance(native, str) and _entry_functions():
        return native.entry(graph, tuple(head), kinds, one, slow)
    from .host_ctypes import python_entry

    return python_entry(graph, head, kinds, one, slow)


def functions_of(text: str, names: Mapping[str, Any], wanted: Sequence[str]) -> list[Callable[..., tuple]]:
    """The Python functions of a wrapper's text."""
    scope = dict(names)
    exec(compile(text, "<reflib wrapper>", "exec"), scope)
    return [scope[n] for n in wanted]
