"""Attention that is left as it is written, and why."""

import logging
from typing import Any

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


def test_switched_off() -> None:
    args = qkv(52)
    assert calls(operators, *args, attention=False, target="cpu") == ["aten.bmm.default"] * 2
    assert len(calls(operators, *args, target="cpu")) == 1
