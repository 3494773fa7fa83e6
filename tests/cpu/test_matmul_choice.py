"""Which tilings are tried, what is taken unmeasured, what a kernel assumes, and the model that ranks."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from reflib import explain
from reflib.autotune import roofline as model
from reflib.autotune.epilogue import Epilogue
from reflib.autotune.matmul import (
    MOST,
    NEAR,
    TMA_SCRATCH,
    estimate,
    fits,
    problem,
    static_tiling,
    template_variants,
    tilings,
    unfit_for_tma,
)
from reflib.autotune.split_k import known, reducers, whole_splits
from reflib.generate.compile_triton import compile_kernel
from reflib.generate.matmul import generate_matmul
from reflib.ir.expr import Expr, IntLike, Sym, Var, expr
from reflib.ir.loops import Acc, Axis, BodyBuilder, LoopNest
from reflib.ir.program import Buffer, Extern, Program, Template, Tiling, Variant, Variants, full_view
from reflib.ir.verify import verify
from reflib.options import Options
from reflib.target import parse_target

OFF = Options()
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
TARGETS = [
    *("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"),
    *("gfx90a", "gfx942", "gfx950", "gfx1100"),
]
SHAPES = [
    *((1, 1, 1), (1, 4096, 4096), (16, 16, 4096), (17, 33, 1000), (48, 48, 32768), (64, 64, 8192), (256, 1024, 65536)),
    *((512, 512, 32768), (128, 128, 65536), (16, 11008, 4096), (256, 11008, 4096), (4096, 4096, 4096), (4097, 31, 3)),
]
H200 = parse_target("sm_90")


def matrix(name: str, *sizes: IntLike, dtype: torch.dtype, kind: str = "input", turned: bool = False) -> Buffer:
    """Contiguous; ``turned``: its last two dimensions lie in memory the other way around."""
    shape, strides, step = [expr(s) for s in sizes], [], expr(1)
    order = list(range(len(shape)))
    if turned:
        order[-2:] = order[:-3:-1]
    found = {}
    for d in reversed(order):
        found[d], step = step, step * shape[d]
    strides = [found[d] for d in range(len(shape))]
    return Buffer(name, dtype, torch.device("cuda", 0), tuple(shape), tuple(strides), kind)


def product(
    m: IntLike, n: IntLike, k: IntLike, b: IntLike = 1, dtype: torch.dtype = HALF, precision: str = "ieee"
) -> tuple[Template, dict[str, Buffer]]:
    """x[b, m, k] @ y[b, k, n] -> out, and its buffers."""
    b, m, n, k = (expr(e) for e in (b, m, n, k))
    x, y = matrix("x", b, m, k, dtype=dtype), matrix("y", b, k, n, dtype=dtype)
    out = matrix("out", *((m, n) if b == 1 else (b, m, n)), dtype=dtype, kind="temp")
    axes = [Axis(Var(name, size), "p") for name, size in zip("ij" if b == 1 else "zij", out.shape)]
    body = BodyBuilder()
    acc = body.cast(body.add(Acc(FLOAT)), dtype)
    body.store("out", sum((expr(a.var) * s for a, s in zip(axes, out.strides)), expr(0)), acc)
    epilogue = LoopNest("t", tuple(axes), tuple(body.body))
    t = Template("t", full_view(x), full_view(y), epilogue, dtype, precision)
    return t, {"x": x, "y": y, "out": out}


def sym(name: str, hint: int) -> Expr:
    return expr(Sym(name, 2, None, hint))


# -- tilings ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype, precision", [(HALF, "ieee"), (BF16, "ieee"), (FLOAT, "ieee"), (FLOAT, "tf32")])
@pytest.mark.sample(4)
def test_candidates_are_within_limits(target, dtype, precision):
    there = parse_target(target)
    for shape in SHAPES:
        t, _ = product(*shape, dtype=dtype, precision=precision)
        p, found = problem(t), tilings(t, there, OFF)
        assert len(set(found)) == len(found)
        assert bool(found) == (dtype != BF16 or target != "sm_75")
        assert len(found) <= MOST
        for c in found:
            assert fits(p, c, there) and model.shared_bytes(p, c, there) <= there.shared
            assert c.m * c.n // (32 * c.num_warps) <= 128
            assert min(c.m, c.n, c.k // c.warps_k) >= 16
            assert all(s & (s - 1) == 0 for s in (c.m, c.n, c.k, c.num_warps, c.warps_k))
            assert (c.splits > 1) == (c.kind == "split")
        rest = [c for c in found if c not in known(p, there)]
        seconds = [estimate(p, c, there) for c in rest]
        near = {c.kind for c, s in zip(rest, seconds) if s <= NEAR[c.kind] * seconds[0]}
        heads = len(near)
        assert {c.kind for c in rest[:heads]} == near  # the best guess of each kind that is near
        assert seconds[:heads] == sorted(seconds[:heads]) and seconds[heads:] == sorted(seconds[heads:])


def test_there_are_none_on_a_cpu():
    assert tilings(product(64, 64, 64)[0], parse_target("cpu"), OFF) == []
    assert static_tiling(product(64, 64, 64)[0], lambda: Epilogue(0), parse_target("cpu")) is None


def test_no_block_is_much_larger_than_what_it_covers():
    for shape in SHAPES:
        m, n, k = (max(least, s) for least, s in zip((16, 16, 32), shape))
        for c in tilings(product(*shape)[0], H200, OFF):
            assert c.m < 2 * m and c.n < 2 * n and c.k < 2 * k


def test_split_gives_every_program_depth():
    for k in (1000, 4096, 4097, 32768):
        for c in tilings(product(48, 48, k)[0], H200, OFF):
            each = -(-k // (c.k * c.splits)) * c.k
            assert each * (c.splits - 1) < k
    assert whole_splits(100, 16, 5) == 4  # 7 steps: 5 programs would take 2, 2, 2, 1 and nothing


def test_little_work_per_tile_is_split_and_much_is_not():
    for k in (4096, 32768):
        assert tilings(product(32, 32, k)[0], H200, OFF)[0].kind == "split"
    assert all(c.kind != "split" for c in tilings(product(8192, 8192, 4096)[0], H200, OFF))


def test_the_measured_tilings_come_first():
    for size in (16, 32, 48, 64):
        for k in (4096, 20480, 32768):
            t, _ = product(size, size, k)
            measured = known(problem(t), H200)
            assert measured and tilings(t, H200, OFF)[: min(8, len(measured))] == measured[:8]
            assert all(c.reducers and c.num_stages > 2 for c in measured)
            assert all(k < 2 * c.k * problem(t).steps(c) * c.splits for c in measured)
    assert known(problem(product(16, 4096, 4096)[0]), H200)
    for shape, target in (((64, 64, 1024), "sm_90"), ((65, 64, 8192), "sm_90"), ((64, 64, 8192), "gfx942")):
        assert known(problem(product(*shape)[0]), parse_target(target)) == []


def test_reducers_have_few_words_and_all_programs_fit_into_one_wave_if_that_is_near():
    t = Tiling("split", 64, 32, 128, 4, 5, splits=64)
    p = problem(product(64, 64, 32768)[0])
    assert reducers(p, t, 132) == 64  # 64 parts of 2048 points, 16 for each of 128 threads
    assert reducers(p, replace(t, splits=32), 132) == 32
    assert reducers(p, replace(t, m=32, splits=32), 170) == 8  # 4 tiles: 4 * (32 + 16) are more, 4 * (32 + 8) are not
    assert reducers(p, replace(t, splits=2), 132) == 2
    assert reducers(problem(product(16, 8192, 4096)[0]), replace(t, m=16, splits=4), 132) == 1


def test_candidates_differ():
    for shape, blocks in (((1024, 1024, 4096), 2), ((4096, 4096, 4096), 3)):
        found = tilings(product(*shape)[0], H200, OFF)
        for kind in ("tiled", "persistent"):
            assert len({(c.m, c.n) for c in found if c.kind == kind}) >= blocks
        assert len({replace(c, num_stages=0) for c in found}) == len(found)


def test_few_rows_are_turned_where_wgmma_is() -> None:
    def tiled(m: int, target: str = "sm_90", dtype: torch.dtype = HALF) -> list[Tiling]:
        found = tilings(product(m, 11008, 4096, dtype=dtype)[0], parse_target(target), OFF)
        return [c for c in found if c.kind == "tiled"]

    for few in (tiled(16, dtype=BF16), tiled(32)):
        assert any(c.turned for c in few) and all(c.turned == (c.m < 64 <= c.n) for c in few)
    for others in (tiled(4096), tiled(16, "sm_80"), tiled(16, "sm_100"), tiled(16, dtype=FLOAT)):
        assert others and not any(c.turned for c in others)


@pytest.mark.parametrize("m, best", [  # measured on an H200, bfloat16, by N = 11008, K = 4096
    (16, Tiling("tiled", 16, 64, 128, 4, 4, turned=True)), (32, Tiling("tiled", 32, 64, 128, 4, 4, turned=True)),
    (64, Tiling("tiled", 64, 128, 128, 4, 4)), (128, Tiling("tiled", 128, 128, 64, 4, 6)),
    (256, Tiling("tiled", 64, 128, 64, 4, 3)), (4096, Tiling("persistent", 128, 256, 64, 8, 4)),
])  # fmt: skip
def test_the_fastest_ones_are_tried(m: int, best: Tiling) -> None:
    found = tilings(product(m, 11008, 4096, dtype=BF16)[0], H200, OFF)
    assert best in [c for c in found if c.kind == best.kind][:10]


def test_sizes_known_at_run_time_only_are_judged_by_the_traced_ones():
    m, k = sym("s0", 64), sym("s1", 4096)
    assert tilings(product(m, 64, k)[0], H200, OFF) == tilings(product(64, 64, 4096)[0], H200, OFF)


# -- persistent -------------------------------------------------------------------------------------
def persistent(t: Template, target: str = "sm_90") -> bool:
    return any(c.kind == "persistent" for c in tilings(t, parse_target(target), OFF))


def test_persistent_kernels_are_for_large_products_that_tma_can_read():
    big = product(4096, 4096, 4096)[0]
    assert persistent(big) and persistent(big, "sm_100") and not persistent(big, "sm_80")
    assert not persistent(big, "gfx942") and not persistent(product(64, 64, 4096)[0])
    assert not persistent(product(4096, 4096, 4096, b=2)[0])
    assert not persistent(product(4096, 4096, 4095)[0]) and not persistent(product(4096, 4095, 4096)[0])
    assert persistent(product(4095, 4096, 4096)[0])
    assert persistent(product(4096, 4096, 4096, dtype=FLOAT, precision="tf32")[0])
    assert not persistent(product(4096, 4096, 4096, dtype=FLOAT)[0])


def test_what_tma_can_read():
    v = full_view(matrix("x", 1, 64, 32, dtype=HALF))
    turned = full_view(matrix("x", 1, 64, 32, dtype=HALF, turned=True))
    assert turned.strides[1:] == (1, 64)
    assert not unfit_for_tma(v, ()) and not unfit_for_tma(turned, ())
    assert not unfit_for_tma(replace(v, offset=expr(8)), ())
    assert "offset" in unfit_for_tma(replace(v, offset=expr(4)), ())
    assert "contiguous" in unfit_for_tma(replace(v, strides=(expr(0), expr(64), expr(2))), ())
    assert "stride" in unfit_for_tma(replace(v, strides=(expr(0), expr(0), expr(1))), ())
    rows = replace(v, strides=(expr(0), sym("s0", 64), expr(1)))
    assert unfit_for_tma(rows, ()) and not unfit_for_tma(rows, ("s0",))


# -- the model --------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", TARGETS)
def test_no_estimate_is_under_the_roofline(target):
    there = parse_target(target)
    for shape in SHAPES:
        t, _ = product(*shape)
        p = problem(t)
        b, m, n, k = p.sizes
        moving = b * (m * k + k * n + m * n) * HALF.itemsize / (1e9 * model.rates(there).memory)
        least = max(moving, 2 * b * m * n * k / model.flops_per_second(HALF, there))
        for c in tilings(t, there, OFF):
            assert least < estimate(p, c, there) < 1


def test_the_estimate_knows_what_it_says_it_knows():
    tile = Tiling("tiled", 128, 128, 64, 8, 4)
    wave = [estimate(problem(product(128, 128 * n, 4096)[0]), tile, H200) for n in (132, 133)]
    assert wave[1] > 1.3 * wave[0]  # one tile more than multiprocessors
    deep = problem(product(32, 32, 32768)[0])
    few, some, many = (estimate(deep, Tiling("split", 16, 16, 128, 2, 4, splits=s), H200) for s in (2, 32, 256))
    assert some < few and some < many
    assert estimate(deep, Tiling("tiled", 16, 16, 128, 2, 5), H200) < estimate(
        deep, Tiling("tiled", 16, 16, 128, 2, 2), H200
    )  # bytes in flight


def test_targets_without_a_data_sheet_borrow_one():
    h100 = replace(H200, units=66)
    assert model.rates(h100).half == pytest.approx(989 / 2)
    assert model.rates(replace(H200, arch="sm_87")).memory == 768
    assert model.rates(replace(H200, arch="sm_130")).memory == 1792
    assert model.rates(replace(parse_target("gfx942"), arch="gfx999")).memory == 1638


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "target, shape, dtype",
    [
        ("sm_90", (1024, 4096, 4096), HALF),
        ("sm_90", (48, 48, 16384), HALF),
        ("sm_86", (512, 512, 4096), HALF),
        ("sm_100", (1024, 1024, 1024), BF16),
        ("sm_75", (256, 256, 256), FLOAT),
        ("gfx942", (1024, 4096, 4096), HALF),
    ],
)
def test_shared_memory_is_what_triton_takes(target, shape, dtype):
    there = parse_target(target)
    t, buffers = product(*shape, dtype=dtype)
    found = tilings(t, there, OFF)
    chosen = {c.kind: c for c in reversed(found)}.values()
    for c in chosen:
        v = template_variants("k0", replace(t, tiling=c), buffers, there)[0]
        aligned = [a.what for a in v.predicate if a.kind == "aligned"]
        taken = compile_kernel(generate_matmul(v.kernel, buffers, there, aligned), there).shared
        assert taken <= model.shared_bytes(problem(t), c, there) <= max(1.35 * taken, 32768)


# -- without measuring ------------------------------------------------------------------------------
def test_small_products_with_an_epilogue_become_one_launch():
    for shape in ((64, 64, 64), (32, 512, 512), (256, 256, 1024), (1, 1000, 512)):
        for dtype in (HALF, BF16, FLOAT):
            t, _ = product(*shape, dtype=dtype)
            assert static_tiling(t, lambda: Epilogue(0), H200) is not None
            assert static_tiling(t, lambda: None, H200) is None
    assert static_tiling(product(64, 64, 64, b=64)[0], lambda: Epilogue(0), H200) is not None


def test_few_results_of_great_depth_are_split():
    for size in (16, 32, 48, 64):
        for k in (4096, 16384, 32768):
            tiling = static_tiling(product(size, size, k)[0], lambda: Epilogue(0), H200)
            assert tiling is not None and tiling.kind == "split"


def test_large_products_are_left_to_the_library():
    for shape in ((4096, 4096, 4096), (1024, 1024, 1024), (16, 11008, 4096)):
        assert static_tiling(product(*shape)[0], lambda: Epilogue(0), H200) is None


@pytest.mark.parametrize("seed", range(6))
def test_many_rows_of_little_depth_take_their_epilogue_in(seed: int):
    """They wait for memory, so a kernel behind them that does little would take as long as they do."""
    draw = random.Random(seed)
    m, n, k = draw.randrange(60_000, 400_000), draw.choice((64, 128, 256)), 8 * draw.randrange(4, 33)
    t = product(m, n, k, dtype=BF16)[0]
    relu, erf = Epilogue(2, kept=False, work=1), Epilogue(2, kept=False, work=200)
    assert static_tiling(t, lambda: relu, H200) is not None
    assert static_tiling(t, lambda: erf, H200) is None
    assert static_tiling(t, lambda: None, H200) is None
    assert static_tiling(product(m, 2048, 8 * k, dtype=BF16)[0], lambda: relu, H200) is None


def test_a_network_along_rays_has_no_kernel_for_its_activations():
    e = explain(
        lambda x, a, b, c, d: F.relu(F.linear(F.relu(F.linear(x, a, b)), c, d)),
        *(torch.ones(*s).bfloat16() for s in ((150_000, 63), (128, 63), (128,), (128, 128), (128,))), target="sm_90",
    )  # fmt: skip
    assert not [n for n in e.scheduled.nodes if isinstance(n, Extern)]
    assert len({k.name.removesuffix("_fallback") for k in e.kernels}) <= 4  # two products; padded operands


def test_without_tensor_cores_halves_are_left_to_the_library():
    t4 = parse_target("sm_75")
    assert static_tiling(product(64, 64, 64)[0], lambda: Epilogue(0), t4) is None
    assert static_tiling(product(64, 64, 64, dtype=FLOAT)[0], lambda: Epilogue(0), t4) is not None


def test_a_long_epilogue_is_shared_by_many_programs():
    """16 blocks of 128 x 256 took 38 us on an H200 for what the product alone takes 3."""
    draw = random.Random(5)
    for _ in range(12):
        m, n, k = (2 ** draw.randint(7, 10), 2 ** draw.randint(7, 10), draw.choice((8, 24, 64, 128)))
        t, p = product(m, n, k, dtype=BF16)[0], problem(product(m, n, k, dtype=BF16)[0])
        short, long = (static_tiling(t, lambda e=e: Epilogue(e), H200) for e in (0, 12))
        assert short is not None and long is not None
        assert p.tiles(long) >= p.tiles(short) and p.tiles(long) >= min(H200.units, m * n // (32 * 32)), (m, n, k)


def test_what_an_epilogue_moves():
    """Kernels of our own where something is fused behind the product, a call where nothing can be."""

    def kernels(fn: Any, *args: Any) -> tuple[int, int]:
        e = explain(fn, *(torch.ones(*a).bfloat16() for a in args), target="sm_90")
        calls = [n for n in e.scheduled.nodes if isinstance(n, Extern)]
        return sum("mm" in k.name for k in e.kernels), len(calls)

    a, b, c = (256, 128), (128, 512), (256, 512)
    assert kernels(lambda a, b, c: (a @ b + c).relu(), a, b, c) == (1, 0)
    assert kernels(lambda a, b: (a @ b).float().softmax(-1), a, b) == (0, 1)  # the cast belongs to the softmax
    extremes = lambda a, b, c: ((a @ b - c).abs().sqrt().amax(1), (a @ b * c).amin(0))  # noqa: E731
    assert kernels(extremes, a, b, c)[1] == 1  # rows' and columns' kernels can do that
    gates = lambda a, b: torch.stack([x.sigmoid() * y for x, y in [(a @ b).chunk(2, 1)]])  # noqa: E731
    assert kernels(gates, a, b) == (0, 1)  # two elements per point
    both = lambda a, b, c, d: a @ b + c @ d  # noqa: E731
    assert kernels(both, a, b, (256, 64), (64, 512)) == (1, 1)  # the first waits for the second


# -- variants ---------------------------------------------------------------------------------------
def variants_of(t: Template, buffers: dict[str, Buffer], tiling: Tiling) -> tuple[Variant, ...]:
    t = replace(t, tiling=tiling)
    variants = template_variants("k0_mm", t, buffers, H200)
    node = Variants("k0_mm", ("out",), variants)
    verify(Program(("x", "y"), buffers, (node,), (full_view(buffers["out"]),)))
    return variants


def facts(v: Variant) -> list[str]:
    return [f"{a.kind} {a.what} {a.value}" for a in v.predicate]


def test_the_fast_variant_has_a_predicate_and_the_fallback_has_none():
    t, buffers = product(64, 64, 256)
    variants = variants_of(t, buffers, Tiling("tiled", 32, 32, 64, 4, 3))
    assert [facts(v) for v in variants] == [["aligned x 16", "aligned y 16"], []]
    fast, fallback = (v.kernel for v in variants)
    assert (fast.config.reduction, fast.config.index, fast.config.num_warps) == ("matmul", "int32", 4)
    assert fallback.config.index == "int64" and not fallback.workspace
    assert fallback.parts[0].tiling == Tiling("tiled", 32, 32, 64, 4, 3)


def test_without_assumptions_there_is_one_variant():
    t, buffers = product(64, 64, 256)
    buffers = {n: replace(b, kind="temp") for n, b in buffers.items()}
    assert len(template_variants("k0", replace(t, tiling=Tiling("tiled", 32, 32, 64)), buffers, H200)) == 1


def test_split_has_room_for_all_parts():
    t, buffers = product(48, 40, 4096)
    split = Tiling("split", 32, 16, 64, 4, 3, splits=8, reducers=8)
    fast, fallback = variants_of(t, buffers, split)
    (parts,) = fast.kernel.workspace  # zero between calls: they are their own flags
    assert (parts.name, parts.kind, parts.dtype) == ("k0_mm_parts", "zeros", torch.int32)
    assert parts.shape == (6 * 8 * 32 * 16,)
    assert fallback.kernel.parts[0].tiling.kind == "tiled" and not fallback.kernel.workspace
    batched, others = product(48, 40, 4096, b=sym("s0", 3))
    fast, _ = variants_of(batched, others, split)
    assert fast.kernel.workspace[0].shape[0].evaluate({"s0": 5}) == 30 * 8 * 32 * 16


def test_persistent_has_room_for_descriptors():
    t, buffers = product(4096, 4096, 4096)
    fast, _ = variants_of(t, buffers, Tiling("persistent", 128, 128, 64, 8, 3))
    (scratch,) = fast.kernel.workspace
    assert (scratch.name, scratch.kind, scratch.dtype) == ("k0_mm_scratch", "scratch", torch.uint8)
    assert scratch.shape == (132 * TMA_SCRATCH,)


def test_symbolic_strides_must_be_multiples_of_16():
    s0, s1 = sym("s0", 64), sym("s1", 4096)
    fast, _ = variants_of(*product(s0, 64, s1), Tiling("tiled", 32, 32, 64))
    assert "divisible s1 16" in facts(fast) and "divisible s0 16" not in facts(fast)
    assert dict(fast.kernel.config.extras)["divisible"] == ("s1",)
    assert [f for f in facts(fast) if f.startswith("at_most")]
    fast, _ = variants_of(*product(s0, 64, sym("s1", 4095)), Tiling("tiled", 32, 32, 64))
    assert not [f for f in facts(fast) if f.startswith("divisible")]
    fast, _ = variants_of(*product(s0, 64, 32, b=8), Tiling("tiled", 32, 32, 64))  # a batch is s0*32 apart: enough
    assert not [f for f in facts(fast) if f.startswith("divisible")]


def test_huge_operands_take_64_bit_indices():
    t, buffers = product(1 << 16, 64, 1 << 16)
    fast, _ = variants_of(t, buffers, Tiling("tiled", 128, 64, 64, 4, 3))
    assert fast.kernel.config.index == "int64"
    (only,) = variants_of(t, buffers, Tiling("persistent", 128, 64, 64, 4, 3))
    assert only.kernel.parts[0].tiling.kind == "tiled" and only.kernel.config.index == "int64"
