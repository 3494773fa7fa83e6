"""The on-disk cache: private, atomic, never a damaged entry, and safe from other users."""

import ctypes
import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reflib import atomic, cache, toolchain
from reflib.errors import CacheError


@pytest.fixture(autouse=True)
def folder(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(cache, "_spares", {})
    yield fresh_cache
    for spare in cache._spares.values():
        cache._remove(spare, os.getpid())


def test_what_was_put_is_found_and_the_folder_is_private(folder):
    k = cache.key("source", 1)
    assert cache.get("kernels", k) is None
    path = cache.put("kernels", k, b"content", suffix=".so")
    assert cache.get("kernels", k) == path and path.suffix == ".so"
    assert cache.read("kernels", k) == b"content"
    assert cache.get("cubin", k) is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_can_be_put(tmp_path):
    (tmp_path / "made").write_bytes(b"from a file")
    assert cache.put("kernels", "k", tmp_path / "made").read_bytes() == b"from a file"


def test_keys_tell_parts_apart():
    keys = [cache.key("ab", "c"), cache.key("a", "bc"), cache.key("abc"), cache.key(b"abc"), cache.key(("a", "b"), 1)]
    assert len(set(keys)) == len(keys)
    assert cache.key("x", 1) == cache.key("x", 1)


@pytest.mark.parametrize("damage", [b"", b"conten", b"Content", b"content!"])
def test_a_damaged_entry_is_not_there_and_can_be_put_again(damage):
    path = cache.put("kernels", "k", b"content")
    path.write_bytes(damage)
    assert cache.get("kernels", "k") is None
    assert not path.exists()
    assert cache.put("kernels", "k", b"content") == path
    assert cache.read("kernels", "k") == b"content"


def test_another_users_folder_is_refused(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(CacheError, match="another user"):
        cache.get("kernels", "k")


def test_a_shared_folder_with_other_things_in_it_is_refused_not_closed(folder):
    folder.mkdir()
    (folder / "mine").write_text("not the cache's")
    folder.chmod(0o777)
    with pytest.raises(CacheError, match="chmod 700"):
        cache.put("kernels", "k", b"")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777


def test_an_empty_folder_is_closed(folder):
    folder.mkdir()
    folder.chmod(0o755)
    cache.root()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_file_in_the_folders_place_is_an_error(folder):
    folder.write_text("")
    with pytest.raises(CacheError, match="REFLIB_CACHE_DIR"):
        cache.root()


def test_processes_share_it(folder):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from reflib import cache\n"
        "for i in range(200):\n"
        "    cache.put('kernels', 'k', b'x' * 100000)\n"
        "    assert cache.read('kernels', 'k') == b'x' * 100000\n"
    )
    here = str(Path(cache.__file__).parents[1])
    children = [subprocess.Popen([sys.executable, "-c", program, here]) for _ in range(3)]
    assert [c.wait() for c in children] == [0, 0, 0]
    assert [p.name for p in (folder / "kernels").iterdir()] == [cache.get("kernels", "k").name]


def test_versions_and_features_are_stable_text():
    assert cache.versions() == cache.versions() and all(isinstance(v, str) for v in cache.versions())
    assert cache.cpu_features()


def test_several_that_begin_at_once_have_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Barrier(4)

    def root(_: int) -> Path:
        begin.wait()
        return cache.root()

    with ThreadPoolExecutor(4) as pool:
        for i in range(100):
            monkeypatch.setenv("REFLIB_CACHE_DIR", str(tmp_path / str(i)))
            assert set(pool.map(root, range(4))) == {tmp_path / str(i)}


# -- other users: some could write to it, none can --------------------------------------------------
SOURCE = 'extern "C" int answer() { return 42; }\n'


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
