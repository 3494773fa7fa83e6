"""Building and binding in the full package: C++ kernels as one library, Triton kernels ahead of time in a pool of
threads, and the C++ wrapper. Plugs into ``wrap.BINDERS`` and ``wrap.WRAPPERS``.

Building runs in the background from the moment ``wrap`` returns; the first call waits for what it needs. So a forward
graph's kernels compile while the backward graph is still being captured, and an error of a compiler appears at the
first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch

from ..errors import GenerateError, IndexOutOfRange, ToolchainError
from ..generate.kernel import Kernel
from ..ir.expr import Sym
from ..ir.program import KernelNode, Program, fallback_kernels, kernel_nodes
from ..logs import get as logger
from ..options import Options
from ..plan import Plan
from ..target import device_target
from .indices import has_indirect, where_indexed
from .python import Kernels
from .runtime import namespace
from .wrap import Bound, Built, Wrapped, by_language
from .zeros import zeros


def wrap_cpp(
    program: Program, plan: Plan, kernels: Kernels, options: Options, built: Built
) -> tuple[str, Wrapped] | None:
    """The wrapper in C++; None where ``wrapper="auto"`` has to do without. Raises ToolchainError or GenerateError where
    C++ was asked for and there is no compiler, or no C++ type for something in the program."""
    if not in_cpp(options):
        return None
    if odd := [x.name for x in program.inputs if isinstance(x, Sym) and _is_no_integer(x)]:
        logger("wrapper").info("the wrapper is in Python: %s are no numbers of 64 bits", ", ".join(odd))
        return None
    try:
        return _wrap_cpp(program, plan, kernels, options, built)
    except GenerateError as e:  # a dtype or a device without a C++ name
        if options.wrapper == "cpp":
            raise
        logger("wrapper").info("the wrapper is in Python: %s", e)
        return None


def _is_no_integer(x: Sym) -> bool:
    """A float (PyTorch names their symbols z...), or the size of a jagged dimension: a symbol without a value."""
    return x.name.startswith("z") or (x.name.startswith("s") and x.hint is None)


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


def _wrap_cpp(program: Program, plan: Plan, kernels: Kernels, options: Options, built: Built) -> tuple[str, Wrapped]:
    from .aten import declared
    from .cpp import CppPrinter
    from .host import compile_wrapper, extension, functions_of, graph

    _pool().submit(extension)
    printer = CppPrinter(program, plan, kernels, options.check_nan, declared(options.c_shims))
    source = printer.print()
    logger("wrapper").info("%s", source)
    bound: dict[str, Callable[[], Any]] = {}
    waiting: list[Future] = []
    for language, mine in by_language(kernels).items():
        bind = {"cpp": _bind_cpp, "triton": _bind_triton}[language]
        more, futures = bind(program, mine, options, built, HOST)
        bound |= more
        waiting += futures
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


def start_building(program: Program, kernels: Kernels, options: Options) -> Built:
    """Begin to build kernels of a program whose wrapper is not known yet."""
    from ..generate.compile_triton import compile_kernel

    nodes, fallbacks = {n.name: n for n in kernel_nodes(program.nodes)}, fallback_kernels(program.nodes)
    cpp = tuple(k for k in kernels.values() if k.language == "cpp")
    library = _pool().submit(compile_cpp, cpp, options) if cpp else None
    built: dict[Kernel, Future] = {k: library for k in cpp if library is not None}
    for name, k in kernels.items():
        if k.language == "triton" and k.grid != 0 and name not in fallbacks:
            device = program.buffers[nodes[name].writes()[0]].device
            built[k] = _pool().submit(compile_kernel, k, device_target("cuda", device.index or 0))
    return built


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    workers = max(4, min(16, os.cpu_count() or 1))
    return ThreadPoolExecutor(max_workers=workers, thread_name_prefix="reflib-build")


if hasattr(os, "register_at_fork"):  # a child process has the pool's queue, but none of its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


@cache
def begin(device: str) -> None:
    """Start in the background what the first call on such devices needs, once per process, while the graph is being
    captured: the C extension that calls kernels (gcc, on an empty cache), and Triton's own start."""
    if device == "cuda":
        from ..generate.compile_triton import start_triton
        from .native import extension

        _pool().submit(extension)
        _pool().submit(start_triton)
    elif device == "cpu":
        from .native import extension

        _pool().submit(extension)


