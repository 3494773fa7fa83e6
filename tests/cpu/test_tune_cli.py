"""`reflib tune`: decisions from one machine's cache to another's, and what is said when a table is wrong."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from reflib import cli as command
from reflib.choose.portable import export
from reflib.choose.store import Store, device_model, facts, store
from reflib.errors import ReflibError
from reflib.tables import LARGEST, TableError, load_table

H200 = "NVIDIA H200"
CPU = torch.device("cpu")


def tune(*words: str, stdin: str | bytes | None = None) -> Result:
    """The command's result; what is no exit of its own is raised."""
    result = CliRunner().invoke(command.cli, ["tune", *words], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def decide(key: str, winner: str = "split", time: float = 2.0, sizes: str = "x[8, 64] w[64, 8]", **more: Any) -> None:
    """A decision in the process's store."""
    rows = [{"name": "aten", "status": "ok", "time_us": 4.0}, {"name": "wrong", "status": "wrong", "time_us": 1.0}]
    rows += [{"name": winner, "status": "ok", "time_us": time}] if winner != "aten" else []
    said = facts(CPU, "aten.mm", sizes, "aten", 0.5, dtypes="float16 float16") | {"device": H200} | more
    store().put(key, {"winners": [winner], "rows": rows, "reason": "measured"}, said)


@pytest.fixture(autouse=True)
def here(fresh_cache: Path) -> Path:
    return fresh_cache


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calling it makes the cache that of another machine."""
    return lambda: monkeypatch.setenv("REFLIB_CACHE_DIR", str(tmp_path / "elsewhere"))


def write(path: Path, *entries: dict[str, Any]) -> str:
    least = {"device": H200, "op": "aten.mm", "sizes": "[8]", "winner": "aten"}
    path.write_text(json.dumps({"format": 1, "entries": [least | e for e in entries]}))
    return str(path)


def test_decisions_move_to_another_machine(tmp_path: Path, elsewhere: Any) -> None:
    decide("k1")
    decide("k2", "aten", sizes="x[9, 9]", device="AMD EPYC")
    path = tmp_path / "t.json"
    assert "2 decisions" in tune("export", str(path)).stderr
    elsewhere()
    result = tune("import", str(path))
    assert result.stdout.splitlines() == [
        f"1 decision for AMD EPYC from {path}",
        f"1 decision for NVIDIA H200 from {path}",
    ]
    assert store().imported(H200, "aten.mm", "a[8, 64] b[64, 8]", "float16 float16") == "split"
    assert store().imported("AMD EPYC", "aten.mm", "a[9, 9]") == "aten"
    assert store().get("k1") is None, "an import is no decision made here"


def test_what_an_exported_entry_says() -> None:
    decide("k")
    (entry,) = export(store())["entries"]
    assert entry.pop("versions")["torch"] == torch.__version__ and entry.pop("date")
    assert entry == {
        "device": H200, "op": "aten.mm", "sizes": "x[8, 64] w[64, 8]", "dtypes": "float16 float16",
        "winner": "split", "time_us": 2.0, "default": "aten", "default_us": 4.0,
    }  # fmt: skip


def test_times_of_several_sizes_and_winners_of_several_ranges() -> None:
    rows = [{"name": n, "status": "ok", "time_us": t, "where": w} for n, t, w in (("a", 2.0, "1"), ("a", 8.0, "2"))]
    rows.append({"name": "aten", "status": "ok", "where": "1"})
    said = facts(CPU, "aten.mm", "[s0]", "aten", 0.5)
    store().put("k", {"winners": ["a"], "rows": rows, "reason": ""}, said)
    store().put("m", {"winners": ["a", "aten", "a"], "rows": rows, "reason": ""}, said | {"sizes": "[s0, 2]"})
    one, several = sorted(export(store(), device_model(CPU))["entries"], key=lambda e: len(e["sizes"]))
    assert (one["winner"], one["time_us"]) == ("a", 4.0) and "default_us" not in one, "a geometric mean, or nothing"
    assert several["winner"] == "a | aten | a" and "time_us" not in several


def test_of_decisions_about_the_same_the_newest_is_exported() -> None:
    decide("k1", "new", date="2026-02-01T00:00:00+00:00")
    decide("k2", "old", date="2026-01-01T00:00:00+00:00")
    result = tune("export")
    assert [e["winner"] for e in json.loads(result.stdout)["entries"]] == ["new"]
    assert "1 decision to standard output; 1 older decision with other winners left out" in result.stderr


def test_a_decision_that_no_table_may_hold_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    decide("k1", "bad\x1bname")
    decide("k2", sizes="x[4]")
    assert [e["sizes"] for e in export(store())["entries"]] == ["x[4]"]
    assert "left out" in caplog.text


def test_export_of_one_device(tmp_path: Path) -> None:
    decide("k1")
    decide("k2", device="AMD EPYC")
    entries = json.loads(tune("export", "--device", "nvidia h200").stdout)["entries"]
    assert [e["device"] for e in entries] == [H200]
    result = tune("export", str(tmp_path / "t.json"), "--device", "NVIDIA B200")
    assert result.exit_code == 1 and "AMD EPYC, NVIDIA H200" in result.stderr
    assert not (tmp_path / "t.json").exists()


def test_export_where_nothing_was_decided() -> None:
    result = tune("export")
    assert json.loads(result.stdout) == {"format": 1, "entries": []} and "0 decisions" in result.stderr


def test_standard_input_and_output(elsewhere: Any) -> None:
    decide("k")
    text = tune("export", "-").stdout
    assert tune("merge", "-", "-", stdin=text).stdout == text
    elsewhere()
    assert tune("import", "-", stdin=text).stdout == "1 decision for NVIDIA H200 from standard input\n"
    assert store().imported(H200, "aten.mm", "[8, 64] [64, 8]") == "split"


def test_nothing_is_imported_if_any_file_is_wrong(tmp_path: Path) -> None:
    good = write(tmp_path / "good.json", {})
    bad = write(tmp_path / "bad.json", {}, {"winner": "a\nb"})
    with pytest.raises(TableError, match=r"bad\.json: entry 2: key 'winner'"):
        tune("import", good, bad)
    assert store().imports().entries == ()


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "huge.json", "wb") as f:
        f.truncate(LARGEST + 1)
    with pytest.raises(TableError, match="more than 64 MB"):
        tune("import", str(tmp_path / "huge.json"))


def test_an_import_replaces_what_is_about_the_same_and_says_conflicts(tmp_path: Path) -> None:
    a = write(tmp_path / "a.json", {"winner": "a", "date": "2026-02-01"}, {"sizes": "[9]"})
    b = write(tmp_path / "b.json", {"winner": "b", "date": "2026-01-01"})
    result = tune("import", a, b)
    assert "conflict: NVIDIA H200, aten.mm [8]: a (2026-02-01) stays, b (2026-01-01) goes" in result.stderr
    assert store().imported(H200, "aten.mm", "[8]") == "a"
    tune("import", b)
    assert store().imported(H200, "aten.mm", "[8]") == "b" and len(store().imports().entries) == 2


@pytest.mark.parametrize("how, stays", [([], "a"), (["--how", "newest"], "a"), (["--how", "fastest"], "b")])
def test_merge(tmp_path: Path, how: list[str], stays: str) -> None:
    a = write(tmp_path / "a.json", {"winner": "a", "date": "2026-02-01", "time_us": 3.0})
    b = write(tmp_path / "b.json", {"winner": "b", "date": "2026-01-01", "time_us": 2.0}, {"sizes": "[9]"})
    out = tmp_path / "out.json"
    result = tune("merge", str(out), a, b, *how)
    assert {e.sizes: e.winner for e in load_table(out).entries} == {"[8]": stays, "[9]": "aten"}
    assert "2 decisions, 1 conflict" in result.stderr and "conflict: NVIDIA H200" in result.stderr
    assert store().imports().entries == (), "merging touches no cache"
    tune("merge", str(out), str(out), b, *how)  # its output may be an input
    assert len(load_table(out).entries) == 2


def test_show_and_clear(tmp_path: Path) -> None:
    assert tune("show").stdout == "no decisions\n"
    decide("k")
    tune("import", write(tmp_path / "t.json", {"op": "aten.bmm", "device": "*"}))
    head, bmm, _ = tune("show").stdout.splitlines()
    assert head.split() == ["op", "sizes", "winner", "us", "default", "default", "us", "device", "date", "from"]
    assert bmm.split() == ["aten.bmm", "[8]", "aten", "-", "-", "-", "*", "-", "import"], "* comes first"
    text = tune("show", "--op", "aten.mm").stdout
    assert "aten.bmm" not in text and "x[8, 64] w[64, 8] float16 float16  split" in text and "here" in text
    assert "no decisions for an op with 'conv'" in tune("show", "--op", "conv").stdout
    assert tune("clear").stdout == "removed 1 decision and 1 imported\n"
    assert tune("show").stdout == "no decisions\n"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide("k")
    path, link = tmp_path / "t.json", tmp_path / "link.json"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "replace", full)
        with pytest.raises(TableError, match="No space left"):
            tune("export", str(path))
    assert path.read_text() == "before" and sorted(p.name for p in tmp_path.glob(".*")) == []
    tune("export", str(link))
    assert link.is_symlink() and len(load_table(path).entries) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(TableError, match="cannot write the table"):
        tune("export", str(tmp_path / "no" / "t.json"))


def test_words_that_are_missing() -> None:
    assert tune("import").exit_code == 2 and tune("merge", "out.json").exit_code == 2
    assert tune("merge", "out.json", "a.json", "--how", "best").exit_code == 2


def test_a_wrong_table_is_one_line_and_exit_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.json").write_text("not a table")
    monkeypatch.setattr(sys, "argv", ["reflib", "tune", "import", str(tmp_path / "t.json")])
    with pytest.raises(SystemExit) as e:
        command.main()
    said = capsys.readouterr().err
    assert e.value.code == 2 and said.startswith("reflib: ") and said.count("\n") == 1 and "not JSON" in said


def test_a_cache_that_cannot_be_used_is_an_error_here(here: Path) -> None:
    """A compilation goes on without; a command whose work it is must not say "no decisions"."""
    (here / "tuning").mkdir(parents=True)
    (here / "CACHEDIR.TAG").write_text("")
    (here / "tuning").rmdir()
    (here / "tuning").write_text("in its place")
    for words in (["show"], ["export"], ["clear"]):
        with pytest.raises(ReflibError, match="cannot use the decisions"):
            tune(*words)


def test_a_damaged_store_is_begun_anew() -> None:
    decide("k")
    store().close()
    store().path.write_bytes(b"nonsense" * 1000)
    assert tune("show").stdout == "no decisions\n"
    decide("k")
    assert Store(store().folder).get("k") is not None
