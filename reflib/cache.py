"""The on-disk cache: what was compiled once is not compiled again, by this process or another.

Layout::

    <root>/<kind>/<key>-<digest><suffix>        root: $REFLIB_CACHE_DIR, else the platform's cache folder

``kind`` is a short word (``kernels``, ``cubin`` ...), ``key`` a hash of everything the content depends on,
and ``digest`` a hash of the content itself. A file that does not match its name is damaged:
it is removed and built anew. An entry is written under another name and renamed, so no process ever
sees half of one, and none is changed in place, so a library that another process has loaded stays as it was.

The cache holds code that will run. It is therefore private (mode 0700) and refused when another user owns it. What
others could write to is never used: a folder that was open to them is emptied (its contents are moved aside), and
an entry is a plain file of this user's that no other user may write to, or it is not there.

A cache that cannot be written to (full, read-only) costs time, not the program: after one warning, this process keeps
what it compiles in a temporary folder.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import platform
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from . import atomic
from .errors import CacheError

FORMAT = "1"  # part of every key: change it when the layout changes
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by reflib; may be deleted.\n"


_OTHERS = 0o022  # permission to write, of the group and of everybody
_spares: dict[Path, Path] = {}  # by the folder that cannot be written to
_lock = threading.Lock()
_versions_lock = threading.Lock()
# a child does not have the thread that holds it
os.register_at_fork(after_in_child=_versions_lock._at_fork_reinit)  # type: ignore[attr-defined]


def root() -> Path:
    """The cache's folder, made if it is not there. Raises CacheError when it must not be used."""
    path = _default_root()
    if path in _spares:
        return _spares[path]
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written to")
        # under its own name, as the first file: a folder with others, but not this one, is not ours
        if not (path / _TAG).exists():
            with contextlib.suppress(FileExistsError), open(path / _TAG, "x", opener=_private) as f:
                f.write(_TAG_TEXT)
    except OSError as e:
        if path.exists() and not path.is_dir():
            raise CacheError(f"cannot use the cache folder {path}: {e}; set REFLIB_CACHE_DIR to another") from e
        return _spare(path, e)
    return path


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _spare(path: Path, why: OSError) -> Path:
    """A temporary folder instead of ``path``, from now on in this process."""
    with _lock:
        if path not in _spares:
            try:
                spare = Path(tempfile.mkdtemp(prefix="reflib-cache-"))
            except OSError as e:
                remedy = "set REFLIB_CACHE_DIR to a folder with room"
                raise CacheError(f"cannot use the cache {path}: {why}, nor a temporary one: {e}; {remedy}") from e
            atexit.register(_remove, spare, os.getpid())
            _spares[path] = spare
            warnings.warn(
                f"cannot write to the cache folder {path} ({why.strerror or why}): what is compiled is not kept; set "
                "REFLIB_CACHE_DIR to a folder with room", stacklevel=3,
            )  # fmt: skip
        return _spares[path]


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a child that was forked has the folder too
        shutil.rmtree(folder, ignore_errors=True)


def _default_root() -> Path:
    named = os.environ.get("REFLIB_CACHE_DIR")
    if named:
        path = Path(named).expanduser().absolute()
        if (path / _TAG).exists():
            return path
        others = path.is_dir() and any(path.iterdir()) and not (path / _TAG).exists()  # last: it may just be made
        if not others:
            return path
        _check_private(path)  # else other users could replace ours
        return path / "reflib"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "reflib"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "reflib"


def _check_private(path: Path) -> None:
    """Owned by this user, and closed to others. A folder that is ours alone (empty, or made by us) is closed
    here, and what others may have put into it is moved aside; one that holds other things is left as it is, and
    refused if others may write to it."""
    info = path.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise CacheError(f"the cache folder {path} is not a folder; set REFLIB_CACHE_DIR to another")
    if info.st_uid != os.getuid():
        raise CacheError(
            f"the cache folder {path} belongs to another user (uid {info.st_uid}), who could put code "
            "into it; set REFLIB_CACHE_DIR to a folder of yours"
        )
    if not stat.S_IMODE(info.st_mode) & 0o077:
        return
    if (path / _TAG).exists() or not any(path.iterdir()):
        path.chmod(0o700)  # from here on no other user can add anything
        if stat.S_IMODE(info.st_mode) & _OTHERS and any(path.iterdir()):
            _set_aside(path)
    elif stat.S_IMODE(info.st_mode) & 0o022:
        raise CacheError(f"other users may write to the cache folder {path}: run  chmod 700 {path}")


def _set_aside(path: Path) -> None:
    """Move what is in ``path`` into a folder of its own in it, where nothing looks."""
    aside = path / f".untrusted-{secrets.token_hex(8)}"
    inside = [p for p in path.iterdir() if not p.name.startswith(".untrusted-")]
    aside.mkdir(mode=0o700)
    for p in inside:
        with contextlib.suppress(FileNotFoundError):  # another process of ours did it
            p.rename(aside / p.name)
    warnings.warn(
        f"other users could write to the cache folder {path}: it was closed to them, and what was in it is not used "
        f"(it is in {aside}, which may be deleted)", stacklevel=4,
    )  # fmt: skip


