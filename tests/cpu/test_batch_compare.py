"""`reflib compare`: which rows belong together, and when a run is slower than another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reflib.batch import compare as comparing
from reflib.batch.jobs import NotebookJob
from reflib.batch.store import RunStore
from reflib.batch.work import JobOutcome
from reflib.cli import cli
from reflib.errors import LabError
from reflib.lab import recording


def row(case: str = "reflib", value: float | None = 10.0, **more: Any) -> dict[str, Any]:
    found = {"kind": "row", "name": "sweep", "case": case, "metric": "time", "unit": "µs", "value": value}
    return {**found, "spread": 0.2, "clock": "graph", "device": "NVIDIA H200", **more}


def a_run(folder: Path, *jobs: tuple[dict[str, Any], list[dict[str, Any]]]) -> Path:
    """A run of one notebook: (parameters, rows) of each job."""
    kept = RunStore(folder)
    folder.mkdir()
    ids = []
    for number, (parameters, rows) in enumerate(jobs):
        lines = "".join(json.dumps(r) + "\n" for r in rows)
        kept.keep(NotebookJob(f"n-{number}", "n", parameters, "cuda"), JobOutcome("ok", rows=lines.encode()))
        ids.append(f"n-{number}")
    kept.write("run.json", {"jobs": ids})
    return folder


def exit_status(a: Path, b: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["compare", str(a), str(b), *words])
    if isinstance(result.exception, LabError):
        return 2, str(result.exception)  # `main` prints it and exits so
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "a, b, status",
    [
        (row(), row(), 0),
        (row(), row(value=10.4), 0),  # 4%
        (row(), row(value=10.8), 1),  # 8%
        (row(value=10.8), row(), 0),  # faster
        (row(unit="GB/s", metric="bandwidth", value=100.0), row(unit="GB/s", metric="bandwidth", value=90.0), 1),
        (row(unit="GB/s", metric="bandwidth", value=90.0), row(unit="GB/s", metric="bandwidth", value=100.0), 0),
    ],
)
def test_the_exit_status_says_what_is_slower(tmp_path: Path, a: Any, b: Any, status: int) -> None:
    first, second = a_run(tmp_path / "a", ({}, [a])), a_run(tmp_path / "b", ({}, [b]))
    assert exit_status(first, second, "--fail-over", "5%")[0] == status
    assert exit_status(first, second)[0] == 0


def test_within_its_spread_a_row_alone_is_not_slower(tmp_path: Path) -> None:
    steady = [row(case=str(i)) for i in range(9)]
    first = a_run(tmp_path / "a", ({}, [*steady, row(spread=3.0)]))
    second = a_run(tmp_path / "b", ({}, [*steady, row(value=12.0, spread=3.0)]))
    status, said = exit_status(first, second, "--fail-over", "5%")
    assert status == 0 and "10 rows compared: 0 slower, 0 faster, 10 the same" in said


def test_many_rows_a_little_slower_are_a_slower_run(tmp_path: Path) -> None:
    first = a_run(tmp_path / "a", ({}, [row(case=str(i), spread=3.0) for i in range(9)]))
    second = a_run(tmp_path / "b", ({}, [row(case=str(i), value=11.0, spread=3.0) for i in range(9)]))
    status, said = exit_status(first, second, "--fail-over", "5%")
    assert status == 1 and "0 slower" in said and "B takes 1.100 times as long as A" in said
    assert exit_status(first, second, "--fail-over", "15%")[0] == 0


def test_rows_are_matched_by_place_and_parameters(tmp_path: Path) -> None:
    small, large = {"size": 1, "device": "cuda"}, {"size": 2, "device": "cuda"}
    first = a_run(tmp_path / "a", (small, [row(at={"bytes": 4})]), (large, [row(value=20.0, at={"bytes": 4})]))
    second = a_run(tmp_path / "b", (large, [row(value=30.0, at={"bytes": 4}), row(value=1.0, at={"bytes": 8})]))
    found = comparing.compare(first, second)
    assert [pair.ratio for pair in found.pairs] == [1.5]
    said = found.report()
    assert "n, sweep: reflib; time (graph); bytes=4; size=2" in said
    assert "1 rows only in A:\n  n, sweep: reflib; time (graph); bytes=4; size=1" in said
    assert "1 rows only in B:\n  n, sweep: reflib; time (graph); bytes=8; size=2" in said


def test_devices_that_differ_are_told(tmp_path: Path) -> None:
    first = a_run(tmp_path / "a", ({"device": "cuda"}, [row()]))
    second = a_run(tmp_path / "b", ({"device": "cpu"}, [row(device="a laptop")]))
    assert "warning: A is of NVIDIA H200; B is of a laptop" in exit_status(first, second)[1]
    on_cpu = ({"device": "cpu"}, [row(value=90.0, device="a laptop")])
    both = a_run(tmp_path / "c", ({"device": "cuda"}, [row()]), on_cpu)
    assert [p.ratio for p in comparing.compare(both, both).pairs] == [1.0, 1.0]
    assert [p.ratio for p in comparing.compare(first, both).pairs] == [1.0]


def test_what_has_no_better_direction_is_left_out(tmp_path: Path) -> None:
    rows = [row(), row(metric="error", unit=""), row(metric="winner", unit="x"), row(metric="predicted")]
    rows += [row(case="refused", value=None, status="refused"), row(case="zero", value=0.0)]
    rows += [row(case="words", value="fast"), row(case="endless", value=float("inf"))]
    first = a_run(tmp_path / "a", ({}, rows))
    assert len(comparing.compare(first, first).pairs) == 1


def test_a_recording_is_compared_with_a_run(tmp_path: Path) -> None:
    (tmp_path / "recorded").mkdir()
    recording.dump(tmp_path / "recorded" / "n.h200.json", [row()], [])
    second = a_run(tmp_path / "b", ({"device": "cuda"}, [row(value=20.0)]))
    assert [p.ratio for p in comparing.compare(tmp_path / "recorded", second).pairs] == [2.0]
    assert [p.ratio for p in comparing.compare(tmp_path / "recorded" / "n.h200.json", second).pairs] == [2.0]


def test_bad_input_is_told(tmp_path: Path) -> None:
    good = a_run(tmp_path / "a", ({}, [row()]))
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "x.json").write_text("[1]")
    other = a_run(tmp_path / "other", ({}, [row(case="another")]))
    for b, message in [
        (tmp_path / "empty", "is not a run"),
        (tmp_path / "odd", "is not a recording"),
        (other, "no measured row in common"),
        (tmp_path / "gone", "does not exist"),
    ]:
        status, said = exit_status(good, b)
        assert status == 2 and message in said
    assert exit_status(good, good, "--fail-over", "much")[0] == 2
    assert exit_status(good, good, "--fail-over", "-5%")[0] == 2


def test_what_a_killed_kernel_left_half_written_is_passed_over(tmp_path: Path) -> None:
    kept = RunStore(a_run(tmp_path / "a", ({}, [row()])))
    path = kept.jobs / "n-0" / "rows.jsonl"
    path.write_text(path.read_text() + '{"kind": "row", "na')
    assert len(comparing.compare(tmp_path / "a", tmp_path / "a").pairs) == 1
