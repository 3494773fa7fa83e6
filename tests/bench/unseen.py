# ruff: noqa: E501
# fmt: off
"""What models contain beside their matrix products, as their authors write it: functions that nobody tuned reflib for.

    reflib sweep --models tests/bench/unseen.py --dtype bfloat16 --out runs/unseen
    python -m tests.bench.functions runs/unseen/results.jsonl         TorchInductor's time over ours; share of a copy

Like ``functions.py``: one table, one line per function where it fits in one, sizes drawn at random with a fixed seed.
``m`` and ``n`` are rows and columns; a function that keeps statistics in float32 says so itself, as models do.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.functions import SMALL, Entry, image, model, norm_tensors, rand

Tensors = Callable[[random.Random, int, int], list[Tensor]]
TABLE: dict[str, Entry] = {}
WORDS, ROW, SHORT, FEW = (1000, 130000), (64, 16384), (16, 512), (8, 96)  # columns


def add(name: str, tensors: Tensors, fn: Callable[..., Any], columns: tuple[int, int] = ROW, train: bool = True) -> None:
    assert name not in TABLE
    TABLE[name] = Entry(lambda g, m, n: (fn, tensors(g, m, n)), columns, train)


def of(tensors: Tensors, columns: tuple[int, int] = ROW, train: bool = True) -> Callable[..., Any]:
    def keep(fn: Callable[..., Any]) -> Callable[..., Any]:
        add(fn.__name__, tensors, fn, columns, train)
        return fn

    return keep


# -- shapes ---------------------------------------------------------------------------------------------
def of_shapes(*shapes: str) -> Tensors:
    """Of "m,n": random numbers of that shape; "m<n": m random integers below n. Of about m * n elements each:
    b,s,n rows in sequences of length s;  q,s,h,d heads;  a,h,s,s scores of attention;  k,k a square;  t."""

    def tensor(spec: str, **known: int) -> Tensor:
        shape, _, below = spec.partition("<")
        size = [max(1, int(eval(d, {}, known))) for d in shape.split(",")]
        return torch.randint(0, max(1, int(eval(below, {}, known))), size) if below else rand(*size)

    def tensors(g: random.Random, m: int, n: int) -> list[Tensor]:
        s = min(m, g.choice([64, 77, 128, 197, 256, 512])) if m * n > SMALL else 8
        h = g.choice([2, 4, 8, 12, 16]) if m * n > SMALL else 2
        d = g.choice([32, 64, 80, 96, 128]) if m * n > SMALL else 8
        t = m * n
        known = {"m": m, "n": n, "s": s, "b": max(1, m // s), "h": h, "d": d, "t": t, "k": math.isqrt(t)}
        known |= {"q": t // (h * s * d), "a": t // (h * s * s)}
        return [tensor(spec, **known) for spec in shapes]

    return tensors


X, XY, XYZ = of_shapes("m,n"), of_shapes("m,n", "m,n"), of_shapes("m,n", "m,n", "m,n")
XT, XW, XWB = of_shapes("m,n", "m<n"), of_shapes("m,n", "n"), of_shapes("m,n", "n", "n")
SEQ = of_shapes("b,s,n")  # (batch, length, width)
LOGITS = of_shapes("b,s,n", "b,s<n")
HEADS = of_shapes("q,s,h,d")  # (batch, length, heads, size)
SCORES = of_shapes("a,h,s,s")  # of attention
VECTORS = of_shapes("t")


def images(*more: str) -> Tensors:
    """(batch, channels, height, width), sides even, and tensors named by letters of these."""

    def tensors(g: random.Random, m: int, n: int) -> list[Tensor]:
        b, c, h, _ = image(g, m * n)
        known = {"b": b, "c": c, "h": h + h % 2}
        return [rand(*(int(eval(d, {}, known)) for d in spec.split(","))) for spec in ("b,c,h,h", *more)]

    return tensors


def parameters(count: int) -> Tensors:
    """``count`` lists of tensors of a layer's sizes: weights, gradients, states ..."""

    def tensors(g: random.Random, m: int, n: int) -> list[Tensor]:
        shapes = [(max(1, m // 4), n), (n,), (max(1, m // 4),), (max(1, m // 16), n), (max(1, m // 2), n)]
        return [rand(*shape) for _ in range(count) for shape in shapes]

    return tensors


def lists(tensors: tuple[Tensor, ...], count: int) -> list[list[Tensor]]:
    size = len(tensors) // count
    return [list(tensors[i * size : (i + 1) * size]) for i in range(count)]


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


# -- norms ----------------------------------------------------------------------------------------------
def rms(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """As Llama has it."""
    y = x.float()
    return w * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


add("modulate", of_shapes("b,s,n", "b,n", "b,n"), lambda x, a, c: F.layer_norm(x, x.shape[-1:]) * (1 + a[:, None]) + c[:, None])
add("instance_norm", images(), lambda x: F.leaky_relu(F.instance_norm(x), 0.2))
add("weight_norm", of_shapes("m,n", "m"), lambda v, g: g[:, None] * v / v.norm(dim=1, keepdim=True))
add("standardized", of_shapes("m,n,3,3"), lambda w: (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5), (16, 1024))
add("dyt", of_shapes("m,n", "1", "n", "n"), lambda x, a, w, b: torch.tanh(a * x) * w + b)
add("pixel_norm", images(), lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8))
add("gated_rms", of_shapes("m,n", "m,n", "n"), lambda x, z, w: rms(x * F.silu(z), w))
add("llama_rms", XW, rms)
add("head_norm", of_shapes("t//(h*d),h,d", "d"), lambda x, w: F.rms_norm(x, x.shape[-1:], w).transpose(0, 1))
add("deep_norm", of_shapes("m,n", "m,n", "n", "n"), lambda x, y, w, b: F.layer_norm(x * 1.7 + y, y.shape[-1:], w, b))
add("norm_2d", images("c", "c"), lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), w.shape, w, b).permute(0, 3, 1, 2))
add("sandwich", of_shapes("m,n", "m,n", "n", "n"), lambda x, y, v, w: (x + rms(y, v), rms(x + rms(y, v), w)))
add("center_scale", X, lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5), (16, 4096))


