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
from reflib.fuse import one_order
from reflib.lower import depth_in_parts
from reflib.schedule import one_order as launches
from tests.interpreter import results
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
    """All that decides in which order a kernel adds up: the block along each of its sums, the instructions of its
    products. (Rows per program, warps, and what else is in a kernel do not: sums in pairs say the order. Nor does a
    product's block, if four warps together multiply it with 64 rows, wgmma, or if it is float32's, a chain per thread.)
    """
    source = kernel.source
    assert "tl.atomic" not in source
    body = source.partition("def k")[2]
    if "flex_attention" in kernel.name:  # all that is added up lies as its products leave it
        walked = "MBLOCK" if "_dkv" in kernel.name else "NBLOCK"
        block = re.findall(rf"{walked}: tl\.constexpr = (\d+)", source)
        name = kernel.name.partition("_")[2].removesuffix("_fallback")
        return (f"{name} by {block}", *sorted(set(re.findall(r"tl\.dot\(.*\)", body))))
    assert not re.findall(r"tl\.(?:sum|cumsum)\((?!tl\.reshape)", body)
    blocks = dict(re.findall(r"([RMNK]BLOCK): tl\.constexpr = (\d+)", source))
    products = re.findall(r"tl\.dot\(.*\)", body)
    if products and "input_precision" not in products[0]:
        rows = blocks.pop("NBLOCK" if "b.T, a.T" in products[0] else "MBLOCK")
        assert int(rows) >= 64 and kernel.num_warps % 4 == 0
        return tuple("wgmma" for _ in products)
    if products and 'input_precision="ieee"' in products[0]:
        return tuple("chain" for _ in products)
    sums = [f"sum {blocks['RBLOCK']}" for _ in re.findall(r"(?:sum|product)_in_pairs\(", body)]
    if not products:
        return tuple(sums)
    return (*(b + n for b, n in blocks.items()), *products, *sums, str(kernel.num_warps))


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", CASES)
def test_a_gpus_kernels_have_the_same_order(name: str, dtype: torch.dtype) -> None:
    rng = random.Random(name)
    fn, mine, others = case(name, dtype, rng)
    assert len(orders(fn, mine, others)) == 1


def _format(t: torch.Tensor) -> torch.memory_format:
    last = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def orders(fn: Any, mine: Any, others: Any) -> set[Any]:
    """Of the kernels for one row, for some, and for any number of them."""
    seen = set()
    for n, dynamic in ((1, False), (3, False), (64, False), (3, True)):
        args = [t[[0] * n].contiguous(memory_format=_format(t)) for t in mine]
        if dynamic:
            for t in args:
                torch._dynamo.mark_dynamic(t, 0)
        with torch.no_grad():
            e = reflib.explain(fn, *args, *others, target="sm_90", **ON)
        seen.add(tuple(sorted(o for k in e.kernels for o in order(k))))
    return seen


def long_rows(x: Any, y: Any) -> list[Any]:
    """Of x (B, S, L) and y (B, C, H, W), long enough to be cut."""
    return [x.mean(1), x.softmax(1), x.var(1), x.flatten(1).logsumexp(1), F.group_norm(y, 1), y.sum((2, 3))]


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_long_rows_have_the_same_order(format: Any) -> None:
    y = torch.empty(4, 6, 60, 50).to(memory_format=format)
    assert len(orders(long_rows, (torch.empty(4, 700, 30), y), ())) == 1


def gpu(fn: Any, *args: Any) -> list[str]:
    """The sources of a GPU's kernels."""
    return [k.source for k in reflib.explain(fn, *args, target="sm_90", **ON).kernels]


def pieces(length: int, columns: bool, rows: int) -> list[str]:
    """The lengths that kernels reduce. (Two pieces are added up by an elementwise one.)"""
    x = torch.empty(rows, length, 64) if columns else torch.empty(rows, length)
    return [line.partition("reducing ")[2] for text in gpu(lambda x: x.sum(1), x) for line in text.splitlines()
            if "reducing" in line]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "length", "want"),
    [
        (True, 512, ["512"]), (True, 513, ["320"]), (True, 8192, ["256", "32"]), (True, 300_000, ["600", "500"]),
        (False, 16_000, ["16000"]), (False, 16_384, ["4096", "4"]), (False, 200_704, ["6272", "32"]),
    ],
)  # fmt: skip
def test_a_gpu_cuts_by_the_length_alone(columns: bool, length: int, want: list[str]) -> None:
    assert [pieces(length, columns, rows) for rows in (1, 2, 300)] == [want] * 3


def test_batch_statistics_are_cut() -> None:
    """Of a batch norm in training, whichever way its input lies; softmax keeps its rows whole."""
    x = torch.empty(32, 64, 56, 56)
    for y in (x, x.to(memory_format=torch.channels_last)):
        first, *_ = gpu(lambda x: F.batch_norm(x, None, None, training=True), y)
        assert "_part0" in first
    assert not any("sum_1_part" in text for text in gpu(lambda x: x.softmax(-1), torch.empty(4096, 50_257)))


