"""``interpolate`` stays one op until it is differentiated, and so its gradient is one op too (``lower/interpolation``).

PyTorch takes it apart above autograd, into reads at computed positions: its backward then adds each gradient at one, 4
or 16 such positions, atomically. While reflib captures a graph, autograd sees the op as eager does; the table of
decompositions takes its forward apart afterwards.

NB: TorchInductor's backward is the atomic one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._decomp.decompositions import upsample_compute_output_size
from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
ABOVE = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
LINEAR = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
NEAREST = tuple(f"{name}{n}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3))


def compiled(compile: Callable[..., Any], backend: Any, module: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Plugs into ``pipeline.COMPILE``. (Compilations take turns: Dynamo has a lock.)"""
    with whole():
        return compile(backend, module, inputs)


@contextmanager
def whole() -> Iterator[None]:
    _collect_all_valid_cia_ops_for_aten_namespace()  # torch.export remembers which ops these are: as they are elsewhere
    before = {}
    try:
        for name in (*LINEAR, *NEAREST):
            op, gradient = getattr(aten, name), getattr(aten, f"{name}_backward").default
            for changed in (op.default, op.vec, gradient):
                before[changed] = dict(changed.py_kernels)
                changed._dispatch_cache.clear()
            for key in ABOVE:
                op.default.py_kernels.pop(key, None)
                op.vec.py_kernels[key] = partial(_sized, op.default, before[op.vec][key])
            gradient.py_kernels[torch._C.DispatchKey.Meta] = _like_input  # C++'s takes no symbolic sizes
        yield
    finally:
        for changed, kernels in before.items():
            changed.py_kernels.clear()
            changed.py_kernels.update(kernels)
            changed._dispatch_cache.clear()


def _sized(op: Any, parts: Callable[..., Any], x: torch.Tensor, output_size: Any, *how: Any) -> torch.Tensor:
    """The overload that takes a size or factors. how: ``align_corners``, if it has that, and the factors. What may be
    empty is taken apart into ``parts`` by PyTorch: its checks of the whole op's sizes fail for that."""
    *corners, factors = how
    if not statically_known_true(x.numel() != 0):
        return parts(x, output_size, *how)
    size = upsample_compute_output_size(x.size(), output_size, factors)
    return op(x, size, *corners, *(factors or [None] * len(size)))


def _like_input(grad: torch.Tensor, output_size: Any, input_size: Any, *how: Any) -> torch.Tensor:
    return grad.new_empty(input_size).to(memory_format=suggest_memory_format(grad))
