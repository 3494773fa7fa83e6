"""Building and binding in the full package: C++ kernels as one library, Triton kernels ahead of time in a pool of
threads, and the C++ wrapper. Plugs into ``wrap.BINDERS`` and ``wrap.WRAPPERS``.

Building runs in the background from the moment ``wrap`` returns; the first call waits for what it needs. So a forward
graph's kernels compile while the backward graph is still being captured, and an error of a compiler appears at the
first call.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

import torch

from .. import toolchain
from ..errors import GenerateError, IndexOutOfRange, ToolchainError
from ..generate.compile_triton import alike, compile_kernel, start_triton
from ..generate.kernel import Kernel
from ..ir.expr import Sym
from ..ir.program import KernelNode, Program, fallback_kernels, kernel_nodes
from ..logs import get as logger
from ..options import Options
from ..plan import Plan
from ..target import Target, device_target
from . import cuda_launch, native
from .indices import has_indirect, where_indexed
from .python import Kernels
from .runtime import namespace
from .wrap import Bound, Built, Wrapped
from .zeros import zeros


def wrap_cpp(
    program: Program, plan: Plan, kernels: Kernels, options: Options, built: Built
) -> tuple[str, Wrapped] | None:
    """The wrapper in C++; None where ``wrapper="auto"`` falls back. Raises ToolchainError or GenerateError where
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
    from .host import extension, why_not

    why = why_not()
    if why and options.wrapper == "cpp":
        raise ToolchainError(f'wrapper="cpp" needs a C++ compiler; "auto" does without: {why}')
    if why := why or ("" if extension() else "there is no C extension here that could call one in C++"):
        logger("wrapper").info("the wrapper is in Python: %s", why)
    return not why


def _wrap_cpp(program: Program, plan: Plan, kernels: Kernels, options: Options, built: Built) -> tuple[str, Wrapped]:
    from .aten import declared
    from .cpp import CppPrinter
    from .host import compile_wrapper, functions_of, graph

    printer = CppPrinter(program, plan, kernels, options.check_nan, declared(options.c_shims))
    source = printer.print()
    logger("wrapper").info("%s", source)
    parts = _parts(program, kernels, options, built)
    library = _pool().submit(compile_wrapper, source)

    def first_call() -> Callable[[list], Any]:
        found = [parts.get(n) for n in printer.kernels]
        facts = [(n, p.facts() if p is not None and p.future else None) for n, p in zip(printer.kernels, found)]
        loaders = [None if p is None or p.future else p.facts for p in found]
        functions = functions_of(printer.python, namespace() | program.constants | printer.names, printer.functions)
        constants = [program.constants[c] for c in printer.constants]
        return graph(
            library.result(), program.nodes[0].name if program.nodes else "empty", len(program.inputs),
            len(program.outputs), facts, loaders, functions, printer.objects, constants, printer.symbols, zeros,
        )  # fmt: skip

    return source, Wrapped(first_call, [*_futures(parts), library], checks_inputs=True)


def bind(program: Program, kernels: Kernels, options: Options, built: Built) -> Bound:
    """Kernels for a wrapper in Python."""
    parts = _parts(program, kernels, options, built)
    return {name: p.call for name, p in parts.items()}, _futures(parts)


def start_building(program: Program, kernels: Kernels, options: Options, built: Built = MappingProxyType({})) -> Built:
    """Begin to build kernels of a program whose wrapper is not known yet. ``built``: those begun, in the result too."""
    nodes, fallbacks = {n.name: n for n in kernel_nodes(program.nodes)}, fallback_kernels(program.nodes)
    wanted = {**{k.name: k for k in built if k.name in nodes}, **kernels}
    cpp = tuple(k for k in kernels.values() if k.language == "cpp" and k not in built)
    library = _pool().submit(compile_cpp, cpp, options) if cpp else None
    out: dict[Kernel, Future] = {**built, **{k: library for k in cpp if library is not None}}
    first, begun = alike(wanted.values()), dict[tuple[Kernel, Target], Future]()
    for name, k in wanted.items():
        if k.language == "triton" and k.grid != 0 and name not in fallbacks:
            one = first[k], _target(_device(program, nodes[name]))
            if one not in begun:
                begun[one] = built[k] if k in built else _pool().submit(compile_kernel, *one, True)
            out.setdefault(k, begun[one])
    return out


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    workers = max(4, min(16, os.cpu_count() or 1))
    return ThreadPoolExecutor(max_workers=workers, thread_name_prefix="reflib-build")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child process has the pool's queue, but none of its threads


@cache
def begin(device: str) -> None:
    """Start in the background what the first call on such devices needs, once per process, while the graph is being
    captured: the C extension that calls kernels (gcc, on an empty cache), and Triton's own start."""
    if device in ("cpu", "cuda"):
        _pool().submit(native.extension)
    if device == "cuda":
        _pool().submit(start_triton)


@dataclass(frozen=True)
class _Part:
    """A kernel that a wrapper calls. ``future``: its library (C++) or Binary (Triton); None: a fallback, which is built
    when it is first called."""

    kernel: Kernel
    node: KernelNode
    device: torch.device
    future: Future | None

    def made(self) -> Any:
        if self.future is not None:
            return self.future.result()
        logger("compile").info("%s: building the fallback", self.kernel.name)
        return compile_kernel(self.kernel, _target(self.device), True)

    def facts(self) -> tuple:
        """For a wrapper in C++."""
        if self.kernel.language == "cpp":
            return self.made().address(self.kernel.name), has_indirect(self.node)
        return cuda_launch.facts(self.made(), self.device.index or 0)

    def call(self) -> Callable[..., Any]:
        """For a wrapper in Python."""
        if self.kernel.language == "cpp":
            return self._call_cpp()
        if self.future is not None:
            return cuda_launch.load(self.made(), self.device.index or 0)
        state: list[Callable[..., Any]] = []

        def late(*args: int) -> None:
            if not state:
                state.append(cuda_launch.load(self.made(), self.device.index or 0))
            state[0](*args)

        return late

    def _call_cpp(self) -> Callable[..., Any]:
        k = self.kernel
        fn = self.made().function(k.name, len(k.buffers) + len(k.symbols) + 1)
        if not has_indirect(self.node):
            return fn

        def call(*args: int) -> None:
            if fn(*args):
                what = f"{k.name}{where_indexed(self.node)}"
                raise IndexOutOfRange(f"index out of range in kernel {what}: an index is outside the tensor it indexes")

        return call


def _parts(program: Program, kernels: Kernels, options: Options, built: Built) -> dict[str, _Part]:
    """By kernel name, but for empty kernels. Those that are not being built yet are begun."""
    begun, first = start_building(program, kernels, options, built), alike([*built, *kernels.values()])
    nodes = {n.name: n for n in kernel_nodes(program.nodes)}
    return {
        name: _Part(first[k], nodes[name], _device(program, nodes[name]), begun.get(k))
        for name, k in kernels.items() if k.grid != 0
    }  # fmt: skip


def _futures(parts: Mapping[str, _Part]) -> list[Future]:
    return [p.future for p in parts.values() if p.future is not None]


def _device(program: Program, node: KernelNode) -> torch.device:
    return program.buffers[node.writes()[0]].device


def _target(device: torch.device) -> Target:
    return device_target("cuda", device.index or 0)


def compile_cpp(kernels: tuple[Kernel, ...], options: Options) -> Any:
    from ..generate.cpp import HEADER

    return native.load_library(toolchain.build_library([k.source for k in kernels], options, header=HEADER))
