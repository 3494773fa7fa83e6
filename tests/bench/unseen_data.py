# ruff: noqa: E501
# fmt: off
"""Embeddings, images, sequences, and what belongs nowhere else (for ``unseen``)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bench.unseen_shapes import SHORT, WORDS, XY, XYZ, X, add, images, of, of_shapes

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
