"""The pool: what becomes of jobs that crash, hang or talk too much, and that no process is left behind."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reflib.autotune.pool import PRELOAD, Pool, child_path
from tests import processes
from tests.processes import soon
from tests.watching import Watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def fresh() -> Iterator[Callable[..., Pool]]:
    """Makes pools whose workers import nothing and start at once."""
    made: list[Pool] = []

    def make(**settings: Any) -> Pool:
        made.append(Pool(**{"compilers": 2, "preload": (), **settings}))
        return made[-1]

    yield make
    for p in made:
        p.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Pool]:
    p = Pool(2, preload=())
    yield p
    p.close()


def gone(pids: list[int], seconds: float = 2.0) -> bool:
    """A pool that closes is quick about it."""
    return processes.gone(pids, seconds)


# -- jobs ---------------------------------------------------------------------------------------------
def test_a_job_says_things_and_returns_one(shared: Pool) -> None:
    job = Watch("talk", count=3, pause=0.0, kind="first").on(shared)
    assert job.result() == {}
    assert [m["i"] for m in job.messages] == [0, 1, 2] and job.messages[0]["kind"] == "first"
    assert job.job.track.startswith("compile ") and job.job.since <= job.job.started <= time.perf_counter()


def test_a_worker_keeps_its_state_and_reads_nothing(shared: Pool) -> None:
    first, second = (Watch("echo", "cuda:7", data=i).on(shared).result() for i in (1, 2))
    assert (first["pid"], first["count"] + 1) == (second["pid"], second["count"])
    assert second["stdin"] == "" and second["pid"] in shared.processes()


def test_large_jobs_and_answers(shared: Pool) -> None:
    text = "é" * 300_000
    jobs = [Watch("echo", data=text + str(i)).on(shared) for i in range(3)]
    assert [j.result()["data"] for j in jobs] == [text + str(i) for i in range(3)]


def test_what_is_printed_is_logged_and_is_no_answer(
    shared: Pool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFLIB_LOGS", "pool")
    assert Watch("chatter").on(shared).result() == {"fine": True}
    assert soon(lambda: "a line on standard output" in caplog.text and "and a child's" in caplog.text)


def test_exceptions(shared: Pool) -> None:
    job = Watch("raise_").on(shared)
    assert job.why("failed") == "ValueError: the first line"
    assert "the second line" in job.end()[1]["trace"] and "tuning_faults.py" in job.end()[1]["trace"]
    assert "no more of this" in Watch("raise_", exit=True).on(shared).why("failed")
    assert "TypeError" in Watch("strange_result").on(shared).why("failed")
    assert "AttributeError" in Watch("no_such_function").on(shared).why("failed")
    with pytest.raises(TypeError):  # what cannot be pickled is refused at once
        shared.submit(Watch("echo", data=threading.Lock()).job)


def test_a_thread_that_a_job_leaves_does_not_speak_for_the_next(shared: Pool) -> None:
    first = Watch("late_speaker", "cuda:5").on(shared)
    second = Watch("sleep", "cuda:5", seconds=0.05).on(shared)
    first.result(), second.result()
    assert {m["kind"] for m in first.messages} == {"late"}
    assert [m["kind"] for m in second.messages] == ["started"]


def test_callbacks_may_raise_submit_and_cancel(shared: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(*_: Any) -> None:
        raise RuntimeError("a bug of ours")

    for name, job in (("said", Watch("talk", count=2, pause=0.0, kind="x")), ("ended", Watch("echo"))):
        setattr(job.job, name, wrong)
        job.on(shared)
    first, second, third = Watch("echo"), Watch("echo", data=2), Watch("sleep")

    def ended(how: str, facts: dict) -> None:
        shared.submit(third.job)
        shared.cancel(third.job)
        shared.submit(second.job)

    first.job.ended = ended
    first.on(shared)
    assert second.result()["data"] == 2 and third.end()[0] == "cancelled"
    assert soon(lambda: caplog.text.count("RuntimeError: a bug of ours") == 3)


def test_many_threads(shared: Pool) -> None:
    jobs: list[Watch] = []
    submit = lambda: [jobs.append(Watch("echo", data=i).on(shared)) for i in range(40)]  # noqa: E731
    submitters = [threading.Thread(target=submit) for _ in range(4)]
    for t in submitters:
        t.start()
    for t in submitters:
        t.join()
    assert sorted(j.result()["data"] for j in jobs) == sorted(list(range(40)) * 4)
    assert all(len(j.ends) == 1 for j in jobs) and len({j.result()["pid"] for j in jobs}) <= 2


# -- faults -------------------------------------------------------------------------------------------
def test_crashes_are_told_and_the_rest_goes_on(shared: Pool) -> None:
    names = ("segfault", "abort", "kill_self")
    jobs = [Watch(f, "cuda:0").on(shared) for f in names]
    Watch("chatter", "cuda:0").on(shared)
    code, last = Watch("leave", "cuda:0", code=3).on(shared), Watch("echo", "cuda:0", data="on").on(shared)
    segfault, abort, killed = (j.why("crashed") for j in jobs)
    assert segfault.startswith("segmentation fault (signal 11); in File ")
    assert segfault.endswith("about to read address 0")
    assert abort.startswith("aborted (signal 6)") and abort.endswith("an illegal memory access")
    assert killed == "killed (signal 9)"
    assert code.why("crashed") == "exit code 3"  # not with what the job before it wrote
    assert last.result()["count"] == 1  # a new worker
    assert all(len(j.ends) == 1 for j in jobs)


@pytest.mark.parametrize("how", ["sleep", "sleep_in_c", "stop_self"])
def test_a_silent_job_is_killed(shared: Pool, how: str) -> None:
    start = time.monotonic()
    hung, after = Watch(how, "cuda:1", limit=0.3).on(shared), Watch("echo", "cuda:1").on(shared)
    assert hung.why("hung") == "no answer for 0.3 s" and time.monotonic() - start < 2
    after.result()
    assert gone([m["pid"] for m in hung.messages])


def test_messages_restart_the_clock_and_waiting_stops_it(shared: Pool) -> None:
    Watch("talk", limit=0.4, count=4, pause=0.2, kind="x").on(shared).result()
    Watch("talk", limit=0.2, count=1, pause=0.6, kind="waiting").on(shared).result()
    assert Watch("talk", limit=0.2, count=1, pause=30.0, kind="x").on(shared).why("hung")
    given = Watch("talk_with_more_time", limit=0.4, pause=1.0).on(shared)
    assert given.why("hung") and len(given.messages) == 3


def test_a_message_that_cannot_be_read_costs_nothing_else(shared: Pool) -> None:
    assert Watch("say_what_cannot_be_read").on(shared).result() == {"fine": True}
    assert Watch("echo").on(shared).result()


@pytest.mark.parametrize("how, end", [("leave", "crashed"), ("hang", "hung"), ("cancel", "cancelled")])
def test_the_children_of_a_worker_end_with_it(shared: Pool, how: str, end: str) -> None:
    job = Watch("run_children", "cuda:2", limit=0.5 if how == "hang" else 30.0, how=how).on(shared)
    children = job.first()["children"]
    if how == "cancel":
        assert all(map(processes.running, children))
        shared.cancel(job.job)
    assert job.end()[0] == end and gone([*children, job.first()["pid"]])


def test_a_worker_whose_gpu_is_unusable_is_replaced(shared: Pool) -> None:
    job, after = Watch("break_gpu", "cuda:3").on(shared), Watch("echo", "cuda:3").on(shared)
    assert job.why("crashed") == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert "some other words" in job.end()[1]["trace"]
    assert after.result()["count"] == 1


def test_a_worker_that_dies_idle_costs_no_job(shared: Pool) -> None:
    left = Watch("leave_after_answering", "cuda:4", seconds=0.05).on(shared).result()
    assert gone([left["pid"]]) and soon(lambda: left["pid"] not in shared.processes())
    assert Watch("echo", "cuda:4").on(shared).result()["pid"] != left["pid"]


def test_the_zygote_is_killed_and_no_other_starts(
    fresh: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = fresh(compilers=1)
    running, queued = Watch("sleep").on(p), Watch("echo").on(p)
    running.first()

    def no_memory(_: Pool) -> None:
        raise OSError("cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("reflib.autotune.pool.ZygoteProcess", no_memory)
        os.kill(p.processes()[0], signal.SIGKILL)
        assert running.why("crashed") and queued.why("crashed")
        assert "cannot allocate memory" in Watch("echo").on(p).why("crashed")
    assert Watch("echo").on(p).result()


def test_the_zygote_is_killed(fresh: Callable[..., Pool]) -> None:
    p = fresh(compilers=1)
    job, queued = Watch("sleep_in_c").on(p), Watch("echo", data=1).on(p)
    zygote, worker = job.first() and p.processes()
    os.kill(zygote, signal.SIGKILL)
    assert "the process that started it has ended: killed (signal 9)" in job.why("crashed")
    assert gone([worker]) and queued.result()["data"] == 1 and zygote not in p.processes()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes a module that workers can import; its name."""

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


