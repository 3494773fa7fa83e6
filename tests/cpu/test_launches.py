"""Launches of memory-bound kernels, seen with ``target="sm_90"``: sizes drawn at random with a fixed seed."""

import importlib.util
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import reflib
from reflib.ir.program import Config, kernel_variants
from reflib.observe.explain import Explanation
from reflib.schedule import uneven

HALF = torch.bfloat16


def half(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=HALF, requires_grad=grad)


def explained(fn: Callable[..., Any], *args: Any) -> Explanation:
    torch._dynamo.reset()
    return reflib.explain(fn, *args, target="sm_90")


def launches(e: Explanation) -> list[tuple[Config, str]]:
    """(Config, source) of each kernel of the first graph, fast variants alone."""
    sources = {k.name: k.source for k in e.kernels}
    fast = [v.variants[0].kernel for v in kernel_variants(e.scheduled.nodes)]
    return [(k.config, sources[k.name]) for k in fast]


@pytest.mark.parametrize("seed", range(4))
def test_a_short_row_that_is_not_aligned_stays_in_one_warp(seed: int) -> None:
    columns = random.Random(seed).randrange(65, 500) | 1
    ((config, _),) = launches(explained(lambda x: x.softmax(-1), half(20000, columns)))
    assert config.reduction == "persistent" and config.num_warps == 1 and 512 <= config.xblock * config.rblock <= 2048


