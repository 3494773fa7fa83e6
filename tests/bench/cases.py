"""What is computed, how much of it moves through memory, and the models.

A case counts the bytes that must move (each input read once, each output written once). For the norms that is
2 x bytes(x) forward and 3 x bytes(x) backward: weights and statistics are small and left out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# --- functions -------------------------------------------------------------------------------
def chain(x: Tensor, y: Tensor) -> Tensor:
    """Eight operations, one pass over memory."""
    a = x * 1.5 + y
    b = a.sigmoid() * x
    return (b - y).relu().clamp(max=4.0) * 0.5


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def residual(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return x + y * scale


def transposed(x: Tensor, y: Tensor) -> Tensor:
    return x.t() + y


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps=1e-6)


# --- cases -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """``shapes``: of each argument; the first is the one whose size counts.

    group: "pointwise", "reduction", "backward" or "extra"; only the first two enter the promises.
    moved: bytes read and written by one call.
    """

    name: str
    group: str
    fn: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    moved: int

    @property
    def backward(self) -> bool:
        return self.group == "backward"

    @property
    def main_bytes(self) -> int:
        return math.prod(self.shapes[0]) * self.dtype.itemsize

    def arguments(self, device: torch.device, seed: int) -> list[Tensor]:
        gen = torch.Generator(device).manual_seed(seed)
        made = [torch.randn(s, generator=gen, device=device, dtype=FP32).to(self.dtype) for s in self.shapes]
        return [t.requires_grad_() for t in made] if self.backward else made


def _case(group: str, fn: Callable[..., Tensor], dtype: torch.dtype, *shapes: tuple[int, ...]) -> Case:
    x = math.prod(shapes[0]) * dtype.itemsize
    moved = {"reduction": 2 * x, "backward": 3 * x}.get(group)
    if moved is None:  # the inputs, and one output as large as the first
        moved = sum(math.prod(s) for s in shapes) * dtype.itemsize + x
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    suffix = " bwd" if group == "backward" else ""
    return Case(f"{fn.__name__}{suffix} {'x'.join(map(str, shapes[0]))} {short}", group, fn, shapes, dtype, moved)


def _norms(group: str, rows: int, cols: int, dtype: torch.dtype, which: str = "slr") -> list[Case]:
    x, w = (rows, cols), (cols,)
    made = {"s": (softmax, x), "l": (layer_norm, x, w, w), "r": (rms_norm, x, w)}
    return [_case(group, made[k][0], dtype, *made[k][1:]) for k in which]


def gpu_cases(quick: bool = False) -> list[Case]:
    """PEERS' shapes, and pointwise chains from 2 MB to 256 MB a tensor."""
    p, x = "pointwise", (8192, 8192)
    cases = [
        _case(p, chain, BF16, x, x),
        _case(p, bias_gelu, BF16, (16384, 4096), (4096,)),
        *_norms("reduction", 4096, 8192, BF16),
        *_norms("reduction", 32768, 4096, BF16),
        *_norms("reduction", 576000, 512, BF16),
        _case(p, swiglu, BF16, (8192, 11008), (8192, 11008)),
        _case(p, residual, BF16, (32768, 4096), (32768, 4096), (4096,)),
        _case(p, chain, FP32, x, x),
        _case(p, bias_gelu, FP32, (8192, 8192), (8192,)),
        _case(p, chain, FP16, (1024, 1024), (1024, 1024)),
        _case(p, chain, BF16, (8191, 8193), (8191, 8193)),
        *_norms("reduction", 32768, 4096, FP32),
        *_norms("backward", 4096, 8192, BF16, "l"),
        *_norms("backward", 32768, 4096, BF16, "lrs"),
        *_norms("backward", 576000, 512, BF16, "lr"),
        _case("extra", transposed, FP32, x, x),
    ]
    return cases[:6] if quick else cases


def cpu_cases(quick: bool = False) -> list[Case]:
    """The same functions at sizes for a few cores."""
    p, x = "pointwise", (2048, 2048)
    cases = [
        _case(p, chain, FP32, x, x),
        _case(p, bias_gelu, FP32, (2048, 2048), (2048,)),
        *_norms("reduction", 2048, 2048, FP32),
        _case(p, swiglu, FP32, x, x),
        _case(p, residual, FP32, x, x, (2048,)),
        _case(p, chain, FP32, (256, 256), (256, 256)),
        _case(p, chain, BF16, x, x),
        _case(p, bias_gelu, BF16, (2048, 2048), (2048,)),
        *_norms("reduction", 2048, 2048, BF16),
        *_norms("reduction", 36000, 128, FP32),
        *_norms("reduction", 64, 65536, FP32, "s"),
        *_norms("backward", 2048, 2048, FP32, "lrs"),
        _case("extra", transposed, FP32, x, x),
    ]
    return cases[:5] if quick else cases


# --- calls so small that the host's time is all there is -------------------------------------
def one_kernel(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x + w)


def sixteen_layers(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = torch.relu(x @ w)
    return x


def host_calls(device: torch.device) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    small = [torch.randn(64, 64, device=device) / 8 for _ in range(16)]
    return {
        "relu(x + w), one kernel": (one_kernel, [torch.randn(64, 64, device=device), small[0]]),
        "16 x relu(x @ w), 8x64 @ 64x64": (sixteen_layers, [torch.randn(8, 64, device=device), *small]),
    }


# --- models ----------------------------------------------------------------------------------
class Block(nn.Module):
    """A transformer block: attention and MLP, each after a layer norm, each added back."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Convolutions(nn.Module):
    """Two convolutions with batch norm, a residual and a head."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.norm1(self.first(x)))
        b = torch.relu(self.norm2(self.second(a)) + a)
        return self.head(b.mean((2, 3)))


def model(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    """ "block", "blocks" (four of them) or "convolutions", with an input; sizes by device."""
    big = device.type == "cuda"
    torch.manual_seed(0)
    if name == "convolutions":
        channels, batch = (64, 64) if big else (16, 8)
        return Convolutions(channels).to(device), torch.randn(batch, 3, 56, 56, device=device)
    width, heads, batch, length = (768, 12, 8, 512) if big else (256, 8, 4, 128)
    blocks = [Block(width, heads) for _ in range(4 if name == "blocks" else 1)]
    net = (nn.Sequential(*blocks) if len(blocks) > 1 else blocks[0]).to(device)
    return net, torch.randn(batch, length, width, device=device)


def many_ops(count: int) -> Callable[[Tensor], Tensor]:
    """A function of ``count`` pointwise operations."""

    def f(x: Tensor) -> Tensor:
        y = x
        for i in range(count // 4):
            y = (y * 0.9 + x).tanh() - 0.01 * i
        return y

    return f
