"""What is chosen for a GPU where a sum is taken along the middle of a tensor, over all pairs, or step by step."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import reflib
from reflib.ir.loops import LoopNest, Op
from reflib.ir.program import KernelNode, walk


def stages(fn: Callable[..., Any], *args: Tensor) -> list[Any]:
    return list(reflib.explain(fn, *args, target="sm_90").graphs)


def launched(program: Any) -> list[KernelNode]:
    found = (n for n in walk(program.nodes) if isinstance(n, KernelNode))
    return [n for n in found if not n.name.endswith("_fallback")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_a_masked_norm_over_the_middle(seed: int) -> None:
    """Each pass reads each tensor once: what a weight's gradient sums is summed beside the norm's own sums, in kernels
    that hold their columns."""
    rng = random.Random(seed)
    t, c = rng.randrange(260, 500), rng.randrange(80, 400)
    b = -(-(48 << 20) // (4 * t * c))

    def norm(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        m = mask.unsqueeze(-1).to(x.dtype)
        n = m.sum(1, keepdim=True).clamp(min=1)
        mu = (x * m).sum(1, keepdim=True) / n
        sd = (((x - mu) * m).square().sum(1, keepdim=True) / n + 1e-5).sqrt()
        return (x - mu) / sd * w * m

    x, w = torch.empty(b, t, c, requires_grad=True), torch.empty(c, requires_grad=True)
    for s in stages(norm, x, w, torch.ones(b, t, dtype=torch.bool)):
        program = s.scheduled
        full = {n for n, buffer in program.buffers.items() if buffer.numel.hint() == b * t * c}
        (kernel,) = (n for n in launched(program) if full & set(n.parts[0].reads()))
        assert kernel.config.reduction == "persistent" and kernel.config.xblock >= 16
        assert all(program.buffers[n].kind != "temp" for n in full & set(kernel.parts[0].reads()))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_pairs_of_two_lists(seed: int) -> None:
    """All pairs of the elements of two rows, of many: a thread has sums of its own, of some results."""
    rng = random.Random(seed)
    n = rng.randrange(50, 300)
    b = rng.randrange(160_000, 900_000) // n

    def loss(x: Tensor, y: Tensor) -> Tensor:
        d = y[:, None, :] - x[:, :, None]
        return F.smooth_l1_loss(d, torch.zeros_like(d), reduction="none").sum(1)

    (s,) = stages(loss, torch.empty(b, n), torch.empty(b, n))
    (kernel,) = launched(s.scheduled)
    c = kernel.config
    assert c.reduction == "looped" and c.xblock >= 32 and c.xblock * c.rblock == 8 * 32 * c.num_warps


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(2))
def test_steps_of_a_recurrence_are_not_computed_again_in_each_part(seed: int) -> None:
    """Gradients of steps are joined along time: an element of that computes its own step, not all of them."""
    rng = random.Random(seed)
    steps, d, n = rng.randrange(6, 9), rng.randrange(500, 900), 16
    b = rng.randrange(64, 120)

    def scan(x: Tensor, dt: Tensor, a: Tensor) -> Tensor:
        da, dx = torch.exp(dt.unsqueeze(-1) * -a.exp()), (dt * x).unsqueeze(-1)
        h, ys = torch.zeros_like(da[:, 0]), []
        for t in range(steps):
            h = da[:, t] * h + dx[:, t]
            ys.append(h.square().sum(-1))
        return torch.stack(ys, 1) + x

    x, dt = (torch.rand(b, steps, d, requires_grad=True) for _ in range(2))
    for s in stages(scan, x, dt, torch.rand(d, n)):
        nests = [n for n in s.fused.program.nodes if isinstance(n, LoopNest)]
        assert sum(isinstance(i, Op) and i.op == "exp" for n in nests for i in n.body) <= 4 * steps


def test_a_program_has_the_columns_of_one_image_where_programs_are_few() -> None:
    """Classes beside each other, for each pixel: a program of four images' would leave multiprocessors idle."""

    def overlap(p: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.one_hot(target, 8).permute(0, 3, 1, 2).to(p.dtype)
        return (p * y).sum((0, 2, 3)), (p * (1 - y)).sum((0, 2, 3)), ((1 - p) * y).sum((0, 2, 3))

    p, target = torch.randn(445, 120, 128, 8).bfloat16().movedim(-1, 1), torch.zeros(445, 120, 128).long()
    e = reflib.explain(overlap, p, target, target="sm_90")
    sums = [
        v.kernel.config
        for n in e.scheduled.nodes
        for v in getattr(n, "variants", ())[:1]
        if v.kernel.config.reduction == "looped"
    ]
    assert [c.xblock for c in sums] == [8] and sums[0].rblock >= 128
