"""fuse.waist where kernels reduce: of what one of them keeps for another, one tensor from which the others follow."""

import random
from unittest import mock

import pytest
import torch
from fuse_cases import fused

import reflib
from reflib.fuse import waist
from reflib.fuse.result import Fused


def backward(x, g, more, w, b, mean, std):  # of a norm of channels, which the second dimension has, and a GELU
    normed = (x - mean) / std
    g = torch.ops.aten.gelu_backward(g, normed * w[:, None] + b[:, None])
    sums = (g * normed).sum((0, 2)), g.sum((0, 2))
    g = g * w[:, None]
    less, g = -g, g / std  # of which both sums along channels and the result need each
    of_std = (less * (normed / std)).sum(1, keepdim=True) / (2 * std) / x.shape[1]
    of_mean = (-g).sum(1, keepdim=True) / x.shape[1]
    return (*sums, g + of_std * (x - mean) + of_mean + more - 0.1 * less)


def kept(f: Fused, numel: int) -> int:
    made = {b for n in f.program.nodes for b in n.writes()}
    return sum(b.kind == "temp" and b.numel == numel and name in made for name, b in f.program.buffers.items())


@pytest.mark.parametrize("seed", range(3))
def test_a_norm_of_channels_keeps_fewer_tensors(seed: int) -> None:
    """The kernel that sums its weights' gradients keeps what the one that sums along channels needs."""
    r, random_numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    n, c, s = r.randrange(5, 9), r.randrange(10, 17), r.randrange(30, 50)
    shapes = [(n, c, s)] * 3 + [(c,)] * 2 + [(n, 1, s)] * 2
    args = [torch.randn(shape, generator=random_numbers) for shape in shapes]
    args[-1] = args[-1].abs() + 0.5
    cut = fused(backward, args)  # (and checks the results)
    with mock.patch.object(waist, "_cut", lambda work: set()):
        whole = fused(backward, args)
    assert kept(cut, n * c * s) < kept(whole, n * c * s)


@pytest.mark.parametrize("seed", range(3))
def test_the_second_of_two_tensors_is_computed_from_the_first(seed: int) -> None:
    """Random features of keys: in their backward a tensor and its negative, which is summed, were both stored."""
    r = random.Random(seed)
    b, t, d, n = r.randrange(20, 60), r.randrange(500, 2000), 8 * r.randrange(3, 9), r.randrange(100, 300)

    def features(x: torch.Tensor, v: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        u = x @ p.t()
        u = u - x.square().sum(-1, keepdim=True) / 2 - u.amax((-1, -2), keepdim=True)
        return (u.exp() + 1e-4).transpose(-1, -2) @ v

    args = [torch.empty(s, requires_grad=True) for s in ((b, t, d), (b, t, d), (n, d))]
    e = reflib.explain(features, *args, target="sm_90", verify=True).backward
    assert e is not None
    kinds = {w: (x.numel.hint(), x.dtype.itemsize) for w, x in e.fused.buffers.items()}
    assert max(sum(kinds[w] == (b * t * n, 4) for w in node.writes()) for node in e.fused.nodes) == 1
