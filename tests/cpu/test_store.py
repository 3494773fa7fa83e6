"""The cache of decisions: many processes, forks, damage; nothing of it may stop a compilation."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reflib import cache
from reflib.choose import circumstances
from reflib.choose import store as stores
from reflib.choose.store import Store, decision_key, device_model, facts, store
from reflib.errors import CacheError
from reflib.tables import Entry, Table

FORK = multiprocessing.get_context("fork")  # torch is there already; and a fork is what must be safe


def ruling(winner: str = "split", rows: int = 2) -> dict[str, Any]:
    return {
        "winners": [winner],
        "rows": [{"name": f"c{i}", "status": "ok", "time_us": 1.5 + i, "why": "x" * 40} for i in range(rows)],
        "reason": f"{winner} is the fastest",
    }


FACTS = {"device": "cpu", "op": "aten.mm", "sizes": "x[2, 3]", "date": "2026-07-01T00:00:00+00:00"}


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection past the store, closed at the end (the garbage collector would do so in any thread)."""
    c = sqlite3.connect(path, isolation_level=None)
    try:
        yield c
    finally:
        c.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tuning"


@pytest.fixture
def s(folder: Path) -> Store:
    return Store(folder)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def damaged(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if ".damaged-" in p.name)


# -- what is put is there ---------------------------------------------------------------------------
def test_what_was_put_is_found_by_this_store_and_another(s: Store, folder: Path) -> None:
    assert s.get("k") is None
    s.put("k", ruling(), FACTS)
    assert s.get("k") == ruling() == Store(folder).get("k")
    s.put("k", ruling("aten"), FACTS)
    assert s.get("k") == ruling("aten") and s.get("other") is None
    assert s.decisions() == [(ruling("aten"), FACTS)]
    assert os.stat(folder).st_mode & 0o077 == 0


def test_the_file_is_in_wal_mode(s: Store) -> None:
    s.put("k", ruling(), FACTS)
    with raw(s.path) as c:
        assert c.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_rows_of_an_unfinished_decision_stay_until_it_is_finished(s: Store, folder: Path) -> None:
    a, b = ({"name": n, "status": "ok", "time_us": 2.0, "where": "s0=4"} for n in ("a", "b"))
    s.add_row("k", a)
    s.add_row("k", b)
    s.add_row("k", a | {"where": "s0=8"})
    s.add_row("other", b)
    assert Store(folder).rows("k") == [a, b, a | {"where": "s0=8"}]
    s.add_row("k", b | {"time_us": 3.0})  # measured again
    assert sorted(r["time_us"] for r in s.rows("k")) == [2.0, 2.0, 3.0]
    s.put("k", ruling(), FACTS)
    assert s.rows("k") == [] and s.rows("other") == [b]
    s.drop_rows("other")
    assert s.rows("other") == []


def test_clear_removes_everything(s: Store) -> None:
    for i in range(3):
        s.put(f"k{i}", ruling(), FACTS)
    s.add_row("u", {"name": "a", "status": "ok"})
    s.import_table(Table((Entry("*", "aten.mm", "[2]", "aten"),)))
    assert s.clear() == (3, 1) and s.clear() == (0, 0)
    assert s.get("k0") is None and s.rows("u") == [] and s.imports() == Table()


def test_it_is_fast(s: Store) -> None:
    """The bounds are promises; the least of several times, since other tests run beside this one."""
    big = ruling(rows=50)
    for i in range(200):
        s.put(f"k{i}", big, FACTS)

    def least(work: Callable[[], Any], times: int) -> float:
        took = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            took.append(time.perf_counter() - start)
        return min(took)

    assert least(lambda: s.get("k100"), 50) < 1e-3
    opened = Store(s.folder)

    def again() -> None:
        opened.close()
        opened.get("missing")

    assert least(again, 20) < 5e-3


# -- damage -----------------------------------------------------------------------------------------
def garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(20_000))


def middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    third = len(data) // 3
    data[third : 2 * third] = random.Random(0).randbytes(third)
    path.write_bytes(data)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def header_only(path: Path) -> None:
    os.truncate(path, 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("in it")


def other_tables(path: Path) -> None:
    with raw(path) as c:
        c.execute("DROP TABLE decisions")


@pytest.mark.parametrize("open_meanwhile", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("damage", [garbage, middle, truncated, header_only, empty, a_directory, other_tables])
def test_a_damaged_file_is_set_aside_and_begun_anew(
    s: Store, folder: Path, damage: Callable[[Path], None], open_meanwhile: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(300):
        s.put(f"k{i}", ruling(f"w{i}", rows=20), FACTS)
    s.close()  # its last connection writes everything into the file
    if open_meanwhile:
        assert s.get("k0") is not None
    damage(s.path)
    found = [s.get(f"k{i}") for i in range(300)]
    assert all(r is None or r == ruling(f"w{i}", rows=20) for i, r in enumerate(found)), "a changed ruling"
    for i in range(300):
        s.put(f"k{i}", ruling("new"), FACTS)
    s.close()
    assert [Store(folder).get(f"k{i}") for i in range(300)] == [ruling("new")] * 300
    if damage is not empty or damaged(folder):  # an empty file is a new one, unless it was open
        assert damaged(folder)[0] == f"{s.path.name}.damaged-1" and len(warnings(caplog)) == 1
        assert "damaged" in warnings(caplog)[0]


@pytest.mark.parametrize("script", ["PRAGMA user_version = 77", "PRAGMA user_version = 0"])
def test_a_file_of_another_schema_is_set_aside(s: Store, folder: Path, script: str, caplog: Any) -> None:
    s.put("k", ruling(), FACTS)
    s.close()
    with raw(s.path) as c:
        c.execute(script)
    assert s.get("k") is None and "schema" in warnings(caplog)[0]
    s.put("k", ruling("new"), FACTS)
    assert s.get("k") == ruling("new") and len(damaged(folder)) >= 1
    with raw(folder / damaged(folder)[0]) as c:
        assert c.execute("SELECT count(*) FROM decisions").fetchone() == (1,), "what is in it can be looked at"


def test_files_set_aside_are_kept_but_not_without_end(s: Store, folder: Path) -> None:
    for _ in range(stores.MOST_DAMAGED + 3):
        s.put("k", ruling(), FACTS)
        s.close()
        garbage(s.path)
        assert s.get("k") is None
    assert len([p for p in damaged(folder) if not p.endswith(("-wal", "-shm"))]) == stores.MOST_DAMAGED


@pytest.mark.parametrize("change", ["ruling = x'7b7d'", "digest = x'00'", "facts = 3", "ruling = 'text'"])
def test_a_changed_value_does_not_count(s: Store, folder: Path, change: str, caplog: Any) -> None:
    """SQLite would not notice: the page is as it should be."""
    s.put("k", ruling(), FACTS)
    s.put("other", ruling(), FACTS)
    with raw(s.path) as c:
        c.execute(f"UPDATE decisions SET {change} WHERE key = 'k'")
    assert s.get("k") is None and s.get("other") == ruling()
    assert [f for _, f in s.decisions()] == [FACTS], "it was removed"
    assert not damaged(folder) and not warnings(caplog)


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {},
        ruling() | {"winners": []},
        ruling() | {"winners": [3]},
        ruling() | {"rows": [{"name": "a"}]},
        ruling() | {"rows": [{"name": "a", "status": "ok", "no_such_field": 1}]},
        {k: v for k, v in ruling().items() if k != "reason"},
    ],
)
def test_a_value_of_another_form_does_not_count(s: Store, wrong: Any) -> None:
    s.put("k", wrong, FACTS)
    assert s.get("k") is None and s.decisions() == []


def test_a_row_of_another_form_does_not_count(s: Store) -> None:
    s.add_row("k", {"name": "a"})
    s.add_row("k", {"name": "b", "status": "ok"})
    assert s.rows("k") == [{"name": "b", "status": "ok"}]


def test_a_store_that_was_removed_or_exchanged_is_found_anew(s: Store, folder: Path) -> None:
    other = Store(folder)
    s.put("k", ruling(), FACTS)
    assert other.get("k") == ruling()
    for p in folder.iterdir():
        p.unlink()
    assert other.get("k") is None
    other.put("k", ruling("new"), FACTS)
    assert s.get("k") == ruling("new"), "s had the old file open"
    s.close()
    other.close()
    assert Store(folder).get("k") == ruling("new"), "closing the old file did not touch the new one's log"


def test_only_one_process_sets_the_file_aside(s: Store, folder: Path) -> None:
    """Who finds out late must not set aside the new file."""
    s.put("k", ruling(), FACTS)
    late = Store(folder)
    assert s.get("k") == late.get("k") == ruling()
    s._set_aside("damage")
    s.put("k", ruling("new"), FACTS)
    late._set_aside("the same damage")
    assert late.get("k") == ruling("new") and damaged(folder)[0].endswith("-1")
    assert not [p for p in damaged(folder) if ".damaged-2" in p]


# -- where it cannot be used ------------------------------------------------------------------------
def check_as_if_empty(s: Store, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        s.put("new", ruling(), FACTS)
        s.add_row("u", {"name": "a", "status": "ok"})
    assert s.get("new") is None and s.rows("u") == [] and s.imported("cpu", "aten.mm", "[2]") is None
    assert len(warnings(caplog)) == 1 and "REFLIB_CACHE_DIR" in warnings(caplog)[0]
    if s.folder is not None and s.folder.is_dir():
        assert not damaged(s.folder), "it may well be whole"


def test_a_file_in_the_folders_place(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("")
    check_as_if_empty(Store(folder), caplog)
    with pytest.raises(CacheError, match="cannot use the decisions"):
        Store(folder).decisions()


@pytest.mark.parametrize("setting", ["query_only = ON", "max_page_count = 1"], ids=["read-only", "full disk"])
def test_a_file_that_cannot_be_written(s: Store, setting: str, caplog: pytest.LogCaptureFixture) -> None:
    s.put("k", ruling(), FACTS)
    s._connection.execute(f"PRAGMA {setting}")
    big = ruling(rows=200)
    s.put("new", big, FACTS)
    check_as_if_empty(s, caplog)
    s.close()
    assert Store(s.folder).get("k") == ruling()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(s: Store, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(0o500)
    check_as_if_empty(s, caplog)


def test_a_process_that_holds_the_file(s: Store, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(stores, "BUSY_SECONDS", 0.05)
    s.put("k", ruling(), FACTS)
    with raw(s.path) as c:
        c.execute("BEGIN IMMEDIATE")
        start = time.perf_counter()
        check_as_if_empty(s, caplog)
        assert time.perf_counter() - start < 1, "it waits once, not at every use"
    monkeypatch.setattr(stores, "AGAIN_SECONDS", 0.0)
    s.put("new", ruling(), FACTS)
    assert s.get("new") == s.get("k") == ruling(), "later it is tried again"


def test_the_processs_store_follows_the_environment(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store().put("k", ruling(), FACTS)
    assert store() is store() and store().path.parent == fresh_cache / "tuning"
    monkeypatch.setenv("REFLIB_CACHE_DIR", str(fresh_cache) + "2")
    assert store().get("k") is None
    monkeypatch.setenv("REFLIB_CACHE_DIR", str(fresh_cache))
    assert store().get("k") == ruling()


def test_a_cache_folder_that_must_not_be_used(fresh_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh_cache.write_text("a file")
    check_as_if_empty(store(), caplog)
    with pytest.raises(CacheError, match="set REFLIB_CACHE_DIR to another"):
        store().decisions()


# -- processes, threads, forks ----------------------------------------------------------------------
def run(children: list[Any], seconds: float = 60) -> None:
    for c in children:
        c.start()
    end = time.monotonic() + seconds
    for c in children:
        c.join(max(0.0, end - time.monotonic()))
    codes = [c.exitcode for c in children]
    for c in children:
        c.kill()
    assert codes == [0] * len(children)


def fail(*_: Any) -> None:
    raise AssertionError("a warning in a child")


def put_many(folder: Path, number: int, barrier: Any) -> None:
    logging.getLogger("reflib.tuning").warning = fail  # type: ignore[method-assign]
    s = Store(folder)
    barrier.wait()
    for i in range(200):
        s.put("shared", ruling(f"{number} {i}"), FACTS)
        s.put(f"{number} {i}", ruling(f"{number} {i}"), FACTS)
        s.add_row("shared", {"name": f"{number}", "status": "ok"})
        assert s.get(f"{number} {i}") == ruling(f"{number} {i}")
        assert s.get("shared") is not None


def test_eight_processes_write_at_once(folder: Path) -> None:
    barrier = FORK.Barrier(8)
    run([FORK.Process(target=put_many, args=(folder, n, barrier), daemon=True) for n in range(8)])
    s = Store(folder)
    assert s.get("shared")["winners"][0].endswith(" 199"), "the last wins"
    assert all(s.get(f"{n} {i}") == ruling(f"{n} {i}") for n in range(8) for i in range(200))
    assert not damaged(folder)


def test_processes_that_find_damage_at_once_make_one_new_file(s: Store, folder: Path) -> None:
    s.put("k", ruling(), FACTS)
    s.close()
    garbage(s.path)

    def child(number: int, barrier: Any) -> None:
        mine = Store(folder)
        barrier.wait()
        mine.put(f"k{number}", ruling(), FACTS)

    barrier = FORK.Barrier(4)
    run([FORK.Process(target=child, args=(n, barrier), daemon=True) for n in range(4)])
    assert [s.get(f"k{n}") for n in range(4)] == [ruling()] * 4
    assert [p for p in damaged(folder) if p[-1].isdigit()] == [f"{s.path.name}.damaged-1"]


def test_a_process_killed_while_it_writes(s: Store, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def child() -> None:
        mine = Store(folder)
        for i in range(10**6):
            mine.put(f"k{i % 50}", ruling(f"w{i}", rows=50), FACTS)

    for _ in range(3):
        c = FORK.Process(target=child, daemon=True)
        c.start()
        end = time.monotonic() + 30
        while s.get("k49") is None and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(c.pid, signal.SIGKILL)
        c.join()
        assert s.get("k49") is not None
        s.clear()
    assert not warnings(caplog) and not damaged(folder)


def test_a_fork_takes_no_connection_along(s: Store, folder: Path) -> None:
    s.put("k", ruling(), FACTS)
    assert s._connection is not None

    def child() -> None:
        assert s._connection is None
        for i in range(100):
            s.put(f"child {i}", ruling(), FACTS)
            assert s.get("k") == ruling()

    c = FORK.Process(target=child, daemon=True)
    c.start()
    for i in range(100):
        s.put(f"parent {i}", ruling(), FACTS)
    c.join(30)
    assert c.exitcode == 0
    assert all(s.get(f"{who} {i}") == ruling() for who in ("child", "parent") for i in range(100))


def test_forks_while_threads_write(s: Store, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    failed: list[BaseException] = []

    def work(number: int) -> None:
        i = 0
        try:
            while not done.is_set():
                s.put(f"{number} {i}", ruling(), FACTS)
                assert s.get(f"{number} {i}") == ruling()
                i += 1
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads:
        t.start()

    def child() -> None:
        s.put(f"child {os.getpid()}", ruling(), FACTS)

    try:
        children = []
        for _ in range(10):
            children.append(FORK.Process(target=child, daemon=True))
            children[-1].start()
            time.sleep(0.01)
        for c in children:
            c.join(30)
    finally:
        done.set()
        for t in threads:
            t.join(30)
    assert not failed and [c.exitcode for c in children] == [0] * 10
    assert all(s.get(f"child {c.pid}") == ruling() for c in children)
    assert not warnings(caplog) and not damaged(s.folder)


def test_a_connection_of_another_process_is_neither_used_nor_closed(s: Store) -> None:
    """A fork past Python's hooks."""
    s.put("k", ruling(), FACTS)
    theirs, s._pid = s._connection, s._pid + 1
    assert s.get("k") == ruling() and s._connection is not theirs
    assert theirs.execute("SELECT count(*) FROM decisions").fetchone() == (1,)
    theirs.close()


def test_a_dropped_store_closes_its_connection(s: Store, folder: Path) -> None:
    """Not the garbage collector, in whatever thread it runs."""
    other = Store(folder)
    other.put("k", ruling(), FACTS)
    connection = other._connection
    del other
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


# -- imported tables --------------------------------------------------------------------------------
def test_imported_entries_are_found_like_those_of_a_table(s: Store, folder: Path) -> None:
    s.import_table(
        Table(
            (
                Entry("*", "aten.mm.default", "x[32, 64] w[64, 8]", "anywhere"),
                Entry("NVIDIA H200", "aten.mm", "x[32, 64] w[64, 8]", "half", dtypes="float16 float16"),
                Entry("NVIDIA H200", "aten.mm", "x[s0, 64] w[64, 8]", "a | b"),
            )
        )
    )
    s = Store(folder)
    sizes = "arg0_1[32, 64] arg1_1[64, 8]"
    assert s.imported("NVIDIA H200", "aten.mm", sizes, "float16 float16") == "half"
    assert s.imported("NVIDIA H200", "aten.mm", sizes, "float32 float32") == "anywhere"
    assert s.imported("NVIDIA A100", "aten.mm", sizes) == "anywhere"
    assert s.imported("nvidia  h200", "aten::mm", "y[s77, 64] z[64, 8]") == "a | b"
    assert s.imported("NVIDIA H200", "aten.addmm", sizes) is None
    assert s.imported("NVIDIA H200", "aten.mm", "no shapes") is None
    assert len(s.imports().entries) == 3 and s.imports().entries[1].winner == "half"
    s.import_table(Table((Entry("*", "aten.mm", "[32, 64] [64, 8]", "other"),)))
    assert s.imported("cpu", "aten.mm", sizes) == "other" and len(s.imports().entries) == 3


def test_a_changed_imported_entry_does_not_count(s: Store) -> None:
    s.import_table(Table((Entry("*", "aten.mm", "[2]", "aten"),)))
    with raw(s.path) as c:
        c.execute("UPDATE imported SET value = replace(value, 'aten', 'evil')")
    assert s.imported("cpu", "aten.mm", "[2]") is None and s.imports() == Table()


# -- keys -------------------------------------------------------------------------------------------
def test_a_key_depends_on_the_text_the_switches_and_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    first = decision_key("text", "cpu")
    assert first == decision_key("text", "cpu") != decision_key("other", "cpu")
    keys = {first}
    with monkeypatch.context() as m:
        m.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
        keys.add(decision_key("text", "cpu"))
    with monkeypatch.context() as m:
        m.setattr(torch, "get_num_threads", lambda: 77)
        keys.add(decision_key("text", "cpu"))
    with monkeypatch.context() as m:
        m.setattr(cache, "versions", lambda: ("source", "torch 9", "triton 9", "3.99"))
        keys.add(decision_key("text", "cpu"))
    assert len(keys) == 4 and decision_key("text", "cpu") == first


def test_every_switch_that_torch_has_is_in_the_key() -> None:
    before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    found = circumstances.math_switches()
    try:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = not before
        assert circumstances.math_switches() != found
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = before
    assert circumstances.math_switches() == found


def test_a_switch_that_torch_refuses_to_read_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``allow_tf32`` does once ``fp32_precision`` was set."""

    def refuse() -> str:
        raise RuntimeError("you have used mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    assert "float32 -" in circumstances.math_switches()


def gpu(name: str = "NVIDIA H200", major: int = 9, units: int = 132, gib: int = 140) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, major=major, minor=0, multi_processor_count=units, total_memory=gib * 2**30, gcnArchName="gfx942"
    )


def test_equal_gpus_share_a_key_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(device: str, properties: SimpleNamespace) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return decision_key('{"_": "device", "value": "%s"}' % device, device)

    assert key("cuda:0", gpu()) == key("cuda:1", gpu()) == key("cuda:11", gpu())
    different = [gpu(), gpu("NVIDIA H100"), gpu(major=8), gpu(units=66), gpu(gib=70)]
    assert len({key("cuda:0", g) for g in different}) == len(different)
    assert device_model(torch.device("cuda:0")) == "NVIDIA H200"
    monkeypatch.setattr(circumstances, "_driver", lambda: "999.1")
    assert key("cuda:0", gpu()) != decision_key('{"_": "device", "value": "cpu"}', "cpu")
    newer = key("cuda:0", gpu())
    monkeypatch.setattr(circumstances, "_driver", lambda: "999.2")
    assert key("cuda:0", gpu()) != newer


def test_facts_say_where_when_and_with_what(s: Store) -> None:
    f = facts(torch.device("cpu"), "aten.mm", "x[2, 3]", "aten", 1.5, dtypes="float32")
    assert f["device"] == device_model(torch.device("cpu")) != "" and f["seconds"] == 1.5
    assert f["versions"].keys() == {"reflib", "torch", "triton", "python"}
    assert f["versions"]["torch"] == torch.__version__ and f["date"].endswith("+00:00")
    s.put("k", ruling(), f)
    assert s.decisions() == [(ruling(), f)]
