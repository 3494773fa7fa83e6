"""The pool: what becomes of jobs that crash, hang or talk too much, and that nobody is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reflib import cache
from reflib.choose import lock as lock_module
from reflib.choose import pool as pool_module
from reflib.choose.lock import device_lock, lock_name
from reflib.choose.manager import child_path, ending
from reflib.choose.pool import PRELOAD, Job, Pool, pool
from tests import processes
from tests.processes import soon

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FAULTS = "tests.tuning_faults"


class Watch:
    """A job of ``tests/tuning_faults.py``, and what was heard of it."""

    def __init__(self, function: str, where: str = "compile", limit: float = 30.0, priority: tuple = (), **data: Any):
        self.messages: list[dict] = []
        self.ends: list[tuple[str, dict]] = []
        self.heard, self.over = threading.Event(), threading.Event()
        self.job = Job(f"{FAULTS}:{function}", data, where, self.said, self.ended, limit, priority)

    def said(self, message: dict) -> None:
        self.messages.append(message)
        self.heard.set()

    def ended(self, how: str, facts: dict) -> None:
        self.ends.append((how, facts))
        self.over.set()

    def on(self, p: Pool) -> Watch:
        p.submit(self.job)
        return self

    def first(self) -> dict:
        """Its first message."""
        assert self.heard.wait(20), self.ends
        return self.messages[0]

    def end(self) -> tuple[str, dict]:
        assert self.over.wait(20), "the job did not end"
        return self.ends[0]

    def result(self) -> dict:
        how, facts = self.end()
        assert how == "done", facts
        return facts

    def why(self, how: str) -> str:
        assert self.end()[0] == how, self.ends
        return self.ends[0][1]["why"]


def small(**settings: Any) -> Pool:
    """A pool whose workers import nothing and start at once."""
    return Pool(**{"compilers": 2, "preload": (), **settings})


@pytest.fixture(scope="module")
def shared() -> Iterator[Pool]:
    p = small()
    yield p
    p.close()


@pytest.fixture
def fresh() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(**settings: Any) -> Pool:
        made.append(small(**settings))
        return made[-1]

    yield make
    for p in made:
        p.close()


def gone(pids: list[int], seconds: float = 2.0) -> bool:
    """A pool that closes is quick about it."""
    return processes.gone(pids, seconds)


# -- jobs ---------------------------------------------------------------------------------------------
def test_a_job_says_things_and_returns_one(shared: Pool) -> None:
    job = Watch("talk", count=3, pause=0.0, kind="first").on(shared)
    assert job.result() == {}
    assert [m["i"] for m in job.messages] == [0, 1, 2] and job.messages[0]["kind"] == "first"
    assert job.job.track.startswith("compile ") and job.job.started <= time.perf_counter()


def test_a_worker_keeps_its_state_and_reads_nothing(shared: Pool) -> None:
    first, second = (Watch("echo", "cuda:7", data=i).on(shared).result() for i in (1, 2))
    assert (first["pid"], first["count"] + 1) == (second["pid"], second["count"])
    assert second["stdin"] == ""
    assert second["pid"] in shared.processes()


def test_large_jobs_and_answers(shared: Pool) -> None:
    text = "é" * 300_000
    jobs = [Watch("echo", data=text + str(i)).on(shared) for i in range(3)]
    assert [j.result()["data"] for j in jobs] == [text + str(i) for i in range(3)]


def test_printing_is_no_answer(shared: Pool) -> None:
    assert Watch("chatter").on(shared).result() == {"fine": True}


def test_what_was_printed_is_logged(
    shared: Pool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFLIB_LOGS", "pool")
    Watch("chatter").on(shared).result()
    assert soon(lambda: "a line on standard output" in caplog.text and "and a child's" in caplog.text)


def test_exceptions(shared: Pool) -> None:
    job = Watch("raise_").on(shared)
    assert job.why("failed") == "ValueError: the first line"
    assert "the second line" in job.end()[1]["trace"] and "tuning_faults.py" in job.end()[1]["trace"]
    assert "no more of this" in Watch("raise_", exit=True).on(shared).why("failed")
    assert "TypeError" in Watch("strange_result").on(shared).why("failed")
    assert "AttributeError" in Watch("no_such_function").on(shared).why("failed")


def test_what_is_not_json_is_refused_at_once(shared: Pool) -> None:
    with pytest.raises(TypeError):
        shared.submit(Watch("echo", data=object()).job)


def test_a_thread_that_a_job_leaves_does_not_speak_for_the_next(shared: Pool) -> None:
    first = Watch("late_speaker", "cuda:5").on(shared)
    second = Watch("sleep", "cuda:5", seconds=0.05).on(shared)
    first.result(), second.result()
    assert {m["kind"] for m in first.messages} == {"late"}
    assert [m["kind"] for m in second.messages] == ["started"]


def test_callbacks_that_raise(shared: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(*_: Any) -> None:
        raise RuntimeError("a bug of ours")

    job = Watch("talk", count=2, pause=0.0, kind="x")
    job.job.said = wrong
    shared.submit(job.job)
    job.result()
    bad = Watch("echo")
    bad.job.ended = wrong
    shared.submit(bad.job)
    assert Watch("echo", data=1).on(shared).result()["data"] == 1
    assert "a bug of ours" in caplog.text


def test_callbacks_may_submit_and_cancel(shared: Pool) -> None:
    second, third = Watch("echo", data=2), Watch("sleep")
    first = Watch("echo")

    def ended(how: str, facts: dict) -> None:
        shared.submit(third.job)
        shared.cancel(third.job)
        shared.submit(second.job)

    first.job.ended = ended
    shared.submit(first.job)
    assert second.result()["data"] == 2 and third.end()[0] == "cancelled"


def test_many_threads(shared: Pool) -> None:
    jobs: list[Watch] = []

    def submit() -> None:
        for i in range(40):
            jobs.append(Watch("echo", data=i).on(shared))

    submitters = [threading.Thread(target=submit) for _ in range(4)]
    for t in submitters:
        t.start()
    for t in submitters:
        t.join()
    assert sorted(j.result()["data"] for j in jobs) == sorted(list(range(40)) * 4)
    assert all(len(j.ends) == 1 for j in jobs)
    assert len({j.result()["pid"] for j in jobs}) <= 2


# -- faults -------------------------------------------------------------------------------------------
def test_crashes_are_told_and_the_rest_goes_on(shared: Pool) -> None:
    names = ("segfault", "abort", "kill_self")
    jobs = [Watch(f, "cuda:0").on(shared) for f in names]
    Watch("chatter", "cuda:0").on(shared)
    code, last = Watch("leave", "cuda:0", code=3).on(shared), Watch("echo", "cuda:0", data="on").on(shared)
    why = dict(zip(names, (j.why("crashed") for j in jobs)))
    assert why["segfault"].startswith("segmentation fault (signal 11); in File ")
    assert why["segfault"].endswith("about to read address 0")
    assert why["abort"].startswith("aborted (signal 6)") and why["abort"].endswith("an illegal memory access")
    assert why["kill_self"] == "killed (signal 9)"
    assert code.why("crashed") == "exit code 3"  # not with what the job before it wrote
    assert last.result()["count"] == 1  # a new worker
    assert all(len(j.ends) == 1 for j in jobs)


@pytest.mark.parametrize("how", ["sleep", "sleep_in_c", "stop_self"])
def test_a_silent_job_is_killed(shared: Pool, how: str) -> None:
    start = time.monotonic()
    hung, after = Watch(how, "cuda:1", limit=0.3).on(shared), Watch("echo", "cuda:1").on(shared)
    assert hung.why("hung") == "no answer for 0.3 s"
    assert time.monotonic() - start < 2
    after.result()
    assert all(gone([m["pid"]]) for m in hung.messages)


def test_messages_restart_the_clock_and_waiting_stops_it(shared: Pool) -> None:
    Watch("talk", limit=0.4, count=4, pause=0.2, kind="x").on(shared).result()
    Watch("talk", limit=0.2, count=1, pause=0.6, kind="waiting").on(shared).result()
    assert Watch("talk", limit=0.2, count=1, pause=30.0, kind="x").on(shared).why("hung")


@pytest.mark.parametrize("how", ["leave", "hang", "cancel"])
def test_the_children_of_a_worker_end_with_it(shared: Pool, how: str) -> None:
    job = Watch("run_children", "cuda:2", limit=0.5 if how == "hang" else 30.0, how=how).on(shared)
    children = job.first()["children"]
    if how == "cancel":
        assert all(map(processes.running, children))
        shared.cancel(job.job)
    assert job.end()[0] == {"leave": "crashed", "hang": "hung", "cancel": "cancelled"}[how]
    assert gone([*children, job.first()["pid"]])


def test_a_worker_whose_gpu_is_unusable_is_replaced(shared: Pool) -> None:
    job, after = Watch("break_gpu", "cuda:3").on(shared), Watch("echo", "cuda:3").on(shared)
    assert job.why("crashed") == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert "some other words" in job.end()[1]["trace"]
    assert after.result()["count"] == 1


def test_a_worker_that_dies_idle_costs_no_job(shared: Pool) -> None:
    left = Watch("leave_after_answering", "cuda:4", seconds=0.05).on(shared).result()
    assert gone([left["pid"]])
    assert soon(lambda: left["pid"] not in shared.processes())
    assert Watch("echo", "cuda:4").on(shared).result()["pid"] != left["pid"]


def test_the_zygote_is_killed(fresh: Callable[..., Pool]) -> None:
    p = fresh(compilers=1)
    job, queued = Watch("sleep_in_c").on(p), Watch("echo", data=1).on(p)
    zygote, worker = job.first() and p.processes()
    os.kill(zygote, signal.SIGKILL)
    assert "the process that started it has ended: killed (signal 9)" in job.why("crashed")
    assert gone([worker])
    assert queued.result()["data"] == 1
    assert zygote not in p.processes()


def test_a_zygote_that_cannot_start(
    fresh: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reflib_test_ends.py").write_text("import os\nos.write(2, b'not today')\nos._exit(5)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    p = fresh(preload=("reflib_test_ends",))
    jobs = [Watch("echo").on(p) for _ in range(3)]
    assert {j.why("crashed") for j in jobs} == {"the worker processes cannot be started: exit code 5; not today"}
    p.preload = ()
    Watch("echo").on(p).result()  # the next submit tries again

    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "No such file" in Watch("echo").on(fresh()).why("crashed")


def test_a_module_that_cannot_be_preloaded_is_left_out(fresh: Callable[..., Pool]) -> None:
    Watch("echo").on(fresh(preload=("reflib_no_such_module",))).result()


@pytest.fixture
def threaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that starts a thread when it is imported: workers cannot be forked then."""
    name = "reflib_test_threaded"
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_where_forking_is_unsafe_workers_are_new_interpreters(fresh: Callable[..., Pool], threaded: str) -> None:
    p = fresh(preload=(threaded,))
    first = Watch("echo", module=threaded).on(p).result()
    assert first["imported"] == [threaded]
    assert "multiprocessing" not in Path(f"/proc/{first['pid']}/cmdline").read_text()
    assert '"worker": "compile 1"' in Path(f"/proc/{first['pid']}/cmdline").read_text()
    assert "segmentation fault" in Watch("segfault").on(p).why("crashed")
    hung = Watch("sleep_in_c", limit=0.3).on(p)
    assert hung.why("hung") and gone([hung.first()["pid"]])


