"""Portable tables: what is wrong in them is said with file, entry and key; what fits is found; nothing else happens."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from reflib.errors import OptionError, ReflibError
from reflib.tables import Entry, Table, TableError, chosen, load_table, lookup, merge, normalize_lookup, sizes_key

FULL: dict[str, Any] = {
    "device": "NVIDIA H200", "op": "aten.addmm", "sizes": "x[32, 4096] w[4096, 32]", "dtypes": "float16 float16",
    "epilogue": "relu", "winner": "triton tiled 64x64x32 w4 s3", "time_us": 5.1, "default": "aten", "default_us": 7,
    "versions": {"torch": "2.13.0"}, "date": "2026-07-01T12:00:00+00:00",
}  # fmt: skip
LEAST = {k: FULL[k] for k in ("device", "op", "sizes", "winner")}


def table(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"format": 1, "entries": list(entries)}


# -- reading ----------------------------------------------------------------------------------------
def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    read = load_table(table(FULL, LEAST))
    assert read.entries[0] == Entry(**FULL) and read.entries[1] == Entry(**LEAST)
    path = tmp_path / "t.json"
    path.write_text(read.to_text())
    assert set(map(repr, load_table(path).entries)) == set(map(repr, read.entries))
    assert load_table(path).to_text() == read.to_text()
    several = FULL | {"winner": ["a", "b"]}
    assert load_table(table(several)).entries[0].winner == ("a", "b")
    assert load_table(table(several)).to_data()["entries"] == [several]
    assert load_table(table()) == Table() and json.loads(Table().to_text()) == table()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as Windows editors do
    assert len(load_table(path).entries) == 2


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "not JSON"),
        ("[1, 2]", 'no "format"'),
        ('{"format": 1, "entries": [], "entry": []}', "unknown key 'entry'"),
        ('{"format": 2, "entries": []}', "format 2; this version of reflib reads format 1"),
        ('{"format": "1", "entries": []}', "format '1'"),
        ('{"format": 1}', "'entries': must be a list"),
        ('{"format": 1, "entries": [3]}', "entry 1: must be an object"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TableError, match=r"bad\.json") as e:
        load_table(path)
    assert said in str(e.value) and isinstance(e.value, ReflibError)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(TableError, match="cannot read the table"):
            load_table(path)
    (tmp_path / "t.json").write_bytes(b'{"format": 1, "entries": [{"op": "\xff"}]}')
    with pytest.raises(TableError, match=r"t\.json is not JSON"):
        load_table(tmp_path / "t.json")


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("winner", 3, "3 must be a text"),
        ("winner", ["a", 3], "3 must be a text"),
        ("winner", "", "must not be empty"),
        ("winner", "a" * 2001, "2001 characters, at most 2000"),
        ("winner", "a\nimport os", r"must not contain the character '\n'"),
        ("winner", "\x1b[31m", r"must not contain the character '\x1b'"),
        ("op", None, "must be a text"),
        ("device", "", "must not be empty"),
        ("sizes", "32x4096", "is not a list of shapes"),
        ("sizes", "x[__import__('os')]", "is not a list of shapes"),
        ("time_us", "5", "must be a time in microseconds"),
        ("time_us", True, "must be a time in microseconds"),
        ("default_us", 1e400, "must be a time in microseconds"),
        ("versions", [], "must be an object"),
        ("versions", {"torch": 2}, "2 must be a text"),
        ("winner", [], "must be a text"),
        ("date", "yesterday", "yesterday"),
        ("winer", "aten", "did you mean 'winner'?"),
    ],
)
def test_a_wrong_value_is_named_with_its_entry_and_key(key: str, value: Any, said: str) -> None:
    with pytest.raises(TableError) as e:
        load_table(table(LEAST, FULL | {key: value}), "tables/h200.json")
    assert str(e.value).startswith("tables/h200.json: entry 2: ") and repr(key) in str(e.value)
    assert said in str(e.value)


@pytest.mark.parametrize("key", FULL)
def test_what_an_entry_needs_and_what_not(key: str) -> None:
    given = table({k: v for k, v in FULL.items() if k != key})
    if key in LEAST:
        with pytest.raises(TableError, match=f"entry 1: key '{key}': is missing"):
            load_table(given)
    else:
        assert len(load_table(given).entries) == 1


# -- finding ----------------------------------------------------------------------------------------
SAME_SIZES = [
    ("x[32, 4096] w[4096, 32]", "[32,4096][4096,32]"),
    ("x[32, 4096] w[4096, 32]", "arg0_1[32, 4096], arg1_1[4096, 32] "),
    ("x[s0, 64] y[s0, s1]", "a[s33, 64] b[s33, s7]"),
    ("x[128*s0 + 1]", "buf3[128*s9 + 1]"),
    ("x[Max(s0, 4)]", "x[ Max(s5,4) ]"),
    ("x[]", "[]"),
    ("", "  "),
]
OTHER_SIZES = [
    ("[32, 4096]", "[4096, 32]"),
    ("[32] [8]", "[8] [32]"),
    ("x[s0, s0]", "x[s0, s1]"),
    ("x[s0]", "x[2*s0]"),
    ("x[Max(s0, 4)]", "x[Min(s0, 4)]"),
    ("[4]", "[4][]"),
    ("", "[]"),
]


def test_names_do_not_count_and_sizes_do() -> None:
    assert [sizes_key(a) == sizes_key(b) for a, b in SAME_SIZES] == [True] * len(SAME_SIZES)
    assert [sizes_key(a) == sizes_key(b) for a, b in OTHER_SIZES] == [False] * len(OTHER_SIZES)


def entry(winner: str, device: str = "NVIDIA H200", **more: Any) -> Entry:
    return Entry(device, "aten.mm", "x[8, 8]", winner, **more)


def test_the_best_fit_is_found() -> None:
    t = Table(
        (
            entry("here, later", date="2026-02-01"),
            entry("anywhere", "*", date="2026-09-01"),
            entry("here", date="2026-01-01"),
            entry("half", dtypes="float16"),
            entry("half relu", dtypes="float16", epilogue="relu"),
            entry("there", "NVIDIA A100"),
        )
    )
    assert t.find("NVIDIA H200", "aten.mm", "y[8, 8]") == "here, later"
    assert t.find("nvidia h200 ", "aten::mm", "[8,8]", "float32") == "here, later"
    assert t.find("NVIDIA H200", "aten.mm.default", "[8,8]", "torch.float16") == "half"
    assert t.find("NVIDIA H200", "aten.mm", "[8,8]", "float16", "relu") == "half relu"
    assert t.find("NVIDIA H200", "aten.mm", "[8,8]", "float16", "gelu") == "half relu", "better than none; the last"
    assert t.find("NVIDIA A100", "aten.mm", "[8,8]") == "there"
    assert t.find("AMD EPYC", "aten.mm", "[8,8]", "float16") == "anywhere"
    for device, op, sizes in (
        ("NVIDIA H200", "aten.bmm", "[8,8]"),
        ("NVIDIA H200", "aten.mm", "[8,9]"),
        ("NVIDIA H200", "aten.mm", "nonsense"),
    ):
        assert t.find(device, op, sizes) is None
    assert Table((entry("half", dtypes="float16"),)).find("NVIDIA H200", "aten.mm", "[8,8]", "bfloat16") is None
    assert Table((entry("first"), entry("second"))).find("NVIDIA H200", "aten.mm", "[8,8]") == "second"


# -- merging ----------------------------------------------------------------------------------------
OLD = entry("old", time_us=2.0, date="2026-01-01T00:00:00")
NEW = entry("new", time_us=3.0, date="2026-01-01T00:00:00-01:00")  # an hour later
UNKNOWN = entry("unknown")


@pytest.mark.parametrize("how, stays", [("newest", "new"), ("fastest", "old")])
def test_of_two_about_the_same_one_stays_and_the_conflict_is_said(how: str, stays: str) -> None:
    for tables_ in ((Table((OLD,)), Table((NEW,))), (Table((NEW,)), Table((OLD,)))):
        merged, conflicts = merge(tables_, how)
        assert [e.winner for e in merged.entries] == [stays] and len(conflicts) == 1
        assert f"{stays} (" in conflicts[0] and "stays" in conflicts[0] and "aten.mm x[8, 8]" in conflicts[0]


def test_merging_what_does_not_say_when_or_how_fast() -> None:
    for how in ("newest", "fastest"):
        assert merge([Table((OLD,)), Table((UNKNOWN,))], how)[0].entries == (OLD,)
        assert merge([Table((UNKNOWN,)), Table((OLD,))], how)[0].entries == (OLD,)
    assert merge([Table((UNKNOWN,)), Table((entry("later"),))])[0].entries[0].winner == "later"


def test_merging_keeps_what_is_not_about_the_same_and_agreement_is_no_conflict() -> None:
    different = [entry("a"), entry("a", "*"), entry("a", dtypes="float16"), Entry("NVIDIA H200", "aten.mm", "[9]", "a")]
    merged, conflicts = merge([Table((e,)) for e in (*different, *different)])
    assert list(merged.entries) == different and not conflicts
    with pytest.raises(TableError, match="'newest' or 'fastest'"):
        merge([], "best")


# -- using ------------------------------------------------------------------------------------------
NAMES = ["aten", "triton tiled 64x64x32 w4 s3", "odd | name"]


@pytest.mark.parametrize(
    "winner, ranges, expected",
    [
        ("aten", 1, ("aten",)),
        ("aten", 3, ("aten", "aten", "aten")),
        (("aten", "triton tiled 64x64x32 w4 s3"), 2, ("aten", "triton tiled 64x64x32 w4 s3")),
        ("odd | name", 2, ("odd | name", "odd | name")),
    ],
)
def test_names_of_candidates_there_are(winner: Any, ranges: int, expected: tuple[str, ...]) -> None:
    assert chosen(winner, NAMES, ranges) == expected


def test_a_name_that_no_candidate_has_is_ignored_and_the_nearest_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen("triton tiled 64x64x32 w4 s4", NAMES, where="the lookup_table of this test") is None
        assert chosen("triton tiled 64x64x32 w4 s4", NAMES, where="the lookup_table of this test") is None
    assert len(caplog.records) == 1, "once"
    said = caplog.records[0].getMessage()
    assert "the lookup_table of this test has 'triton tiled 64x64x32 w4 s4'" in said
    assert "the nearest is triton tiled 64x64x32 w4 s3" in said
    assert chosen(("aten", "aten"), NAMES, 3) is None and chosen("aten", [], 1) is None
    assert "for 2 ranges; there are 3" in caplog.records[1].getMessage()


# -- lookup_table -----------------------------------------------------------------------------------
def test_a_mapping_holds_for_any_device() -> None:
    text = normalize_lookup({"aten.mm": {"x[8, 8] w[8, 8]": "aten", "[9, 9]": "split"}})
    assert lookup(text, "NVIDIA H200", "aten.mm.default", "a[8, 8] b[8, 8]") == "aten"
    assert lookup(text, "AMD EPYC", "aten.mm", "a[9, 9]", "float16", "relu") == "split"
    assert lookup(text, "AMD EPYC", "aten.bmm", "a[9, 9]") is None and lookup("", "any", "aten.mm", "[9, 9]") is None


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table(FULL, LEAST | {"device": "NVIDIA A100"})))
    text = normalize_lookup(path)
    assert text == normalize_lookup(str(path))
    path.unlink()
    assert lookup(text, "NVIDIA H200", "aten.addmm", FULL["sizes"], "float16 float16") == FULL["winner"]
    assert lookup(text, "NVIDIA B200", "aten.addmm", FULL["sizes"]) is None


def test_the_text_is_canonical_and_a_value_itself(tmp_path: Path) -> None:
    """Options that say the same are equal, and a copy of Options is one."""
    a = normalize_lookup({"aten.mm": {"[8]": "a", "[9]": "b"}, "aten.bmm": {"[8]": "a"}})
    b = normalize_lookup({"aten.bmm": {"[8]": "a"}, "aten.mm": {"[9]": "b", "[8]": "a"}})
    assert a == b == normalize_lookup(a) == normalize_lookup(table(*json.loads(a)["entries"])) and hash(a) == hash(b)
    newer = [{**LEAST, "winner": "new", "date": "2026-02-01"}, {**LEAST, "winner": "old", "date": "2026-01-01"}]
    assert lookup(normalize_lookup(table(*newer)), "NVIDIA H200", "aten.addmm", FULL["sizes"]) == "new"
    assert [normalize_lookup(empty) for empty in (None, "", {}, {"aten.mm": {}}, table())] == [""] * 5


@pytest.mark.parametrize(
    "value, said",
    [
        (3, "3 is neither"),
        (["aten"], "is neither"),
        ("no_such_file.json", "cannot read the table no_such_file.json"),
        ({"aten.mm": "aten"}, "op 'aten.mm' must be a mapping"),
        ({"aten.mm": {"8x8": "aten"}}, "op 'aten.mm', sizes '8x8': key 'sizes'"),
        ({"aten.mm": {"[8]": 3}}, "key 'winner': 3 must be a text"),
        ({3: {"[8]": "aten"}}, "key 'op': 3 must be a text"),
        ({"format": 7, "entries": []}, "format 7"),
        ("{not json", "not JSON"),
    ],
)
def test_a_wrong_value_is_an_option_error_with_a_remedy(value: Any, said: str) -> None:
    with pytest.raises(OptionError) as e:
        normalize_lookup(value)
    assert str(e.value).startswith("option lookup_table: ") and said in str(e.value)
    assert "reflib tune export" in str(e.value) and "{op: {sizes: winner}}" in str(e.value)
