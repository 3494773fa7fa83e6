"""fuse.waist where kernels reduce: of what one of them keeps for another, one tensor from which the others follow."""

import random
from unittest import mock

import pytest
import torch
from fuse_cases import fused

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
