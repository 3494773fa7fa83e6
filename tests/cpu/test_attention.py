"""Attention written by hand: which spellings become one call, with eager's numbers."""

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reflib
from reflib.capture.attention_call import hidden, named
from reflib.ir.program import Extern
from tests.attention_cases import INF, LOWEST, Rewritten, becomes_a_call, calls, causal, operators, padding, qkv, sizes
from tests.attention_cases import of_any_length as of_any_length
from tests.checking import check
from tests.semantics import Compiled


# -- spellings --------------------------------------------------------------------------------------
def in_float32(q, k, v):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.float().softmax(-1).to(q.dtype) @ v


def einsums(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # batch, length, heads, width
    scores = torch.einsum("bihd,bjhd->bhij", q, k).mul_(q.shape[-1] ** -0.5)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(3), v).contiguous()


def with_dropout_off(q, k, v):
    p = F.dropout(F.softmax((q @ k.mT) / 4, -1), 0.1, training=False)
    return nn.Dropout(0.0)(p).contiguous() @ v


def by_tensors(q, k, v):
    scores = q @ k.mT / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype, device=q.device)
    return (scores * torch.tensor(0.5)).softmax(-1) @ v


def grouped(q, k, v):
    """Every second head of k and v is used twice."""
    b, h, n, d = q.shape
    q = torch.cat([q, q], 1)
    repeat = lambda t: t[:, :, None].expand(b, h, 2, n, d).reshape(b, 2 * h, n, d)  # noqa: E731
    return (q @ repeat(k).mT / d**0.5).softmax(-1) @ repeat(v)


def by_name(q, k, v):
    """Operands given by name, as BLOOM gives them to baddbmm."""
    scores = torch.mul(input=torch.matmul(input=q, other=k.mT), other=0.3).add(other=q.new_ones(k.shape[2]))
    return torch.matmul(input=F.softmax(input=scores, dim=-1), other=v)


def by_name_after_a_bias(q, k, v):
    b, h, n, _ = q.shape
    joined = [t.flatten(0, 1) for t in (q, k.mT)]
    scores = q.new_ones(b * h, 1, k.shape[2]).baddbmm(batch1=joined[0], batch2=joined[1], beta=0.5, alpha=0.3)
    return torch.bmm(input=scores.view(b, h, n, -1).softmax(-1).flatten(0, 1), mat2=v.flatten(0, 1))


PLAIN: dict[str, Any] = {
    "methods": lambda q, k, v: q.mul(0.3).matmul(k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2),
    "scaled later": lambda q, k, v: F.softmax(q @ k.permute(0, 1, 3, 2) * 0.2, -1, dtype=torch.float32).matmul(v),
    "ends with an einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bihd", (q @ k.mT).softmax(-1), v) * 2,
    "one head of keys": lambda q, k, v: (q @ k[:, :1].mT / 4).softmax(-1) @ v[:, :1],
    "outer product": lambda q, k, v: (q @ k.mT).softmax(-1) @ v + q,
    **{f.__name__: f for f in (operators, in_float32, einsums, with_dropout_off, by_tensors, grouped, by_name)},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PLAIN)
def test_spellings(name: str) -> None:
    becomes_a_call(PLAIN[name], *qkv([*PLAIN].index(name), grad=True), backward=True, dynamic=True)


