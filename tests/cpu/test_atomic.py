"""Files and folders that are whole or as they were, whatever goes wrong and whenever."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from reflib import atomic


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_text_and_bytes(tmp_path: Path) -> None:
    atomic.write(tmp_path / "a", "µ\n")
    atomic.write(str(tmp_path / "b"), b"\0\r\n")
    assert (tmp_path / "a").read_bytes() == b"\xc2\xb5\n" and (tmp_path / "b").read_bytes() == b"\0\r\n"
    with atomic.file(tmp_path / "a") as f:
        f.write(b"..")
        assert (tmp_path / "a").read_bytes() == b"\xc2\xb5\n"
        f.seek(0)
        f.write(b"1")
    assert (tmp_path / "a").read_bytes() == b"1." and sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_permissions_are_those_of_open_and_of_before(tmp_path: Path) -> None:
    path, old = tmp_path / "a", os.umask(0o027)
    try:
        atomic.write(path, "new")
        assert rights(path) == 0o640
        for wanted in (0o666, 0o400):
            path.chmod(wanted)
            atomic.write(path, "again")
            assert rights(path) == wanted
        with atomic.file(path, rights=0o700):
            [new] = tmp_path.glob(".new-*")
            assert rights(new) == 0o700, "before there is anything in it"
        with atomic.folder(tmp_path / "b"):
            pass
        assert rights(tmp_path / "b") == 0o750
    finally:
        os.umask(old)


def test_links_stay(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    for name in ("file", "folder"):
        (tmp_path / name).symlink_to(tmp_path / "far" / name)  # of which nothing is there yet
    for text in ("1", "2"):
        atomic.write(tmp_path / "file", text)
        with atomic.folder(tmp_path / "folder") as new:
            (new / text).touch()
        assert (tmp_path / "far" / "file").read_text() == text
        assert os.listdir(tmp_path / "far" / "folder") == [text]
    assert (tmp_path / "file").is_symlink() and (tmp_path / "folder").is_symlink()
    assert sorted(os.listdir(tmp_path / "far")) == ["file", "folder"]


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    atomic.write(pipe, "through")
    reader.join(10)
    assert got == ["through"] and stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(IsADirectoryError):
        atomic.write(tmp_path, "x")


@pytest.mark.parametrize("call", ["replace", "fsync", "fchmod"])
def test_when_the_system_refuses_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"), atomic.file(path, sync=True) as f:
        f.write(b"after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a"]


def test_a_disk_that_is_full_only_when_the_file_is_closed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    code = (
        "import resource, sys; from reflib import atomic\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))\n"
        "atomic.write(sys.argv[1], b'x' * 100)\n"  # less than a buffer: nothing reaches the system before close
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True)
    assert "File too large" in done.stderr and done.returncode == 1
    assert (tmp_path / "a").read_text() == "before" and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_errors_inside_pass_and_leave_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "old").touch()
    with pytest.raises(error), atomic.file(tmp_path / "a") as f:
        f.write(b"half")
        raise error
    with pytest.raises(error), atomic.folder(tmp_path / "b") as new:
        (new / "half").touch()
        raise error
    assert os.listdir(tmp_path) == ["b"] and os.listdir(tmp_path / "b") == ["old"]


def test_errors_name_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(FileNotFoundError, match="none/a'"):
        atomic.write(tmp_path / "none" / "a", "x")
    with pytest.raises(NotADirectoryError, match="a'"), atomic.folder(tmp_path / "a"):
        pytest.fail("not begun")
    with pytest.raises(FileNotFoundError, match="none/b'"), atomic.folder(tmp_path / "none" / "b"):
        pytest.fail("not begun")
    atomic.write(tmp_path / ("x" * 255), "as long as a name can be")
    assert sorted(os.listdir(tmp_path)) == ["a", "x" * 255]


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_folder_takes_anothers_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    """Unless the old one cannot be renamed out of the way (1), or the new one into its place (2)."""
    path, calls, replace = tmp_path / "a", [0], os.replace
    (path / "deep").mkdir(parents=True)

    def rename(a: Path, b: Path) -> None:
        calls[0] += 1
        if calls[0] == fails:
            full()
        replace(a, b)

    monkeypatch.setattr(os, "replace", rename)
    if fails:
        with pytest.raises(OSError, match="No space left"), atomic.folder(path) as new:
            (new / "new").touch()
    else:
        with atomic.folder(path) as new:
            (new / "new").touch()
    assert os.listdir(path) == ["deep" if fails else "new"] and os.listdir(tmp_path) == ["a"]


def test_readers_see_all_or_nothing_and_a_killed_writer_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    code = (
        "import itertools, sys; from reflib import atomic\n"
        "for i in itertools.count(): atomic.write(sys.argv[1], bytes([i % 256]) * 300_000)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(2)]
    try:
        until, seen = time.monotonic() + 60, set()
        while len(seen) < 20 and time.monotonic() < until:
            data = path.read_bytes() if path.exists() else b""
            assert data == data[:1] * (300_000 if data else 0)
            seen.update(data[:1])
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    data = path.read_bytes()
    assert len(seen) == 20 and data == data[:1] * 300_000


def test_a_thread_that_the_end_of_the_process_stops(tmp_path: Path) -> None:
    text = (
        "import sys, threading, time; from reflib import atomic; begun = threading.Event()\n"
        "def write():\n"
        "    with atomic.file(sys.argv[1]) as f:\n"
        "        f.write(b'half'), begun.set(), time.sleep(100)\n"
        "threading.Thread(target=write, daemon=True).start(), begun.wait()\n"
    )
    subprocess.run([sys.executable, "-c", text, str(tmp_path / "x")], check=True, timeout=60)
    assert not list(tmp_path.iterdir())
