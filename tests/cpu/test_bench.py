"""What the benchmark rests on: nothing of a child is left, and a disturbed device is noticed."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reflib import lab
from reflib.lab.ranking import ALL_CASES
from reflib.lab.timing import Samples
from tests.bench import children, matmul, matmul_cases, matmul_report, matmul_worker, products, quiet
from tests.bench.contenders import EAGER, PEER_MAX, TUNED, US
from tests.processes import running, soon

# a worker in a session of its own, whose parent does not wait for it
PARENT = """import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(worker.pid))
time.sleep(float(sys.argv[2]))
"""


@contextlib.contextmanager
def parent(folder: Path, seconds: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """(A child that ends by itself after so long, a worker that it has started)."""
    (folder / "a_parent.py").write_text(PARENT)
    words, pid = [str(folder / "pid"), str(seconds)], folder / "pid"
    with children.started("a_parent", words, {"PYTHONPATH": str(folder)}, subprocess.DEVNULL) as child:
        assert soon(lambda: pid.exists() and pid.read_text(), 60)
        yield child, int(pid.read_text())


@pytest.mark.parametrize("seconds", [0, 600])
def test_a_childs_workers_end_with_it(tmp_path: Path, seconds: int) -> None:
    with parent(tmp_path, seconds) as (child, worker):
        assert running(worker)
        if not seconds:
            child.wait()
    assert bool(child.returncode) == bool(seconds) and not running(worker)


def test_all_that_is_left_is_found(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with parent(tmp_path, 600) as (child, worker):
            children.end_all()
            assert not running(worker) and not running(child.pid) and other.poll() is None
    finally:
        other.kill()
        other.wait()


class Scripted(quiet.Reference):
    """A reference whose samples are given: times idle, the last for ever."""

    def __init__(self, *values: float):
        self.device, self.patience, self.idle, self.fn = torch.device("cpu"), 1e9, 1.0, lambda: None
        self.values = values

        def told() -> Iterator[float]:
            yield from values
            while True:
                yield values[-1]

        self.sample = told().__next__


@pytest.mark.parametrize(
    "readings, attempts, disturbed",
    [([1.0], 1, False), ([1.0, 1.1, 1.0], 1, False), ([1.0, 1.0, 3.0, 1.0], 2, False), ([2.0], 3, True)],
)
def test_a_disturbed_case_is_timed_again_then_labelled(
    readings: list[float], attempts: int, disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading is a number of samples: before, among the contenders and after, attempt by attempt."""
    reference = Scripted(*(r for r in readings for _ in range(quiet.SAMPLES)))

    def timed(fns: dict, *_: object) -> dict[str, Samples]:
        among = tuple(reference.sample() for _ in range(quiet.SAMPLES))
        return {who: Samples(among if who == quiet.REFERENCE else (1.0,) * 5, "own") for who in fns}

    monkeypatch.setattr(quiet, "time_cases", timed)
    monkeypatch.setattr(quiet, "WAIT", 0.0)
    found, about = quiet.time_quietly({"a": lambda: None}, reference, 5, 0.1)
    assert list(found) == ["a"] and (about["attempts"], about["disturbed"]) == (attempts, disturbed)


def test_a_real_reference_reads_about_one() -> None:
    reference = quiet.Reference(torch.device("cpu"))
    assert reference.read() >= 1.0 and reference.idle > 0


def test_without_peers_only_eager_and_ours_are_timed() -> None:
    class Case:
        name = "x"

    def asked(peers: bool, seconds: float) -> list[str]:
        job = {"peers": peers, "peers_until": time.time() + seconds}
        return matmul_worker.people(Case, job)  # type: ignore[arg-type]

    assert asked(False, 60) == [EAGER, TUNED]
    assert asked(True, -1) == [EAGER, US, TUNED]
    assert asked(True, 60) == [EAGER, PEER_MAX, US, TUNED]


