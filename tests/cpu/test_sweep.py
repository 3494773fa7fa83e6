"""`reflib sweep`: every kind of end is a row, a second call goes on, a regression fails, and the means are right."""

import importlib
import importlib.util
import json
import math
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils._pytree import tree_leaves

from reflib.cli import cli
from reflib.errors import LabError
from reflib.lab import recording
from reflib.lab.rows import Row, Rows
from reflib.lab.timing import Samples
from reflib.sweep import child, own, registry, report, run
from reflib.sweep.model import models
from tests.kernels import launch
from tests.processes import gone

FILE = """import os, time
import torch
from pathlib import Path
from torch import nn
from reflib.sweep import Model

class Dies(nn.Linear):
    def forward(self, x): os.abort()

class Hangs(nn.Linear):
    def forward(self, x):
        Path(PLACE, "pid").write_text(str(os.getpid()))
        time.sleep(10000)

def absent(real):
    import a_library_that_is_not_there

def mlp(real):
    return nn.Sequential(nn.Linear(13, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 5)), (torch.randn(7, 13),)

MODELS = [
    Model("mlp", mlp),
    Model("softmax", lambda real: (nn.Sequential(nn.Linear(11, 11), nn.Softmax(-1)), (torch.randn(3, 11),))),
    Model("dies", lambda real: (Dies(4, 4), (torch.randn(2, 4),))),
    Model("hangs", lambda real: (Hangs(4, 4), (torch.randn(2, 4),))),
    Model("absent", absent, needs="a_library_that_is_not_there"),
    Model("half_there", absent, needs="json"),
]
"""


# -- the registry -----------------------------------------------------------------------------------
def test_the_registry() -> None:
    listed = models()
    names = [m.name for m in listed]
    assert len(names) == len(set(names)) and 38 <= len(names) <= 50
    assert {m.needs for m in listed} == {"", *run.LIBRARIES}
    assert all(m.cost > 0 and set(m.modes) <= set(run.MODES) for m in listed)


@pytest.mark.parametrize("model", own.MODELS, ids=lambda m: m.name)
@pytest.mark.sample(3)
def test_our_own_models_train(model: Any) -> None:
    module, inputs = model.build(False)
    results, gradients = child.stepper(module, module, inputs, True)()
    again, same = child.stepper(module, module, inputs, True)()
    for x, y in zip([*results, *gradients], [*again, *same]):
        assert x is None or (torch.isfinite(x).all() and torch.equal(x, y))  # no dropout: a step can be repeated
    assert sum(g is not None for g in gradients) == len(gradients) > 0
    assert all(isinstance(x, torch.Tensor) for x in tree_leaves(module(*inputs)))


@pytest.mark.parametrize("model", [m for m in registry.MODELS if m.needs], ids=lambda m: m.name)
def test_models_of_libraries(model: Any) -> None:
    """They are built where their library is, and say that it is missing where it is not."""
    if importlib.util.find_spec(model.needs) is None:
        with pytest.raises(ImportError):
            model.build(False)
        return
    try:
        module, inputs = model.build(False)
    except ImportError:  # what the library itself needs is missing
        return
    results, _ = child.stepper(module.eval(), module, inputs, False)()
    assert results and all(torch.isfinite(x).all() for x in results if x.is_floating_point())


# -- errors -----------------------------------------------------------------------------------------
def test_errors_are_relative_and_judged_by_eagers() -> None:
    exact = [torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([1, 2, 3, 4])]
    got = [torch.tensor([3.0, 4.5]), torch.tensor([1, 2, 3, 5])]
    found = child.errors((got, []), (exact, []))
    assert found == pytest.approx([0.1, 0.25])  # 0.5 / 5; one integer of four
    assert child.judged([0.0199], [0.01], "float32") == ("ok", "")
    verdict, why = child.judged([0.01, 0.03, 0.04], [0.01, 0.01, 0.01], "float32")
    assert verdict == "inaccurate" and why.startswith("tensor 2 of 3")  # the worst of them
    usual = child.judged([0.01, 0.019, 0.0], [0.01, 1e-9, 0.01], "float32")  # twice the median of eager's
    assert usual == ("ok", "")
    assert child.judged([math.nan], [1.0], "bfloat16")[0] == "wrong"
    assert child.judged([0.0, 1.0], [0.01, 0.01], "bfloat16")[0] == "wrong"  # one gradient left out
    assert [child.judged([x], [0.0], "float32")[0] for x in (1e-6, 1e-5, 0.2)] == ["ok", "inaccurate", "wrong"]


