"""`reflib run`: what it is to execute; jobs are executed, kept and gone on with. Kernels run only where a test is
about them."""

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reflib.batch import cluster as clusters
from reflib.batch import jobs, store, sweep
from reflib.batch import run as batch
from reflib.batch.jobs import NotebookJob, RunRequest
from reflib.batch.store import RunStore
from reflib.cli import cli
from reflib.errors import LabError
from reflib.lab import book, executing, runner
from reflib.lab import notebook as nb
from tests.batching import Stand, checkout, notebook
from tests.processes import gone, soon


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand = Stand()
    monkeypatch.setattr(executing, "execute", stand)
    return stand


def run(root: Path, out: Path | None = None, **how: Any) -> tuple[int, str]:
    """(exit status, what was said) of a run on the CPU."""
    said: list[str] = []
    how.setdefault("book", False)
    return batch.run(root, "cpu", out=out, say=said.append, **how), "\n".join(said)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {r["notebook"]: r for r in json.loads((folder / "results.json").read_text())["results"]}


def folder_of(folder: Path, slug: str) -> Path:
    return folder / "jobs" / str(results(folder)[slug]["job"])


# ---- with kernels


def test_a_kernel_that_dies_and_a_broken_notebook_leave_the_rest(tmp_path: Path) -> None:
    root = checkout(tmp_path, dies="import os; os._exit(3)", raises="1 / 0", fine="print(size)")
    notebook(root, "broken").write_text("{")
    before = {p: p.read_bytes() for p in (root / "notebooks").iterdir()}
    status, said = run(root, tmp_path / "out", workers=2, given={"size": "7"})
    assert "notebook  device  seconds  status" in said
    found = results(tmp_path / "out")
    assert status == 1 and "2 at the same time" in said
    assert {slug: r["status"] for slug, r in found.items()} == {
        "fine": "ok", "dies": "failed", "raises": "failed", "broken": "failed",
    }  # fmt: skip
    assert found["raises"]["error"] == "ZeroDivisionError: division by zero" and "REFLIB_LAB_ROWS" not in os.environ
    assert "its kernel died" in found["dies"]["error"] and "it is not a notebook" in found["broken"]["error"]
    assert found["fine"]["rows"][0]["value"] == 14.0
    kept = folder_of(tmp_path / "out", "fine")
    assert {p.name for p in kept.iterdir()} == {"notebook.ipynb", "log.txt", "rows.jsonl", "result.json"}
    assert "measured 7" in (kept / "log.txt").read_text()
    assert nb.read(kept / "notebook.ipynb").cells[-1].outputs[0].text == "7\n"
    partial = nb.read(folder_of(tmp_path / "out", "dies") / "notebook.ipynb")
    assert any("measured 7" in str(cell.get("outputs")) for cell in partial.cells)
    assert {p: p.read_bytes() for p in (root / "notebooks").iterdir()} == before


def test_past_its_limit_a_kernel_is_killed(tmp_path: Path) -> None:
    """The limit begins when the kernel is up: on a busy machine that alone takes longer than any limit for a test."""
    pid = tmp_path / "pid"
    code = f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    root = checkout(tmp_path, endless=code)

    class Clock:
        """Time stands still until then."""

        def monotonic(self) -> float:
            return 1e9 if pid.exists() and pid.read_text() else 0.0

        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executing, "time", Clock())
        never = threading.Event()
        result = executing.execute(notebook(root, "endless"), tmp_path / "o", {}, "cpu", False, stop=never, limit=90)
    assert (result.status, result.error) == ("failed", "it took longer than its limit of 1.5 min")
    assert gone([int(pid.read_text())])
    assert result.rows and nb.read(tmp_path / "o" / "notebooks" / "endless.ipynb").cells


