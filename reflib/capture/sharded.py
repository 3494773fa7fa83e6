"""Models whose weights are DTensors (``parallelize_module``: ColwiseParallel, RowwiseParallel ...), exported.

``torch.export`` takes apart what wraps tensors: the graph has this rank's local tensors, ATen calls on them and
functional collectives, as a model that is written with these would have. It has to be told that how a DTensor lies on
the ranks (``DTensorSpec``) is a constant, and it names the local tensor of a weight as a parametrization of it.

Sizes may be open. Where DTensor asks whether one is divided by the number of ranks, so that the dimension could stay
sharded, what cannot be known for all sizes is answered by no (``backed_size_oblivious``), and not by the example's
size; and what ranks have gathered is cut into as many parts by slices of a known size.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental import _config as config
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import CaptureError

_LOCAL = re.compile(r"(^|\.)parametrizations\.(\w+)\.original0$")


@contextmanager
def layouts_are_constants(module: torch.nn.Module, moved: bool) -> Iterator[None]:
    """While ``module`` is exported. ``moved``: for another device. Raises CaptureError."""
    where = sys.modules.get("torch.distributed.tensor")
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    held = [name for name, t in every if where is not None and isinstance(t, where.DTensor)]
    if not held:
        yield
        return
    if moved:
        raise CaptureError(
            f"{held[0]} is a DTensor: such a model is captured for the device that it is on. Parallelize it on a mesh "
            "of the devices it is for, in a process group of theirs"
        )
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    known = pytree.is_constant_class(DTensorSpec)
    if not known:
        pytree.register_constant(DTensorSpec)
    try:
        with _Parts(), config.patch(backed_size_oblivious=True):
            yield
    except CaptureError as e:
        raise CaptureError(
            f"{e}\n{held[0]} is a DTensor, and through DTensors torch.export follows neither an embedding whose rows "
            "are dealt out nor a size that changes where ranks have parts of it: shard embeddings by "
            "ColwiseParallel(), and leave that size out of dynamic_shapes"
        ) from e.__cause__
    finally:
        if not known:
            pytree._deregister_pytree_node(DTensorSpec)


class _Parts(TorchFunctionMode):
    """``chunk`` of what consists of that many equal parts, as what has been gathered does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.chunk, torch.Tensor.chunk):
            x, count, dim = _chunk(*args, **(kwargs or {}))
            size = x.shape[dim]
            if isinstance(size, torch.SymInt) and statically_known_true(size % count == 0):
                return tuple(x.narrow(dim, i * (size // count), size // count) for i in range(count))
        return func(*args, **(kwargs or {}))


def _chunk(input: Any, chunks: int, dim: int = 0) -> tuple[Any, int, int]:
    return input, chunks, dim


def plain_name(name: str, own: Mapping[str, Any]) -> str:
    """The name in the model, whose tensors ``own`` are."""
    plain = _LOCAL.sub(r"\1\2", name)
    return plain if name not in own and plain in own else name