def test_a_worker_that_cannot_start_costs_one_job_each(
    fresh: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threaded: str
) -> None:
    (tmp_path / "reflib_test_no_worker.py").write_text(
        "import sys, os\nif 'worker\": ' in sys.argv[1]: os.write(2, b'not in a worker')\n"
        "if 'worker\": ' in sys.argv[1]: os._exit(9)\n"
    )
    p = fresh(preload=("reflib_test_no_worker", threaded))
    jobs = [Watch("echo", "cpu").on(p) for _ in range(2)]
    why = "a worker could not be started: exit code 9; not in a worker"
    assert [j.why("crashed") for j in jobs] == [why, why]


# -- order and numbers ----------------------------------------------------------------------------------
def test_priorities_and_one_job_at_a_time_on_a_device(shared: Pool) -> None:
    order: list[int] = []
    busy = Watch("sleep", "cuda:6", seconds=0.2).on(shared)
    busy.first()
    jobs = [Watch("echo", "cuda:6", priority=(p,), data=i) for i, p in enumerate((2, 1, 0, 1))]
    for i, job in enumerate(jobs):
        job.job.ended = lambda how, facts, i=i, job=job: (order.append(i), job.ended(how, facts))
        shared.submit(job.job)
    assert len({j.result()["pid"] for j in jobs}) == 1
    assert order == [2, 1, 3, 0]