def _is_ours(info: os.stat_result) -> bool:
    return info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & _OTHERS


def _folder(kind: str) -> Path:
    """The folder of a kind, made if it is not there. What else is in its place is moved aside. Raises OSError."""
    path = root() / kind
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        return path
    info = path.lstat()
    if not (stat.S_ISDIR(info.st_mode) and _is_ours(info)):
        path.rename(path.with_name(f".untrusted-{secrets.token_hex(8)}"))
        path.mkdir(mode=0o700)
    return path


def _content(path: Path) -> bytes | None:
    """Of a plain file of ours that no other user may write to; None for anything else, which is not waited for (a pipe)
    nor followed (a link). Raises OSError."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as f:
        info = os.fstat(number)
        return f.read() if stat.S_ISREG(info.st_mode) and _is_ours(info) else None


def key(*parts: Any) -> str:
    """A hash of ``parts`` (strings, bytes, numbers, nested tuples of these): other parts, another key."""
    h = hashlib.sha256(FORMAT.encode())
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        h.update(b"%d:" % len(data) + data)
    return h.hexdigest()[:40]


def get(kind: str, key: str) -> Path | None:
    """The file stored under ``key``, checked; None if there is none, or none that is whole."""
    found = _find(kind, key)
    return found[0] if found else None


def read(kind: str, key: str) -> bytes | None:
    """The content stored under ``key``, or None."""
    found = _find(kind, key)
    return found[1] if found else None


def _find(kind: str, key: str) -> tuple[Path, bytes] | None:
    here, named = root(), _default_root()
    for base in (here, named) if here != named else (here,):
        folder = base / kind
        with contextlib.suppress(OSError):
            info = folder.lstat()
            if stat.S_ISDIR(info.st_mode) and _is_ours(info) and _is_ours(base.stat()):
                for name in [n for n in os.listdir(folder) if n.startswith(key + "-")]:
                    if (data := _checked(folder / name, name[len(key) + 1 :].split(".")[0])) is not None:
                        return folder / name, data
    return None


def _checked(path: Path, digest: str) -> bytes | None:
    """The file's content, if it is whole; else what is there is removed."""
    with contextlib.suppress(OSError):
        data = _content(path)
        if data is not None and _digest(data) == digest:
            return data
    _clear(path)
    return None


def _clear(path: Path) -> None:
    """Remove what is at ``path``, whatever it is."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def put(kind: str, key: str, content: bytes | str | os.PathLike[str], suffix: str = "") -> Path:
    """Store ``content`` (bytes, or the path of a file to copy) under ``key`` and return where it is.
    ``suffix``: how the file's name ends (``.so``), for people and for tools that look at names."""
    data = content if isinstance(content, bytes) else Path(content).read_bytes()
    name = f"{key}-{_digest(data)}{suffix}"
    try:
        return _write(_folder(kind) / name, data)
    except OSError as e:
        _spare(_default_root(), e)
    try:
        return _write(_folder(kind) / name, data)
    except OSError as e:
        raise CacheError(f"cannot write {root() / kind / name}: {e}; set REFLIB_CACHE_DIR to a folder with room") from e


def _write(path: Path, data: bytes) -> Path:
    if path.is_symlink() or path.exists() and not path.is_file():  # (neither is replaced by a rename)
        _clear(path)
    atomic.write(path, data, rights=0o700)
    return path


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


# -- what keys are made of --------------------------------------------------------------------------
def versions() -> tuple[str, ...]:
    """reflib's own sources, torch, Triton, Python: for what follows from more than the source in its key."""
    with _versions_lock:  # else each of many threads reads all sources
        return _versions()


@functools.cache
def _versions() -> tuple[str, ...]:
    return (_source_hash(), *(f"{p} {_version(p)}" for p in ("torch", "triton")), platform.python_version())


def _source_hash() -> str:
    here = Path(__file__).parent
    h = hashlib.sha256()
    for path in sorted(p for p in here.rglob("*") if p.suffix in (".py", ".c", ".cpp", ".h")):
        if path.relative_to(here).parts[0] not in ("lab", "observe"):
            h.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes())
    return h.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@functools.cache
def cpu_features() -> str:
    """The instruction sets of this CPU, as one string: code compiled for them may not run on another."""
    try:
        with open("/proc/cpuinfo") as f:
            wanted = [line for line in f if line.split(":")[0].strip() in ("flags", "Features", "model name")]
        digest = hashlib.sha256("".join(sorted(set(wanted))).encode()).hexdigest()[:16]
        return f"{platform.machine()} {digest}"
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
