"""Decompose-K: which splits, the switches, and every candidate's numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from reflib import OptionError, register_custom_op_autotuning
from reflib.ir.program import Choice, Extern, LoopNest
from reflib.lower import custom_ops
from reflib.lower.decompose_k import splits
from reflib.options import Options
from tests.choices import check_all, choices, program_of

SPLITS, THRESHOLD = "TORCHINDUCTOR_NUM_DECOMPOSE_K_SPLITS", "TORCHINDUCTOR_DECOMPOSE_K_THRESHOLD"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SPLITS, raising=False)
    monkeypatch.delenv(THRESHOLD, raising=False)
    monkeypatch.setattr(custom_ops, "_REGISTERED", {})


def names(fn: Callable[..., Any], *args: torch.Tensor, dynamic: bool = False, **options: Any) -> list[str]:
    """The alternatives' names; all of them are compared with eager."""
    found = [c for p in check_all(fn, args, dynamic, **options).programs for c in choices(p)]
    return [a.name for c in found for a in c.variants if a.name.startswith("decompose_k")]


def pair(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64) / k**0.25  # noqa: E731
    return draw(m, k).to(dtype), draw(k, n).to(dtype)


# -- which ------------------------------------------------------------------------------------------
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 70000), st.integers(0, 12), st.integers(0, 40))
def test_splits_divide_and_keep_to_the_switches(m: int, n: int, k: int, limit: int, threshold: int) -> None:
    found = splits(m, n, k, limit, threshold)
    assert len(found) <= limit and len(set(found)) == len(found)
    assert all(k % s == 0 and s > 1 and k // s % 8 == 0 for s in found)
    if k < threshold * max(m, n):
        assert not found


def test_the_best_guess_fills_the_device() -> None:
    assert splits(32, 32, 16384, 1, 32, units=132) == [256]
    assert splits(32, 32, 16384, 1, 32, units=16) == [32]
    assert splits(256, 256, 65536, 1, 32, units=132) == [16]
    assert splits(64, 64, 4096 * 7, 10, 32)[0] == 224  # parts of 128


# -- that it is right -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_mm(dtype: torch.dtype) -> None:
    found = names(lambda a, b: torch.mm(a, b).relu(), *pair(3, 512, 5, dtype))
    assert bool(found) == (dtype != torch.float64)


@pytest.mark.parametrize("alpha, beta", [(1, 1), (0.5, 2.0), (2, 0)])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (3, 1)])
@pytest.mark.sample(3)
def test_addmm(alpha: float, beta: float, shape: tuple[int, ...]) -> None:
    bias = torch.full(shape, float("nan")) if beta == 0 else torch.randn(shape)
    fn = lambda c, a, b: torch.addmm(c, a, b, alpha=alpha, beta=beta).sin()  # noqa: E731
    assert len(names(fn, bias, *pair(3, 512, 5))) == 3
    half = [t.bfloat16() for t in (bias, *pair(3, 512, 5))]
    assert len(names(fn, *half)) == 3


def test_any_strides() -> None:
    a, b = pair(4, 256, 6)
    assert names(lambda a, b: torch.mm(a, b) + 1, a.t().contiguous().t(), b.t().contiguous().t())
    assert names(lambda a, b: torch.mm(a[:, ::2], b[::2]) + 1, *pair(4, 512, 6))
    assert names(lambda a: torch.mm(a, a.t()) + 1, a)
    assert names(lambda a, b: torch.mm(a, b) + 1, *pair(1, 256, 1))


def test_dynamic_sizes_become_conditions() -> None:
    backend = check_all(lambda a, b: torch.mm(a, b).relu(), pair(4, 512, 6), dynamic=True)
    tried = [a for a in backend.choice.variants if a.name.startswith("decompose_k")]
    assert len(tried) == 3
    k = backend.programs[0].buffers[backend.choice.reads()[0]].shape[1]
    for a in tried:
        assert ("divisible", k, dict(a.params)["k_splits"]) in [(g.kind, g.what, g.value) for g in a.predicate]


def test_the_sum_is_a_kernel_of_its_own_to_be_fused() -> None:
    choice = check_all(lambda a, b: torch.mm(a, b).relu(), pair(4, 512, 6, torch.bfloat16)).choice
    nodes = choice.variants[-1].nodes
    product = next(i for i, n in enumerate(nodes) if isinstance(n, Extern))
    assert all(isinstance(n, LoopNest) for n in nodes[product + 1 :]) and nodes[product + 1].reduced
    assert not any(isinstance(n, Choice) for n in nodes)


def test_on_a_gpu_the_partial_products_are_float32() -> None:
    """bmm with out_dtype, into memory that is there; seen by fake tensors alone."""
    with FakeTensorMode(), torch.no_grad():
        a = torch.empty(32, 4096, dtype=torch.float16, device="cuda")
        b = torch.empty(4096, 32, dtype=torch.float16, device="cuda")
        program = program_of(
            lambda a, b: torch.mm(a, b).relu(), a, b, options=Options(autotune="blocking"), mode="real"
        )
    (choice,) = choices(program)
    tried = [a for a in choice.variants if a.name.startswith("decompose_k")]
    assert tried and not choice.failed
    for t in tried:
        product = t.nodes[0]
        assert isinstance(product, Extern) and product.target is torch.ops.aten.bmm.dtype
        assert product.out == (torch.ops.aten.bmm.dtype_out, ("out",))
        assert t.buffers[0].dtype == torch.float32 and len(t.nodes) <= 3


# -- the switches -----------------------------------------------------------------------------------
def test_the_threshold() -> None:
    fn = lambda a, b: torch.mm(a, b).relu()  # noqa: E731
    assert names(fn, *pair(8, 256, 8))
    assert not names(fn, *pair(8, 256 - 8, 8))
    assert names(fn, *pair(8, 128, 8), decompose_k_threshold=16)
    assert not names(fn, *pair(8, 128, 8))


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = lambda a, b: torch.mm(a, b).relu()  # noqa: E731
    monkeypatch.setenv(SPLITS, "2")
    assert len(names(fn, *pair(8, 1024, 8))) == 2
    assert len(names(fn, *pair(8, 1024, 8), num_decompose_k_splits=1)) == 1  # an option wins
    monkeypatch.setenv(SPLITS, "0")
    assert not names(fn, *pair(8, 1024, 8))
    monkeypatch.setenv(SPLITS, "")
    monkeypatch.setenv(THRESHOLD, "200")
    assert not names(fn, *pair(8, 1024, 8))
    assert Options().decompose_k() == (10, 200)
    monkeypatch.setenv(THRESHOLD, "many")
    with pytest.raises(OptionError, match="TORCHINDUCTOR_DECOMPOSE_K_THRESHOLD='many'"):
        Options().decompose_k()


@pytest.mark.parametrize("name", ["num_decompose_k_splits", "decompose_k_threshold"])
def test_the_options(name: str) -> None:
    assert getattr(Options(), name) is None and Options().decompose_k() == (10, 32)
    assert 0 in Options.make({name: 0}).decompose_k()
    for bad in (-1, 2.5, "3", True):
        with pytest.raises(OptionError, match=name):
            Options.make({name: bad})


def test_beside_a_users_own() -> None:
    register_custom_op_autotuning(torch.ops.aten.mm.default, configs=[lambda a, b: torch.mm(b.t(), a.t()).t()])
    choice = check_all(lambda a, b: torch.mm(a, b).relu(), pair(8, 1024, 8)).choice
    found = [a.name for a in choice.variants]
    assert found[0] == "aten" and found[-1] == "<lambda>" and "decompose_k(k_splits=4)" in found
