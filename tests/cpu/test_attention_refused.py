"""Attention that is left as it is written, and why."""

import logging
import random

import pytest
import torch
import torch.nn.functional as F

from reflib.capture import attention_call
from tests.attention_cases import INF, Rewritten, calls, causal, operators, qkv
from tests.attention_cases import of_any_length as of_any_length
from tests.checking import check


def returns_scores(q, k, v):
    s = q @ k.mT
    return s.softmax(-1) @ v, s


def written_between(q, k, v):
    v = v.clone()
    out = (q @ k.mT).softmax(-1)
    v.add_(1)
    return out @ v


def written_bias(q, k, v):
    bias = torch.zeros_like(q @ k.mT)
    bias += q @ k.mT
    return bias.softmax(-1) @ v


def half(t):
    return t.bfloat16()


REFUSED = {  # why -> what
    "scores are needed elsewhere": returns_scores,
    "probabilities are needed elsewhere": lambda q, k, v: ((p := (q @ k.mT).softmax(-1)) @ v, p),
    "eager's random numbers": lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v,
    "not over the last": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "leaves them a weight": lambda q, k, v: (q @ k.mT).masked_fill(causal(q.shape[2]), -100.0).softmax(-1) @ v,
    "computed again": lambda q, k, v: torch.utils.checkpoint.checkpoint(operators, q, k, v, use_reentrant=False),
    "is among what makes the scores": lambda q, k, v: (torch.tanh(q @ k.mT / 30) * 30).softmax(-1) @ v,
    "no positive number": lambda q, k, v: (q @ k.mT * -0.5).softmax(-1) @ v,
    "wider than the scores": lambda q, k, v: half((half(q) @ half(k).mT + q.mean()[None]).softmax(-1)) @ half(v),
    "between the two products": written_between,
    "writes to a bias": written_bias,
    "done to the probabilities": lambda q, k, v: (q @ k.mT).softmax(-1).masked_fill(causal(q.shape[2]), 0.0) @ v,
    "several numbers": lambda q, k, v: (
        (q @ k.mT).masked_fill(c := causal(q.shape[2]), -1e9).masked_fill(c.mT, -INF).softmax(-1) @ v
    ),
    "scores can change": lambda q, k, v: (
        ((q @ k.mT).masked_fill(causal(q.shape[2]), -1e4) + torch.arange(q.shape[2]) * 1.0).softmax(-1) @ v
    ),
    "no fused kernel": lambda q, k, v: (q @ k.mT).softmax(-1) @ torch.cat((v, v), -1),
    "dimensions": lambda q, k, v: (q[None] @ k.mT).softmax(-1) @ v,
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFLIB_LOGS", "attention")
    fn = REFUSED[why]
    left = Rewritten(fn)
    with caplog.at_level(logging.INFO, "reflib.attention"):
        check(fn, left, *qkv(50))
    assert left.names() == ["softmax"] and why in caplog.text


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


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "width", "biased", "short"),
    [
        (3000, 16, 32, 96, False, True), (3000, 64, 80, 96, False, False), (3000, 49, 49, 32, False, False),
        (30, 16, 32, 96, False, False), (3690, 64, 64, 32, True, True),
        (1320, 49, 49, 32, True, False), (1320, 128, 128, 64, True, False),
        (60, 64, 64, 32, True, False),
    ],
)  # fmt: skip
def test_short_lengths_on_a_gpu(heads: int, queries: int, keys: int, width: int, biased: bool, short: bool) -> None:
    """Where a fused kernel's tiles would be padding, and there are many of them."""
    assert attention_call._short(torch.empty(heads // 6, 6, queries, keys, device="meta"), width, biased) == short


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "width", "biased", "serial"),
    [
        (10, 212, 4242, 504, True, True), (10, 212, 4242, 504, False, True), (8, 32, 4096, 64, True, True),
        (8, 32, 4096, 64, False, False), (96, 512, 512, 64, True, False), (16, 2048, 2048, 128, True, False),
        (1024, 1, 4096, 128, True, False), (1, 4096, 4096, 512, False, True), (1, 32768, 32768, 512, False, False),
    ],
)  # fmt: skip
def test_few_blocks_on_a_gpu(heads: int, queries: int, keys: int, width: int, biased: bool, serial: bool) -> None:
    """Where the kernel has few blocks that go through all keys, or wide ones; not where scores fill memory."""
    assert attention_call._serial(torch.empty(heads, 1, queries, keys, device="meta"), width, biased) == serial


@pytest.mark.parametrize("seed", range(3))
def test_more_heads_or_fewer_keys_are_never_worse_for_the_fused_kernel(seed: int) -> None:
    """Few blocks are the reason: with many times the heads, narrow, it is the fused kernel."""
    rng = random.Random(seed)
    queries, keys, width = rng.randrange(8, 64), rng.randrange(2000, 9000), 8 * rng.randrange(4, 17)
    few, many = (torch.empty(1, n, queries, keys, device="meta") for n in (rng.randrange(1, 9), 1024))
    assert attention_call._serial(few, width, True) and not attention_call._serial(many, width, True)


def test_switched_off() -> None:
    args = qkv(52)
    assert calls(operators, *args, attention=False, target="cpu") == ["aten.bmm.default"] * 2
    assert len(calls(operators, *args, target="cpu")) == 1