@of(of_shapes("b,s,n", "b,s,n", "b,n", "b,n", "b,n"))
def gated_modulate(x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    x = x + gate.unsqueeze(1) * y
    return x, F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@of(images("b,c", "c", "c"))
def norm_silu_time(x: Tensor, time: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x + time[:, :, None, None], 4, w, b))


@of(images("b,c,h,h"))
def adaptive_instance(x: Tensor, style: Tensor) -> Tensor:
    mean, std = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True).add(1e-5).sqrt()
    return (x - mean) / std * style.std((2, 3), keepdim=True) + style.mean((2, 3), keepdim=True)


@of(of_shapes("q,s,h,d", "d", "s,d//2", "s,d//2"))
def qk_norm_rope(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = rms(x, w).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).transpose(1, 2)


@of(images("c", "c", "b,c,h,h"))
def batch_norm_add(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, True) + y)


@of(lambda g, m, n: norm_tensors(image(g, m * n), last=True))
def response_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """GRN of ConvNeXt V2, channels last."""
    x = x.permute(0, 2, 3, 1)
    norms = x.norm(p=2, dim=(1, 2), keepdim=True)
    return w * (x * (norms / (norms.mean(-1, keepdim=True) + 1e-6))) + b + x


# -- attention ------------------------------------------------------------------------------------------
def causal(x: Tensor, window: int = 1 << 30) -> Tensor:
    i = torch.arange(x.shape[-2], device=x.device)[:, None] - torch.arange(x.shape[-1], device=x.device)
    return (i >= 0) & (i < window)


