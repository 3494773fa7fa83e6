"""The store of decisions: what was measured once, on this device with these versions, is not measured again.

One SQLite file in the cache folder, ``tuning/decisions-<schema>.sqlite3``, with three tables of JSON values: finished
decisions, rows of unfinished ones (a process that ends early leaves its measurements to the next), and imported tables
(``reflib.tables``). Every use opens the file, does one transaction and closes it (0.2 ms), so any number of processes
and threads can share it, and no connection is held across a fork.

Nothing here may stop a compilation. A damaged file is renamed to ``.damaged`` and a new one is begun; where the file
cannot be used (a read-only folder, a full disk) the store is as if empty. Either is one line in the log.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from .. import cache
from ..errors import CacheError
from ..ir.decision import Candidate, Key
from ..logs import get as logger
from ..options import Options
from ..tables import Entry, Table, Winner, entry_of, op_key, sizes_key

SCHEMA = 2  # of the file: another schema has another file name
BUSY_SECONDS = 5.0  # how long to wait for other processes
AGAIN_SECONDS = 60.0  # a file that could not be used is tried again after so long

_TABLES = (
    "CREATE TABLE IF NOT EXISTS decisions (key TEXT PRIMARY KEY, outcome TEXT, facts TEXT)",
    "CREATE TABLE IF NOT EXISTS measured (key TEXT, name TEXT, place TEXT, row TEXT, PRIMARY KEY (key, name, place))",
    "CREATE TABLE IF NOT EXISTS imported (op TEXT, sizes TEXT, device TEXT, dtypes TEXT, epilogue TEXT, entry TEXT,"
    " PRIMARY KEY (op, sizes, device, dtypes, epilogue))",
)
T = TypeVar("T")

_lock = threading.Lock()  # held while SQLite is used, and while this process forks: SQLite has locks of its own
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@dataclass(frozen=True)
class Outcome:
    """What was decided: the winner of each range, everything that was measured, and why in one sentence."""

    winners: tuple[Key, ...]
    rows: tuple[Candidate, ...]
    reason: str

    @staticmethod
    def from_data(data: Any) -> Outcome:
        """Raises KeyError or TypeError for data of another form."""
        winners = tuple(map(Key.from_data, data["winners"]))
        return Outcome(winners, tuple(map(Candidate.from_data, data["rows"])), str(data["reason"]))


class Store:
    """One file of decisions, for any number of threads and processes. Methods return None or nothing where the file
    cannot be used; those for the command line raise CacheError."""

    def __init__(self, folder: Path | None, why: str = "") -> None:
        """``folder`` None: there is none that may be used, and ``why``."""
        self.folder = folder
        self._why = why
        self._failed = -AGAIN_SECONDS  # when it could not be used (monotonic)
        self._warned = False

    @property
    def path(self) -> Path | None:
        return self.folder and self.folder / f"decisions-{SCHEMA}.sqlite3"

    # -- finished decisions
    def get(self, key: str) -> Outcome | None:
        found = self._select("SELECT outcome FROM decisions WHERE key = ?", (key,))
        return next(_read(found, Outcome.from_data), None)

    def empty(self) -> bool:
        """Has nothing been decided yet?"""
        return not self._select("SELECT 1 FROM decisions LIMIT 1")

    def put(self, key: str, outcome: Outcome, facts: dict[str, Any]) -> None:
        """Store a finished decision, in place of an earlier one. Its rows as an unfinished one are removed."""

        def work(c: sqlite3.Connection) -> None:
            c.execute("INSERT OR REPLACE INTO decisions VALUES (?, ?, ?)", (key, _json(asdict(outcome)), _json(facts)))
            c.execute("DELETE FROM measured WHERE key = ?", (key,))

        self._use(work, None)

    def decisions(self, strict: bool = True) -> list[tuple[Outcome, dict[str, Any]]]:
        """(outcome, facts) of all finished decisions, the oldest first. Raises CacheError, if ``strict``."""
        found = self._select("SELECT outcome, facts FROM decisions ORDER BY rowid", strict=strict)
        return list(_read(found, lambda outcome, facts: (Outcome.from_data(outcome), dict(facts))))

    # -- unfinished ones
    def rows(self, key: str) -> list[Candidate]:
        """What has been measured so far, in that order."""
        found = self._select("SELECT row FROM measured WHERE key = ? ORDER BY rowid", (key,))
        return list(_read(found, Candidate.from_data))

    def add_row(self, key: str, row: Candidate) -> None:
        """Store a candidate's row, in place of one of the same name and ``where``."""
        values = (key, row.name, row.where, _json(row.to_data()))
        self._use(lambda c: c.execute("INSERT OR REPLACE INTO measured VALUES (?, ?, ?, ?)", values), None)

    def drop_rows(self, key: str) -> None:
        self._use(lambda c: c.execute("DELETE FROM measured WHERE key = ?", (key,)), None)

    # -- imported tables
    def imported(self, device_model: str, op: str, sizes: str, dtypes: str = "", epilogue: str = "") -> Winner | None:
        """What imported tables say, as ``Table.find``."""
        try:
            about = (op_key(op), sizes_key(sizes))
        except ValueError:
            return None
        found = self._select("SELECT entry FROM imported WHERE op = ? AND sizes = ? ORDER BY rowid", about)
        return Table(tuple(_read(found, _entry))).find(device_model, op, sizes, dtypes, epilogue)

    def imports(self, strict: bool = True) -> Table:
        """All imported entries. Raises CacheError, if ``strict``."""
        found = self._select("SELECT entry FROM imported ORDER BY rowid", strict=strict)
        return Table(tuple(_read(found, _entry)))

    def import_table(self, table: Table) -> None:
        """Store all entries, or none, each in place of one about the same. Raises CacheError."""
        rows = []
        for e in table.entries:
            device, op, sizes, dtypes, epilogue = e.key
            rows.append((op, sizes, device, dtypes, epilogue, _json(e.to_data())))
        insert = "INSERT OR REPLACE INTO imported VALUES (?, ?, ?, ?, ?, ?)"
        self._use(lambda c: c.executemany(insert, rows), None, strict=True)

    def clear(self) -> tuple[int, int]:
        """Remove everything; how many decisions and imported entries there were. Raises CacheError."""

        def work(c: sqlite3.Connection) -> tuple[int, int]:
            decisions, _, imported = (
                c.execute(f"DELETE FROM {table}").rowcount for table in ("decisions", "measured", "imported")
            )
            return decisions, imported

        return self._use(work, (0, 0), strict=True)

    # -- the file
    def _select(self, query: str, values: tuple[str, ...] = (), strict: bool = False) -> list[tuple[Any, ...]]:
        nothing: list[tuple[Any, ...]] = []
        return self._use(lambda c: c.execute(query, values).fetchall(), nothing, strict)

    def _use(self, work: Callable[[sqlite3.Connection], T], otherwise: T, strict: bool = False) -> T:
        """``work`` in a transaction, on a new file if the one there is damaged; else ``otherwise``."""
        with _lock:
            why = self._why
            if self.path is not None and (strict or time.monotonic() - self._failed >= AGAIN_SECONDS):
                for _ in range(2):
                    try:
                        return self._transaction(self.path, work)
                    except sqlite3.ProgrammingError:
                        raise  # a mistake in a call
                    except (sqlite3.Error, OSError) as e:
                        why = str(e)
                        damaged = type(e) is sqlite3.DatabaseError  # other troubles have classes of their own
                    if not (damaged and self._set_aside(self.path, why)):
                        break
                self._failed = time.monotonic()
            if strict:
                raise CacheError(f"cannot use the decisions in {self.folder or 'the cache'}: {why}")
            if not self._warned:
                self._warned = True
                logger("tuning").warning(
                    "decisions are not kept: the store in %s cannot be used (%s); "
                    "REFLIB_CACHE_DIR names another folder",
                    self.folder or "the cache", why,
                )  # fmt: skip
            return otherwise

    @staticmethod
    def _transaction(path: Path, work: Callable[[sqlite3.Connection], T]) -> T:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        connection = sqlite3.connect(path, BUSY_SECONDS, isolation_level="IMMEDIATE")
        with contextlib.closing(connection) as c, c:
            c.execute("PRAGMA synchronous = OFF")  # what a power failure takes is measured again
            for table in _TABLES:
                c.execute(table)
            return work(c)

    @staticmethod
    def _set_aside(path: Path, why: str) -> bool:
        aside = path.with_name(f"{path.name}.damaged")
        try:
            os.replace(path, aside)
        except OSError:  # where it cannot be renamed it cannot be used
            return False
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
        logger("tuning").warning("the decisions in %s are damaged (%s); the file is now %s, and a new one is begun",
                                 path, why, aside.name)  # fmt: skip
        return True


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _read(found: Iterable[tuple[Any, ...]], parse: Callable[..., T]) -> Iterator[T]:
    """``parse`` of each row's JSON values. A row of another form does not count."""
    for row in found:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            yield parse(*map(json.loads, row))


def _entry(data: Any) -> Entry:
    return entry_of(data, "an imported entry")


# -- the process's store ----------------------------------------------------------------------------
def keeps_decisions(options: Options) -> bool:
    """``cache_decisions``, or what the environment says."""
    if options.cache_decisions is None:
        return os.environ.get("REFLIB_CACHE_DECISIONS", "").strip() != "0"
    return options.cache_decisions


def store() -> Store:
    """The process's store, in the cache folder that REFLIB_CACHE_DIR names now. Never raises."""
    try:
        return _in_folder(cache.root() / "tuning", "")
    except CacheError as e:
        return _in_folder(None, str(e))


_in_folder = functools.cache(Store)
