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
from tests.flex_cases import CASES, GQA, LSE, Case, alibi, causal, flex, window
from tests.flex_decode_cases import DECODE, at_end, many
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


# -- few queries and many keys -----------------------------------------------------------------------------
LARGE = [c for i, dtype in enumerate(DTYPES) for c in many(8, dtype, large=True, seed=i + 1)]


def decoded(compiled: Compiled) -> int:
    names = [n.variants[0].kernel.name for s in compiled.stages for n in kernel_variants(s.scheduled.nodes)]
    return sum("flex_decoding" in n for n in names)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DECODE)
def test_few_queries(name: str, dtype: torch.dtype) -> None:
    case = replace(DECODE[name], dtype=dtype)
    compiled = Compiled(case.function(case.block_mask("cuda")), dynamic=case.dynamic)
    check(case, compiled)
    assert decoded(compiled) == 1


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("i", range(len(LARGE)))
def test_many_keys(i: int, wrapper: str) -> None:
    compiled = Compiled(LARGE[i].function(LARGE[i].block_mask("cuda")), wrapper=wrapper)
    check(LARGE[i], compiled)
    assert decoded(compiled) == 1


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_keys_that_change(wrapper: str) -> None:
    """As in a cache of keys that grows: one program; some of its splits have no keys at first."""
    compiled: Any = None
    for n in (300, 40, 4097, 8192, 1025):
        case = Case((2, 8, 1, 64), (2, 2, n), mask=at_end(n, 1), score=alibi, options=GQA, trains=False)
        offset, block_mask = torch.tensor(n - 1, device="cuda"), case.block_mask("cuda")
        block_mask.mask_mod = lambda b, h, i, j, offset=offset: i + offset >= j

        def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return flex.flex_attention(q, k, v, lambda s, b, h, i, j: alibi(s, b, h, i, j, None), mask, enable_gqa=True)

        compiled = compiled or Compiled(fn, wrapper=wrapper)

        def run(q: Any, k: Any, v: Any, table: Any, mask: Any = block_mask, compiled: Any = compiled) -> Any:
            for x, d in ((k, 2), (v, 2), (mask.kv_indices, 3), (mask.full_kv_indices, 3)):
                torch._dynamo.maybe_mark_dynamic(x, d)
            return compiled(q, k, v, mask)

        check(replace(case, dtype=torch.bfloat16), run)
    assert len(compiled.stages) <= 3 and decoded(compiled) == len(compiled.stages)


@pytest.mark.parametrize("asked", [{"BLOCK_N": 32, "num_warps": 2, "num_stages": 2}, {"SPLIT_KV": 100}], ids=str)
def test_kernel_options(asked: dict[str, int]) -> None:
    case = replace(LARGE[0], options=(*GQA, ("kernel_options", asked)))
    check(case, Compiled(case.function(case.block_mask("cuda"))))


class Decode(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.randn(4096))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex.flex_attention(q, k, v, lambda s, b, h, i, j: s + self.bias[j], enable_gqa=True).relu()


def test_a_package_for_few_queries(tmp_path: Path) -> None:
    model, arch = Decode(), "sm_{}{}".format(*torch.cuda.get_device_capability())
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, 1, 64, dtype=torch.bfloat16), torch.randn(2, 2, 512, 64, dtype=torch.bfloat16)
    keys = torch.export.Dim("keys", min=16, max=4096)
    shapes = (None, {2: keys}, {2: keys})
    path = reflib.aot_compile(model, (q, k, k.clone()), tmp_path / "d.reflib", archs=[arch], dynamic_shapes=shapes)
    f, model = reflib.load(path), model.cuda()
    for n in (512, 3001, 33):
        given = [torch.randn(2, h, m, 64, dtype=torch.bfloat16, device="cuda") for h, m in ((8, 1), (2, n), (2, n))]
        torch.testing.assert_close(f(*given), model(*given), rtol=2e-2, atol=2e-2)


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
