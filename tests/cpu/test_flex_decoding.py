"""``flex_attention`` for few queries and many keys, in Triton's interpreter and compiled ahead of time; what its
``kernel_options`` mean."""

import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import reflib
from reflib.generate.compile_triton import compile_kernel
from reflib.ir.data import from_data, to_data
from reflib.ir.expr import Sym, expr
from reflib.ir.flex import FlexKernel
from reflib.ir.program import Extern, kernel_variants
from reflib.lower import flex_decode, flex_options
from reflib.lower.flex_tilings import shared_bytes, tilings
from reflib.target import CUDA, parse_target
from tests.flex_cases import GQA, Case, causal, relative
from tests.flex_decode_cases import DECODE, at_end, by_head
from tests.interpreter import chosen, results

flex = sys.modules["torch.nn.attention.flex_attention"]  # (the name is also a function's)
LONG = Case((1, 32, 1, 128), (1, 8, 8192), options=GQA, trains=False, dtype=torch.bfloat16)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [*(f"decoding {n}" for n in DECODE), "decoding several lengths"])
def test_interpreted(name, request):
    assert results("flex_interpreting.py", *chosen(request))[name] == ""


def explained(case, kernel_options=None, target="sm_90", **options):
    given = dict(case.options) | ({"kernel_options": kernel_options} if kernel_options else {})
    case = replace(case, options=tuple(given.items()))
    tensors = [t.detach().requires_grad_(case.trains) for t in case.tensors()[:3]] + [case.tensors()[3]]
    return reflib.explain(case.function(case.block_mask()), *tensors, target=target, **options)


def kernels(e):
    nodes = [v.variants[0].kernel for s in e.graphs for v in kernel_variants(s.scheduled.nodes)]
    parts = [(n.name, n.parts[0].target) for n in nodes if isinstance(n.parts[0], Extern)]
    return {k.kind: k for _, k in parts if isinstance(k, FlexKernel)}


# -- few queries -------------------------------------------------------------------------------------------
def test_which_calls_are_split():
    """Few queries, in one block of the mask, without gradients."""
    e = explained(LONG)
    assert len(e.kernels) == 2 and "divided among 33 programs; the queries of 4 heads" in repr(e.decisions)
    assert from_data(to_data(e.program), e.program.constants) == e.program
    for case, options in (
        (replace(LONG, q=(1, 32, 128, 128)), {}),
        (replace(LONG, q=(1, 32, 40, 128), mask=at_end(8192, 40), block=32), {}),
        (LONG, {"batch_invariant": True}),
        (replace(LONG, q=(1, 8, 1, 128), kv=(1, 8, 200)), {}),  # nothing to pack, too few keys to split
        (replace(LONG, q=(8, 32, 64, 128), kv=(8, 8, 8192)), {}),  # a block of 32 rows would have one head
    ):
        assert set(kernels(explained(case, **options))) == {"forward"}
    many = kernels(explained(replace(LONG, q=(40, 32, 8, 128), kv=(40, 8, 8192))))["decode"]
    assert (many.packed, many.splits) == (4, 1)


def test_a_forward_that_is_trained_is_not(monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *a: None)  # PyTorch has the backward for GPUs only
    assert set(kernels(explained(replace(LONG, trains=True)))) == {"forward", "dq", "dkv"}


def test_a_mask_per_head_leaves_a_head_per_block():
    case = replace(LONG, q=(2, 8, 4, 64), kv=(2, 2, 4096), mask=by_head(4096, 4))
    kernel = kernels(explained(case))["decode"]
    assert kernel.packed == 1 and kernel.splits == 16
    assert kernels(explained(replace(case, mask=None)))["decode"].packed == 4


def test_splits_fill_one_wave():
    for units in (84, 132, 148):
        for programs in (1, 7, 8, 64, 131, 132, 133, 600):
            found = flex_decode.splits(programs, expr(1 << 20), units)
            assert found == 1 or units < programs * found <= 2 * units or found == flex_decode.MOST
    assert flex_decode.splits(8, expr(1000), 132) == 7 and flex_decode.splits(8, expr(200), 132) == 1
    changing = expr(Sym("s0", 2, None, 16))
    assert flex_decode.splits(8, changing, 132) == 33


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", pytest.param("sm_100", marks=pytest.mark.slow)])
@pytest.mark.parametrize("head, dtype", [(128, torch.bfloat16), (256, torch.float16), (64, torch.float32)], ids=str)
def test_compiled_ahead_of_time(head, arch, dtype):
    """Within the shared memory that was reckoned with; what assumes nothing, and indexes in 64 bits, as well."""
    case = Case((2, 8, 3, head), (2, 2, 1000), None, at_end(1000, 3), relative, GQA, trains=False, dtype=dtype)
    e = explained(case, target=arch)
    for node in (w.kernel for v in kernel_variants(e.scheduled.nodes) for w in v.variants):
        made = compile_kernel(e.graphs[0].kernels[node.name], parse_target(arch))
        kernel = getattr(node.parts[0], "target", None)
        if isinstance(kernel, FlexKernel):
            reckoned = shared_bytes(kernel, kernel.tiling, (head, head), parse_target(arch))
            assert made.image and made.shared <= 1.1 * reckoned + 16384, f"{made.shared} bytes, not {reckoned}"


