"""Attention written by hand: which spellings become one call, with eager's numbers; which are left alone, and why."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reflib
from reflib.capture import attention_call
from reflib.capture.attention import attention, named
from reflib.ir.program import Extern
from reflib.options import Options
from reflib.pipeline import Backend
from tests.checking import check

INF, LOWEST = float("inf"), torch.finfo(torch.float32).min
Maker = Callable[..., tuple[Any, ...]]


@pytest.fixture(autouse=True)
def of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on CPUs where they are no faster, too."""
    monkeypatch.setattr(attention_call, "LONG", 0)


def sizes(seed: int) -> tuple[int, int, int, int]:
    """Batch, heads, length, width."""
    draw = random.Random(seed)
    return draw.randint(2, 3), draw.randint(2, 4), draw.randint(5, 21), draw.choice((8, 16, 24))


def qkv(seed: int, dtype: torch.dtype = torch.float32, grad: bool = False, flat: bool = False) -> list[torch.Tensor]:
    b, h, n, d = sizes(seed)
    g = torch.Generator().manual_seed(seed)
    shape = (b * h, n, d) if flat else (b, h, n, d)
    return [torch.randn(shape, generator=g).to(dtype).requires_grad_(grad) for _ in range(3)]


def padding(n: int, b: int, low: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Additive: the last keys of each row are masked, of the first batch all of one row."""
    mask = torch.zeros(b, 1, n, n, dtype=dtype)
    for i in range(b):
        mask[i, :, :, n - i - 1 :] = low
    return mask


def causal(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


class Rewritten:
    """``fn`` with attention found in it, and then run by eager."""

    def __init__(self, fn: Any, dynamic: bool | None = None, **options: Any):
        self.options, self.graphs = Options(**options), []
        self.compiled = torch.compile(fn, backend=self.backend, dynamic=dynamic)

    def backend(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(attention(module, self.options))
        return module

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)

    def names(self) -> list[str]:
        """What is called of attention and softmax."""
        found = [named(n) for graph in self.graphs for m in graph.modules() for n in m.graph.nodes]
        return [n for n in found if n in ("softmax", "scaled_dot_product_attention")]


def becomes_a_call(fn: Any, *args: Any, backward: bool = False, dynamic: bool | None = None) -> None:
    """One call, and eager's numbers."""
    torch._dynamo.reset()
    rewritten = Rewritten(fn, dynamic)
    check(fn, rewritten, *args, backward=backward)
    assert rewritten.names() == ["scaled_dot_product_attention"]


def calls(fn: Any, *args: Any, **options: Any) -> list[str]:
    """The library calls of attention and products in a compiled program."""
    torch._dynamo.reset()
    e = reflib.explain(fn, *args, **options)
    names = [str(n.target) for n in e.program.nodes if isinstance(n, Extern)]
    return [n for n in names if "attention" in n or "mm" in n]


# -- spellings --------------------------------------------------------------------------------------
def operators(q, k, v):
    return torch.softmax((q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1]), dim=-1) @ v


def methods(q, k, v):
    return q.mul(0.3).matmul(k.mT).softmax(-1).matmul(v).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def scaled_later(q, k, v):
    return torch.matmul(F.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) * 0.2, -1, dtype=torch.float32), v)


def einsums(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # batch, length, heads, width
    scores = torch.einsum("bihd,bjhd->bhij", q, k).mul_(q.shape[-1] ** -0.5)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(3), v).contiguous()


def ends_with_an_einsum(q, k, v):
    return torch.einsum("bhij,bhjd->bihd", (q @ k.mT).softmax(-1), v) * 2


def with_dropout_off(q, k, v):
    p = F.dropout(F.softmax((q @ k.mT) / 4, -1), 0.1, training=False)
    return nn.Dropout(0.0)(p).contiguous() @ v


def in_float32(q, k, v):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.float().softmax(-1).to(q.dtype) @ v


def by_tensors(q, k, v):
    scores = q @ k.mT / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype, device=q.device)
    return (scores * torch.tensor(0.5)).softmax(-1) @ v


def grouped(q, k, v):
    """Every second head of k and v is used twice."""
    b, h, n, d = q.shape
    q = torch.cat([q, q], 1)
    repeat = lambda t: t[:, :, None].expand(b, h, 2, n, d).reshape(b, 2 * h, n, d)  # noqa: E731
    return (q @ repeat(k).mT / d**0.5).softmax(-1) @ repeat(v)


