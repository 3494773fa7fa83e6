"""`reflib report`: the page is whole, offline and escaped; its figures have words; mistakes are named, and then nothing
is written."""

import copy
import json
import math
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib import cli
from reflib.errors import LabError, OptionError, ReflibError
from reflib.lab.pictures import moved_bytes
from reflib.lab.report import ReportRequest, changes, page, parse_options, subject, trial, write
from reflib.lab.report.trial import CallOutcome
from reflib.observe import repro
from reflib.options import Options

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(24), nn.Linear(24, 40)

    def forward(self, x, note="<b>&amp;</b>"):
        y = self.up(self.norm(x).relu()) if note != "<script>alert('no')</script>" else x
        x.add_(1)
        return y.softmax(-1), y.sum()

class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()

def make():
    return Net(), (torch.randn(16, 24),), {"note": "<i>"}

def pair():
    return "model", ()

def scaled(x, by):
    return torch.relu(x) * by

def broken(x):
    return x.no_such_method()  # here

def leaves():
    raise ValueError("cannot be made")

def layer():
    return nn.Sequential(nn.Linear(24, 8), nn.Tanh()), torch.randn(4, 24)

arguments = {"x": torch.randn(8), "by": 2.0}
inputs = torch.randn(8)
"""


class Reader(HTMLParser):
    """What a browser would take from the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.codes: list[str] = []
        self.words: list[str] = []
        self._stack: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in ("meta", "link", "br", "img"):
            self._stack.append(tag)
        if tag == "code":
            self.codes.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._stack:
            while self._stack.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if "code" in self._stack:
            self.codes[-1] += data
        if not {"style", "script"} & set(self._stack):
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for t, attrs in self.tags if t == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("report")
    (made / "model.py").write_text(MODEL)
    return made


@pytest.fixture(scope="module")
def made(folder: Path) -> Any:
    """The report on `make` as the command writes it: (text, Reader, data)."""
    run("model.py:make", "--json", "data.json", "-o", "verify=true", at=folder, measure=True)
    text = (folder / "report.html").read_text()
    return SimpleNamespace(text=text, page=Reader(text), data=json.loads((folder / "data.json").read_text()))