def test_a_bias_and_operands_by_name() -> None:
    becomes_a_call(by_name_after_a_bias, *qkv(61, grad=True), backward=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """One call in each direction, between kernels of ours, and what rows add that the mask may hide."""

    def fn(q, k, v, mask):
        return added(q * 2, k, v, mask).relu()

    args, (b, _, n, _) = qkv(60, grad=True), sizes(60)
    compiled = Compiled(fn, dynamic)
    check(fn, compiled, *args, padding(n, b, LOWEST), backward=True)
    found = [[str(n.target) for n in s.program.nodes if isinstance(n, Extern)] for s in compiled.stages]
    flash = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert found == [[f"{flash}.default"], ["aten.bmm.default"] * 2 + [f"{flash}_backward.default"]]


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


def windows(x, heads, bias=None):
    """Hiera's: batch, heads, windows, tokens, width."""
    b, n, c = x.shape
    q, k, v = x.reshape(b, n // 6, 6, 3, heads, c // (3 * heads)).permute(3, 0, 4, 2, 1, 5)
    scores = (q * 0.3) @ k.transpose(-1, -2)
    scores = scores if bias is None else scores + bias
    return (scores.softmax(-1) @ v).transpose(1, 3).reshape(b, -1, c // 3)


@pytest.mark.parametrize("number", range(5))
def test_products_of_more_dimensions(number: int) -> None:
    draw = random.Random(60 + number)
    b, h, n, d = sizes(60 + number)
    x = torch.randn(b, 6 * n, 3 * h * d, requires_grad=True)
    shapes = [None, (n, n), (6, n, n), (h, 1, 1, n), (b, 1, 6, n, n)]
    bias = () if number == 0 else (torch.randn(shapes[number], dtype=torch.float32),)
    fn = lambda x, *bias: windows(x.reshape(b, -1, 3 * h * d), h, *bias)  # noqa: E731
    rows = [t.detach().requires_grad_() for t in torch.randn(3, 2, b, h, draw.randint(2, 4), n, d)]
    becomes_a_call(lambda *t: fn(*t), x, *bias, backward=True, dynamic=number == 2)
    becomes_a_call(operators, *rows, backward=True)
    order = "abhnd,abhmd->abhnm"
    becomes_a_call(
        lambda q, k, v: (torch.einsum(order, q, k) / 4).softmax(-1) @ v, *(t.flatten(1, 2) for t in rows), backward=True
    )


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
    return lambda q, k, v, mask: (q @ k.mT / 4).masked_fill(mask == 0, low).softmax(-1) @ v


def filled_in_place(q, k, v, mask):
    scores = q @ k.mT / 4
    scores.masked_fill_(mask == 0, -INF)
    return scores.softmax(-1) @ v


BOOLEAN: list[Any] = [
    filled(-INF), filled(-1e9), filled(-1e4), filled_in_place,
    lambda q, k, v, mask: torch.where(mask > 0, q @ k.mT, torch.full([], LOWEST)).softmax(-1) @ v,
    lambda q, k, v, mask: (q @ k.mT).where(mask > 0, -1e9).softmax(-1) @ v,
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(BOOLEAN)))
def test_boolean_masks(i: int) -> None:
    """Also with a row in which all is masked: NaN or an average, and its gradients, as in eager."""
    fn, args = BOOLEAN[i], qkv(20 + i, grad=True)
    b, _, n, _ = sizes(20 + i)
    literal = i in (0, 3, 5)  # Dynamo makes symbols of other floats
    becomes_a_call(fn, *args, causal(n), backward=True, dynamic=literal)
    dead = causal(n).repeat(b, 1, 1, 1)
    dead[1, :, 3] = False
    becomes_a_call(fn, *args, dead, backward=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("fn", [added, added_in_place, added_twice], ids=lambda f: f.__name__)
@pytest.mark.parametrize("low", [0.5, -INF, LOWEST])
def test_added_masks(fn: Any, low: float) -> None:
    args, (b, _, n, _) = qkv(31, grad=True), sizes(31)
    mask = padding(n, b, -30.0 if fn is added_twice and low != 0.5 else low)
    becomes_a_call(fn, *args, mask, backward=True, dynamic=True)


def test_rows_in_which_all_is_masked_by_a_bias() -> None:
    """-inf: NaN. finfo.min: the same weight for all."""
    args, (b, _, n, _) = qkv(32, grad=True), sizes(32)
    mask = padding(n, b, -INF)
    mask[1, :, 2] = -INF
    becomes_a_call(added, *args, mask, backward=True)
    mask = mask.clamp(min=LOWEST)
    becomes_a_call(added, *args, mask, backward=True)
    q, k, v = args
    for low in (-1e4, -1e9):  # eager's scores lose digits beside these
        got = Rewritten(added)(q, k, v, mask.clamp(min=low))
        want = added(q.double(), k.double(), v.double(), mask.clamp(min=low).double())
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def hidden_by(mask: Any) -> Any:
    """Attention with an additive ``mask(q, keep)``."""

    def fn(q, k, v, keep):
        low = mask(q, keep)  # (before the product)
        return (q @ k.mT * 0.3 + low).softmax(-1) @ v

    return fn


def lowest(q: Any) -> float:
    return torch.finfo(q.dtype).min


def triangle(q: Any, keep: Any) -> Any:
    return torch.full((q.shape[2], q.shape[2]), lowest(q), dtype=q.dtype).triu(1)


def by_padding(q: Any, keep: Any) -> Any:
    return torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, lowest(q))[:, None, None]


def written_later(q: Any, keep: Any) -> Any:
    mask = torch.zeros_like(keep, dtype=q.dtype)
    mask[~keep] = lowest(q)
    return mask[:, None, None]


def added_to_zeros(q: Any, keep: Any, method: bool = False) -> Any:
    mask = torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype)
    if method:
        mask.__iadd__(torch.full_like(mask, lowest(q)))
    else:
        mask += torch.full_like(mask, lowest(q))
    return mask


HIDDEN = {
    "by keys": lambda q, keep: ((1 - keep.to(q.dtype)) * lowest(q))[:, None, None],
    "by two": lambda q, keep: by_padding(q, keep) + triangle(q, keep),
    "written later": written_later,
    "added by a method": lambda q, keep: added_to_zeros(q, keep, method=True),
    "added in place": added_to_zeros,
    "known": triangle,
}


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", HIDDEN)
def test_gradients_of_rows_that_a_number_hides(name: str, dtype: torch.dtype) -> None:
    """Those of scores that change no result are eager's. Where two masks hide, it is left alone; without gradients it
    is not, and nothing is added where no row can be hidden."""
    fn, rng = hidden_by(HIDDEN[name]), random.Random(f"{name} {dtype}")
    b, h, n, d = 2, rng.randint(1, 3), rng.randint(17, 40), 8 * rng.randint(1, 3)
    args = [torch.randn(b, h, n, d).to(dtype).requires_grad_() for _ in range(3)]
    keep = torch.rand(b, n) < 0.7
    keep[rng.randrange(b)] = False
    rewritten = Rewritten(fn)
    check(fn, rewritten, *args, keep, backward=True)
    assert rewritten.names() == ["softmax" if name == "by two" else "scaled_dot_product_attention"]
    added = [n for graph in rewritten.graphs for n in graph.graph.nodes if n.target is hidden]
    assert len(added) == (0 if name in ("by two", "known") else 1)
    with torch.no_grad():
        becomes_a_call(fn, *args, keep)


def test_gradients_of_rows_that_a_dynamic_number_hides() -> None:
    """(A float of a module, with dynamic sizes: an input of the graph.)"""
    lowest, rng = LOWEST, random.Random(5)

    def fn(q, k, v, keep):
        return (q @ k.mT * 0.3 + (keep.to(q.dtype) - 1)[:, None, None] * -lowest).softmax(-1) @ v

    b, n, d = 2, rng.randint(17, 40), 8 * rng.randint(1, 3)
    args, keep = [torch.randn(b, 2, n, d, requires_grad=True) for _ in range(3)], torch.rand(b, n) < 0.7
    keep[rng.randrange(b)] = False
    becomes_a_call(fn, *args, keep, backward=True, dynamic=True)


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


@pytest.mark.sample(3)
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
