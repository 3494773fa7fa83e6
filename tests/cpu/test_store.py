"""The cache of decisions: many processes, forks, damage; nothing of it may stop a compilation."""

import contextlib
import logging
import multiprocessing
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reflib import cache
from reflib.autotune import circumstances
from reflib.autotune import store as stores
from reflib.autotune.circumstances import decision_key, device_model, facts
from reflib.autotune.store import Outcome, Store, store
from reflib.errors import CacheError
from reflib.ir.decision import Candidate, Key
from reflib.ir.program import Tiling
from reflib.tables import Entry, Table

FORK = multiprocessing.get_context("fork")  # torch is there already; and a fork is what must be safe


def outcome(winner: str = "split", rows: int = 2) -> Outcome:
    """One that a matmul could have: two of its keys have tilings."""
    keys = [Key(winner), Key("triton", Tiling("split", 16, 32, 128, splits=4, reducers=2), apart=True)]
    found = [Candidate(keys[i] if i < 2 else Key(f"c{i}"), "ok", 1.5 + i, why="x" * 40) for i in range(rows)]
    return Outcome((keys[0],), tuple(found), f"{winner} is the fastest")


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
    return sorted(p.name for p in folder.iterdir() if ".damaged" in p.name)


def folder_of(s: Store) -> Path:
    assert s.folder is not None
    return s.folder


# -- what is put is there ---------------------------------------------------------------------------
def test_what_was_put_is_found_by_this_store_and_another(s: Store, folder: Path) -> None:
    assert s.get("k") is None
    s.put("k", outcome(), FACTS)
    assert s.get("k") == outcome() == Store(folder).get("k")
    s.put("k", outcome("aten"), FACTS)
    assert s.get("k") == outcome("aten") and s.get("other") is None
    assert s.decisions() == [(outcome("aten"), FACTS)]
    assert os.stat(folder).st_mode & 0o077 == 0


def test_rows_of_an_unfinished_decision_stay_until_it_is_finished(s: Store, folder: Path) -> None:
    a, b = (Candidate(Key(n), "ok", 2.0, where="s0=4") for n in ("a", "b"))
    other_size = replace(a, where="s0=8")
    for row in (a, b, other_size):
        s.add_row("k", row)
    s.add_row("other", b)
    assert Store(folder).rows("k") == [a, b, other_size]
    s.add_row("k", replace(b, time_us=3.0))  # measured again
    assert sorted(r.time_us for r in s.rows("k")) == [2.0, 2.0, 3.0]
    s.put("k", outcome(), FACTS)
    assert s.rows("k") == [] and s.rows("other") == [b]
    s.drop_rows("other")
    assert s.rows("other") == []


