"""Parts that store only half precision get cheap forms, nothing else does. (Their values: test_triton_interpreter.)"""

import importlib.util
import random
import re

import pytest
import torch
import torch.nn.functional as F
from triton_cases import BF16, F32, norm
from triton_half_cases import HALF, half_case

from reflib.generate.compile_triton import compile_kernel, sass
from reflib.generate.kernel import Kernel
from reflib.target import parse_target
from tests.interpreter import interpreted
from tests.semantics import Compiled

no_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


@pytest.mark.parametrize("name", HALF)
def test_form(name: str) -> None:
    assert HALF[name].text in half_case(name).kernel("k").source


@pytest.mark.parametrize("name", HALF)
def test_float32_results_are_as_accurate_as_before(name: str) -> None:
    case = half_case(name)
    case.tensors["out"] = case.tensors["out"].float()
    source = case.kernel("k").source
    assert "_half(" not in source and "fast_" not in source and "tl.exp2" not in source


def test_softmax_multiplies_by_a_row_s_reciprocal() -> None:
    assert "* (1.0 /" in norm("softmax", 8, 128, BF16).kernel("k").source
    source = norm("softmax", 8, 128, F32).kernel("k").source
    assert "* (1.0 /" not in source and "div_rn" in source


@pytest.mark.parametrize("seed", range(3))
def test_exact_quotients_by_one_number_per_row_take_its_reciprocal(seed: int) -> None:
    """Of rows of which a thread has several elements; of short ones there would be as many reciprocals as quotients."""
    rng = random.Random(seed)
    n, long, short = rng.randrange(2000, 4000), rng.randrange(600, 9000), rng.randrange(3, 30)

    def quantized(x):
        return torch.round(x / x.abs().amax(-1, keepdim=True)).to(torch.int8)

    source = kernel_of(quantized, torch.randn(n, long)).source
    assert "= divide_row(" in source and source.count("div_rn") == 1
    assert "divide_row" not in kernel_of(quantized, torch.randn(100 * n, short)).source
    pieces = 4 * rng.randrange(8, 30)  # several rows per program, read in pieces
    assert "= divide_row(" in kernel_of(quantized, torch.randn(40 * n, pieces)).source
    assert "divide_row" not in kernel_of(quantized, torch.randn(n, long), numerics="eager").source


@pytest.mark.parametrize("by,product", [(64, True), (0.25, True), (2**-99, True), (48, True), (-2, True), (0, False)])
def test_a_quotient_by_a_number_is_a_product(by: float, product: bool) -> None:
    """As eager's on a GPU, in full precision too."""
    source = kernel_of(lambda x: torch.floor(x / by), torch.randn(100)).source
    assert ("div_rn" not in source) == product and (f"* {1 / by if by else 0}" in source) == product


def test_several_exact_divisions_have_no_branches() -> None:
    def fn(x, y, n):
        return x / (y / (x / y.sqrt() + 1) if n > 2 else y)

    x, y = torch.randn(100), torch.rand(100) + 1
    few, several = (kernel_of(lambda x, y, n=n: fn(x, y, n), x, y).source for n in (1, 3))
    assert "div_rn" in few and "divide(" not in few
    assert "div_rn" not in several and "sqrt_rn" not in several and several.count(" = divide(") == 3
    eager = kernel_of(lambda x, y: fn(x, y, 3), x, y, numerics="eager").source
    assert "divide(" not in eager and "root(" not in eager
    gates = kernel_of(lambda x, y: x.sigmoid() * y.sigmoid() + (x + y).sigmoid(), x, y).source
    assert gates.count(" = logistic(") == 3 and "div_rn" not in gates


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton: it is interpreted")
def test_divisions_without_branches_are_right() -> None:
    """Of every size, signed zeros, infinities and NaN: within a unit in the last place, mostly equal."""
    assert interpreted("exact_divisions.py").splitlines()[-1] == "ok"


def kernel_of(fn, *args: torch.Tensor, **options: str) -> Kernel:
    torch._dynamo.reset()
    compiled = Compiled(fn, dynamic=False, target="sm_90", **options)
    compiled(*args)
    (stages,) = compiled.stages
    return next(iter(stages.kernels.values()))  # type: ignore[union-attr]


@no_triton
@pytest.mark.parametrize(
    "fn,most",
    [
        (lambda x, b: F.gelu(x + b), 20),
        (lambda x, b: F.gelu(x + b, approximate="tanh"), 20),
        (lambda x, b: F.silu(x) * b, 13),
        (lambda x, b: (x + b).sigmoid(), 13),
    ],
    ids=["gelu", "gelu_tanh", "swiglu", "sigmoid"],
)
def test_instructions_an_element(fn, most: float) -> None:
    """The ops as they are lowered. An H200 issues 28 instructions while it moves a bf16 element in and out."""
    kernel = kernel_of(fn, torch.zeros(1024, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16))
    text = sass(compile_kernel(kernel, parse_target("sm_90")))
    count = len([x for x in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", text) if not x.startswith("NOP")])
    block = int(re.findall(r"XBLOCK: tl.constexpr = (\d+)", kernel.source)[0])
    assert count / (block / (32 * kernel.num_warps)) <= most
