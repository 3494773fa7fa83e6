"""What printed wrappers check, beyond ``runtime.py``: sizes, of exported programs and of tuned ones; and what a call
returns that was given memory for its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError, ReflibError
from ..logs import get as logger
from .runtime import _said


def expect_sizes(holds: bool, what: str, **sizes: int) -> None:
    """What must hold of the sizes of the arguments, or the graph is not for them."""
    if not holds:
        here = ", ".join(f"{name} = {n}" for name, n in sizes.items())
        raise ArgumentError(f"it was exported where {what} holds of the arguments' sizes; here {here}")


def outside(what: str, size: int, least: int, most: int, op: str) -> None:
    """Log, once for each thing and op, that a size is outside the tuned ranges."""
    if (op, what) not in _said:
        _said.add((op, what))
        message = "%s = %d is outside the sizes that were tuned, %d to %d: the nearest range serves"
        logger("autotune").warning(message, what, size, least, most)


def given_back(given: list[torch.Tensor], op: str) -> Callable[[Any], None]:
    """What raises ReflibError unless ``op``, called next, returns the tensors that it is ``given``, neither resized nor
    others. (An op that returns nothing cannot say.)"""
    layouts = [_layout(t) for t in given]

    def check(result: Any) -> None:
        returned = list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]
        for i, (r, was) in enumerate(zip(returned, layouts)):
            if not isinstance(r, torch.Tensor) or _layout(r) != was:
                raise ReflibError(
                    f"{op}: its result {i} is not the tensor that it was given to write to (sizes {list(was[1])}, "
                    f"strides {list(was[2])}): an op with out= arguments must write to them as they are, and return "
                    "them"
                )

    return check


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype
