"""Slices of inputs that are updated in place and read each other: a kernel per update, in program order, no copies."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_cases import CPU, GPU, fused

import reflib
from reflib.fuse import in_place
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


def _region(r: random.Random, shape: tuple[int, ...], sizes: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    """A slice along each dimension, mostly with step 1, of these sizes or some."""
    out = []
    for d, n in enumerate(shape):
        step = r.choice([1, 1, 1, 2]) if sizes is None else 1
        most = (n - 1) // step + 1
        size = max(1, most - r.choice([0, 0, 1, 2, most // 2])) if sizes is None else sizes[d]
        low = r.randrange(n - (size - 1) * step)
        out.append(slice(low, low + (size - 1) * step + 1, step))
    return tuple(out)


def _random(r: random.Random, shape: tuple[int, ...]) -> Callable[..., Any]:
    """Up to six updates: of slices, with slices of the same tensors as they were or as they are by then, some of them
    reversed or reduced; and values that keep what was there, or read it after the new value was made."""
    steps = []
    for _ in range(r.randrange(2, 7)):
        to = _region(r, shape)
        sizes = tuple(len(range(*s.indices(n))) for s, n in zip(to, shape))
        made = r.choice(["", "flip", "mean", "all", "later", "later"])
        steps.append((r.randrange(2), to, r.randrange(2), _region(r, shape, sizes), made, r.randrange(len(shape))))

    def run(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = []
        for dst, to, src, at, made, d in steps:
            new = xs[src][at] * 0.5
            if made == "all":
                kept.append(xs[dst] * 2)
            new = new.flip(d) if made == "flip" else new.mean(d, keepdim=True) if made == "mean" else new
            if made == "later":
                part = (*[slice(None)] * d, to[d])
                whole = xs[dst].slice_scatter(xs[dst][part].exp(), d, to[d].start, to[d].stop, to[d].step)
                kept.append(xs[dst][at].sin())
                xs[dst].copy_(whole)
            else:
                xs[dst][to].copy_(xs[dst][to] - new)
        return *kept, xs[0][0] * 3

    return run


@pytest.mark.parametrize("seed", range(16))
def test_random_updates(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "LAUNCH", (0, 0))  # as if these tensors were large: nothing is copied to save kernels
    r = random.Random(seed)
    shape = tuple(r.choice([1, *range(4, 14)]) for _ in range(r.randrange(2, 4)))
    fn = _random(r, shape)
    torch.manual_seed(seed)
    args = (torch.randn(shape), torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))))
    for target in (CPU, GPU):
        fused(fn, args, target, symbolic=seed % 2 == 1)
