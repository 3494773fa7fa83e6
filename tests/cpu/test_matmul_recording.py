"""The recording of the matmul sets: made of runs' rows, and of what an earlier recording has beside the peer."""

from pathlib import Path

import pytest

from reflib.lab import recording
from reflib.lab.ranking import ALL_CASES
from tests.bench import matmul_cases, matmul_record
from tests.bench.contenders import EAGER, PEER_MAX, TUNED

A, B, C = matmul_cases.cases("cuda")["long"][:3]


def run(date: str, cases: list[matmul_cases.MatmulCase], *who: str) -> matmul_record.Run:
    about = {"where": "cuda", "device": "GPU (much of it)", "versions": {"torch": "2"}, "commit": date, "date": date}
    row = {"kind": "row", "us": 2.0, "spread": 0.1, "clock": "graph", "note": ""}
    return about, [{**row, **case.facts, "who": w} for case in cases for w in who]


def test_a_case_comes_from_the_last_run_that_had_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "recorded" / "matmul.gpu.json"
    for found in (
        [run("1", [A, B], EAGER, PEER_MAX, TUNED)],
        [run("2", [A, C], EAGER, TUNED)],
        [run("3", [B], EAGER, PEER_MAX, TUNED), run("4", [B, C], EAGER, TUNED)],
    ):
        monkeypatch.setattr(matmul_record, "runs", lambda paths, found=found: found)
        matmul_record.record([], target)
    rows = recording.load(target)[0]
    place = {case.name: matmul_record.place(case.name, "cuda") for case in (A, B, C)}
    told = {name: {row.case: row.date for row in rows if row.at == at} for name, at in place.items()}
    ours, peer = (matmul_record.CONTENDERS[who] for who in (TUNED, PEER_MAX))
    assert told[A.name] == {"eager": "1", ours: "1", peer: "1"}  # not of run 2, which had no peer
    assert told[B.name] == {"eager": "3", ours: "3", peer: "3"}
    assert told[C.name] == {"eager": "4", ours: "4"}
    assert [row.value for row in rows if row.case == ALL_CASES] == [len(matmul_cases.cases("cuda")["long"])]
