"""Models of our own for the sweep: the kinds that need no library.

Each class is written as its users write it, not as a compiler would like it. ``MODELS`` lists them with small sizes
(a CPU) and real ones (a GPU).
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reflib.sweep.model import Built, Model


def block(c_in: int, c_out: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))


def waves(t: Tensor, size: int) -> Tensor:
    """Sinusoidal features (..., size) of t (...)."""
    rates = torch.exp(torch.arange(size // 2, device=t.device, dtype=t.dtype) * (-math.log(10000.0) / (size // 2)))
    angles = t[..., None] * rates
    return torch.cat((angles.sin(), angles.cos()), -1)


class ResNet9(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.stem = nn.Sequential(block(3, c), block(c, 2 * c, 2))
        self.first = nn.Sequential(block(2 * c, 2 * c), block(2 * c, 2 * c))
        self.middle = nn.Sequential(block(2 * c, 4 * c, 2), block(4 * c, 8 * c, 2))
        self.second = nn.Sequential(block(8 * c, 8 * c), block(8 * c, 8 * c))
        self.head = nn.Linear(8 * c, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.middle(x + self.first(x))
        x = x + self.second(x)
        return self.head(F.adaptive_max_pool2d(x, 1).flatten(1))


class ResidualUnit(nn.Module):
    """Of a diffusion U-Net: two normalized convolutions, with the time added between them."""

    def __init__(self, c_in: int, c_out: int, c_time: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, c_in), nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, c_out), nn.Conv2d(c_out, c_out, 3, padding=1)
        self.time = nn.Linear(c_time, c_out)
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class ImageAttention(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, 3, c, h * w).transpose(2, 3).unbind(1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, c, h, w))


class UNet(nn.Module):
    """Predicts the noise in an image, as diffusion models do."""

    def __init__(self, c: int):
        super().__init__()
        self.width, t = c, 4 * c
        self.time = nn.Sequential(nn.Linear(c, t), nn.SiLU(), nn.Linear(t, t))
        self.enter = nn.Conv2d(3, c, 3, padding=1)
        self.down1, self.down2 = ResidualUnit(c, c, t), ResidualUnit(c, 2 * c, t)
        self.half1, self.half2 = nn.Conv2d(c, c, 3, 2, 1), nn.Conv2d(2 * c, 2 * c, 3, 2, 1)
        self.middle, self.attend = ResidualUnit(2 * c, 4 * c, t), ImageAttention(4 * c)
        self.up2, self.up1 = ResidualUnit(6 * c, 2 * c, t), ResidualUnit(3 * c, c, t)
        self.leave = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time = self.time(waves(t, self.width))
        a = self.down1(self.enter(x), time)
        b = self.down2(self.half1(a), time)
        y = self.attend(self.middle(self.half2(b), time))
        y = self.up2(torch.cat((F.interpolate(y, scale_factor=2.0), b), 1), time)
        y = self.up1(torch.cat((F.interpolate(y, scale_factor=2.0), a), 1), time)
        return self.leave(y)


class DiffusionMLP(nn.Module):
    """Of a policy that diffuses actions: residual layers, scaled and shifted by the time."""

    def __init__(self, d: int, layers: int):
        super().__init__()
        self.d, self.enter, self.leave = d, nn.Linear(16, d), nn.Linear(d, 16)
        self.time = nn.Sequential(nn.Linear(d, d), nn.Mish())
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.modulate = nn.ModuleList(nn.Linear(d, 2 * d) for _ in range(layers))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y, time = self.enter(x), self.time(waves(t, self.d))
        for layer, modulate in zip(self.layers, self.modulate):
            scale, shift = modulate(time).chunk(2, -1)
            y = y + layer(F.mish(F.layer_norm(y, (self.d,)) * (1 + scale) + shift))
        return self.leave(y)


class ConvAutoencoder(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, c, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(c, 2 * c, 4, 2, 1), nn.InstanceNorm2d(2 * c),
            nn.LeakyReLU(0.2), nn.Conv2d(2 * c, 4 * c, 4, 2, 1),
        )  # fmt: skip
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(4 * c, 2 * c, 4, 2, 1), nn.InstanceNorm2d(2 * c), nn.ELU(),
            nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(c, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class WaveNet(nn.Module):
    """Gated dilated causal convolutions over samples of audio (arXiv:1609.03499)."""

    def __init__(self, c: int, layers: int):
        super().__init__()
        self.embed = nn.Embedding(256, c)
        self.gated = nn.ModuleList(nn.Conv1d(c, 2 * c, 2, dilation=2**i) for i in range(layers))
        self.residual = nn.ModuleList(nn.Conv1d(c, c, 1) for _ in range(layers))
        self.skips = nn.ModuleList(nn.Conv1d(c, c, 1) for _ in range(layers))
        self.head = nn.Conv1d(c, 256, 1)

    def forward(self, samples: Tensor) -> Tensor:
        x = self.embed(samples).transpose(1, 2)
        total: Any = 0
        for i, (gated, residual, skip) in enumerate(zip(self.gated, self.residual, self.skips)):
            filtered, gate = gated(F.pad(x, (2**i, 0))).chunk(2, 1)
            y = filtered.tanh() * gate.sigmoid()
            x, total = x + residual(y), total + skip(y)
        return self.head((total + x).relu())


class LSTM(nn.Module):
    """A cell in a Python loop."""

    def __init__(self, d: int):
        super().__init__()
        self.x, self.h, self.d = nn.Linear(d, 4 * d), nn.Linear(d, 4 * d, bias=False), d

    def forward(self, xs: Tensor) -> Tensor:
        h = c = xs.new_zeros(xs.shape[0], self.d)
        outputs = []
        for x in self.x(xs).unbind(1):
            i, f, g, o = (x + self.h(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)


class GRU(nn.Module):
    """PyTorch's own, which Dynamo does not trace."""

    def __init__(self, d: int):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(1000, d), nn.GRU(d, d, 2, batch_first=True), nn.Linear(d, 1000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.gelu(self.rnn(self.embed(ids))[0]))


