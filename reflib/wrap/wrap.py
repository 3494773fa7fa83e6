"""Build and bind: compiled kernels under the names the printed wrapper calls them by.

Building runs in the background from the moment ``wrap`` returns: C++ kernels as one library, Triton kernels in a pool
of threads. The first call waits for what it needs. So a forward graph's kernels compile while the backward graph is
still being captured, and an error of a compiler appears at the first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import torch

from ..errors import IndexOutOfRange, ReflibError
from ..generate.kernel import Kernel
from ..ir.loops import Indirect
from ..ir.program import Program, Region, Template, regions
from ..logs import get as logger
from ..options import Options
from ..plan import Plan
from ..target import device_target
from .python import PythonPrinter
from .runtime import namespace

BuildCpp = Callable[[tuple[Kernel, ...], Options], Any]  # -> a Library


def wrap(
    program: Program,
    plan: Plan,
    kernels: Mapping[tuple[str, int], Kernel],
    options: Options,
    build_cpp: BuildCpp | None = None,
) -> tuple[str, Callable[[list], Any]]:
    """The wrapper's text, and the callable (a list of inputs, which it empties, to a tuple of outputs).

    ``build_cpp``: how C++ kernels become a library (tests put those of many graphs into one).
    """
    if options.wrapper == "cpp":
        raise ReflibError('wrapper="cpp" is not in this version of reflib; use wrapper="python" or "auto"')
    printer = PythonPrinter(program, plan, kernels, options.check_nan)
    source = printer.print()
    logger("wrapper").info("%s", source)
    bound = _bind_kernels(program, kernels, options, build_cpp or _build_cpp)
    names = namespace() | program.constants | printer.names

    def first_call() -> Callable[[list], Any]:
        scope = names | {name: get() for name, get in bound.items()}
        exec(compile(source, "<reflib wrapper>", "exec"), scope)
        return scope["call"]

    return source, _deferred(first_call)


def _deferred(make: Callable[[], Callable[[list], Any]]) -> Callable[[list], Any]:
    """Calls ``make()`` once, at the first call, and what it returned from then on."""
    made: list[Callable[[list], Any]] = []
    lock = Lock()

    def call(args: list) -> Any:
        if not made:
            with lock:
                if not made:
                    made.append(make())
        return made[0](args)

    return call


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


def _bind_kernels(
    program: Program, kernels: Mapping[tuple[str, int], Kernel], options: Options, build_cpp: BuildCpp
) -> dict[str, Callable[[], Callable[..., Any]]]:
    """For each kernel name, a function that waits for the build and returns what to call."""
    by_name = {n.name: n for n in regions(program.nodes)}
    bound: dict[str, Callable[[], Callable[..., Any]]] = {}
    cpp = {k.name: k for k in kernels.values() if k.language == "cpp"}
    if cpp:
        library = _pool().submit(build_cpp, tuple(cpp.values()), options)
        checked = {k.name for (r, _), k in kernels.items() if k.name in cpp and _has_indirect(by_name[r])}
        for name, k in cpp.items():
            bound[name] = _cpp_binding(library, k, name in checked)
    for (region, arm), k in kernels.items():
        if k.language == "triton" and k.grid != 0:
            device = program.buffers[by_name[region].writes()[0]].device
            bound[k.name] = _triton_binding(k, device, lazy=arm > 0)
    return bound


def _has_indirect(region: Region) -> bool:
    parts = [p.epilogue if isinstance(p, Template) else p for arm in region.arms for p in arm.parts]
    return any(isinstance(s, Indirect) for p in parts for s in p.body)


def _build_cpp(kernels: tuple[Kernel, ...], options: Options) -> Any:
    from ..generate.cpp import HEADER
    from ..toolchain import build_library
    from .native import load_library

    return load_library(build_library([k.source for k in kernels], options, header=HEADER))


def _cpp_binding(library: Future, kernel: Kernel, checked: bool) -> Callable[[], Callable[..., Any]]:
    def get() -> Callable[..., Any]:
        fn = library.result().function(kernel.name, len(kernel.buffers) + len(kernel.symbols) + 1)
        if not checked:
            return fn

        def call(*args: int) -> None:
            if fn(*args):
                raise IndexOutOfRange(
                    f"index out of range in kernel {kernel.name}: an index is outside the tensor it indexes"
                )

        return call

    return get


def _triton_binding(kernel: Kernel, device: torch.device, lazy: bool) -> Callable[[], Callable[..., Any]]:
    """``lazy``: a fallback arm is compiled when it is first called, not before."""
    from ..generate.compile_triton import compile_kernel

    target = device_target("cuda", device.index or 0)
    future = None if lazy else _pool().submit(compile_kernel, kernel, target)

    def load() -> Callable[..., Any]:
        from .cuda_launch import load

        binary = future.result() if future is not None else compile_kernel(kernel, target)
        return load(binary, device.index or 0)

    if not lazy:
        return load

    def late() -> Callable[..., Any]:
        state: list[Callable[..., Any]] = []

        def call(*args: int) -> None:
            if not state:
                logger("compile").info("%s: building the general arm", kernel.name)
                state.append(load())
            state[0](*args)

        return call

    return late
