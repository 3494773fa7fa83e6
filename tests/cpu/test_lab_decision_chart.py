"""Pictures of decisions: every candidate is in them, the failed ones with their reason."""

import json
from dataclasses import replace

import pytest
import torch

import reflib
from reflib import lab
from reflib.ir.decision import Candidate, Decision, Key
from reflib.lab.rows import ROWS_FILE

TIMED = tuple(Candidate(Key(f"tiled {i}"), "ok", 10.0 + i, 9.0 + i, 10.0 + i, 0.05, 1e-6) for i in range(20))
DECISION = Decision(
    "op0",
    (Key("split(k=4)"),),
    (
        Candidate(Key("eager"), "ok", 7.0, 6.0, 7.0, spread=0.02, error=1e-6),
        Candidate(Key("split(k=4)"), "ok", 4.0, 3.5, 4.0, 0.5, 2e-6, "weights not quite cold: 3 copies"),
        Candidate(Key("worst"), "ok", 400.0, 399.0, 400.0, why="out after a short round"),
        *TIMED,
        Candidate(Key("bad"), "raised", why="ValueError: not today"),
    ),
    "split(k=4) is faster",
)


@pytest.fixture(scope="module")
def e():
    @torch.library.custom_op("lab_tests::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        torch.randn(300, 300) @ torch.randn(300, 300)
        return x / 2

    @halved.register_fake
    def _(x):
        return torch.empty_like(x)

    def half(x):
        return x * 0.5

    def wrong(x):
        return x * 0.25

    reflib.register_custom_op_autotuning(halved, configs=[half, wrong])
    return reflib.explain(lambda x: halved(x + 1).relu(), torch.randn(64, 64), autotune="blocking", dynamic=False)


def test_every_candidate_is_drawn_or_counted_with_its_time_or_reason():
    picture = lab.candidates(DECISION, caption="c")
    assert "split(k=4): 4.00 chosen, spread 2" in picture.alt and "eager: 7.00 (1.75x)" in picture.alt
    assert "and 11 slower candidates" in picture.alt and "bad: raised: ValueError: not today" in picture.alt
    assert picture.alt.index("split(k=4)") < picture.alt.index("eager") < picture.alt.index("tiled 0")
    assert "and 11 slower" not in lab.candidates(DECISION, caption="c", most=99).alt


def test_a_winner_beyond_the_limit_is_drawn_all_the_same():
    picture = lab.candidates(replace(DECISION, winners=(Key("worst"),)), caption="c", most=3)
    assert "worst: 400 (100.00x) chosen" in picture.alt


def test_a_panel_a_place_and_another_for_a_recording():
    rows = tuple(replace(c, where=w) for w in ("m=8", "m=64") for c in DECISION.candidates[:2])
    own = lab.decision_rows("here", replace(DECISION, candidates=rows))
    other = lab.Rows(replace(r, device="NVIDIA H200") for r in own)
    alt = lab.candidates(own, caption="c", recorded=other).alt
    assert alt.count("split(k=4): 4.00 chosen") == 4 and "m=64 (recorded)" in alt and "H200" in alt
    assert "(recorded)" not in lab.candidates(own, caption="c", recorded=own).alt


def test_rows_of_a_decision_reach_the_recording_and_drawing_adds_none(tmp_path, monkeypatch):
    monkeypatch.setenv(ROWS_FILE, str(tmp_path / "rows"))
    rows = lab.decision_rows("problem", DECISION, k=4096)
    lab.candidates(DECISION, caption="c")
    kept = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(kept) == len(rows) and all(r["at"] == {"k": 4096} for r in kept)
    assert rows.value("split(k=4)") == 4.0 and rows.value("split(k=4)", "time, all warm") == 3.5
    assert rows.value("split(k=4)", "error") == 2e-6
    assert rows.where(case="bad")[0].status == "raised"
    assert rows.where(case="split(k=4)", metric="time")[0].spread == 2.0


def test_nothing_timed_is_nothing_drawn(capsys):
    none = Decision("k0", (), (Candidate(Key("heuristic"), "heuristic"),), "")
    assert lab.candidates(none, caption="c") is None
    assert "Nothing to draw" in capsys.readouterr().out


def test_before_a_choice_is_a_wall_and_afterwards_its_winner_is_part_of_a_kernel(e):
    assert e.decisions[0].winner == "half", e.decisions
    picture = lab.before_after(e, caption="c")
    assert "before: 2 kernels and 1 call" in picture.alt and "after: 1 kernel, " in picture.alt
    assert "? lab_tests.halved 3 ways" in picture.alt or "halved" in picture.alt
    assert picture.alt.endswith("What holds a part of a winner: add, mul, relu.")
    assert picture.svg == lab.before_after(e, caption="c").svg
    assert "wrong: wrong" in lab.candidates(e.decisions[0], caption="c").alt


def test_when_the_eager_op_stays_it_is_what_holds_the_winner():
    args = torch.randn(8, 8192), torch.randn(8192, 8)
    with lab.told_times(lambda name, sizes: 1.0 if name == "aten" else 2.0):
        e = reflib.explain(lambda x, y: torch.relu(x @ y), *args, autotune="blocking", dynamic=False)
    assert lab.before_after(e, caption="c").alt.endswith("What holds a part of a winner: mm (a call).")
