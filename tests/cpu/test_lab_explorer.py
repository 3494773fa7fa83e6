"""Candidates over shapes: as rows and as a figure to click through; ratios; a peer at several places."""

import json
from dataclasses import replace

import pytest

from reflib import lab
from reflib.errors import LabError
from reflib.ir.decision import Candidate, Decision, Key
from reflib.lab import explorer, ratio_chart
from reflib.lab.moving import MIME
from reflib.lab.rows import ROWS_FILE, Row, Rows

SPLIT = "triton split 16x32x128 w2 s5 splits 64+32"


@pytest.fixture(autouse=True)
def here():
    return lab.setup(device="cpu", quiet=True)


def decision(fastest: str = SPLIT) -> Decision:
    names = ["aten", SPLIT, "triton split 16x32x128 w4 s3 splits 64", "decompose_k(k_splits=64)"]
    rows = [Candidate(Key(n), "ok", 4.0 if n == fastest else 6.0, 6.0, None, 0.05, 1e-4) for n in names]
    more = {k: Key(f"triton tiled 16x16x{k} w2 s3") for k in range(16, 36)}
    rows += [Candidate(key, "ok", 9.0 + k, None, None, 0.02, 1e-4) for k, key in more.items()]
    rows.append(Candidate(Key("triton persistent 64x128x64 w4 s3"), "error", why="no"))
    return Decision("op0", (Key(fastest),), tuple(rows), "it is fastest", op="aten.mm")


def sweep() -> Rows:
    a = lab.candidate_rows(decision(), {"M": 32, "N": 32, "K": 16384}, {SPLIT: 3.5, "not there": 1.0})
    b = lab.candidate_rows(decision("aten"), {"M": 1024, "N": 1024, "K": 1024})
    return Rows([*a, *b])


def test_a_decisions_candidates_are_rows_that_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv(ROWS_FILE, str(tmp_path / "rows"))
    rows = lab.candidate_rows(decision(), {"M": 1, "N": 2, "K": 3}, {SPLIT: 3.5})
    written = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(written) == len(rows) and Row.from_data(written[0]).case == "aten"
    assert rows.value(SPLIT) == 4.0 and rows.value(SPLIT, "predicted") == 3.5 and rows.value(SPLIT, "error") == 1e-4
    (winner,) = rows.where(metric="winner")
    assert winner.case == SPLIT and winner.value == 1.5
    (failed,) = rows.where(status="error")
    assert failed.value is None and failed.note == "no"


def test_the_figure_is_of_the_fastest_and_the_default():
    shapes, candidates = explorer.tables(sweep())
    assert [s["winner"] for s in shapes] == [SPLIT, "aten"] and shapes[0]["ratio"] == 1.5
    first = [c for c in candidates if c["K"] == 16384]
    assert len(first) == explorer.SHOWN and sum(c["chosen"] for c in first) == 1
    names = [c["name"] for c in first]
    assert "split 16x32x128 / 64 #2" in names and len(set(names)) == len(names)


def test_the_figure_has_a_form_for_every_reader(capsys):
    found = lab.explore(sweep(), caption="A caption.")
    bundle = found._repr_mimebundle_()
    assert set(bundle) == {MIME, "text/plain"}
    json.dumps(bundle[MIME])
    assert found.alt == found.spec["description"] and found.spec["usermeta"]["caption"] == "A caption."
    assert f"32 x 32 x 16384: {SPLIT}, 4.00 µs, 1.50 times as fast" in found.alt
    assert lab.explore(sweep(), caption="A caption.").spec == found.spec, "the same rows give the same figure"
    with pytest.raises(LabError, match="caption"):
        lab.explore(sweep(), caption=" ")
    assert lab.explore(Rows(), caption="none") is None and "Nothing to draw" in capsys.readouterr().out


def test_recorded_rows_of_other_devices_can_be_picked():
    rows = sweep()
    recorded = Rows(replace(r, device="NVIDIA H200") for r in rows)
    spec = lab.explore(rows, recorded=Rows([*recorded, *rows]), caption="c").spec
    devices = spec["params"][0]["bind"]["options"]
    assert len(devices) == 2 and devices[1] == "H200 (recorded)"


def timed(case, K, value, device=""):
    return Row("t", case, "time", value, "µs", 0.1, at={"M": 1, "K": K, "N": 1}, device=device,
               status="ok" if value else "crashed")  # fmt: skip


def test_ratios_leave_out_what_has_no_number():
    rows = Rows([timed("eager", 8, 4.0), timed("a", 8, 2.0), timed("eager", 16, 4.0), timed("a", 16, None)])
    assert ratio_chart.speeds(rows, "eager", ("M", "K", "N")) == {"a": {"1 x 8 x 1": 2.0}}
    picture = lab.ratios(rows, caption="c")
    assert "a: 1 x 8 x 1: 2.00; geometric mean 2.00" in picture.alt
    two = lab.ratios(rows, recorded=Rows(replace(r, device="other") for r in rows), caption="c")
    assert "other (recorded), a" in two.alt
    assert lab.ratios(Rows(), caption="c") is None


def test_predictions_are_drawn_with_what_they_miss():
    picture = lab.predicted_plot({"split-K": [(2.0, 4.0), (3.0, 6.0)], "ATen": []}, caption="c")
    assert "split-K: 2, measured 2.00 times the prediction" in picture.alt
    assert lab.predicted_plot({}, caption="c") is None


PEER = """
import os, time, torch
def make(device, dtype, n):
    if n == 2:
        raise ValueError("two")
    if n == 3:
        os._exit(3)
    if n == 5:
        time.sleep(100)
    x = torch.zeros(n, device=device, dtype=dtype)
    return lambda: x + 1
"""


@pytest.mark.usefixtures("forked_children")
def test_a_peer_walks_on_after_it_died_at_one_place():
    places = [{"n": n} for n in (1, 2, 3, 4)]
    rows = lab.measure_peer("t", "peer", PEER, places, rounds=5, budget_s=0.05, timeout_s=120)
    assert [r.status for r in rows.where(metric="time")] == ["ok", "refused", "crashed", "ok"]
    assert [r.at["n"] for r in rows] == [1, 2, 3, 4] and "own process" in rows[0].note
