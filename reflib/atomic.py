"""Files and folders that are whole or not there, and as they were when writing them fails.

    write     text or bytes
    file      a file to write to, piece by piece
    folder    a folder to fill

What is new is made beside its place, in the same file system, and renamed at the end. So readers see all of it or
nothing, a file that is mapped or being read stays as it was, and a full disk costs nothing that was there before.
A process that is killed may leave ``.new-*`` or ``.old-*``; one that ends while a thread writes a file leaves nothing.
A link stays one: what it leads to is replaced. A read-only file is replaced too, since it is the folder that changes.
"""

import atexit
import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_unfinished: set[tuple[int, Path]] = set()  # (process, file)


@atexit.register
def _remove_unfinished() -> None:
    """Threads that do not end by themselves are stopped where they are."""
    for process, new in [*_unfinished]:
        if process == os.getpid():
            new.unlink(missing_ok=True)


def write(path: str | os.PathLike[str], data: str | bytes, rights: int | None = None) -> None:
    """Write ``data`` (text as UTF-8) to ``path``. See ``file``. Raises OSError."""
    content = data.encode() if isinstance(data, str) else data
    with file(path, rights) as f:
        f.write(content)


@contextlib.contextmanager
def file(path: str | os.PathLike[str], rights: int | None = None, sync: bool = False) -> Iterator[BinaryIO]:
    """A binary file that takes the place of ``path`` when the ``with`` block ends without an exception.

    ``rights``: its permissions (0o600); None: those of the file that is there, else what ``open`` gives a new one.
    ``sync``: outlast a crash of the system too, which costs a wait for the disk.
    What is there and is no file (a pipe, a terminal) cannot be replaced: it is written to as it is. Raises OSError.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        with path.open("wb") as f:
            yield f
        return
    path = Path(os.path.realpath(path))
    if rights is None and path.exists():
        rights = path.stat().st_mode & 0o777
    new = _beside(path, "new")
    first = 0o666 if rights is None else 0o600  # private until it has its permissions
    with _named(path):
        f = open(new, "xb", opener=lambda name, flags: os.open(name, flags, first))  # noqa: SIM115 - closed below
    _unfinished.add(begun := (os.getpid(), new))
    try:
        with f:  # some file systems report only when it is closed that there is no room
            if rights is not None:
                os.fchmod(f.fileno(), rights)
            yield f
            if sync:  # else the name may reach the disk before what it names
                f.flush()
                os.fsync(f.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    finally:
        _unfinished.discard(begun)


@contextlib.contextmanager
def folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty folder that takes the place of ``path``, whatever is in that, when the ``with`` block ends without an
    exception. Between two renames there is neither; if the second fails, the old one is put back. Raises OSError."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    new, old = _beside(path, "new"), _beside(path, "old")
    with _named(path):
        new.mkdir()
    try:
        yield new
        if path.exists():
            os.replace(path, old)  # no folder is renamed onto one that is not empty
        os.replace(new, path)
    except BaseException:
        if old.exists():
            os.replace(old, path)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path, what: str) -> Path:
    """An unused name; without that of ``path``, which may be as long as a name can be."""
    return path.parent / f".{what}-{secrets.token_hex(8)}"


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors have the name that the user knows."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None
