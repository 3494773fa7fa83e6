"""What a failed run leaves behind: never empty, bounded, with relative links."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from reflib.batch import artifacts
from reflib.batch.artifacts import Failed, gather
from tests.forking import ask, server

FAILS = """
import torch, reflib
f = torch.compile(lambda x: torch.relu(x) + 1, backend="reflib")
f(torch.ones(3))
raise SystemExit(print("it is wrong") or 3)
"""

LEAVES = "import os; p = os.environ['REFLIB_{}']; os.makedirs(p); open(p + '/{}', 'w').write({!r}); print(1)"


class Links(HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name == "href"]


class Forked:
    """Stands in for ``subprocess``: programs are forked from a Python that has imported torch."""

    DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired

    @staticmethod
    def run(command, *, timeout, env=os.environ, stdout=None, **_):
        code, out, errors = ask(server(), command[2:] if command[1] == "-m" else command[1:], env, timeout)
        if stdout is not None:
            stdout.write((out + errors).encode())
        return SimpleNamespace(returncode=code, stderr=errors)


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(artifacts, "subprocess", Forked)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_failure_leaves_its_reason_a_trace_and_a_repro(tmp_path, forked):
    folder = tmp_path / "artifacts"
    (tmp_path / "summary.html").write_text("all of it")
    failed = [
        Failed("tests/a.py::test_b[x-1]", "first line\nAssertionError: <it> is wrong", lambda _: python(FAILS)),
        Failed("passes alone", "x", lambda _: python("print('fine')")),
    ]
    assert gather(folder, failed, {"the whole": tmp_path / "summary.html"}) == []
    links = Links(folder / "index.html").found
    assert links and all(not link.startswith(("/", "http")) and (folder / link).is_file() for link in links), links
    assert "../summary.html" in links
    names = {re.sub(r"\d{3,}|_[0-9a-f]{12}", "N", Path(link).name) for link in links}
    assert {"why.txt", "again.txt", "trace_N_N.json.gz", "reproN.py", "reproN.html"} <= names, names
    text = (folder / "index.html").read_text()
    assert "AssertionError: &lt;it&gt; is wrong" in text and "failed (exit 3)" in text
    assert "passed: it does not fail alone" in text and "passes alone: no graph was compiled" in text


def test_an_empty_artifact_is_a_problem_that_is_said(tmp_path, forked):
    silent = Failed("silent", "why", lambda _: python("raise SystemExit(1)"))
    assert gather(tmp_path / "a", [silent]) == ["artifact 00-silent/again.txt is empty"]
    run = "import os; os.makedirs('run'); open('run/.lock', 'w'); open('run/log.txt', 'w').write('x'); print(1)"
    failed = Failed("run", "why", lambda at: python(f"import os; os.chdir({str(at)!r}); {run}"))
    assert gather(tmp_path / "b", [failed]) == []
    assert [p.name for p in tmp_path.glob("b/*/run/*")] == ["log.txt"], "a run's lock is no artifact"
    broken = python(LEAVES.format("REPRO", "repro.py", "from reflib.observe.rebuild import main\n1 / 0"))
    assert gather(tmp_path / "c", [Failed("broken", "why", lambda _: broken)]) == []
    said = r"broken: no report of repro.py: reflib: loading \S*repro.py raised: repro.py:2 .*: ZeroDivisionError"
    assert re.search(said, (tmp_path / "c" / "index.html").read_text())
    (tmp_path / "file").write_text("")
    [problem] = gather(tmp_path / "file", [silent])
    assert "not complete" in problem and str(tmp_path / "file") in problem


def test_sizes_times_and_numbers_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "MOST", 2)
    monkeypatch.setattr(artifacts, "FILE_BYTES", 1000)
    monkeypatch.setattr(artifacts, "SECONDS", 3.0)
    large = python(LEAVES.format("TRACE", "big", "x" * 2000))
    slow = python("print('begun', flush=True); import time; time.sleep(60)")
    commands = [large, slow, slow]
    assert gather(tmp_path, [Failed(str(i), "why", lambda _, c=c: c) for i, c in enumerate(commands)]) == []
    text = (tmp_path / "index.html").read_text()
    assert not list(tmp_path.rglob("big")) and "00-0/traces/big (0.0 MB) is over the limits" in text
    assert "stopped after 3 s" in text and "1 more failed; the first 2 are here" in text


def test_a_runs_failed_notebooks_run_again_with_their_parameters(tmp_path):
    about = {"notebook": "fusion", "label": "fusion rows=8", "parameters": {"rows": 8}, "device": "cpu"}
    job = SimpleNamespace(text="{}", problem="", **about)
    outcomes = [(job, SimpleNamespace(status=s, error="it broke")) for s in ("ok", "failed", "interrupted")]
    [failed] = artifacts.of_run(outcomes, ["reflib"])
    words = failed.again(tmp_path)
    assert (failed.name, failed.why, words[:2]) == ("fusion rows=8", "it broke", ["reflib", "run"])
    assert words[-2:] == ["-p", "rows=8"] and (tmp_path / "fusion.ipynb").read_text() == "{}"


def test_pytest_leaves_them_where_that_is_asked_for(tmp_path, root, monkeypatch):
    for value, on in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv(artifacts.SWITCH, value)
        assert artifacts.wanted() == on
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "conftest.py").write_text((root / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text("def test_wrong():\n    assert 1 == 2, 'wrong'\ndef test_right(): pass\n")
    (tmp_path / "test_broken.py").write_text("import a_module_that_is_not_there")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "artifacts: " in done.stdout, done.stdout + done.stderr
    (page,) = tmp_path.glob("runs/tests-*/index.html")
    assert "test_it.py::test_wrong" in page.read_text() and "failed (exit 1)" in page.read_text()
    assert "test_broken.py" in page.read_text() and "a_module_that_is_not_there" in page.read_text()


def test_the_workflow_in_the_book_is_yaml_that_turns_it_on(root):
    yaml = pytest.importorskip("yaml")
    text = (root / "book" / "api-explain.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    steps = yaml.safe_load(shown)["jobs"]["test"]["steps"]
    assert any(s.get("env", {}).get(artifacts.SWITCH) == "1" for s in steps)
    upload = next(s for s in steps if "upload-artifact" in s.get("uses", ""))
    assert upload["with"]["path"] == "runs/" and upload["if"] == "failure()"