def test_workers_are_started_as_needed(fresh: Callable[..., Pool]) -> None:
    p = fresh(compilers=3)
    Watch("echo").on(p).result()
    assert len(p.processes()) == 2  # with the zygote
    jobs = [Watch("sleep", seconds=0.3).on(p) for _ in range(5)]
    assert soon(lambda: sum(j.heard.is_set() for j in jobs) == 3)
    assert len(p.processes()) == 4
    assert {j.job.track for j in jobs[:3]} == {"compile 1", "compile 2", "compile 3"}
    device = Watch("echo", "cpu").on(p)
    assert device.result() and device.job.track == "cpu" and not jobs[-1].over.is_set()  # devices do not queue for them
    assert [j.end()[0] for j in jobs] == ["done"] * 5


def test_cancelling(fresh: Callable[..., Pool]) -> None:
    p = fresh(compilers=1)
    running, queued, after = Watch("sleep_in_c").on(p), Watch("echo").on(p), Watch("echo").on(p)
    pid = running.first()["pid"]
    p.cancel(queued.job)
    assert queued.end() == ("cancelled", {})
    assert not running.over.is_set()
    p.cancel(running.job)
    assert running.end() == ("cancelled", {}) and gone([pid])
    after.result()
    p.cancel(running.job), p.cancel(after.job)  # too late: nothing happens
    Watch("echo").on(p).result()
    assert len(running.ends) == len(queued.ends) == len(after.ends) == 1


