"""The notebook writer: the same notebook gives the same bytes, on any host, on any day."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from reflib.lab import notebook as nb


def ran(source: str, *outputs: Any, count: int | None = 7, **metadata: Any) -> Any:
    return new_code_cell(source, outputs=list(outputs), execution_count=count, metadata=metadata)


def stream(text: str, name: str = "stdout") -> Any:
    return new_output("stream", name=name, text=text)


def test_the_same_notebook_gives_the_same_bytes(tmp_path: Path) -> None:
    def once(name: str) -> bytes:
        book = new_notebook(cells=[new_markdown_cell("# a"), ran("1 + 1", stream("2\n"))])
        for cell in book.cells:
            del cell["id"]  # nbformat makes random ones
        nb.write(book, tmp_path / name)
        return (tmp_path / name).read_bytes()

    assert once("a.ipynb") == once("b.ipynb")


def test_normalizing_twice_changes_nothing() -> None:
    book = new_notebook(cells=[ran("x", stream("a\rb\n"), stream("c\n"), tags=["parameters"]), ran("y", count=None)])
    once = nb.normalize(book)
    assert nb.normalize(once) == once


def test_what_a_run_leaves_behind_is_removed() -> None:
    widget = new_output(
        "display_data", data={"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "Slider(3)"}
    )
    cells = [
        ran("p = 1", tags=["parameters"], execution={"iopub.status.busy": "2026-01-01"}, papermill={"duration": 1}),
        ran("p = 2", tags=["injected-parameters"]),
        ran("show", widget),
    ]
    book = new_notebook(
        cells=cells,
        metadata={"widgets": {"state": {}}, "papermill": {}, "language_info": {"name": "python", "version": "3"}},
    )
    out = nb.normalize(book)
    assert [c.source for c in out.cells] == ["p = 1", "show"]
    assert out.cells[0].metadata == {"tags": ["parameters"]}
    assert out.cells[1].outputs[0].data == {"text/plain": "Slider(3)"}
    assert set(out.metadata) == {"kernelspec", "language_info"}
    assert [c.execution_count for c in out.cells] == [1, 2]


def test_warnings_of_other_packages_are_left_out() -> None:
    theirs = stream("<site-packages>/torch/lowering.py:7836: UserWarning: \nOnline softmax is disabled\n", "stderr")
    ours = stream("with target= nothing runs\n", "stderr")
    out = nb.normalize(new_notebook(cells=[ran("x", theirs, stream("1\n")), ran("y", ours)]))
    assert [[o.text for o in cell.outputs] for cell in out.cells] == [["1\n"], ["with target= nothing runs\n"]]


def test_no_host_path_and_no_address_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path.home())
    text = f"{home}/x.py and {Path.cwd()}/reflib/a.py and <f at 0x7f12ab34cd> and /tmp/ipykernel_12/345.py\n"
    figure = new_output("display_data", data={"application/json": {"deep": [f"{home}/y"]}})
    error = new_output("error", ename="E", evalue=home, traceback=[f"{home}/z"])
    out = nb.normalize(new_notebook(cells=[ran("x", stream(text), figure, error)]))
    written = nbformat.writes(out)
    assert home not in written and str(Path.cwd()) not in written
    assert "0x7f12ab34cd" not in written and "ipykernel_" not in written
    assert "./reflib/a.py" in written


def test_progress_bars_keep_their_last_state() -> None:
    out = nb.normalize(new_notebook(cells=[ran("x", stream("10%\r50%\r100%\n"))]))
    assert out.cells[0].outputs[0].text == "100%\n"


def test_cells_with_outputs_have_a_count() -> None:
    out = nb.normalize(new_notebook(cells=[ran("x", stream("1\n"), count=None)]))
    assert out.cells[0].execution_count == 1  # nbval fails on an output without one


def test_ids_stay_and_are_unique() -> None:
    cells = [ran("a"), ran("a"), ran("a"), ran("b")]
    for cell in cells[:3]:
        cell["id"] = "same"
    cells[3]["id"] = "kept"
    ids = [c.id for c in nb.normalize(new_notebook(cells=cells)).cells]
    assert ids[0] == "same" and ids[3] == "kept" and len(set(ids)) == 4


def test_a_stamp_notices_changed_code_and_nothing_else() -> None:
    book = new_notebook(cells=[new_markdown_cell("prose"), ran("x = 1")])
    assert nb.stamp_problem(book) == ""
    nb.stamp(book, "NVIDIA H200", {"torch": "2.13.0"}, "abc")
    book.cells[0].source = "other prose"
    book.cells.insert(0, ran("device = 'cuda'", tags=["injected-parameters"]))
    assert nb.stamp_problem(book) == ""
    book.cells[2].source = "x = 2"
    assert "make record" in nb.stamp_problem(book)
