"""The lock of a device: one measurement at a time, whichever process makes it."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reflib import cache
from reflib.autotune import lock as lock_module
from reflib.autotune.lock import device_lock, lock_name

HOLD = """
import sys, time
from reflib.autotune.lock import device_lock
with device_lock("cpu") as held:
    print(held, flush=True)
    time.sleep(float(sys.argv[1]))
"""


@contextlib.contextmanager
def holder(root: Path, seconds: float, program: str = HOLD) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock of the CPU."""
    folder = str(root / "reflib" / "autotune")
    package = f"import sys, types; m = types.ModuleType('reflib.autotune'); m.__path__ = [{folder!r}]"
    text = f"{package}; sys.modules['reflib.autotune'] = m\n{program}"
    with subprocess.Popen(
        [sys.executable, "-c", text, str(seconds)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as other:
        assert other.stdout is not None and other.stdout.readline().strip() in ("True", "")
        try:
            yield other
        finally:
            other.kill()


def test_the_lock_is_waited_for(root: Path, fresh_cache: Path) -> None:
    said: list[dict] = []
    with holder(root, 0.3), device_lock("cpu", said.append) as held:
        assert held
    assert [m["kind"] for m in said] == ["waiting", "locked"] and 0.05 < said[1]["seconds"] < 5
    said.clear()
    with device_lock("cpu", said.append) as held:
        assert held and said == []


def test_the_lock_is_given_up_by_the_dead_and_not_waited_for_for_ever(
    root: Path, fresh_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock_module._warn.cache_clear()
    with holder(root, 100) as other:
        start = time.monotonic()
        with device_lock("cpu", timeout=0.2) as held:
            assert not held and time.monotonic() - start < 2
        assert "for 0.2 s" in caplog.text
        with device_lock("cuda:0") as held:  # another device
            assert held
        other.kill()
        with device_lock("cpu", timeout=5) as held:
            assert held


LOOP = """
import sys, time
from reflib.autotune.lock import device_lock
print(flush=True)
while True:
    with device_lock("cpu"):
        time.sleep(0.05)
"""


def test_two_jobs_take_turns(root: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that measures candidate after candidate lets another in between, however often, and is named meanwhile."""
    monkeypatch.setattr(lock_module, "SAY_SECONDS", 0.0)
    named: set[str] = set()
    monkeypatch.setattr(lock_module, "_say_who", lambda device, who: named.add(who))
    with holder(root, 0, LOOP) as other:
        for turn in range(60_000):  # (the other has it most of the time, once it runs)
            with device_lock("cpu", timeout=60) as held:
                assert held
            if turn >= 10 and named:
                break
            time.sleep(0.001)
        assert f"process {other.pid} (-c 0)" in named


def test_a_stopped_holder_is_waited_for_shortly(
    root: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock_module._warn.cache_clear()
    monkeypatch.setattr(lock_module, "STOPPED_SECONDS", 0.2)
    with holder(root, 100) as other:
        other.send_signal(signal.SIGSTOP)
        with device_lock("cpu") as held:
            assert not held
        assert f"process {other.pid} (-c 100) has held it for 0.2 s" in caplog.text


def test_threads_take_turns(fresh_cache: Path) -> None:
    inside, most = [], []

    def work(i: int) -> None:
        with device_lock("cpu", timeout=30) as held:
            inside.append(i)
            most.append((held, len(inside)))
            time.sleep(0.02)
            inside.remove(i)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert most == [(True, 1)] * 8


def test_the_lock_is_released_by_an_exception_and_although_a_child_has_the_file(fresh_cache: Path) -> None:
    with contextlib.suppress(KeyError), device_lock("cpu") as held:
        assert held
        child = os.fork()
        if child == 0:
            time.sleep(1)
            os._exit(0)
        raise KeyError
    with device_lock("cpu", timeout=0.1) as held:
        assert held
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_without_files_to_lock_one_goes_on(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock_module._warn.cache_clear()
    cache.root()
    (fresh_cache / "locks").write_text("not a folder")
    for _ in range(2):
        with device_lock("cpu") as held:
            assert not held
    assert caplog.text.count("without its lock") == 1

    (fresh_cache / "locks").unlink()

    def refuse(*args: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with device_lock("cpu") as held:
        assert not held
    assert "no locks here" in caplog.text


def test_a_lock_is_named_by_the_physical_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Properties:
        uuid = "1234-5678"

    assert lock_name("cuda:0") != lock_name("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    assert lock_name("cuda:0") == lock_name("cuda:1") and "1234-5678" in lock_name("cuda:0")
    assert lock_name("cpu").endswith("-cpu") and "/" not in lock_name("cpu")


def test_who_gives_up_does_not_keep_others_from_it(root: Path, fresh_cache: Path) -> None:
    """One measures without the lock, because it waited for too long; meanwhile the lock is free again."""
    gave_up, done = threading.Event(), threading.Event()

    def impatient() -> None:
        with device_lock("cpu", timeout=0.1) as held:
            assert not held
            gave_up.set()
            done.wait(30)

    with holder(root, 100) as other:
        thread = threading.Thread(target=impatient)
        thread.start()
        assert gave_up.wait(10)
        other.kill()
        other.wait()
        try:
            with device_lock("cpu", timeout=5) as held:
                assert held
        finally:
            done.set()
            thread.join()