def run(*words: str, at: Path, measure: bool = False) -> None:
    """The console script, in the folder `at`; what it ends with is raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(at)
        patch.setattr(sys, "argv", ["reflib", "report", *words, *([] if measure else ["--no-measure"])])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    if ended.value.code:
        raise SystemExit(ended.value.code)


# -- the page ---------------------------------------------------------------------------------------
def test_the_page_says_what_the_compiler_did(made: Any) -> None:
    assert made.data["comparison"]["verdict"] == "right"
    (graph,) = made.data["graphs"]
    assert [s["name"] for s in graph["stages"]] == "capture lower fuse autotune schedule plan generate wrap".split()
    listings = {"\n".join(c.splitlines()) for c in made.page.codes}
    for text in (graph["capture"], graph["program"], graph["fused"], graph["wrapper"], graph["memory"]["steps"]):
        assert "\n".join(text.splitlines()) in listings
    assert graph["kernels"]
    for kernel in graph["kernels"]:
        assert "\n".join(kernel["source"].splitlines()) in listings and kernel["ir"] in listings
        assert "model.py:" in kernel["lines"]
    for r in graph["refusals"]:
        assert r["reason"] in made.page.text
    for word in (
        "float32[16, 24] on cpu", "note='<i>'", "verify=True", "module Net, training, on cpu", "largest",
        reflib.__version__,
    ):  # fmt: skip
        assert word in made.page.text


def test_its_numbers_are_explains(made: Any) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(MODEL, "model.py", "exec"), namespace)
    model, args, kwargs = namespace["make"]()
    with torch.no_grad():
        e = reflib.explain(model, *args, kwargs=kwargs)
    (row,) = e.summary()
    totals = made.data["totals"]
    assert (totals["kernels"], totals["calls"], totals["operators"]) == (row["kernels"], row["calls"], row["ATen ops"])
    assert totals["peak_bytes"] == e.memory.peak_bytes
    assert (totals["bytes_before"], totals["bytes_after"]) == (moved_bytes(e.program), moved_bytes(e.fused))
    assert sum(totals[k] for k in ("kernels", "calls")) == len(made.data["graphs"][0]["groups"])


def test_all_text_is_escaped(made: Any) -> None:
    assert len(made.page.all("script")) == 1 and "alert('no')" not in made.text
    assert any("<script>alert('no')</script>" in c for c in made.page.codes)  # shown, as text
    assert "&lt;script&gt;alert(" in made.text and "<b>&amp;</b>" not in made.text


def test_it_needs_nothing_from_elsewhere(made: Any) -> None:
    for tag, attrs in made.page.tags:
        assert tag not in ("link", "img", "iframe", "object") and "src" not in attrs
        assert attrs.get("href", "#").startswith("#")
    assert "url(" not in made.text.replace("url(#arrow)", "") and "@import" not in made.text
    (policy,) = [m["content"] for m in made.page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_links_lead_somewhere(made: Any) -> None:
    ids = [attrs["id"] for _, attrs in made.page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = {a["href"][1:] for a in made.page.all("a")}
    assert links <= set(ids) and any(k["name"] in link for k in made.data["graphs"][0]["kernels"] for link in links)


def test_every_figure_has_words(made: Any) -> None:
    drawn = [s for s in made.page.all("svg") if s.get("aria-hidden") != "true"]
    assert len(drawn) == len(made.page.all("figure")) == len(made.page.all("figcaption")) == 5
    alts = [s["aria-label"] for s in drawn]
    assert all(s["role"] == "img" and len(s["aria-label"]) > 40 for s in drawn)
    for words in ("Bars of the time per call", "A graph of", "Stacked bars", "Gantt chart"):
        assert any(a.startswith(words) for a in alts)


def test_times_are_there_beside_eagers(made: Any) -> None:
    assert [r["case"] for r in made.data["times"]] == ["eager", "reflib"]
    assert all(r["status"] == "ok" and r["us"] > 0 for r in made.data["times"])
    (said,) = [v["text"] for v in page.verdicts(made.data) if "per call" in v["text"]]
    assert said in made.page.text


def test_kernels_are_ranked_with_what_they_came_from(made: Any) -> None:
    rows = made.data["ranking"]
    (graph,) = made.data["graphs"]
    assert {k["name"] for k in graph["kernels"] if not k["fallback"]} == {r["name"] for r in rows if r["is_kernel"]}
    assert [r["above"] for r in rows] == sorted((r["above"] for r in rows), reverse=True)
    assert all(r["us"] > 0 and r["floor_us"] > 0 and r["ops"] and r["lines"] for r in rows)
    assert "Kernels by time above their floor" in made.page.text and f"#g0-{rows[-1]['name']}" in made.text


def test_a_target_that_is_not_here(folder: Path) -> None:
    run("model.py:Net", "--input", "16x24", "--target", "sm_90", "--out", "t.html", at=folder)
    text = Reader((folder / "t.html").read_text()).text
    assert "nothing was run or timed" in text and "tl.load" in text and "Beside eager" not in text


def test_gradients(folder: Path) -> None:
    run("model.py:layer", "--backward", "--out", "b.html", "--json", "b.json", at=folder)
    data = json.loads((folder / "b.json").read_text())
    assert [g["name"] for g in data["graphs"]] == ["graph 1 of 2: forward", "graph 2 of 2: backward"]
    assert data["comparison"]["verdict"] == "right"
    rows = [r["name"] for r in data["comparison"]["rows"]]
    assert rows == ["output", "gradient of 0.weight", "gradient of 0.bias"]
    assert "no-measure" in (folder / "b.html").read_text()


# -- the user's mistakes ----------------------------------------------------------------------------
def line(text: str) -> int:
    return MODEL[: MODEL.index(text)].count("\n") + 1


MISTAKES = [
    (["model.py"], "names no function: say FILE.py:NAME. It has: Net, Wide, make, pair, scaled"),
    (["modle.py:make"], "did you mean 'model.py'"),
    (["model.py:maek"], "did you mean 'make'"),
    (["model.py:zzz"], "it has Net, Wide, make"),
    (["model.py:pair"], "not (model, args)"),
    (["model.py:scaled"], "needs x, by"),
    (["model.py:Net"], "say what to call it with"),
    (["model.py:Wide", "--input", "3"], "Wide needs width"),
    (["model.py:leaves"], f'model.py:{line("raise V")} in leaves: raise ValueError("cannot be made"): ValueError'),
    (["model.py:broken", "--input", "3"], f"model.py:{line('# here')} in broken: return x.no_such_method()  # here"),
    (["model.py:scaled", "--inputs", "nothing"], "no 'nothing'"),
    (["model.py:scaled", "--inputs", "arguments", "--input", "3"], "say one of the two"),
    (["model.py:scaled", "--inputs", "torch"], "the arguments are a tuple, a dict or a tensor"),
    (["model.py:scaled", "--input", "3x"], "say 128x256:float32"),
    (["model.py:scaled", "--input", "3:flaot32"], "did you mean 'float32'"),
    (["model.py:scaled", "--input", "3:int64:4..1"], "is empty"),
    (["model.py:make", "--device", "tpu"], "it must be auto, cpu or cuda"),
    (["model.py:make", "-o", "fues=false"], "did you mean 'fuse'"),
    (["model.py:make", "-o", "fuse"], "is not NAME=VALUE"),
    (["model.py:make", "--wrapper", "c"], "must be one of"),
    (["model.py:make", "--target", "sm90"], "option target"),
    (["model.py:make", "-o", "autotune=background"], "--autotune"),
    (["model.py:make", "--out", "no/such/x.html"], "cannot write"),
    (["syntax.py:f"], "syntax.py:1: "),
    (["exits.py:f"], "__main__"),
    (["raises.py:f"], "raises.py:2 in <module>: 1 / zero: ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_a_mistake_is_named_and_nothing_written(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "syntax.py").write_text("def f(:\n    pass\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "raises.py").write_text("zero = 0\n1 / zero\n")
    before = set(tmp_path.rglob("*.html"))
    with pytest.raises(SystemExit) as ended:
        run(*words, at=tmp_path)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and "Traceback" not in error
    assert set(tmp_path.rglob("*.html")) == before and not list(tmp_path.glob(".*html*"))


def test_what_does_not_compile_leaves_the_last_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(stages: Any) -> None:
        raise ReflibError("no such luck in plan")

    monkeypatch.setitem(reflib.pipeline._STAGE, "plan", fails)
    (folder / "old.html").write_text("the last one")
    with pytest.raises(SystemExit) as ended:
        run("model.py:scaled", "--inputs", "arguments", "--out", "old.html", at=folder)
    assert ended.value.code == 2 and "reflib: no such luck in plan" in capsys.readouterr().err
    assert (folder / "old.html").read_text() == "the last one"


@pytest.mark.parametrize("target", [None, "sm_90"])
def test_a_repro_has_all_that_a_report_needs(target: str | None, tmp_path: Path) -> None:
    def f(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(x.mul_(2) + y.flip(0), -1) @ w).tanh()

    base = torch.randn(64)
    inputs = base[4:28].view(6, 4), base[8:32].view(6, 4), torch.randn(4, 7, requires_grad=True)
    repro.write(f, inputs, {}, tmp_path / "r.py", target=target)
    run("r.py", "--json", "r.json", "-o", "mix_orders=false", at=tmp_path)
    data = json.loads((tmp_path / "r.json").read_text())
    assert [g["name"].partition(": ")[2] for g in data["graphs"]] == ["forward", "backward"]
    assert "test_report_page.py" in data["graphs"][0]["kernels"][0]["lines"] and data["options"]["mix_orders"] is False
    found = data["comparison"]
    assert data["target"] == target if target else found["verdict"] == "right", found
    assert target or "gradient of argument" in str(found["rows"])
    with pytest.raises(LabError, match="is a repro: its inputs, and their device, are in it"):
        subject.load(f"{tmp_path}/r.py", shapes=("3",))


def test_nothing_to_compile_is_said(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def same(x):\n    return x\n")
    with pytest.raises(LabError, match="no tensor operation was captured"):
        request = ReportRequest(f"{tmp_path}/same.py:same", shapes=("3",))
        write(request, Options(), tmp_path / "x.html", say=lambda _: None)


# -- what is run ------------------------------------------------------------------------------------
@pytest.fixture
def loaded(folder: Path) -> Iterator[Any]:
    """(Subject, caller, eager's CallOutcome) of `make`."""
    found = subject.load(f"{folder}/model.py:make")
    caller = trial.Caller(found, False, 0)
    yield found, caller, caller(found.model)


def changed(outcome: CallOutcome, change: Any) -> CallOutcome:
    return CallOutcome([change(outcome.values[0].clone()), *outcome.values[1:]], outcome.names, outcome.structure)


def test_calls_leave_the_model_and_its_arguments_alone(loaded: Any) -> None:
    found, caller, eager = loaded
    again = caller(found.model)
    assert all(torch.equal(a, b) for a, b in zip(eager.values, again.values, strict=True))
    changed_too = [n for n, v in zip(eager.names, eager.values) if "running_mean" in n and v.abs().sum() > 0]
    assert changed_too and found.model.norm.running_mean.abs().sum() == 0  # trained on, and put back
    x = eager.values[eager.names.index("argument 0, afterwards")]
    assert torch.equal(x, found.args[0] + 1)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda t: t, "right"),
        (lambda t: t * (1 + 1e-7), "right"),
        (lambda t: t * 1.001, "wrong"),
        (lambda t: t.index_fill_(0, torch.tensor(3), math.nan), "wrong"),
        (lambda t: t.double(), "wrong"),
        (lambda t: t[:, :-1], "wrong"),
        (lambda t: t.t().contiguous().t(), "wrong"),  # laid out differently
        (lambda t: None, "wrong"),
    ],
)
def test_the_verdict(loaded: Any, change: Any, verdict: str) -> None:
    found, caller, eager = loaded
    said = trial._compare(found, caller, eager, changed(eager, change), [])
    assert said["verdict"] == verdict and bool(said["why"]) == (verdict == "wrong")
    if verdict == "right":
        assert said["reference"] == "float64"


