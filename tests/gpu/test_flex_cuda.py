"""``flex_attention`` as fused kernels on a GPU: as exact as eager, against float64, forward and backward, for lengths
that change, under both wrappers, and from a package."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.ir.program import kernel_variants
from tests.flex_cases import CASES, LSE, Case, alibi, causal, flex, window
from tests.semantics import Compiled

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(case: Case, compiled: Any, fused: bool = True) -> None:
    assert not (wrong := case.wrong(compiled, "cuda")), wrong
    if fused and isinstance(compiled, Compiled):
        names = [n.variants[0].kernel.name for s in compiled.stages for n in kernel_variants(s.scheduled.nodes)]
        assert sum("flex_attention" in n or "flex_decoding" in n for n in names) == 1 + 2 * case.trains, names


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", {"flex_attention_eager"}, raising=False)
    torch._dynamo.reset()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_eager(name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], dtype=dtype)
    check(case, Compiled(case.function(case.block_mask("cuda"))))


@pytest.mark.parametrize("heads", [(64, 64), (128, 128), (256, 256), (192, 128), (80, 96)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    case = Case((2, 4, 512, heads[0]), (2, 2, 640), heads[1], causal, alibi, (("enable_gqa", True), *LSE), dtype=dtype)
    check(case, Compiled(case.function(case.block_mask("cuda"))))


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_lengths_that_change(wrapper: str) -> None:
    compiled: Any = None
    for n in (256, 384, 200, 1031, 512):
        case = Case((2, 2, n, 64), (2, 2, n), mask=window, score=alibi, dtype=torch.bfloat16)

        def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return flex.flex_attention(q, k, v, lambda s, b, h, i, j: alibi(s, b, h, i, j, None), mask)

        if compiled is None:
            compiled = Compiled(fn, dynamic=True, wrapper=wrapper)
        mask, of = case.block_mask("cuda"), compiled
        check(case, lambda q, k, v, table, mask=mask, of=of: of(q, k, v, mask))
    assert len(compiled.stages) <= 4


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_misaligned(wrapper: str) -> None:
    """The same compiled function, with addresses that are no multiples of 16 bytes: it runs the fallback."""
    case = replace(CASES["causal"], dtype=torch.float16, trains=False)
    compiled = Compiled(case.function(case.block_mask("cuda")), wrapper=wrapper)
    for misaligned in (False, True):
        check(replace(case, misaligned=misaligned), compiled)
    assert len(compiled.stages) == 1


def test_measured() -> None:
    """Tilings are candidates; every one of them gives what the default gives."""
    case = replace(CASES["plain"], dtype=torch.bfloat16, trains=False)
    compiled = Compiled(case.function(None), autotune="blocking", isolate=False, cache_decisions=False)
    check(case, compiled)
    (decision,) = [d for s in compiled.stages for d in s.decisions if d.op == "flex_attention"]
    assert len(decision.candidates) > 2 and all(c.status == "ok" for c in decision.candidates), decision


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.randn(2048))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + self.bias[i - j + 1024]

        return flex.flex_attention(q, k, v, score)


def test_a_package(tmp_path: Path) -> None:
    model, arch = Model(), "sm_{}{}".format(*torch.cuda.get_device_capability())
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 512, 64, dtype=torch.bfloat16) for _ in range(3)]
    length = torch.export.Dim("length", min=16, max=1024)
    shapes = ({2: length},) * 3
    path = reflib.aot_compile(model, tuple(tensors), tmp_path / "flex.reflib", archs=[arch], dynamic_shapes=shapes)
    f = reflib.load(path)
    for n in (512, 700, 33):
        given = [torch.randn(2, 4, n, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        torch.testing.assert_close(f(*given), model.cuda()(*given), rtol=2e-2, atol=2e-2)
