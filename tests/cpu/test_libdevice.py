"""Kernels get the same machine code whether all of libdevice is linked into them or what they call."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from reflib import explain
from reflib.generate import libdevice
from reflib.generate.compile_triton import compile_kernel
from reflib.target import parse_target

pytest.importorskip("triton")
FUNCTIONS = {
    "exp": torch.exp, "exp2": torch.exp2, "erf": torch.erf, "tanh": torch.tanh, "log1p": torch.log1p,
    "sin": torch.sin, "rsqrt": torch.rsqrt, "pow": lambda x: x**1.7, "div": lambda x: 2.5 / (x + 3),
    "atan": torch.atan, "lgamma": torch.lgamma, "nextafter": lambda x: torch.nextafter(x, x + 1),
    "bessel": torch.special.bessel_j0,
}  # fmt: skip
SETS = [sorted(random.Random(seed).sample(sorted(FUNCTIONS), 3)) for seed in range(3)]


def kernel_of(names: list[str], dtype: torch.dtype) -> Any:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return sum((FUNCTIONS[n](x) for n in names), x)  # type: ignore[operator]

    (kernel,) = explain(fn, torch.rand(1000, dtype=dtype), target="sm_90").kernels
    return kernel


@pytest.mark.parametrize(
    ("names", "dtype"), zip(SETS, [torch.float32, torch.float64, torch.bfloat16]), ids=["f32", "f64", "bf16"]
)
def test_the_same_machine_code(
    names: list[str], dtype: torch.dtype, fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, target = kernel_of(names, dtype), parse_target("sm_90")
    cut = compile_kernel(kernel, target)
    files = list((fresh_cache / "libdevice").iterdir()) if (fresh_cache / "libdevice").exists() else []
    monkeypatch.setattr(libdevice, "link", lambda whole, module, paths: whole(module, paths))
    monkeypatch.setenv("REFLIB_CACHE_DIR", str(tmp_path / "other"))
    assert cut == compile_kernel(kernel, target)
    assert files and all(f.stat().st_size < 300_000 for f in files)


def test_where_it_cannot_be_cut_all_is_linked(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libdevice, "_calling", lambda functions: "no MLIR")
    assert compile_kernel(kernel_of(["exp2"], torch.float32), parse_target("sm_90")).image
    assert not (fresh_cache / "libdevice").exists()


def test_where_what_is_left_cannot_be_linked_all_is(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libdevice, "_linked", lambda *_: "another version's text")
    assert compile_kernel(kernel_of(["exp2"], torch.float32), parse_target("sm_90")).image
    assert (fresh_cache / "libdevice").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ["floor", "ceil", "floor_divide", "remainder", "fmod"])
def test_subnormal_numbers_are_not_0_where_a_function_jumps(name: str, dtype: torch.dtype) -> None:
    """ceil(1e-40) is 1, as eager's. (A GPU's own test: test_like_eager_cuda.)"""
    args = [torch.rand(1000, dtype=dtype)] * (1 if name in ("floor", "ceil") else 2)
    (kernel,) = explain(getattr(torch, name), *args, target="sm_90").kernels
    ptx = compile_kernel(kernel, parse_target("sm_90")).ptx
    assert re.search(r"cvt\.r[mpz]i\.f32", ptx) and not re.search(r"(abs|cvt\.\w+)\.ftz", ptx)
