"""Programs run in forks of a process that has imported what they need, which takes seconds of each Python of its own.

    python -m tests.forking FD MODULE ...     imports the modules, then serves the connection of that number
    python -m tests.forking PATH MODULE ...   serves all that connect to that socket; imports when the first one does
"""

import atexit
import contextlib
import functools
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


def serve(requests: Connection) -> NoReturn:
    """One program after the other, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            words, env, folder = requests.recv()
        except EOFError:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            requests.close()
            os._exit(ran(words, env, Path(folder)))
        requests.send(pid)
        requests.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def ran(words: list[str], env: Mapping[str, str], folder: Path) -> int:
    """The exit status of a program and its arguments: "-c" and its text, a file, or a module."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    for number, name in enumerate([os.devnull, folder / "out", folder / "errors"]):
        with open(name, "r+" if number == 0 else "w") as file:
            os.dup2(file.fileno(), number)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = words
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(words[1], vars(main))
        elif words[0].endswith(".py"):
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    return 0


def ask(
    requests: Connection, words: list[str], env: Mapping[str, str], seconds: float | None = None
) -> tuple[int | None, str, str]:
    """The exit status of a program (None: it was killed after ``seconds``), what it printed, and its errors."""
    with tempfile.TemporaryDirectory() as folder:
        requests.send((words, dict(env), folder))
        pid, in_time = requests.recv(), False
        try:
            in_time = requests.poll(seconds)
        finally:
            if not in_time:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            code = requests.recv()
        out, errors = (Path(folder, name).read_text(errors="replace") for name in ("out", "errors"))
        return code if in_time else None, out, errors


MODULES = (
    "torch._dynamo.repro.after_dynamo", "torch._inductor.decomposition", "torch.export._trace",
    "torch.nn.attention.flex_attention",
)  # fmt: skip


INTERPRETER = ("triton.runtime.interpreter",), {"TRITON_INTERPRET": "1"}
SHARED = "REFLIB_TESTS_SERVERS"  # where pytest-xdist's workers find those that all of them share


@functools.cache
def server(*more: str, **env: str) -> Connection:
    """Where to ask a process that has imported what of torch all programs need, and ``more``."""
    if folder := os.environ.get(SHARED):
        return connected(socket_in(folder, *more))
    ours, theirs = Pipe()
    start(str(theirs.fileno()), more, env, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours


def start(where: str, more: Sequence[str], env: Mapping[str, str], **how: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.forking", where, *MODULES, *more]
    return subprocess.Popen(command, env=os.environ | env, cwd=Path(__file__).parents[1], **how)


def connected(path: str) -> Connection:
    last = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < last:
        time.sleep(0.05)  # it is about to listen
    return Client(path)


def socket_in(folder: str, *more: str) -> str:
    return str(Path(folder, "-".join(("programs", *more))))


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """One server of each kind for all processes that are started meanwhile."""
    with tempfile.TemporaryDirectory(prefix="reflib-") as folder:
        started = [start(socket_in(folder, *more), more, env) for more, env in (((), {}), INTERPRETER)]
        os.environ[SHARED] = folder
        try:
            yield
        finally:
            del os.environ[SHARED]
            for process in started:
                process.terminate()
            for process in started:  # so its processor time counts as ours
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)


def forked(*words: str, **env: str) -> tuple[int | None, str, str]:
    """As ``ask``, of a program that does not mind what has been imported."""
    return ask(server(), [*words], os.environ | env)


def printed(*words: str, **env: str) -> str:
    """What such a program prints, which must end well."""
    code, out, errors = forked(*words, **env)
    assert code == 0, out[-6000:] + errors[-3000:]
    return out


def child_of(requests: Connection) -> Callable[[str, float, str], tuple[int | None, str]]:
    """Stands in for ``reflib.lab.children._run_child``: forks where ``requests`` leads, instead of a new Python."""

    def run_child(folder: str, timeout_s: float, module: str) -> tuple[int | None, str]:
        env = {k: v for k, v in os.environ.items() if k != "REFLIB_LAB_ROWS"}
        code, _, errors = ask(requests, [module, folder], env, timeout_s)
        return code, errors

    return run_child


def prepare(modules: Sequence[str]) -> None:
    from tests.overheads import quick_interpreter, without_overheads

    for module in modules:
        importlib.import_module(module)
    without_overheads()
    if os.environ.get("TRITON_INTERPRET") == "1":
        quick_interpreter()


def serve_all(path: str, modules: Sequence[str]) -> NoReturn:
    """Each that connects by a fork, until it is told to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        with Listener(path, backlog=64) as listener:
            while True:
                requests = listener.accept()
                prepare(modules)  # (imports nothing the next time)
                if os.fork() == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    serve(requests)
                requests.close()
    finally:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()  # they end with those that they serve


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        prepare(sys.argv[2:])
        serve(Connection(int(sys.argv[1])))
    serve_all(sys.argv[1], sys.argv[2:])
