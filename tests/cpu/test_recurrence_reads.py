"""What a recurrence reads at every step is stored where another kernel needs it too, and its steps in one kernel."""

import random

import torch
import torch.nn.functional as F

import reflib
from reflib.ir.loops import Indirect, LoopNest, Op
from tests.checking import check

R = random.Random(8)
STEPS, ROWS, CHOICES = R.randrange(9, 13), R.randrange(50_000, 70_000), R.randrange(6, 12)


def returns(a: torch.Tensor, b: torch.Tensor, at: torch.Tensor, reward: torch.Tensor, last: torch.Tensor) -> list:
    """Importance-weighted returns, from the last step to the first, and what is computed from all of these."""

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(x, -1).gather(-1, at[..., None])[..., 0]

    ratio = torch.exp(chosen(a) - chosen(b))
    clipped, decay = ratio.clamp(max=1.0), ratio.clamp(max=1.0) * 0.9
    delta, total, made = clipped * reward, last, []
    for i in reversed(range(len(reward))):
        total = delta[i] + decay[i] * total
        made.append(total + reward[i])
    values = torch.stack(made[::-1])
    return [values, clipped * (reward + torch.cat([values[1:], last[None]]))]


def _inputs(rows: int) -> list[torch.Tensor]:
    torch.manual_seed(R.randrange(1000))
    logits = [torch.randn(STEPS, rows, CHOICES) for _ in range(2)]
    return [*logits, torch.randint(CHOICES, (STEPS, rows)), torch.randn(STEPS, rows), torch.randn(rows)]


def test_what_is_stored_is_read() -> None:
    args = [x.bfloat16() if x.is_floating_point() else x for x in _inputs(ROWS)]
    with torch.no_grad():
        e = reflib.explain(returns, *args, target="sm_90")
    first, steps, *rest = e.fused.nodes
    assert len(rest) == 1
    for n in (steps, *rest):
        assert isinstance(n, LoopNest) and not any(isinstance(s, Indirect) for s in n.body), n
        assert not {s.op for s in n.body if isinstance(s, Op)} & {"exp", "log"}, n
    assert len(first.writes()) == 1 and len(steps.writes()) == 1, (first.writes(), steps.writes())


def test_values() -> None:
    check(returns, reflib.compile(returns, verify=True), *_inputs(37))
