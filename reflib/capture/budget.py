"""``Options(activation_memory_budget=...)``: how much the forward may save for the backward, by torch's partitioner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch import config

from ..errors import OptionError


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
        raise OptionError(f"option activation_memory_budget={value!r}: must be None or a number from 0 to 1")
    return float(value)
