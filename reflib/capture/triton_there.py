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

import functools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import CaptureError
from .launch_arguments import defaults, taken, users_line

CAPABILITY = 90  # of the stand-in: any GPU will do


_here = threading.local()  # ``level``: of this thread: 1 where there is a GPU for it, 2 where launches are recorded too


@contextmanager
def triton_of_gpu(recorded: bool = False) -> Iterator[None]:
    """Triton as if there was a GPU, for what this thread captures; nothing where there is one, or Triton is not
    imported. ``recorded``: plain launches are recorded too, wherever we are."""
    if "triton" not in sys.modules:
        yield
        return
    _prepare()
    before = _level()
    _here.level = max(before, 1 + recorded)
    try:
        yield
    finally:
        _here.level = before


def _level() -> int:
    return getattr(_here, "level", 0)


@functools.cache
def _prepare() -> None:
    """From now on, what captures depend on asks first whether its thread is in one. (So nothing has to be put back.)"""
    import triton
    from torch._higher_order_ops import triton_kernel_wrap
    from torch.utils import _triton

    def inside(owner: Any, name: str, make: Callable[[Any], Any], level: int = 1) -> None:
        outside = getattr(owner, name)
        made = make(outside)
        choose = lambda *args, **how: (made if _level() >= level else outside)(*args, **how)  # noqa: E731
        setattr(owner, name, functools.wraps(outside)(choose))

    if not torch.cuda.is_available():
        driver = type(triton.runtime.driver)
        actual, stand_in = driver.active.fget, _Driver()
        driver.active = property(lambda self: stand_in if _level() else actual(self))
        inside(_triton, "has_triton", lambda _: lambda: True)
        if hasattr(_triton, "has_triton_tensor_descriptor_host_tma"):
            inside(_triton, "has_triton_tensor_descriptor_host_tma", lambda _: lambda: True)
        triton_kernel_wrap.JITFunction = triton.runtime.JITFunction  # torch has its own, without a GPU
        triton_kernel_wrap.Autotuner = triton.runtime.Autotuner
    inside(triton_kernel_wrap.TritonHOPifier, "call_triton_kernel", taken)
    inside(triton_kernel_wrap, "generate_ttir", _given_all)
    with suppress(ImportError):
        from triton.tools.tensor_descriptor import TensorDescriptor

        inside(TensorDescriptor, "__post_init__", _without_address)
    inside(triton.runtime.jit.KernelInterface, "__getitem__", _recording, level=2)
    inside(triton_kernel_wrap, "trace_triton_kernel_wrapper", _kept, level=2)
    inside(torch._library.utils, "is_impure", _with_launches, level=2)


def compiled_with_launches(
    compile: Callable[..., Any], backend: Any, module: torch.fx.GraphModule, inputs: Sequence[Any]
) -> Any:
    """``compile``, where there is a GPU for what launches (plugs into ``pipeline.COMPILE``)."""
    with triton_of_gpu() if torch.cuda.is_available() else nullcontext():
        return compile(backend, module, inputs)


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


def _recording(launch: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel[grid]``, whose call is recorded, unless the op around it runs for real."""
    from torch._higher_order_ops.triton_kernel_wrap import TraceableTritonKernelWrapper
    from torch._library.triton import is_wrap_triton_enabled
    from triton.runtime.autotuner import Heuristics

    def of_grid(kernel: Any, grid: Any) -> Any:
        if not is_wrap_triton_enabled():
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
        """Raises CaptureError: a kernel is launched."""
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
