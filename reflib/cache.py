"""The on-disk cache: what was compiled once is not compiled again, by this process or another.

Layout::

    <root>/<kind>/<key>-<digest><suffix>        root: $REFLIB_CACHE_DIR, else the platform's cache folder

``kind`` is a short word (``kernels``, ``cubin`` ...), ``key`` a hash of everything the content depends on,
and ``digest`` a hash of the content itself. A file that does not match its name is damaged:
it is removed and built anew. An entry is written under another name and renamed, so no process ever
sees half of one, and none is changed in place, so a library that another process has loaded stays as it was.

The cache holds code that will run. It is therefore private (mode 0700) and refused when another user owns it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import stat
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from . import atomic
from .errors import CacheError

FORMAT = "1"  # part of every key: change it when the layout changes
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by reflib; may be deleted.\n"


def root() -> Path:
    """The cache's folder, made if it is not there. Raises CacheError when it must not be used."""
    path = _default_root()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path)
        if not (path / _TAG).exists():
            atomic.write(path / _TAG, _TAG_TEXT, rights=0o700)
    except OSError as e:
        raise CacheError(f"cannot use the cache folder {path}: {e}; set REFLIB_CACHE_DIR to another") from e
    return path


def _default_root() -> Path:
    named = os.environ.get("REFLIB_CACHE_DIR")
    if named:
        path = Path(named).expanduser().absolute()
        others = path.is_dir() and any(path.iterdir()) and not (path / _TAG).exists()
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
    here; one that holds other things is left as it is, and refused if others may write to it."""
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
        path.chmod(0o700)
    elif stat.S_IMODE(info.st_mode) & 0o022:
        raise CacheError(f"other users may write to the cache folder {path}: run  chmod 700 {path}")


def key(*parts: Any) -> str:
    """A hash of ``parts`` (strings, bytes, numbers, nested tuples of these): other parts, another key."""
    h = hashlib.sha256(FORMAT.encode())
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        h.update(b"%d:" % len(data) + data)
    return h.hexdigest()[:40]


def get(kind: str, key: str) -> Path | None:
    """The file stored under ``key``, checked; None if there is none, or none that is whole."""
    folder = root() / kind
    try:
        names = [n for n in os.listdir(folder) if n.startswith(key + "-")]
    except FileNotFoundError:
        return None
    for name in names:
        path = folder / name
        with contextlib.suppress(OSError):
            if _digest(path.read_bytes()) == name[len(key) + 1 :].split(".")[0]:
                return path
            path.unlink()
    return None


def put(kind: str, key: str, content: bytes | str | os.PathLike[str], suffix: str = "") -> Path:
    """Store ``content`` (bytes, or the path of a file to copy) under ``key`` and return where it is.
    ``suffix``: how the file's name ends (``.so``), for people and for tools that look at names."""
    data = content if isinstance(content, bytes) else Path(content).read_bytes()
    folder = root() / kind
    path = folder / f"{key}-{_digest(data)}{suffix}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        atomic.write(path, data, rights=0o700)
    except OSError as e:
        raise CacheError(f"cannot write {path}: {e}; set REFLIB_CACHE_DIR to a folder with room") from e
    return path


def read(kind: str, key: str) -> bytes | None:
    """The content stored under ``key``, or None."""
    path = get(kind, key)
    return None if path is None else path.read_bytes()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


# -- what keys are made of --------------------------------------------------------------------------
@functools.cache
def versions() -> tuple[str, ...]:
    """reflib's own sources, torch, Triton, Python: for what follows from more than the source in its key."""
    return (_source_hash(), *(f"{p} {_version(p)}" for p in ("torch", "triton")), platform.python_version())


@functools.cache
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
