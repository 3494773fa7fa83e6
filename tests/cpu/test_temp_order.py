"""The order in memory of temporaries on a GPU: a residual stream has that of the layers around it."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.graph import Graph
from reflib.fuse.result import Fused
from reflib.fuse.temp_order import temp_order
from reflib.ir.interpret import interpret
from reflib.options import Options
from reflib.pipeline import run
from reflib.target import parse_target

R = random.Random(12)
B, C, S, E, DEPTH = R.randrange(2, 4), R.randrange(2, 5), 2 * R.randrange(8, 12), 8 * R.randrange(16, 24), 3


class Patches(nn.Module):
    """Patches of an image, to which blocks add what they make of their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(C, E, 2, 2)
        self.position = nn.Parameter(torch.randn(1, S * S // 4, E))
        self.blocks = nn.ModuleList(nn.Linear(E, E) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.patch(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            z = z + block(F.layer_norm(z, (E,)))
        return z.mean(1)


def test_a_residual_stream_is_stored_by_rows() -> None:
    torch.manual_seed(R.randrange(1000))
    model, x = Patches().eval(), torch.randn(B, C, S, S)
    with torch.no_grad():
        e = reflib.explain(model, x, target="sm_90")
        temps = [b for n in e.fused.nodes for b in n.writes() if e.fused.buffers[b].kind == "temp"]
        rows = [e.fused.buffers[b] for b in temps if [int(s) for s in e.fused.buffers[b].shape] == [B, S * S // 4, E]]
        assert len(rows) > DEPTH and all(b.strides[2] == 1 for b in rows), [(b.name, b.strides) for b in rows]


def test_a_chain_stays_where_all_around_it_has_its_order() -> None:

    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x.transpose(1, 2) + 1
        b = (a.cos() + y.transpose(1, 2)) * 2
        return (a + b).sum(2)

    x, y = torch.randn(B, 40, 70), torch.randn(B, 40, 70)
    e = reflib.explain(chain, x, y, target="sm_90")
    assert all(b.strides[-1] != 1 or len(b.shape) < 3 for b in e.fused.buffers.values() if b.kind == "temp")


def test_two_chains_do_not_take_the_order_of_each_other() -> None:
    """What a class index is compared with has no order of its own; probabilities have that of what they are made of."""

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        p = x.softmax(1)
        y = torch.nn.functional.one_hot(target, x.shape[1]).movedim(-1, 1).to(p.dtype)
        return torch.stack([(a * b).sum((0, 2, 3)) for a, b in ((p, y), (p, 1 - y), (1 - p, y))])

    x, target = torch.randn(B, 6, S, 2 * S, dtype=torch.bfloat16), torch.randint(0, 6, (B, S, 2 * S))
    e = reflib.explain(loss, x, target, target="sm_90")
    stored = [e.fused.buffers[b] for n in e.fused.nodes for b in n.writes()]
    assert all(tuple(map(int, b.strides)) == x.stride() for b in stored if tuple(map(int, b.shape)) == tuple(x.shape))
    assert sum("arg0_1" in n.reads() for n in e.fused.nodes) == 1


def test_a_few_elements_of_each_row_decide_nothing() -> None:
    """A loss of classes: logits in half precision, a float32 copy, and of each row the one that a label names. Along
    that one axis the few are read; all are, along the other."""
    rows, classes = R.randint(1000, 3000), R.randint(20_000, 40_000)

    def loss(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        z = (30 * torch.tanh(x / 30)).float()
        return (z.logsumexp(1) - z.gather(1, label[:, None])[:, 0]).mean()

    x, label = torch.empty(rows, classes, dtype=torch.bfloat16), torch.empty(rows, dtype=torch.int64)
    e = reflib.explain(loss, x, label, target="sm_90")
    whole = [n for n in e.fused.nodes if "arg0_1" in n.reads() and (n.numel * n.rnumel).hint() >= x.numel()]
    assert (
        len(whole) == 1
        and max(b.numel.hint() for n in e.fused.nodes for b in map(e.fused.buffers.get, n.writes())) <= rows
    )


def test_values() -> None:
    """The pass alone, for a GPU, of a program for a CPU, which the interpreter runs."""

    def chain(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        a = x.transpose(1, 2) + 1
        b = a + y
        c = b * y + a
        return [c.amax(2), (c - c.sum(2, keepdim=True)).cos().sum(1), (b - y).sum(2)]

    x, y = torch.randn(B, 40, 30, dtype=torch.float64), torch.randn(B, 30, 40, dtype=torch.float64)
    graph = Graph(make_fx(chain, tracing_mode="fake")(x, y), "inference", frozenset())
    program = run(graph, Options(verify=True), until="lower").program
    new = temp_order(Fused(program), Options(), parse_target("sm_90")).program
    assert sum(a.strides != b.strides for a, b in zip(program.buffers.values(), new.buffers.values())) >= 3
    torch.testing.assert_close(list(interpret(new, [x, y])), chain(x, y))