@dataclass(frozen=True)
class Binder:
    """How a printed wrapper calls kernels. ``cpp``: from (library, kernel, its node). ``triton``: from
    (binary, device index). ``late``: for a kernel built when it is first called, from the function that builds it."""

    cpp: Callable[[Any, Kernel, KernelNode], Any]
    triton: Callable[[Any, int], Any]
    late: Callable[[Kernel, Callable[[], Any]], Callable[[], Any]]


def bind_cpp(program: Program, kernels: Kernels, options: Options, built: Built) -> Bound:
    """C++ kernels, for a wrapper in Python."""
    return _bind_cpp(program, kernels, options, built, PYTHON)


def bind_triton(program: Program, kernels: Kernels, options: Options, built: Built) -> Bound:
    """Triton kernels, for a wrapper in Python."""
    return _bind_triton(program, kernels, options, built, PYTHON)


def _bind_cpp(program: Program, kernels: Kernels, options: Options, built: Built, binder: Binder) -> Bound:
    nodes = {n.name: n for n in kernel_nodes(program.nodes)}
    rest = tuple(k for k in kernels.values() if k not in built)
    library = _pool().submit(compile_cpp, rest, options) if rest else None
    bound: dict[str, Callable[[], Any]] = {}
    waiting: list[Future] = []
    for name, k in kernels.items():
        future = built.get(k) or library
        assert future is not None
        waiting.append(future)
        bound[name] = partial(lambda f, *about: binder.cpp(f.result(), *about), future, k, nodes[name])
    return bound, waiting


def _bind_triton(program: Program, kernels: Kernels, options: Options, built: Built, binder: Binder) -> Bound:
    nodes, fallbacks = {n.name: n for n in kernel_nodes(program.nodes)}, fallback_kernels(program.nodes)
    bound: dict[str, Callable[[], Any]] = {}
    waiting: list[Future] = []
    for name, k in kernels.items():
        if k.grid == 0:
            continue
        device = program.buffers[nodes[name].writes()[0]].device
        bound[name], future = _triton_binding(k, device, name in fallbacks, built.get(k), binder)
        if future is not None:
            waiting.append(future)
    return bound, waiting


def compile_cpp(kernels: tuple[Kernel, ...], options: Options) -> Any:
    from ..generate.cpp import HEADER
    from ..toolchain import build_library
    from .native import load_library

    return load_library(build_library([k.source for k in kernels], options, header=HEADER))


def _triton_binding(
    kernel: Kernel, device: torch.device, lazy: bool, future: Future | None, binder: Binder
) -> tuple[Callable[[], Any], Future | None]:
    """``lazy``: a fallback is compiled when it is first called, not before. ``future``: it is being compiled."""
    from ..generate.compile_triton import compile_kernel

    target = device_target("cuda", device.index or 0)
    if future is None and not lazy:
        future = _pool().submit(compile_kernel, kernel, target)

    def load() -> Any:
        binary = future.result() if future is not None else compile_kernel(kernel, target)
        return binder.triton(binary, device.index or 0)

    return (binder.late(kernel, load), None) if lazy else (load, future)


# -- for a wrapper in Python -------------------------------------------------------------------------
def _call_cpp(library: Any, kernel: Kernel, node: KernelNode) -> Callable[..., Any]:
    fn = library.function(kernel.name, len(kernel.buffers) + len(kernel.symbols) + 1)
    if not has_indirect(node):
        return fn

    def call(*args: int) -> None:
        if fn(*args):
            what = f"{kernel.name}{where_indexed(node)}"
            raise IndexOutOfRange(f"index out of range in kernel {what}: an index is outside the tensor it indexes")

    return call


def _call_triton(binary: Any, device: int) -> Callable[..., Any]:
    from .cuda_launch import load

    return load(binary, device)


def _call_late(kernel: Kernel, load: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
    def late() -> Callable[..., Any]:
        state: list[Callable[..., Any]] = []

        def call(*args: int) -> None:
            if not state:
                logger("compile").info("%s: building the fallback", kernel.name)
                state.append(load())
            state[0](*args)

        return call

    return late


PYTHON = Binder(_call_cpp, _call_triton, _call_late)


# -- for a wrapper in C++ ----------------------------------------------------------------------------
def _facts_late(kernel: Kernel, load: Callable[[], tuple]) -> Callable[[], tuple]:
    def late() -> tuple:
        logger("compile").info("%s: building the fallback", kernel.name)
        return load()

    late.late = True  # type: ignore[attr-defined]
    return late


def _facts_triton(binary: Any, device: int) -> tuple:
    from .cuda_launch import facts

    return facts(binary, device)


HOST = Binder(
    lambda library, kernel, node: (library.address(kernel.name), has_indirect(node)), _facts_triton, _facts_late
)
