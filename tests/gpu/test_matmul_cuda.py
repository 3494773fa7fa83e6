"""Generated matrix products on a GPU: every case, large ones beside eager, misaligned, repeated, on two streams."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from matmul_cases import BF16, F16, F32, MatmulCase, bias_1d, bias_2d_gelu, matmul_cases, problem, relu, storage
from prologue_cases import prologue_cases
from triton_cases import compile_all

from reflib.generate.compile_triton import Binary, compile_kernel
from reflib.generate.kernel import Kernel
from reflib.ir.program import Tiling
from reflib.target import device_target
from reflib.wrap.cuda_launch import load

Tensors = dict[str, torch.Tensor]


def arch() -> str:
    return device_target("cuda").arch


def tma() -> bool:
    return device_target("cuda").capability >= 90


def to_gpu(tensors: Tensors, shift: int = 0) -> Tensors:
    """Copies on the GPU, strides kept; ``shift`` elements from a place that is a multiple of 512 bytes."""
    out = {}
    for n, t in tensors.items():
        flat = storage(t)
        room = torch.empty(flat.numel() + shift, dtype=t.dtype, device="cuda")
        room[shift:] = flat.cuda()
        out[n] = room.as_strided(t.shape, t.stride(), shift)
    return out


def launcher(case: MatmulCase, kernel: Kernel, binary: Binary, tensors: Tensors) -> Callable[[], None]:
    """Launches on the current stream."""
    grid, launch = int(kernel.grid.evaluate(case.sizes)), load(binary)
    args = [tensors[b].data_ptr() for b, _ in kernel.buffers] + [case.sizes[s.name] for s in kernel.symbols]
    if kernel.scratch:
        tensors["scratch"] = torch.empty(grid * kernel.scratch, dtype=torch.uint8, device="cuda")
        args.append(tensors["scratch"].data_ptr())
    return lambda: launch(torch.cuda.current_stream().cuda_stream, grid, *args)


def execute(case: MatmulCase, shift: int = 0) -> Tensors:
    kernel = case.kernel("product", arch())
    tensors = to_gpu(case.tensors, shift)
    launcher(case, kernel, compile_kernel(kernel, device_target("cuda")), tensors)()
    torch.cuda.synchronize()
    return tensors


# -- the cases that the interpreter runs ------------------------------------------------------------
def every_case() -> dict[str, Callable[[], MatmulCase]]:
    return matmul_cases() | prologue_cases()


@functools.cache
def built() -> dict[str, tuple[MatmulCase, Kernel, Binary]]:
    cases = {n: make() for n, make in every_case().items() if tma() or not n.endswith("persistent")}
    kernels = {n: c.kernel(f"product{i}", arch()) for i, (n, c) in enumerate(cases.items())}
    binaries = compile_all([k for k in kernels.values() if k.grid != 0], device_target("cuda"))
    return {n: (cases[n], k, binaries[k.name]) for n, k in kernels.items() if k.grid != 0}


@pytest.mark.parametrize("name", every_case())
def test_case(name: str) -> None:
    if name not in built():
        pytest.skip("nothing to launch, or no TMA here")
    case, kernel, binary = built()[name]
    tensors = to_gpu(case.tensors)
    launcher(case, kernel, binary, tensors)()
    torch.cuda.synchronize()
    assert not problem(case, {n: t.cpu() for n, t in tensors.items()})


# -- large ones, beside eager -----------------------------------------------------------------------
LARGE = {
    "tiled": (1000, 1096, 520, Tiling("tiled", 128, 128, 64, 8, 3)),
    "tiled, 4 warps": (2048, 2048, 1024, Tiling("tiled", 128, 64, 32, 4, 4)),
    "turned": (16, 4096, 4096, Tiling("tiled", 16, 64, 128, 4, 4, turned=True)),
    "turned, two rows of tiles": (50, 1000, 2056, Tiling("tiled", 32, 128, 64, 4, 4, turned=True)),
    "persistent": (2048, 2304, 1032, Tiling("persistent", 128, 256, 64, 8, 3)),
    "persistent, small tiles": (2000, 2056, 264, Tiling("persistent", 64, 128, 64, 4, 4)),
    "split": (64, 64, 32768, Tiling("split", 64, 32, 128, 4, 5, splits=64, reducers=32)),
    "split, warps": (48, 48, 20480, Tiling("split", 16, 16, 256, 4, 3, splits=16, warps_k=4, reducers=16)),
    "split, ragged": (50, 72, 5000, Tiling("split", 32, 32, 128, 4, 3, splits=12, warps_k=2, reducers=8)),
    "split, many waves": (500, 500, 4096, Tiling("split", 64, 64, 64, 4, 3, splits=16, reducers=64)),
}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def large(name: str, dtype: torch.dtype, turned: bool = False, precision: str = "ieee") -> MatmulCase:
    m, n, k, tiling = LARGE[name]
    if dtype == F32:  # twice the bytes
        tiling = replace(tiling, k=max(16 * tiling.warps_k, tiling.k // 2))
        tiling = replace(tiling, num_stages=2) if tiling.kind == "persistent" else tiling
    a = normal(m, k, dtype=dtype)
    b = normal(n, k, dtype=dtype, seed=1).t() if turned else normal(k, n, dtype=dtype, seed=1)
    units = device_target("cuda").units
    bias = {"bias": normal(n, dtype=dtype)}
    return MatmulCase(a, b, tiling, dtype, epilogue=bias_1d, extra=bias, precision=precision, units=units)


def worst(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("name", LARGE)
def test_as_exact_as_eager(name: str, dtype: torch.dtype, turned: bool) -> None:
    if name.startswith("persistent") and not tma():
        pytest.skip("no TMA here")
    if dtype == BF16 and device_target("cuda").capability < 80:
        pytest.skip("no bfloat16 here")
    if name.startswith("persistent") and dtype == F32:
        pytest.skip("in tf32 only")
    case = large(name, dtype, turned)
    got = execute(case)["out"]
    a, b, bias = (t.cuda() for t in (case.a, case.b, case.extra["bias"]))
    exact = a.double() @ b.double() + bias.double()
    floor = 3e-6 if dtype == F32 else 1e-6  # float32: one sum from first to last, where the library has several
    assert worst(got, exact) <= 2 * worst(torch.addmm(bias, a, b), exact) + floor


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_tf32_is_as_exact_as_tf32(name: str, turned: bool) -> None:
    if name.startswith("persistent") and not tma():
        pytest.skip("no TMA here")
    case = large(name, F32, turned, precision="tf32")
    a, b, bias = (t.cuda() for t in (case.a, case.b, case.extra["bias"]))
    exact = a.double() @ b.double() + bias.double()
    error = worst(execute(case)["out"], exact)
    assert error < 2e-3
    assert error > 1e-5 or device_target("cuda").capability < 80, "tf32 was asked for"


# -- the fallback -----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["tiled", "split", "split, warps"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_misaligned_operands(kind: str, dynamic: bool) -> None:
    """Every pointer is 2 bytes behind a multiple of 16; the kernel was told nothing of alignment."""
    m, n, k, tiling = LARGE[kind]
    a, b = normal(m, k, dtype=F16), normal(k, n, dtype=F16, seed=1)
    case = MatmulCase(a, b, tiling, F16, epilogue=relu, wide=True, dynamic=dynamic, divisible=False)
    kernel = case.kernel("product", arch())
    space = {n for n in case.tensors if n.startswith("product_")}  # workspace is always aligned
    assert all(kernel.buffers[i][0] in space for i in kernel.aligned)
    tensors = to_gpu({n: t for n, t in case.tensors.items() if n not in space}, shift=1)
    tensors |= to_gpu({n: case.tensors[n] for n in space})
    assert tensors["a"].data_ptr() % 16 == 2
    launcher(case, kernel, compile_kernel(kernel, device_target("cuda")), tensors)()
    exact = (a.cuda().double() @ b.cuda().double()).relu()
    assert worst(tensors["out"], exact) <= 2 * worst((a.cuda() @ b.cuda()).relu(), exact) + 1e-6


# -- split-K ----------------------------------------------------------------------------------------
SPLIT = [n for n in LARGE if n.startswith("split")]


@pytest.mark.parametrize("name", SPLIT)
def test_split_repeats_bit_for_bit(name: str) -> None:
    case = large(name, F16)
    kernel = case.kernel("product", arch())
    tensors = to_gpu(case.tensors)
    launch = launcher(case, kernel, compile_kernel(kernel, device_target("cuda")), tensors)
    launch()
    first = tensors["out"].clone()
    for _ in range(200):
        tensors["out"].zero_()
        launch()
        assert torch.equal(tensors["out"], first)
    assert not any(tensors[n].any() for n in case.zeros)


def test_epilogues_on_large_tiles() -> None:
    tiling = Tiling("tiled", 128, 256, 64, 8, 3)
    a, b, r = normal(512, 512, dtype=BF16), normal(512, 512, dtype=BF16, seed=1) / 16, normal(512, 512, dtype=BF16)
    case = MatmulCase(a, b.to(BF16), tiling, BF16, epilogue=bias_2d_gelu, extra={"residual": r})
    got = execute(case)["out"]
    exact = torch.nn.functional.gelu(a.cuda().double() @ case.b.cuda().double() + r.cuda().double())
    assert worst(got, exact) <= 2**-8
