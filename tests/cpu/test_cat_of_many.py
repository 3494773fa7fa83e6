"""``cat`` of more tensors than one loop nest chooses from: stored each in its place, cut in pieces, or a call."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import reflib
from reflib.ir.interpret import interpret
from reflib.ir.loops import LoopNest
from reflib.lower.indexing import LONG_RUN, RUN, TOGETHER
from tests.choices import GPU, program_of


def calls(e: Any) -> int:
    (found,) = (row["calls"] for row in e.summary())
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(6))
def test_parts_of_all_kinds(seed: int) -> None:
    """Computed, reduced, inputs, expanded, and of several sizes, joined along any dimension, with gradients."""
    rng = random.Random(seed)
    sizes, d, n = [rng.randint(2, 9), rng.randint(2, 9), rng.randint(17, 40)], rng.randrange(3), rng.randint(17, 45)
    kinds = [rng.choice("cccrie") for _ in range(n)]
    wide = [rng.choice([sizes[d], sizes[d] + 3]) for _ in range(n)]

    make = {
        "c": lambda a, y, i: (a * i).sin(), "r": lambda a, y, i: a.softmax(-1), "i": lambda a, y, i: y,
        "e": lambda a, y, i: a.mean(-1, True).expand_as(a),
    }  # fmt: skip

    def fn(x: Tensor, y: Tensor) -> Tensor:
        whole = torch.cat([x, x.narrow(d, 0, 1).expand([3 if k == d else s for k, s in enumerate(sizes)])], d)
        slices = [(whole.narrow(d, 0, size), y.narrow(d, 0, size)) for size in wide]
        return torch.cat([make[kind](a, b, i) for i, (kind, (a, b)) in enumerate(zip(kinds, slices))], d)

    torch.manual_seed(seed)
    y = torch.randn([s + 3 if k == d else s for k, s in enumerate(sizes)])
    x = torch.randn(sizes, requires_grad=True)
    got, want = reflib.compile(fn)(x, y), fn(x, y)
    torch.testing.assert_close(got, want)
    given = torch.randn_like(want)
    grads = (torch.autograd.grad(out, x, given)[0] for out in (got, want))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_columns_of_embeddings() -> None:
    """26 tables' rows side by side: one launch, of as few parts as hold their stores, and no copy."""
    tables, ids = torch.randn(26, 50, RUN // 4), torch.randint(50, (90, 26))

    def fn(tables: Tensor, ids: Tensor) -> Tensor:
        return torch.cat([tables[f][ids[:, f]] for f in range(26)], 1)

    e = reflib.explain(fn, tables, ids, target="sm_90")
    assert len(e.kernels) == 1 and calls(e) == 0
    dynamic = reflib.compile(fn, dynamic=True)
    for rows in (3, 17, 64):
        ids = torch.randint(50, (rows, 26))
        assert torch.equal(dynamic(tables, ids), fn(tables, ids))


def test_a_call_where_parts_are_copied_or_short() -> None:
    a = torch.randn(7, RUN // 4)
    assert calls(reflib.explain(lambda a: torch.cat([a] * 20, 1), a)) == 1
    assert calls(reflib.explain(lambda a: torch.cat([(a + k).sin() for k in range(20)], 1), a)) == 0
    short = a[:, :-1].contiguous()
    assert calls(reflib.explain(lambda a: torch.cat([(a + k).sin() for k in range(20)], 1), short)) == 1


def test_few_launches_for_small_parts_of_unlike_widths() -> None:
    """Small ones are computed where they are joined, by one kernel; large ones are stored by those that make them."""

    def fn(*parts: Tensor) -> Tensor:
        return torch.cat([p.sin() for p in parts], 1)

    for rows, kernels in ((64, 1), (65536, 18)):
        e = reflib.explain(fn, *(torch.empty(rows, RUN // 4 * (4 + i % 2)) for i in range(18)), target="sm_90")
        assert calls(e) == 0 and len(e.kernels) == kernels


@pytest.mark.parametrize("seed", range(8))
def test_short_runs_of_many_inputs_are_copied_in_windows(seed: int) -> None:
    """Each part by one or two windows, with the others that have as many columns or up to twice as many."""
    rng = random.Random(seed)
    dtype, d, n = rng.choice([torch.bfloat16, torch.float32, torch.int16]), rng.randrange(3), rng.randint(17, 50)
    shape = [rng.randint(1, 2) for _ in range(3)]
    widths = [rng.randrange(1, 32, 2) for _ in range(n)]
    parts = [torch.randint(-99, 99, [w if k == d else s for k, s in enumerate(shape)]).to(dtype) for w in widths]
    parts[3] = parts[3].repeat(2, 2, 2)[tuple(slice(s) for s in parts[3].shape)]  # with other strides
    program = program_of(lambda *x: torch.cat(x, d), *parts, options=GPU)
    (got,) = interpret(program, parts)
    assert torch.equal(got, torch.cat(parts, d))
    assert all(isinstance(node, LoopNest) for node in program.nodes)
    groups = {w.bit_length() for w in widths}
    assert len(program.nodes) <= len(groups) + n // TOGETHER


def test_long_runs_of_many_inputs_are_stored_each() -> None:
    parts = [torch.empty(6, LONG_RUN // 2 + 1 + 2 * i, dtype=torch.bfloat16) for i in range(17)]
    program = program_of(lambda *x: torch.cat(x, 1), *parts, options=GPU)
    assert [len(node.stores()) for node in program.nodes if isinstance(node, LoopNest)] == [1] * 17
