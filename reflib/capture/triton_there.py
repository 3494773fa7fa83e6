"""The user's own Triton kernels for a GPU that this machine may not have.

``torch.library.triton_op`` and, under Dynamo, ``kernel[grid](...)`` are captured as calls of
``triton_kernel_wrapper_functional``, for ``lower.user_kernels``. What a kernel writes PyTorch finds in Triton's IR, for
which it asks Triton's driver for the GPU. Without one it takes every argument for written (each is copied, inputs are
written back), and Dynamo does not know the kernel at all. So while programs for a GPU are captured, and there is none,
the driver is a stand-in that knows a target, on which what a kernel writes does not depend.

``torch.export`` runs the model's Python: there ``kernel[grid](...)`` would launch. While it captures, such a call is
recorded as ``torch.library.wrap_triton(kernel)`` would, and ``@triton.heuristics`` are asked for their values. So
it is in implementations of an op, which are traced when programs are lowered.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..errors import CaptureError

CAPABILITY = 90  # of the stand-in: any GPU will do


@contextmanager
def triton_of_gpu(recorded: bool = False) -> Iterator[None]:
    """Triton as if there was a GPU, for what captures; nothing where there is one, or Triton is not imported.
    ``recorded``: plain launches are recorded too, wherever we are."""
    if "triton" not in sys.modules:
        yield
        return
    import triton
    from torch._higher_order_ops import triton_kernel_wrap
    from torch.utils import _triton

    there = (
        (triton.runtime.driver, "_active", _Driver()),
        (_triton, "has_triton", lambda: True),
        (_triton, "has_triton_tensor_descriptor_host_tma", lambda: True),
        (triton_kernel_wrap, "JITFunction", triton.runtime.JITFunction),  # torch has its own, without a GPU
        (triton_kernel_wrap, "Autotuner", triton.runtime.Autotuner),
    )
    with ExitStack() as stack:
        for owner, name, value in () if torch.cuda.is_available() else there:
            if hasattr(owner, name):
                stack.enter_context(_replaced(owner, name, _always(value)))
        if recorded:
            stack.enter_context(_replaced(triton.runtime.jit.KernelInterface, "__getitem__", _recording))
            stack.enter_context(_replaced(triton_kernel_wrap, "trace_triton_kernel_wrapper", _kept))
            torch.fx.node.has_side_effect(triton_kernel_wrap.triton_kernel_wrapper_mutation)
            _here.depth = getattr(_here, "depth", 0) + 1
            stack.callback(lambda: setattr(_here, "depth", _here.depth - 1))
        yield


_here = threading.local()  # ``depth``: of this thread, in captures that record plain launches
_lock = threading.Lock()
# (id of the owner, name): the owner, what there was before, the threads inside
_replacements: dict[tuple[int, str], tuple[Any, Any, list[int]]] = {}


def _kept(trace: Callable[..., Any]) -> Callable[..., Any]:
    """torch.export drops calls in branches that return nothing, and refuses those without a ``val``."""

    def traced(mode: Any, op: Any, given: Any) -> Any:
        result = trace(mode, op, given)
        next(reversed(mode.tracer.graph.nodes)).meta.setdefault("val", None)
        return result

    return traced


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda before: value


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``make(what it was)`` instead of ``owner.name``, until all are out: captures in several threads overlap."""
    key, me = (id(owner), name), threading.get_ident()
    with _lock:
        _, before, threads = _replacements.setdefault(key, (owner, getattr(owner, name), []))
        threads.append(me)
        if len(threads) == 1:
            setattr(owner, name, make(before))
    try:
        yield
    finally:
        with _lock:
            threads.remove(me)
            _restored(key)


def _restored(key: tuple[int, str]) -> None:
    """Put back what there was, if no thread is inside."""
    owner, before, threads = _replacements[key]
    if not threads:
        setattr(owner, key[1], before)
        del _replacements[key]


def _in_child() -> None:
    """Of the threads, a child process has the one that forked."""
    _lock._at_fork_reinit()  # type: ignore[attr-defined]
    me = threading.get_ident()
    for key, (_, _, threads) in list(_replacements.items()):
        threads[:] = [t for t in threads if t == me]
        _restored(key)


