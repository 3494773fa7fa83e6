"""Build and bind: compiled kernels under the names the printed wrapper calls them by.

Building runs in the background from the moment ``wrap`` returns: C++ kernels as one library, Triton kernels in a pool
of threads. The first call waits for what it needs. So a forward graph's kernels compile while the backward graph is
still being captured, and an error of a compiler appears at the first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from threading import Lock
from typing import Any

import torch

from ..errors import GenerateError, IndexOutOfRange, ToolchainError
from ..generate.kernel import Kernel
from ..ir.loops import Indirect
from ..ir.program import Program, Region, Template, regions
from ..logs import get as logger
from ..options import Options
from ..plan import Plan
from ..target import device_target
from .python import PythonPrinter
from .runtime import namespace, zeros

BuildCpp = Callable[[tuple[Kernel, ...], Options], Any]  # -> a Library


def wrap(
    program: Program,
    plan: Plan,
    kernels: Mapping[tuple[str, int], Kernel],
    options: Options,
    build_cpp: BuildCpp | None = None,
    built: Built | None = None,
) -> tuple[str, Wrapped]:
    """The wrapper's text, and the callable (a list of inputs, which it empties, to a tuple of outputs).

    ``build_cpp``: how C++ kernels become a library (tests put those of many graphs into one). ``built``: kernels that
    are being built already (``start_building``).
    """
    if in_cpp(options):
        try:
            return _wrap_cpp(program, plan, kernels, options, build_cpp or compile_cpp, built or {})
        except GenerateError as e:  # a dtype or a device that C++ has no word for
            if options.wrapper == "cpp":
                raise
            logger("wrapper").info("the wrapper is in Python: %s", e)
    printer = PythonPrinter(program, plan, kernels, options.check_nan)
    source = printer.print()
    logger("wrapper").info("%s", source)
    bound, waiting = _bind_kernels(program, kernels, options, build_cpp or compile_cpp, built or {}, PYTHON)
    names = namespace() | program.constants | printer.names

    def first_call() -> Callable[[list], Any]:
        scope = names | {name: get() for name, get in bound.items()}
        exec(compile(source, "<reflib wrapper>", "exec"), scope)
        return scope["call"]

    return source, Wrapped(first_call, waiting)


def in_cpp(options: Options) -> bool:
    """Is the host code to be C++? Raises ToolchainError where it must be and cannot."""
    if options.wrapper == "python":
        return False
    from .host import why_not

    why = why_not()
    if why and options.wrapper == "cpp":
        raise ToolchainError(f'wrapper="cpp" needs a C++ compiler; "auto" does without: {why}')
    if why:
        logger("wrapper").info("the wrapper is in Python: %s", why)
    return not why


def _wrap_cpp(
    program: Program,
    plan: Plan,
    kernels: Mapping[tuple[str, int], Kernel],
    options: Options,
    build_cpp: BuildCpp,
    built: Built,
) -> tuple[str, Wrapped]:
    from .aten import declared
    from .cpp import CppPrinter
    from .host import compile_wrapper, extension, functions_of, graph

    _pool().submit(extension)
    printer = CppPrinter(program, plan, kernels, options.check_nan, declared(options.c_shims))
    source = printer.print()
    logger("wrapper").info("%s", source)
    bound, waiting = _bind_kernels(program, kernels, options, build_cpp, built, HOST)
    library = _pool().submit(compile_wrapper, source)

    def first_call() -> Callable[[list], Any]:
        late = {name for name, get in bound.items() if getattr(get, "late", False)}
        facts = [(n, None if n in late or n not in bound else bound[n]()) for n in printer.kernels]
        loaders = [bound[n] if n in late else None for n in printer.kernels]
        functions = functions_of(printer.python, namespace() | program.constants | printer.names, printer.functions)
        constants = [program.constants[c] for c in printer.constants]
        return graph(
            library.result(), program.nodes[0].name if program.nodes else "empty", len(program.inputs),
            len(program.outputs), facts, loaders, functions, printer.objects, constants, printer.symbols, zeros,
        )  # fmt: skip

    return source, Wrapped(first_call, [*waiting, library], checks_inputs=True)


class Wrapped:
    """What a compiled graph is called by. The first call waits for the kernels and loads them; ``wait`` and ``load`` do
    so before (another thread may wait, and raises what a compiler said; the thread that will call loads).
    ``checks_inputs``: raises ArgumentError for inputs that it was not compiled for, before it does anything."""

    def __init__(
        self, make: Callable[[], Callable[[list], Any]], waiting: Iterable[Future], checks_inputs: bool = False
    ):
        self._make, self._waiting, self._lock, self.checks_inputs = make, tuple(waiting), Lock(), checks_inputs
        self._call: Callable[[list], Any] | None = None

    def __call__(self, args: list) -> Any:
        return (self._call or self.load())(args)

    def wait(self) -> None:
        """Until all kernels that the first call needs are built."""
        for future in self._waiting:
            future.result()

    def load(self) -> Callable[[list], Any]:
        """Load the kernels, into the current context."""
        with self._lock:
            if self._call is None:
                self._call = self._make()
        return self._call


Built = Mapping[Kernel, Future]


def start_building(program: Program, kernels: Mapping[tuple[str, int], Kernel], options: Options) -> Built:
    """Begin to build kernels of a program whose wrapper is not known yet."""
    from ..generate.compile_triton import compile_kernel

    by_name = {n.name: n for n in regions(program.nodes)}
    cpp = tuple(k for k in kernels.values() if k.language == "cpp")
    library = _pool().submit(compile_cpp, cpp, options) if cpp else None
    built: dict[Kernel, Future] = {k: library for k in cpp if library is not None}
    for (region, arm), k in kernels.items():
        if k.language == "triton" and k.grid != 0 and arm == 0:
            device = program.buffers[by_name[region].writes()[0]].device
            built[k] = _pool().submit(compile_kernel, k, device_target("cuda", device.index or 0))
    return built


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    workers = max(4, min(16, os.cpu_count() or 1))
    return ThreadPoolExecutor(max_workers=workers, thread_name_prefix="reflib-build")


if hasattr(os, "register_at_fork"):  # a child has the pool's queue, but none of its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


@cache
def begin(device: str) -> None:
    """Start in the background what the first call on such devices needs, once in a process, while the graph is still
    being captured: the C extension that calls kernels (gcc, on an empty cache), and Triton's own start."""
    if device == "cuda":
        from ..generate.compile_triton import start_triton
        from .cuda_launch import extension

        _pool().submit(extension)
        _pool().submit(start_triton)
    elif device == "cpu":
        from .native import extension

        _pool().submit(extension)


