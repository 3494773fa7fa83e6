"""The committed notebooks: as the writer writes them, stamped with the code they were recorded from."""

import json
from pathlib import Path

import nbformat
import papermill
import pytest

from reflib.lab import notebook as nb
from reflib.lab import runner

NOTEBOOKS = runner.notebooks()
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def test_the_book_lists_every_notebook(root: Path) -> None:
    toc = (root / "book" / "_toc.yml").read_text()
    missing = [p.stem for p in NOTEBOOKS if f"notebooks/{p.stem}" not in toc]
    assert not missing, f"book/_toc.yml lacks {missing}"


@each
def test_its_stamp_matches_its_code(path: Path) -> None:
    assert nb.stamp_problem(nb.read(path)) == ""


@each
def test_it_is_as_the_writer_writes_it(path: Path) -> None:
    written = nbformat.writes(nb.normalize(nb.read(path))).rstrip() + "\n"
    assert path.read_text(encoding="utf-8") == written, "write it with `reflib.lab.notebook.write`"


@each
def test_its_parameters_can_be_set(path: Path) -> None:
    declared = papermill.inspect_notebook(str(path))
    assert declared["device"]["default"] == '"auto"'
    assert all(p["help"] for p in declared.values()), "each parameter has a comment that helps"


@each
def test_it_shows_no_failure(path: Path) -> None:
    for cell in nb.read(path).cells:
        for output in cell.get("outputs", []):
            expected = "raises-exception" in cell.metadata.get("tags", [])
            assert output.output_type != "error" or expected, output


def source(path: Path) -> str:
    return "\n".join(cell.source for cell in nb.read(path).cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", sorted((runner.ROOT / "notebooks" / "recorded").glob("*.json")), ids=lambda p: p.stem)
def test_a_recording_is_small_and_belongs_to_a_chapter(path: Path) -> None:
    assert path.stat().st_size < 1_000_000
    name = path.name.split(".")[0]  # a chapter's, or one that a chapter reads beside its own
    assert name in {p.stem for p in NOTEBOOKS} or any(f'lab.recorded("{name}")' in source(p) for p in NOTEBOOKS)
    assert {"rows", "claims"} <= set(json.loads(path.read_text()))
