"""The process's side of C++ wrappers: build them, fill in their tables, call them.

The C extension (``host.c``, with ``host_graph.c`` and ``host_entry.c``) makes the calls; it needs Python's headers and
no others. PyTorch's functions are found by name in the libraries that torch has loaded.

Without Python.h or a C compiler, and where this torch or Python lays out its objects in an unknown way, there is no
extension, and wrappers are in Python; a package has its wrapper's text in Python for this. Without a C++ compiler, or
with an older torch, ``why_not`` says so.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import toolchain
from ..errors import ArgumentError, DeviceError, IndexOutOfRange, ReflibError, ToolchainError
from . import host_ctypes, native
from .native import once

HERE = Path(__file__).parent
HEADERS = {n: (HERE / n).read_text() for n in ("wrapper.h", "host.h")}  # as of this process's printer
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
    ("aoti_torch_get_storage_size", "optional"),
    ("aoti_torch_get_storage_offset", "optional"),
)
# in the order of `eager` in host_entry.c
ENTRY_FUNCTIONS = (
    "aoti_torch_grad_mode_is_enabled", "aoti_torch_grad_mode_set_enabled", "aoti_torch_get_layout",
    "aoti_torch_layout_strided", "_ZN2at6native6is_negERKNS_6TensorE",
    "aoti_torch_get_storage_offset", "aoti_torch_get_storage_size",
    "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE",
    "_ZN2at8autocast20set_autocast_enabledEN3c1010DeviceTypeEb",
)  # fmt: skip
WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"  # THPVariable_Wrap(const at::TensorBase&)
# by FAILED_... in host.h, and of memory that is lacking
ERRORS = (
    ReflibError, RuntimeError, DeviceError, IndexOutOfRange, ArgumentError, ReflibError, ReflibError,
    torch.OutOfMemoryError,
)  # fmt: skip
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-fwrapv", "-w")


@functools.cache
def _library(name: str) -> ctypes.CDLL | None:
    """One of torch's own libraries, which are loaded already."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.so"))
    except OSError:
        return None


def address(name: str) -> int:
    """The address of a function of PyTorch's C interface, or of a library that the user loaded; 0 if there is none."""
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


@once
def extension() -> Any:
    """The extension, told what all graphs share; None where there is none that suits this torch."""
    module = native.extension()
    if module is host_ctypes or not _layout_is_known() or not address(WRAP):
        return None
    module.setup(
        torch.Tensor, torch.nn.Parameter, tuple(address(n) for n, _ in FUNCTIONS), _entry_functions(), address(WRAP),
        ERRORS, described,
    )  # fmt: skip
    return module


def _layout_is_known() -> bool:
    """Is a tensor's at::Tensor right behind its object's head? ``_cdata`` is what an at::Tensor holds."""
    head, plain = object.__basicsize__, torch.empty(1)
    return all(
        type(t).__basicsize__ >= head + 8 and ctypes.c_uint64.from_address(id(t) + head).value == t._cdata
        for t in (plain, torch.nn.Parameter(plain), plain.view(1))
    )


@functools.cache
def _entry_functions() -> tuple[int, ...]:
    """Their addresses; empty unless this torch has all of them."""
    found = tuple(address(n) for n in ENTRY_FUNCTIONS)
    return found if all(found) else ()


def described(x: Any) -> str:
    """The argument that was passed, for error messages."""
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


def compile_wrapper(source: str) -> ctypes.CDLL:
    """The text as a loaded library, through the cache. Raises ToolchainError."""
    return ctypes.CDLL(str(build_wrapper(source)))


def build_wrapper(source: str, more: tuple[str, ...] = ()) -> Path:
    """The text as a library's file, through the cache. ``more``: flags. Raises ToolchainError."""
    return toolchain.shared_library("wrapper", {"wrapper.cpp": source, **HEADERS}, (*FLAGS, *more))


def graph(
    library: ctypes.CDLL,
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

    kernels: name and facts, (address, checked) or (image, entry, shared, threads, early, device); None: a loader
    returns them when the kernel is first called. functions: the pieces in Python. gpu: the device that is number 0 in
    the wrapper. unloads: machine code is unloaded with the graph; else a CUDA graph may keep using it.
    """
    entry = ctypes.addressof(ctypes.c_char.in_dll(library, "reflib_call"))  # (``cast`` makes cycles)
    return extension().graph(
        name, entry, inputs, outputs, tuple(kernels), tuple(loaders), tuple(functions), tuple(objects),
        tuple(constants), tuple(address(s) for s in symbols), zeros, library, gpu, unloads,
    )  # fmt: skip


def has_entries() -> bool:
    """Is there the extension, and all that its ``entry`` needs of this torch? That makes the callable of a compiled
    program (host_entry.c has its arguments): without gradients and autocast, it passes its own to the graph."""
    return extension() is not None and bool(_entry_functions())


def replays() -> Callable[..., Callable[[list], tuple | None]] | None:
    """``replay`` of host_replay.c: makes a recorded call of cuda_graphs.py a callable. None without the extension."""
    return getattr(extension(), "replay", None)


def checks() -> Callable[[Sequence[Any], bytes, tuple], bool] | None:
    """``usual`` of host_entry.c, if ``has_entries``: is every tensor among the arguments plain memory, and none
    in the memory of one that is written to? A letter per argument: w, written to; r, read; -, whatever it is. The
    tuple: empty, or for each argument None or the sizes and strides it must have, -1 for any; such a one is not empty.
    """
    return extension().usual if has_entries() else None


def functions_of(text: str, names: Mapping[str, Any], wanted: Sequence[str]) -> list[Callable[..., tuple]]:
    """The Python functions of a wrapper's text."""
    scope = dict(names)
    exec(compile(text, "<reflib wrapper>", "exec"), scope)
    return [scope[n] for n in wanted]
