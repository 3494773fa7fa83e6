"""Packages built and opened in processes of their own: what is said of each, and of those that fail."""

import json
from pathlib import Path

import pytest

from reflib import lab
from reflib.lab.package_ways import build_packages, open_packages
from reflib.lab.rows import ROWS_FILE

SOURCE = """
import ctypes, os, torch

def make(device, dtype):
    if os.environ.get("MISDEED"):
        ctypes.string_at(0)
    torch.manual_seed(0)
    return torch.nn.Linear(8, 4, device=device, dtype=dtype), (torch.ones(3, 8, device=device, dtype=dtype),)
"""


@pytest.mark.slow
def test_packages_are_built_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROWS_FILE, str(tmp_path / "rows"))
    lab.setup(device="cpu", quiet=True)
    files = {str(tmp_path / "cpu.reflib"): ["cpu"], str(tmp_path / "two.reflib"): ["cpu", "sm_80"]}
    ways = {"reflib": {"compiler": "reflib", "files": files, "environment": {"CUDA_VISIBLE_DEVICES": ""}}}
    made = build_packages("b", SOURCE, ways, timeout_s=100)
    assert [(r.metric, r.unit, r.at["architectures"]) for r in made] == [
        ("build", "s", 0), ("size", "bytes", 0), ("build", "s", 1), ("size", "bytes", 1),
    ]  # fmt: skip
    for path, archs in files.items():
        size = made.value("reflib", "size", architectures=len(archs) - 1)
        assert size == Path(path).stat().st_size
    opening = {
        "it": {"compiler": "reflib", "path": str(tmp_path / "two.reflib")},
        "no file": {"compiler": "reflib", "path": str(tmp_path / "none.reflib")},
        "crashes": {"compiler": "reflib", "path": str(tmp_path / "two.reflib"), "environment": {"MISDEED": "1"}},
    }
    found = open_packages("o", SOURCE, opening, timeout_s=100, budget_s=0.01)
    assert [(r.metric, r.ok, r.note) for r in found.where(case="it")] == [
        ("load", True, ""), ("first call", True, ""), ("time", True, ""),
    ]  # fmt: skip
    assert found.value("it", "first call") > found.value("it", "load") > 0
    assert [(r.status, r.value) for r in found.where(case="no file")] == [("refused", None)]
    assert [(r.status, r.note) for r in found.where(case="crashes")] == [("crashed", "SIGSEGV")]
    written = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(written) == len(made) + len(found)


def test_what_is_not_reached_says_so(tmp_path: Path) -> None:
    lab.setup(device="cpu", quiet=True)
    slow = {"compiler": "reflib", "files": {str(tmp_path / "a"): ["cpu"], str(tmp_path / "b"): ["cpu"]}}
    rows = build_packages("b", "import time\ntime.sleep(60)", {"slow": slow}, timeout_s=1)
    assert [r.status for r in rows] == ["timed out"] * 2


@pytest.mark.slow
def test_aotinductors_package_is_loaded_in_three_ways(tmp_path: Path) -> None:
    lab.setup(device="cpu", quiet=True)
    path, other = str(tmp_path / "cpu.pt2"), str(tmp_path / "other.pt2")
    ways = {
        "as it is": {"compiler": "AOTInductor", "files": {path: ["cpu"]}, "config": {"max_autotune": False}},
        "no such option": {"compiler": "AOTInductor", "files": {other: ["cpu"]}, "config": {"no_such_option": 1}},
    }
    made = build_packages("b", SOURCE, ways, timeout_s=200)
    assert [r.status for r in made] == ["ok", "ok", "refused"] and "no_such_option" in made[2].note
    it = {"compiler": "AOTInductor", "path": path}
    loaders = {how: {**it, "loader": how} for how in ("package", "one thread", "C++")}
    found = open_packages("o", SOURCE, loaders, timeout_s=100, budget_s=0.01)
    assert [(r.ok, r.note) for r in found] == [(True, "")] * 9