def one_head_of_keys(q, k, v):
    return (q @ k[:, :1].mT / 4).softmax(-1) @ v[:, :1]


def outer_product(q, k, v):
    return (q @ k.mT).softmax(-1) @ v + q


PLAIN = [operators, methods, scaled_later, einsums, ends_with_an_einsum, with_dropout_off, in_float32, by_tensors,
         grouped, one_head_of_keys, outer_product]  # fmt: skip


@pytest.mark.parametrize("fn", PLAIN, ids=lambda f: f.__name__)
def test_spellings(fn: Any) -> None:
    becomes_a_call(fn, *qkv(PLAIN.index(fn), grad=True), backward=True, dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """One call in each direction, between kernels of ours."""

    def fn(q, k, v, mask):
        return added(q * 2, k, v, mask).relu()

    args, (b, _, n, _) = qkv(60, grad=True), sizes(60)
    stages: list[Any] = []
    compiled = torch.compile(fn, backend=Backend(Options(), stages.append), dynamic=dynamic)
    check(fn, compiled, *args, padding(n, b, LOWEST), backward=True)
    found = [[str(n.target) for n in s.program.nodes if isinstance(n, Extern)] for s in stages]
    flash = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert found == [[f"{flash}.default"], [f"{flash}_backward.default"]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fn", [operators, in_float32], ids=lambda f: f.__name__)
def test_dtypes(fn: Any, dtype: torch.dtype) -> None:
    if fn is operators or dtype != torch.float64:  # which would be rounded in between
        becomes_a_call(fn, *qkv(3, dtype, grad=True), backward=True)


def flat(q, k, v):
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.25).softmax(-1), v)


def flat_with_heads(heads: int):
    """As OPT and BART have it: batch and heads are one in the products, two where the mask is added."""

    def fn(q, k, v, mask):
        n = q.shape[1]
        scores = torch.bmm(q, k.transpose(1, 2)).view(-1, heads, n, n) + mask
        p = F.softmax(scores.view(-1, n, n), dim=-1)
        return torch.bmm(p, v).view(-1, heads, n, q.shape[2]).transpose(1, 2).reshape(-1, n, heads * q.shape[2])

    return fn


def alibi(heads: int):
    """BLOOM: the product adds the bias."""

    def fn(q, k, v, bias, mask):
        n = q.shape[1]
        scores = bias.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=0.25).view(-1, heads, n, n)
        p = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype).view(-1, n, n)
        return torch.bmm(p, v)

    return fn


def test_products_of_three_and_two_dimensions() -> None:
    b, h, n, _ = sizes(5)
    args = qkv(5, grad=True, flat=True)
    mask, bias = padding(n, b, LOWEST), torch.randn(b * h, 1, n)
    for fn, more in ((flat, ()), (flat_with_heads(h), (mask,)), (alibi(h), (bias, mask))):
        becomes_a_call(fn, *args, *more, backward=True)
    becomes_a_call(operators, *(t[0].detach() for t in args))


# -- masks ------------------------------------------------------------------------------------------
def added(q, k, v, mask):
    return (q @ k.mT / 4 + mask).softmax(-1) @ v


def added_in_place(q, k, v, mask):
    scores = q @ k.mT
    scores *= 0.25
    scores += mask
    return scores.softmax(-1) @ v


def added_twice(q, k, v, mask):
    return ((q @ k.mT + mask) / 4 + torch.arange(q.shape[2]) * 0.1 - mask.mT).softmax(-1) @ v


def filled(low: float) -> Any:
    def fn(q, k, v, mask):
        return (q @ k.mT / 4).masked_fill(mask == 0, low).softmax(-1) @ v

    return fn


def filled_in_place(q, k, v, mask):
    scores = q @ k.mT / 4
    scores.masked_fill_(mask == 0, -INF)
    return scores.softmax(-1) @ v


def chosen(q, k, v, mask):
    return torch.where(mask > 0, q @ k.mT, torch.full([], LOWEST)).softmax(-1) @ v


def chosen_by_method(q, k, v, mask):
    return (q @ k.mT).where(mask > 0, -1e9).softmax(-1) @ v


BOOLEAN = [filled(-INF), filled(-1e9), filled(-1e4), filled_in_place, chosen, chosen_by_method]


