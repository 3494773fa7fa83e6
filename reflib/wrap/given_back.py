"""What is checked of a call that was given memory for its results."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ReflibError


def given_back(result: Any, given: list[torch.Tensor], op: str) -> None:
    """Raises ReflibError unless ``op`` returned the tensors that it was ``given``, neither resized nor others. (An op
    that returns nothing cannot say.)"""
    returned = list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]
    for i, (r, t) in enumerate(zip(returned, given)):
        if not isinstance(r, torch.Tensor) or _layout(r) != _layout(t):
            raise ReflibError(
                f"{op}: its result {i} is not the tensor that it was given to write to (sizes {list(t.shape)}, strides "
                f"{list(t.stride())}): an op with out= arguments must write to them as they are, and return them"
            )


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype
