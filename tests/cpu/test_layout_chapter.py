"""What the chapter on layouts launches on a GPU only: its texts compile for GPUs, and the code is what it says."""

import re
from functools import cache
from typing import Any

import pytest
import torch

from reflib import lab
from reflib.generate.compile_triton import compile_kernel
from reflib.generate.kernel import Kernel
from reflib.ir.expr import expr
from reflib.lab import notebook as nb
from reflib.lab import runner
from reflib.lab.triton_text import load
from reflib.target import parse_target

triton = pytest.importorskip("triton")


@cache
def text(name: str) -> str:
    """The kernels' text of that name in the chapter."""
    cells = nb.read(runner.ROOT / "notebooks" / "a-gpu-for-compiler-readers.ipynb").cells
    (found,) = (m[1] for c in cells if (m := re.search(rf'^{name} = """(.*?)"""', c.source, re.S | re.M)))
    return found


def by_gluon(phases: int, capability: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    fn = load(text("TILE").format(n=256, high=32, wide=32, phases=phases), "by_gluon")
    source = GluonASTSource(fn, {"x": "*fp32", "out": "*fp32"}, {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("phases", [1, 32])
def test_a_tile_in_gluon_goes_through_shared_memory(phases: int, capability: int) -> None:
    made = by_gluon(phases, capability)
    assert made.metadata.shared == 32 * 32 * 4
    assert f"maxPhase = {phases}, order" in made.asm["ttgir"]
    assert "ld.shared" in made.asm["ptx"] and "bar.sync" in made.asm["ptx"]


def test_tiles_transpose_and_products_multiply() -> None:
    """In one process of the interpreter, which takes longer to start than to run them."""
    turns, products, x = [], [], torch.randn(128, 128)
    for high, wide in ((1, 128), (32, 32), (64, 32)):
        source = text("TILE").format(n=128, high=high, wide=wide, phases=1)
        programs = (128 // high) * (128 // wide)
        turns.append(lab.Launch("by_triton", source, programs, [x, torch.zeros(128, 128)]))
    dots = ["left * right", *(f'tl.dot(left, right, input_precision="{p}")' for p in ("ieee", "tf32"))]
    for formula, step, dtype in [*zip(dots, (1, 32, 32), [torch.float32] * 3), ("tl.dot(left, right)", 32, torch.half)]:
        a, b, out = torch.randn(128, 128).to(dtype), torch.randn(128, 128).to(dtype), torch.zeros(128, 128)
        source = text("PRODUCT").format(n=128, block=64, step=step, formula=formula)
        products.append(lab.Launch("product", source, 4, [a, b, out]))
    lab.run_triton([*turns, *products])
    assert all(torch.equal(one.tensors[1], x.t()) for one in turns)
    for one in products:
        a, b, out = one.tensors
        torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_90"])
def test_the_chapters_products_fit_into_shared_memory(arch: str) -> None:
    """As they are launched there: Triton's default of three stages."""
    for block, step, warps, dtype in ((64, 32, 4, torch.float32), (128, 32, 8, torch.float16)):
        source = text("PRODUCT").format(n=1024, block=block, step=step, formula="tl.dot(left, right)")
        pointers = ("a", dtype), ("b", dtype), ("out", torch.float32)
        kernel = Kernel("product", "triton", source, pointers, (), expr(1), warps, 3, aligned=(0, 1, 2))
        target = parse_target(arch)
        assert 0 < compile_kernel(kernel, target).shared <= target.shared
