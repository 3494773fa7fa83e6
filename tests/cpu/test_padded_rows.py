"""Loops over rows that have padding in memory go over the padding too: eager's values, fewer fills and masks."""

import importlib.util
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_cases import GPU, lowered

from reflib import explain
from reflib.fuse import fuse, padded_rows
from reflib.ir.interpret import interpret
from reflib.ir.loops import LoopNest
from reflib.ir.program import Program
from reflib.ir.verify import verify
from reflib.lower import padding
from reflib.options import Options

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "BALANCE", 0)
    monkeypatch.setattr(padding, "LAUNCHES", -1)
    monkeypatch.setattr(padded_rows, "SHORTEST", 2)


def fused(fn: Callable[..., Any], args: list[torch.Tensor]) -> Program:
    """As on a GPU; its results are eager's."""
    o = Options(target="sm_90")
    program = fuse(lowered(fn, args, options=o), o, GPU).program
    verify(program)
    want = torch.utils._pytree.tree_leaves(fn(*args))
    for got, w in zip(interpret(program, args), want, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (w.shape, w.stride(), w.dtype)
        torch.testing.assert_close(got, w, rtol=2e-2, atol=2e-2, equal_nan=True)
    return program


def row(program: Program, name: str) -> list[LoopNest]:
    """The loop nests that write or read ``name``."""
    nests = [n for n in program.nodes if isinstance(n, LoopNest)]
    return [n for n in nests if name in (*n.writes(), *n.reads())]


def scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    w = torch.bmm(q, k.mT * 1.0)
    return torch.bmm((w / w.float().abs().sum(-1, keepdim=True).clamp(min=1).to(w.dtype)), v)


@pytest.mark.parametrize("seed", range(6))
def test_between_two_products(seed: int) -> None:
    """The rows between them are read and written whole, and nothing fills their padding."""
    rng = random.Random(seed)
    b, s, c = rng.randint(1, 3), rng.choice([n for n in range(9, 60) if n % 8]), 8 * rng.randint(1, 3)
    dtype = rng.choice([torch.float16, torch.bfloat16])
    q, k, v = (torch.randn(b, s, c).to(dtype) for _ in range(3))
    if rng.random() < 0.5:
        q[0, rng.randrange(s)] = math.nan
    program, up = fused(scores, [q, k, v]), -(-s // 8) * 8
    (middle,) = [n for n in row(program, "bmm_1_operand") if n.reduced]
    assert middle.rnumel == up and all(x.mask is None for x in middle.loads())
    stores = [x for n in row(program, "bmm_1_operand") for x in n.stores() if x.buffer == "bmm_1_operand"]
    assert len(stores) == 1, "a fill is left"


@pytest.mark.parametrize("seed", range(6))
def test_what_has_no_padding_is_masked(seed: int) -> None:
    rng = random.Random(seed)
    m, n, k = rng.randint(2, 9), rng.choice([n for n in range(9, 60) if n % 8]), 8 * rng.randint(1, 3)
    a, b, more = torch.randn(m, k).half(), torch.randn(k, n).half() * 1, torch.randn(m, n)

    def fn(a: torch.Tensor, b: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        y = a @ (b * 2)
        return (y + more).amax(-1, keepdim=True) + y.float().sum(-1, keepdim=True)

    program, up = fused(fn, [a, b, more]), -(-n // 8) * 8
    (nest,) = [x for x in row(program, "mm_padded") if x.reduced]
    assert nest.rnumel == up
    along = [x for x in nest.loads() if x.index.has(nest.reduced[0].var)]
    assert {x.buffer: x.mask is not None for x in along} == {"mm_padded": False, next(iter(program.inputs[2:])): True}


def test_what_others_store_behind_a_row_stays() -> None:
    """Three columns after 61 are no padding; rows that are a slice of somebody else's are read whole, not written."""
    x, weight = torch.randn(5, 61).half(), torch.randn(64, 16).half()
    program = fused(lambda x, w: torch.cat([x.exp(), x[:, :3] + 1], 1) @ w, [x, weight])
    stores = [(n, s) for n in program.nodes if isinstance(n, LoopNest) for s in n.stores()]
    assert all(a.size != 64 for n, s in stores for a in n.axes if len(stores) > 1)
    (sums,) = fused(lambda x: x[:, :61].float().sum(1), [torch.randn(5, 64)]).nodes
    assert isinstance(sums, LoopNest) and sums.rnumel == 64
    y = torch.randn(5, 64)
    want = y.clone()
    want[:, :61] += 1
    o = Options(target="sm_90")
    program = fuse(lowered(lambda x: x[:, :61].add_(1).sum(1), [y], options=o), o, GPU).program
    interpret(program, [y])
    assert torch.equal(y, want)


@needs_triton
def test_sixteen_bytes_at_once() -> None:
    """The kernel's own text: no mask that ends within 16 bytes where the rows do not."""
    q, k, v = (torch.randn(2, 77, 16).bfloat16() for _ in range(3))
    e = explain(scores, q, k, v, target="sm_90", verify=True)
    (source,) = [x.source for x in e.kernels if "reducing" in x.source]
    assert "rmask = r < 80" in source and "mask=rmask)" in source and "77" in source
    assert not [x.name for x in e.kernels if "over 154 x 3" in x.source]
