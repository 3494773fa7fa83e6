"""The cache of decisions: what was measured once, on this device with these versions, is not measured again.

One SQLite file in the cache folder, ``tuning/decisions-<schema>.sqlite3``, in WAL mode: many processes read and write
it at once, each in transactions of well under a millisecond. Three tables: finished decisions, rows of unfinished ones
(a process that dies leaves its measurements to the next), and imported tables (``portable``). Values are JSON with a
digest of key and value, since SQLite notices damage to its own pages only.

Nothing here may stop a compilation. What is damaged is set aside (renamed ``.damaged-<n>``) and begun anew; where the
file cannot be used (a read-only folder, a full disk) there is one warning, and the store is as if empty.

- **Fork**: SQLite must not be carried across one. Connections are closed before, and opened again when next used.
- **Exchanged files**: another process may set the file aside or remove it. Every use compares the inode first. A file
  is opened and renamed under a lock of its own, so that nobody sets aside the new one.

NB: WAL needs one machine. A home folder that several machines share should not hold the cache: REFLIB_CACHE_DIR.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from .. import cache
from ..errors import CacheError
from ..logs import get as logger
from ..tables import Entry, Table, TableError, entry_of, op_key, sizes_key
from .circumstances import decision_key, device_model, facts
from .decision import Candidate

__all__ = ["Store", "decision_key", "device_model", "facts", "store"]

SCHEMA = 1  # of the file: another one has another name
BUSY_SECONDS = 5.0  # how long to wait for other processes
AGAIN_SECONDS = 60.0  # a file that could not be used is tried again after so long
MOST_DAMAGED = 9  # files set aside; the last is then written over

_TABLES = """
BEGIN;
CREATE TABLE decisions (key TEXT PRIMARY KEY, ruling BLOB NOT NULL, facts BLOB NOT NULL, digest BLOB NOT NULL);
CREATE TABLE measured (key TEXT, name TEXT, place TEXT, value BLOB NOT NULL, digest BLOB NOT NULL,
    PRIMARY KEY (key, name, place));
CREATE TABLE imported (op TEXT, sizes TEXT, device TEXT, dtypes TEXT, epilogue TEXT, value BLOB NOT NULL,
    digest BLOB NOT NULL, PRIMARY KEY (op, sizes, device, dtypes, epilogue));
