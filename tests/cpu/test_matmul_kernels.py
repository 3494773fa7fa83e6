"""Generated matrix products: compiled to what each GPU is good at. (Their values: test_triton_interpreter.)"""

import importlib.util
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from matmul_cases import BF16, F16, F32, F64, MatmulCase, bias_1d, bias_2d_gelu, every_other, padded, rand, relu
from triton_cases import compile_all

import reflib
from reflib.errors import GenerateError, ToolchainError
from reflib.generate.compile_triton import Binary, compile_kernel, resources
from reflib.generate.kernel import Kernel
from reflib.generate.matmul_split import HOLE
from reflib.ir.program import Config, KernelNode, Tiling
from reflib.target import parse_target

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


# -- what the code becomes --------------------------------------------------------------------------
def full(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
    return torch.empty(1, dtype=dtype).expand(shape).new_empty(shape)


def large(tiling: Tiling, dtype: torch.dtype = F16, turned: bool = False, m: int = 4096, k: int = 4096) -> MatmulCase:
    """m x m from a depth of k (b's columns contiguous when ``turned``), then relu."""
    b = full(m, k, dtype=dtype).t() if turned else full(k, m, dtype=dtype)
    return MatmulCase(full(m, k, dtype=dtype), b, tiling, dtype, epilogue=relu, precision="tf32", units=132)


def built(case: MatmulCase, arch: str = "sm_90") -> tuple[Kernel, Binary]:
    kernel = case.kernel("product", arch)
    return kernel, compile_kernel(kernel, parse_target(arch))


def count(binary: Binary, *instructions: str) -> list[int]:
    return [len(re.findall(i, binary.ptx)) for i in instructions]


def widths(binary: Binary) -> set[str]:
    """How ordinary loads and stores of more than a counter go to memory."""
    return set(re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v\d)?\.b\d+", binary.ptx))


TILED = Tiling("tiled", 128, 128, 64, 8, 3)
TMA = Tiling("persistent", 128, 256, 64, 8, 3)
WARPS = Tiling("split", 32, 32, 256, 4, 4, splits=32, warps_k=4, reducers=16)


@pytest.mark.parametrize(
    "arch, product", [("sm_80", "mma.sync"), ("sm_90", "wgmma.mma_async"), ("sm_100", "tcgen05.mma")]
)
@pytest.mark.parametrize("turned", [False, True])
def test_tiled_is_pipelined_onto_the_tensor_cores(arch: str, product: str, turned: bool) -> None:
    kernel, binary = built(large(TILED, turned=turned), arch)
    wide = r"cp\.async\.cg\.shared\.global \[[^;]*, 0x10"
    multiplies, copies, narrow = count(binary, product, wide, r"cp\.async\.ca")
    assert multiplies >= 4 and copies >= 16 and not narrow, "copies of 16 bytes"
    assert binary.shared >= 2 * (128 + 128) * 64 * 2 and binary.shared <= parse_target(arch).shared
    assert all("v4" in w for w in widths(binary)) and kernel.grid == 32 * 32


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("turned", [False, True])
def test_persistent_reads_through_tma(arch: str, turned: bool) -> None:
    kernel, binary = built(large(TMA, turned=turned), arch)
    bulk, copies = count(binary, r"cp\.async\.bulk\.tensor\.2d\.shared", r"cp\.async\.c[ga]")
    assert bulk >= 4 and copies == 0
    assert kernel.scratch == binary.scratch == 256 and kernel.grid == 132
    assert 3 * (128 + 256) * 64 * 2 <= binary.shared <= parse_target(arch).shared
    assert resources(binary)["stack"] == 0


@pytest.mark.parametrize("m, k, n", [(64, 32, 32), (32, 32, 64), (64, 25, 64), (64, 64, 32)])
def test_products_without_tensor_cores_spill_nothing(m: int, k: int, n: int) -> None:
    """A depth of 32 in one step: there is no loop to keep, and ptxas spilled up to 4 KB per thread."""
    a, b, c = full(320, m, k, dtype=F32), full(320, k, n, dtype=F32), full(320, m, n, dtype=F32)
    (kernel,) = reflib.explain(lambda a, b, c: a @ b + c, a, b, c, target="sm_90").kernels
    assert resources(compile_kernel(kernel, parse_target("sm_90")))["stack"] == 0


@pytest.mark.parametrize("contiguous", [False, True])
def test_columns_are_the_rows_of_wgmma(contiguous: bool) -> None:
    """16 rows are too few for it. ``contiguous``: b's columns are."""
    a, b = full(16, 4096), full(4096, 4096).t() if contiguous else full(4096, 4096)
    few = MatmulCase(a, b, Tiling("tiled", 16, 64, 128, 4, 4), epilogue=relu)
    assert count(built(few)[1], "wgmma.mma_async") == [0]
    case = MatmulCase(a, b, Tiling("tiled", 16, 64, 128, 4, 4, turned=True), epilogue=relu)
    kernel, binary = built(case)
    assert count(binary, "wgmma.mma_async", r"mma\.sync") == [8, 0] and resources(binary)["stack"] == 0
    assert "acc = tl.dot(b.T, a.T, acc)" in kernel.source and "turned" in str(case.tiling)
    assert binary.shared <= 4 * (16 + 64) * 128 * 2


@pytest.mark.parametrize("tiling", [TILED, TMA])
def test_may_be_launched_before_the_kernel_before_has_ended(tiling: Tiling) -> None:
    kernel, binary = built(large(tiling))
    assert kernel.pdl and binary.pdl and count(binary, r"griddepcontrol\.wait") == [1]
    early = kernel.source.index("gdc_wait()  #")
    assert early < min(kernel.source.index(text) for text in ("tl.load(", "_blocks = ") if text in kernel.source)
    older, old = built(large(TILED), "sm_80")
    assert not older.pdl and not old.pdl and "gdc_wait" not in older.source


def test_warps_share_the_depth() -> None:
    kernel, binary = built(large(WARPS, m=32, k=16384))
    multiplies, atomics, polls = count(binary, r"mma\.sync", "atom", r"ld\.relaxed\.gpu")
    assert multiplies >= 16 and atomics == 0 and polls > 0 and kernel.grid == 32 + 16
    assert [b for b, _ in kernel.buffers] == ["a", "b", "product_parts", "out"]
    assert kernel.pdl and binary.pdl and count(binary, r"griddepcontrol\.wait") == [1]


def test_one_step_needs_no_loop() -> None:
    kernel, binary = built(large(replace(WARPS, splits=64), m=32, k=16384))
    assert "for k0" not in kernel.source and count(binary, r"cp\.async") == [0]
    assert all("v4" in w for w in widths(binary) if w.startswith("ld"))


def test_tf32_and_full_precision() -> None:
    tiling = Tiling("tiled", 64, 64, 32, 4, 3)
    fast = large(tiling, F32, turned=True)
    assert count(built(fast)[1], "wgmma.*tf32")[0] >= 4
    full_precision = replace(fast, precision="ieee")
    kernel, binary = built(full_precision)
    assert 'input_precision="ieee"' in kernel.source and count(binary, "mma", r"fma\.rn\.f32")[0] == 0


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_small_products_compile_everywhere(arch: str) -> None:
    split = replace(WARPS, k=64, splits=4)
    kinds = [Tiling("tiled", 32, 64, 32, 4, 3), split] if arch.startswith("sm") else [Tiling("tiled", 32, 64, 32, 4, 2)]
    kernels = [
        replace(MatmulCase(padded(100, 72), rand(72, 40), t, epilogue=bias_1d, extra={"bias": rand(40)})).kernel(
            f"product{i}", arch
        )
        for i, t in enumerate(kinds)
    ]
    target = parse_target(arch)
    for b in compile_all(kernels, target).values():
        assert b.shared <= target.shared and b.scratch == 0


def test_ragged_sizes_are_still_read_16_bytes_at_a_time() -> None:
    """Rows of 1000 (a multiple of 8) in blocks of 128, depth 1000 in blocks of 64."""
    case = MatmulCase(full(1000, 1000), full(1000, 1000), TILED, epilogue=bias_1d, extra={"bias": full(1000)})
    kernel, binary = built(case)
    assert "mask=(m[:, None] < 1000) & (k[None, :] < 1000 - k0)" in kernel.source
    assert count(binary, r"cp\.async\.ca") == [0] and count(binary, r"cp\.async\.cg")[0] >= 16


def test_dynamic_sizes_that_are_multiples_of_16_are_read_16_bytes_at_a_time() -> None:
    case = MatmulCase(full(1024, 512), full(512, 768), TILED, dynamic=True, units=132)
    assert count(built(case)[1], r"cp\.async\.ca", "wgmma.mma_async") == [0, 4]
    unknown = replace(case, divisible=False, tensors={}, sizes={})
    assert count(built(unknown)[1], r"cp\.async\.cg") == [0], "2 bytes are too few for an asynchronous copy"


# -- text -------------------------------------------------------------------------------------------
def test_masks_only_where_needed() -> None:
    assert "mask=" not in large(TILED).kernel("product").source
    source = MatmulCase(full(128, 65), full(65, 100), Tiling("tiled", 64, 64, 32)).kernel("product").source
    assert "mask=k[None, :] < 65 - k0" in source and "(n[None, :] < 100)" in source and "m[:, None] <" not in source


def split_source(tiling: Tiling, **more: Any) -> str:
    return replace(large(tiling, m=64, k=16384), **more).kernel("product").source


def test_reducers_take_rows_or_parts_of_a_row() -> None:
    tiling = replace(WARPS, m=64, n=32, splits=50)
    assert "YBLOCK: tl.constexpr = 4, XBLOCK: tl.constexpr = 32" in split_source(tiling)
    source = split_source(replace(tiling, reducers=256))
    assert "YBLOCK: tl.constexpr = 1, XBLOCK: tl.constexpr = 8" in source and "piece // 4" in source


def test_parts_are_added_at_once_or_in_groups() -> None:
    few = split_source(replace(WARPS, splits=6, reducers=1))
    assert "s = tl.arange(0, 8)[:, None, None]" in few
    many = split_source(replace(WARPS, splits=50, reducers=1))
    assert "for first in tl.range(0, SPLITS, 8):" in many and "s = first + tl.arange(0, 8)" in many


def test_no_sum_is_a_hole() -> None:
    """It is a signalling NaN, which no arithmetic gives."""
    exponent, quiet = (HOLE >> 23) & 0xFF, (HOLE >> 22) & 1
    assert exponent == 0xFF and not quiet and HOLE & 0x7FFFFF


# -- errors -----------------------------------------------------------------------------------------
def refuse(case: MatmulCase, text: str, target: str = "sm_90") -> None:
    with pytest.raises(GenerateError, match=text):
        case.kernel("product", target)


@pytest.mark.slow
def test_tilings_that_cannot_be() -> None:
    refuse(large(replace(TILED, m=96)), "m is 96; it must be a power of two")
    refuse(large(replace(TILED, k=8)), "at least 16")
    refuse(large(replace(WARPS, k=32)), "at least 16")
    refuse(large(replace(TILED, splits=2)), "cannot split k")
    refuse(large(replace(WARPS, splits=1)), "nothing split")
    refuse(large(replace(WARPS, reducers=0)), "0 reducers for a tile")
    refuse(large(replace(TILED, reducers=2)), "cannot split k")
    refuse(large(replace(WARPS, reducers=3)), "reducers is 3; it must be a power of two")
    refuse(large(replace(WARPS, reducers=4096)), "4096 reducers for a tile of 32 x 32")
    refuse(large(WARPS), "16 reducers for a tile of 32 x 32 on gfx942", "gfx942")
    refuse(large(replace(TMA, turned=True)), "can be turned")
    refuse(large(replace(WARPS, turned=True)), "can be turned")
    refuse(large(replace(TILED, kind="magic")), "unknown kind of tiling 'magic'")
    refuse(large(TILED, F64), "no Triton kernel for a product of torch.float64")


def test_operands_tma_cannot_read() -> None:
    refuse(large(TMA), "needs TMA", "sm_80")
    refuse(replace(large(TMA), wide=True), "address may not be a multiple of 16")
    refuse(MatmulCase(every_other(64, 64), rand(64, 64), TMA), "neither its rows nor its columns")
    refuse(MatmulCase(rand(64, 65), rand(65, 64), TMA), "not a multiple of 16 bytes")
    refuse(MatmulCase(rand(2, 64, 64), rand(2, 64, 64), TMA), "for one product")


@pytest.mark.slow
def test_loops_are_kept() -> None:
    """ptxas would make 50 kB of this one, and take 4 s."""
    tiling = Tiling("tiled", 64, 256, 32, num_warps=4, num_stages=7)
    kernel, kept = built(large(tiling, m=1024, k=1024))
    unrolled = compile_kernel(replace(kernel, keep_loops=False), parse_target("sm_90"))
    assert '.pragma "nounroll";\n{' in kept.ptx and "nounroll" not in unrolled.ptx
    assert len(kept.image) < 0.7 * len(unrolled.image)


def test_a_split_needs_its_workspace() -> None:
    case = large(WARPS, m=32, k=16384)
    case.node = lambda name: KernelNode(name, (case.template,), Config("matmul"))  # type: ignore[method-assign]
    refuse(case, "needs a workspace of 32768 int32 of kind zeros")


def test_more_scratch_than_planned() -> None:
    kernel = replace(large(TMA).kernel("product"), scratch=128)
    with pytest.raises(ToolchainError, match="planned with 128 bytes of scratch memory per program; Triton needs 256"):
        compile_kernel(kernel, parse_target("sm_90"))


def test_epilogues_in_half_precision_take_the_cheap_forms() -> None:
    def source(dtype: torch.dtype) -> str:
        extra = {"residual": full(64, 64, dtype=dtype)}
        a, b = full(64, 64, dtype=dtype), full(64, 64, dtype=dtype)
        return MatmulCase(a, b, TILED, dtype, epilogue=bias_2d_gelu, extra=extra).kernel("product").source

    assert "normal_cdf_half(" in source(BF16) and "libdevice.erf(" in source(F32)
