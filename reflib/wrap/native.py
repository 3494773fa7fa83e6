"""Calling compiled functions from Python, cheaply.

A kernel's library holds, beside ``int NAME(pointers..., sizes..., int threads)``, a second entry
``int NAME_packed(const int64_t* a)`` that takes the same arguments as one array. The C extension (``host.c``) puts
Python ints into such an array and makes the call: a fraction of a microsecond, where ctypes takes several. It launches
GPU kernels (``cuda_launch``) and runs C++ wrappers (``host``) as well. It is compiled once per machine, through the
cache; without Python's headers or a compiler ``host_ctypes`` calls the kernels.

:func:`build_extension` is open to others: any C source with a ``PyInit_<name>`` becomes a module. ::

    module = build_extension("_my_module", C_SOURCE)      # ToolchainError without a compiler or Python.h
"""

import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import toolchain
from ..errors import DeviceError, ReflibError, ToolchainError
from ..logs import get as logger
from . import host_ctypes


def build_extension(
    name: str, c_source: str, flags: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> ModuleType:
    """The CPython extension module ``name`` made of ``c_source`` (C11, which must define ``PyInit_<name>``).

    Compiled once per Python ABI, compiler and source, through the cache. ``flags`` are added at the end of the
    command line (``-I...``, ``-ldl``). ``files``: text by name, of what the source includes. Raises ToolchainError when
    the compiler or Python.h is missing.
    """
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise ToolchainError(f"Python's C headers are missing ({include}/Python.h): install python3-dev or the like")
    abi = sysconfig.get_config_var("SOABI") or "abi"
    mac = ("-undefined", "dynamic_lookup") if os.uname().sysname == "Darwin" else ()
    options = ("-x", "c", "-std=gnu11", "-O2", "-fPIC", "-shared", f"-I{include}", *mac)
    path = toolchain.shared_library("extensions", {f"{name}.c": c_source, **(files or {})}, options, flags, abi)
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def once(make: Callable[[], Any]) -> Callable[[], Any]:
    """``make``, called the first time only; other threads wait for it."""
    made: list[Any] = []
    lock = threading.Lock()
    # a child has the lock, but not the thread that holds it
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]

    @functools.wraps(make)
    def get() -> Any:
        with lock:
            if not made:
                made.append(make())
        return made[0]

    return get


def build_host() -> ModuleType:
    """``host.c``, compiled (through the cache) and imported. Raises ToolchainError."""
    files = {p.name: p.read_text() for p in sorted(Path(__file__).parent.glob("*.[ch]")) if p.name != "wrapper.h"}
    return build_extension("_reflib_host", files.pop("host.c"), ["-ldl", "-lpthread"], files)


@once
def extension() -> Any:
    """The extension; ``host_ctypes`` where it cannot be built."""
    try:
        module = build_host()
    except ToolchainError as e:
        logger("wrapper").info("kernels are called through ctypes: %s", e)
        return host_ctypes
    module.driver(host_ctypes.libcuda(), DeviceError)
    return module


class Library:
    """A loaded library of kernels. It stays loaded as long as one of its functions is alive (and after)."""

    def __init__(self, path: Path):
        self.path = path
        self._handle = ctypes.CDLL(str(path))

    def function(self, name: str, nargs: int) -> Callable[..., int]:
        """Kernel ``name`` as a callable of ``nargs`` ints (pointers, sizes, threads), which returns its int result.
        The GIL is released while it runs."""
        try:
            address = self.address(f"{name}_packed")
        except AttributeError:
            raise ReflibError(f"{self.path} holds no kernel {name!r}") from None
        return extension().function(address, nargs, self)

    def address(self, name: str) -> int:
        """Of kernel ``name`` itself, which takes its arguments as C does."""
        return ctypes.cast(getattr(self._handle, name), ctypes.c_void_p).value or 0


def load_library(path: str | os.PathLike[str]) -> Library:
    """Load a library that :func:`reflib.toolchain.build_library` made."""
    try:
        return Library(Path(path))
    except OSError as e:
        raise ReflibError(f"cannot load the compiled kernels {path}: {e}") from e
