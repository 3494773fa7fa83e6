"""The pool's processes and their parent's end: killed, interrupted, forked, it leaves none behind."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reflib.autotune.pool import PRELOAD, Pool, pool
from tests import processes
from tests.processes import gone, soon
from tests.watching import Watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


HEAD = """
import ctypes, os, signal, stat, sys, threading, time, types
package = types.ModuleType("reflib.autotune")  # without what it imports (torch): a parent that starts at once
package.__path__ = [{autotune!r}]
sys.modules["reflib.autotune"] = package
from reflib.autotune.pool import Job, Pool, pool
p = pool(compilers=2)
p.preload = {preload!r}
over = threading.Event()
def job(function, where="compile", **data):
    started = threading.Event()
    def said(message):
        started.set()
    def ended(how, facts):
        sys.stdout.write(how + " " + facts.get("why", "") + chr(10))
        sys.stdout.flush()
        over.set()
    p.submit(Job("tests.tuning_faults:" + function, data, where, said, ended, 60.0))
    return started
def busy():
    started = [job("sleep_in_c"), job("run_children", "cuda:0", how="stay"), job("sleep", "cpu")]
    assert all(s.wait(20) for s in started)
    print("ready", flush=True)
"""
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"


class Script:
    """A parent of its own, in a process group of its own; ``processes`` are it and all that it has started."""

    def __init__(self, root: Path, text: str, preload: tuple[str, ...] = (), path: str = ""):
        self.mark = f"REFLIB_TEST_MARK={uuid.uuid4()}"
        head = HEAD.format(autotune=str(root / "reflib" / "autotune"), preload=preload)
        folders = os.pathsep.join([str(root), path])
        environ = os.environ | dict([self.mark.split("=")], PYTHONPATH=folders)
        command = [sys.executable, "-c", head + textwrap.dedent(text)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, process_group=0)

    def line(self) -> str:
        assert self.process.stdout is not None
        fd, line = self.process.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            assert select.select([fd], [], [], 60)[0], "it says nothing"
            if not (byte := os.read(fd, 1)):
                break
            line += byte
        return line.decode().strip()

    def processes(self) -> list[int]:
        """Of any generation: they inherit the environment."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (entry / "environ").read_bytes() and processes.running(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ends(self) -> None:
        """By itself, and nothing is left of it."""
        assert self.process.wait(20) == 0 and self.nothing_left()

    def nothing_left(self) -> bool:
        return soon(lambda: not self.processes())


@pytest.fixture
def script(root: Path) -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(*args: Any, says: str = "ready") -> Script:
        made.append(Script(root, *args))
        assert made[-1].line() == says
        return made[-1]

    yield make
    for s in made:
        for pid in s.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        s.process.wait()
        assert s.process.stdout is not None
        s.process.stdout.close()


# -- the parent's end ---------------------------------------------------------------------------------
@pytest.mark.parametrize("forks", [True, False])
def test_a_parent_that_is_killed(script: Callable[..., Script], forks: bool, tmp_path: Path) -> None:
    (tmp_path / "reflib_test_threaded.py").write_text(THREADED)  # with that workers are new interpreters
    s = script("busy(); time.sleep(100)", () if forks else ("reflib_test_threaded",), str(tmp_path))
    # Parent, zygote, workers, a worker's children. (Of a child that has just left for its program nothing can be
    # read for a moment: exec closes what Popen waits for before the new environment is there.)
    assert soon(lambda: len(s.processes()) == 1 + 1 + 3 + 2)
    s.kill()
    assert s.nothing_left()


def test_a_parent_that_is_killed_while_its_zygote_imports(script: Callable[..., Script]) -> None:
    text = "p.wake()\nwhile not p.processes(): time.sleep(0.001)\nprint('ready', flush=True); time.sleep(9)"
    s = script(text, PRELOAD)
    time.sleep(0.2)
    s.kill()
    assert s.nothing_left()  # it is noticed after the imports


def test_a_parent_that_is_killed_with_its_zygote(script: Callable[..., Script]) -> None:
    s = script("busy(); print(p.processes()[0], flush=True); time.sleep(100)")
    zygote = int(s.line())
    os.kill(s.process.pid, signal.SIGSTOP)  # that it does not see the other's end
    os.kill(zygote, signal.SIGKILL)
    s.kill()
    assert soon(lambda: not [pid for pid in s.processes() if b"sleep" not in comm(pid)])