def test_a_gradient_that_is_zero_in_exact_arithmetic_has_no_relative_error() -> None:
    exact = ([], [torch.ones(4).double(), torch.full((4,), 1e-18).double(), torch.ones(4).double()])
    got = ([], [torch.ones(4), torch.full((4,), 1e-8), torch.ones(4)])
    assert child.errors(got, exact) == pytest.approx([0.0, 1e-5, 0.0])


# -- a sweep ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    path = folder / "own_models.py"
    path.write_text(FILE.replace("PLACE", repr(str(folder))))
    return path


def request(file: Path, *only: str, **more: Any) -> run.Request:
    fields = {"modes": ("inference",), "dtypes": ("float32",), "limit": 400.0, "workers": 2, **more}
    return run.Request("cpu", only, models=str(file), **fields)


@pytest.fixture(scope="module")
def backends(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """With --quick without TorchInductor, which compiles for most of the sweep's time."""
    return ("reflib", "eager") if pytestconfig.getoption("--quick") else run.BACKENDS


@pytest.fixture(scope="module")
def swept(
    file: Path, backends: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, list[str]]:
    """A model with every backend, one that is trained, one that crashes, two whose library is missing: (folder, exit
    status, lines)."""
    folder, said = tmp_path_factory.mktemp("swept"), list[str]()

    def forked(command: list[str], *, env: dict[str, str], cwd: Path, stderr: Any, **_: Any) -> Any:
        return launch(command, env=env, cwd=str(cwd), errors=stderr.name)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(run, "subprocess", SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=forked))
        status = run.sweep(request(file, "mlp", backends=backends), folder, said.append)
        run.sweep(request(file, "softmax", modes=("training",), backends=("reflib", "eager")), folder, said.append)
        rest = request(file, "dies", "absent", "half_there", backends=("reflib", "eager"))
        status = max(status, run.sweep(rest, folder, said.append))
    return folder, status, said


def rows(folder: Path) -> Rows:
    return recording.load(folder / "sweep.cpu.json")[0]


def test_every_end_is_a_row(swept: tuple[Path, int, list[str]], backends: tuple[str, ...]) -> None:
    folder, status, said = swept
    found = {(r.at["model"], r.case): r for r in rows(folder) if r.metric == "time"}
    for who in backends:
        assert found["mlp", who].status == "ok" and (found["mlp", who].value or 0) > 0, found["mlp", who]
    assert found["softmax", "reflib"].status == found["softmax", "eager"].status == "ok"
    for who in ("reflib", "eager"):  # one process was for both, and the second of them is in another after the crash
        assert (found["dies", who].status, found["dies", who].note) == ("crashed", "SIGABRT")
        assert found["absent", who].status == found["half_there", who].status == "not installed"
    assert status == 1 and any("dies" in line and "crashed" in line for line in said)


def test_what_a_row_says_of_a_compiler(swept: tuple[Path, int, list[str]], backends: tuple[str, ...]) -> None:
    found = rows(swept[0])
    for who in set(backends) - {"eager"}:
        own = {r.metric: r for r in found.where(lambda r: r.at["model"] == "mlp", case=who)}
        assert own["graph breaks"].value == 0 and (own["kernels"].value or 0) >= 1
        assert (own["cold compile"].value or 0) > 0 and own["cold compile"].unit == "s"
        assert 0 < (own["error"].value or 0) < 1e-5 and 0 < (own["eager's error"].value or 0) < 1e-5
        assert own["time"].spread is not None and own["time"].clock == "wall"


def test_a_second_call_measures_nothing_again(
    swept: tuple[Path, int, list[str]], file: Path, backends: tuple[str, ...]
) -> None:
    folder, said = swept[0], list[str]()
    before = (folder / "results.jsonl").read_bytes()
    assert run.sweep(request(file, "mlp", backends=backends), folder, said.append) == 0
    n = len(backends)
    assert (folder / "results.jsonl").read_bytes() == before
    assert f"{n} measurements" in said[0] and f"{n} there" in said[0]