def rotate(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


add("softmax_middle", of_shapes("b,s,n"), lambda x: x.softmax(1), (16, 1024))
add("causal_softmax", SCORES, lambda x: x.masked_fill(~causal(x), float("-inf")).softmax(-1))
add("window_softmax", SCORES, lambda x: torch.where(causal(x, 64), x * 0.125, -1e4).softmax(-1))
add("softcap_softmax", SCORES, lambda x: (50 * torch.tanh(x / 50)).masked_fill(~causal(x), -1e4).float().softmax(-1).to(x.dtype))
add("padded_softmax", of_shapes("a,h,s,s", "a,s<2"), lambda x, keep: (x + (1.0 - keep[:, None, None, :].to(x.dtype)) * -1e4).softmax(-1))
add("relative_bias", of_shapes("a,h,s,s", "2*s-1,h"), lambda x, w: (x + w[torch.arange(x.shape[-1], device=x.device)[:, None] - torch.arange(x.shape[-1], device=x.device) + x.shape[-1] - 1].permute(2, 0, 1)).softmax(-1))
add("sinks", of_shapes("a,h,s,s", "h"), lambda x, w: torch.cat([x, w.view(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[2], 1)], -1).softmax(-1)[..., :-1])
add("split_heads", of_shapes("q,s,3*h*d"), lambda x: [y.contiguous() for y in x.view(x.shape[0], x.shape[1], 3, -1, 8).permute(2, 0, 3, 1, 4).unbind(0)])
add("merge_heads", of_shapes("q,h,s,d", "q,s,h*d"), lambda x, g: x.transpose(1, 2).flatten(2) * g.sigmoid())
add("repeat_kv", HEADS, lambda x: x[:, :, :, None].expand(-1, -1, -1, 4, -1).flatten(2, 3).transpose(1, 2).contiguous())
add("gumbel", XY, lambda x, u: ((x - torch.log(-torch.log(u.sigmoid()))) / 0.5).softmax(-1), (16, 8192))
add("softmax_one", X, lambda x: (x - x.amax(-1, keepdim=True)).exp() / ((-x.amax(-1, keepdim=True)).exp() + (x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)))
add("attention_pool", of_shapes("b,s,n", "b,s"), lambda x, a: (x * a.softmax(-1)[..., None]).sum(1))
add("elu_features", HEADS, lambda x: (F.elu(x) + 1) / ((F.elu(x) + 1).sum(1, keepdim=True) + 1e-6))
add("kv_update", of_shapes("q,h,s,d", "q,h,1,d", "1<8"), lambda c, k, i: c.index_copy(2, i, k))
add("rope_complex", of_shapes("q,s,h,d//2,2", "s,d//2"), lambda x, a: torch.view_as_real(torch.view_as_complex(x.float()) * torch.polar(torch.ones_like(a.float()), a.float())[:, None]).flatten(3).to(x.dtype))


@of(of_shapes("q,h,s,d", "q,h//2,s,d", "s,d", "s,d"))
def rope_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


@of(of_shapes("q,s,h,d", "s,d//2", "s,d//2"))
def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b, cos, sin = x[..., ::2], x[..., 1::2], cos[:, None], sin[:, None]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


@of(SCORES)
def alibi(x: Tensor) -> Tensor:
    h, s = x.shape[1], x.shape[-1]
    slopes = 2 ** (-8 / h * torch.arange(1, h + 1, device=x.device))
    far = torch.arange(s, device=x.device) - torch.arange(s, device=x.device)[:, None]
    return (x * 0.125 + (slopes[:, None, None] * far).to(x.dtype)).masked_fill(far > 0, float("-inf")).softmax(-1)


@of(of_shapes("a,h,s,s", "a,s<2"))
def packed_softmax(x: Tensor, starts: Tensor) -> Tensor:
    """Several documents in one row."""
    number = starts.cumsum(-1)
    same = number[:, None, :, None] == number[:, None, None, :]
    return x.masked_fill(~(same & causal(x)), torch.finfo(x.dtype).min).softmax(-1)


@of(X, FEW)
def moe_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = x.float().softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(x.dtype), torch.zeros_like(x).scatter(1, experts, weights.to(x.dtype))


# -- quantization ---------------------------------------------------------------------------------------
FLOAT8 = torch.float8_e4m3fn


@of(XW, train=False)
def rms_int8(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = rms(x, w).float()
    scale = y.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    return (y / scale).round().clamp(-128, 127).to(torch.int8), scale


@of(X, train=False)
def token_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = 448 / x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12)
    return (x * scale).clamp(-448, 448).to(FLOAT8), scale.reciprocal()


@of(of_shapes("m,n//128*128"), (128, 8192), False)
def block_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.unflatten(-1, (-1, x.shape[-1] if x.shape[-1] < 128 else 128)).float()
    scale = y.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    return (y / scale).to(FLOAT8).flatten(-2), scale[..., 0]


@of(X, train=False)
def tensor_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().max().clamp_min(1e-5) / 127
    return (x / scale).round().to(torch.int8), scale


@of(of_shapes("m,n", "m"))
def fake_quantize(w: Tensor, s: Tensor) -> Tensor:
    scale = s.exp()[:, None] / 7
    off = (w / scale).round().clamp(-8, 7) * scale - w
    return w + off.detach()


@of(X)
def ternary(w: Tensor) -> Tensor:
    scale = w.abs().mean().clamp_min(1e-5)
    return w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()


add("pack_int4", of_shapes("m,n//2*2<16"), lambda q: (q[:, ::2] | (q[:, 1::2] << 4)).to(torch.uint8), train=False)
add("unpack_int4", of_shapes("m,n//2<256", "m,1", "m,1"), lambda q, s, z: (torch.stack([q.to(torch.uint8) & 15, q.to(torch.uint8) >> 4], -1).flatten(1) - z) * s)
add("dequantize", of_shapes("m,n<255", "n"), lambda q, s: (q - 128).to(torch.int8) * s)
add("group_int4", of_shapes("m,n//32,32"), lambda w: ((w - w.amin(-1, keepdim=True)) / ((w.amax(-1, keepdim=True) - w.amin(-1, keepdim=True)).clamp_min(1e-5) / 15)).round().to(torch.uint8), train=False)
add("mx_scale", of_shapes("t//32,32"), lambda x: x * torch.exp2(-torch.floor(torch.log2(x.abs().amax(-1, keepdim=True).float().clamp_min(1e-20)))).to(x.dtype), train=False)

# -- gated layers ---------------------------------------------------------------------------------------
add("geglu", of_shapes("m,2*n"), lambda x: F.gelu(x.chunk(2, -1)[1], approximate="tanh") * x.chunk(2, -1)[0])
add("swiglu_bias", of_shapes("m,2*n", "2*n"), lambda x, b: F.silu((x + b)[:, : x.shape[1] // 2]) * (x + b)[:, x.shape[1] // 2 :])
add("clamped_swiglu", of_shapes("m,2*n"), lambda x: (x[..., 1::2].clamp(-7, 7) + 1) * x[..., ::2].clamp(max=7) * torch.sigmoid(1.7 * x[..., ::2].clamp(max=7)))
add("relu_squared", XY, lambda x, y: F.relu(x).square() * y)
add("layer_scale", of_shapes("m,n", "m,n", "n", "n"), lambda x, y, b, s: x + s * (y + b))
add("snake", of_shapes("b,n,s", "n"), lambda x, a: x + (a[:, None] * x).sin().square() / (a[:, None].abs() + 1e-3), SHORT)
add("maxout", of_shapes("m,n,4"), lambda x: x.amax(-1), (64, 4096))
add("highway", XYZ, lambda x, h, t: torch.lerp(x, F.mish(h), t.sigmoid()))
add("lstm_cell", of_shapes("m,4*n", "m,n"), lambda x, c: (lambda i, f, g, o: (o.sigmoid() * (f.sigmoid() * c + i.sigmoid() * g.tanh()).tanh(), f.sigmoid() * c + i.sigmoid() * g.tanh()))(*x.chunk(4, -1)))
add("gru_cell", of_shapes("m,3*n", "m,3*n", "m,n"), lambda a, b, h: (lambda r, z, w, p, q, v: (1 - (z + q).sigmoid()) * (w + (r + p).sigmoid() * v).tanh() + (z + q).sigmoid() * h)(*a.chunk(3, -1), *b.chunk(3, -1)))

# -- embeddings -----------------------------------------------------------------------------------------
add("bert_embedding", of_shapes("5000,n", "s,n", "2,n", "n", "n", "b,s<5000", "b,s<2"), lambda w, p, t, g, c, i, j: F.layer_norm(F.embedding(i, w) + p + F.embedding(j, t), g.shape, g, c), (64, 2048))
add("bag", of_shapes("5000,n", "m,8<5000"), lambda w, i: F.embedding_bag(i, w, mode="mean"), SHORT)
add("bag_by_hand", of_shapes("5000,n", "m,8<5000", "m,8"), lambda w, i, s: (F.embedding(i, w) * s[..., None]).sum(1), SHORT)
add("scaled_embedding", of_shapes("5000,n", "b,s<5000", "s,n"), lambda w, i, p: F.embedding(i, w) * math.sqrt(w.shape[1]) + p)
add("mean_pooling", of_shapes("b,s,n", "b,s<2"), lambda x, k: F.normalize((x * k[..., None]).sum(1) / k.sum(1, keepdim=True).clamp_min(1), dim=-1))
add("timesteps", of_shapes("m"), lambda t: (lambda a: torch.cat([a.cos(), a.sin()], -1).to(t.dtype))(t[:, None].float() * torch.exp(-math.log(1e4) / 160 * torch.arange(160, device=t.device))), (64, 512))
add("nerf_encoding", of_shapes("t//63,3"), lambda x: torch.cat([x, *(f(x * 2.0**i) for i in range(10) for f in (torch.sin, torch.cos))], -1))
add("buckets", of_shapes("s,s<128", "32,h", "a,h,s,s"), lambda d, w, x: x + F.embedding(torch.where(d < 16, d, (16 + (torch.log(d.float().clamp_min(1) / 16) * 7.7).long()).clamp(max=31)), w).permute(2, 0, 1))

# -- images ---------------------------------------------------------------------------------------------
add("adaptive_pool", images(), lambda x: F.adaptive_avg_pool2d(F.relu6(x), 2))
add("bilinear_add", images("b,c,2*h,2*h"), lambda x, y: y + F.interpolate(x, scale_factor=2, mode="bilinear"))
add("unshuffle", images(), lambda x: F.pixel_unshuffle(x, 2).relu())
add("patchify", images(), lambda x: x.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2) * 0.5)
add("unfold", images(), lambda x: F.unfold(x, 3, padding=1), train=False)
add("window_roll", images(), lambda x: x.permute(0, 2, 3, 1).roll((-1, -1), (1, 2)).unflatten(1, (2, -1)).unflatten(3, (2, -1)).transpose(2, 3).flatten(0, 2).flatten(1, 2).contiguous())
add("channel_shuffle", images(), lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).relu())
add("normalize_bytes", of_shapes("m//8,n,8,3<256", "3", "3"), lambda x, mean, std: ((x.to(torch.uint8).permute(0, 3, 1, 2).to(mean.dtype) / 255 - mean[:, None, None]) / std[:, None, None]).contiguous(), train=False)
add("to_bytes", images(), lambda x: ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous(), train=False)
add("focus", images(), lambda x: torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1))
add("pyramid", images(), lambda x: torch.cat([x, F.max_pool2d(x, 3, 1, 1), F.max_pool2d(x, 5, 1, 2)], 1))
add("excite", images("b,c", "b,c,h,h"), lambda x, s, y: F.silu(x * s.sigmoid()[:, :, None, None] + y))
add("spatial_statistics", images(), lambda x: torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1))
add("blur", images(), lambda x: (lambda p: (p[..., :-2, :] + 2 * p[..., 1:-1, :] + p[..., 2:, :]) / 4)(F.pad(x, (0, 0, 1, 1), mode="reflect")))
add("sobel", images(), lambda x: ((x[..., 2:, 1:-1] - x[..., :-2, 1:-1]).square() + (x[..., 1:-1, 2:] - x[..., 1:-1, :-2]).square() + 1e-6).sqrt())
add("mixup", images("b"), lambda x, w: x * w.sigmoid()[:, None, None, None] + x.flip(0) * (1 - w.sigmoid()[:, None, None, None]))
add("flip_jitter", images(), lambda x: (lambda y: (y - y.mean((1, 2, 3), keepdim=True)) * 1.2 + y.mean((1, 2, 3), keepdim=True))(x.flip(-1) * 0.9).clamp(-2, 2))
add("soft_argmax", images(), lambda x: (lambda p: torch.stack([(p.sum(2) * torch.arange(x.shape[3], device=x.device)).sum(-1), (p.sum(3) * torch.arange(x.shape[2], device=x.device)).sum(-1)], -1))(x.flatten(2).softmax(-1).view_as(x)))
add("giou", of_shapes("t//8,4", "t//8,4"), lambda a, b: giou(a, b).mean())
add("decode_boxes", of_shapes("t//85,85"), lambda x: torch.cat([(x[:, :2].sigmoid() * 2 - 0.5) * 8, (x[:, 2:4].sigmoid() * 2) ** 2 * 16, x[:, 4:].sigmoid()], -1))
add("histogram", of_shapes("m,n<16"), lambda x: (x[..., None] == torch.arange(16, device=x.device)).sum(1), (256, 8192), False)
add("iou_matrix", of_shapes("m,4", "n,4"), lambda a, b: iou(a[:, None], b[None]), (64, 2048))