def test_killed_half_way_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL while the second of two runs; then the first is not repeated."""
    journal, pid = tmp_path / "journal", tmp_path / "pid"
    note = f"with open({str(journal)!r}, 'a') as f: print('NAME', file=f)\n"
    wait = f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
    wait += f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.05)"
    root = checkout(tmp_path, a=note.replace("NAME", "a"), b=note.replace("NAME", "b") + wait)
    out = tmp_path / "out"
    words = [sys.executable, "-m", "reflib.cli", "run", "--root", str(root), "--device", "cpu", "--no-book"]
    with open(tmp_path / "said", "w") as said:
        child = subprocess.Popen([*words, "--out", str(out)], cwd=runner.ROOT, stdout=said, stderr=said)
        soon(lambda: (pid.exists() and pid.read_text()) or child.poll() is not None, 240)
        assert child.poll() is None, (tmp_path / "said").read_text()
        child.kill()
        child.wait()
    assert gone([int(pid.read_text())]), "its kernel has outlived the run"
    assert len(list((out / "jobs").iterdir())) == 1 and not (out / "results.json").exists()
    [kept] = (out / "jobs").iterdir()
    (out / "jobs" / ".left").mkdir()  # by a process that was killed as it wrote
    before = (kept / "result.json").stat().st_mtime_ns
    (tmp_path / "go").touch()
    status, said_now = run(root, resume=str(out))
    assert status == 0 and "2 notebooks, 1 of them finished before" in said_now
    assert journal.read_text().split() == ["a", "b", "b"]
    assert (kept / "result.json").stat().st_mtime_ns == before
    assert {slug: r["status"] for slug, r in results(out).items()} == {"a": "ok", "b": "ok"}
    assert {p.name for p in (out / "jobs").iterdir()} == {Path(r["job"]).name for r in results(out).values()}


# ---- without


def test_what_failed_and_what_has_changed_is_executed_again(tmp_path: Path, stand: Stand) -> None:
    root = checkout(tmp_path, a="", b="", c="")
    stand.fails = {"b": 1}
    assert run(root, tmp_path / "out")[0] == 1
    assert "it was told to" in results(tmp_path / "out")["b"]["error"]
    changed = nb.read(notebook(root, "c"))
    changed.cells[1].source += "\nprint()"
    nb.write(changed, notebook(root, "c"))
    status, said = run(root, resume=str(tmp_path / "out"))
    assert status == 0 and "3 notebooks, 1 of them finished before" in said
    assert [slug for slug, *_ in stand.calls] == ["a", "b", "c", "b", "c"]
    assert run(root, resume=str(tmp_path / "out"))[0] == 0 and len(stand.calls) == 5


def test_a_resumed_run_is_as_it_was_asked(tmp_path: Path, stand: Stand) -> None:
    root = checkout(tmp_path, a="", b="")
    sweep = tmp_path / "s.yaml"
    sweep.write_text("notebooks: a\nsize: [1, 2]\n")
    assert run(root, sweep_file=sweep, given={"flavour": "b"})[0] == 0
    sweep.unlink()
    status, said = run(root, resume="last")
    assert status == 0 and "2 notebooks, 2 of them finished before" in said and len(stand.calls) == 2
    with pytest.raises(LabError, match=r"no run 'other'; in .*runs there are: 2"):
        run(root, resume="other")


def test_a_failed_job_is_tried_again(tmp_path: Path, stand: Stand) -> None:
    root = checkout(tmp_path, a="", b="", c="")
    stand.fails = {"a": 2, "b": 3}
    status, said = run(root, tmp_path / "out", retries=2)
    found = results(tmp_path / "out")
    assert status == 1 and [slug for slug, *_ in stand.calls] == ["a", "b", "c", "a", "b", "a", "b"]
    assert (found["a"]["status"], found["a"]["attempt"]) == ("ok", 3)
    assert found["a"]["earlier"] == ["it was told to"] * 2
    assert (found["b"]["status"], found["b"]["attempt"]) == ("failed", 3)
    assert "attempt 2" in said and "attempt 2: it was told to" in (tmp_path / "out" / "summary.html").read_text()


def test_on_a_cpu_one_runs_at_a_time(tmp_path: Path, stand: Stand) -> None:
    root = checkout(tmp_path, a="", b="", c="")
    assert run(root, tmp_path / "out")[0] == 0
    ran = sorted((begin, end) for *_, begin, end in stand.calls)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ran))
    assert "executed one at a time" in (tmp_path / "out" / "summary.html").read_text()


def test_two_jobs_never_share_a_gpu(tmp_path: Path, stand: Stand) -> None:
    """Two GPUs that are only said to be there; a job on the CPU waits until those on GPUs are done."""
    stand.seconds = 0.2
    text = notebook(checkout(tmp_path, a=""), "a").read_text()
    listed = [NotebookJob(f"a-{i}", "a", {"size": i}, "cuda", text) for i in range(7)]
    listed.append(NotebookJob("a-cpu", "a", {"size": 99}, "cpu", text))
    cluster = clusters.local(2, ["3", "GPU-5"], 1)
    try:
        outcomes = {job.id: outcome.status for job, outcome in cluster.execute(listed)}
    finally:
        cluster.close()
    assert outcomes == {job.id: "ok" for job in listed}
    by_gpu: dict[str, list[tuple[float, float]]] = {}
    for _, _, gpu, begin, end in stand.calls:
        by_gpu.setdefault(gpu, []).append((begin, end))
    assert set(by_gpu) == {"3", "GPU-5", ""} and len(by_gpu["3"]) >= 3 and len(by_gpu["GPU-5"]) >= 3
    for ran in by_gpu.values():
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(ran)))
    [(begin, _)] = by_gpu[""]
    assert begin >= max(end for gpu, ran in by_gpu.items() if gpu for _, end in ran)


def test_what_no_worker_can_do_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "ABANDONED_SECONDS", 0.2)
    cluster = clusters.local(1)
    try:
        with pytest.raises(LabError, match="no worker is left"):
            list(cluster.execute([NotebookJob("a-1", "a", {}, "cuda", "{}")]))
    finally:
        cluster.close()


def test_workers_are_as_many_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "local_gpus", lambda: ["0", "1"])
    assert clusters.workers_for({"cuda"}, None) == (2, ["0", "1"], 1)
    assert clusters.workers_for({"cuda", "cpu"}, 1) == (1, ["0"], 1)
    assert clusters.workers_for({"cpu"}, None) == (1, [], 1)
    assert clusters.workers_for({"cpu"}, 4) == (4, [], 4)
    with pytest.raises(LabError, match="2 GPUs here, and jobs never share one"):
        clusters.workers_for({"cuda"}, 3)


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path, stand: Stand) -> None:
    root = checkout(tmp_path, a="", b="", c="")
    real = stand.__call__

    def slow_after_a(path: Path, *more: Any, **how: Any) -> Any:
        if path.stem == "b":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            while not how["stop"].wait(0.05):
                pass
        return real(path, *more, **how)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts with &
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executing, "execute", slow_after_a)
            status, said = run(root, tmp_path / "out")
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 1 and "to continue: reflib run --resume" in said
    statuses = {slug: r["status"] for slug, r in results(tmp_path / "out").items()}
    assert statuses == {"a": "ok", "b": "waiting", "c": "waiting"}
    assert len(list((tmp_path / "out" / "jobs").iterdir())) == 1
    assert run(root, resume=str(tmp_path / "out"))[0] == 0
    assert [slug for slug, *_ in stand.calls].count("a") == 1


def test_a_full_disk_where_a_job_runs(tmp_path: Path, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    root = checkout(tmp_path, a="", b="")

    def full_for_a(path: Path, *more: Any, **how: Any) -> Any:
        if path.stem == "a":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return stand(path, *more, **how)

    monkeypatch.setattr(executing, "execute", full_for_a)
    status, _ = run(root, tmp_path / "out")
    found = results(tmp_path / "out")
    assert status == 1 and found["b"]["status"] == "ok"
    assert "no space is left on the disk of" in found["a"]["error"] and "TMPDIR" in found["a"]["error"]


def test_a_full_disk_where_results_go(tmp_path: Path, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is executed again, later."""
    root = checkout(tmp_path, a="", b="", c="")
    real = os.replace

    def full(new: Any, place: Any) -> None:
        if Path(place).parent.name == "jobs":
            raise OSError(errno.ENOSPC, "No space left on device", str(new))
        real(new, place)

    monkeypatch.setattr(os, "replace", full)
    status, said = run(root, tmp_path / "out", only=["a"])
    assert status == 1 and said.count("no space is left on the disk of") == 1
    assert "free some" in results(tmp_path / "out")["a"]["error"] and not list((tmp_path / "out" / "jobs").iterdir())


