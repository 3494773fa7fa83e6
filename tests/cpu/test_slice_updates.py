"""Slices of inputs that are updated in place and read each other: a kernel per update, in program order, no copies."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import reflib
from tests.checking import check

R = random.Random(11)
H, W, C = R.randrange(20, 60), R.randrange(20, 60), R.randrange(5, 9)


def leapfrog(e: Any, x: Any, y: Any, z: Any) -> None:
    x[:, :-1].sub_(0.5 * (e[:, 1:] - e[:, :-1]))
    y[:-1].add_(0.5 * (e[1:] - e[:-1]))
    e[1:-1, 1:-1].add_(y[1:-1, 1:-1] - y[:-2, 1:-1] - x[1:-1, 1:-1] + x[1:-1, :-2])


def two_steps(e: Any, x: Any, y: Any, z: Any) -> None:
    for _ in range(2):
        y[:-1].add_(0.5 * (e[1:] - e[:-1]))
        e[1:].add_(y[:-1] - y[1:])


def same_slice_twice(e: Any, x: Any, y: Any, z: Any) -> None:
    y[:-1].add_(e[1:])
    y[:-1].mul_(x[:-1])


def read_after(e: Any, x: Any, y: Any, z: Any) -> Any:
    y[:-1].add_(e[1:])
    return y[1:] * 2


def swapped(e: Any, x: Any, y: Any, z: Any) -> None:
    old = y[:-1] * 2
    y[:-1].copy_(e[:-1])
    e[:-1].copy_(old)


def every_second(e: Any, x: Any, y: Any, z: Any) -> None:
    y[::2].add_(e[::2])
    x[:, 1::2].mul_(e[:, 1::2])


def selected(e: Any, x: Any, y: Any, z: Any) -> None:
    y[3].add_(e[4])
    e[:, 2].add_(y[:, 3])
    y[-1].mul_(e[1])


def in_the_middle(e: Any, x: Any, y: Any, z: Any) -> None:
    z[:, 1:-1].add_(2)
    z[:, 0].mul_(z[:, 1] + 1)


def both_sides(e: Any, x: Any, y: Any, z: Any) -> None:  # over each other, nothing in between: one loop over the whole
    y[:-1].sub_(e[:-1])
    y[1:].add_(e[:-1])


KERNELS = {
    leapfrog: 3, two_steps: 4, same_slice_twice: 1, read_after: 2, swapped: 1, every_second: 2, selected: 3,
    in_the_middle: 2, both_sides: 1,
}  # fmt: skip


def _inputs(scale: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    h, w = H * scale, W * scale
    torch.manual_seed(3)
    return [torch.randn(*s).to(dtype) for s in ((h, w), (h, w), (h, w), (C, h, w))]


@pytest.mark.parametrize("fn, dynamic", [*((f, False) for f in KERNELS), (leapfrog, True), (both_sides, True)])
def test_values(fn: Callable[..., Any], dynamic: bool) -> None:
    check(fn, reflib.compile(fn, dynamic=dynamic, verify=True), *_inputs(1))


@pytest.mark.parametrize(
    "fn, dtype", [*((f, torch.float32) for f in KERNELS), (swapped, torch.bfloat16), (both_sides, torch.int32)]
)
def test_kernels(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        e = reflib.explain(fn, *_inputs(20, dtype), target="sm_90", combine_kernels=False)
    assert len(e.fused.nodes) == KERNELS[fn], [n.name for n in e.fused.nodes]
    assert fn is read_after or e.memory.peak_bytes == 0
