"""``flex_attention``: as eager, forward and backward: the dense formula, which runs on a CPU, and the fused kernels, in
Triton's interpreter and compiled ahead of time."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import reflib
from reflib.generate.compile_triton import compile_kernel
from reflib.ir.data import from_data, to_data
from reflib.ir.flex import FlexKernel
from reflib.ir.program import Choice, Extern, kernel_variants
from reflib.lower.flex_makers import MAKERS
from reflib.lower.flex_tilings import shared_bytes, tilings
from reflib.target import CUDA, parse_target
from tests.exporting import Alone
from tests.flex_cases import CASES, Case, alibi
from tests.flex_cases import causal as causal_case
from tests.flex_cases import relative as relative_case
from tests.interpreter import chosen, results

flex = sys.modules["torch.nn.attention.flex_attention"]  # (the name is also a function's)
flex_attention = flex.flex_attention
B, H, S, D = 2, 4, 70, 16
DOCUMENT = (torch.arange(S) // 23).expand(B, S).clone()


def causal(b, h, i, j):
    return i >= j


def same_document(b, h, i, j):
    return (DOCUMENT[b, i] == DOCUMENT[b, j]) & (i >= j)


@pytest.fixture(scope="module")
def masks():
    return {m.__name__: create_block_mask(m, B, None, S, S, device="cpu") for m in (causal, same_document)}


def softcap(q, k, v, table, masks):
    out, lse = flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s / 20) * 20, masks["causal"], return_lse=True)
    return out + lse.unsqueeze(-1)


def documents(q, k, v, table, masks):
    return flex_attention(q, k, v, block_mask=masks["same_document"], scale=0.3)


def relative(q, k, v, table, masks):
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + table[i - j + S] * h)


def grouped(q, k, v, table, masks):
    return flex_attention(q, k[:, :2], v[:, :2], block_mask=masks["causal"], enable_gqa=True)


def one_key(q, k, v, table, masks):
    return flex_attention(q, k[:1], v[:1], lambda s, b, h, i, j: s * 2, masks["causal"])


FORMS = pytest.mark.parametrize("form", [softcap, documents, relative, grouped, one_key], ids=lambda f: f.__name__)


def given():
    torch.manual_seed(0)
    tensors = [torch.randn(B, H, S, D).transpose(1, 2).contiguous().transpose(1, 2) for _ in range(3)]
    return [t.requires_grad_() for t in (*tensors, torch.randn(2 * S))]


@FORMS
@pytest.mark.sample(10)
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_as_eager(form, wrapper, masks, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *a: None)  # PyTorch has the backward for GPUs only
    results = []
    for f in (form, reflib.compile(form, wrapper=wrapper)):
        args = given()
        out = f(*args, masks)
        grads = torch.autograd.grad(out.sin().sum(), args, allow_unused=True)
        results.append([out, *(g for g in grads if g is not None)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert [t.stride() for t in results[1]] == [t.stride() for t in results[0]]


# -- fused -------------------------------------------------------------------------------------------------
def launches(e):
    return [n for n in e.program.nodes if isinstance(n, Extern) and isinstance(n.target, FlexKernel)]


@FORMS
def test_one_kernel(form, masks):
    """The functions of scores and masks are in it; no buffer is as large as the scores."""
    e = reflib.explain(form, *(t.detach() for t in given()), masks, target="sm_90")
    assert len(launches(e)) == 1 and len(e.kernels) <= 2
    assert all(b.kind != "temp" or b.numel.hint() < B * H * S * S for b in e.program.buffers.values())
    (launch,) = launches(e)
    assert from_data(to_data(e.program), e.program.constants) == e.program
    assert launch.target.slot.writes() == {
        "softcap": ["modified", "mask"], "documents": ["mask"], "relative": ["modified"], "grouped": ["mask"],
        "one_key": ["modified", "mask"],
    }[form.__name__]  # fmt: skip


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name, request):
    assert results("flex_interpreting.py", *chosen(request))[name] == ""


HEADS = (64, 64), (128, 128), (256, 256), (192, 128), (80, 80)
ARCHS = "sm_80", "sm_90", "sm_100"
COMPILED = [*itertools.product(HEADS, ARCHS, (torch.bfloat16, torch.float32))]
FEW = (((192, 128), "sm_90", torch.bfloat16),)


@pytest.mark.parametrize(
    "heads, arch, dtype", [pytest.param(*c, marks=() if c in FEW else pytest.mark.slow) for c in COMPILED], ids=str
)
def test_compiled_ahead_of_time(heads, arch, dtype):
    """Within the shared memory that was reckoned with, forward and backward, which PyTorch has on a GPU only."""
    case = Case((1, 4, 256, heads[0]), (1, 2, 256), heads[1], causal_case, relative_case, (("enable_gqa", True),))
    q, k, v, table = replace(case, dtype=dtype).tensors()
    tensors = *(x.requires_grad_() for x in (q, k, v)), table
    e = reflib.explain(case.function(case.block_mask()), *tensors, target=arch)
    scheduled = [(n.variants[0].kernel, s) for s in e.graphs for n in kernel_variants(s.scheduled.nodes)]
    ours = [(k, s) for k, s in scheduled if isinstance(getattr(k.parts[0], "target", None), FlexKernel)]
    kernels = {k.parts[0].target.kind: (k, s) for k, s in ours}
    assert set(kernels) == {"forward", "dq", "dkv"}
    for node, stages in kernels.values():
        made = compile_kernel(stages.kernels[node.name], parse_target(arch))
        kernel = node.parts[0].target
        reckoned = shared_bytes(kernel, kernel.tiling, heads, parse_target(arch))
        assert made.image and made.shared <= 1.1 * reckoned + 16384, f"{made.shared} bytes, not {reckoned}"


def test_tilings_fit():
    """What is worth measuring, for all GPUs."""
    e = reflib.explain(relative, *(t.detach() for t in given()), None, target="sm_90")
    (launch,) = launches(e)
    for arch in CUDA:
        for dtype in (torch.float16, torch.float32):
            for kind in ("forward", "dq", "dkv"):
                for head in (16, 64, 128, 192, 256):
                    kernel = replace(launch.target, kind=kind, dtype=dtype, blocks=(128, 64))
                    found = tilings(kernel, (head, head), parse_target(arch))
                    assert found and all(128 % t.m == 0 and 64 % t.n == 0 for t in found)


def reason(e):
    """Why the first attention in it is dense."""
    (choice,) = [n for n in e.program.nodes if isinstance(n, Choice) and n.op.startswith("flex_attention")]
    (decision,) = [d for d in e.decisions if d.region == choice.name]
    (failed,) = [c for c in decision.candidates if c.name == "fused"]
    return failed.why


def test_dense_with_a_reason(masks, monkeypatch):
    q, k, v, table = (t.detach() for t in given())
    e = reflib.explain(softcap, q.double(), k.double(), v.double(), table, masks, target="sm_90")
    assert any("operands of float64" in n.reason for n in e.program.nodes if isinstance(n, Extern))
    e = reflib.explain(relative, *(torch.cat([x] * 20, -1) for x in (q, k, v)), table, masks, target="sm_90")
    assert reason(e).startswith("heads of 320 elements") and "heads of 320" in repr(e.decisions)
    e = reflib.explain(relative, q.half(), k.half(), v.half(), table, masks, target="sm_75")
    assert "no tensor cores" in reason(e)
    monkeypatch.setattr(flex, "_validate_device", lambda *a: None)
    e = reflib.explain(relative, *given(), masks, target="sm_90", atomics=False)
    assert len(launches(e)) == 1 and "the gradient of a captured tensor calls" in reason(e.backward)


def test_gradients_of_captured_tensors_are_fused(monkeypatch):
    """Added to by one kernel of the backward; terms at one place are summed before, in its registers."""
    monkeypatch.setattr(flex, "_validate_device", lambda *a: None)
    for name, sums in (("relative learned", 0), ("slopes learned", 3)):
        case = replace(CASES[name], dtype=torch.bfloat16)
        q, k, v, table = case.tensors()
        tensors = *(t.requires_grad_() for t in (q, k, v)), table.bfloat16().requires_grad_()
        e = reflib.explain(case.function(case.block_mask()), *tensors, target="sm_90").backward
        dq, dkv = (next(k for k in e.kernels if k.name.endswith(kind)) for kind in ("_dq", "_dkv"))
        loops = dq.source.count("dq = tl.dot")
        assert dq.source.count("tl.atomic_add") == max(1, sums) * loops and "atomic" not in dkv.source
        assert dq.source.count("term = tl.sum(") == sums * loops
        assert compile_kernel(dq, parse_target("sm_90")).image


def test_tilings_are_candidates(masks):
    """Measured with masks that have blocks, as many as a causal one."""
    for form in (relative, documents):
        e = reflib.explain(form, *(t.detach() for t in given()), masks, target="sm_90", autotune="blocking")
        (choice,) = [n for n in e.program.nodes if isinstance(n, Choice)]
        assert choice.op == "flex_attention" and len(choice.variants) > 1
    (launch,) = choice.variants[0].nodes
    lists, keys = dict(launch.kwargs), dict(choice.inputs_from)
    for num, idx in (("num", "idx"), ("full_num", "full_idx")):
        like = [torch.zeros([n.constant for n in lists[x].shape], dtype=torch.int32) for x in (num, idx)]
        count, which = (MAKERS[keys[lists[x].buffer]](t) for x, t in zip((num, idx), like))
        assert int(count.min()) >= 1 and int(count.max()) <= which.shape[-1] and int(which.max()) < which.shape[-1]


def test_short_lengths_have_small_blocks():
    q, k = torch.randn(1, 2, 1, 64, dtype=torch.float16), torch.randn(1, 2, 300, 64, dtype=torch.float16)
    e = reflib.explain(lambda q, k: flex_attention(q, k, k), q, k, target="sm_90")
    assert e.scheduled.nodes[0].variants[0].kernel.parts[0].target.tiling.m == 16


def test_full_blocks_have_no_mask():
    """Two loops: with the mask function, and without; alibi is in both."""
    case = Case((1, 2, 512, 64), (1, 2, 512), mask=causal_case, score=alibi, dtype=torch.bfloat16)
    e = reflib.explain(case.function(case.block_mask()), *case.tensors(), target="sm_90")
    (source,) = [k.source for k in e.kernels]
    cut, whole = source.split("# blocks that it leaves whole")
    assert cut.count("tl.where(v") == 1 and whole.count("tl.where(v") == 0 and "mask=" not in source
    assert cut.count("tl.dot") == whole.count("tl.dot") == 2


# -- dense -------------------------------------------------------------------------------------------------
def test_sizes_that_change_and_eagers_bits(masks):
    def fn(q):
        return flex_attention(q, q, q, lambda s, b, h, i, j: s - (i - j).abs())

    f, exact = reflib.compile(fn), reflib.compile(fn, numerics="eager")
    for n in (40, 56, 33):
        q = torch.randn(1, 2, n, 8)
        torch.testing.assert_close(f(q), fn(q))
        torch.testing.assert_close(exact(q), fn(q), rtol=0, atol=0)


def test_a_score_function_that_uses_no_score(monkeypatch):
    """Its gradient is 0, forward and backward are fused; PyTorch's own backward raises an error."""
    monkeypatch.setattr(flex, "_validate_device", lambda *a: None)
    q, k, v, table = given()

    def fn(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, i, j: table[i - j + S])

    own = table.detach()[torch.arange(S)[:, None] - torch.arange(S) + S].softmax(-1)
    table = table.detach()
    out = reflib.compile(fn)(q, k, v)
    torch.testing.assert_close(out, own @ v)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert not grads[0].any() and not grads[1].any()
    torch.testing.assert_close(grads[2], own.mT @ (own @ v * 2))
    torch._dynamo.reset()
    e = reflib.explain(fn, q, k, v, target="sm_90")
    assert len(launches(e)) == 1 and len(launches(e.backward)) == 2