def test_runs_divide_the_cases_and_go_on(tmp_path: Path) -> None:
    """What a journal has finished beside the peer is not run again; a contender that killed the process is left out."""
    lines = [
        {"kind": "prepared", "case": "a", "who": PEER_MAX}, {"kind": "done", "case": "a"},
        {"kind": "row", "case": "b", "who": TUNED}, {"kind": "done", "case": "b"},
        {"kind": "row", "case": "c", "who": PEER_MAX},
    ]  # fmt: skip
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert matmul.finished(tmp_path.glob("*.jsonl"), True) == {"a"}
    assert matmul.finished(tmp_path.glob("*.jsonl"), False) == {"a", "b"}
    found = matmul_cases.cases("cuda")
    claimed = {c.name for c in found["long"][::2] if not matmul_worker.claim(tmp_path, c)}
    assert not claimed and [matmul_worker.claim(tmp_path, c) for c in found["long"][:4]] == [False, True, False, True]
    ended = children.Ended("crashed: SIGSEGV", at={"kind": "trying", "case": "b", "who": PEER_MAX})
    job = matmul.after({"first": [], "skip": []}, ended)
    assert job == {"first": ["b"], "skip": [["b", PEER_MAX]]} and matmul.died(ended)["who"] == PEER_MAX
    ended.at["who"] = "timing"
    assert matmul.after(job, ended)["first"] == [] and matmul.died(ended)["who"] == TUNED


