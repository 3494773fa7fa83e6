"""Notebooks' kernels forked from one process that has imported what nearly all of them import, for ``make test``:
torch, Dynamo and the others take seconds of each; and so are pytest-xdist's workers, and the ranks and the tuner's
workers that chapters and tests start. ``make test-all``, ``make test-gpu`` and ``make run`` start kernels and workers
as Jupyter, pytest-xdist and reflib do."""

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import SimpleNamespace
from typing import Any


class Kernel(ForkServerProcess):
    """What jupyter_client uses of a Popen."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int | None:
        self.join()
        return self.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid or 0, number)


class Placed(ForkServerProcess):
    """Has the environment of the process that starts it, not that of the server."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._place = dict(os.environ), os.getcwd()

    def run(self) -> None:
        env, folder = self._place
        os.environ.clear()
        os.environ.update(env)
        os.chdir(folder)
        fork_more()
        super().run()


class Zygote(Placed):
    """What starts the tuner's workers, and what ``autotune.pool`` uses of a Popen."""

    returncode: int | None = None

    def __init__(self, command: list[str], *, stdout: Any, **_: Any):
        settings = json.loads(command[-1])
        files = File(settings["fd"]), File(stdout.fileno())
        super().__init__(target=start_workers, args=(settings, *files), daemon=True)
        self.start()

    def wait(self, timeout: float | None = None) -> None:
        self.join(timeout)
        self.returncode = self.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired("the zygote", timeout or 0.0)


class File:
    """A file descriptor, as an argument of such a process."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return arrived, (reduction.DupFd(self.number),)


def arrived(sent: Any) -> int:
    return sent.detach()


def start_workers(settings: dict[str, Any], fd: int, log: int) -> None:
    from reflib import zygote

    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a worker may tune, too
    sys.path[:] = settings["path"]
    zygote.main({**settings, "fd": fd})


def fork_workers() -> None:
    """The tuner's workers, which import torch too."""
    from reflib.autotune import pool

    fork_server()
    names = {"TimeoutExpired": subprocess.TimeoutExpired, "DEVNULL": subprocess.DEVNULL}
    pool.subprocess = SimpleNamespace(Popen=Zygote, **names)


def share_server() -> None:
    """In a forked process: what it starts is forked where it was."""
    forkserver._forkserver.ensure_running = lambda: None  # it runs, though it was not this process that started it


def fork_more() -> None:
    """In a forked process, for its children too: ranks and the tuner's workers are forked where it was."""
    from reflib.lab import rank_group

    share_server()
    rank_group.multiprocessing = SimpleNamespace(get_context=lambda way: fork_server())
    fork_workers()


def fork_server() -> ForkServerContext:
    """Starts processes as forks of one that has imported what nearly all notebooks do."""
    context = ForkServerContext()
    context.set_forkserver_preload(["tests.warm_kernels"])
    context.Process = Placed
    return context


def fork_tests() -> None:
    """pytest-xdist's workers."""
    from execnet import gateway_io

    class Forked(gateway_io.Popen2IOMaster):
        """One of them, and the pipes to it and back."""

        def __init__(self, args: list[str], execmodel: Any):
            (theirs, to), (back, ours) = os.pipe(), os.pipe()
            given = File(theirs), File(ours), dict(os.environ), os.getcwd()
            self.popen = Kernel(target=run_tests, args=given, daemon=True)
            self.popen.start()
            os.close(theirs)
            os.close(ours)
            gateway_io.Popen2IO.__init__(self, os.fdopen(to, "wb"), os.fdopen(back, "rb"), execmodel=execmodel)

    gateway_io.Popen2IOMaster = Forked
    fork_server()
    sys.warnoptions.append("ignore:resource_tracker")  # what is killed leaves semaphores, which are removed in the end
    forkserver.ensure_running()
    sys.warnoptions.pop()


def run_tests(into: int, out: int, env: dict[str, str], folder: str) -> None:
    """In the forked process, as execnet begins."""
    share_server()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # tests start processes
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    if "matplotlib" in sys.modules:
        sys.modules["matplotlib"].use("agg")  # notebooks draw in another way
    os.dup2(into, 0)
    os.dup2(out, 1)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    exec(eval(sys.stdin.readline()), {})


def end_server() -> None:
    """Waits for it, once what it forked has ended: so its processor time counts as ours."""
    ours = forkserver._forkserver
    if ours._forkserver_pid is not None:
        os.close(ours._forkserver_alive_fd)
        waited = time.monotonic() + 10
        while os.waitpid(ours._forkserver_pid, os.WNOHANG)[0] == 0 and time.monotonic() < waited:
            time.sleep(0.05)
        ours._forkserver_pid = None


def launch(
    command: list[str], *, env: dict[str, str], cwd: str | None = None, errors: str = os.devnull, **streams: Any
) -> Kernel:
    """Stands in for ``jupyter_client.launcher.launch_kernel``. ``errors``: a file."""
    context = fork_server()
    reader, writer = context.Pipe(duplex=False)
    kernel = Kernel(target=run, args=(command, env, cwd, errors, writer))
    kernel.start()
    writer.close()
    reader.recv()  # from now on it leads a process group, which jupyter_client sends signals to
    return kernel


def run(command: list[str], env: dict[str, str], cwd: str | None, errors: str, ready: Connection) -> None:
    """In the forked process."""
    from tests.warm_kernels import PATH, fork_children

    os.setsid()
    ready.send("")
    ready.close()
    sys.path[:] = PATH
    fork_more()
    fork_children()
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(env, JPY_PARENT_PID=str(os.getppid()))
    os.chdir(cwd or ".")
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = command[command.index("-m") + 1 :]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)
