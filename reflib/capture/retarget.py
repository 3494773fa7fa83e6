"""A program that torch.export captured on a CPU, as it would have been captured on a GPU.

Its graph is captured once more when it is decomposed, from fakes of its inputs: so it is enough that those lie on the
GPU, and that the graph says so wherever it names a device (factory functions, copies, checks, regions of autocast).
What the model asked while it was captured (``x.is_cuda``) has been answered for a CPU, and ``to("cpu")`` looks like
``to(x.device)`` there: both go to the GPU. Kernels that only a CPU has are refused: they are in a program that was
decomposed for it.

NB: ``torch.export.passes.move_to_device_pass`` moves the program itself and its weights, to a device that is here.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from .copies import copied

_OF_A_CPU = ("_for_cpu", "mkldnn", "onednn")
_CPU = torch.device("cpu")


def retargeted(program: Any, device: torch.device, fake: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of ``program``, whose tensors lie on the CPU, for ``device``. ``fake``: stands for a weight there. Raises
    CaptureError naming a kernel that ``device`` does not have."""
    new = copy.copy(program)
    new._graph_module = _moved(program.graph_module, device)
    new._state_dict = pytree.tree_map_only(torch.Tensor, fake, dict(program.state_dict))
    new._constants = pytree.tree_map_only(torch.Tensor, fake, dict(program.constants))
    return new


def _moved(module: torch.fx.GraphModule, device: torch.device) -> torch.fx.GraphModule:
    module = copied(module)
    for name, inner in list(module.named_children()):
        if isinstance(inner, torch.fx.GraphModule):
            setattr(module, name, _moved(inner, device))

    def place(a: Any) -> Any:
        return device if a == _CPU and isinstance(a, torch.device) else a

    def value(t: torch.Tensor) -> torch.Tensor:
        if t.device != _CPU:
            return t
        with t.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    for node in module.graph.nodes:
        if any(word in str(node.target) for word in _OF_A_CPU):
            raise CaptureError(
                f"the program calls {node.target}, which only a CPU has: export it for {device.type}, or pass it as "
                "torch.export.export returns it, without run_decompositions"
            )
        node.args = torch.fx.node.map_aggregate(node.args, place)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, place)
        if "autocast" in getattr(node.target, "__name__", ""):
            node.args = tuple(device.type if a == "cpu" else a for a in node.args)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, value, node.meta["val"])
    module.recompile()
    return module
