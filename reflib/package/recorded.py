"""Calls of a loaded package, recorded as CUDA graphs (``aot_compile(cuda_graphs=True)``)."""

from collections.abc import Callable

import torch

from ..ir.expr import Sym
from ..logs import get as logger
from ..wrap import cuda_graphs, host
from ..wrap.convention import Convention
from .manifest import PackagedVariant


def recorded_calls(
    graph: Callable[[list], tuple], c: Convention, v: PackagedVariant, device: torch.device, what: str
) -> cuda_graphs.Recorded | None:
    """``graph``, whose calls are recorded (``wrap.cuda_graphs``); None where they cannot be."""
    why = v.unrecorded or ("" if host.has_entries() else cuda_graphs.NO_EXTENSION)
    if why := why if device.type == cuda_graphs.RECORDER.kind else "it runs on a CPU":
        logger("cuda_graphs").info("calls of %s are not recorded: %s", what, why)
        return None
    given = [i for i, name in enumerate(c.inputs) if not name]
    symbols = [i for i, a in zip(given, c.arguments) if isinstance(a.value, Sym)]
    writes = {o.target for o in c.written}
    names = {i: name for i, name in enumerate(c.inputs) if name} | {i: a.name for i, a in zip(given, c.arguments)}
    tensors = tuple(i for i, kind in enumerate(c.devices) if kind)
    dynamic = any(e.symbols() for a in c.arguments if a.tensor for e in (*a.tensor.shape, *a.tensor.strides))
    written = frozenset(i for i in tensors if names[i] in writes)
    unchecked = frozenset(given).intersection((*tensors, *symbols))
    return cuda_graphs.Recorded(
        graph, cuda_graphs.Inputs(tensors, tuple(symbols), written, dynamic, device, unchecked), what
    )
