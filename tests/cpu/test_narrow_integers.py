"""Integers of 8 and 16 bits wrap after each op, in C++ too (Triton: test_triton_programs.py); numbers become ones.
Clamped numbers are indices that need no check."""

import random
import re
from dataclasses import replace

import pytest
import torch
from narrow_chains import DTYPES, chain, operands

import reflib
from reflib.ir.interpret import interpret


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chains(dtype: torch.dtype) -> None:
    fns = [chain(seed, dtype) for seed in range(12)]
    x, y = operands(0, dtype)
    got = torch.compile(lambda x, y: [fn(x, y) for fn in fns], backend="reflib")(x, y)
    for seed, fn in enumerate(fns):
        for a, b in zip(got[seed], fn(x, y)):
            assert torch.equal(a, b), seed


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.int64, torch.float32])
def test_a_range_of_integers_rounds_its_start_and_step_first(dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    ranges = []
    for _ in range(12):
        start, step = rng.uniform(-9, 9), rng.choice((-1, 1)) * rng.uniform(1, 3)
        ranges.append((start, start + step * rng.uniform(0, 6), step))

    def fn() -> list[torch.Tensor]:
        return [torch.arange(*r, dtype=dtype) for r in ranges]

    for r, got, want in zip(ranges, torch.compile(fn, backend="reflib")(), fn()):
        torch.testing.assert_close(got, want, msg=str(r))


def advected(q: torch.Tensor, u: torch.Tensor, v: torch.Tensor, kind: int) -> torch.Tensor:
    """``q`` where it was before it moved by (u, v), which is put inside in several ways."""
    h, w = q.shape
    y, x = (torch.arange(h)[:, None] - v, torch.arange(w) - u)
    if kind == 0:
        y, x = y.clamp(0, h - 1.001), x.clamp(0, w - 1.001)
        i, j = y.floor().long(), x.floor().long()
    elif kind == 1:
        i, j = y.floor().clamp(0, h - 2).long(), x.floor().clamp(min=0, max=w - 2).long()
    else:
        i, j = y.clamp(min=0.5).trunc().clamp(max=h - 2).long(), torch.minimum(x.relu(), x.new_tensor(w - 2.0)).long()
    fy, fx = y - i, x - j
    top, bottom = q[i, j] * (1 - fx) + q[i, j + 1] * fx, q[i + 1, j] * (1 - fx) + q[i + 1, j + 1] * fx
    return top * (1 - fy) + bottom * fy


@pytest.mark.parametrize("kind", range(3))
def test_an_index_of_clamped_numbers_needs_no_check_and_is_inside_for_nan(kind: int) -> None:
    rng = random.Random(kind)
    torch.manual_seed(kind)
    h, w = rng.randint(3, 900), rng.randint(3, 900)
    q, (u, v) = torch.randn(h, w), torch.randn(2, h, w) * 9
    want = advected(q, u, v, kind)
    e = reflib.explain(advected, q, u, v, kind, target="sm_90")
    (kernel,), fused = e.kernels, e.graphs[0].fused
    assert fused is not None
    buffers = {n: replace(b, device=q.device) for n, b in fused.program.buffers.items()}
    program = replace(fused.program, buffers=buffers)
    assert "ok" not in kernel.source
    unknown = torch.rand(2, h, w) < 0.1
    u[unknown[0]], v[unknown[1]] = float("nan"), float("nan")
    names = dict(zip(("arg0_1", "arg1_1", "arg2_1"), (q, v, u), strict=True))
    (got,) = interpret(program, [names[i] for i in program.inputs])
    bad = unknown.any(0)
    torch.testing.assert_close(got[~bad], want[~bad], rtol=1e-4, atol=1e-2)
    assert got[bad].isnan().all()


def test_what_is_made_of_nan_is_inside_at_both_ends() -> None:
    """Of NaN, a GPU makes 0."""

    def ends(low: int, high: int, plus: int) -> list[int]:
        x, at = torch.randn(100), torch.randn(64) * 200
        e = reflib.explain(lambda x, at: x[at.clamp(low, high).long() + plus] * 2, x, at, target="sm_90")
        assert "ok" not in e.kernels[0].source
        return [e.kernels[0].source.count(f"tl.{op}(v") for op in ("maximum", "minimum")]

    assert ends(-50, -10, 50) == [1, 1] and ends(-5, 0, 5) == ends(10, 50, -10) == [1, 0]


def test_an_index_that_a_clamp_leaves_outside_is_checked() -> None:
    x, at = torch.randn(100), torch.randn(64) * 200

    def checks(low: float, high: float) -> bool:
        e = reflib.explain(lambda x, at: x[at.clamp(low, high).long()] * 2, x, at, target="sm_90")
        return "ok" in e.kernels[0].source

    assert not checks(0, 99.99) and not checks(-0.5, 99)
    assert checks(0, 100) and checks(-1, 99) and checks(0, float("inf"))


def test_positions_made_of_coordinates_are_in_the_index() -> None:
    """Of a padding's gradient, which torch writes as reads at tensors of positions."""
    x = torch.randn(2, 5, 24, 36).contiguous(memory_format=torch.channels_last).requires_grad_()
    e = reflib.explain(lambda x: torch.nn.functional.pad(x, (1, 2, 3, 1), mode="reflect"), x, target="sm_90").backward
    (kernel,) = {k.name.removesuffix("_fallback"): k for k in e.kernels}.values()
    first = next(line for line in kernel.source.splitlines() if "tl.load(" in line)
    assert not re.search(r"\bv\d+\b", first.split("=", 1)[1])