def test_closing(fresh: Callable[..., Pool]) -> None:
    p = fresh()
    running = [Watch("sleep_in_c").on(p), Watch("run_children", "cpu", how="stay").on(p)]
    queued = [Watch("echo", "cpu").on(p) for _ in range(3)]
    pids = [j.first()["pid"] for j in running] + running[1].first()["children"] + p.processes()
    start = time.monotonic()
    p.close()
    assert time.monotonic() - start < 0.5
    assert gone(pids, 0.2)
    assert [j.end() for j in running + queued] == [("cancelled", {})] * 5
    assert p.processes() == []
    assert Watch("echo", data=1).on(p).result()["data"] == 1  # the next job starts it all again


def test_closing_while_the_zygote_imports_and_in_a_callback(fresh: Callable[..., Pool]) -> None:
    p = fresh(preload=PRELOAD)
    job = Watch("echo").on(p)
    pids = soon(p.processes)
    start = time.monotonic()
    p.close()
    assert time.monotonic() - start < 0.5 and gone(pids, 0.2)
    assert job.end()[0] == "cancelled"

    p = fresh()
    closing, queued = Watch("echo"), Watch("sleep")
    closing.job.ended = lambda *_: p.close()
    p.submit(closing.job)
    queued.on(p)
    assert queued.end()[0] == "cancelled"


def test_idle_processes_leave_and_come_back(fresh: Callable[..., Pool]) -> None:
    p = fresh(idle_seconds=0.3)
    first = Watch("echo").on(p).result()
    pids = p.processes()
    assert len(pids) == 2
    assert gone([first["pid"]]) and gone(pids)
    assert soon(lambda: p.processes() == [])
    working = Watch("sleep", seconds=0.6).on(p)
    pid = working.first()["pid"]
    working.result()  # it is not idle while it works
    assert Watch("echo").on(p).result()["pid"] == pid


def test_waking(fresh: Callable[..., Pool]) -> None:
    p = fresh(idle_seconds=0.2)
    p.wake()
    pids = soon(p.processes)
    assert len(pids) == 1 and gone(pids, 3)  # nothing to do: it leaves


# -- what workers see -----------------------------------------------------------------------------------
def test_files_are_imported_once_and_failing_ones_named(fresh: Callable[..., Pool], tmp_path: Path) -> None:
    ops, count = tmp_path / "my_ops.py", tmp_path / "count"
    ops.write_text(f"with open({str(count)!r}, 'a') as f: f.write('x')\n")
    (tmp_path / "link.py").symlink_to(ops)
    p = fresh(compilers=1, imports=(str(ops), "decimal"))
    found = Watch("echo", imports=[str(tmp_path / "link.py")], module="imported_my_ops").on(p).result()
    assert len(found["imported"]) == 1 and count.read_text() == "x"
    Watch("echo").on(p).result()
    assert count.read_text() == "x"

    wrong = tmp_path / "wrong.py"
    wrong.write_text("undefined_name\n")
    for _ in range(2):
        job = Watch("echo", imports=[str(wrong)]).on(p)
        assert job.why("failed") == (f"a worker cannot import {wrong}: NameError: name 'undefined_name' is not defined")
    assert "reflib_no_such_module" in Watch("echo", imports=["reflib_no_such_module"]).on(p).why("failed")
    assert Watch("echo", imports=[str(tmp_path / "none.py")]).on(p).why("failed")
    Watch("echo").on(p).result()


