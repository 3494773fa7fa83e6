"""The on-disk cache: what was compiled once is not compiled again, by this process or another.

Layout::

    <root>/<kind>/<key>-<digest><suffix>        root: $REFLIB_CACHE_DIR, else the platform's cache folder

``kind`` is a short word (``kernels``, ``cubin`` ...), ``key`` a hash of everything the content depends on,
and ``digest`` a hash of the content itself. A file that does not match its name is damaged:
it is removed and built anew. An entry is written under another name and renamed, so no process ever
sees half of one, and none is changed in place, so a library that another process has loaded stays as it was.

The cache holds code that will run. It is therefore private (mode 0700), and refused when another user owns it or could
have written to it.

A cache that cannot be written to (full, read-only) costs time, not the program: after one warning, this process keeps
what it compiles in a temporary folder.
"""

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import platform
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
    """Owned by this user, and closed to others. A folder that is ours alone (empty, or made by us) is closed here; one
    that others may have put something into is refused."""
    info = path.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise CacheError(f"the cache folder {path} is not a folder; set REFLIB_CACHE_DIR to another")
    if info.st_uid != os.getuid():
        raise CacheError(
            f"the cache folder {path} belongs to another user (uid {info.st_uid}), who could put code "
            "into it; set REFLIB_CACHE_DIR to a folder of yours"
        )
    ours = (path / _TAG).exists() or not any(path.iterdir())
    if stat.S_IMODE(info.st_mode) & 0o022 and any(path.iterdir()):
        remedy = "remove it" if ours else f"run  chmod 700 {path}"
        raise CacheError(f"other users may write to the cache folder {path}, and put code into it: {remedy}")
    if stat.S_IMODE(info.st_mode) & 0o077 and ours:
        path.chmod(0o700)


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
        with contextlib.suppress(OSError):
            for name in [n for n in os.listdir(base / kind) if n.startswith(key + "-")]:
                path = base / kind / name
                plain = stat.S_ISREG(path.lstat().st_mode)  # a link may lead to /dev/zero
                if plain and _digest(data := path.read_bytes()) == name[len(key) + 1 :].split(".")[0]:
                    return path, data
                path.unlink()
    return None


def put(kind: str, key: str, content: bytes | str | os.PathLike[str], suffix: str = "") -> Path:
    """Store ``content`` (bytes, or the path of a file to copy) under ``key`` and return where it is.
    ``suffix``: how the file's name ends (``.so``), for people and for tools that look at names."""
    data = content if isinstance(content, bytes) else Path(content).read_bytes()
    name = f"{key}-{_digest(data)}{suffix}"
    try:
        return _write(root() / kind / name, data)
    except OSError as e:
        _spare(_default_root(), e)
    try:
        return _write(root() / kind / name, data)
    except OSError as e:
        raise CacheError(f"cannot write {root() / kind / name}: {e}; set REFLIB_CACHE_DIR to a folder with room") from e


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(mode=0o700, exist_ok=True)
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
