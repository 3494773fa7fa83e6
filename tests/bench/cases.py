"""What is computed: calls so small that the host's time is all there is, and a transformer block."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


def block(device: torch.device) -> tuple[nn.Module, Tensor]:
    """A transformer block and its input; sizes by device."""
    torch.manual_seed(0)
    width, heads, batch, length = (768, 12, 8, 512) if device.type == "cuda" else (256, 8, 4, 128)
    return Block(width, heads).to(device), torch.randn(batch, length, width, device=device)
