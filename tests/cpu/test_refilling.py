"""Cells that show recorded rows are filled again, and no other."""

import shutil
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from reflib.errors import LabError
from reflib.lab import notebook as nb
from reflib.lab import recording, runner
from reflib.lab.rows import Row
from tests.bench import refilling

PARAMETERS = 'device: str = "auto"  # where to run (auto | cpu | cuda)'
SETUP = "from reflib import lab\nhere = lab.setup(globals())"
SHOWN = 'print(lab.recorded("sets").value("a"), here.device)'


def book(folder: Path, shown: str = SHOWN) -> Path:
    """A recorded notebook whose every output is `as recorded`."""
    as_recorded = [new_output("stream", name="stdout", text="as recorded\n")]
    sources = [(PARAMETERS, "parameters"), (SETUP, ""), ("1 / 0", ""), (shown, refilling.TAG), ("later()", "")]
    cells = [
        new_code_cell(source, id=f"cell-{i}", metadata={"tags": [tag]} if tag else {}, outputs=as_recorded)
        for i, (source, tag) in enumerate(sources)
    ]
    notebook = new_notebook(cells=cells)
    nb.stamp(notebook, "NVIDIA H200", {"torch": "2"}, "abc")
    nb.write(notebook, folder / "chapter.ipynb")
    return folder / "chapter.ipynb"


def test_only_what_shows_recorded_rows_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording.dump(tmp_path / "sets.h200.json", [Row("t", "a", "time", 4.5, "µs").to_data()], [])
    monkeypatch.setenv(recording.FOLDER, str(tmp_path))
    path = book(tmp_path)
    before = nb.read(path)
    assert refilling.refill(path) == 1
    after = nb.read(path)
    assert [cell.outputs[0].text for cell in after.cells] == [
        *["as recorded\n"] * 3, "4.5 cpu\n", "as recorded\n"
    ]  # fmt: skip
    assert after.metadata == before.metadata and nb.stamp_problem(after) == ""


def test_a_failure_changes_nothing(tmp_path: Path) -> None:
    path = book(tmp_path, shown='raise ValueError("no")')
    before = path.read_text()
    with pytest.raises(LabError, match="ValueError: no"):
        refilling.refill(path)
    assert path.read_text() == before


@pytest.mark.sample(2)
@pytest.mark.parametrize("chapter", ["decompose-k", "inline-fusion"])
def test_without_a_recording_the_chapters_cells_run(
    chapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(runner.ROOT / "notebooks" / f"{chapter}.ipynb", tmp_path))
    monkeypatch.setenv(recording.FOLDER, str(tmp_path))
    assert refilling.refill(path) > 2
    filled = [c for c in nb.read(path).cells if refilling.TAG in c.metadata.get("tags", [])]
    assert "Nothing is recorded." in filled[0].outputs[-1].text
