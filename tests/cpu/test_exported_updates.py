"""Exported programs and packages write to their buffers and arguments in place: a cache is not copied."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reflib
from reflib.api import exported_stages
from reflib.ir.program import walk
from reflib.options import Options

RANDOM = random.Random(20)
B, H, S, D = RANDOM.randrange(1, 4), RANDOM.randrange(2, 5), RANDOM.randrange(20, 40), 2 * RANDOM.randrange(4, 9)
Update = Callable[[Tensor, Tensor, Tensor], Any]


def at_position(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache[:, :, position] = new


def index_copy(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache.index_copy_(2, position, new)


def into_slice(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache[:, :, 7:8].copy_(new)


WAYS: dict[str, Update] = {f.__name__: f for f in (at_position, index_copy, into_slice)}


class Decoder(nn.Module):
    """A step: the keys' cache is a buffer, the values' an argument."""

    def __init__(self, update: Update):
        super().__init__()
        torch.manual_seed(0)
        self.update, self.qkv = update, nn.Linear(H * D, 3 * H * D)
        self.register_buffer("keys", torch.randn(B, H, S, D))

    def forward(self, x: Tensor, position: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (t.view(B, -1, H, D).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        self.update(self.keys, position, k * 0.5)
        self.update(values, position, v)
        mask = torch.arange(S) <= position[:, None]
        y = F.scaled_dot_product_attention(q, self.keys, values, attn_mask=mask)
        return x + y.transpose(1, 2).reshape(x.shape), values[0, :, 3:]


def arguments() -> tuple[Tensor, ...]:
    return torch.randn(B, 1, H * D), torch.tensor([5]), torch.randn(B, H, S, D)


def large(stages: Any) -> list[str]:
    """Temporaries of as many elements as a cache."""
    made = {b for n in walk(stages.scheduled.nodes) for b in n.writes()}
    buffers = stages.scheduled.buffers
    return [b for b in made if buffers[b].kind == "temp" and buffers[b].numel.hint() >= B * H * S * D]


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_is_written_in_place(way: str) -> None:
    model = Decoder(WAYS[way]).eval()
    args = arguments()
    program = torch.export.export(model, args)
    stages, _, _ = exported_stages(program, Options.make({"wrapper": "python", "verify": True}))
    assert not large(stages)
    assert {(u.buffer, u.why) for u in stages.fused.updates} == {("b_keys", ""), ("values", "")}
    assert all("test_exported_updates.py" in u.source for u in stages.fused.updates)


@pytest.mark.parametrize("how", ["python", "cpp", "package"])
def test_several_steps_as_eager(how: str, tmp_path: Path) -> None:
    model, eager = Decoder(at_position).eval(), Decoder(at_position).eval()
    args = arguments()
    if how == "package":
        reflib.aot_compile(model, args, tmp_path / "m.reflib", "cpu")
        f: Any = reflib.load(tmp_path / "m.reflib")
        keys = f._state["keys"]
    else:
        f = reflib.compile(torch.export.export(model, args), wrapper=how)
        keys = f._weights["keys"]
    mine, theirs = args[2].clone(), args[2].clone()
    before, versions = mine.data_ptr(), (mine._version, keys._version)
    with torch.no_grad():
        for _ in range(3):
            x, position = torch.randn(B, 1, H * D), torch.tensor([RANDOM.randrange(S)])
            got, want = f(x, position, mine), eager(x, position, theirs)
            torch.testing.assert_close((got, mine, keys), (want, theirs, eager.keys))
            assert got[1].data_ptr() == mine[0, :, 3:].data_ptr(), "a view of the argument, as eager's is"
        assert mine.data_ptr() == before and mine._version > versions[0] and keys._version > versions[1]
        # laid out in another way: it is written to all the same
        mine, theirs = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (mine, theirs))
        torch.testing.assert_close((f(x, position, mine)[0], mine), (eager(x, position, theirs)[0], theirs))
        one = torch.zeros(1, 1, 1, 1).expand(B, H, S, D)
        with pytest.raises(reflib.ReflibError, match="several elements in one place"):
            f(x, position, one)
        kept = keys.clone()
        with pytest.raises(reflib.ReflibError, match=r"weight keys is written to and .* with argument values"):
            f(x, position, keys)
        with pytest.raises(reflib.ReflibError, match="weight keys is written to and shares memory with argument"):
            f(keys.flatten()[: x.numel()].view_as(x), position, mine)
        assert torch.equal(keys, kept), "nothing is written before"


class Exchange(nn.Module):
    """Reads of what was there come before writes, whatever is written in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.arange(6.0))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        was, old = a.clone(), self.held.clone()
        a.copy_(b)
        b.copy_(was)
        self.held[1:4] += a[:3]
        a[2:] = old[:4]
        return was[1:], a[:2], b, self.held, old, self.held[2:]


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_what_is_exchanged(wrapper: str) -> None:
    program, eager = torch.export.export(Exchange(), (torch.ones(6), torch.ones(6))), Exchange()
    f = reflib.compile(program, wrapper=wrapper)
    mine = torch.randn(6), torch.randn(6)
    theirs = mine[0].clone(), mine[1].clone()
    first = None
    for _ in range(3):
        got, want = f(*mine), eager(*theirs)
        torch.testing.assert_close((got, mine, f._weights["held"]), (want, theirs, eager.held))
        assert got[2] is mine[1] and got[1].data_ptr() == mine[0].data_ptr() != got[0].data_ptr()
        first = first or (got[3], got[3].clone())
        assert torch.equal(*first), "an earlier result of a buffer stays as it was"


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.arange(6.0))
        self.register_buffer("part", self.held[2:])

    def forward(self, a: Tensor) -> Tensor:
        return self.held.add_(a).sum() + self.part


def test_weights_in_one_memory() -> None:
    args = (torch.ones(6),)
    with pytest.raises(reflib.errors.CaptureError, match=r"share memory.*held.*part"):
        reflib.compile(torch.export.export(Part(), args))
    with pytest.raises(reflib.ReflibError, match=r"share memory|held is written to and shares memory with part"):
        reflib.aot_compile(Part(), args, archs="cpu")
    with pytest.raises(reflib.ReflibError, match="held is written to and shares memory with part"):
        reflib.aot_compile(Part(), args, archs="sm_90", ptx=False)  # captured with other tensors, each by itself