def test_another_commit_is_measured_again(
    swept: tuple[Path, int, list[str]], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(swept[0] / "results.jsonl", tmp_path)
    monkeypatch.setattr(run.machine, "commit", lambda: "another")
    said = list[str]()
    run.sweep(request(file, "absent", backends=("reflib",)), tmp_path, said.append)
    assert "1 measurements" in said[0] and "0 there" in said[0]
    assert {r.at["model"] for r in rows(tmp_path)} == {"absent"}


@pytest.mark.parametrize("evenly", [False, True])
@pytest.mark.parametrize("disturbed", [0, 2, 9, 50])
def test_what_another_process_disturbs_is_timed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbed: int, evenly: bool
) -> None:
    """Replays of a graph that take turns with another process take longer, and vary; or take evenly three times as
    long, and longer than plain calls."""
    windows = list[str]()

    def time_cases(cases: Any, clock: str, *about: Any) -> dict[str, Samples]:
        windows.append(clock)
        if (n := windows.count("graph")) > disturbed:
            return {"step": Samples((1e-3, 1.001e-3, 1e-3), clock)}
        if evenly:
            return {"step": Samples((1.5e-3 if clock == "events" else 3e-3,) * 3, clock)}
        return {"step": Samples((3e-3, 5e-3, 4e-3, 9e-3) if n % 2 else (9e-3 - n * 1e-4,) * 3, clock)}

    monkeypatch.setattr("reflib.lab.measuring.time_cases", time_cases)
    values, notes = dict[str, Any](), list[str]()
    job = {"lock": str(tmp_path / "lock")}
    child.timed(job, lambda: ([], []), SimpleNamespace(type="cuda"), values, notes)
    assert windows.count("events") == child.WINDOWS and windows.count("graph") <= child.MOST
    assert (values["times"]["graph"][0] == 1e3) == (disturbed < child.MOST)
    assert bool(notes) == (disturbed > child.MOST), notes


def test_a_hang_is_ended(file: Path, tmp_path: Path) -> None:
    status = run.sweep(request(file, "hangs", backends=("reflib",), limit=4.0), tmp_path, lambda line: None)
    (row,) = rows(tmp_path)
    assert status == 1 and row.status == "timed out" and row.note == "after 4 s"
    if (pid := file.parent / "pid").exists():  # it had come as far as hanging
        assert gone([int(pid.read_text())])


def test_a_sweep_ends_on_time(file: Path, tmp_path: Path) -> None:
    said = list[str]()
    assert run.sweep(request(file, "mlp", seconds=0.2), tmp_path, said.append) == 1
    assert not run.stored(tmp_path / "results.jsonl") and "3 measurements are left" in "\n".join(said)


def test_the_order_is_the_longest_first() -> None:
    jobs = run.plan(run.Request("cpu", dtypes=("float32", "bfloat16")), torch.device("cpu"))
    every = sum(len(m.modes) for m in models())
    assert (
        len(jobs) == every * 2 * 3 and [j["dtype"] for j in jobs] == ["float32"] * every * 3 + ["bfloat16"] * every * 3
    )
    costs = {m.name: m.cost for m in models()}
    took = [costs[j["model"]] * run.COSTS[j["mode"]] for j in jobs[: every * 3]]
    assert took == sorted(took, reverse=True) and not any(j["real"] for j in jobs)


@pytest.mark.parametrize(
    "wrong", [{"only": ("gpt3",)}, {"modes": ("infer",)}, {"dtypes": ("int8",)}, {"backends": ("x",)}]
)
def test_a_bad_request_measures_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(LabError, match="there are: "):
        run.sweep(run.Request("cpu", **wrong), tmp_path / "out")


