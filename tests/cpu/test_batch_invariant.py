"""``batch_invariant=True``: a row's bits do not depend on the number of rows."""

import random
import re
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import reflib
from tests.invariance_cases import CASES, DTYPES, case, chains, parts, same, variant

ON: dict[str, Any] = {"batch_invariant": True}


@pytest.mark.sample(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "block" else ()) for n in CASES])
def test_rows_in_calls_of_other_sizes(name: str, dtype: torch.dtype) -> None:
    """Static and dynamic rows, and one alone, must agree: that is how torch.compile compiles the calls."""
    rng = random.Random(f"{name} {dtype}")
    made = case(name, dtype, rng)
    fn, mine, others = made
    run = reflib.compile(fn, wrapper=rng.choice(("python", "cpp")), **ON)
    with warnings.catch_warnings():
        warnings.simplefilter("error", reflib.BatchVariantWarning)
        assert variant(run, made, rng) == []
    want, wide = fn(*mine, *others), [t.double() if t.is_floating_point() else t for t in (*mine, *others)]
    if name != "block":
        with torch.no_grad():  # as compiled
            got, right = run(*mine, *others), fn(*wide)
        for i, (w, g, r) in enumerate(zip(want, got, right, strict=True)):
            floor = torch.finfo(w.dtype).eps * r.abs().max()
            assert (g - r).abs().max() <= 2 * (w - r).abs().max() + 2 * floor, i


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(6))
def test_random_chains(seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    made = chains(rng)
    run = reflib.compile(made[0], wrapper=rng.choice(("python", "cpp")), **ON)
    with warnings.catch_warnings():
        warnings.simplefilter("error", reflib.BatchVariantWarning)
        assert variant(run, made, rng) == [], made[0].__doc__


def test_without_it_they_differ() -> None:
    """Otherwise this would prove nothing."""
    rng = random.Random(0)
    made = case("products", torch.float32, rng)
    assert variant(reflib.compile(made[0]), made, rng)


def test_a_package() -> None:
    """Of any number of rows; one row is a call of the same code."""
    rng = random.Random(3)
    model, (where,), _ = case("block", torch.float32, rng)
    rows = torch.export.Dim("rows", min=1, max=64)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/m.reflib"
        reflib.aot_compile(model, (where,), path, archs=["cpu"], dynamic_shapes=({0: rows},), **ON)
        packed = reflib.load(path)
    whole, direct = packed(where), reflib.compile(model, **ON)(where)
    assert all(map(same, whole, direct))
    for part in parts(rng, len(where)):
        assert all(same(a[part], b) for a, b in zip(whole, packed(where[part])))


def test_what_cannot_be_is_named() -> None:
    def program(x: Any, w: Any) -> Any:
        return torch.relu(F.conv1d(x, w))

    said = r"aten\.convolution\.default, at .*return torch\.relu\(F\.conv1d"
    with pytest.warns(reflib.BatchVariantWarning, match=said):
        reflib.compile(program, **ON)(torch.rand(3, 2, 9), torch.rand(4, 2, 3))


def test_options() -> None:
    o = reflib.Options(batch_invariant=True)
    assert not (o.mix_orders or o.attention or o.atomics) and o.split_reductions
    with pytest.raises(reflib.OptionError):
        reflib.Options(batch_invariant=1)  # type: ignore[arg-type]


def test_long_rows_are_cut_by_their_length() -> None:
    x = torch.rand(3, 1 << 18)
    run = reflib.compile(lambda x: x.sum(-1), **ON)
    assert same(run(x)[1:2], run(x[1:2])) and same(run(x)[:2], run(x[:2]))
    e = [reflib.explain(lambda x: x.sum(-1), x[:n], **ON) for n in (1, 3)]
    assert all(len(i.kernels) == 2 for i in e)


# -- what a GPU gets ----------------------------------------------------------------------------------
def order(kernel: Any) -> tuple[str, ...]:
    """All that decides in which order a kernel adds up: its blocks along sums, the instructions of its products, and
    how often a row is combined. (Rows per program and warps do not: sums in pairs say the order. Nor do the sides of a
    product's block, if four warps together multiply it with 64 rows: wgmma.)"""
    source = kernel.source
    assert "tl.atomic" not in source
    body = source.partition("def k")[2]
    assert not re.findall(r"tl\.(?:sum|cumsum)\((?!tl\.reshape)", body)
    blocks = dict(re.findall(r"([RMNK]BLOCK): tl\.constexpr = (\d+)", source))
    products = re.findall(r"tl\.dot\(.*\)", body)
    if products and "input_precision" not in products[0]:
        rows = blocks.pop("NBLOCK" if "b.T, a.T" in products[0] else "MBLOCK")
        assert int(rows) >= 64 and kernel.num_warps % 4 == 0
        return f"depth {blocks['KBLOCK']}", *("wgmma" for _ in products)
    made = [b + n for b, n in blocks.items()] + products + re.findall(r"sum_in_pairs\(", body)
    return (*made, str(kernel.num_warps) if products else "")


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", CASES)
def test_a_gpus_kernels_have_the_same_order(name: str, dtype: torch.dtype) -> None:
    rng = random.Random(name)
    fn, mine, others = case(name, dtype, rng)
    seen = set()
    for n, dynamic in ((1, False), (3, False), (64, False), (3, True)):
        args = [t[:1].expand(n, *t.shape[1:]).contiguous() for t in mine]
        if dynamic:
            for t in args:
                torch._dynamo.mark_dynamic(t, 0)
        with torch.no_grad():
            e = reflib.explain(fn, *args, *others, target="sm_90", **ON)
        seen.add(tuple(sorted(o for k in e.kernels if (o := order(k)) != ("",))))
    assert len(seen) == 1