def test_short_sums_share_a_launch() -> None:
    """As rows of one length, of no more lanes than columns have: with and without others their order is the same."""
    assert one_order.LANES <= launches.LANES

    def sums(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(1) for x in xs]

    def lanes(*xs: torch.Tensor) -> set[str]:
        return {n for text in gpu(sums, *xs) for n in re.findall(r"RBLOCK: tl\.constexpr = (\d+)", text)}

    columns, rows = torch.empty(60, 20, 64), torch.empty(700, 20)
    assert len(gpu(sums, columns, columns.clone())) == 1
    assert lanes(columns, rows) == lanes(columns) == lanes(rows) == {"32"}
    assert len(gpu(sums, *(torch.empty(60, one_order.LANES + 1) for _ in range(2)))) == 2


def test_deep_products_are_cut_by_their_depth() -> None:
    assert [depth_in_parts.parts(k) for k in (None, 16_383, 16_384, 100_352, 1 << 18, 1 << 24, 16_411)] == [
        1, 1, 4, 28, 64, 128, 1,
    ]  # fmt: skip
    for m in (1, 40, 3000):
        first, second = gpu(torch.mm, torch.empty(m, 1 << 15), torch.empty(1 << 15, 70))
        assert f"8 of {m} x 70, depth 4096" in first and second.count("tl.load(") == 8  # added in pairs


def test_rows_are_added_in_their_order() -> None:
    """On a GPU by sorting, never by atomic additions of floats; places that several sums share are sorted once."""
    index, x, y = torch.zeros(500, dtype=torch.int64), torch.empty(90, 8), torch.empty(500, 8)

    def calls(fn: Any, options: Any = ON) -> str:
        return str(reflib.explain(fn, x, index, y, target="sm_90", **options).program)

    wide: Any = lambda i: i[:, None].expand(500, 8)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error", reflib.BatchVariantWarning)
        for fn in (
            lambda x, i, y: x.index_add(0, i, y), lambda x, i, y: x.scatter_add(0, wide(i), y),
            lambda x, i, y: x.scatter_reduce(0, wide(i), y, "sum"), lambda x, i, y: x.index_put((i,), y, True),
            lambda x, i, y: x.scatter_reduce(0, wide(i), y, "mean", include_self=False),
            lambda x, i, y: x.index_add(0, i, y).sin().index_add(0, i, y),
            lambda x, i, y: x.index_add(0, i[::2], y[:1].expand(250, 8)),
        ):  # fmt: skip
            text = calls(fn)
            assert text.count("aten.sort") == 1 and "segment_sums" in text
            assert "= aten.index_put" not in text and "sums" not in "".join(re.findall(r"store .*atomic", text))
    with pytest.warns(reflib.BatchVariantWarning, match="may choose by size"):
        assert "aten.index_put" in calls(lambda x, i, y: x.T.index_add(1, i, y.T))
    with pytest.warns(reflib.BatchVariantWarning, match="may choose by size"):  # an index per element
        assert "aten.scatter_add" in calls(lambda x, i, y: x.scatter_add(0, wide(i).clone(), y))


@pytest.mark.parametrize("rows, bits", [(32_767, 16), (32_768, 32)])
def test_places_are_sorted_in_16_bits_where_they_hold_the_number_of_rows(rows: int, bits: int) -> None:
    index, y = torch.zeros(50, dtype=torch.int64), torch.empty(50)
    e = reflib.explain(lambda x, i, y: x.index_add(0, i, y), torch.empty(rows), index, y, target="sm_90", **ON)
    assert {str(b.dtype) for n, b in e.program.buffers.items() if "places" in n} == {f"torch.int{bits}"}


@pytest.mark.parametrize("program", ["segment_sums_interpreting.py", "attention_apart_interpreting.py"])
def test_a_gpus_kernels_are_as_exact_as_eager(program: str) -> None:
    assert {n: why for n, why in results(program).items() if why} == {}


def test_few_elements_are_added_in_pairs_written_out_or_not() -> None:
    """Strided ones by a thread each; the sum of three has a zero as its fourth, as a block has."""
    (text,) = gpu(lambda x: x.sum(1), torch.empty(4096, 3, 64))
    assert "sum_in_pairs" not in text and len(re.findall(r"tl\.load", text)) == 3
    assert re.search(r"\+ 0\.0\n", text)


def test_unaligned_depths_are_padded() -> None:
    a, b = torch.empty(4096, 415).bfloat16(), torch.empty(512, 415).bfloat16()
    texts = gpu(lambda a, b: (a * 2) @ b.T, a, b)
    assert any("depth 416" in t for t in texts)


def test_a_gpus_attention_is_one_kernel() -> None:
    """In blocks that follow from the heads alone, however many keys there are; causal ones skip half of them."""

    def blocks(length: int, width: int, **how: Any) -> set[str]:
        q, k = torch.empty(2, 4, length, width, dtype=torch.bfloat16), torch.empty(2, 2, length, width).bfloat16()
        q, k = q.requires_grad_(), k.requires_grad_()
        e = reflib.explain(
            lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True, **how), q, k, target="sm_90", **ON
        )
        made = [x for s in e.graphs for x in s.kernels.values()]
        found = [x for x in made if "flex" in x.name]
        assert len({x.name.partition("_")[2] for x in found}) == 6  # three, each with a fallback
        assert not any("bmm" in x.name for x in made)
        assert all(("blocks that the mask cuts" in x.source) == (length > 128 and "is_causal" in how) for x in found)
        return {order(x)[0] for x in found}

    for width in (64, 72):
        assert blocks(40, width) == blocks(1024, width)
    assert blocks(500, 64, is_causal=True)