os.register_at_fork(after_in_child=_in_child)


def check_launches(module: torch.fx.GraphModule, options: Any) -> torch.fx.GraphModule:
    """``module``, unless a launch in it cannot be compiled (plugs into ``pipeline.CAPTURED``). Dynamo lets two kinds
    pass: a grid that is a tensor, which nothing later can use; and a kernel that stores, but to none of the tensors
    that it is given, which AOTAutograd drops. Raises CaptureError naming the kernel."""
    for node in module.graph.nodes:
        if getattr(node.target, "__name__", "") != "triton_kernel_wrapper_mutation":
            continue
        sizes = (size for grid in node.kwargs["grid"] for size in grid if isinstance(size, torch.fx.Node))
        if any(isinstance(_value(size), torch.Tensor) for size in sizes):
            raise CaptureError(
                f"the grid of {_named(node)} is a tensor: a grid is made of numbers; n.item() is one, and waits for "
                "the GPU"
            )
        if _stores_elsewhere(node):
            raise CaptureError(
                f"{_named(node)} stores to none of the tensors that it is given, so PyTorch drops its launch: a "
                "kernel cannot store to an address that it reads from memory; give it the tensor"
            )
    return module


def _value(x: Any) -> Any:
    return x.meta.get("example_value", x.meta.get("val")) if isinstance(x, torch.fx.Node) else x


def _named(node: torch.fx.Node) -> str:
    """``the Triton kernel NAME (FILE:LINE)``."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    name = kernel_side_table.get_kernel(node.kwargs["kernel_idx"]).fn.__name__  # type: ignore[arg-type]
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    path, number = lines[-1] if lines else ("", "")
    file = "cell" if "ipykernel_" in path else os.path.basename(path)  # as in lower.origin
    return f"the Triton kernel {name} ({f'{file}:{number}' if lines else 'its line is not known'})"


def _stores_elsewhere(node: torch.fx.Node) -> bool:
    """Does the kernel have stores, none of them to its tensors? (Where PyTorch cannot tell, all count as written.)"""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    index: Any = node.kwargs["kernel_idx"]
    constants: Any = node.kwargs["constant_args_idx"]
    descriptors: Any = node.kwargs["tma_descriptor_metadata"]
    given: Any = torch.fx.map_arg(node.kwargs["kwargs"], _value)
    if not any(isinstance(v, torch.Tensor) for v in given.values()):
        return False
    with triton_of_gpu():
        if wrap.get_mutated_tensors(index, constants, given, descriptors):
            return False
        known = given | wrap.kernel_side_table.get_constant_args(constants)
        text = str(wrap.generate_ttir(wrap.kernel_side_table.get_kernel(index), known, descriptors)[0])
    return "tt.store" in text or "tt.atomic" in text or "tt.descriptor_store" in text


def _recording(launch: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel[grid]``, whose call is recorded, unless another thread makes it, or the op around it runs for real."""
    from torch._higher_order_ops.triton_kernel_wrap import TraceableTritonKernelWrapper
    from torch._library.triton import is_wrap_triton_enabled
    from triton.runtime.autotuner import Heuristics

    def of_grid(kernel: Any, grid: Any) -> Any:
        if not getattr(_here, "depth", 0) or not is_wrap_triton_enabled():
            return launch(kernel, grid)
        if not isinstance(kernel, Heuristics):
            return TraceableTritonKernelWrapper(kernel, None, grid)

        def call(*args: Any, **kwargs: Any) -> Any:
            for name, value in kernel.values.items():
                kwargs[name] = value({**dict(zip(kernel.arg_names, args)), **kwargs})
            return kernel.fn[grid](*args, **kwargs)

        return call

    return of_grid


class _Driver:
    """Of a GPU that nothing can be launched on."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(
            "a Triton kernel is launched outside of what was captured, and there is no GPU: are its grid or its "
            "arguments read from a tensor, or does PyTorch not capture its kind? TORCH_LOGS=graph_breaks says why"
        )
