"""Functions under a wrapper in C++."""

from collections.abc import Callable
from typing import Any

import torch

import reflib

Tensor = torch.Tensor
count = iter(range(1000))


def explained(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with torch.no_grad():
        e = reflib.explain(fn, *args, wrapper="cpp", verify=True, **options)
    assert "int32_t reflib_call(" in e.wrapper
    return e


def python_op(body: Callable[[Tensor], Any]) -> Any:
    """A custom op in Python, from a tensor to another like it."""

    @torch.library.custom_op(f"cpp_wrapper::op{next(count)}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return body(x)

    op.register_fake(torch.empty_like)
    return op


def affine(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x * w) + 1


X, W = torch.ones(4, 6), torch.full((6,), 2.0)