def iou(a: Tensor, b: Tensor) -> Tensor:
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    inside = (high - low).clamp_min(0).prod(-1)
    areas = [(x[..., 2:] - x[..., :2]).prod(-1).abs() for x in (a, b)]
    return inside / (areas[0] + areas[1] - inside + 1e-3)


def giou(a: Tensor, b: Tensor) -> Tensor:
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).abs().prod(-1)
    return 1 - iou(a, b) + 1 / (hull + 1)


# -- sequences ------------------------------------------------------------------------------------------
add("token_shift", of_shapes("b,s,n", "n", "n", "n"), lambda x, a, b, c: [torch.lerp(x, F.pad(x, (0, 0, 1, -1)), w) for w in (a, b, c)])
add("causal_conv", of_shapes("b,s,n", "4,n", "n"), lambda x, w, b: F.silu(sum(F.pad(x, (0, 0, 3 - i, i - 3)) * w[i] for i in range(4)) + b))
add("segment_mean", of_shapes("m,n", "m<m//8"), lambda x, i: torch.zeros_like(x[: max(1, len(x) // 8)]).index_add(0, i, x) / torch.ones_like(i, dtype=x.dtype).new_zeros(max(1, len(x) // 8)).index_add(0, i, torch.ones_like(x[:, 0])).clamp_min(1)[:, None])
add("edge_softmax", of_shapes("t//16,h", "t//16<t//128"), lambda x, i: (lambda e: e / e.new_zeros(max(1, len(x) // 8), x.shape[1]).index_add(0, i, e)[i].clamp_min(1e-9))((x.tanh()).exp()))
add("messages", of_shapes("m,n", "2,m*2<m"), lambda x, e: torch.zeros_like(x).index_add(0, e[1], (x[e[0]] - x[e[1]]).relu()), SHORT)
add("mask_positions", of_shapes("m,n<2"), lambda k: ((k.cumsum(-1) - 1).masked_fill(k == 0, 1), k.sum(-1)), (64, 8192), False)
add("discounted", XY, lambda r, v: (r * 0.99 ** torch.arange(r.shape[1], device=r.device)).flip(1).cumsum(1).flip(1) - v, (64, 2048))
add("moving_mean", X, lambda x: (lambda c: (c[:, 8:] - c[:, :-8]) / 8)(F.pad(x.float().cumsum(-1), (1, 0))).to(x.dtype), (64, 8192))
add("min_gru", of_shapes("b,n,s", "b,n,s"), lambda k, h: (lambda a: (a + (F.logsigmoid(k) + F.softplus(h).log() - a).logcumsumexp(-1)).exp())(-F.softplus(k).cumsum(-1)), SHORT)
add("compositing", of_shapes("m,n", "m,n", "m,n,3"), lambda s, d, c: (lambda a: ((a * torch.cumprod(F.pad(1 - a[:, :-1] + 1e-10, (1, 0), value=1.0), -1))[..., None] * c).sum(1))(1 - (-F.relu(s) * d.abs()).exp()), (32, 256))
add("top_p", X, lambda x: (lambda p, i: torch.full_like(x, -1e4).scatter(1, i, torch.where(p.softmax(-1).cumsum(-1) - p.softmax(-1) < 0.9, p, -1e4)))(*x.sort(-1, descending=True)), (512, 30000), False)
add("top_k_filter", X, lambda x: x.masked_fill(x < x.topk(5, -1).values[:, -1:], float("-inf")).softmax(-1), (512, 30000), False)
add("min_p", X, lambda x: (lambda p: x.masked_fill(p < 0.1 * p.amax(-1, keepdim=True), -1e4))((x / 0.8).softmax(-1)), WORDS, False)
add("repetition", of_shapes("m,n", "m,32<n"), lambda x, i: (lambda s: x.scatter(1, i, torch.where(s < 0, s * 1.2, s / 1.2)))(x.gather(1, i)), WORDS, False)
add("beam_scores", of_shapes("m,n", "m"), lambda x, s: x.log_softmax(-1) + s[:, None], WORDS)
add("greedy", X, lambda x: x.float().log_softmax(-1).max(-1), WORDS, False)
add("deltas", of_shapes("b,n,s"), lambda x: (lambda p: sum(i * (p[..., 2 + i : p.shape[-1] - 2 + i] - p[..., 2 - i : p.shape[-1] - 2 - i]) for i in (1, 2)) / 10)(F.pad(x, (2, 2), mode="replicate")), SHORT)
add("cmvn", of_shapes("b,s,n"), lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5), SHORT)


@of(of_shapes("8,m//8,n", "8,m//8,n", "m//8,n"), SHORT)
def gae(reward: Tensor, value: Tensor, last: Tensor) -> Tensor:
    out, carried, after = [], torch.zeros_like(last), last
    for r, v in zip(reward.flip(0), value.flip(0)):
        carried = r + 0.99 * after - v + 0.95 * carried
        after = v
        out.append(carried)
    return torch.stack(out[::-1])


@of(of_shapes("b,16,n", "n,8", "b,16,n", "b,16,8", "b,16,8"), SHORT)
def selective_scan(x: Tensor, a: Tensor, delta: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba's, step by step."""
    state, out = x.new_zeros(x.shape[0], x.shape[2], a.shape[1]), []
    for i in range(x.shape[1]):
        d = F.softplus(delta[:, i])[..., None]
        state = (d * -a.exp()).exp() * state + d * b[:, i, None] * x[:, i, :, None]
        out.append((state * c[:, i, None]).sum(-1))
    return torch.stack(out, 1)


@of(of_shapes("m,n", "2*m<m", "2*m"), SHORT)
def moe_combine(x: Tensor, where: Tensor, weight: Tensor) -> Tensor:
    """Rows back from the experts' order, each token's two added up."""
    return (x[where] * weight[:, None]).unflatten(0, (-1, 2)).sum(1)


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


# -- others -----------------------------------------------------------------------------------------------
add("distances", of_shapes("m,3", "n,3"), lambda x, y: (x[:, None] - y).square().sum(-1).sqrt(), (64, 2048), False)
add("chamfer", of_shapes("4,m//16,3", "4,m//16,3"), lambda x, y: (lambda d: d.amin(1).mean() + d.amin(2).mean())((x[:, :, None] - y[:, None]).square().sum(-1)), (16, 64))
add("rbf", of_shapes("m", "n", "1"), lambda x, c, g: (-g.exp() * (x[:, None] - c).square()).exp())
add("complex_product", of_shapes("m,n//2*2", "m,n//2*2"), lambda x, y: torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.view_as_complex(y.float().unflatten(-1, (-1, 2)))).flatten(-2))
add("log_power", of_shapes("b,n,s,2"), lambda x: (x.float().square().sum(-1) + 1e-6).log10().to(x.dtype), SHORT)
add("log_mel", of_shapes("b,n,s"), lambda x: (lambda y: (torch.maximum(y, y.amax((1, 2), keepdim=True) - 8) + 4) / 4)(x.square().clamp_min(1e-8).log10()), SHORT)
add("preemphasis", of_shapes("m,n"), lambda x: torch.cat([x[:, :1], x[:, 1:] - 0.97 * x[:, :-1]], 1))
add("mu_law", X, lambda x: ((x.tanh().sign() * torch.log1p(255 * x.tanh().abs()) / math.log(256) + 1) / 2 * 255 + 0.5).to(torch.int32), train=False)
add("quaternions", of_shapes("t//4,4"), lambda q: (lambda w, x, y, z: torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y), 2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x), 2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], -1))(*F.normalize(q, dim=-1).unbind(-1)))
add("laplacian", images(), lambda x: x + 0.1 * (x.roll(1, 2) + x.roll(-1, 2) + x.roll(1, 3) + x.roll(-1, 3) - 4 * x))
add("standard_columns", X, lambda x: ((x - x.amin(0)) / (x.amax(0) - x.amin(0)).clamp_min(1e-6)), (16, 4096))
add("poincare", XY, lambda x, y: torch.acosh(1 + 2 * (x - y).square().sum(-1) / ((1 - x.tanh().square().mean(-1)) * (1 - y.tanh().square().mean(-1))).clamp_min(1e-3) + 1e-4), SHORT)
add("tone_map", images(), lambda x: (x.abs() * (2.51 * x.abs() + 0.03) / (x.abs() * (2.43 * x.abs() + 0.59) + 0.14)).clamp(0, 1).pow(1 / 2.2))
add("column_statistics", XY, lambda x, y: ((x * y).mean(0), x.var(0), y.amax(0)), (16, 4096))
add("outer_gate", of_shapes("m", "n", "m,n"), lambda a, b, x: x * torch.sigmoid(a[:, None] + b))
add("sums_of_three", XYZ, lambda x, y, z: ((x * y).sum(-1), (y * z).sum(-1), (x * z).sum(-1)))
add("running_norm", XYZ, lambda x, y, z: F.layer_norm(F.layer_norm(x + y, x.shape[-1:]) + z, x.shape[-1:]), (64, 8192))
add("cosine_rows", of_shapes("m,n", "n"), lambda x, y: F.cosine_similarity(x, y[None], dim=-1))

MODELS = [model(name, 0, entry) for name, entry in TABLE.items()]
