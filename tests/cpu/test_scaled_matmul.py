"""Scaled products of 8-bit floats: a choice of ATen's call and a Template with the scales in its epilogue."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.autotune.matmul import problem, template_variants, tilings
from reflib.autotune.subprogram import splice
from reflib.capture.graph import Graph
from reflib.fuse import fuse
from reflib.generate.compile_triton import compile_kernel, resources
from reflib.generate.matmul import generate_matmul
from reflib.ir.interpret import interpret
from reflib.ir.program import Choice, Extern, Program, Template, Tiling
from reflib.ir.verify import verify
from reflib.options import Options
from reflib.pipeline import _retarget, run
from reflib.target import parse_target

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
E4M3, E5M2, BF16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
H200 = parse_target("sm_90")


def operands(m: int = 32, n: int = 48, k: int = 64, a: Any = E4M3, b: Any = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(m, k, generator=g).to(a), torch.randn(n, k, generator=g).to(b).t()


def row_wise(m: int = 32, n: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(m, 1) + 0.5, torch.rand(1, n) + 0.5


def lowered(fn: Callable[..., Any], *args: Any) -> Program:
    gm = make_fx(lambda *a: (fn(*a),), tracing_mode="fake")(*args)
    program = run(Graph(gm), Options(target="sm_90", autotune="blocking"), "lower").program
    verify(program)
    return program


def choice(program: Program) -> Choice | None:
    return next((n for n in program.nodes if isinstance(n, Choice)), None)


def scaled(a, b, sa, sb, bias=None, out=BF16, fast=False):
    return torch._scaled_mm(a, b, sa, sb, bias=bias, out_dtype=out, use_fast_accum=fast)


# -- values -----------------------------------------------------------------------------------------
CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "per tensor": (scaled, lambda: (*operands(), torch.tensor(2.0), torch.tensor(0.25))),
    "row-wise": (scaled, lambda: (*operands(), *row_wise())),
    "e5m2": (scaled, lambda: (*operands(a=E5M2), torch.tensor(2.0), torch.tensor(0.25))),
    "bias": (scaled, lambda: (*operands(), torch.tensor(2.0), torch.tensor(0.25), torch.randn(48).to(BF16))),
    "float32": (lambda *a: scaled(*a, out=F32), lambda: (*operands(), torch.tensor(2.0), torch.tensor(0.25))),
    "epilogue": (lambda *a: torch.relu(scaled(*a) * 2 + 1), lambda: (*operands(), *row_wise())),
}
if hasattr(torch.nn.functional, "scaled_mm"):

    def functional(a, b, sa, sb):
        rows = torch.nn.functional.ScalingType.RowWise
        return torch.nn.functional.scaled_mm(a, b, sa, rows, sb, rows, output_dtype=BF16)

    CASES["functional"] = (functional, lambda: (*operands(), *row_wise()))


@pytest.mark.parametrize("name", CASES)
def test_as_by_hand(name: str) -> None:
    """A float32 product of what the 8 bits mean, scaled; eager's own rounds in other places on a CPU."""
    fn, make = CASES[name]
    args = make()
    program = lowered(fn, *args)
    c = choice(program)
    assert c is not None and [v.name for v in c.variants] == ["aten", "triton"]
    chosen = fuse(splice(program, c, c.variants[1]), Options(), H200).program
    verify(chosen)
    assert len(chosen.nodes) == 1 and isinstance(chosen.nodes[0], Template), "what follows is fused"
    (got,) = interpret(_retarget(chosen, parse_target("cpu")), args)
    a, b, sa, sb, *bias = args
    want = (a.float() @ b.float()) * sa * sb + (bias[0].float() if bias else 0)
    want = torch.relu(want.to(BF16) * 2 + 1) if name == "epilogue" else want.to(got.dtype)
    torch.testing.assert_close(got, want, rtol=2e-2 if name == "epilogue" else 8e-3, atol=1e-2)


def test_what_is_atens() -> None:
    one, wide = torch.tensor(1.0), operands()
    rows = operands(32, 64, 64)
    for fn, args in (
        (lambda a, b, s: scaled(a, b, s, s, out=E4M3), (*wide, one)),  # (an 8-bit result)
        (lambda a, b, s, r: torch._scaled_mm(a, b, s, s, scale_result=r, out_dtype=BF16), (*wide, one, one)),
    ):
        try:
            program = lowered(fn, *args)
        except Exception:  # this version of torch has no such product
            continue
        assert choice(program) is None and any(isinstance(n, Extern) for n in program.nodes)
    assert choice(lowered(scaled, rows[0], rows[1], one, one)) is not None


# -- candidates and code ----------------------------------------------------------------------------
def template(m: int, n: int, k: int, fast: bool = False) -> tuple[Template, Program]:
    program = lowered(lambda *a: scaled(*a, fast=fast), *operands(m, n, k), torch.tensor(1.0), torch.tensor(1.0))
    c = choice(program)
    assert c is not None
    (t,) = c.variants[1].nodes
    assert isinstance(t, Template)
    return t, program


def test_candidates() -> None:
    t, _ = template(4096, 4096, 4096)
    assert problem(t).a_bytes == problem(t).b_bytes == 1 and problem(t).twice
    assert not tilings(t, parse_target("sm_80"), Options()) and not tilings(t, parse_target("gfx942"), Options())
    for arch in ("sm_89", "sm_90", "sm_100"):
        found = tilings(t, parse_target(arch), Options())
        assert found and all(c.k >= 32 and c.warps_k == 1 for c in found)
    assert {c.kind for c in tilings(t, H200, Options())} >= {"tiled", "persistent"}


@needs_triton
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    "arch, product", [("sm_89", "e4m3"), ("sm_90", r"wgmma\S+e4m3"), ("sm_100", "tcgen05.*f8f6f4")]
)
def test_is_multiplied_in_8_bits(arch: str, product: str, fast: bool) -> None:
    t, program = template(256, 256, 1024, fast)
    target = parse_target(arch)
    t = replace(t, tiling=Tiling("tiled", 64, 128, 128, 4, 3))
    kernel = generate_matmul(template_variants("k", t, program.buffers, target)[0].kernel, program.buffers, target,
                             tuple(program.buffers))  # fmt: skip
    assert ("max_num_imprecise_acc=128" in kernel.source) == (arch == "sm_90" and not fast)
    binary = compile_kernel(kernel, target)
    assert re.search(product, binary.ptx) and resources(binary)["stack"] == 0


@needs_triton
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_wrappers(wrapper: str) -> None:
    f = lambda *a: torch.relu(scaled(*a))  # noqa: E731
    e = reflib.explain(f, *operands(64, 64, 512), *row_wise(64, 64), target="sm_90", wrapper=wrapper, verify=True)
    assert len(e.kernels) == 1 and "triton" in str(e.decisions[0].winner)
    e = reflib.explain(f, *operands(64, 64, 512), *row_wise(64, 64), target="sm_80", wrapper=wrapper, verify=True)
    assert str(e.decisions[0].winner) == "aten"
