"""``batch_invariant`` on a CUDA device: what tests/cpu/test_batch_invariant.py looks at, with larger sizes."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import reflib
from reflib.autotune import matmul
from reflib.autotune.roofline import Problem
from reflib.target import device_target
from tests.invariance_cases import CASES, DTYPES, case, same, variant


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrapper", ("python", "cpp"))
def test_rows_in_calls_of_other_sizes(wrapper: str, name: str, dtype: torch.dtype) -> None:
    rng = random.Random(f"{name} {dtype}")
    made = case(name, dtype, rng, "cuda", scale=4)
    assert variant(reflib.compile(made[0], wrapper=wrapper, batch_invariant=True), made, rng) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_many_sizes(dtype: torch.dtype) -> None:
    """One row beside 16 to 4096 others: in another place of a tile, in other tiles."""
    run = reflib.compile(torch.mm, batch_invariant=True, dynamic=True)
    rng = random.Random(5)
    for k, n in ((4096, 4096), (4096, 128), (11008, 512)):
        x, w = torch.randn(4096, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
        whole = run(x, w)
        for rows in (2, 16, 100, 1000):
            first = rng.randrange(4096 - rows)
            assert same(whole[first : first + rows], run(x[first : first + rows], w)), (k, n, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 4096), (100, 72, 1000), (16, 300, 520)])
def test_tilings_of_one_order(monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Those that are chosen from by size have the same bits: sides, depth, stages, warps, which operand has the 64
    rows."""
    target = device_target("cuda", 0)
    if target.capability != 90 and dtype != torch.float32:
        pytest.skip("one tiling for all")
    p = Problem((1, m, n, k), dtype, False, dtype.itemsize, dtype.itemsize)
    made = [c for c in matmul.same_order(p, target) if matmul.fits(p, c, target)]
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
    chosen, results = random.Random(1).sample(made, min(12, len(made))), []
    for c in chosen:
        monkeypatch.setattr(matmul, "_same_order", lambda p, target, c=c: c)
        torch._dynamo.reset()
        results.append(reflib.compile(torch.mm, batch_invariant=True)(a, b))
    assert [c for c, r in zip(chosen, results, strict=True) if not same(r, results[0])] == []


@pytest.mark.parametrize("how", ["plain", "causal", "mask", "bias"])
@pytest.mark.parametrize("width", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_its_gradients(dtype: torch.dtype, width: int, how: str) -> None:
    """One row of seven alone, three of them, all: the same bits, and as exact as eager."""
    torch.manual_seed(width)
    length = 197 if width < 256 else 70
    made = [torch.randn(7, h, length, width, device="cuda").to(dtype) for h in (4, 2, 2, 4)]
    mask = {"mask": torch.rand(7, 1, length, length, device="cuda") > 0.3,
            "bias": torch.randn(7, 1, length, length, device="cuda").to(dtype)}.get(how)  # fmt: skip

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=how == "causal", enable_gqa=True)

    def results(run: Any, rows: slice, to: torch.dtype = dtype) -> list[torch.Tensor]:
        q, k, v, g = (t[rows].to(to) for t in made)
        shown = None if mask is None else mask[rows] if mask.dtype == torch.bool else mask[rows].to(to)
        own = [t.detach().requires_grad_() for t in (q, k, v)]
        out = run(*own, shown)
        return [out.detach(), *torch.autograd.grad(out, own, g)]

    run = reflib.compile(attend, batch_invariant=True)
    whole, eager, want = results(run, slice(7)), results(attend, slice(7)), results(attend, slice(7), torch.float64)
    for a, b, w in zip(whole, eager, want, strict=True):
        assert (a - w).norm() <= 2 * (b - w).norm() + 1e-5 * w.norm()
    for rows in (slice(7), slice(1), slice(3, 4), slice(2, 5)):
        assert all(same(a[rows], b) for a, b in zip(whole, results(run, rows), strict=True)), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_added_where_an_index_says(dtype: torch.dtype) -> None:
    i, y = torch.randint(0, 300, (20_000,), device="cuda"), torch.randn(20_000, 40, device="cuda", dtype=dtype)
    x = torch.zeros(300, 40, device="cuda", dtype=dtype)
    for fn in (
        lambda x, y: x.index_add(0, i, y),
        lambda x, y: x.index_put((i,), y, True),
        lambda x, y: x.scatter_reduce(0, i[:, None].expand_as(y), y, "mean", include_self=False),
    ):
        run = reflib.compile(fn, batch_invariant=True)
        first, want = run(x, y), fn(x.double(), y.double())
        assert all(same(first, run(x, y)) for _ in range(3))
        assert (first - want).abs().max() <= 2 * (fn(x, y) - want).abs().max() + torch.finfo(dtype).eps


def test_gradients_are_the_same_in_every_run() -> None:
    model, (where,), _ = case("block", torch.float32, random.Random(1), "cuda", scale=4)
    run = reflib.compile(model, batch_invariant=True)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        run(where)[1].mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    first = step()
    assert all(all(map(same, first, step())) for _ in range(3))
