# ruff: noqa: E501
# fmt: off
"""What layers of models compute: norms, attention, quantization, gates (for ``unseen``)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bench.functions import image, norm_tensors
from tests.bench.unseen_shapes import FEW, HEADS, SCORES, SHORT, XW, XY, XYZ, X, add, images, of, of_shapes


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
