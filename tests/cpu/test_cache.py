"""The on-disk cache: private, atomic, and never a damaged entry."""

import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reflib import cache
from reflib.errors import CacheError


@pytest.fixture(autouse=True)
def folder(fresh_cache):
    return fresh_cache


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