def test_one_process_executes_a_run(tmp_path: Path, stand: Stand) -> None:
    root = checkout(tmp_path, a="")
    with RunStore(tmp_path / "out").locked(), pytest.raises(LabError, match="is being executed by another process"):
        run(root, tmp_path / "out")


def test_the_summary_is_one_page_with_pictures(tmp_path: Path, stand: Stand) -> None:
    root = checkout(tmp_path, a="", b="")
    sweep = tmp_path / "s.yaml"
    sweep.write_text("size: [1, 10, 100]\nflavour: [a, b]\n")
    status, said = run(root, tmp_path / "out", sweep_file=sweep, book=True)
    assert status == 0 and "book:" not in said  # a notebook is in it more than once
    page = (tmp_path / "out" / "summary.html").read_text()
    assert "<h1>Run out: a test</h1>" in page and "12 ok" in page
    assert "one: 1 (flavour=a): 2.00, 1 (flavour=b): 4.00, 10 (flavour=a): 20.0" in page  # a picture's words
    assert page.count("<svg") + page.count("data:image/svg+xml") == 2
    assert not re.search(r"<script|<link|<iframe|@import|url\(|(src|href)=.?(https?:)?//", page)
    links = re.findall(r'href="([^"]*)"', page)
    assert len(links) == 12 * 3 and all((tmp_path / "out" / link).is_file() for link in links)


def test_the_book_has_what_was_executed(tmp_path: Path, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    root = checkout(tmp_path, a="", b="")
    seen = {}

    def build(root: Path, folder: Path, heading: str) -> Path:
        seen.update({"pages": sorted(p.name for p in (folder / "notebooks").iterdir()), "heading": heading})
        return folder / "book" / "index.html"

    monkeypatch.setattr(book, "build_run", build)
    status, said = run(root, tmp_path / "out", book=True)
    assert status == 0 and "book:    " in said
    assert seen == {"pages": ["a.ipynb", "b.ipynb"], "heading": "Your machine: a test"}


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "distributed" else name)
    result = CliRunner().invoke(cli, ["run", "--root", str(tmp_path)])
    assert result.exit_code == 1 and "distributed: not installed; pip install 'reflib[batch]'" in result.output


def test_a_damaged_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(LabError, match="is damaged"):
        store.load(tmp_path)


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    root = str(checkout(tmp_path, a=""))
    wrong = {"--timeout 0": "0.0", "--workers 0": "0", "--resume x --out y": "keeps its folder"}
    for words, message in wrong.items():
        result = CliRunner().invoke(cli, ["run", "--root", root, *words.split()])
        assert result.exit_code == 2 and message in result.output


# -- what is to be executed: sweep files, and jobs; all of it is checked before anything runs ---------
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