def test_the_environment_is_the_parents_as_it_is_now(
    shared: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask: Callable[[], dict] = lambda: Watch("echo", "cuda:8", names=["REFLIB_A", "REFLIB_B"]).on(shared).result()  # noqa: E731
    monkeypatch.setenv("REFLIB_A", "1")
    assert ask()["environ"] == {"REFLIB_A": "1", "REFLIB_B": None}
    monkeypatch.delenv("REFLIB_A")
    monkeypatch.setenv("REFLIB_B", "2")
    assert ask()["environ"] == {"REFLIB_A": None, "REFLIB_B": "2"}
    (tmp_path / "reflib_test_new.py").write_text("def f(state, data, say): return {'new': 1}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    job = Watch("echo", "cuda:8")
    job.job.what = "reflib_test_new:f"
    assert job.on(shared).result() == {"new": 1}


def test_modules_in_the_working_directory_mislead_nobody(
    fresh: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "socket", "torch", "reflib", "re", "worker", "inputs"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    (tmp_path / "reflib_test_mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert [p for p in child_path() if "__editable__" not in p][-1] == str(tmp_path)  # (an installer's hook, no folder)
    p = fresh(preload=("json", "logging"), imports=("reflib.cache", "reflib_test_mine"))
    assert Watch("echo").on(p).result()["cwd"] == str(tmp_path)


def test_the_zygote_is_safe_to_fork(fresh: Callable[..., Pool]) -> None:
    """With all that workers really import. (OpenBLAS has threads until the first fork.)"""
    there = [m.split(":")[0] for m in PRELOAD if importlib.util.find_spec(m.split(".")[0]) is not None]
    p = fresh(preload=PRELOAD)
    start = time.perf_counter()
    found = Watch("threads", modules=there).on(p).result()
    print(f"from nothing to a first result: {time.perf_counter() - start:.2f} s")
    assert found["zygote"] == "reflib-zygote"  # that is, it was forked
    assert found["zygote_threads"] == 1
    assert found["modules"] == there
    assert found["agrees"] and abs(found["sum"] - 512 * 512) < 16
    assert not found["bad_fork"]


# -- the parent's end, its forks --------------------------------------------------------------------------
HEAD = """
import ctypes, os, signal, sys, threading, time, types
package = types.ModuleType("reflib.choose")  # without what it imports (torch): a parent that starts at once
package.__path__ = [{choose!r}]
sys.modules["reflib.choose"] = package
from reflib.choose.pool import Job, Pool, pool
p = pool(compilers=2)
p.preload = {preload!r}
over = threading.Event()
def job(function, where="compile", **data):
    started = threading.Event()
    def said(message):
        started.set()
    def ended(how, facts):
        print(how, facts.get("why", ""), flush=True)
        over.set()
    p.submit(Job("tests.tuning_faults:" + function, data, where, said, ended, 60.0))
    return started
def busy():
    started = [job("sleep_in_c"), job("run_children", "cuda:0", how="stay"), job("sleep", "cpu")]
    assert all(s.wait(20) for s in started)
"""


class Script:
    """A parent of its own, in a process group of its own; ``processes`` are it and all that it has started."""

    def __init__(self, root: Path, text: str, preload: tuple[str, ...] = (), path: str = ""):
        self.mark = f"{uuid.uuid4()}"
        head = HEAD.format(choose=str(root / "reflib" / "choose"), preload=preload)
        self.process = subprocess.Popen(
            [sys.executable, "-c", head + textwrap.dedent(text)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"REFLIB_TEST_MARK": self.mark, "PYTHONPATH": os.pathsep.join([str(root), path])},
            process_group=0,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 20)[0], "it says nothing"
        return self.process.stdout.readline().strip()

    def processes(self) -> list[int]:
        """Of any generation: they inherit the environment."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = f"REFLIB_TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes()
                if ours and processes.running(int(entry.name)):
                    found.append(int(entry.name))
        return found

    def nothing_left(self, seconds: float) -> bool:
        return soon(lambda: not self.processes(), seconds)


@pytest.fixture
def script(root: Path) -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(*args: Any, **kwargs: Any) -> Script:
        made.append(Script(root, *args, **kwargs))
        return made[-1]

    yield make
    for s in made:
        for pid in s.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        s.process.wait()
        assert s.process.stdout is not None
        s.process.stdout.close()


@pytest.mark.parametrize("forks", [True, False])
def test_a_parent_that_is_killed(script: Callable[..., Script], forks: bool, tmp_path: Path, threaded: str) -> None:
    s = script("busy(); print('ready', flush=True); time.sleep(100)", () if forks else (threaded,), str(tmp_path))
    assert s.line() == "ready"
    # Parent, zygote, workers, a worker's children. (Of a child that has just left for its program nothing can be
    # read for a moment: exec closes what Popen waits for before the new environment is there.)
    assert soon(lambda: len(s.processes()) == 1 + 1 + 3 + 2, 2.0)
    s.process.kill()
    s.process.wait()
    assert s.nothing_left(2.0)


def test_a_parent_that_is_killed_while_a_forked_child_has_its_sockets(script: Callable[..., Script]) -> None:
    """A fork that Python does not know of: the zygote's socket does not end."""
    s = script("""
        busy()
        child = ctypes.CDLL(None).fork()
        if child == 0:
            time.sleep(100)
        print(child, flush=True)
        time.sleep(100)
    """)
    child = int(s.line())
    s.process.kill()
    s.process.wait()
    assert soon(lambda: s.processes() == [child], 2.0)


def test_a_parent_that_is_killed_while_its_zygote_imports(script: Callable[..., Script]) -> None:
    s = script(
        "p.wake()\nwhile not p.processes(): time.sleep(0.001)\nprint('ready', flush=True); time.sleep(9)", PRELOAD
    )
    assert s.line() == "ready"
    time.sleep(0.2)
    s.process.kill()
    s.process.wait()
    assert s.nothing_left(3.0)  # an import in C is not interrupted, and takes its time where cores are shared


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise RuntimeError", "os._exit(1)", "os.kill(os.getpid(), 15)"])
def test_a_parent_that_ends(script: Callable[..., Script], end: str) -> None:
    s = script(f"busy(); job('echo', 'cpu'); sys.stderr = None; print('ready', flush=True); {end}")
    assert s.line() == "ready"
    s.process.wait(1.0)
    assert s.nothing_left(1.0)
    if end in ("sys.exit(0)", "raise RuntimeError"):
        assert [s.line() for _ in range(4)] == ["cancelled"] * 4


def test_a_parent_that_is_killed_with_its_zygote(script: Callable[..., Script]) -> None:
    s = script("busy(); print(p.processes()[0], flush=True); time.sleep(100)")
    zygote = int(s.line())
    os.kill(s.process.pid, signal.SIGSTOP)  # that it does not see the other's end
    os.kill(zygote, signal.SIGKILL)
    s.process.kill()
    s.process.wait()
    assert soon(lambda: not [pid for pid in s.processes() if b"sleep" not in comm(pid)], 2.0)


def comm(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_bytes()
    return b""


def test_a_parent_with_signal_settings_of_its_own(script: Callable[..., Script]) -> None:
    s = script("""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
        job("segfault")
        over.wait(20)
        busy()
        print("ready", flush=True)
    """)
    assert s.line().startswith("crashed segmentation fault")
    assert s.line() == "ready"
    assert s.process.wait(2.0) == 0
    assert s.nothing_left(1.0)


def test_control_c_is_the_parents_affair(script: Callable[..., Script]) -> None:
    s = script("""
        signal.signal(signal.SIGINT, lambda *_: None)
        busy()
        print("ready", flush=True)
        over.wait(1.0)
        print(over.is_set(), len(p.processes()), flush=True)
    """)
    assert s.line() == "ready"
    os.killpg(s.process.pid, signal.SIGINT)
    assert s.line() == "False 4"


def test_control_c(script: Callable[..., Script]) -> None:
    """The terminal sends it to the whole process group."""
    s = script("""
        busy()
        try:
            print("ready", flush=True)
            over.wait(100)
        except KeyboardInterrupt:
            start = time.monotonic()
            p.close()
            print(time.monotonic() - start < 0.5, len(p.processes()), flush=True)
        over.clear()
        job("echo")
        over.wait(20)
    """)
    assert s.line() == "ready"
    start = time.monotonic()
    os.killpg(s.process.pid, signal.SIGINT)
    ends = sorted(s.line() for _ in range(4))
    assert time.monotonic() - start < 1.0
    assert ends == ["True 0", "cancelled", "cancelled", "cancelled"]
    assert s.line() == "done"  # it can be used again
    assert s.process.wait(2.0) == 0
    assert s.nothing_left(1.0)


def test_a_forked_child_has_a_pool_of_its_own(script: Callable[..., Script]) -> None:
    s = script("""
        first = job("sleep", seconds=1.0)
        assert first.wait(20)
        holding = threading.Event()
        def hold():  # the locks are taken at the time of the fork
            from reflib.choose import pool as module
            with module._making, p._running.lock:
                holding.set()
                time.sleep(0.3)
        threading.Thread(target=hold).start()
        holding.wait()
        child = os.fork()
        if child == 0:
            names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
            assert not [n for n in names if n.startswith("socket:")], names
            assert p.processes() == [] and pool() is not p
            over.clear()
            p = pool()
            p.preload = ()
            job("echo")
            assert over.wait(20)
            p.close()
            sys.exit(0)
        print("child", os.waitpid(child, 0)[1], over.is_set(), flush=True)  # it ended first, and ours goes on
        over.wait(20)
        over.clear()
        job("echo")
        over.wait(20)
    """)
    assert [s.line() for _ in range(4)] == ["done", "child 0 False", "done", "done"]
    assert s.process.wait(2.0) == 0
    assert s.nothing_left(1.0)


def in_a_child(queue: Any) -> None:
    p = pool()
    p.preload = ()
    job = Watch("echo", data="from the child").on(p)
    queue.put(job.result()["data"])
    queue.put(p.processes())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_multiprocessing(shared: Pool, method: str) -> None:
    """Daemonic: to multiprocessing that is a process that may have no children. It ends without exit handlers."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context(method)
    busy = Watch("sleep", seconds=0.5).on(shared)
    busy.first()
    queue = context.SimpleQueue()
    process = context.Process(target=in_a_child, args=(queue,), daemon=True)
    process.start()
    assert queue.get() == "from the child"
    pids = queue.get()
    process.join(10)
    assert process.exitcode == 0 and len(pids) == 2 and gone(pids)
    busy.result()


def test_data_loader_workers_do_not_disturb(shared: Pool) -> None:
    from torch.utils.data import DataLoader

    busy = Watch("sleep", seconds=0.3).on(shared)
    busy.first()
    assert [int(x) for x in DataLoader(range(4), batch_size=None, num_workers=2)] == [0, 1, 2, 3]
    busy.result()
    Watch("echo").on(shared).result()


def test_the_process_has_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_pool", None)
    p = pool(imports=("a",))
    assert pool(compilers=3, imports=("b", "a")) is p
    assert (p.compilers, p.imports) == (3, ("a", "b"))
    assert pool().compilers == 3
    assert p.processes() == []


def test_how_a_process_ended_in_words() -> None:
    assert ending(-11, "") == "segmentation fault (signal 11)"
    assert ending(7, "one\n\ntwo\n") == "exit code 7; two"
    frames = '  File "a.py", line 1 in f\n  File "b.py", line 2\n\nExtension modules: x\n'
    dump = f"before\nFatal Python error: Aborted\n\nCurrent thread 0x1:\n{frames}"
    assert ending(-6, dump) == 'aborted (signal 6); in File "a.py", line 1 in f; before'


# -- the lock of a device -----------------------------------------------------------------------------------
HOLD = """
import sys, time
from reflib.choose.lock import device_lock
with device_lock("cpu") as held:
    print(held, flush=True)
    time.sleep(float(sys.argv[1]))
"""


@contextlib.contextmanager
def holder(root: Path, seconds: float) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock of the CPU."""
    choose = f"import sys, types; m = types.ModuleType('reflib.choose'); m.__path__ = [{str(root / 'reflib/choose')!r}]"
    text = f"{choose}; sys.modules['reflib.choose'] = m\n{HOLD}"
    with subprocess.Popen(
        [sys.executable, "-c", text, str(seconds)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as other:
        assert other.stdout is not None and other.stdout.readline().strip() == "True"
        yield other
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

    def refuse(fd: int, flags: int) -> None:
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
