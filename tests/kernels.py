"""Notebooks' kernels forked from one process that has imported what nearly all of them import, for ``make test``:
torch, Dynamo and the others take seconds of each. ``make test-all``, ``make test-gpu`` and ``make run`` start them
as Jupyter does."""

import multiprocessing
import os
import runpy
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
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


def fork_server() -> ForkServerContext:
    """Starts processes as forks of one that has imported what nearly all notebooks do."""
    context = ForkServerContext()
    context.set_forkserver_preload(["tests.warm_kernels"])
    return context


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
