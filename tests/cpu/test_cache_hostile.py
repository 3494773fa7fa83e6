"""A cache folder that others could write to, that holds what is no entry, or that cannot be written to."""

import ctypes
import errno
import os
import random
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reflib import atomic, cache, toolchain
from reflib.errors import CacheError

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def folder(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(cache, "_spares", {})
    yield fresh_cache
    for spare in cache._spares.values():
        cache._remove(spare, os.getpid())


def library() -> int:
    return ctypes.CDLL(str(toolchain.build_library(SOURCE))).answer()


def loosen(path: Path) -> None:
    path.chmod(0o777)
    for p in path.rglob("*"):
        p.chmod(0o777)


def test_what_was_planted_is_not_used(folder: Path) -> None:
    path = cache.put("kernels", "k", b"planted")
    (folder / "tuning").mkdir()
    (folder / "tuning" / "decision").write_text("planted")
    loosen(folder)
    with pytest.warns(UserWarning, match="other users could write to the cache folder .* is not used"):
        assert cache.get("kernels", "k") is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not (folder / "tuning").exists()
    assert [p.read_bytes() for p in folder.glob(".untrusted-*/kernels/*")] == [b"planted"]  # kept, not believed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.put("kernels", "k", b"ours") and cache.read("kernels", "k") == b"ours"
    assert path.parent.stat().st_mode & 0o077 == 0


def test_the_umask_does_not_matter(folder: Path) -> None:
    program = "from reflib import cache; cache.put('kernels', 'k', b'x'); assert cache.read('kernels', 'k') == b'x'"
    here = str(Path(cache.__file__).parents[1])
    program = f"import sys, os; os.umask(0); sys.path.insert(0, {here!r}); {program}"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
    assert cache.read("kernels", "k") == b"x"
    assert all(not p.stat().st_mode & 0o077 for p in (folder, *folder.rglob("*")))


@pytest.mark.parametrize("what", ["file", "folder", "user"])
def test_a_closed_cache_with_loose_contents(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody closed it after it was open (``chmod 700``, as a message says)."""
    path = cache.put("kernels", "k", b"planted")
    if what == "user":
        real = os.fstat
        monkeypatch.setattr(cache.os, "fstat", lambda fd: _of_somebody(real(fd)))
        assert cache.get("kernels", "k") is None
        monkeypatch.undo()
        return
    (path if what == "file" else path.parent).chmod(0o722)
    assert cache.get("kernels", "k") is None
    assert cache.put("kernels", "k", b"planted") == path and cache.read("kernels", "k") == b"planted"


def _of_somebody(info: os.stat_result) -> os.stat_result:
    return os.stat_result((*info[:4], info.st_uid + 1, *info[5:10]))


def pipe(path: Path) -> None:
    os.mkfifo(path, 0o700)


def full_folder(path: Path) -> None:
    path.mkdir(0o700)
    (path / "x").write_text("y")


def link(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLANTED: dict[str, Callable[[Path], Any]] = {
    "pipe": pipe, "folder": full_folder, "link": link, "foreign": lambda p: p.write_bytes(b"\x7fELF"),
    "empty": lambda p: p.touch(0o700),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_an_entry_that_is_none_is_built_again(what: str, folder: Path) -> None:
    path = toolchain.build_library(SOURCE)
    path.unlink()
    PLANTED[what](path)
    assert library() == 42 and path.is_file() and not path.is_symlink()


@pytest.mark.parametrize("what", PLANTED)
def test_a_kind_that_is_no_folder(what: str, folder: Path) -> None:
    cache.root()
    PLANTED[what](folder / "kernels")
    if what != "folder":
        assert cache.get("kernels", "k") is None
    cache.put("kernels", "k", b"x")
    assert cache.read("kernels", "k") == b"x"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"{}", b'{"command": 5}', b"\xff", None])
def test_a_broken_description_of_the_compiler(text: bytes | None, folder: Path) -> None:
    want = toolchain.compiler()
    (path,) = (folder / "toolchain").iterdir()
    key = path.name.split("-")[0]
    path.unlink()
    cache.put("toolchain", key, random.Random(5).randbytes(99) if text is None else text)
    toolchain._compiler.cache_clear()
    assert toolchain.compiler() == want


# -- a cache that cannot be written to ------------------------------------------------------------------
def test_a_full_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled in a temporary folder, with one warning; what the cache has is used."""
    cache.put("kernels", "old", b"old")
    real = atomic.write

    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        if folder in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, *args, **kwargs)

    monkeypatch.setattr(atomic, "write", full)
    with pytest.warns(UserWarning, match="cannot write to the cache folder .*No space left.*REFLIB_CACHE_DIR") as said:
        assert library() == 42 and library() == 42
        cache.put("kernels", "new", b"new")
    assert len(said) == 1
    assert cache.read("kernels", "new") == b"new" and cache.read("kernels", "old") == b"old"
    spare = cache.root()
    assert folder not in spare.parents and stat.S_IMODE(spare.stat().st_mode) == 0o700


def test_a_cache_that_is_read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put("kernels", "old", b"old")
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != folder and real(p, mode))
    with pytest.warns(UserWarning, match="cannot write to the cache folder") as said:
        assert library() == 42 and cache.read("kernels", "old") == b"old"
    assert len(said) == 1 and cache.root() != folder


def test_a_cache_below_what_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFLIB_CACHE_DIR", "/proc/reflib")
    with pytest.warns(UserWarning, match="cannot write to the cache folder /proc/reflib"):
        assert library() == 42


def test_nowhere_to_write_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache.root()
    monkeypatch.setattr(atomic, "write", full)
    monkeypatch.setattr(cache.tempfile, "mkdtemp", full)
    with pytest.raises(CacheError, match="No space left on device, nor a temporary one"):
        cache.put("kernels", "k", b"")
