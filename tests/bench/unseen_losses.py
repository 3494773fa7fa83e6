# ruff: noqa: E501
# fmt: off
"""Functions that were slow beside TorchInductor when they were new: of a second set that reflib was not tuned for.

    reflib sweep --models tests/bench/unseen_losses.py --dtype bfloat16 --out runs/losses

Letters of a shape have a size, or one on a GPU and one on a CPU. They were drawn at random.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reflib.sweep import Model

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.functions import Function
from tests.bench.unseen_shapes import tensor

MODELS: list[Model] = []


def of(*specs: str, **letters: Any) -> Callable[..., Any]:
    def keep(fn: Callable[..., Any]) -> Callable[..., Any]:
        real, small = ({k: v if isinstance(v, int) else v[i] for k, v in letters.items()} for i in (0, 1))

        def build(big: bool) -> tuple[nn.Module, tuple[()]]:
            return Function(fn, *(tensor(spec, real if big else small) for spec in specs)), ()

        first = specs[0].rpartition(":")[2].partition("<")[0].split(",")
        title = f"{fn.__name__} {'x'.join(str(eval(d, {}, dict(real))) for d in first)}"
        MODELS.append(Model(title, build, cost=0.3))
        return fn

    return keep


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@of("B,m,n", m=(248, 6), n=(189, 7), B=(316, 48))
def sinkhorn(x):
    x = wide(x) / 0.2
    for _ in range(3):
        x = x - x.logsumexp(-1, keepdim=True)
        x = x - x.logsumexp(-2, keepdim=True)
    return x.exp()


@of("B,4", "B,4", B=(721873, 512))
def ciou_loss(a, b):
    a, b = wide(a), wide(b)
    (x1, y1, w1, h1), (x2, y2, w2, h2) = ((t[:, 0], t[:, 1], F.softplus(t[:, 2]), F.softplus(t[:, 3])) for t in (a, b))
    inter = ((x1 + w1 / 2).minimum(x2 + w2 / 2) - (x1 - w1 / 2).maximum(x2 - w2 / 2)).clamp(0) * ((y1 + h1 / 2).minimum(y2 + h2 / 2) - (y1 - h1 / 2).maximum(y2 - h2 / 2)).clamp(0)
    iou = inter / (w1 * h1 + w2 * h2 - inter + 1e-7)
    cw, ch = (x1 + w1 / 2).maximum(x2 + w2 / 2) - (x1 - w1 / 2).minimum(x2 - w2 / 2), (y1 + h1 / 2).maximum(y2 + h2 / 2) - (y1 - h1 / 2).minimum(y2 - h2 / 2)
    v = 4 / math.pi**2 * (torch.atan(w2 / h2) - torch.atan(w1 / h1)).square()
    alpha = (v / (v - iou + 1 + 1e-7)).detach()
    return (1 - iou + ((x1 - x2) ** 2 + (y1 - y2) ** 2) / (cw**2 + ch**2 + 1e-7) + alpha * v).mean()


@of("B,n", "B,n<5", n=(56, 9), B=(2026, 227))
def lambda_rank(s, relevance):
    s = wide(s)
    gain = torch.exp2(relevance.to(s.dtype)) - 1
    diff = s[:, :, None] - s[:, None]
    rank = (diff < 0).sum(-1) + 1
    discount = 1 / torch.log2(rank + 1.0)
    delta = ((gain[:, :, None] - gain[:, None]) * (discount[:, :, None] - discount[:, None])).abs()
    return (F.softplus(-diff) * delta * (relevance[:, :, None] > relevance[:, None])).sum((1, 2)).mean()


@of("B,n", "B,n", "B,n", "B,n<9", n=(256, 12), B=(10452, 170))
def zero_inflated_nb(mu, theta, pi, y):
    mu, theta, y = F.softplus(wide(mu)) + 1e-4, F.softplus(wide(theta)) + 1e-4, y.to(wide(mu).dtype)
    log_t = torch.log(theta + mu)
    zero = theta * (theta.log() - log_t)
    nb = zero + y * (mu.log() - log_t) + torch.lgamma(y + theta) - torch.lgamma(theta) - torch.lgamma(y + 1)
    pi = wide(pi)
    return torch.where(y < 0.5, F.softplus(-pi) - F.softplus(zero - pi), F.softplus(-pi) + pi - nb).mean()


@of("B,n", "B,n", "B,n<2", n=(2552, 25), B=(1201, 81))
def cox_partial_likelihood(risk, time, event):
    order = time.argsort(-1, descending=True)
    r, e = wide(risk).gather(1, order), event.gather(1, order)
    return -((r - r.logcumsumexp(-1)) * e).sum() / e.sum().clamp(min=1)


@of("B,n*48", n=(72, 2), B=(636, 21))
def group_fake_int4(w):
    g = w.unflatten(-1, (-1, 48))
    low, high = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-5).detach()
    zero = (-low / scale).round().detach()
    q = g / scale + zero
    q = (q + (q.round() - q).detach()).clamp(0, 15)
    return ((q - zero) * scale).flatten(-2)


@of("B,n", "B,n", n=(26015, 330), B=(148, 6))
def spectral_loss(a, b):
    loss = 0.0
    for size in (64, 128):
        window = torch.hann_window(size, device=a.device)
        x, y = (torch.fft.rfft(wide(t).unfold(-1, size, size // 4) * window).abs().clamp(min=1e-4) for t in (a, b))
        loss = loss + (x - y).norm() / y.norm() + F.l1_loss(x.log(), y.log())
    return loss


@of("B,c,h,w", c=(1, 2), h=(128, 9), w=(55, 8), B=(287, 14))
def box_statistics(x):
    """Local contrast by integral images."""
    y = wide(x)
    def box(z):
        s = F.pad(z, (4, 3, 4, 3)).cumsum(2).cumsum(3)
        return (s[..., 7:, 7:] - s[..., :-7, 7:] - s[..., 7:, :-7] + s[..., :-7, :-7]) / 49
    mean = box(y)
    return (y - mean) / (box(y * y) - mean * mean).clamp(min=1e-3).sqrt()


@of("B,s,c", "s//2+1,c,2", s=(64, 8), c=(128, 5), B=(365, 51))
def fourier_filter(x, w):
    y = torch.fft.rfft(wide(x), dim=1, norm="ortho") * torch.view_as_complex(wide(w).contiguous())
    return torch.fft.irfft(y, n=x.shape[1], dim=1, norm="ortho").to(x.dtype) + x


@of("12,B,3*n", "n", "n", n=(128, 5), B=(1212, 11))
def simple_recurrent_unit(u, v, w):
    c, out = torch.zeros_like(u[0, :, : u.shape[2] // 3]), []
    for i in range(12):
        x, f, r = u[i].chunk(3, -1)
        f, r = (f + v * c).sigmoid(), (r + w * c).sigmoid()
        c = f * c + (1 - f) * x
        out.append(r * c + (1 - r) * x)
    return torch.stack(out)


@of("B,n,32", "B,n,32", n=(32, 4), B=(6929, 16))
def recurrence_by_doubling(a, x):
    a, x = wide(a).sigmoid(), wide(x)
    for k in (1, 2, 4, 8, 16):
        x = x + a * F.pad(x[..., :-k], (k, 0))
        a = a * F.pad(a[..., :-k], (k, 0), value=1.0)
    return x


@of("B,14,n", "B,14,n", "B,14,n", "n", "n", n=(176, 5), B=(818, 29))
def wkv(r, k, v, decay, bonus):
    w, u = -wide(decay).exp(), wide(bonus)
    num = den = torch.zeros_like(wide(k[:, 0]))
    most, out = num - 1e30, []
    for i in range(14):
        kk, vv = wide(k[:, i]), wide(v[:, i])
        q = torch.maximum(most, u + kk)
        a, b = (most - q).exp(), (u + kk - q).exp()
        out.append(((a * num + b * vv) / (a * den + b)).to(r.dtype) * r[:, i].sigmoid())
        q = torch.maximum(most + w, kk)
        a, b = (most + w - q).exp(), (kk - q).exp()
        num, den, most = a * num + b * vv, a * den + b, q
    return torch.stack(out, 1)


@of("10,B,4*n", n=(544, 5), B=(262, 10))
def exponential_lstm(g):
    n = g.shape[2] // 4
    c = norm = torch.zeros_like(wide(g[0, :, :n]))
    m, out = c, []
    for i in range(10):
        z, a, f, o = wide(g[i]).split(n, -1)
        f = F.logsigmoid(f)
        new = torch.maximum(f + m, a)
        a, f, m = (a - new).exp(), (f + m - new).exp(), new
        c, norm = f * c + a * z.tanh(), f * norm + a
        out.append(o.sigmoid() * c / norm.clamp(min=1e-3))
    return torch.stack(out).to(g.dtype)


@of("B,8,h,d", "B,8,h,d", "B,8,h,d", "B,8,h", h=2, d=(56, 4), B=(754, 32))
def delta_rule(q, k, v, beta):
    q, k, beta = F.normalize(wide(q), dim=-1), F.normalize(wide(k), dim=-1), wide(beta).sigmoid()
    state, out = torch.zeros(*q[:, 0].shape, v.shape[-1], device=q.device, dtype=q.dtype), []
    for i in range(8):
        old = (state * k[:, i, :, :, None]).sum(-2)
        state = state + k[:, i, :, :, None] * ((v[:, i] - old) * beta[:, i, :, None])[..., None, :]
        out.append((state * q[:, i, :, :, None]).sum(-2))
    return torch.stack(out, 1).to(v.dtype)


@of("u:9,h,w", h=(905, 12), w=(1192, 10), B=2)
def lattice_boltzmann(f):
    f = wide(f) + 0.5
    cx, cy = [0, 1, 0, -1, 0, 1, -1, -1, 1], [0, 0, 1, 0, -1, 1, 1, -1, -1]
    weight = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4
    rho = f.sum(0)
    ux, uy = sum(c * f[i] for i, c in enumerate(cx)) / rho, sum(c * f[i] for i, c in enumerate(cy)) / rho
    square, out = ux * ux + uy * uy, []
    for i in range(9):
        cu = cx[i] * ux + cy[i] * uy
        equal = weight[i] * rho * (1 + 3 * cu + 4.5 * cu * cu - 1.5 * square)
        out.append((f[i] + 0.6 * (equal - f[i])).roll((cy[i], cx[i]), (0, 1)))
    return torch.stack(out)


@of("u:B,2,h,w", h=(123, 8), w=(280, 9), B=(33, 14))
def reaction_diffusion(x):
    u, v = wide(x).unbind(1)
    def lap(y):
        y = F.pad(y[:, None], (1, 1, 1, 1), mode="circular")[:, 0]
        return 0.2 * (y[:, :-2, 1:-1] + y[:, 2:, 1:-1] + y[:, 1:-1, :-2] + y[:, 1:-1, 2:]) + 0.05 * (y[:, :-2, :-2] + y[:, :-2, 2:] + y[:, 2:, :-2] + y[:, 2:, 2:]) - y[:, 1:-1, 1:-1]
    for _ in range(3):
        r = u * v * v
        u, v = u + 0.16 * lap(u) - r + 0.035 * (1 - u), v + 0.08 * lap(v) + r - 0.1 * v
    return torch.stack([u, v], 1)


@of("B,h,w", "B,h,w", h=(96, 8), w=(95, 9), B=(810, 28))
def pressure_projection(u, v):
    div = (u.roll(-1, 2) - u.roll(1, 2) + v.roll(-1, 1) - v.roll(1, 1)) / 2
    p = torch.zeros_like(div)
    for _ in range(5):
        q = F.pad(p, (1, 1, 1, 1))
        p = (q[:, 1:-1, 2:] + q[:, 1:-1, :-2] + q[:, 2:, 1:-1] + q[:, :-2, 1:-1] - div) / 4
    return u - (p.roll(-1, 2) - p.roll(1, 2)) / 2, v - (p.roll(-1, 1) - p.roll(1, 1)) / 2


@of("B,2*h,2*w,c", "4*c", "4*c", c=(31, 3), h=(16, 3), w=(21, 4), B=(493, 14))
def patch_merging(x, w, b):
    y = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
    return F.layer_norm(y, w.shape, w, b)
