"""`reflib tune`: decisions from one machine's cache to another's, and what is said when a table is wrong."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from reflib import cli as command
from reflib.autotune.circumstances import device_model, facts
from reflib.autotune.store import Outcome, store
from reflib.errors import ReflibError
from reflib.ir.decision import Candidate, Key
from reflib.tables import TableError, load_table

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
    rows = [Candidate(Key("aten"), "ok", 4.0), Candidate(Key("wrong"), "wrong", 1.0)]
    rows += [Candidate(Key(winner), "ok", time)] if winner != "aten" else []
    said = facts(CPU, "aten.mm", sizes, "aten", dtypes="float16 float16") | {"device": H200} | more
    store().put(key, Outcome((Key(winner),), tuple(rows), "measured"), said)


def exported(*words: str) -> list[dict[str, Any]]:
    return json.loads(tune("export", *words).stdout)["entries"]


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
    (entry,) = exported()
    assert entry.pop("versions")["torch"] == torch.__version__ and entry.pop("date")
    assert entry == {
        "device": H200, "op": "aten.mm", "sizes": "x[8, 64] w[64, 8]", "dtypes": "float16 float16",
        "winner": "split", "time_us": 2.0, "default": "aten", "default_us": 4.0,
    }  # fmt: skip


def test_times_of_several_sizes_and_winners_of_several_ranges() -> None:
    a, aten = Key("a"), Key("aten")
    rows = (*(Candidate(a, "ok", t, where=w) for t, w in ((2.0, "1"), (8.0, "2"))), Candidate(aten, "ok", where="1"))
    said = facts(CPU, "aten.mm", "[s0]", "aten")
    store().put("k", Outcome((a,), rows, ""), said)
    store().put("m", Outcome((a, aten, a), rows, ""), said | {"sizes": "[s0, 2]"})
    one, several = sorted(exported("--device", device_model(CPU)), key=lambda e: len(e["sizes"]))
    assert (one["winner"], one["time_us"]) == ("a", 4.0) and "default_us" not in one, "a geometric mean, or nothing"
    assert several["winner"] == ["a", "aten", "a"] and "time_us" not in several


def test_of_decisions_about_the_same_the_newest_is_exported() -> None:
    decide("k1", "new", date="2026-02-01T00:00:00+00:00")
    decide("k2", "old", date="2026-01-01T00:00:00+00:00")
    result = tune("export")
    assert [e["winner"] for e in json.loads(result.stdout)["entries"]] == ["new"]
    assert "1 decision to standard output; 1 older decision with other winners omitted" in result.stderr


def test_a_decision_that_no_table_may_hold_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    decide("k1", "bad\x1bname")
    decide("k2", sizes="x[4]")
    assert [e["sizes"] for e in exported()] == ["x[4]"]
    assert "left out" in caplog.text


def test_export_of_one_device(tmp_path: Path) -> None:
    decide("k1")
    decide("k2", device="AMD EPYC")
    assert [e["device"] for e in exported("--device", "nvidia h200")] == [H200]
    result = tune("export", str(tmp_path / "t.json"), "--device", "NVIDIA B200")
    assert result.exit_code == 1 and "AMD EPYC, NVIDIA H200" in result.stderr
    assert not (tmp_path / "t.json").exists()


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
    assert json.loads(tune("export").stdout) == {"format": 1, "entries": []}
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


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
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