class GCN(nn.Module):
    """Two graph convolutions (arXiv:1609.02907); edges as (2, E) indices."""

    def __init__(self, d: int):
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(d, d), nn.Linear(d, d)))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = x.new_ones(x.shape[0]).scatter_add(0, target, x.new_ones(target.shape[0]))
        weight = (degree[source] * degree[target]).rsqrt()[:, None]
        for layer in self.layers:
            y = layer(x)
            x = F.relu(torch.zeros_like(y).index_add(0, target, y[source] * weight) + y / degree[:, None])
        return x.log_softmax(-1)


class GraphSAGE(nn.Module):
    """Means over neighbours (arXiv:1706.02216), by scatter_reduce."""

    def __init__(self, d: int):
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
        self.others = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        index = target[:, None].expand(-1, x.shape[1])
        for own, others in zip(self.own, self.others):
            mean = torch.zeros_like(x).scatter_reduce(0, index, x[source], "mean", include_self=False)
            x = F.normalize(F.relu(own(x) + others(mean)), dim=-1)
        return x


class DLRM(nn.Module):
    """Recommendation: embedding bags, and dot products of all pairs (arXiv:1906.00091)."""

    def __init__(self, rows: int, d: int, tables: int):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 4 * d), nn.ReLU(), nn.Linear(4 * d, d), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(rows, d) for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(d + pairs, 8 * d), nn.ReLU(), nn.Linear(8 * d, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack([x, *(table(ids[:, i]).sum(1) for i, table in enumerate(self.tables))], 1)
        products = every @ every.transpose(1, 2)
        row, column = self.pairs
        return self.top(torch.cat((x, products[:, row, column]), 1)).sigmoid()


class PointNet(nn.Module):
    """Classifies a cloud of points (B, 3, N): shared layers, then a maximum (arXiv:1612.00593)."""

    def __init__(self, c: int):
        super().__init__()
        widths = (3, c, 2 * c, 16 * c)
        layers = [(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU(inplace=True)) for a, b in itertools.pairwise(widths)]
        self.points = nn.Sequential(*(m for layer in layers for m in layer))
        self.head = nn.Sequential(nn.Linear(16 * c, 4 * c), nn.ReLU(), nn.Linear(4 * c, 40))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(-1))


class NeRF(nn.Module):
    """Colours along rays: encoded positions, an MLP, and compositing by a cumulative product (arXiv:2003.08934)."""

    def __init__(self, d: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(60, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 4))

    def forward(self, points: Tensor) -> Tensor:
        bands = 2.0 ** torch.arange(10, device=points.device, dtype=points.dtype)
        angles = (points[..., None] * bands).flatten(-2)
        colour, density = self.layers(torch.cat((angles.sin(), angles.cos()), -1)).split((3, 1), -1)
        alpha = 1 - torch.exp(-F.softplus(density[..., 0]) / points.shape[1])
        light = torch.cumprod(torch.cat((torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]), 1), 1)
        return ((light * alpha)[..., None] * colour.sigmoid()).sum(1)


class MoE(nn.Module):
    """Mixture of experts: every token's best two, all experts computed in one batched product."""

    def __init__(self, d: int, experts: int):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(d), nn.Linear(d, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, d, 2 * d) * d**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * d, d) * (2 * d) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).flatten(0, 1)
        best, which = self.gate(y).softmax(-1).topk(2, -1)
        weights = torch.zeros_like(self.gate(y)).scatter(1, which, best / best.sum(-1, keepdim=True))
        every = F.silu(y @ self.up) @ self.down  # (experts, tokens, d)
        return x + torch.einsum("te,etd->td", weights, every).view_as(x)