def test_float64_is_packaged_too(tmp_path):
    """By the dense formula, whose log-sum-exp is not what PyTorch says it is, a float32."""
    model = Alone(lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s - (i - j).abs()))
    q = torch.randn(1, 2, 20, 8, dtype=torch.float64)
    path = reflib.aot_compile(model, (q,), tmp_path / "f.reflib", archs=["cpu"])
    torch.testing.assert_close(reflib.load(path)(q), model(q), rtol=1e-12, atol=1e-12)


def test_a_captured_tensor_that_is_not_contiguous_is_exported(tmp_path):
    """PyTorch refuses it, unless it is asked strictly; the error says both ways out."""
    q, bias = torch.randn(1, 2, 20, 8), torch.randn(20, 40)[:, ::2].t()

    def scored(q, bias):
        return flex_attention(q, q, q, lambda s, b, h, i, j: s + bias[i, j])

    def package(model):
        args = (q, bias) if isinstance(model, torch.nn.Module) else None
        return reflib.load(reflib.aot_compile(model, args, tmp_path / "f.reflib", archs=["cpu"]))

    with pytest.raises(reflib.ReflibError, match=r"not tracked with proxy(?s:.*)give it x.contiguous\(\), or export"):
        package(Alone(scored))
    strict = torch.export.export(Alone(scored), (q, bias), strict=True)
    for model in (Alone(lambda q, bias: scored(q, bias.contiguous())), strict):
        torch.testing.assert_close(package(model)(q, bias), scored(q, bias))
