"""What tests of attention share: inputs, masks, a compiler that only rewrites."""

import math
import random
from typing import Any

import pytest
import torch

import reflib
from reflib.capture import attention_call
from reflib.capture.attention import attention
from reflib.capture.attention_call import named
from reflib.ir.program import Extern
from reflib.options import Options
from tests.checking import check

INF, LOWEST = float("inf"), torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on CPUs where they are no faster, too."""
    monkeypatch.setattr(attention_call, "LONG", 0)


def sizes(seed: int) -> tuple[int, int, int, int]:
    """Batch, heads, length, width."""
    draw = random.Random(seed)
    return draw.randint(2, 3), draw.randint(2, 4), draw.randint(5, 21), draw.choice((8, 16, 24))


def qkv(seed: int, dtype: torch.dtype = torch.float32, grad: bool = False, flat: bool = False) -> list[torch.Tensor]:
    b, h, n, d = sizes(seed)
    g = torch.Generator().manual_seed(seed)
    shape = (b * h, n, d) if flat else (b, h, n, d)
    return [torch.randn(shape, generator=g).to(dtype).requires_grad_(grad) for _ in range(3)]


def padding(n: int, b: int, low: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Additive: the last keys of each row are masked, of the first batch all of one row."""
    mask = torch.zeros(b, 1, n, n, dtype=dtype)
    for i in range(b):
        mask[i, :, :, n - i - 1 :] = low
    return mask


def causal(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


class Rewritten:
    """``fn`` with attention found in it, and then run by eager."""

    def __init__(self, fn: Any, dynamic: bool | None = None, **options: Any):
        self.options, self.graphs = Options(**options), []
        self.compiled = torch.compile(fn, backend=self.backend, dynamic=dynamic)

    def backend(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(attention(module, self.options))
        return module

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)

    def names(self) -> list[str]:
        """What is called of attention and softmax."""
        found = [named(n) for graph in self.graphs for m in graph.modules() for n in m.graph.nodes]
        return [n for n in found if n in ("softmax", "scaled_dot_product_attention")]


def becomes_a_call(fn: Any, *args: Any, backward: bool = False, dynamic: bool | None = None) -> None:
    """One call, and eager's numbers."""
    torch._dynamo.reset()
    rewritten = Rewritten(fn, dynamic)
    check(fn, rewritten, *args, backward=backward)
    assert rewritten.names() == ["scaled_dot_product_attention"]


def calls(fn: Any, *args: Any, **options: Any) -> list[str]:
    """The library calls of attention and products in a compiled program."""
    torch._dynamo.reset()
    e = reflib.explain(fn, *args, **options)
    names = [str(n.target) for n in e.program.nodes if isinstance(n, Extern)]
    return [n for n in names if "attention" in n or "mm" in n]


def operators(q, k, v):
    return torch.softmax((q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1]), dim=-1) @ v