class StateSpace(nn.Module):
    """A state-space layer in its matrix form (Mamba-2, arXiv:2405.21060): the decay between two places is a sum."""

    def __init__(self, d: int, heads: int, state: int):
        super().__init__()
        self.heads, self.state = heads, state
        self.norm, self.enter = nn.LayerNorm(d), nn.Linear(d, 2 * d + 2 * state + heads)
        self.conv, self.leave = nn.Conv1d(d, d, 4, padding=3, groups=d), nn.Linear(d, d)
        self.rate, self.direct = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        z, y, keys, queries, step = self.enter(self.norm(x)).split((d, d, self.state, self.state, self.heads), -1)
        y = F.silu(self.conv(y.transpose(1, 2))[..., :n]).transpose(1, 2).view(b, n, self.heads, -1)
        step = F.softplus(step)
        total = (-step * self.rate.exp()).cumsum(1).transpose(1, 2)  # (b, heads, n)
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        scores = (queries @ keys.transpose(1, 2))[:, None] * decay
        mixed = (scores @ (y * step[..., None]).transpose(1, 2)).transpose(1, 2) + y * self.direct[:, None]
        return x + self.leave(mixed.reshape(b, n, d) * F.silu(z))


class Encoder(nn.Module):
    """PyTorch's own transformer encoder."""

    def __init__(self, d: int, layers: int):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, d // 32, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def ids(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape)


def stack(layer: Callable[[], nn.Module], count: int) -> nn.Sequential:
    return nn.Sequential(*(layer() for _ in range(count)))


def pick(name: str, small: Callable[[], Built], real: Callable[[], Built], cost: float = 1.0) -> Model:
    return Model(name, lambda big: (real if big else small)(), cost=cost)


R = torch.randn
MODELS = (
    pick("resnet9", lambda: (ResNet9(8), (R(2, 3, 32, 32),)), lambda: (ResNet9(64), (R(64, 3, 64, 64),)), 0.6),
    pick("unet", lambda: (UNet(16), (R(1, 3, 16, 16), R(1))), lambda: (UNet(128), (R(8, 3, 64, 64), R(8))), 1.2),
    pick("diffusion_mlp", lambda: (DiffusionMLP(32, 2), (R(4, 16), R(4))),
         lambda: (DiffusionMLP(512, 8), (R(4096, 16), R(4096))), 0.6),
    pick("conv_autoencoder", lambda: (ConvAutoencoder(8), (R(2, 3, 32, 32),)),
         lambda: (ConvAutoencoder(64), (R(32, 3, 128, 128),)), 0.4),
    pick("wavenet", lambda: (WaveNet(8, 3), (ids(256, 2, 64),)), lambda: (WaveNet(64, 10), (ids(256, 8, 4096),)), 0.8),
    pick("lstm", lambda: (LSTM(16), (R(2, 6, 16),)), lambda: (LSTM(256), (R(64, 32, 256),)), 1.2),
    pick("gru", lambda: (GRU(16), (ids(1000, 2, 8),)), lambda: (GRU(512), (ids(1000, 32, 128),)), 0.3),
    pick("gcn", lambda: (GCN(16), (R(40, 16), ids(40, 2, 120))),
         lambda: (GCN(128), (R(20000, 128), ids(20000, 2, 200000))), 0.4),
    pick("graphsage", lambda: (GraphSAGE(16), (R(40, 16), ids(40, 2, 120))),
         lambda: (GraphSAGE(128), (R(20000, 128), ids(20000, 2, 200000))), 0.5),
    pick("dlrm", lambda: (DLRM(100, 8, 3), (R(4, 13), ids(100, 4, 3, 2))),
         lambda: (DLRM(20000, 64, 26), (R(4096, 13), ids(20000, 4096, 26, 4))), 0.8),
    pick("pointnet", lambda: (PointNet(8), (R(2, 3, 32),)), lambda: (PointNet(64), (R(32, 3, 2048),)), 0.4),
    pick("nerf", lambda: (NeRF(16), (R(4, 8, 3),)), lambda: (NeRF(256), (R(4096, 64, 3),)), 0.4),
    pick("moe", lambda: (stack(lambda: MoE(16, 4), 1), (R(2, 8, 16),)),
         lambda: (stack(lambda: MoE(512, 8), 4), (R(4, 256, 512),)), 0.6),
    pick("state_space", lambda: (stack(lambda: StateSpace(16, 2, 4), 1), (R(2, 12, 16),)),
         lambda: (stack(lambda: StateSpace(512, 8, 64), 4), (R(4, 512, 512),)), 0.7),
    pick("encoder", lambda: (Encoder(64, 1), (R(2, 8, 64),)), lambda: (Encoder(512, 6), (R(8, 256, 512),)), 0.7),
)  # fmt: skip