def test_a_zygote_that_cannot_start(fresh: Callable[..., Pool], module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p = fresh(preload=(module("reflib_test_ends", "import os\nos.write(2, b'not today')\nos._exit(5)\n"),))
    jobs = [Watch("echo").on(p) for _ in range(3)]
    assert {j.why("crashed") for j in jobs} == {"the worker processes cannot be started: exit code 5; not today"}
    p.preload = ("reflib_no_such_module",)  # what is missing is left out
    Watch("echo").on(p).result()  # the next submit tries again
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "No such file" in Watch("echo").on(fresh()).why("crashed")


@pytest.fixture
def threaded(module: Any) -> str:
    """The name of a module that starts a thread when it is imported: workers cannot be forked then."""
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    return module("reflib_test_threaded", text)


def test_where_forking_is_unsafe_workers_are_new_interpreters(
    fresh: Callable[..., Pool], module: Any, threaded: str
) -> None:
    p = fresh(preload=(threaded,))
    first = Watch("echo", module=threaded).on(p).result()
    assert first["imported"] == [threaded]
    assert '"worker": "compile 1"' in Path(f"/proc/{first['pid']}/cmdline").read_text()
    assert "segmentation fault" in Watch("segfault").on(p).why("crashed")
    hung = Watch("sleep_in_c", limit=0.3).on(p)
    assert hung.why("hung") and gone([hung.first()["pid"]])

    text = "import sys, os\nif 'worker\": ' in sys.argv[1]: os.write(2, b'not in a worker') and os._exit(9)\n"
    p = fresh(preload=(module("reflib_test_no_worker", text), threaded))
    jobs = [Watch("echo", "cpu").on(p) for _ in range(2)]  # a worker that cannot start costs one job each time
    assert {j.why("crashed") for j in jobs} == {"a worker could not be started: exit code 9; not in a worker"}


# -- order and numbers ----------------------------------------------------------------------------------
def test_priorities_and_one_job_at_a_time_on_a_device(shared: Pool) -> None:
    order: list[int] = []
    busy = Watch("sleep", "cuda:6", seconds=0.2).on(shared)
    busy.first()
    jobs = [Watch("echo", "cuda:6", priority=(p,), data=i) for i, p in enumerate((2, 1, 0, 1))]
    for i, job in enumerate(jobs):
        job.job.ended = lambda *end, i=i, job=job: (order.append(i), job.ends.append(end))
        job.on(shared)
    assert len({j.result()["pid"] for j in jobs}) == 1
    assert order == [2, 1, 3, 0]


def test_workers_are_started_as_needed(fresh: Callable[..., Pool]) -> None:
    p = fresh(compilers=3)
    Watch("echo").on(p).result()
    assert len(p.processes()) == 2  # with the zygote
    jobs = [Watch("sleep", seconds=0.3).on(p) for _ in range(5)]
    assert soon(lambda: sum(bool(j.messages) for j in jobs) == 3)
    assert len(p.processes()) == 4
    assert {j.job.track for j in jobs[:3]} == {"compile 1", "compile 2", "compile 3"}
    device = Watch("echo", "cpu").on(p)
    assert device.result() and device.job.track == "cpu" and not jobs[-1].ends  # devices do not queue for them
    assert [j.end()[0] for j in jobs] == ["done"] * 5


def test_cancelling(fresh: Callable[..., Pool]) -> None:
    p = fresh(compilers=1)
    running, queued, after = Watch("sleep_in_c").on(p), Watch("echo").on(p), Watch("echo").on(p)
    pid = running.first()["pid"]
    p.cancel(queued.job)
    assert queued.end() == ("cancelled", {}) and not running.ends
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
    assert gone(pids, 0.2) and p.processes() == []
    assert [j.end() for j in running + queued] == [("cancelled", {})] * 5
    assert Watch("echo", data=1).on(p).result()["data"] == 1  # the next job starts it all again

    closing, after, both = Watch("echo"), Watch("sleep"), threading.Event()  # in a callback
    closing.job.ended = lambda *_: both.wait(20) and p.close()
    closing.on(p), after.on(p)
    both.set()
    assert after.end()[0] == "cancelled"


def test_closing_while_the_zygote_imports(fresh: Callable[..., Pool]) -> None:
    p = fresh(preload=PRELOAD)
    job = Watch("echo").on(p)
    pids = soon(p.processes)
    start = time.monotonic()
    p.close()
    assert time.monotonic() - start < 0.5 and gone(pids, 0.2)
    assert job.end()[0] == "cancelled"


def test_idle_processes_leave_and_come_back(fresh: Callable[..., Pool]) -> None:
    p = fresh(idle_seconds=0.3)
    p.wake()
    assert len(soon(p.processes)) == 1 and gone(p.processes(), 3)  # nothing to do: it leaves
    first = Watch("echo").on(p).result()
    pids = p.processes()
    assert len(pids) == 2 and gone(pids) and first["pid"] in pids
    assert soon(lambda: p.processes() == [])
    working = Watch("sleep", seconds=0.6).on(p)
    pid = working.first()["pid"]
    working.result()  # it is not idle while it works
    assert Watch("echo").on(p).result()["pid"] == pid


def test_processes_may_stay_for_ever(fresh: Callable[..., Pool]) -> None:
    p = fresh(idle_seconds=float("inf"))
    p.wake()
    assert soon(p.processes)
    pids = [Watch("echo").on(p).result()["pid"] for _ in range(2)]
    assert pids[0] == pids[1]


# -- what workers see -----------------------------------------------------------------------------------
def test_files_are_imported_once_and_failing_ones_named(fresh: Callable[..., Pool], tmp_path: Path) -> None:
    ops, count = tmp_path / "my_ops.py", tmp_path / "count"
    ops.write_text(f"with open({str(count)!r}, 'a') as f: f.write('x')\n")
    (tmp_path / "link.py").symlink_to(ops)
    p = fresh(compilers=1)
    imports = [str(ops), "decimal", str(tmp_path / "link.py")]
    for _ in range(2):
        found = Watch("echo", imports=imports, module="imported_my_ops").on(p).result()
        assert len(found["imported"]) == 1 and count.read_text() == "x"

    wrong = tmp_path / "wrong.py"
    wrong.write_text("undefined_name\n")
    for _ in range(2):
        job = Watch("echo", imports=[str(wrong)]).on(p)
        assert job.why("failed") == (f"a worker cannot import {wrong}: NameError: name 'undefined_name' is not defined")
    assert "reflib_no_such_module" in Watch("echo", imports=["reflib_no_such_module"]).on(p).why("failed")
    assert Watch("echo", imports=[str(tmp_path / "none.py")]).on(p).why("failed")
    Watch("echo").on(p).result()


def test_the_environment_is_the_parents_as_it_is_now(
    shared: Pool, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for environ in ({"REFLIB_A": "1", "REFLIB_B": None}, {"REFLIB_A": None, "REFLIB_B": "2"}):
        for name, value in environ.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        assert Watch("echo", "cuda:8", names=list(environ)).on(shared).result()["environ"] == environ
    name = module("reflib_test_new", "def f(state, data, say): return {'new': 1}\n")
    assert Watch(f"{name}:f", "cuda:8").on(shared).result() == {"new": 1}


def test_modules_in_the_working_directory_do_not_mislead(
    fresh: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "socket", "torch", "reflib", "re", "worker", "inputs"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    (tmp_path / "reflib_test_mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert [p for p in child_path() if "__editable__" not in p][-1] == str(tmp_path)  # (an installer's hook, no folder)
    p = fresh(preload=("json", "logging"))
    assert Watch("echo", imports=["reflib.cache", "reflib_test_mine"]).on(p).result()["cwd"] == str(tmp_path)


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


_ORPHAN = """
import os, sys, time
from multiprocessing.connection import Pipe
from reflib.worker import contain
os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # its parent ends first
contain(Pipe()[0])
if os.fork() == 0:
    os.setsid()
    print("alive", flush=True)
os._exit(0)
"""


def test_what_a_candidate_forks_ends_with_it_also_if_it_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", _ORPHAN], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 0), done  # (waits for the end of all that have the pipe)