def test_tilings_fit():
    kernel = kernels(explained(LONG))["decode"]
    for arch in CUDA:
        for dtype in (torch.float16, torch.float32):
            for head in (16, 64, 128, 192, 256):
                found = tilings(replace(kernel, dtype=dtype, blocks=(128, 64)), (head, head), parse_target(arch))
                assert found and all(t.m == 16 and 64 % t.n == 0 for t in found)


# -- kernel_options ----------------------------------------------------------------------------------------
SQUARE = Case((1, 2, 256, 64), (1, 2, 256), mask=causal, trains=False, dtype=torch.bfloat16)


def test_tilings_are_as_asked(monkeypatch):
    asked = {"BLOCK_M": 32, "fwd_BLOCK_N": 16, "BLOCK_N": 64, "num_warps": 2, "num_stages": 1, "PRESCALE_QK": True}
    tiling = kernels(explained(SQUARE, asked))["forward"].tiling
    assert (tiling.m, tiling.n, tiling.num_warps, tiling.num_stages) == (32, 16, 2, 1)
    tiling = kernels(explained(LONG, asked | {"SPLIT_KV": 5}))["decode"].tiling
    assert (tiling.m, tiling.n, tiling.num_warps, tiling.num_stages) == (32, 16, 2, 1)
    monkeypatch.setattr(flex, "_validate_device", lambda *a: None)
    asked = {"BLOCK_M1": 16, "bwd_BLOCK_N1": 32, "BLOCK_M2": 64, "BLOCK_N2": 128, "bwd_num_warps": 8, "num_stages": 2}
    found = {k: x.tiling for k, x in kernels(explained(replace(SQUARE, trains=True), asked)).items()}
    assert (found["dkv"].m, found["dkv"].n, found["dkv"].num_warps, found["dkv"].num_stages) == (16, 32, 8, 2)
    assert (found["dq"].m, found["dq"].n, found["dq"].num_warps) == (64, 128, 8)
    assert found["forward"].num_warps != 8 and found["forward"].num_stages == 2


def test_candidates_are_as_asked():
    (choice,) = explained(SQUARE, {"BLOCK_N": 32}, autotune="blocking").program.nodes
    assert len(choice.variants) > 1 and all(n.target.tiling.n == 32 for v in choice.variants for n in v.nodes)


def test_which_kernel_is_asked_for():
    assert kernels(explained(LONG, {"SPLIT_KV": 5}))["decode"].splits == 5
    for asked in ({"BACKEND": "TRITON"}, {"FORCE_USE_FLEX_ATTENTION": True}, {"BLOCK_M": 64}):
        assert set(kernels(explained(LONG, asked))) == {"forward"}
    short = replace(LONG, q=(1, 8, 1, 128), kv=(1, 8, 200))
    assert set(kernels(explained(short, {"BACKEND": "TRITON_DECODE"}))) == {"decode"}


@pytest.mark.parametrize(
    "case, asked, message",
    [
        (SQUARE, {"BLOCK_M": 48}, r"kernel_options\['BLOCK_M'\] = 48: it has to be a power of two from 16 to 1024"),
        (SQUARE, {"fwd_BLOCK_N": 8}, r"\['BLOCK_N'\] = 8: it has to be a power of two"),
        (SQUARE, {"num_warps": 3}, r"\['num_warps'\] = 3: it has to be a power of two from 1 to 32"),
        (SQUARE, {"num_stages": 0}, r"\['num_stages'\] = 0: it has to be a number from 1 to 16; or leave it out"),
        (SQUARE, {"BLOCK_N": 256}, "the block mask has blocks of 128 keys.*a power of two that divides 128"),
        (replace(SQUARE, mask=None), {"BLOCK_N": 1024}, "bytes of shared memory; sm_90 has 232448: give smaller"),
        (SQUARE, {"BACKEND": "FLASH"}, "own kernels only; give AUTO, TRITON or TRITON_DECODE"),
        (SQUARE, {"BACKEND": "TRITON_DECODE"}, "does not support 256 queries; fewer than 128 only; leave it out"),
        (LONG, {"BACKEND": "TRITON_DECODE", "BLOCK_M": 64}, "does not support blocks of more than 32 rows"),
        (LONG, {"SPLIT_KV": 0}, r"\['SPLIT_KV'\] = 0: it has to be a number from 1"),
    ],
    ids=lambda x: "" if isinstance(x, Case) else str(x)[:24],
)
def test_what_cannot_be(case, asked, message):
    with pytest.raises(BackendCompilerFailed, match=message) as e:
        explained(case, asked)
    assert isinstance(e.value.inner_exception, reflib.OptionError)
    assert "shared memory" in message or "at flex_cases.py:" in str(e.value)


def test_unknown_keys_are_named_once():
    flex_options._warn.cache_clear()
    with pytest.warns(UserWarning, match=r"\['block_m'\] is unknown, and has no effect; did you mean 'BLOCK_M'"):
        assert kernels(explained(SQUARE, {"block_m": 32}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explained(SQUARE, {"block_m": 32, "ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True, "kpack": 1})