def comm(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_bytes()
    return b""


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise RuntimeError", "os._exit(1)", "os.kill(os.getpid(), 15)"])
def test_a_parent_that_ends(script: Callable[..., Script], end: str) -> None:
    s = script(f"sys.stderr = None; busy(); job('echo', 'cpu'); {end}")
    s.process.wait(20)
    assert s.nothing_left()
    if end in ("sys.exit(0)", "raise RuntimeError"):
        assert [s.line() for _ in range(4)] == ["cancelled"] * 4


def test_a_parent_with_signal_settings_of_its_own(script: Callable[..., Script]) -> None:
    s = script("""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
        job("leave", code=3)
        over.wait(20)
        busy()
    """, says="crashed exit code 3")  # fmt: skip
    assert s.line() == "ready"
    s.ends()


def test_control_c(script: Callable[..., Script]) -> None:
    """The terminal sends it to the whole process group: what it means is the parent's decision."""
    s = script("""
        heard = threading.Event()
        before = signal.signal(signal.SIGINT, lambda *_: heard.set())
        busy()
        heard.wait(20) and over.wait(0.5)
        signal.signal(signal.SIGINT, before)
        try:
            print(over.is_set(), len(p.processes()), flush=True)
            over.wait(100)
        except KeyboardInterrupt:
            start = time.monotonic()
            p.close()
            print(time.monotonic() - start < 5, len(p.processes()), flush=True)
        over.clear()
        job("echo")
        over.wait(20)
    """)
    os.killpg(s.process.pid, signal.SIGINT)
    assert s.line() == "False 4"
    start = time.monotonic()
    os.killpg(s.process.pid, signal.SIGINT)
    assert sorted(s.line() for _ in range(4)) == ["True 0", "cancelled", "cancelled", "cancelled"]
    assert time.monotonic() - start < 10
    assert s.line() == "done"  # it can be used again
    s.ends()


# -- its forks ----------------------------------------------------------------------------------------
def test_a_forked_child_has_a_pool_of_its_own(script: Callable[..., Script]) -> None:
    s = script("""
        first = job("sleep", seconds=1.0)
        assert first.wait(20)
        holding = threading.Event()
        def hold():  # the locks are taken at the time of the fork
            with p.lock:
                holding.set()
                time.sleep(0.3)
        threading.Thread(target=hold).start()
        holding.wait()
        child = os.fork()
        if child == 0:
            kinds = [os.fstat(fd).st_mode for fd in range(3, 100) if os.path.exists(f"/proc/self/fd/{fd}")]
            assert not any(map(stat.S_ISSOCK, kinds)) and p.processes() == []
            over.clear()
            job("echo")
            assert over.wait(20)
            p.close()
            sys.exit(0)
        print("child", os.waitpid(child, 0)[1], over.is_set(), flush=True)  # it ended first, and ours goes on
        over.wait(20)
        over.clear()
        job("echo")
        over.wait(20)
    """, says="done")  # fmt: skip
    assert [s.line() for _ in range(3)] == ["child 0 False", "done", "done"]
    s.ends()


def in_a_child(queue: Any) -> None:
    pool().preload = ()
    queue.put(Watch("echo", data="from the child").on(pool()).result()["data"])
    queue.put(pool().processes())


@pytest.mark.parametrize("method", ["fork", "spawn", "data loader"])
def test_multiprocessing(method: str) -> None:
    """Its processes are daemonic: they may have no children of its own making. They end without exit handlers."""
    import torch.multiprocessing
    from torch.utils.data import DataLoader

    p = Pool(2, preload=())
    busy = Watch("sleep", seconds=0.5).on(p)
    busy.first()
    if method == "data loader":
        assert [int(x) for x in DataLoader(range(4), batch_size=None, num_workers=2)] == [0, 1, 2, 3]
    else:
        context = torch.multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=in_a_child, args=(queue,), daemon=True)
        process.start()
        assert queue.get() == "from the child"
        pids = queue.get()
        process.join(10)
        assert process.exitcode == 0 and len(pids) == 2 and gone(pids)
    busy.result()
    Watch("echo").on(p).result()
    p.close()
