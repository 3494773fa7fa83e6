"""``Options(activation_memory_budget=...)``: how much the forward may save for the backward, by torch's partitioner."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import OptionError
from ..options import Options

LEAST = 1e-9  # a budget that nothing fits into, but not 0


def within_budget(
    compile: Callable[..., Any], backend: Any, module: torch.fx.GraphModule, inputs: Sequence[Any]
) -> Any:
    """``compile``, with the budget of ``backend.options`` for all that is cut in forward and backward."""
    budget = backend.options.activation_memory_budget
    if budget is None:
        return compile(backend, module, inputs)
    with config.patch(activation_memory_budget=budget):
        return compile(backend, module, inputs)


def budget(value: object) -> float:
    """A budget that is given. Raises OptionError for anything but a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise OptionError(f"option activation_memory_budget={value!r:.200}: must be None or a number from 0 to 1")
    return float(value)


def save_random(joint: torch.fx.GraphModule, options: Options, gpu: bool) -> torch.fx.GraphModule:
    """Tag what draws numbers for the partitioner: computed again, it would draw others, and gradients would be of
    another function. Below a budget of 1 torch's partitioner does that (pytorch#190758). At 0 it saves inputs alone,
    whatever is tagged; so where something must be saved, it gets the next larger budget."""
    must = [n for n in joint.graph.nodes if _saved(n)]
    for node in must:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if must and config.activation_memory_budget == 0:
        must[0].meta["memory_budget"] = LEAST
    return joint


def _saved(node: torch.fx.Node) -> bool:
    tag = node.meta.get("recompute")
    if tag is not None or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return tag == CheckpointPolicy.MUST_SAVE
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in arguments), node.args)) | node.kwargs
    return given.get("dropout_p", 0.0 if any(a.name == "dropout_p" for a in arguments) else 1.0) != 0  # attention's
