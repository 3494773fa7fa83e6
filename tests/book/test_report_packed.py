"""A report of a thousand kernels: one file of less than 3 MB, whose listings the browser unpacks."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from reflib import cli
from reflib.lab.report import page
from tests.browsing import Watched

MODEL = "def model(x):\n    return ((x.softmax(-1) + 1).relu() @ x.t()).sum(0)\n"
CODES = "() => [...document.querySelectorAll('code')].map(c => c.textContent)"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    at = tmp_path_factory.mktemp("packed")
    (at / "m.py").write_text(MODEL)
    words = ["report", f"{at / 'm.py'}:model", "--input", "64x64", "--target", "sm_90", "--no-measure"]
    done = CliRunner().invoke(cli.cli, [*words, "--out", str(at / "r.html"), "--json", str(at / "r.json")])
    assert done.exit_code == 0, done.output
    return json.loads((at / "r.json").read_text())


def test_packed_listings_are_the_same_text(data: Any, tmp_path: Path, watched: Watched) -> None:
    found = []
    for packed in (False, True):
        (file := tmp_path / "r.html").write_text(page._rendered(data, page.Listings(packed)))
        opened = watched.open(file)
        opened.wait_for_function("() => [...document.querySelectorAll('.pair code')].every(c => c.textContent)")
        found.append(opened.evaluate(CODES))
        assert opened.evaluate("() => document.querySelectorAll('.ir .line[tabindex]').length") > 3
    assert found[0] == found[1] and any("tl.store" in text for text in found[0])
    assert not watched.problems


def test_a_thousand_kernels(data: Any) -> None:
    graph = data["graphs"][0]
    some = [k for k in graph["kernels"] if not k["fallback"]]
    graph["kernels"] = [
        {**k, "name": f"{k['name']}_{i}", "source": k["source"].replace(k["name"], f"{k['name']}_{i}") + f"\n# {i}"}
        for i in range(1000)
        for k in [some[i % len(some)]]
    ]
    for name in ("program", "fused", "wrapper"):
        graph[name] = "\n".join(f"{line}  # {i}" for i in range(400) for line in graph[name].splitlines())
    text = page.render(data)
    assert len(page._rendered(data, page.Listings(False))) > 3_000_000 > len(text.encode()) and "<noscript>" in text