# -- regressions ------------------------------------------------------------------------------------
def changed(folder: Path, to: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A copy of a sweep, with other rows."""
    shutil.copytree(folder, to)
    data = [change(row.to_data()) for row in rows(folder)]
    recording.dump(to / "sweep.cpu.json", data, [])
    return to


def times(who: str, factor: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(row: dict[str, Any]) -> dict[str, Any]:
        if row["case"] == who and row["metric"] == "time" and row.get("value"):
            return {**row, "value": row["value"] * factor, "spread": 0.01 * row["value"]}
        return row

    return change


@pytest.mark.parametrize(
    "change, words, status",
    [
        (times("reflib", 1.0), (), 0),
        (times("reflib", 1.05), (), 0),  # within 10%
        (times("reflib", 1.05), ("--fail-over", "2%"), 1),
        (times("reflib", 1.5), (), 1),
        (times("reflib", 1.5), ("--fail-over", "80%"), 0),
        (times("TorchInductor", 1.5), (), 0),  # a peer's time is not ours
    ],
)
def test_compare(swept: tuple[Path, int, list[str]], tmp_path: Path, change: Any, words: Any, status: int) -> None:
    before = changed(swept[0], tmp_path / "a", times("reflib", 1.0))
    after = changed(before, tmp_path / "b", change)
    found = CliRunner().invoke(cli, ["compare", str(before), str(after), *words])
    assert found.exit_code == status, found.output
    assert ("2 of 2 rows slower" in found.output) == bool(status), found.output


def test_a_model_that_is_wrong_now_is_a_regression(swept: tuple[Path, int, list[str]], tmp_path: Path) -> None:
    def wrong(row: dict[str, Any]) -> dict[str, Any]:
        if (row["case"], row["metric"], row["at"]["model"]) != ("reflib", "time", "mlp"):
            return row
        kept = {name: value for name, value in row.items() if name not in ("clock", "cache", "spread")}
        return {**kept, "value": None, "status": "wrong", "note": "tensor 0 of 1: error 0.5"}

    after = changed(swept[0], tmp_path / "b", wrong)
    found = CliRunner().invoke(cli, ["compare", str(swept[0]), str(after), "--fail-over", "900%"])
    assert found.exit_code == 1 and "1 broken in B" in found.output and "wrong tensor 0 of 1" in found.output
    assert CliRunner().invoke(cli, ["compare", str(after), str(swept[0])]).exit_code == 0  # mended


# -- the report -------------------------------------------------------------------------------------
def row(model: str, who: str, value: float | None, metric: str = "time", clock: str = "wall", **more: Any) -> Row:
    at = {"model": model, "mode": "training", "dtype": "bfloat16"}
    return Row("sweep", who, metric, value, "µs", 0.1, at, clock if metric == "time" else "", device="D", **more)


def test_means_by_hand() -> None:
    listed = [
        row("a", "eager", 8.0), row("a", "TorchInductor", 4.0), row("a", "reflib", 2.0),
        row("b", "eager", 3.0), row("b", "TorchInductor", 1.0), row("b", "reflib", 6.0),
        # graphs, where both have one, count more than calls
        row("c", "eager", 9.0), row("c", "TorchInductor", 9.0), row("c", "reflib", 3.0),
        row("c", "TorchInductor", 5.0, clock="graph"), row("c", "reflib", 10.0, clock="graph"),
        row("c", "reflib", 5e-7, "error", note="inaccurate: tensor 0 of 1"),
        row("d", "eager", 1.0), row("d", "TorchInductor", 1.0), row("d", "reflib", None, status="wrong", note="off"),
        row("a", "TorchInductor", 30.0, "cold compile"), row("a", "reflib", 10.0, "cold compile"),
        row("e", "reflib", None, status="not installed", note="no module"),
    ]  # fmt: skip
    (found,) = report.classes(listed).values()
    assert [s.model for s in found] == ["d", "b", "c", "a"]  # what is wrong, then the slowest
    means = report.means(found)
    assert (means["models"], means["correct"], means["inaccurate"], means["slower than TorchInductor"]) == (4, 3, 1, 2)
    assert means["over TorchInductor"] == pytest.approx((2 * (1 / 6) * 0.5) ** (1 / 3))
    assert means["over TorchInductor, calls"] == pytest.approx((2 * (1 / 6) * 3) ** (1 / 3))
    assert means["over eager"] == pytest.approx((4 * 0.5 * 3) ** (1 / 3))
    assert means["cold compile"] == pytest.approx(3.0) and means["peak memory"] is None
    worst = report.summary(Rows(listed))["worst"]
    assert [(w["model"], w["over TorchInductor"]) for w in worst] == [("b", 1 / 6), ("c", 0.5), ("a", 2.0)]


def test_what_options_cost() -> None:
    """(Of the models where they were measured.)"""
    rows = Rows([row("a", "reflib", 2.0), row("a", "batch_invariant", 3.0), row("b", "reflib", 1.0)])
    rows += [row("b", "batch_invariant", 1.5), row("c", "reflib", 1.0)]
    heads, body = report.costs_table(rows)
    assert heads[3:] == ["batch_invariant"] and [line[0] for line in body] == ["geometric mean", "a", "b"]
    assert {float(line[3]) for line in body} == {1.5}
    assert report.costs_table(Rows([row("a", "reflib", 2.0)]))[1] == []


def test_a_partial_sweep_says_how_much_is_there() -> None:
    """What is not measured yet is neither a failure nor in a mean, and comes last."""
    jobs = run.plan(run.Request(size="real"), None)
    found = [
        Row("sweep", j["backend"], "time", 1.0, "µs", 0.1, {k: j[k] for k in ("model", "mode", "dtype")}, "graph")
        for j in jobs
    ]
    assert report.coverage(Rows(found)) == f"Complete: all {len(jobs)} measurements are there."
    random.seed(11)
    of_class = [i for i, j in enumerate(jobs) if (j["mode"], j["dtype"]) == ("training", "float32")]
    left = random.sample(of_class, 5)
    kept = Rows(row for i, row in enumerate(found) if i not in left)
    told = f"Partial: {len(jobs) - 5} of {len(jobs)} measurements are there (training, float32: "
    assert report.coverage(kept).startswith(f"{told}{len(of_class) - 5} of {len(of_class)}).")
    assert report.coverage(Rows([*kept, row("of another list", "eager", 1.0)])) == ""

    a, b, c = ([row(m, "TorchInductor", 2.0), row(m, "reflib", 1.0)] for m in "abc")
    del b[1]
    c[1] = row("c", "reflib", None, status="crashed")
    (listed,) = report.classes([*a, *b, *c]).values()
    assert [(s.model, s.status("reflib")) for s in listed] == [("c", "crashed"), ("a", "ok"), ("b", "not measured")]
    assert (report.means(listed)["models"], report.means(listed)["correct"]) == (2, 1)


def test_the_pages(swept: tuple[Path, int, list[str]], backends: tuple[str, ...]) -> None:
    folder = swept[0]
    data = json.loads((folder / "summary.json").read_text())
    assert {(c["mode"], c["dtype"]) for c in data["classes"]} == {("inference", "float32"), ("training", "float32")}
    assert {(bad["model"], bad["status"]) for bad in data["not ok"]} >= {
        ("dies", "crashed"),
        ("absent", "not installed"),
    }
    text = (folder / "report.html").read_text()
    assert "Not installed, so not measured: absent, half_there." in text and text.count("<h2>") == 4 + len(backends)
    assert '<th scope="row">reflib</th><td>dies</td>' in text


def test_the_books_page(
    swept: tuple[Path, int, list[str]], backends: tuple[str, ...], tmp_path: Path, root: Path, monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(str(root / "book" / "_ext"))
    page = importlib.import_module("reflib_pages").sweep
    none = "**Nothing has been recorded on an H200 yet.** To make a recording: `make sweep`"
    assert page(tmp_path).startswith(none) and "notebooks/recorded" in page(tmp_path)
    recorded = tmp_path / "notebooks" / "recorded"
    recorded.mkdir(parents=True)
    shutil.copy(swept[0] / "sweep.cpu.json", recorded)
    text = page(tmp_path)
    assert text.startswith(none) and text.count("\n## ") == 1
    assert text.count("<table") == text.count("</table>") == 4 + len(backends)
    found = [r.to_data() | {"device": "NVIDIA H200"} for r in rows(swept[0])]
    recording.dump(recorded / "sweep.h200.json", found, [])
    assert page(tmp_path).startswith("## NVIDIA H200") and none not in page(tmp_path)
