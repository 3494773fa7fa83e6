"""What workers run in the pool's tests: jobs that answer, and jobs that do what a candidate must not. Standard library
only, so that a worker starts at once."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Say = Callable[[dict], None]


def echo(state: dict, data: dict, say: Say) -> dict:
    """What it was given, how often this worker was asked, and its surroundings."""
    state["count"] = state.get("count", 0) + 1
    return {
        "data": data.get("data"),
        "count": state["count"],
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "stdin": sys.stdin.read(),
        "environ": {name: os.environ.get(name) for name in data.get("names", ())},
        "imported": sorted(name for name in sys.modules if data.get("module", "?") in name),
    }


def talk(state: dict, data: dict, say: Say) -> dict:
    """Say numbers, with ``pause`` seconds between; ``kind`` is the kind of the first."""
    for i in range(data["count"]):
        say({"kind": data["kind"] if i == 0 else "number", "i": i})
        time.sleep(data["pause"])
    return {}


def talk_with_more_time(state: dict, data: dict, say: Say) -> dict:
    """Silent for ``pause`` seconds after each of three messages: the first gives that time, the last takes it back."""
    for message in ({"more": 60.0}, {}, {"more": 0.0}):
        say({"kind": "x", **message})
        time.sleep(data["pause"])
    return {}


class Unreadable:
    """Can be pickled, but not read."""

    def __reduce__(self) -> tuple:
        return int, ("no number",)


def say_what_cannot_be_read(state: dict, data: dict, say: Say) -> dict:
    say({"kind": "x", "what": Unreadable()})
    return {"fine": True}


def sleep(state: dict, data: dict, say: Say) -> dict:
    say({"kind": "started", "pid": os.getpid()})
    time.sleep(data.get("seconds", 1000))
    return {"name": data.get("name")}


def sleep_in_c(state: dict, data: dict, say: Say) -> dict:
    """With the interpreter's lock held: no Python thread of this process runs again."""
    say({"kind": "started", "pid": os.getpid()})
    ctypes.PyDLL(None).sleep(1000)
    return {}


def segfault(state: dict, data: dict, say: Say) -> dict:
    print("about to read address 0")
    return {"read": ctypes.string_at(0).decode()}


def abort(state: dict, data: dict, say: Say) -> dict:
    os.write(2, b"terminate called after throwing an instance of 'Error'\n  what():  an illegal memory access\n")
    os.abort()


def leave(state: dict, data: dict, say: Say) -> dict:
    os._exit(data["code"])


def leave_after_answering(state: dict, data: dict, say: Say) -> dict:
    """Its process ends a moment after its answer."""

    def end() -> None:
        time.sleep(data["seconds"])
        os._exit(0)

    threading.Thread(target=end).start()
    return {"pid": os.getpid()}


def kill_self(state: dict, data: dict, say: Say) -> dict:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def stop_self(state: dict, data: dict, say: Say) -> dict:
    os.kill(os.getpid(), signal.SIGSTOP)
    return {}


def raise_(state: dict, data: dict, say: Say) -> dict:
    if data.get("exit"):
        sys.exit("no more of this")
    raise ValueError("the first line\nthe second line")


def chatter(state: dict, data: dict, say: Say) -> dict:
    """Writes wherever one can."""
    print("a line on standard output")
    print("and one on standard error", file=sys.stderr)
    os.write(1, b"\x00\xff\x00\x00\x00\x05{}{}{}\n")
    subprocess.run(["echo", "and a child's"], check=True)
    return {"fine": True}


def strange_result(state: dict, data: dict, say: Say) -> Any:
    return {"data": threading.Lock()}


def run_children(state: dict, data: dict, say: Say) -> dict:
    """A compiler's place is taken by ``sleep``; ``how``: what happens to the worker then."""
    children = [subprocess.Popen(["sleep", "1000"]).pid for _ in range(2)]
    say({"kind": "started", "pid": os.getpid(), "children": children})
    if data["how"] == "leave":
        os._exit(0)
    time.sleep(1000)
    return {}


def late_speaker(state: dict, data: dict, say: Say) -> dict:
    """A thread that goes on talking after the job has ended."""

    def talk() -> None:
        for _ in range(200):
            with contextlib.suppress(OSError):
                say({"kind": "late"})
            time.sleep(0.001)

    threading.Thread(target=talk, daemon=True).start()
    time.sleep(0.01)
    return {}


def break_gpu(state: dict, data: dict, say: Say) -> dict:
    """What a job sees after an illegal memory access: an exception, and so from every later call."""
    from types import ModuleType, SimpleNamespace

    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    torch = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)  # type: ignore[attr-defined]
    sys.modules["torch"] = torch
    raise RuntimeError("some other words")


def threads(state: dict, data: dict, say: Say) -> dict:
    """How the zygote and this worker are; what torch can do here."""
    import torch

    parent = os.getppid()
    x = torch.randn(512, 512)
    with open(f"/proc/{parent}/comm") as f:
        name = f.read().strip()
    return {
        "zygote": name,
        "zygote_threads": len(os.listdir(f"/proc/{parent}/task")),
        "modules": [m for m in data["modules"] if m in sys.modules],
        "agrees": bool(torch.allclose(x @ x, (x.double() @ x.double()).float(), atol=1e-3)),
        "sum": float((x + 1).sum() - x.sum()),
        "bad_fork": torch.cuda._is_in_bad_fork(),
    }