@pytest.mark.parametrize("i", range(len(BOOLEAN)))
def test_boolean_masks(i: int) -> None:
    """Also with a row in which all is masked: NaN or an average, and its gradients, as in eager."""
    fn, args = BOOLEAN[i], qkv(20 + i, grad=True)
    b, _, n, _ = sizes(20 + i)
    literal = i in (0, 3, 5)  # Dynamo makes symbols of other floats
    becomes_a_call(fn, *args, causal(n), backward=True, dynamic=literal)
    dead = causal(n).repeat(b, 1, 1, 1)
    dead[1, :, 3] = False
    if i in (0, 3):  # -inf: the gradient of v is NaN in eager
        args = [t.detach().requires_grad_(t is args[2]) for t in args]
    becomes_a_call(fn, *args, dead, backward=True)


@pytest.mark.parametrize("fn", [added, added_in_place, added_twice], ids=lambda f: f.__name__)
@pytest.mark.parametrize("low", [0.5, -INF, LOWEST])
def test_added_masks(fn: Any, low: float) -> None:
    args, (b, _, n, _) = qkv(31, grad=True), sizes(31)
    mask = padding(n, b, -30.0 if fn is added_twice and low != 0.5 else low)
    becomes_a_call(fn, *args, mask, backward=True, dynamic=True)


def test_rows_in_which_all_is_masked_by_a_bias() -> None:
    """-inf: NaN. finfo.min: the same weight for all, and no gradient through scores that do not count."""
    args, (b, _, n, _) = qkv(32, grad=True), sizes(32)
    mask = padding(n, b, -INF)
    mask[1, :, 2] = -INF
    becomes_a_call(added, *args, mask, backward=True)
    mask = mask.clamp(min=LOWEST)
    q, k, v = args
    becomes_a_call(added, q.detach(), k.detach(), v, mask, backward=True)
    grads = torch.autograd.grad(Rewritten(added)(q, k, v, mask).square().sum(), args)
    assert not grads[0][1, :, 2].any() and grads[0][0].all()
    for low in (-1e4, -1e9):  # eager's scores lose digits beside these
        got = Rewritten(added)(q, k, v, mask.clamp(min=low))
        want = added(q.double(), k.double(), v.double(), mask.clamp(min=low).double())
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_a_bias_that_learns() -> None:
    """PyTorch has no fused kernel for it on CPUs; without gradients it is a call."""
    args, (_, h, n, _) = qkv(33, grad=True), sizes(33)
    bias = torch.randn(1, h, n, n, requires_grad=True)
    left = Rewritten(added)
    check(added, left, *args, bias, backward=True)
    assert left.names() == ["softmax"]
    with torch.no_grad():
        becomes_a_call(added, *args, bias)


# -- whole models' attention ------------------------------------------------------------------------
class GPT2(nn.Module):
    def __init__(self, d: int = 32, heads: int = 4):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.register_buffer("bias", causal(32).view(1, 1, 32, 32), persistent=False)
        self.attn_dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.c_attn(x).split(d, dim=2))
        w = torch.matmul(q, k.transpose(-1, -2))
        w = w / torch.full([], v.size(-1) ** 0.5, dtype=w.dtype, device=w.device)
        causal_mask = self.bias[:, :, k.size(-2) - n : k.size(-2), : k.size(-2)]
        w = torch.where(causal_mask, w.to(w.dtype), torch.full([], torch.finfo(w.dtype).min, dtype=w.dtype))
        if attention_mask is not None:
            w = w + attention_mask
        w = self.attn_dropout(F.softmax(w, dim=-1).type(v.dtype))
        return self.c_proj(torch.matmul(w, v).permute(0, 2, 1, 3).contiguous().view(b, n, d))


class BERT(nn.Module):
    def __init__(self, d: int = 32, heads: int = 4):
        super().__init__()
        self.heads, self.query, self.key, self.value = heads, nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.dropout = nn.Dropout(0.1)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.size()[:-1], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        p = self.dropout(nn.Softmax(dim=-1)(scores + mask))
        context = torch.matmul(p, v).permute(0, 2, 1, 3).contiguous()
        return context.view(*context.size()[:-2], x.shape[-1])