@pytest.mark.parametrize("seed", range(4))
def test_aligned_rows_fill_their_warps(seed: int) -> None:
    rng = random.Random(seed)
    columns = 8 * rng.randrange(17, 1000)
    ((config, _),) = launches(explained(lambda x: F.rms_norm(x, (columns,)), half(8000000 // columns, columns)))
    per_thread = config.xblock * columns / (32 * config.num_warps)
    assert config.reduction == "persistent" and 8 <= per_thread <= 64


@pytest.mark.parametrize("seed", range(3))
def test_parts_that_end_where_pieces_do_are_read_in_pieces(seed: int) -> None:
    """Their conditions hold for all of a piece or none: 16 bytes per load, where each element had one of its own."""
    a, b, c = (8 * random.Random(f"{seed} {n}").randrange(3, 100) for n in range(3))
    fn = lambda x, y, z: torch.cat([x.relu(), y * 2, z + 1], -1)  # noqa: E731
    ((config, source),) = launches(explained(fn, half(9000, a), half(9000, b), half(9000, c)))
    assert "max_contiguous" not in source and config.xblock >= 8 * 32 * config.num_warps
    ((_, source),) = launches(explained(fn, half(9000, a), half(9000, b - 4), half(9000, c)))
    assert "max_contiguous" in source


def test_neighbours_of_a_stride_are_not_given_to_one_thread() -> None:
    strided, dense = (
        launches(explained(lambda x, s=s: F.max_pool2d(x, 2, s), half(8, 32, 64, 64)))[0][0] for s in (2, 1)
    )
    assert strided.xblock == 2 * 32 * strided.num_warps < dense.xblock


@pytest.mark.parametrize("seed", range(3))
def test_every_second_element_is_read_as_l1_can_look_lines_up(seed: int) -> None:
    """4 neighbours per thread of half precision: 8 would be 8 lines per request, most of them twice."""
    rng = random.Random(seed)
    rows, columns = rng.randrange(3000, 6000), rng.randrange(1500, 4000)
    x = half(rows, 2 * columns)
    ((config, _),) = launches(explained(lambda x: x[:, ::2] * x[:, 1::2].sigmoid(), x))
    assert config.xblock == 4 * 32 * config.num_warps
    ((whole, _),) = launches(explained(lambda x: x * x.sigmoid(), x))
    assert whole.xblock >= 2 * config.xblock


@pytest.mark.parametrize("seed", range(3))
def test_rows_quantized_by_one_number_have_16_elements_per_thread(seed: int) -> None:
    columns = 8 * random.Random(seed).randrange(513, 1024)

    def quantized(x: torch.Tensor) -> torch.Tensor:
        return torch.round(x / x.abs().amax(-1, keepdim=True).float()).to(torch.int8)

    ((config, _),) = launches(explained(quantized, half(4000, columns)))
    assert config.reduction == "persistent" and config.rblock == 16 * 32 * config.num_warps


def test_rows_that_memory_runs_across_come_several_to_a_program() -> None:
    def norm_over_channels(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.permute(0, 2, 1) * 2, (384,))

    ((config, source),) = launches(explained(norm_over_channels, half(4, 384, 3000)))
    assert config.xblock >= 8 and "% 3000" in source  # neighbours in memory are neighbouring rows


def test_rows_whose_sums_read_nothing_are_transposed_in_squares() -> None:
    """The gradient of a cross entropy of a matrix's columns: what is summed is made of positions."""

    def gradient(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        i = torch.arange(3598, device=x.device)
        g = (i[:, None] == i) * scale
        return g - x.t().exp() * g.sum(1, keepdim=True)

    ((config, _),) = launches(explained(gradient, torch.randn(3598, 3598), torch.randn(())))
    assert config.xblock >= 16 and config.rblock >= 16 and config.num_warps == 16


@pytest.mark.parametrize("seed", range(3))
def test_pairs_fill_the_chip(seed: int) -> None:
    """The nearest of many points: what is read is in the cache, and there is work for every multiprocessor."""
    r = random.Random(seed)
    n, m = r.randrange(3000, 6000), r.randrange(2000, 4000)
    x, y = torch.randn(n, 3), torch.randn(m, 3)
    for config, source in launches(explained(lambda x, y: (x[:, None] - y).abs().sum(-1).argmin(1), x, y)):
        assert n // config.xblock >= 4 * 132 and "argmin_next" in source


@pytest.mark.parametrize("seed", range(3))
def test_overlaps_in_a_batch_fill_the_chip(seed: int) -> None:
    """Each image's pairs: neighbouring results read the same list, from the cache."""
    r = random.Random(seed)
    a = torch.rand(8, r.randrange(900, 1500), 2)
    fn = lambda a: (torch.minimum(a[:, :, None], a[:, None]) * 2).prod(-1).amax(1)  # noqa: E731
    (config, _) = launches(explained(fn, a))[-1]
    assert config.xblock <= 16 and a.shape[0] * a.shape[1] // config.xblock >= 4 * 132


@pytest.mark.parametrize("seed", range(3))
def test_scans_of_exponentials_are_programs_of_one_warp(seed: int) -> None:
    r = random.Random(seed)
    rows, length = r.randrange(5000, 9000), r.randrange(2000, 9000)
    ((config, source),) = launches(explained(lambda x: x.logcumsumexp(-1), torch.empty(rows, length)))
    assert config.num_warps == 1 and config.rblock in (512, 1024) and source.count("libdevice.log(") == 1
    ((few, _),) = launches(explained(lambda x: x.logcumsumexp(-1), torch.empty(40, length)))
    assert few.num_warps > 1


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_of_everything_is_cut_into_contiguous_pieces(seed: int) -> None:
    rng = random.Random(seed)
    for m, n in ((rng.randrange(700, 1500), 8 * rng.randrange(100, 300)), (rng.randrange(133, 400), 8192)):
        (first, source), _ = launches(explained(lambda x, y: F.mse_loss(x.sigmoid(), y), half(m, n), half(m, n)))
        assert first.rblock > first.xblock == 1
        assert re.search(r"_ptr \+ \(r \+ \d+\*x\)", source)
    assert f"over {4 * m} x" in source or f"over {4 * m}," in source  # rows are too few: each is four pieces


def test_few_columns_are_added_up_by_many_programs() -> None:
    kernels = launches(explained(lambda x: x.sum(0), half(200000, 24)))
    assert kernels[-1][0].xblock == 1 and kernels[-1][0].rblock >= 256


def test_no_more_threads_than_a_block_may_have() -> None:
    e = reflib.explain(lambda x: x.sum(-1), half(2000, 40000), target="gfx942")
    assert all(64 * k.num_warps <= 1024 for k in e.kernels)


def test_gathers_are_weighed_by_what_they_read() -> None:
    """Of both gathers one sector per element is read whatever the order, so the rows decide."""

    def fn(scores: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
        at = (torch.arange(256)[:, None] - torch.arange(256)[None, :] + 256).clamp(0, 511).expand(24, 256, 256)
        return (scores + far.gather(-1, at) + far.gather(-1, 511 - at).transpose(1, 2)).softmax(-1)

    ((config, _),) = launches(explained(fn, half(24, 256, 256), half(24, 256, 512)))
    assert config.reduction == "persistent" and config.rblock == 256


# -- what is exact ------------------------------------------------------------------------------------
def test_only_what_could_show_is_divided_exactly() -> None:
    """The quotients of a norm's backward are stored in half precision; the comparisons beside them are of other
    values."""
    x = half(500, 300, grad=True)
    backward = explained(lambda x: F.normalize(x, dim=-1), x).graphs[1]
    assert not any("div_rn" in k.source for k in backward.kernels.values())
    ((_, source),) = launches(explained(lambda x, y: (x / y).floor(), torch.rand(500, 300), torch.rand(500, 1)))
    assert "div_rn" in source


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_whole_numbers_of_halves_are_eagers(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x / 3).floor(), (x * 1.1).ceil(), (x / 7).trunc(), (x * 3.3).round()]

    x = torch.randn(300, 100, generator=torch.Generator().manual_seed(0)).mul(20).to(dtype)
    for got, want in zip(reflib.compile(fn)(x), fn(x), strict=True):
        assert torch.equal(got, want)


def test_what_is_filled_waits_for_what_needs_it() -> None:
    """A gradient that is added up atomically is not allocated before it is."""

    def step(w: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((F.embedding(i, w) @ v).sin() @ v).square().sum(-1)

    args = torch.randn(50, 64, requires_grad=True), torch.randint(50, (40,)), torch.randn(64, 64, requires_grad=True)
    program = explained(step, *args).graphs[1].fused.program
    fill = next(i for i, n in enumerate(program.nodes) if not n.reads())
    assert set(program.nodes[fill].writes()) & set(program.nodes[fill + 1].writes())


@pytest.mark.parametrize("seed", range(4))
def test_few_rows_that_were_scanned_are_reduced_where_they_were(seed: int) -> None:
    """In the program that scans a row, however few there are: pieces of it were two more launches."""
    rng = random.Random(seed)
    batch, steps, heads = rng.randrange(1, 5), rng.randrange(256, 1024), rng.randrange(3, 33)

    def decay(a: torch.Tensor) -> torch.Tensor:
        c = F.logsigmoid(a.float()).cumsum(1)
        return (c[:, -1:] - c).exp()

    (kernel,) = launches(explained(decay, half(batch, steps, heads)))
    (of_most,) = launches(explained(lambda a: (a.float().cumsum(1) * 2).amax(1), half(batch, steps, heads)))
    assert "associative_scan" in kernel[1] and "associative_scan" in of_most[1]


@pytest.mark.parametrize("seed", range(4))
def test_halves_of_short_rows_are_no_columns(seed: int) -> None:
    """Rows of fewer elements than a square has: it was compared as if it were full, and half of its threads idle."""
    rng = random.Random(seed)
    rows, length = rng.randrange(4000, 6000), rng.choice((32, 40, 48))

    def latent(x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_var = x.chunk(2, -1)
        kl = 1 + log_var - mean.square() - log_var.exp()
        return mean + (0.5 * log_var).exp() * noise, kl.float().sum(-1)

    ((config, _),) = launches(explained(latent, half(rows, 2 * length), half(rows, length)))
    assert config.reduction == "persistent" and config.rblock < 2 * length


@pytest.mark.parametrize("seed", range(4))
def test_a_large_transpose_has_a_launch_of_its_own(seed: int) -> None:
    """Several parts go over memory in one order; tiles go along both sides."""
    rng = random.Random(seed)
    a, b = (torch.empty(rng.randrange(33, 50), 8 * rng.randrange(8, 30), rng.randrange(128, 200)) for _ in range(2))

    def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.transpose(1, 2).contiguous(), b.transpose(1, 2).contiguous()

    large, small = launches(explained(both, a, b)), launches(explained(both, a[:1, :, :60], b[:1, :, :60]))
    assert [dict(config.extras).get("yblock", 0) > 1 for config, _ in large] == [True, True]
    assert len(small) == 1


TIES = """
@triton.jit
def ties(p, q, X: tl.constexpr, R: tl.constexpr):
    x = tl.program_id(0) * X + tl.arange(0, X)[:, None]
    at = x % 117 + 5733 * (x // 117) + 117 * tl.arange(0, R)[None, :]
    tl.store(q + at, tl.load(p + at))
"""


def test_where_lanes_go_if_triton_sees_no_neighbours(tmp_path: Path) -> None:
    compiler, backends = pytest.importorskip("triton.compiler"), pytest.importorskip("triton.backends.compiler")
    (tmp_path / "ties.py").write_text("import triton\nimport triton.language as tl\n" + TIES)
    spec = importlib.util.spec_from_file_location("ties", tmp_path / "ties.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    types = {"p": "*bf16", "q": "*bf16", "X": "constexpr", "R": "constexpr"}
    source = compiler.ASTSource(module.ties, types, {"X": 64, "R": 64})
    compiled = compiler.compile(source, target=backends.GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    text = compiled.asm["ttgir"]
    outer, inner = map(int, re.search(r"threadsPerWarp = \[(\d+), (\d+)\]", text).groups())  # type: ignore[union-attr]
    assert (outer > inner) == uneven.outer_first()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("first", [False, True])
def test_lanes_go_along_neighbours_that_triton_does_not_see(
    seed: int, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of an image whose channels are of an odd number, reduced over pixels: lanes go along the channels,
    whichever dimension Triton takes."""
    monkeypatch.setattr(uneven, "outer_first", lambda: first)
    rng = random.Random(seed)
    side, windows, channels = rng.randrange(5, 9), rng.randrange(6, 13), rng.randrange(91, 200) | 1
    x = half(8, side * windows, side * windows, channels)

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = torch.roll(x, (-3, -3), (1, 2))
        x = x.view(8, windows, side, windows, side, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, side**2, channels)
        return x + x.mean(1, keepdim=True)

    ((config, source),) = launches(explained(fn, x))
    assert config.reduction == "persistent" and config.xblock >= 16
    x_at = re.search(r"tl.arange\(0, XBLOCK\)(\[.*\])", source)[1]  # type: ignore[index]
    assert x_at == ("[:, None]" if first else "[None, :]")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_stored_across_long_rows_goes_through_tiles(dtype: torch.dtype, seed: int) -> None:
    """A quantized tensor, its transpose and the largest magnitude: not an element per sector, and no call."""
    rng = random.Random(seed)
    rows, columns = rng.randrange(2000, 7000), rng.randrange(2000, 7000)

    def fn(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.gelu(x.float())
        q = (y * scale).clamp(-448, 448).to(dtype)
        return q, y.abs().amax(), q.t().contiguous()

    e = explained(fn, half(rows, columns), torch.ones(()))
    found = launches(e)
    assert len(found) == 3 and "ops.aten" not in e.wrapper and any("neighbours across" in str(r) for r in e.refusals)
    ((tile, source),) = [(c, s) for c, s in found if "clone" in s.splitlines()[-1] or "clone_ptr" in s]
    assert tile.reduction == "none" and "YBLOCK" in source and "for r" not in source
    assert len(launches(explained(lambda x: (x.softmax(-1), x.softmax(-1).t().contiguous()), half(rows, 512)))) == 1


@pytest.mark.parametrize("seed", range(4))
def test_columns_of_rows_that_are_looked_up(seed: int) -> None:
    """Reductions over rows that an index names: read again, or in several passes."""
    rng = random.Random(seed)
    rows, columns = rng.randrange(200, 400), rng.randrange(40_000, 80_000)
    x, i = torch.randn(rows, columns), torch.randint(0, rows, (rows,))
    over = rng.choice([lambda y: y.softmax(0), lambda y: y - y.mean(0), lambda y: (y.var(0), y * 2)])
    for rows_of in (lambda x, i: x[i], lambda x, i: x.gather(0, i[:, None].expand_as(x))):
        assert launches(explained(lambda x, i, rows_of=rows_of: over(rows_of(x, i)), x, i))