def test_random_numbers_are_no_mistake(folder: Path) -> None:
    dropout = subject.Subject("x", folder / "model.py", lambda x: torch.dropout(x, 0.5, True), (torch.randn(99),))
    caller = trial.Caller(dropout, False, 0)
    traced = make_fx(lambda x: torch.ops.aten.native_dropout(x, 0.5, True))(torch.randn(9))
    stages: Any = SimpleNamespace(graph=SimpleNamespace(nodes=traced.graph.nodes), scheduled=None)
    eager = caller(dropout.model)
    assert trial._compare(dropout, caller, eager, eager, [stages])["verdict"] == "right"
    said = trial._compare(dropout, caller, eager, caller(dropout.model, seed=1), [stages])
    assert said["verdict"] == "unknown" and "native_dropout" in said["why"]


def test_a_peer_that_crashes_is_a_row(made: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reflib.lab.children._run_child", lambda *_, **__: (-11, ""))
    row = trial._peer("inductor", ReportRequest(f"{folder}/model.py:make"), torch.device("cpu"))
    assert (row["case"], row["status"], row["note"]) == ("inductor", "crashed", "SIGSEGV")
    text = Reader(page.render({**made.data, "times": [*made.data["times"], row]})).text
    assert "inductor : no time: crashed: SIGSEGV" in text


def test_a_wrong_result_is_said_first(made: Any) -> None:
    data = {**made.data, "comparison": {"verdict": "wrong", "why": "error 1, allowed <2>", "rows": []}}
    assert page.verdicts(data)[0]["mood"] == "bad"
    assert "The results are not eager's: error 1, allowed <2>." in Reader(page.render(data)).text


# -- inputs, options --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("128x3", (128, 3), torch.float32),
        ("7:bfloat16", (7,), torch.bfloat16),
        ("scalar:float64", (), torch.float64),
        ("4x4:bool", (4, 4), torch.bool),
        ("0x4", (0, 4), torch.float32),
        ("5:complex64", (5,), torch.complex64),
        ("900:int64:-3..5", (900,), torch.int64),
    ],
)
def test_described_tensors(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    drawn = subject.parse_shape(text)
    t = drawn.make(torch.device("cpu"), 1)
    assert (tuple(t.shape), t.dtype) == (shape, dtype) and torch.equal(t, drawn.make(torch.device("cpu"), 1))
    if ".." in text:
        assert (t.min().item(), t.max().item()) == (-3, 5)


@pytest.mark.parametrize(
    ("name", "inputs", "args", "kwargs"), [("scaled", "arguments", 0, {"x", "by"}), ("Net", "inputs", 1, set())]
)
def test_arguments_from_the_file(folder: Path, name: str, inputs: str, args: int, kwargs: set[str]) -> None:
    found = subject.load(f"{folder}/model.py:{name}", inputs)
    assert len(found.args) == args and set(found.kwargs) == kwargs and callable(found.model)


def test_options_are_typed() -> None:
    given = parse_options(["fuse=false", "max-fused-ops=8", "target=sm_90", "cpp_flags=['-O1']"])
    assert given == {"fuse": False, "max_fused_ops": 8, "target": "sm_90", "cpp_flags": ["-O1"]}
    with pytest.raises(OptionError, match="max_fused_ops"):
        Options.make(parse_options(["max_fused_ops=many"]))


# -- what changed -----------------------------------------------------------------------------------
CHAIN = """
import torch

def chain(x):
    y = torch.relu(x) * 2
    torch._dynamo.graph_break()
    return (y + part(x) + part(x[:2]).sum()).softmax(-1).cumsum(0)

def part(y):
    return (y * y).sum(0)
"""


def test_what_changed_since_an_earlier_report(tmp_path: Path) -> None:
    """A line moved is no change; another factor is a changed kernel, one more operator a new one for an old one."""
    model, words = tmp_path / "model.py", ("model.py:chain", "--input", "32x48:float32", "-o", "target=sm_90")
    model.write_text(CHAIN)
    run(*words, "--json", "old.json", at=tmp_path)
    model.write_text("# one line more\n" + CHAIN)
    run(*words, "--json", "moved.json", "--against", "old.json", at=tmp_path)
    moved = json.loads((tmp_path / "moved.json").read_text())["changes"]
    assert not moved["graphs"] and moved["same_kernels"] >= 3
    assert "the same kernels" in Reader((tmp_path / "report.html").read_text()).text

    model.write_text(CHAIN.replace("* 2", "* 3").replace("y * y)", "y * y + 1)"))
    run(*words, "--json", "new.json", "--against", "old.json", "-o", "fuse=true", at=tmp_path)
    data = json.loads((tmp_path / "new.json").read_text())
    kernels = [(k["how"], k["ops"]) for g in data["changes"]["graphs"] for k in g["kernels"]]
    (changed,) = [k for g in data["changes"]["graphs"] for k in g["kernels"] if k["how"] == "changed"]
    assert "-" in changed["diff"] and "3.0" in changed["diff"] and "model.py" not in changed["diff"]
    assert [how for how, _ in kernels].count("new") == [how for how, _ in kernels].count("gone") > 0
    text = Reader((tmp_path / "report.html").read_text()).text
    assert "1 kernel changed" in text and "Call to `torch._dynamo.graph_break()`" in text
    assert data["frames"][0]["place"] == "model.py:4" and len(data["frames"]) >= 2


@pytest.mark.parametrize("text", ["", "[1]", '{"format": 0}', "{"])
def test_what_is_no_earlier_report(text: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(SystemExit):
        run("model.py:layer", "--against", str(tmp_path / "old.json"), at=folder)
    assert not (folder / "report.html").exists() or "old.json" not in (folder / "report.html").read_text()


def test_times_of_other_machines_are_not_compared(made: Any) -> None:
    once = made.data | {"times": [r | {"spread_us": r["us"] / 10} for r in made.data["times"]]}
    slower = copy.deepcopy(once)
    for r in slower["times"]:
        r["us"] *= 10
    found = changes.changes(once, slower)
    assert found["times"] and all(r["differs"] and r["after"] == 10 * r["before"] for r in found["times"])
    said = page._since({"changes": found})
    assert said is not None and said["mood"] == "bad" and " -> " in said["text"]
    slower["machine"] = "another"
    assert not changes.changes(once, slower)["times"]
