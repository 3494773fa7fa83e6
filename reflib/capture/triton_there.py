"""The user's own Triton kernels for a GPU that this machine may not have.

``torch.library.triton_op`` and, under Dynamo, ``kernel[grid](...)`` are captured as calls of
``triton_kernel_wrapper_functional``, for ``lower.user_kernels``. What a kernel writes PyTorch finds in Triton's IR, for
which it asks Triton's driver for the GPU; of a kernel that is not given all its arguments, it finds nothing, so it gets
the defaults. Without a GPU it takes every argument for written (each is copied, inputs are
written back), and Dynamo does not know the kernel at all. So while programs for a GPU are captured, and there is none,
the driver is a stand-in that knows a target, on which what a kernel writes does not depend.

``torch.export`` runs the model's Python: there ``kernel[grid](...)`` would launch. While it captures, such a call is
recorded as ``torch.library.wrap_triton(kernel)`` would, and ``@triton.heuristics`` are asked for their values. So
it is in implementations of an op, which are traced when programs are lowered.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import CaptureError
from .launch_arguments import defaults, taken, users_line

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
        stack.enter_context(_replaced(triton_kernel_wrap.TritonHOPifier, "call_triton_kernel", taken))
        stack.enter_context(_replaced(triton_kernel_wrap, "generate_ttir", _given_all))
        with suppress(ImportError):
            from triton.tools.tensor_descriptor import TensorDescriptor

            stack.enter_context(_replaced(TensorDescriptor, "__post_init__", _without_address))
        if recorded:
            stack.enter_context(_replaced(triton.runtime.jit.KernelInterface, "__getitem__", _recording))
            stack.enter_context(_replaced(triton_kernel_wrap, "trace_triton_kernel_wrapper", _kept))
            stack.enter_context(_replaced(torch._library.utils, "is_impure", _with_launches))
            _here.depth = getattr(_here, "depth", 0) + 1
            stack.callback(lambda: setattr(_here, "depth", _here.depth - 1))
        yield


def compiled_with_launches(
    compile: Callable[..., Any], backend: Any, module: torch.fx.GraphModule, inputs: Sequence[Any]
) -> Any:
    """``compile``, where there is a GPU for what launches (plugs into ``pipeline.COMPILE``)."""
    with triton_of_gpu() if torch.cuda.is_available() else nullcontext():
        return compile(backend, module, inputs)


_here = threading.local()  # ``depth``: of this thread, in captures that record plain launches
_lock = threading.Lock()
# (id of the owner, name): the owner, what there was before, the threads inside
_replacements: dict[tuple[int, str], tuple[Any, Any, list[int]]] = {}


def _with_launches(is_impure: Callable[..., bool]) -> Callable[..., bool]:
    """A launch has side effects. (``torch.fx.has_side_effect`` means nothing for higher-order ops in PyTorch 2.11.)"""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    return lambda op, **how: op is triton_kernel_wrapper_mutation or is_impure(op, **how)


def _kept(trace: Callable[..., Any]) -> Callable[..., Any]:
    """torch.export refuses calls in branches without a ``val``."""

    def traced(mode: Any, op: Any, given: Any) -> Any:
        result = trace(mode, op, given)
        next(iter(reversed(mode.tracer.graph.nodes))).meta.setdefault("val", None)
        return result

    return traced


def _given_all(ttir: Callable[..., Any]) -> Callable[..., Any]:
    def of_all(kernel: Any, kwargs: dict[str, Any], *how: Any, **more: Any) -> Any:
        configs = getattr(kernel, "configs", ())
        function = kernel.fn if hasattr(kernel, "configs") else kernel
        given = {*kwargs, *(configs[0].kwargs if configs else ())}
        return ttir(kernel, {**defaults(function, given), **kwargs}, *how, **more)

    return of_all


def _without_address(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Triton 3.6 asks a tensor that is traced for its address."""

    def checked(self: Any) -> None:
        base = self.base
        traced = type(base).__name__ in ("FakeTensor", "FunctionalTensor")
        self.base = SimpleNamespace(dtype=base.dtype, data_ptr=lambda: 0) if traced else base
        try:
            check(self)
        finally:
            self.base = base

    return checked


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
        """Raises CaptureError: somebody launches a kernel."""
        from torch._dynamo.utils import counters

        breaks = list(counters["graph_break"])
        why = f" ({' '.join(breaks[-1].split())[:300]})" if breaks else ""
        raise CaptureError(
            f"{_launching()} is launched outside of what was captured, and there is no GPU: are its grid or its "
            f"arguments read from a tensor, or does PyTorch not capture its kind{why}? TORCH_LOGS=graph_breaks says why"
        )


def _launching() -> str:
    """What the stack above launches: ``the Triton kernel NAME (FILE:LINE)``, as far as that is in it."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    kernels: list[Any] = [f.f_locals.get("self") for f in frames if "triton" in f.f_globals.get("__name__", "")]
    name = next((k.fn.__name__ for k in kernels if hasattr(k, "fn") and hasattr(k.fn, "__name__")), "")
    return f"the Triton kernel {name}{users_line()}" if name else "a Triton kernel"
