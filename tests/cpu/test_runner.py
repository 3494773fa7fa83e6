"""`reflib run` and `reflib record`, on small notebooks made here."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_notebook

from reflib.cli import cli
from reflib.errors import LabError
from reflib.lab import notebook as nb
from reflib.lab import runner

PARAMETERS = (
    'device: str = "auto"  # where to run\nrows: int = 3  # how many\nscale: float = 1.0  # by how much'
)
REPORT = """import json, os
print(device, rows, scale)
with open(os.environ["REFLIB_LAB_ROWS"], "a") as f:
    print(json.dumps({"kind": "row", "case": "c", "metric": "rows", "value": rows}), file=f)
    print(json.dumps({"kind": "claim", "claim": "few", "holds": rows < 4, "otherwise": "many"}), file=f)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with three notebooks, the one in the middle broken."""
    (tmp_path / "book").mkdir()
    toc = "root: book/index\nchapters: [{file: notebooks/c}, {file: notebooks/a}, {file: notebooks/b}]\n"
    (tmp_path / "book" / "_toc.yml").write_text(toc)
    for name in "abc":
        cells = [new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}), new_code_cell(REPORT)]
        if name == "a":
            cells.append(new_code_cell("1 / 0"))
        nb.write(new_notebook(cells=cells), tmp_path / "notebooks" / f"{name}.ipynb")
    return tmp_path


def test_the_book_gives_the_order(checkout: Path) -> None:
    assert [p.stem for p in runner.notebooks(checkout)] == ["c", "a", "b"]
    assert [p.stem for p in runner.notebooks(checkout, ["b", "c"])] == ["c", "b"]
    with pytest.raises(LabError, match="there are: c, a, b"):
        runner.notebooks(checkout, ["fusoin"])


def test_unknown_parameters_and_wrong_types_are_refused_before_running(checkout: Path) -> None:
    paths = runner.notebooks(checkout)
    with pytest.raises(LabError, match=r"'row'.*device, rows, scale"):
        runner.parameters_for(paths, {"row": "3"}, "cpu")
    with pytest.raises(LabError, match="declares it int"):
        runner.parameters_for(paths, {"rows": "many"}, "cpu")
    with pytest.raises(LabError, match="declares it int"):
        runner.parameters_for(paths, {"rows": "true"}, "cpu")
    chosen = runner.parameters_for(paths, {"rows": "5", "scale": "2"}, "cpu")
    assert chosen[paths[0]] == {"rows": 5, "scale": 2.0, "device": "cpu"}


def test_a_gpu_that_is_not_there_is_an_error(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device in ("cuda", "gpu"):
        result = CliRunner().invoke(cli, ["run", "--root", str(checkout), "--device", device])
        assert isinstance(result.exception, LabError) and device in str(result.exception)
    assert not (checkout / "runs").exists()


def test_run_goes_on_after_a_failure(checkout: Path) -> None:
    before = {p: p.read_bytes() for p in (checkout / "notebooks").iterdir()}
    said: list[str] = []
    out = checkout / "out"
    status = runner.run(checkout, "cpu", given={"rows": "2"}, out=out, book=False, say=said.append)
    assert status == 1
    results = json.loads((out / "results.json").read_text())["results"]
    assert [(r["notebook"], r["status"]) for r in results] == [("c", "ok"), ("a", "failed"), ("b", "ok")]
    assert results[1]["error"] == "ZeroDivisionError: division by zero"
    assert results[0]["rows"] == [{"case": "c", "metric": "rows", "value": 2}]
    assert "cpu 2 1.0" in (out / "logs" / "c.log").read_text()
    assert nb.read(out / "notebooks" / "a.ipynb").cells  # the partial notebook is kept
    table = "\n".join(said)
    assert "notebook  device  seconds  status" in table and "failed" in table
    assert {p: p.read_bytes() for p in (checkout / "notebooks").iterdir()} == before
    assert "REFLIB_LAB_ROWS" not in os.environ


def test_record_writes_outputs_stamp_and_rows(checkout: Path) -> None:
    said: list[str] = []
    broken = (checkout / "notebooks" / "a.ipynb").read_bytes()
    status = runner.record(checkout, "cpu", given={"rows": "5"}, commit="abc", say=said.append)
    assert status == 1
    assert (checkout / "notebooks" / "a.ipynb").read_bytes() == broken
    recorded = nb.read(checkout / "notebooks" / "b.ipynb")
    assert recorded.metadata.reflib.device and recorded.metadata.reflib.commit == "abc"
    assert nb.stamp_problem(recorded) == ""
    assert recorded.cells[0].source == PARAMETERS  # the injected cell is gone
    assert recorded.cells[1].outputs[0].text == "cpu 5 1.0\n"
    rows = json.loads((checkout / "notebooks" / "recorded" / "b.cpu.json").read_text())
    assert rows["rows"] == [{"case": "c", "metric": "rows", "value": 5}]
    assert any("claim failed in b: few (many)" in line for line in said)


def test_recording_twice_gives_the_same_files(checkout: Path) -> None:
    def once() -> dict[str, bytes]:
        runner.record(checkout, "cpu", ["b"], commit="abc", say=lambda text: None)
        return {p.name: p.read_bytes() for p in (checkout / "notebooks").rglob("b.*") if p.is_file()}

    assert once() == once()


@pytest.mark.parametrize(
    "name, slug",
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("Tesla T4", "t4"), ("CPU", "cpu")],
)
def test_gpu_slugs(name: str, slug: str) -> None:
    assert runner.gpu_slug(name) == slug


def test_the_command_line_refuses_what_is_not_a_pair(checkout: Path) -> None:
    result = CliRunner().invoke(cli, ["run", "--root", str(checkout), "-p", "rows"])
    assert result.exit_code == 2 and "NAME=VALUE" in result.output


def test_doctor_reports_every_finding() -> None:
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 0, result.output
    for name in ("Python", "PyTorch", "Triton", "C++ compiler", "OpenMP", "Cache"):
        assert name in result.output


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 0  # PyTorch alone is needed
    assert "none usable: CPU kernels cannot be built" in result.output and "-> " in result.output
