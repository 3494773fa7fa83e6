"""Planned peaks of small models of several kinds, as on a GPU, are at most eager's, in inference and in training. Sizes
are drawn; nothing is computed."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reflib
from reflib.observe.memory import _named_outputs
from reflib.plan.memory import memory


class Mlp(nn.Module):
    more = 1.01  # for partial sums

    def __init__(self, r: random.Random):
        super().__init__()
        self.width = 64 * r.randint(2, 6)
        layers = [nn.Linear(self.width, self.width) for _ in range(r.randint(2, 4))]
        self.layers, self.act = nn.ModuleList(layers), r.choice([F.relu, F.gelu, F.silu])
        self.rows = 64 * r.randint(200, 600)

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.empty(self.rows, self.width),)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x


class Residual(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.act(layer(F.layer_norm(x, x.shape[-1:])))
        return x


class Tables(nn.Module):
    """Sums of embeddings, all pairs of which are multiplied. Gradients of tables are summed in float32, which takes
    twice a result; eager sorts, with memory of its own that is not counted here (3 MB of DLRM's 93)."""

    more = 1.1

    def __init__(self, r: random.Random):
        super().__init__()
        self.count, self.batch, self.bag, width = r.randint(16, 20), 512 * r.randint(6, 10), r.randint(2, 4), 64
        self.tables = nn.ModuleList(nn.Embedding(1000 * r.randint(15, 25), width) for _ in range(self.count))
        self.head = nn.Linear(self.count * self.count, 64)

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.zeros(self.batch, self.count, self.bag, dtype=torch.int64),)

    def forward(self, ids: Tensor) -> Tensor:
        every = torch.stack([t(ids[:, i]).sum(1) for i, t in enumerate(self.tables)], 1)
        return self.head((every @ every.transpose(1, 2)).flatten(1)).relu()


class Pixels(nn.Module):
    more = 1.01

    def __init__(self, r: random.Random):
        super().__init__()
        c = 16 * r.randint(1, 3)
        self.side, self.images = r.choice([28, 32, 40]), r.randint(4, 12)
        self.enter, self.conv = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.norm = nn.BatchNorm2d(c)

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.empty(self.images, 3, self.side, self.side),)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return (x + self.norm(self.conv(x)).relu()).mean((2, 3))


class Audio(nn.Module):
    """Samples: convolutions over time, whose results are all summed, and a head of more classes than channels."""

    more = 1.01  # for partial sums

    def __init__(self, r: random.Random):
        super().__init__()
        self.c, self.images, self.long = 16 * r.randint(3, 5), r.randint(6, 9), 512 * r.randint(7, 10)
        count = r.randint(8, 10)
        self.gated = nn.ModuleList(nn.Conv1d(self.c, 2 * self.c, 2, dilation=2**i) for i in range(count))
        self.skips = nn.ModuleList(nn.Conv1d(self.c, self.c, 1) for _ in range(count))
        self.head = nn.Conv1d(self.c, 4 * self.c, 1)

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.empty(self.images, self.c, self.long),)

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0
        for i, (gated, skip) in enumerate(zip(self.gated, self.skips)):
            a, b = gated(F.pad(x, (2**i, 0))).chunk(2, 1)
            y = a.tanh() * b.sigmoid()
            x, total = x + y, total + skip(y)
        return self.head((total + x).relu())


class Tagger(Mlp):
    """Logits of a vocabulary whose rows are aligned to nothing, and their loss."""

    def __init__(self, r: random.Random):
        super().__init__(r)
        self.rows //= 16
        self.head = nn.Linear(self.width, r.randrange(20001, 40000, 2))

    def inputs(self) -> tuple[Tensor, ...]:
        return (*super().inputs(), torch.zeros(self.rows, dtype=torch.int64))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.head(super().forward(x)), wanted)


def planned(e: Any) -> int:
    """The peak of a call. Of the results, which the caller has, the forward's program does not count to its end."""
    peak = memory(e.scheduled, e.stages.plan).peak_bytes
    if e.backward is None:
        return peak
    wanted = {n.name for n in e.backward.graph.nodes if n.op == "placeholder"}
    named = [(n, b) for n, b in _named_outputs(e.stages) if e.scheduled.buffers[b].kind == "temp"]
    saved = {b for n, b in named if n in wanted}
    kept = {b for n, b in named if n not in wanted} - saved
    return max(peak, e.backward.memory.peak_bytes + sum(e.scheduled.buffers[b].nbytes.hint() for b in kept))


@pytest.mark.each
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [Mlp, Residual, Tables, Pixels, Audio, Tagger])
def test_at_most_eagers(kind: Any, training: bool) -> None:
    torch._dynamo.reset()
    model = kind(random.Random(f"{kind.__name__} {training}")).bfloat16().requires_grad_(training)
    inputs = [x.bfloat16() if x.is_floating_point() else x for x in model.inputs()]
    with torch.set_grad_enabled(training):
        e = reflib.explain(model, *inputs, target="sm_90", dynamic=False)
        eager = e.memory.eager.peak_bytes()
    assert eager is not None
    assert planned(e) <= eager * kind.more, (planned(e), eager)
