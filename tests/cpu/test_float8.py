"""Casts to and from 8-bit floats are loop nests where the GPU has an instruction for them, and eager's to the bit."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.graph import Graph
from reflib.generate import triton_float8
from reflib.generate.compile_triton import compile_kernel
from reflib.ir.float8 import BEYOND, E4M3, E5M2, LIMITS
from reflib.ir.interpret import interpret
from reflib.ir.program import Extern
from reflib.ir.verify import verify
from reflib.options import Options
from reflib.pipeline import _retarget, run
from reflib.target import parse_target

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
DTYPES = [E4M3, E5M2]


def hostile(rows: int, columns: int) -> torch.Tensor:
    """Numbers of all magnitudes; halves between two numbers; beyond the range, infinity, NaN, zeros."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=g) * torch.randn(rows, 1, generator=g).mul(6).exp2()
    some = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448.0, 464.0, 465.0, 1e9, 57344.0, 61439.0, 61440.0]
    some += [2.0**-6, 2.0**-9, 2.0**-10, 1.0625, 1.1875, 1.125, 1.375, 2.0**-16, 2.0**-17, 1e-30]
    x[0, : len(some)] = torch.tensor(some)
    return x


def rows_scaled(dtype: torch.dtype) -> Callable[..., Any]:
    def fn(x):
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-6) * (1 / torch.finfo(dtype).max)
        return (x.float() / scale).to(dtype), scale

    return fn


def there_and_back(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda x: (x * 2).to(dtype).to(torch.bfloat16) + 1


def transposed(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda x: x.t().to(dtype, memory_format=torch.contiguous_format)


CASES = {
    "cast": lambda d: lambda x: x.to(d),
    "transposed": transposed,
    "rows scaled": rows_scaled,
    "there and back": there_and_back,
    "copied": lambda d: lambda x: (x.to(d).t().contiguous(), x.to(d).clone()),
    "widened": lambda d: lambda x: x.to(d).float() * 3,
    "integers": lambda d: lambda x: (torch.where(x.abs() < 1000, x, 0).to(torch.int32).to(d), (x > 0).to(d)),
}


@pytest.mark.each
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_is_eagers(name: str, given: torch.dtype, dtype: torch.dtype) -> None:
    fn, x = CASES[name](dtype), hostile(3, 40).to(given)
    program = run(Graph(make_fx(lambda a: fn(a))(x)), Options(target="sm_90"), "lower").program
    verify(program)
    assert not any(isinstance(n, Extern) for n in program.nodes)
    want = fn(x)
    program = _retarget(program, parse_target("cpu"))
    for got, w in zip(interpret(program, [x]), want if isinstance(want, tuple) else (want,), strict=True):
        assert got.dtype == w.dtype and got.stride() == w.stride()
        same = got.float().view(torch.int32) == w.float().view(torch.int32)
        assert bool((same | got.float().isnan() & w.float().isnan()).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_kernel_where_there_is_an_instruction(dtype: torch.dtype) -> None:
    x = torch.zeros(64, 512, dtype=torch.bfloat16)
    for arch, calls in (("sm_80", 1), ("sm_89", 1), ("sm_90", 0), ("sm_100", 0), ("gfx942", 1)):
        e = reflib.explain(rows_scaled(dtype), x, target=arch)
        assert len(e.kernels) == 1 and e.wrapper.count("ops.aten._to_copy") == calls, arch
    back = reflib.explain(lambda q, s: q.to(torch.bfloat16) * s, x.to(dtype), torch.ones(64, 1), target="sm_90")
    assert len(back.kernels) == 1 and "ops.aten" not in back.wrapper


def test_of_what_is_out_of_range() -> None:
    """The numbers that decide, from eager."""
    for dtype in DTYPES:
        limit = torch.tensor([LIMITS[dtype]])
        low, high = (torch.nextafter(limit, torch.tensor(x)).to(dtype).view(torch.uint8).item() for x in (0.0, 1e9))
        largest = torch.tensor([torch.finfo(dtype).max]).to(dtype).view(torch.uint8).item()
        assert low == largest and high == BEYOND[dtype]
        assert limit.to(dtype).view(torch.uint8).item() == (largest if dtype == E4M3 else BEYOND[dtype])


@needs_triton
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_instruction(dtype: torch.dtype, arch: str) -> None:
    x = torch.zeros(64, 512, dtype=torch.bfloat16)
    e = reflib.explain(there_and_back(dtype), x, target=arch)
    kernel = e.stages.kernels[e.kernels[0].name]
    name = "e4m3x2" if dtype == E4M3 else "e5m2x2"
    assert re.search(rf"cvt\.rn\.satfinite\.{name}\.f32", compile_kernel(kernel, parse_target(arch)).ptx)


@needs_triton
@pytest.mark.parametrize("columns", [510, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_results_are_not_packed_with_themselves(
    dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is out of range as older PyTorch has it too. Where ``{c, c >> 8}`` of a cast's two results is packed in 32
    bits, for an ``or`` of both, ptxas 12.8 shifts before it casts: every other number is an old one."""
    monkeypatch.setattr(triton_float8, "BEYOND", {E4M3: 127, E5M2: 124})
    x = torch.zeros(64, columns, dtype=torch.bfloat16)
    (kernel,) = reflib.explain(lambda x: x.sigmoid().to(dtype), x, target="sm_90").kernels
    bits = triton_float8._helper(dtype).strip()
    source = kernel.source.replace(triton_float8.HELPERS[triton_float8.CASTS[dtype]].strip(), bits)
    assert bits in source
    ptx = compile_kernel(replace(kernel, source=source), parse_target("sm_90")).ptx
    halves = dict(re.findall(r"shr\.u16\s+(%rs\d+), (%rs\d+), 8", ptx))
    assert halves and "cvt.rn.satfinite" in ptx
    assert not [a for a, b in re.findall(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}", ptx) if halves.get(b) == a]