PRAGMA user_version = %d;
COMMIT;
""" % SCHEMA  # fmt: skip

# What SQLite reports when the file may well be whole but cannot be used now; anything else is damage.
_UNUSABLE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_INTERRUPT,
}  # fmt: skip

T = TypeVar("T")

_lock = threading.RLock()  # held while any store of this process is used, and across a fork
_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_not_ours: list[sqlite3.Connection] = []  # of a parent that forked past Python: never closed, which would write


class Store:
    """One file of decisions, opened when first needed; for any number of threads and processes. Methods return None or
    nothing where the file cannot be used; those for the command line raise CacheError."""

    def __init__(self, folder: Path | None, why: str = "") -> None:
        """``folder`` None: there is none that may be used, and ``why``."""
        self.folder = folder
        self._why = why
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # which file is open
        self._pid = 0
        self._tried = -AGAIN_SECONDS
        self._warned = False
        with _lock:
            _stores.add(self)

    @property
    def path(self) -> Path | None:
        return self.folder and self.folder / f"decisions-{SCHEMA}.sqlite3"

    # -- finished decisions
    def get(self, key: str) -> dict[str, Any] | None:
        """The ruling stored under ``key``."""
        found = self._use(lambda c: c.execute(f"{_DECISIONS} WHERE key = ?", (key,)).fetchone(), None)
        if found is None:
            return None
        read = _read_decision(found)
        if read is None:
            self._drop("decisions", key, found[-1])
            return None
        return read[0]

    def empty(self) -> bool:
        """Has nothing been decided yet?"""
        return self._use(lambda c: c.execute("SELECT 1 FROM decisions LIMIT 1").fetchone(), None) is None

    def put(self, key: str, ruling: dict[str, Any], facts: dict[str, Any]) -> None:
        """Store a finished decision; whoever comes last wins. Its rows as an unfinished one go."""
        values = (_json(ruling), _json(facts))
        row = (key, *values, _digest(key, *values))
        self._use(lambda c: _all_or_nothing(c, [
            ("INSERT OR REPLACE INTO decisions VALUES (?, ?, ?, ?)", [row]),
            ("DELETE FROM measured WHERE key = ?", [(key,)]),
        ]), None)  # fmt: skip

    # -- unfinished ones
    def rows(self, key: str) -> list[dict[str, Any]]:
        """What has been measured so far, in that order."""
        query = "SELECT key, value, digest FROM measured WHERE key = ? ORDER BY rowid"
        found = self._use(lambda c: c.execute(query, (key,)).fetchall(), _NONE)
        out = [_read(row, _is_row) for row in found]
        for row, value in zip(found, out):
            if value is None:
                self._drop("measured", key, row[-1])
        return [value[0] for value in out if value is not None]

    def add_row(self, key: str, row: dict[str, Any]) -> None:
        """Store a candidate's row, in place of one of the same name and ``where``."""
        value = _json(row)
        values = (key, str(row.get("name")), str(row.get("where", "")), value, _digest(key, value))
        self._use(lambda c: c.execute("INSERT OR REPLACE INTO measured VALUES (?, ?, ?, ?, ?)", values), None)

    def drop_rows(self, key: str) -> None:
        self._use(lambda c: c.execute("DELETE FROM measured WHERE key = ?", (key,)), None)

    # -- imported tables
    def imported(self, device_model: str, op: str, sizes: str, dtypes: str = "", epilogue: str = "") -> str | None:
        """What imported tables say, as ``Table.find``."""
        try:
            where = (op_key(op), sizes_key(sizes))
        except ValueError:
            return None
        query = f"{_IMPORTED} WHERE op = ? AND sizes = ? ORDER BY rowid"
        found = self._use(lambda c: c.execute(query, where).fetchall(), _NONE)
        return _imports(found).find(device_model, op, sizes, dtypes, epilogue) if found else None

    # -- for the command line
    def decisions(self, strict: bool = True) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(ruling, facts) of all finished decisions, the oldest first. Raises CacheError, if ``strict``."""
        found = self._use(lambda c: c.execute(f"{_DECISIONS} ORDER BY rowid").fetchall(), _NONE, strict)
        return [read for read in map(_read_decision, found) if read is not None]

    def imports(self, strict: bool = True) -> Table:
        """All imported entries. Raises CacheError, if ``strict``."""
        return _imports(self._use(lambda c: c.execute(f"{_IMPORTED} ORDER BY rowid").fetchall(), _NONE, strict))

    def import_table(self, table: Table) -> None:
        """Store all entries, or none, each in place of one about the same. Raises CacheError."""
        rows = []
        for e in table.entries:
            device, op, sizes, dtypes, epilogue = e.key
            value = _json(Table((e,)).to_data()["entries"][0])
            rows.append((op, sizes, device, dtypes, epilogue, value, _digest(op, value)))
        insert = "INSERT OR REPLACE INTO imported VALUES (?, ?, ?, ?, ?, ?, ?)"
        self._use(lambda c: _all_or_nothing(c, [(insert, rows)]), None, strict=True)

    def clear(self) -> tuple[int, int]:
        """Remove everything; how many decisions and imported entries there were. Raises CacheError."""

        def work(c: sqlite3.Connection) -> tuple[int, int]:
            decisions, _, imported = (
                _all_or_nothing(c, [(f"DELETE FROM {name}", [()])]) for name in ("decisions", "measured", "imported")
            )
            with contextlib.suppress(sqlite3.OperationalError):  # another process is at work: its room is used again
                c.execute("VACUUM")
            return decisions, imported

        return self._use(work, (0, 0), strict=True)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with _lock:
            if self._connection is not None and self._pid == os.getpid():
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
            elif self._connection is not None:
                _not_ours.append(self._connection)
            self._connection = self._file = None

    def __del__(self) -> None:
        """Left to the garbage collector, the connection would be closed in any thread, perhaps while another forks:
        the child would find SQLite's own locks taken for ever."""
        if self._connection is not None:
            self.close()

    # -- the file
    def _use(self, work: Callable[[sqlite3.Connection], T], otherwise: T, strict: bool = False) -> T:
        """``work`` done, on a new file if the one there is damaged; ``otherwise`` where there can be none."""
        with _lock:
            why = self._why
            if strict or time.monotonic() - self._tried >= AGAIN_SECONDS:
                for _ in range(3):  # the file found damaged, then another process's new one perhaps, then ours
                    try:
                        return work(self._open())
                    except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
                        raise  # a mistake in a call
                    except (sqlite3.Error, OSError, CacheError) as e:
                        why = str(e)
                        if not isinstance(e, sqlite3.Error) or _code(e) in _UNUSABLE:
                            break
                        try:
                            self._set_aside(why)
                        except (OSError, CacheError) as other:
                            why = f"{why}, and {other}"
                            break
                self._give_up(why, quietly=strict)
            if strict:
                raise CacheError(f"cannot use the decisions in {self.folder or 'the cache'}: {why}")
            return otherwise

    def _drop(self, table: str, key: str, digest: Any) -> None:
        """Remove a row that is not as it was written."""
        logger("tuning").info("a decision in %s is damaged and does not count", self.path)
        delete = f"DELETE FROM {table} WHERE key = ? AND digest IS ?"
        self._use(lambda c: c.execute(delete, (key, digest)), None)

    def _open(self) -> sqlite3.Connection:
        """The connection to the file that is there now."""
        path = self.path
        if self.folder is None or path is None:
            raise CacheError(self._why)
        if self._connection is not None:
            if self._pid == os.getpid() and self._file == _identity(path):
                return self._connection
            self.close()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(self.folder):
            if path.exists() and not stat.S_ISREG(path.stat().st_mode):
                self._rename(path, "it is no file")
            # autocommit: transactions are ours. Used under _lock only, so by one thread at a time.
            self._connection = sqlite3.connect(path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            self._pid, self._file = os.getpid(), _identity(path)
            _prepare(self._connection)
        return self._connection

    def _set_aside(self, why: str) -> None:
        """Rename the file that was open, unless another process has done so."""
        path, file = self.path, self._file
        self.close()
        if self.folder is None or path is None or file is None:
            return
        with _alone(self.folder):
            if _identity(path) == file:
                self._rename(path, why)

    def _rename(self, path: Path, why: str) -> None:
        names = [path.with_name(f"{path.name}.damaged-{n}") for n in range(1, MOST_DAMAGED + 1)]
        name = next((p for p in names if not os.path.lexists(p)), names[-1])
        os.replace(path, name)
        for end in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{end}", f"{name}{end}")
        logger("tuning").warning("the decisions in %s are damaged (%s); the file is now %s, and a new one is begun",
                                 path, why, name.name)  # fmt: skip

    def _give_up(self, why: str, quietly: bool) -> None:
        self.close()
        self._tried = time.monotonic()
        if not self._warned and not quietly:
            self._warned = True
            logger("tuning").warning("decisions are not kept: the store in %s cannot be used (%s); REFLIB_CACHE_DIR "
                                     "names another folder", self.folder or "the cache", why)  # fmt: skip


_NONE: list[tuple[Any, ...]] = []
_DECISIONS = "SELECT key, ruling, facts, digest FROM decisions"
_IMPORTED = "SELECT op, value, digest FROM imported"


def _prepare(c: sqlite3.Connection) -> None:
    """Settings, and the tables in a new file. Raises sqlite3.DatabaseError for another schema."""
    c.execute("PRAGMA synchronous = NORMAL")  # what a power failure takes is measured again
    c.execute("PRAGMA cell_size_check = ON")
    version = c.execute("PRAGMA user_version").fetchone()[0]
    if version == SCHEMA:
        return
    if version != 0 or c.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise sqlite3.DatabaseError(f"its schema has version {version}, not {SCHEMA}")
    c.execute("PRAGMA journal_mode = WAL")
    c.executescript(_TABLES)


def _all_or_nothing(c: sqlite3.Connection, statements: list[tuple[str, list[tuple[Any, ...]]]]) -> int:
    """One transaction; how many rows the last statement changed."""
    c.execute("BEGIN IMMEDIATE")  # the right to write first: asking for it later can fail at once
    try:
        changed = 0
        for statement, rows in statements:
            changed = c.executemany(statement, rows).rowcount
        c.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            c.execute("ROLLBACK")
        raise
    return changed


def _code(e: sqlite3.Error) -> int | None:
    """SQLite's error code without its details; None where Python found the error."""
    code = getattr(e, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process opens or sets aside the file meanwhile. Raises CacheError if one takes too long."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise CacheError(f"another process holds {folder / 'lock'}") from None
                time.sleep(0.002)
        yield
    finally:
        os.close(fd)


# -- values -----------------------------------------------------------------------------------------
def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _digest(key: str, *values: bytes) -> bytes:
    return hashlib.sha256(b"\0".join((key.encode(), *values))).digest()[:16]


def _read(row: tuple[Any, ...], *right: Callable[[Any], bool]) -> list[Any] | None:
    """The values of (key, value ..., digest), or None if they are not what was written or not of the ``right`` form."""
    key, *values, digest = row
    if not isinstance(key, str) or not all(isinstance(v, bytes) for v in values) or _digest(key, *values) != digest:
        return None
    try:
        out = [json.loads(v) for v in values]
    except ValueError:
        return None
    return out if all(ok(value) for ok, value in zip(right, out)) else None


_ROW = {f.name for f in fields(Candidate)}


def _is_row(row: Any) -> bool:
    """Would ``Candidate(**row)`` do?"""
    return isinstance(row, dict) and row.keys() <= _ROW and all(isinstance(row.get(k), str) for k in ("name", "status"))


def _is_ruling(ruling: Any) -> bool:
    if not isinstance(ruling, dict) or not isinstance(ruling.get("reason"), str):
        return False
    winners, rows = ruling.get("winners"), ruling.get("rows")
    return (
        isinstance(winners, list) and bool(winners) and all(isinstance(w, str) for w in winners)
        and isinstance(rows, list) and all(map(_is_row, rows))
    )  # fmt: skip


def _is_facts(facts: Any) -> bool:
    return isinstance(facts, dict)


def _read_decision(row: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    read = _read(row, _is_ruling, _is_facts)
    return None if read is None else (read[0], read[1])


def _imports(found: list[tuple[Any, ...]]) -> Table:
    entries: list[Entry] = []
    for row in found:
        read = _read(row, lambda value: isinstance(value, dict))
        with contextlib.suppress(TableError):
            if read is not None:
                entries.append(entry_of(read[0], ""))
    return Table(tuple(entries))


# -- the process's store ----------------------------------------------------------------------------
_current: Store | None = None


def store() -> Store:
    """The process's store, in the cache folder that REFLIB_CACHE_DIR names now. Never raises."""
    global _current
    folder, why = None, ""
    try:
        folder = cache.root() / "tuning"
    except CacheError as e:
        why = str(e)
    with _lock:
        if _current is None or _current.folder != folder:
            if _current is not None:
                _current.close()
            _current = Store(folder, why)
        return _current


def _close_all() -> None:
    with _lock:
        for s in list(_stores):
            s.close()


def _before_fork() -> None:
    """No connection may be open, and no thread inside SQLite, when a process forks."""
    _lock.acquire()
    _close_all()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # the old one may have had waiters, who are not here


atexit.register(_close_all)
os.register_at_fork(
    before=_before_fork, after_in_parent=lambda: _lock.release(), after_in_child=_after_fork_in_child
)  # fmt: skip