def test_any_first_part_of_the_cases_has_as_much_of_every_set() -> None:
    found = matmul_cases.cases("cuda")
    half = matmul_cases.mixed(found.values())[: sum(map(len, found.values())) // 2]
    for name, cases in found.items():
        mine = [n for n in half if n.split()[0] == name]
        assert mine == [c.name for c in cases][: len(mine)] and abs(len(mine) - len(cases) / 2) <= 1


def test_the_report_marks_what_was_disturbed() -> None:
    fact = {"kind": "row", "set": "splitk", "case": "splitk 16x4096x16 fp16", "spread": 0.01}
    state = {"reference": [1.0, 2.5, 1.0], "disturbed": True, "attempts": 3}
    rows = [{**fact, **state, "who": EAGER, "us": 10.0}, {**fact, **state, "who": TUNED, "us": 5.0}]
    text, promises = matmul_report.of_set("splitk", rows, 1, "cuda", rivals=False)
    assert "1.0%!" in text and "disturbed; reference before, among, after: 1.00, 2.50, 1.00" in text
    assert not any(PEER_MAX in str(p) for p in promises) and len(promises) == 2
    text, promises = matmul_report.of_set("splitk", rows, 1, "cuda")
    assert len(promises) == 3


ABOUT = {"kind": "about", "device": "NVIDIA H200 (sm_90, 132 units)", "versions": {"torch": "2"}, "where": "cuda"}
FACTS = {"dtype": "fp16", "op": "matmul_relu", "m": 16, "k": 4096, "n": 16}
QUIET = {"reference": [1.0, 1.1, 1.0], "disturbed": False, "attempts": 1}
NOISY = {"reference": [1.0, 2.5, 1.0], "disturbed": True, "attempts": 3}


def timed(who: str, us: float | None, case: str = "splitk 16x4096x16 fp16", **fields: object) -> dict[str, object]:
    spread = {"spread": 0.1, "clock": "graph"} if us else {}
    return {"kind": "row", "set": case.split()[0], "case": case, "who": who, "us": us, **spread, **fields}


def prepared(choice: str | None, case: str = "splitk 16x4096x16 fp16", **fields: object) -> dict[str, object]:
    return {**timed(PEER_MAX, None, case), "kind": "prepared", "choice": choice, "compile_s": 1.0, **fields}


def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *runs: list[dict[str, object]]) -> lab.Rows:
    """What a notebook reads of these runs, a file each."""
    files = []
    for i, rows in enumerate(runs):
        files.append(tmp_path / f"{i}.jsonl")
        lines = [{**ABOUT, "commit": f"c{i}", "date": "2026-01-01"}, *rows]
        files[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    matmul.main([*map(str, files), "--record", str(tmp_path / "recorded" / "matmul.h200.json")])
    monkeypatch.setenv("REFLIB_RECORDED", str(tmp_path / "recorded"))
    return lab.recorded("matmul")


def test_a_set_becomes_rows_that_a_notebook_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = recorded(
        tmp_path, monkeypatch,
        [prepared("mm"), timed(EAGER, 8.0, **FACTS, **QUIET), timed(PEER_MAX, 4.0, **FACTS, **QUIET),
         timed(US, 3.0, **FACTS, **QUIET, choice="aten"), timed(TUNED, 2.0, **FACTS, **QUIET, choice="triton split 1"),
         {"kind": "done", "case": "splitk 16x4096x16 fp16"}],
    )  # fmt: skip
    assert {(r.name, r.case, r.value, r.note) for r in rows.where(metric="time")} == {
        ("splitk", "eager", 8.0, ""), ("splitk", "TorchInductor max-autotune", 4.0, "mm"),
        ("splitk", "reflib, not measured", 3.0, "aten"), ("splitk", "reflib, tuned", 2.0, "triton split 1"),
    }  # fmt: skip
    row = rows.where(case="reflib, tuned")[0]
    assert row.spread == pytest.approx(0.2) and (row.unit, row.clock, row.cache) == ("µs", "graph", "warm")
    assert row.at == {"M": 16, "N": 16, "K": 4096, "dtype": "fp16", "op": "matmul_relu"}
    assert (row.device, row.versions, row.commit, row.date) == ("NVIDIA H200", {"torch": "2"}, "c0", "2026-01-01")
    assert rows.value(ALL_CASES, "count") == 64


def test_nothing_is_left_out_for_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = "llm gelu qkv b16 bf16"
    rows = recorded(
        tmp_path, monkeypatch,
        [prepared(None, llm, compile_s=None, note="RuntimeError: no"), timed(EAGER, 9.0, llm, **NOISY),
         timed(US, None, llm, note="wrong: error 1"), timed(TUNED, 10.0, llm, **NOISY, choice="aten"),
         timed(TUNED, None, note="crashed: SIGSEGV")],
    )  # fmt: skip
    told = {(r.name, r.case): r for r in rows}
    assert told["splitk", "reflib, tuned"].status == "crashed" and told["splitk", "reflib, tuned"].at["K"] == 4096
    assert told["llm", "reflib, not measured"].status == "wrong"
    peer = told["llm", "TorchInductor max-autotune"]
    assert (peer.status, peer.value, peer.note) == ("refused", None, "RuntimeError: no")
    note = told["llm", "reflib, tuned"].note
    assert note.startswith("aten; disturbed: a kernel timed before, among and after took 1.00, 2.50, 1.00 times")
    assert told["llm", "eager"].at["weights"] == "qkv" and told["llm", "eager"].at["M"] == 16
    board = lab.standings(rows.where(name="llm"), ours="reflib, tuned", against=["eager", peer.case])
    assert [line.ratio("reflib, tuned", ["eager", peer.case]) for line in board.lines] == [0.9]


def test_all_of_a_case_comes_from_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(us: float, *others: str) -> list[dict[str, object]]:
        return [timed(who, us, **QUIET) for who in (EAGER, TUNED, *others)]

    rows = recorded(tmp_path, monkeypatch, run(1.0, PEER_MAX), run(2.0, PEER_MAX), run(3.0)).where(metric="time")
    assert [r.value for r in rows] == [2.0, 2.0, 2.0] and {r.commit for r in rows} == {"c1"}


def test_a_recording_is_of_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = [{**ABOUT, "device": "NVIDIA B200 (sm_100)", "commit": "x", "date": ""}, timed(EAGER, 1.0)]
    with pytest.raises(SystemExit, match="one device, not of 2"):
        recorded(tmp_path, monkeypatch, [timed(EAGER, 1.0, "long 512x512x512 fp16"), *other])


# -- weight-only, scaled and grouped products, on a CPU ---------------------------------------------
@pytest.mark.parametrize("section", ["int8", "int4", "fp8", "grouped"])
def test_cases_agree_with_their_reference(section: str) -> None:
    c = next(c for c in products.cases(small=True) if c.section == section)
    args = c.make("cpu")
    want = products.reference(c, args)
    error = (c.fn(*args).float() - want).abs().max() / want.abs().max()
    assert float(error) < 2e-2 and c.flops > 0 and c.moved >= c.weights


def test_a_run_ends_and_is_continued(tmp_path: Path) -> None:
    found = [c for c in products.cases(small=True) if c.section in ("int8", "int4")][:3]
    out = tmp_path / "p.json"
    left = products.run(found, ["eager", "reflib"], out, -1, "cpu")
    assert left == [f"{c.section} {c.name}" for c in found] and not out.exists()
    assert products.run(found[:1], ["eager"], out, 60, "cpu") == []
    assert products.run(found[:2], ["eager", "reflib"], out, 60, "cpu") == []
    rows = json.loads(out.read_text())["rows"]
    assert [(r["case"], r["who"]) for r in rows] == [
        (c.name, w) for c, w in ((found[0], "eager"), (found[0], "reflib"), (found[1], "eager"), (found[1], "reflib"))
    ]
    assert all(r["us"] > 0 and not r["note"] and r["error"] < 2e-2 for r in rows)


def test_all_sections_come_early() -> None:
    assert {c.section for c in products.cases()[:4]} == {"int8", "int4", "fp8", "grouped"}
    names = [(c.section, c.name) for c in products.cases()]
    assert len(names) == len(set(names)) and torch.float8_e4m3fn == products.FP8