class Llama(BERT):
    """Rotary positions, half as many heads of keys."""

    def __init__(self, d: int = 32, heads: int = 4):
        super().__init__(d, heads)
        self.key, self.value = nn.Linear(d, d // 2), nn.Linear(d, d // 2)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[2])[:, None] * torch.logspace(0, -2, x.shape[3])
        a, b = x.chunk(2, -1)
        return x * angle.cos() + torch.cat((-b, a), -1) * angle.sin()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (
            t.view(b, n, -1, d // self.heads).transpose(1, 2) for t in (self.query(x), self.key(x), self.value(x))
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t[:, :, None].expand(b, -1, 2, n, d // self.heads).reshape(b, self.heads, n, -1) for t in (k, v))
        w = torch.matmul(q, k.transpose(2, 3)) * (d // self.heads) ** -0.5
        w = w + mask[:, :, :, : k.shape[-2]]
        w = F.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype)
        w = F.dropout(w, p=0.0, training=self.training)
        return torch.matmul(w, v).transpose(1, 2).contiguous().reshape(b, n, -1).contiguous()


class T5(BERT):
    """A learned bias for each distance, no scale."""

    def __init__(self, d: int = 32, heads: int = 4):
        super().__init__(d, heads)
        self.relative = nn.Embedding(64, heads)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(3, 2))
        distance = torch.arange(n)[None, :] - torch.arange(n)[:, None] + 32
        bias = self.relative(distance).permute(2, 0, 1).unsqueeze(0) + mask
        scores += bias
        w = F.dropout(F.softmax(scores.float(), dim=-1).type_as(scores), p=0.1, training=self.training)
        return torch.matmul(w, v).transpose(1, 2).contiguous().view(x.shape[0], -1, x.shape[2])


class ViT(BERT):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        qkv = torch.cat((self.query(x), self.key(x), self.value(x)), -1)
        q, k, v = qkv.reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * (d // self.heads) ** -0.5) @ k.transpose(-2, -1)
        return (self.dropout(attn.softmax(dim=-1)) @ v).transpose(1, 2).reshape(b, n, d)


MODELS: dict[str, tuple[Any, bool]] = {  # with a mask?
    "GPT-2": (GPT2, False), "GPT-2, padded": (GPT2, True), "BERT": (BERT, True), "LLaMA": (Llama, True),
    "T5": (T5, True), "ViT": (ViT, False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    cls, masked = MODELS[name]
    model, x = cls().eval(), torch.randn(2, 12, 32)
    more = [padding(12, 2, LOWEST)] if masked else []
    with torch.no_grad():
        becomes_a_call(model, x, *more, dynamic=True)
    if name != "T5":
        becomes_a_call(model, x.requires_grad_(), *more, backward=True)


# -- other wrappers ---------------------------------------------------------------------------------
def test_other_wrappers(tmp_path: Any) -> None:
    model, x, mask = BERT().eval(), torch.randn(2, 12, 32), padding(12, 2, LOWEST)
    with torch.no_grad():
        check(model, reflib.compile(model, wrapper="cpp"), x, mask)
    n = torch.export.Dim("n", min=2, max=64)
    program = torch.export.export(model, (x, mask), dynamic_shapes=({1: n}, {2: n, 3: n}))
    before = str(program.graph)
    (call,) = [c for c in calls(program) if "attention" in c]
    assert call == "aten.scaled_dot_product_attention.default" and str(program.graph) == before
    check(model, reflib.compile(program), x, mask)
    path = reflib.aot_compile(model, (x, mask), tmp_path / "m.reflib", "cpu", dynamic_shapes=({1: n}, {2: n, 3: n}))
    with torch.no_grad():
        check(model, reflib.load(path), x, mask)
        check(model, reflib.load(path), torch.randn(2, 7, 32), padding(7, 2, -INF))


def test_a_result_of_export_that_is_the_call() -> None:
    args = qkv(41)
    program = torch.export.export(Alone(operators), tuple(args))
    assert calls(program) == ["aten.scaled_dot_product_attention.default"]
    check(operators, reflib.compile(program), *args)


class Alone(nn.Module):
    def __init__(self, fn: Any):
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


def test_autocast() -> None:
    def fn(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return operators(q, k, v)

    becomes_a_call(fn, *qkv(42, grad=True), backward=True)


def test_layers_share_what_is_made_of_the_mask() -> None:
    def twice(q, k, v, mask):
        return added(added(q, k, v, mask), k, v, mask)

    def written(q, k, v, mask):
        mask = mask.clone()
        once = added(q, k, v, mask)
        mask.add_(q[:1, :1, :, :1])
        return added(once, k, v, mask)

    args, (b, _, n, _) = qkv(43), sizes(43)

    def interleaved(q, k, v, mask):
        first = (q @ k.mT / 4 + mask).softmax(-1)
        return added(k, q, v, mask), first @ v

    for fn, times in ((twice, 1), (written, 2), (interleaved, 2)):
        torch._dynamo.reset()
        rewritten = Rewritten(fn)
        check(fn, rewritten, *args, padding(n, b, LOWEST))
        assert rewritten.names() == ["scaled_dot_product_attention"] * 2
        assert sum(named(n) == "amax" for n in rewritten.graphs[0].graph.nodes) == times


# -- what is left alone -----------------------------------------------------------------------------
def returns_scores(q, k, v):
    s = q @ k.mT
    return s.softmax(-1) @ v, s


def returns_probabilities(q, k, v):
    p = (q @ k.mT).softmax(-1)
    return p @ v, p


def drops(q, k, v):
    return F.dropout((q @ k.mT).softmax(-1), 0.5) @ v


def over_queries(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


def hardly_masked(q, k, v):
    return (q @ k.mT).masked_fill(causal(q.shape[2]), -100.0).softmax(-1) @ v


def capped(q, k, v):
    return (torch.tanh(q @ k.mT / 30) * 30).softmax(-1) @ v


def negative(q, k, v):
    return (q @ k.mT * -0.5).softmax(-1) @ v


def wider_bias(q, k, v):
    return (q.bfloat16() @ k.bfloat16().mT + q.mean()[None].float()).softmax(-1).bfloat16() @ v.bfloat16()


def written_between(q, k, v):
    v = v.clone()
    s = q @ k.mT
    out = s.softmax(-1)
    v.add_(1)
    return out @ v


def written_bias(q, k, v):
    bias = torch.zeros_like(q @ k.mT)
    bias += q @ k.mT
    return bias.softmax(-1) @ v


def masked_after(q, k, v):
    return (q @ k.mT).softmax(-1).masked_fill(causal(q.shape[2]), 0.0) @ v


def two_numbers(q, k, v):
    n = q.shape[2]
    return (q @ k.mT).masked_fill(causal(n), -1e9).masked_fill(causal(n).mT, -INF).softmax(-1) @ v


def filled_then_added(q, k, v):
    n = q.shape[2]
    return ((q @ k.mT).masked_fill(causal(n), -1e4) + torch.arange(n) * 1.0).softmax(-1) @ v


def wider_values(q, k, v):
    return (q @ k.mT).softmax(-1) @ torch.cat((v, v), -1)


def recomputed(q, k, v):
    return torch.utils.checkpoint.checkpoint(operators, q, k, v, use_reentrant=False)


def five_dimensions(q, k, v):
    return (q[None] @ k.mT).softmax(-1) @ v


REFUSED = {
    returns_scores: "scores are needed elsewhere",
    returns_probabilities: "probabilities are needed elsewhere",
    drops: "eager's random numbers",
    over_queries: "not over the last",
    hardly_masked: "leaves them a weight",
    recomputed: "computed again",
    capped: "is among what makes the scores",
    negative: "no positive number",
    wider_bias: "wider than the scores",
    written_between: "between the two products",
    written_bias: "writes to a bias",
    masked_after: "done to the probabilities",
    two_numbers: "several numbers",
    filled_then_added: "scores can change",
    wider_values: "no fused kernel",
    five_dimensions: "dimensions",
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda f: f.__name__)
def test_refused(fn: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFLIB_LOGS", "attention")
    left = Rewritten(fn)
    with caplog.at_level(logging.INFO, "reflib.attention"):
        check(fn, left, *qkv(50))
    assert left.names() == ["softmax"] and REFUSED[fn] in caplog.text


def test_a_softmax_of_no_attention_is_not_talked_about(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFLIB_LOGS", "attention")
    with caplog.at_level(logging.INFO, "reflib.attention"):
        Rewritten(lambda x: x.softmax(-1) * 2)(torch.randn(3, 4))
        assert "reflib.attention" not in {r.name for r in caplog.records}
        Rewritten(operators)(*qkv(51))
    assert "scaled_dot_product_attention" in caplog.text


def test_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU for 16-bit numbers, and for many keys."""
    monkeypatch.undo()
    for dtype, keys, expected in (
        (torch.float32, attention_call.LONG - 1, "softmax"),
        (torch.float32, attention_call.LONG, "scaled_dot_product_attention"),
        (torch.bfloat16, 9, "scaled_dot_product_attention"),
    ):
        torch._dynamo.reset()
        rewritten = Rewritten(operators)
        rewritten(*(torch.randn(1, 1, n, 8, dtype=dtype) for n in (3, keys, keys)))
        assert rewritten.names() == [expected]


def test_switched_off() -> None:
    args = qkv(52)
    assert calls(operators, *args, attention=False, target="cpu") == ["aten.bmm.default"] * 2
    assert len(calls(operators, *args, target="cpu")) == 1
