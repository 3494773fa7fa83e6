"""Small real models, forward and backward, against eager. Shared by tests/cpu and tests/gpu (fixture ``device``)."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reflib.lab.peak_memory import peak_bytes
from reflib.options import Options
from reflib.pipeline import Backend, Stages
from tests.checking import call, wrong


class MLP(nn.Module):
    def __init__(self, d: int = 32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.LayerNorm(4 * d), nn.Linear(4 * d, d), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Block(nn.Module):
    """Pre-LN transformer block."""

    def __init__(self, d: int = 32, heads: int = 4, dropout: float = 0.0, by_hand: bool = False):
        super().__init__()
        self.heads, self.p, self.by_hand = heads, dropout, by_hand
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.by_hand:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        n = q.shape[-2]
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        a = self.attend(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + F.dropout(self.proj(a), self.p, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln2(x)))), self.p, self.training)


class ResNetBlock(nn.Module):
    def __init__(self, c: int = 6):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.max_pool2d(F.relu(x + self.bn2(self.conv2(y))), 2).mean((2, 3))


class Recurrent(nn.Module):
    """An LSTM cell in a Python loop."""

    def __init__(self, d: int = 10, h: int = 12):
        super().__init__()
        self.x, self.h = nn.Linear(d, 4 * h), nn.Linear(h, 4 * h, bias=False)
        self.size = h

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = c = xs.new_zeros(xs.shape[0], self.size)
        out = []
        for x in xs.unbind(1):
            i, f, g, o = (self.x(x) + self.h(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        return torch.stack(out, 1)


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int = 50, d: int = 32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, d), nn.Embedding(64, d)
        self.block, self.ln = Block(d), nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.ln(self.block(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


class Llama(nn.Module):
    """RMSNorm, rotary positions, SwiGLU."""

    def __init__(self, d: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, 3 * d, bias=False)
        self.down = nn.Linear(3 * d, d, bias=False)

    @staticmethod
    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w

    @staticmethod
    def rotate(x: torch.Tensor) -> torch.Tensor:
        n, d = x.shape[-2:]
        freq = 1e4 ** (-torch.arange(0, d, 2, device=x.device) / d)
        angle = torch.arange(n, device=x.device)[:, None] * freq
        cos, sin = angle.cos(), angle.sin()
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm(x, self.n1)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, n, d))
        y = self.norm(x, self.n2)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class VAE(nn.Module):
    def __init__(self, d: int = 20, z: int = 4):
        super().__init__()
        self.enc, self.mu, self.logvar = nn.Linear(d, 16), nn.Linear(16, z), nn.Linear(16, z)
        self.dec = nn.Sequential(nn.Linear(z, 16), nn.ReLU(), nn.Linear(16, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.elu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        y = self.dec(mu + torch.randn_like(mu) * (0.5 * logvar).exp())
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(y, x.sigmoid()) + 0.1 * kl


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mlp": (MLP, lambda: (_x(16, 32),)),
    "transformer": (Block, lambda: (_x(2, 16, 32),)),
    "transformer, dropout": (lambda: Block(dropout=0.2), lambda: (_x(2, 16, 32),)),
    "attention by hand": (lambda: Block(by_hand=True), lambda: (_x(2, 16, 32),)),
    "resnet, training": (ResNetBlock, lambda: (_x(3, 6, 8, 8),)),
    "resnet, eval": (lambda: ResNetBlock().eval(), lambda: (_x(3, 6, 8, 8),)),
    "resnet, channels last": (ResNetBlock, lambda: (_x(3, 6, 8, 8).to(memory_format=torch.channels_last),)),
    "lstm": (Recurrent, lambda: (_x(3, 5, 10),)),
    "language model": (LanguageModel, lambda: (_ids(2, 12), _ids(2, 12))),
    "llama": (Llama, lambda: (_x(2, 16, 32),)),
    "vae": (VAE, lambda: (_x(8, 20),)),
}


def as_function(model: nn.Module, names: list[str]) -> Callable[..., Any]:
    """The model as a function of its parameters and inputs, so that all gradients are compared."""

    def fn(*args: torch.Tensor) -> Any:
        state = dict(zip(names, args[: len(names)]))
        return torch.func.functional_call(model, state, args[len(names) :])

    return fn


def build(
    name: str, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Any, tuple[torch.Tensor, ...], nn.Module]:
    """(function, its arguments, the model)."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().to(device=device, dtype=dtype)
    names = [n for n, _ in model.named_parameters()]
    leaves = [p.detach().clone().requires_grad_() for p in model.parameters()]
    args = [x.to(device=device, dtype=dtype if x.is_floating_point() else x.dtype) for x in inputs()]
    args = [x.requires_grad_() if x.is_floating_point() else x for x in args]
    return as_function(model, names), (*leaves, *args), model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["inference", "training", "dynamic", "bfloat16"])
@pytest.mark.sample(22)
def test_model(device: str, name: str, mode: str) -> None:
    torch._dynamo.reset()
    fn, args, model = build(name, device, torch.bfloat16 if mode == "bfloat16" else torch.float32)
    buffers = [b.clone() for b in model.buffers()]
    backward = mode != "inference"
    random = "dropout" in name or name == "vae"

    def again(f: Callable[..., Any], wide: bool = False) -> Any:
        for b, kept in zip(model.buffers(), buffers):
            b.copy_(kept)
        if wide:
            model.double()
        out = call(f, args, backward=backward, wide=wide)
        out.inputs += [b.clone() for b in model.buffers()]
        if wide:
            model.to(args[0].dtype)
        return out

    eager = again(fn)
    wide = None if random else again(fn, wide=True)
    stages: list[Stages] = []
    backend = Backend(Options(verify=True, fallback_random=True), stages.append)
    compiled = torch.compile(fn, backend=backend, dynamic=mode == "dynamic" or None)
    for _ in range(2):
        actual = again(compiled)
        if actual.error is not None:
            raise actual.error
        problems = wrong(actual, eager, wide)
        assert not problems, "\n".join(problems)
    assert len(stages) == (2 if backward else 1)
    if mode == "training":
        check_peak_memory(name, device, compiled, fn, args)


# Its mask is causal by construction, so on a GPU it is one fused call, whose backward has a workspace of some tiles.
WORKSPACE = {"attention by hand": 2**17}


def check_peak_memory(name: str, device: str, compiled: Callable[..., Any], fn: Callable[..., Any], args: Any) -> None:
    """No more than eager's, in a forward and a backward: bytes allocated at once, by PyTorch's own count."""
    ours, theirs = peak(device, compiled, args), peak(device, fn, args)
    # (the models are tiny, and CUDA's allocator rounds each tensor up to 512)
    slack = 8192 + WORKSPACE.get(name, 0) if device == "cuda" else 4096
    assert ours <= theirs * 1.02 + slack, f"{ours} bytes at once, eager {theirs}"


def peak(device: str, fn: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> int:
    """Bytes of a forward and a backward, beyond those before."""

    def step() -> Any:
        return torch.autograd.grad(fn(*args).sum(), [a for a in args if a.requires_grad], allow_unused=True)

    step()
    gc.collect()  # what other tests left in cycles would go in the middle, or stay
    return peak_bytes(step, torch.device(device))
