"""A cache folder that others could write to, or that cannot be written to."""

import ctypes
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
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


def test_what_others_could_write_to_is_refused(folder: Path) -> None:
    cache.put("kernels", "k", b"planted")
    folder.chmod(0o777)
    with pytest.raises(CacheError, match=r"other users may write to the cache folder .*: remove it"):
        cache.get("kernels", "k")


def test_a_link_in_an_entrys_place_is_not_read(folder: Path) -> None:
    path = cache.put("kernels", "k", b"x")
    path.unlink()
    path.symlink_to("/dev/zero")
    assert cache.get("kernels", "k") is None and not path.is_symlink()
    assert cache.put("kernels", "k", b"x") == path and cache.read("kernels", "k") == b"x"


def test_the_umask_does_not_matter(folder: Path) -> None:
    program = "from reflib import cache; cache.put('kernels', 'k', b'x'); assert cache.read('kernels', 'k') == b'x'"
    here = str(Path(cache.__file__).parents[1])
    program = f"import sys, os; os.umask(0); sys.path.insert(0, {here!r}); {program}"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
    assert cache.read("kernels", "k") == b"x"
    assert all(not p.stat().st_mode & 0o077 for p in (folder, *folder.rglob("*")))


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
