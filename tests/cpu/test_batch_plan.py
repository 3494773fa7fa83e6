"""What `reflib run` is to execute: sweep files, and jobs; all of it is checked before anything runs."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from reflib.batch import jobs, sweep
from reflib.batch.jobs import RunRequest
from reflib.cli import cli
from reflib.errors import LabError
from reflib.lab import notebook as nb
from tests.batching import checkout, notebook


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return checkout(tmp_path, a="", b="pass")


def same(device: str) -> str:
    return "cpu" if device == "auto" else device


def planned(root: Path, text: str = "", **more: object) -> list[jobs.NotebookJob]:
    sweeps = tuple(sweep.parse(text, "s.yaml")) if text else ()
    return jobs.plan(root, RunRequest(sweeps=sweeps, **more), same)  # type: ignore[arg-type]


def test_the_product_of_the_lists_is_executed(root: Path) -> None:
    found = planned(root, "notebooks: a\nsize: [1, 10]\nflavour: [a, b]\n")
    assert [job.label for job in found] == [f"a size={s} flavour={f}" for s in (1, 10) for f in "ab"]
    assert found[0].parameters == {"size": 1, "flavour": "a", "device": "cpu"}
    assert len({job.id for job in found}) == 4 and all(job.id.startswith("a-") for job in found)


def test_all_notebooks_and_several_sweeps(root: Path) -> None:
    assert [job.label for job in planned(root, "size: 7\n")] == ["a", "b"]
    both = planned(root, "- {notebooks: a, size: [1, 2]}\n- {notebooks: [a, b], size: 2}\n")
    assert [(job.notebook, job.parameters["size"]) for job in both] == [("a", 1), ("a", 2), ("b", 2)]


def test_the_command_line_comes_before_the_file(root: Path) -> None:
    [job] = planned(root, "notebooks: b\nsize: [1, 2]\ndevice: cuda\n", only=("a",), given={"size": "5"}, device="cpu")
    assert (job.notebook, job.parameters, job.device) == ("a", {"size": 5, "device": "cpu"}, "cpu")


def test_an_id_is_of_content(root: Path) -> None:
    def ids() -> list[str]:
        return [job.id for job in planned(root, "size: [1, 2]\nnotebooks: a\n")]

    before = ids()
    changed = nb.read(notebook(root, "a"))
    changed.cells[1].outputs = []
    changed.cells[1].source += "\nprint(1)"
    nb.write(changed, notebook(root, "a"))
    assert len({*before, *ids()}) == 4


@pytest.mark.parametrize(
    "text, message",
    [
        ("size: [1, 2\n", "s.yaml: not YAML: while parsing a flow sequence"),
        ("notebooks: a\nsize: []\n", "s.yaml, key 'size': an empty list"),
        ("size:\n  - 1\n  - {x: 1}\n", "s.yaml, key 'size': {'x': 1} is not text, a number or a bool"),
        ("size: !!python/name:os.system x\n", "s.yaml: not YAML: could not determine a constructor"),
        ("size: null\n", "s.yaml, key 'size': None is not text, a number or a bool"),
        ("size: 2026-13-45\n", "s.yaml: not YAML: month must be in 1..12"),
        ("just words\n", "s.yaml: expected `parameter: values`, not 'just words'"),
        ("", "s.yaml is empty"),
        ("a: \x07\n", "s.yaml: not YAML"),
    ],
)
def test_a_bad_sweep_file_is_told_by_key(text: str, message: str) -> None:
    with pytest.raises(LabError) as caught:
        sweep.parse(text, "s.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("notebooks: a\nsiez: 3\n", "s.yaml, key 'siez': no notebook of this run has a parameter 'siez'"),
        ("notebooks: a\nsiez: 3\n", "did you mean 'size'?"),
        ("size:\n- 1\n- many\n", "s.yaml, key 'size': a: parameter size=many: the notebook declares it int"),
        ("size: [1, 5000]\n", "s.yaml, key 'size': a: parameter 'size' is 5000; it must be 1 to 1000"),
        ("flavour: off\n", "s.yaml, key 'flavour': a: parameter 'flavour' is False, a bool; it must be str"),
    ],
)
def test_what_no_notebook_takes_is_refused(root: Path, text: str, message: str) -> None:
    with pytest.raises(LabError) as caught:
        planned(root, text)
    assert message in str(caught.value)


def test_nothing_is_written_when_something_is_refused(root: Path) -> None:
    (root / "s.yaml").write_text("size: [1, x]\n")
    result = CliRunner().invoke(cli, ["run", "--root", str(root), "--sweep", str(root / "s.yaml")])
    assert isinstance(result.exception, LabError) and "s.yaml, key 'size'" in str(result.exception)
    gone = CliRunner().invoke(cli, ["run", "--root", str(root), "--sweep", str(root / "t.yaml")])
    assert isinstance(gone.exception, LabError) and "No such file" in str(gone.exception)
    assert not (root / "runs").exists()


def test_too_many_jobs_are_refused(root: Path) -> None:
    numbers = ", ".join(map(str, range(1, 200)))
    parameters = nb.read(notebook(root, "a"))
    parameters.cells[0].source += "\nother: int = 1  # another\n"
    nb.write(parameters, notebook(root, "a"))
    with pytest.raises(LabError, match=r"s.yaml makes over 10,000 jobs"):
        planned(root, f"notebooks: a\nsize: [{numbers}]\nother: [{numbers}]\n")


def test_missing_and_broken_notebooks_are_jobs_that_cannot_run(root: Path) -> None:
    notebook(root, "broken").write_text('{"cells": [')
    notebook(root, "odd").write_text('{"cells": 3, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    notebook(root, "words").write_bytes(b"\xff\xfe\x00")
    wrong = nb.read(notebook(root, "a"))
    wrong.cells[0].source = "device: str = ("
    nb.write(wrong, notebook(root, "syntax"))
    only = ("a", "broken", "odd", "words", "syntax", "c", str(root / "gone.ipynb"))
    found = {job.notebook: job.problem for job in planned(root, only=only)}
    assert found.pop("a") == ""
    assert "it is not a notebook" in found["broken"] and "it is not a notebook" in found["odd"]
    assert "it is not a notebook" in found["words"]
    assert "its parameters cell is no Python: line 1" in found["syntax"]
    assert "no notebook has this name; there are: a, b" in found["c"]
    assert "there is no file" in found["gone"]
    with pytest.raises(LabError, match="c: no notebook has this name"):
        planned(root, only=("c",))


def test_a_notebook_of_ones_own_needs_no_types(root: Path, tmp_path: Path) -> None:
    own = nb.read(notebook(root, "a"))
    own.cells[0].source = "n = 2 ** 4\nname = 'x'"
    nb.write(own, tmp_path / "elsewhere" / "own.ipynb")
    path = str(tmp_path / "elsewhere" / "own.ipynb")
    [job] = planned(root, "n: 3\n", only=(path,))
    assert job.parameters == {"n": 3} and job.device == "cpu" and not job.chapter
    with pytest.raises(LabError, match="they have: n, name"):
        planned(root, "m: 3\n", only=(path,))
