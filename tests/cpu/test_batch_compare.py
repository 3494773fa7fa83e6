"""`reflib compare`: which rows belong together, and when a run is slower than another."""

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


# -- what regressed leaves behind (REFLIB_ARTIFACTS=1) -----------------------------------------------
CHAPTER = {
    "import json, os, torch, reflib": "code",
    "device: str = 'auto'  # where to run (auto | cpu | cuda)\nsize: int = 8  # elements (1 .. 99)": "parameters",
    "print(reflib.compile(torch.relu)(torch.ones(size)).sum())": "code",
}


def notebook(path: Path) -> Path:
    import nbformat

    cells = [nbformat.v4.new_code_cell(text, metadata={"tags": [tag]}) for text, tag in CHAPTER.items()]
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=about), path)
    return path


@pytest.mark.slow
def test_what_is_slower_runs_again_and_leaves_its_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = notebook(tmp_path / "n.ipynb")
    first, second = (a_run(tmp_path / n, ({"size": 5}, [row(value=v)])) for n, v in (("a", 10.0), ("b", 15.0)))
    request = {"only": [str(path)], "given": {}, "device": "cpu", "sweeps": []}
    RunStore(second).write("run.json", {"jobs": ["n-0"], "request": request})
    (second / "summary.html").write_text("B")
    assert exit_status(first, second) == exit_status(first, second) and not (second / "regressed").exists()
    monkeypatch.setenv("REFLIB_ARTIFACTS", "1")
    status, said = exit_status(first, second)
    assert status == 0 and "artifacts: " in said, said
    folder = second / "regressed"
    text = (folder / "index.html").read_text()
    assert "1 slower or broken" in text and "1.500 times as slow" in text and "<td>ran</td>" in text, text
    assert "href='comparison.txt'" in text and "href='../summary.html'" in text
    assert "1 of 1 rows slower" in (folder / "comparison.txt").read_text()
    [where] = [p for p in folder.iterdir() if p.is_dir()]
    assert list(where.glob("traces/*.json.gz")) and list(where.glob("repros/*.py"))
    assert all(p.stat().st_size for p in where.rglob("*") if p.is_file()) and (where / "run" / "summary.html").exists()
    assert exit_status(first, first)[0] == 0 and not (first / "regressed").exists(), "nothing became slower"


def test_what_runs_a_model_or_a_chapter_again(tmp_path: Path) -> None:
    at = {"model": "gpt2", "mode": "training", "dtype": "float32"}

    def measured(chapter: str, parameters: dict[str, Any], at: Any, value: float) -> Any:
        (tmp_path / f"{chapter}.json").write_text("{}")
        found = comparing.Row.from_data(row(value=value, at=at))
        return comparing.key_of(chapter, found, parameters, True), comparing.Number(value, 0.1, "µs", "x")

    pairs = []
    for chapter, parameters, where in (("sweep", {}, at), ("fusion", {"size": 3, "device": "cuda"}, {})):
        (key, a), (_, b) = (measured(chapter, parameters, where, v) for v in (1.0, 2.0))
        pairs += [comparing.Pair(key, a, b), comparing.Pair((*key[:2], "other", *key[3:]), a, b)]
    found = comparing.Comparison(tuple(pairs), (), (), (("x",), ("x",)))
    sweep, chapter = comparing.regressed(found, 0.05, tmp_path, ["reflib"])
    assert sweep.why.count("times as slow") == chapter.why.count("times as slow") == 2
    words = " ".join(sweep.again(tmp_path))
    assert words.startswith("reflib sweep --only gpt2 --mode training --dtype float32 --backend reflib")
    assert " ".join(chapter.again(tmp_path)).startswith("reflib run --only fusion --device cuda --no-book --out")
    assert chapter.again(tmp_path)[-2:] == ["-p", "size=3"]