def test_clear_removes_everything(s: Store) -> None:
    for i in range(3):
        s.put(f"k{i}", outcome(), FACTS)
    s.add_row("u", Candidate(Key("a"), "ok"))
    s.import_table(Table((Entry("*", "aten.mm", "[2]", "aten"),)))
    assert s.clear() == (3, 1) and s.clear() == (0, 0)
    assert s.get("k0") is None and s.rows("u") == [] and s.imports() == Table()


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


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [garbage, middle, truncated, empty])
def test_a_damaged_file_is_set_aside_and_begun_anew(
    s: Store, folder: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(100):
        s.put(f"k{i}", outcome(f"w{i}", rows=20), FACTS)
    damage(s.path)
    found = [s.get(f"k{i}") for i in range(100)]
    assert all(r is None or r == outcome(f"w{i}", rows=20) for i, r in enumerate(found)), "a changed outcome"
    for i in range(100):
        s.put(f"k{i}", outcome("new"), FACTS)
    assert [Store(folder).get(f"k{i}") for i in range(100)] == [outcome("new")] * 100
    if damage is not empty:  # an empty file is a new one
        assert damaged(folder) == [f"{s.path.name}.damaged"] and len(warnings(caplog)) == 1
        assert "damaged" in warnings(caplog)[0]


@pytest.mark.parametrize("change", ["'{}'", "'te'", "replace(outcome, 'variant', 'other')"])
def test_a_value_of_another_form_does_not_count(s: Store, change: str, caplog: Any) -> None:
    s.put("k", outcome(), FACTS)
    s.put("other", outcome(), FACTS)
    s.add_row("u", Candidate(Key("a"), "ok"))
    with raw(s.path) as c:
        c.execute(f"UPDATE decisions SET outcome = {change} WHERE key = 'k'")
        c.execute("UPDATE measured SET row = '{}'")
    assert s.get("k") is None and s.get("other") == outcome() and s.rows("u") == []
    assert s.decisions() == [(outcome(), FACTS)]
    assert not damaged(folder_of(s)) and not warnings(caplog)


def test_a_store_that_was_removed_is_begun_anew(s: Store, folder: Path) -> None:
    other = Store(folder)
    s.put("k", outcome(), FACTS)
    for p in folder.iterdir():
        p.unlink()
    assert other.get("k") is None
    other.put("k", outcome("new"), FACTS)
    assert s.get("k") == outcome("new")


# -- where it cannot be used ------------------------------------------------------------------------
def check_as_if_empty(s: Store, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        s.put("new", outcome(), FACTS)
        s.add_row("u", Candidate(Key("a"), "ok"))
    assert s.get("new") is None and s.rows("u") == [] and s.imported("cpu", "aten.mm", "[2]") is None
    assert len(warnings(caplog)) == 1 and "REFLIB_CACHE_DIR" in warnings(caplog)[0]
    if s.folder is not None and s.folder.is_dir():
        assert not damaged(s.folder), "it may well be whole"


def test_a_file_in_the_folders_place(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("")
    check_as_if_empty(Store(folder), caplog)
    with pytest.raises(CacheError, match="cannot use the decisions"):
        Store(folder).decisions()


def test_a_full_disk(s: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    s.put("k", outcome(), FACTS)
    with monkeypatch.context() as m:
        m.setattr(stores, "_TABLES", (*stores._TABLES, "PRAGMA max_page_count = 1"))
        s.put("new", outcome(rows=200), FACTS)
        assert "full" in warnings(caplog)[0]
        check_as_if_empty(s, caplog)
    assert Store(s.folder).get("k") == outcome()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(s: Store, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(0o500)
    check_as_if_empty(s, caplog)


def test_a_process_that_holds_the_file(s: Store, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(stores, "BUSY_SECONDS", 0.5)
    s.put("k", outcome(), FACTS)
    with raw(s.path) as c:
        c.execute("BEGIN IMMEDIATE")
        start = time.perf_counter()
        check_as_if_empty(s, caplog)
        assert time.perf_counter() - start < 3, "it waits once, not at each of 9 uses"
    monkeypatch.setattr(stores, "AGAIN_SECONDS", 0.0)
    s.put("new", outcome(), FACTS)
    assert s.get("new") == s.get("k") == outcome(), "later it is tried again"


def test_the_processs_store_follows_the_environment(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store().put("k", outcome(), FACTS)
    assert store() is store() and store().path.parent == fresh_cache / "tuning"
    monkeypatch.setenv("REFLIB_CACHE_DIR", str(fresh_cache) + "2")
    assert store().get("k") is None
    monkeypatch.setenv("REFLIB_CACHE_DIR", str(fresh_cache))
    assert store().get("k") == outcome()


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
    for i in range(100):
        s.put("shared", outcome(f"{number} {i}"), FACTS)
        s.put(f"{number} {i}", outcome(f"{number} {i}"), FACTS)
        s.add_row("shared", Candidate(Key(f"{number}"), "ok"))
        assert s.get(f"{number} {i}") == outcome(f"{number} {i}")
        assert s.get("shared") is not None


def test_eight_processes_write_at_once(folder: Path) -> None:
    barrier = FORK.Barrier(8)
    run([FORK.Process(target=put_many, args=(folder, n, barrier), daemon=True) for n in range(8)])
    s = Store(folder)
    assert s.get("shared").winners[0].variant.endswith(" 99"), "the last wins"
    assert all(s.get(f"{n} {i}") == outcome(f"{n} {i}") for n in range(8) for i in range(100))
    assert not damaged(folder)


def test_forks_while_threads_write(s: Store, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    failed: list[BaseException] = []

    def work(number: int) -> None:
        i = 0
        try:
            while not done.is_set():
                s.put(f"{number} {i}", outcome(), FACTS)
                assert s.get(f"{number} {i}") == outcome()
                i += 1
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads:
        t.start()

    def child() -> None:
        s.put(f"child {os.getpid()}", outcome(), FACTS)

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
    assert all(s.get(f"child {c.pid}") == outcome() for c in children)
    assert not warnings(caplog) and not damaged(s.folder)


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
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    try:
        matmul.allow_fp16_reduced_precision_reduction = not before
        keys.add(decision_key("text", "cpu"))
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before
    assert len(keys) == 5 and decision_key("text", "cpu") == first


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
    f = facts(torch.device("cpu"), "aten.mm", "x[2, 3]", "aten", dtypes="float32")
    assert f["device"] == device_model(torch.device("cpu")) != ""
    assert f["versions"].keys() == {"reflib", "torch", "triton", "python"}
    assert f["versions"]["torch"] == torch.__version__ and f["date"].endswith("+00:00")
    s.put("k", outcome(), f)
    assert s.decisions() == [(outcome(), f)]
