"""fuse.halves, extremes, row_order and parts of unroll: what rows are made of, written out, found once, or in order.
(In Triton's interpreter: test_triton_programs.)"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import GPU, fused, kernels
from torch import Tensor

import reflib
from reflib.fuse import halves, unroll
from reflib.fuse.mix_order import column_sums
from reflib.ir.loops import Reduce

SMALL = replace(GPU, units=2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def quarters(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A part of each row is rotated."""
    n = x.shape[-1] // 2
    return torch.cat([rotated(x[..., :n], cos[..., :n], sin[..., :n]), x[..., n:] * 2], -1)


def normed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), cos, sin)


def centred(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, -1, keepdim=True)
    return rotated((x - mean) * (var + 1e-6).rsqrt(), cos, sin) - x.amax(-1, keepdim=True)


ROTATED = {"rotated": (rotated, 2), "normed": (normed, 2), "centred": (centred, 2), "quarters": (quarters, 4)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ROTATED)
def test_rows_that_mix_their_parts_are_read_once(name: str, seed: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(halves, "FILLED", 1)
    r, (fn, parts) = random.Random(f"{name} {seed}"), ROTATED[name]
    n = parts * r.choice([16, 24, 32, 64])
    x, cos, sin = torch.randn(r.randrange(3, 9), 37, n), torch.randn(37, n), torch.randn(37, n)
    if seed == 2:
        x[0, 1, 2], x[1, 2, n - 1] = float("inf"), float("nan")
    (kernel,) = kernels(fused(lambda *t: (fn(*t),), (x, cos, sin)))
    assert (kernel.numel * kernel.rnumel).hint() == x.numel() // parts
    read = [s.index for s in kernel.loads() if s.buffer == kernel.loads()[0].buffer]
    assert len(read) == parts and all(s.mask is None for s in kernel.loads())


@pytest.mark.parametrize("seed", range(3))
def test_halves_of_many_rows_that_are_read_from_one_tensor(seed: int, monkeypatch: Any) -> None:
    """Numbers of 4 bits, two per byte: a byte is read once. Halves of two tensors have nothing in common."""
    monkeypatch.setattr(halves, "FILLED", 1)
    r = random.Random(seed)
    w = torch.randint(-128, 128, (8 * r.randrange(80, 120), 16 * r.randrange(3, 9)), dtype=torch.int8)
    scale = torch.rand(w.shape[1])
    (kernel,) = kernels(fused(lambda w, s: ((torch.cat([(w << 4) >> 4, w >> 4]).half() * s),), (w, scale)))
    assert kernel.numel.hint() == w.numel() and len(kernel.stores()) == 2 and len(kernel.loads()) == 2
    (kernel, *_) = kernels(fused(lambda w, v, s: ((torch.cat([w << 4, v >> 4]).half() * s),), (w, w + 0, scale)))
    assert len(kernel.stores()) == 1


def test_what_is_cut_elsewhere_stays(monkeypatch: Any) -> None:
    monkeypatch.setattr(halves, "FILLED", 1)

    def uneven(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([x[:, 20:] * 2, x[:, :20].exp()], -1) * x,)

    (kernel,) = kernels(fused(uneven, (torch.randn(50, 67),)))
    assert kernel.numel.hint() == 50 * 67
    args = (torch.randn(50, 64), torch.randn(64), torch.randn(64))
    (kernel,) = kernels(fused(lambda *t: (normed(*t),), args, batch_invariant=True))
    assert kernel.rnumel.hint() == 64


@pytest.mark.parametrize("seed", range(3))
def test_columns_are_summed_by_part(seed: int, monkeypatch: Any) -> None:
    """Of what a rotation's backward gives to a weight."""
    monkeypatch.setattr(halves, "FILLED", 1)
    rows, n = random.Random(seed).randrange(600, 900), 32

    def fn(x: Tensor, g: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        a, b = (g * sin).chunk(2, -1)
        back = g * cos + torch.cat([b, -a], -1)
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        dot = (back * w * x).mean(-1, keepdim=True)
        return (back * w - x * dot * scale) * scale, (back * x * scale).sum(0)

    torch.manual_seed(seed)
    args = (torch.randn(rows, n), torch.randn(rows, n), *torch.randn(3, n))
    made = [k for k in kernels(fused(fn, args, SMALL)) if column_sums(k)]
    assert [(len(column_sums(k)), k.rnumel.hint()) for k in made] == [(2, n // 2)]


@pytest.mark.parametrize("groups", [1, 4])
def test_sums_by_part_have_a_program_per_row_of_partial_sums(groups: int) -> None:
    """Two programs that stored to one row would lose half of the sum."""

    def fn(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a, b = (g * w).chunk(2, -1)
        back = g + torch.cat([b, -a], -1)
        dot = (back * x).mean(-1, keepdim=True)
        return back - x * dot, (back * x).view(groups, -1, 64).sum(1)

    e = reflib.explain(fn, *torch.randn(2, 40_000, 64), torch.randn(64), target="sm_90")
    (mixed, *_) = [n for n in kernels(e.stages.fused) if column_sums(n)]
    assert len(column_sums(mixed)) == 2
    partial = e.stages.fused.program.buffers[column_sums(mixed)[0].buffer]
    assert e.kernels[0].grid == partial.numel // 64


def likely(x: Tensor) -> tuple[Tensor, ...]:
    p = x.softmax(-1)
    return (torch.where(p >= 0.1 * p.amax(-1, keepdim=True), p, 0),)


EXTREMES = {
    "likely": (likely, 1),
    "log": (lambda x: (x.log_softmax(-1) - x.log_softmax(-1).amax(-1, keepdim=True),), 2),
    "scaled": (lambda x: (x - x.amax(-1, True) + ((x - x.amax(-1, True)) * 0.125 + 1).exp().amax(-1, True),), 1),
    "stored between": (lambda x: (x.softmax(-1), x.softmax(-1).amax(-1)), 1),
    "in one pass": (lambda x: ((x * 0.5).softmax(-1) + x.softmax(-1),), 2),
    "not increasing": (lambda x: (x - x.amax(-1, True) + ((x - x.amax(-1, True)) * -0.125).exp().amax(-1, True),), 2),
    "of its square": (lambda x: (x - x.amax(-1, True) + (x * x).amax(-1, True),), 2),
}


@pytest.mark.parametrize(("name", "dtype"), [*((n, torch.float32) for n in EXTREMES), ("likely", torch.bfloat16)])
def test_a_maximum_that_follows_from_another_is_no_reduction(name: str, dtype: torch.dtype) -> None:
    fn, maxima = EXTREMES[name]
    x = torch.randn(9, 203, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    x[1, 7], x[2, 5], x[3, 4], x[4] = float("nan"), float("inf"), -float("inf"), -float("inf")
    (kernel,) = kernels(fused(fn, (x,)))
    assert sum(isinstance(s, Reduce) and s.kind == "max" for s in kernel.body) == maxima


@pytest.mark.parametrize("seed", range(3))
def test_forces_of_all_pairs_are_one_kernel(seed: int) -> None:
    r = random.Random(seed)
    n, few = r.randrange(40, 90), r.randrange(2, 5)

    def forces(x: Tensor, mass: Tensor) -> tuple[Tensor, ...]:
        d = x[None] - x[:, None]
        return ((d * (mass * (d.square().sum(-1) + 0.01) ** -1.5)[..., None]).sum(1),)

    torch.manual_seed(seed)
    (kernel,) = kernels(fused(forces, (torch.randn(n, few), torch.rand(n))))
    assert sum(isinstance(s, Reduce) for s in kernel.body) == few


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_patches_are_stored_whole(seed: int) -> None:
    """They are in the order of the tensor that has them side by side; lanes go along rows for the image."""
    r = random.Random(seed)
    c, h, w = r.choice([24, 40, 96]), r.randrange(2, 9), r.choice([64, 72, 96])

    def patches(x: Tensor) -> tuple[Tensor, ...]:
        y = x.unflatten(2, (h, 2)).unflatten(4, (w, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3)
        return (torch.layer_norm(y, (4 * c,)),)

    assert len(kernels(fused(patches, (torch.randn(2, c, 2 * h, 2 * w).bfloat16(),)))) == 1
    x = torch.empty(64, c, 2 * h, 2 * w, dtype=torch.bfloat16)
    (launch,) = {k.num_warps: k for k in reflib.explain(lambda x: patches(x)[0], x, target="sm_90").kernels}.values()
    assert "x = pid * XBLOCK + tl.arange(0, XBLOCK)[None, :]" in launch.source
    assert f" + (r + {4 * c}*x), " in launch.source and "for r0" not in launch.source


INDEXED = {
    "linear": lambda x, i: F.interpolate(x, size=153, mode="linear"),
    "nearest": lambda x, i: F.interpolate(x, scale_factor=4.7) + 1,
    "selected": lambda x, i: x[:, :, i] * 2,
}


@pytest.mark.parametrize("channels", [8, 9])
@pytest.mark.parametrize("name", INDEXED)
def test_places_are_found_once_for_several_rows(name: str, channels: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(halves, "FILLED", 1)
    torch.manual_seed(channels)
    x, i = torch.randn(3, channels, 35), torch.randint(-35, 35, (141,))
    made = kernels(fused(lambda *t: (INDEXED[name](*t),), (x, i), replace(GPU, units=1)))
    kernel = max(made, key=lambda k: len(k.body))
    rows = 4 if channels == 8 else 3
    assert len(kernel.stores()) == rows and len(kernel.loads()) < rows * 5


@pytest.mark.parametrize("seed", range(3))
def test_interleaved_channels_are_read_once(seed: int, monkeypatch: Any) -> None:
    """A line of an image has all of its colours: what stores one after the other reads it for all at once."""
    monkeypatch.setattr(unroll, "FILLED", 1)
    r = random.Random(seed)
    h, w, c = r.randrange(9, 30), r.randrange(133, 170), r.randrange(3, 5)
    x = torch.randint(0, 256, (3, h, w, c), dtype=torch.uint8)

    def batch(x: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
        return ((x.permute(0, 3, 1, 2) / 255 - mean[:, None, None]).bfloat16().contiguous(),)

    (kernel,) = kernels(fused(batch, (x, torch.rand(c)), SMALL))
    assert len(kernel.stores()) == c and kernel.numel.hint() == 3 * h * w
