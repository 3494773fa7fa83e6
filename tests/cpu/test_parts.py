"""Questions that several ranks measure in parts: what is compared is the ratio to the default on each rank's device."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import reflib
from reflib import pipeline
from reflib.autotune.parts import LEAST, joined, parts_of
from reflib.autotune.question import Question, question_of
from reflib.autotune.store import Outcome
from reflib.autotune.winner import NOISE, pick_winner
from reflib.ir.decision import Candidate
from reflib.ir.program import Choice
from reflib.options import Options
from reflib.ranks.share import FEW, most_parts, place
from reflib.target import parse_target

RNG = random.Random(22)
SIZES = [tuple(8 * RNG.randrange(8, 512) for _ in range(3)) for _ in range(4)]


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """Of products with an activation, of random sizes, for a GPU."""

    def fn(*args: Any) -> list[torch.Tensor]:
        return [(x @ w).relu() for x, w in zip(args[::2], args[1::2], strict=True)]

    seen: list[Any] = []
    kept = pipeline._STAGE["autotune"]
    pipeline._STAGE["autotune"] = lambda s: (seen.append(s.program), kept(s))[1]
    try:
        given = [torch.empty(s, dtype=torch.bfloat16) for m, k, n in SIZES for s in ((m, k), (k, n))]
        reflib.explain(fn, *given, target="sm_90", dynamic=False)
    finally:
        pipeline._STAGE["autotune"] = kept
    target, options = parse_target("sm_90"), Options.make({"autotune": "blocking"})
    choices = [n for n in seen[0].nodes if isinstance(n, Choice)]
    assert len(choices) == len(SIZES)
    return [question_of(seen[0], choice, target, options, {}) for choice in choices]


def test_each_candidate_is_in_one_part(questions: list[Question]) -> None:
    for q in questions:
        for most in range(1, 12):
            parts = parts_of(q, most, {q.default})
            others = [[k for k in p.candidates if k != q.default] for p in parts]
            assert sorted(str(k) for mine in others for k in mine) == sorted(map(str, list(q.candidates)[1:]))
            assert len(parts) == max(1, min(most, (len(q.candidates) - 1) // LEAST))
            assert all(p.default == q.default for p in parts) and len({p.text for p in parts}) == len(parts)
            for mine in others:  # one compiler's report is about both
                assert all(replace(k, apart=False) in mine for k in mine if k.apart)


def measured(q: Question, us: dict[Any, float], slower: float, rng: random.Random) -> Outcome:
    """As a rank would, whose device is so much slower."""
    rows = [Candidate(k, "ok", us[k] * slower, us[k] * slower, spread=0.01) for k in q.candidates]
    rows = [replace(r, dropped=True) if us[r.key] > 1.5 * min(us[k] for k in q.candidates) else r for r in rows]
    failed = rng.choice([None, *rows[1:]])
    rows = [Candidate(r.key, "wrong") if r is failed else r for r in rows]
    winner, reason = pick_winner(rows, str(q.default))
    return Outcome((q.named[winner],), tuple(rows), reason)


def test_parts_decide_as_one_device_would(questions: list[Question]) -> None:
    rng = random.Random(4)
    for trial in range(60):
        q = questions[trial % len(questions)]
        us = {k: rng.uniform(50, 100) for k in q.candidates}
        parts = parts_of(q, rng.randrange(2, 5), {q.default})
        found = [measured(p, us, rng.uniform(0.7, 1.5), rng) for p in parts]
        outcome = joined(q, found, q.default)
        right = {r.key for o in found for r in o.rows if r.status == "ok"}
        best = min(right, key=lambda k: us[k])
        wanted = best if us[q.default] / us[best] - 1 > NOISE else q.default
        assert outcome.winners == (wanted,), (outcome.reason, us)
        assert [r.key for r in outcome.rows] == list(q.candidates)
        base = outcome.rows[0].time_us
        assert base and all(abs(r.time_us / base - us[r.key] / us[q.default]) < 1e-9 for r in outcome.rows if r.time_us)


def test_a_default_that_fails_in_one_part(questions: list[Question]) -> None:
    """It has no time there: what that part measured counts as it is; the default's own time is another part's."""
    q = questions[0]
    us = {k: 60.0 + i for i, k in enumerate(q.candidates)}
    first, second = (measured(p, us, 1.0, random.Random(1)) for p in parts_of(q, 2, {q.default}))
    lost = replace(first, rows=(Candidate(q.default, "crashed", why="signal 11"), *first.rows[1:]))
    outcome = joined(q, [lost, second], q.default)
    assert outcome.rows[0].status == "crashed" and outcome.winners != (q.default,)
    nothing = [
        Outcome((w,), tuple(Candidate(k, "skipped") for k in p.candidates), "unmeasured")
        for p, w in zip(parts_of(q, 2, {q.default}), (q.default, list(q.candidates)[2]), strict=True)
    ]
    assert joined(q, nothing, q.default).winners == (list(q.candidates)[2],)  # what runs without tuning stays


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 1000])
def test_no_rank_is_idle_in_the_last_round(size: int) -> None:
    for count in range(20):
        whole, left = divmod(count, size)
        found = [most_parts(i, count, size) for i in range(count + 3)]
        assert found[:count] == [1] * (whole * size) + [1 if size > FEW else size // left for _ in range(left)]
        assert all(1 <= n <= size for n in found[count:])  # there were more than it was thought
        dealt = [place(i, j, n, count, size) % size for i, n in enumerate(found[:count]) for j in range(n)]
        load = [dealt.count(rank) for rank in range(size)]
        assert sum(load) == sum(found[:count]) and max(load) - min(load) <= 1
