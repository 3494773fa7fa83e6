# ruff: noqa: E501
# fmt: off
"""Losses and steps of optimizers (for ``unseen``)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bench.unseen_shapes import (
    FEW,
    LOGITS,
    SHORT,
    WORDS,
    XT,
    XY,
    XYZ,
    X,
    add,
    images,
    lists,
    of,
    of_shapes,
    parameters,
)


# -- losses ---------------------------------------------------------------------------------------------
def log_probability(x: Tensor, t: Tensor) -> Tensor:
    return x.float().log_softmax(-1).gather(-1, t[..., None])[..., 0]


add("kl", XY, lambda x, y: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True, reduction="batchmean"), WORDS)
add("entropy", X, lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(), WORDS)
add("smoothed_ce", XT, lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=3), WORDS)
add("soft_targets", XY, lambda x, y: -(y.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(), WORDS)
add("z_loss", XT, lambda x, t: F.cross_entropy(x.float(), t) + 1e-4 * x.float().logsumexp(-1).square().mean(), WORDS)
add("softcap_ce", XT, lambda x, t: F.cross_entropy(30 * torch.tanh(x.float() / 30), t, reduction="none"), WORDS)
add("shifted_ce", LOGITS, lambda x, t: F.cross_entropy(x[:, :-1].flatten(0, 1).float(), t[:, 1:].flatten()), WORDS)
add("contrastive", of_shapes("k,k", "1"), lambda x, t: F.cross_entropy(x * t.exp(), torch.arange(x.shape[0], device=x.device)) + F.cross_entropy(x.t() * t.exp(), torch.arange(x.shape[0], device=x.device)))
add("huber", XY, lambda x, y: F.huber_loss(x, y.tanh(), delta=0.5))
add("gaussian_nll", XYZ, lambda x, y, v: F.gaussian_nll_loss(x, y, F.softplus(v)))
add("vae", XYZ, lambda x, mu, v: F.mse_loss(x.sigmoid(), x) - 0.5 * (1 + v - mu * mu - v.exp()).sum(-1).mean())
add("bce_weighted", of_shapes("m,n", "m,n", "n"), lambda x, y, w: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=w.detach().exp()))
add("total_variation", images(), lambda x: x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean())
add("charbonnier", XY, lambda x, y: ((x - y).float().square() + 1e-6).sqrt().mean())
add("triplet", XYZ, lambda a, p, q: F.triplet_margin_loss(a, p, q))
add("cosine_loss", XY, lambda x, y: (1 - F.cosine_similarity(x, y, dim=-1)).mean())
add("pinball", of_shapes("t//9,9", "t//9"), lambda x, y: torch.maximum(0.1 * (y[:, None] - x), -0.9 * (y[:, None] - x)).mean())
add("mixture_nll", of_shapes("t//8,8", "t//8,8", "t//8,8", "t//8"), lambda a, mu, v, y: -(a.log_softmax(-1) - 0.5 * ((y[:, None] - mu) / v.exp()) ** 2 - v).logsumexp(-1).mean())
add("arcface", XT, lambda x, t: F.cross_entropy(16 * (x.tanh() - 0.5 * F.one_hot(t, x.shape[-1])), t), (500, 30000))
add("balance_loss", XT, lambda x, t: (x.softmax(-1).mean(0) * F.one_hot(t, x.shape[-1]).to(x.dtype).mean(0)).sum(), FEW)


@of(XY, WORDS)
def jensen_shannon(x: Tensor, y: Tensor) -> Tensor:
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    mean = ((p.exp() + q.exp()) / 2).log()
    return 0.5 * (F.kl_div(mean, p, log_target=True, reduction="batchmean") + F.kl_div(mean, q, log_target=True, reduction="batchmean"))


@of(of_shapes("m,n", "m,n", "m<n"), WORDS)
def distill(x: Tensor, teacher: Tensor, t: Tensor) -> Tensor:
    soft = F.kl_div((x / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean") * 4
    return 0.5 * soft + 0.5 * F.cross_entropy(x, t)


@of(XT, (80, 2000))
def focal(x: Tensor, t: Tensor) -> Tensor:
    ce = F.cross_entropy(x, t, reduction="none")
    return (0.25 * (1 - (-ce).exp()) ** 2 * ce).mean()


@of(XY)
def sigmoid_focal(x: Tensor, y: Tensor) -> Tensor:
    y = (y > 0).to(x.dtype)
    p, ce = x.sigmoid(), F.binary_cross_entropy_with_logits(x, y, reduction="none")
    pt = p * y + (1 - p) * (1 - y)
    return (ce * (1 - pt) ** 2 * (0.25 * y + 0.75 * (1 - y))).sum() / x.shape[0]


@of(images("b,c,h,h"))
def dice(x: Tensor, y: Tensor) -> Tensor:
    p, y = x.sigmoid().flatten(2), (y > 0).to(x.dtype).flatten(2)
    return (1 - (2 * (p * y).sum(-1) + 1) / (p.sum(-1) + y.sum(-1) + 1)).mean()


@of(of_shapes("2*b,s,n", "2*b,s<n", "b", "b"), WORDS)
def dpo(x: Tensor, t: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    mask = t[:, 1:] > 5
    logp = (log_probability(x[:, :-1], t[:, 1:]) * mask).sum(-1)
    a, b = logp.chunk(2)
    return -F.logsigmoid(0.1 * ((a - chosen) - (b - rejected))).mean()


@of(of_shapes("m,n", "m,n", "m,n", "m,n<2"))
def ppo(new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    ratio = (new - old.detach()).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(gain * mask).sum() / mask.sum().clamp_min(1)


@of(of_shapes("b,s,n", "b,s<n", "b,s", "b"), WORDS)
def grpo(x: Tensor, t: Tensor, reference: Tensor, reward: Tensor) -> Tensor:
    logp = log_probability(x, t)
    advantage = ((reward - reward.mean()) / (reward.std(correction=0) + 1e-4))[:, None]
    off = reference - logp
    return -((logp - logp.detach()).exp() * advantage - 0.04 * (off.exp() - off - 1)).mean()


@of(images("b,c,h,h"))
def ssim(x: Tensor, y: Tensor) -> Tensor:
    a, b = F.avg_pool2d(x, 3, 1), F.avg_pool2d(y, 3, 1)
    va, vb = F.avg_pool2d(x * x, 3, 1) - a * a, F.avg_pool2d(y * y, 3, 1) - b * b
    vab = F.avg_pool2d(x * y, 3, 1) - a * b
    return 1 - ((2 * a * b + 0.01) * (2 * vab + 0.03) / ((a * a + b * b + 0.01) * (va.abs() + vb.abs() + 0.03))).mean()


@of(of_shapes("8,m//8,n"), SHORT)
def ctc_forward(x: Tensor) -> Tensor:
    alpha = x[0]
    for step in x[1:]:
        before = F.pad(alpha[:, :-1], (1, 0), value=-1e4)
        alpha = torch.logaddexp(alpha, before) + step
    return alpha.logsumexp(-1).mean()


# -- optimizers: what a step computes, of lists of tensors -------------------------------------------------
@of(parameters(4), train=False)
def adam(*tensors: Tensor) -> Any:
    p, g, m, v = lists(tensors, 4)
    m = torch._foreach_lerp(m, g, 0.1)
    v = torch._foreach_add(torch._foreach_mul(v, 0.99), torch._foreach_mul(g, g), alpha=0.01)
    steps = torch._foreach_div(m, torch._foreach_add(torch._foreach_sqrt(torch._foreach_abs(v)), 1e-8))
    return torch._foreach_add(torch._foreach_mul(p, 0.999), steps, alpha=-1e-3), m, v


@of(parameters(3), train=False)
def lion(*tensors: Tensor) -> Any:
    p, g, m = lists(tensors, 3)
    step = [x.sign() for x in torch._foreach_lerp(m, g, 0.1)]
    return torch._foreach_add(torch._foreach_mul(p, 0.99), step, alpha=-1e-4), torch._foreach_lerp(m, g, 0.01)


@of(parameters(1), train=False)
def clip_norm(*grads: Tensor) -> Any:
    total = torch.stack([g.float().norm() for g in grads]).norm()
    return torch._foreach_mul(list(grads), (1.0 / (total + 1e-6)).clamp(max=1.0).to(grads[0].dtype)), total


@of(parameters(2), train=False)
def average(*tensors: Tensor) -> Any:
    return torch._foreach_lerp(*lists(tensors, 2), 1e-3)


@of(parameters(3), train=False)
def nesterov(*tensors: Tensor) -> Any:
    p, g, m = lists(tensors, 3)
    g = torch._foreach_add(g, p, alpha=1e-4)
    m = torch._foreach_add(torch._foreach_mul(m, 0.9), g)
    return torch._foreach_add(p, torch._foreach_add(g, m, alpha=0.9), alpha=-0.1), m


@of(of_shapes("m,n", "m,n", "m", "n"), train=False)
def adafactor(p: Tensor, g: Tensor, row: Tensor, column: Tensor) -> Any:
    square = g.float().square() + 1e-30
    row = torch.lerp(row.float().abs(), square.mean(1), 0.1)
    column = torch.lerp(column.float().abs(), square.mean(0), 0.1)
    update = g * ((row / row.mean()).rsqrt()[:, None] * column.rsqrt())
    return p - 1e-2 * update / (update.square().mean().sqrt()).clamp_min(1.0), row, column


@of(of_shapes("m,n", "m,n", "m,n"), train=False)
def lamb(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
    update = m / (v.abs().sqrt() + 1e-6) + 0.01 * p
    return p - 1e-3 * (p.norm() / update.norm()) * update


@of(parameters(1), train=False)
def unscale(*grads: Tensor) -> Any:
    """Gradients of a loss that was scaled, and whether one of them is not finite."""
    bad = torch.stack([~g.isfinite().all() for g in grads]).any()
    return torch._foreach_mul(list(grads), 2.0**-10), bad
