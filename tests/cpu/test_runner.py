"""`reflib run` and `reflib record`, on small notebooks made here."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_notebook

from reflib.batch import record as recording
from reflib.cli import cli
from reflib.errors import LabError
from reflib.lab import durations, executing, machine, runner
from reflib.lab import notebook as nb
from tests.processes import gone, soon

PARAMETERS = 'device: str = "auto"  # where to run\nrows: int = 3  # how many\nscale: float = 1.0  # by how much'
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
    assert [p.stem for p in recording.jobs_of(checkout, ["b", "c"], {}, "cpu")] == ["c", "b"]
    with pytest.raises(LabError, match="there are: c, a, b"):
        recording.jobs_of(checkout, ["fusoin"], {}, "cpu")


def test_unknown_parameters_and_wrong_types_are_refused_before_running(checkout: Path) -> None:
    for given, says in (
        ({"row": "3"}, r"'row'.*device, rows, scale"), ({"rows": "many"}, "declares it int"),
        ({"rows": "true"}, "declares it int"),
    ):  # fmt: skip
        with pytest.raises(LabError, match=says):
            recording.jobs_of(checkout, (), given, "cpu")
    jobs = recording.jobs_of(checkout, (), {"rows": "5", "scale": "2"}, "cpu")
    assert jobs[checkout / "notebooks" / "c.ipynb"] == {"rows": 5, "scale": 2.0, "device": "cpu"}


def test_a_gpu_that_is_not_there_is_an_error(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device in ("cuda", "gpu"):
        result = CliRunner().invoke(cli, ["run", "--root", str(checkout), "--device", device])
        assert isinstance(result.exception, LabError) and device in str(result.exception)
    assert not (checkout / "runs").exists()


def test_record_writes_outputs_stamp_and_rows(checkout: Path) -> None:
    said: list[str] = []
    broken = (checkout / "notebooks" / "a.ipynb").read_bytes()
    status = recording.record(checkout, "cpu", given={"rows": "5"}, commit="abc", say=said.append)
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


@pytest.mark.slow
def test_recording_twice_gives_the_same_files(checkout: Path) -> None:
    def once() -> dict[str, bytes]:
        recording.record(checkout, "cpu", ["b"], commit="abc", say=lambda text: None)
        return {p.name: p.read_bytes() for p in (checkout / "notebooks").rglob("b.*") if p.is_file()}

    assert once() == once()


def recorder(root: Path, slug: str, out: Path) -> subprocess.Popen[str]:
    """`reflib record` in a process of its own."""
    words = ["--root", str(root), "--device", "cpu", "--only", slug, "--out", str(out)]
    command = [sys.executable, "-m", "reflib.cli", "record", *words]
    return subprocess.Popen(command, cwd=runner.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_two_recordings_at_once_do_not_disturb_each_other(checkout: Path) -> None:
    """Both kernels are up at once: each waits until the other has begun. One output folder, as on a GPU host."""
    for mine, other in (("b", "c"), ("c", "b")):
        path = checkout / "notebooks" / f"{mine}.ipynb"
        meet = f"""import pathlib, time
pathlib.Path({str(checkout)!r}, "{mine}.begun").touch()
until = time.time() + 60
while not pathlib.Path({str(checkout)!r}, "{other}.begun").exists():
    assert time.time() < until
    time.sleep(0.02)
"""
        notebook = nb.read(path)
        nb.write(new_notebook(cells=[*notebook.cells, new_code_cell(meet), new_code_cell("print('met')")]), path)
    both = {slug: recorder(checkout, slug, checkout / "out") for slug in "bc"}
    for slug, child in both.items():
        said, _ = child.communicate(timeout=120)
        assert child.returncode == 0, said
        cells = nb.read(checkout / "out" / f"{slug}.ipynb").cells
        assert cells[-1].outputs[0].text == "met\n"
        assert json.loads((checkout / "out" / "recorded" / f"{slug}.cpu.json").read_text())["claims"]
    assert set(durations.read(checkout / "out" / "recorded", "cpu")) == {"b", "c"}
    made = sorted((checkout / "runs").iterdir())
    assert len(made) == 2 and not [p for run in made for p in run.rglob("*") if p.is_socket()]


def test_a_kernel_that_no_longer_answers_is_killed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at what papermill asks after the last cell, and would be waited for as long as for a cell."""
    silent = """import os, signal, subprocess, sys
print(os.getpid(), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
handlers = get_ipython().kernel.shell_handlers
handlers["kernel_info_request"] = lambda *request: os.kill(os.getpid(), signal.SIGSTOP)
"""
    path = checkout / "notebooks" / "d.ipynb"
    nb.write(new_notebook(cells=[new_code_cell(silent)]), path)
    # the child is a new process: another module shortens its limit
    (checkout / "site").mkdir()
    shorten = "import reflib.lab.executing as e\ne.SHUTDOWN_SECONDS = 0.5\n"
    (checkout / "site" / "short.py").write_text(shorten + "e.main(e.Path(__import__('sys').argv[1]))\n")
    real = subprocess.Popen

    def shortened(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        assert command[1:3] == ["-m", "reflib.lab.executing"]
        environment = {**options.pop("env"), "PYTHONPATH": f"{checkout / 'site'}:{runner.ROOT}"}  # type: ignore[dict-item]
        return real([command[0], "-m", "short", command[3]], env=environment, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(executing.subprocess, "Popen", shortened)
    start = time.monotonic()
    result = executing.execute(path, checkout / "out", {}, "cpu", False)
    assert result.status == "ok" and time.monotonic() - start < 200  # its child sleeps for 600
    pids = nb.read(checkout / "out" / "notebooks" / "d.ipynb").cells[0].outputs[0].text.split()
    assert len(pids) == 2 and gone(map(int, pids))


def test_stopping_ends_a_notebook_and_its_kernel(checkout: Path) -> None:
    path = checkout / "notebooks" / "e.ipynb"
    endless = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)"
    nb.write(new_notebook(cells=[new_code_cell(endless)]), path)
    stop, pid = threading.Event(), checkout / "out" / "work" / "e" / "pid"

    def when_it_runs() -> None:
        soon(lambda: pid.exists() and pid.read_text(), 60)
        stop.set()

    waiter = threading.Thread(target=when_it_runs)
    waiter.start()
    result = executing.execute(path, checkout / "out", {}, "cpu", False, stop=stop)
    waiter.join()
    assert result.status == "interrupted" and result.seconds < 60
    assert gone([int(pid.read_text())])


@pytest.mark.parametrize(
    "name, slug",
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("Tesla T4", "t4"), ("CPU", "cpu")],
)
def test_gpu_slugs(name: str, slug: str) -> None:
    assert machine.gpu_slug(name) == slug


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