@dataclass(frozen=True)
class Binder:
    """What a printer's text calls kernels by. ``cpp``: (library, kernel, are indices checked?). ``triton``: (binary,
    device's index). ``late``: of a kernel that is built when it is first called, from what builds it."""

    cpp: Callable[[Any, Kernel, bool], Any]
    triton: Callable[[Any, int], Any]
    late: Callable[[Kernel, Callable[[], Any]], Callable[[], Any]]


def _bind_kernels(
    program: Program,
    kernels: Mapping[tuple[str, int], Kernel],
    options: Options,
    build_cpp: BuildCpp,
    built: Built,
    binder: Binder,
) -> tuple[dict[str, Callable[[], Any]], list[Future]]:
    """For each kernel name, a function that waits for the build and returns what the binder makes of it; and what is
    waited for."""
    by_name = {n.name: n for n in regions(program.nodes)}
    bound: dict[str, Callable[[], Any]] = {}
    waiting: list[Future] = []
    cpp = {k.name: k for k in kernels.values() if k.language == "cpp"}
    if cpp:
        rest = tuple(k for k in cpp.values() if k not in built)
        library = _pool().submit(build_cpp, rest, options) if rest else None
        checked = {k.name for (r, _), k in kernels.items() if k.name in cpp and has_indirect(by_name[r])}
        for name, k in cpp.items():
            future = built.get(k) or library
            assert future is not None
            waiting.append(future)
            bound[name] = partial(lambda f, *about: binder.cpp(f.result(), *about), future, k, name in checked)
    for (region, arm), k in kernels.items():
        if k.language == "triton" and k.grid != 0:
            device = program.buffers[by_name[region].writes()[0]].device
            bound[k.name], future = _triton_binding(k, device, arm > 0, built.get(k), binder)
            if future is not None:
                waiting.append(future)
    return bound, waiting


def has_indirect(region: Region) -> bool:
    """Does it index with numbers that it reads, so that its kernel has to say when one is outside?"""
    parts = [p.epilogue if isinstance(p, Template) else p for arm in region.arms for p in arm.parts]
    return any(isinstance(s, Indirect) for p in parts for s in p.body)


def compile_cpp(kernels: tuple[Kernel, ...], options: Options) -> Any:
    from ..generate.cpp import HEADER
    from ..toolchain import build_library
    from .native import load_library

    return load_library(build_library([k.source for k in kernels], options, header=HEADER))


def _triton_binding(
    kernel: Kernel, device: torch.device, lazy: bool, future: Future | None, binder: Binder
) -> tuple[Callable[[], Any], Future | None]:
    """``lazy``: a fallback arm is compiled when it is first called, not before. ``future``: it is being compiled."""
    from ..generate.compile_triton import compile_kernel

    target = device_target("cuda", device.index or 0)
    if future is None and not lazy:
        future = _pool().submit(compile_kernel, kernel, target)

    def load() -> Any:
        binary = future.result() if future is not None else compile_kernel(kernel, target)
        return binder.triton(binary, device.index or 0)

    return (binder.late(kernel, load), None) if lazy else (load, future)


# -- for a wrapper in Python -------------------------------------------------------------------------
def _call_cpp(library: Any, kernel: Kernel, checked: bool) -> Callable[..., Any]:
    fn = library.function(kernel.name, len(kernel.buffers) + len(kernel.symbols) + 1)
    if not checked:
        return fn

    def call(*args: int) -> None:
        if fn(*args):
            raise IndexOutOfRange(
                f"index out of range in kernel {kernel.name}: an index is outside the tensor it indexes"
            )

    return call


def _call_triton(binary: Any, device: int) -> Callable[..., Any]:
    from .cuda_launch import load

    return load(binary, device)


def _call_late(kernel: Kernel, load: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
    def late() -> Callable[..., Any]:
        state: list[Callable[..., Any]] = []

        def call(*args: int) -> None:
            if not state:
                logger("compile").info("%s: building the general arm", kernel.name)
                state.append(load())
            state[0](*args)

        return call

    return late


PYTHON = Binder(_call_cpp, _call_triton, _call_late)


# -- for a wrapper in C++ ----------------------------------------------------------------------------
def _facts_late(kernel: Kernel, load: Callable[[], tuple]) -> Callable[[], tuple]:
    def late() -> tuple:
        logger("compile").info("%s: building the general arm", kernel.name)
        return load()

    late.late = True  # type: ignore[attr-defined]
    return late


def _facts_triton(binary: Any, device: int) -> tuple:
    from .cuda_launch import facts

    return facts(binary, device)


HOST = Binder(lambda library, kernel, checked: (library.address(kernel.name), checked), _facts_triton, _facts_late)
