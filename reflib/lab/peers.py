"""Runs peers, which may crash, in a child process on the same device, with a time limit.

A crash, an error or a timeout becomes a labelled row, and the notebook continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflib.lab.machine import ROOT
from reflib.lab.rows import ROWS_FILE
from reflib.lab.timing import Samples

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Peer:
    """Source text that defines `make(device, dtype, **arguments) -> function of no arguments`."""

    source: str
    timeout_s: float = 120.0
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The reason why a measurement is missing."""

    status: str
    note: str


def peer(source: str, *, timeout_s: float = 120.0, **arguments: Any) -> Peer:
    """A case for `lab.measure` that runs in a separate process.

    `source` is Python text that defines `make(device, dtype, **arguments)`, returning the function to time. Arguments
    are passed as JSON. The time limit covers everything, including imports and compiling.
    """
    json.dumps(arguments)
    return Peer(source, timeout_s, arguments)


def run_peer(
    peer: Peer,
    clock: str | Callable[..., Any],
    cache: str,
    rounds: int,
    budget_s: float,
    device: torch.device,
) -> Samples | Failure:
    """Run the peer in a child process; its samples, or why there are none."""
    from reflib.lab.session import current

    if not isinstance(clock, str):
        return Failure("not here", "a clock of your own does not reach another process")
    job = {
        "clock": clock,
        "cache": cache,
        "rounds": rounds,
        "budget_s": budget_s,
        "device": str(device),
        "dtype": str(current().dtype).removeprefix("torch."),
        "seed": current().seed,
        "arguments": dict(peer.arguments),
    }
    with tempfile.TemporaryDirectory(prefix="reflib-peer-") as folder:
        (Path(folder) / "peer_source.py").write_text(peer.source, encoding="utf-8")
        (Path(folder) / "job.json").write_text(json.dumps(job), encoding="utf-8")
        code, errors = _run_child(folder, peer.timeout_s)
        return _outcome(Path(folder) / "result.json", code, errors, peer.timeout_s)


def _run_child(
    folder: str, timeout_s: float, module: str = "reflib.lab.peer_child"
) -> tuple[int | None, str]:
    """The exit code (None after a timeout) and stderr."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    inherited = {k: v for k, v in os.environ.items() if k != ROWS_FILE}
    child = subprocess.Popen(
        [sys.executable, "-m", module, folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**inherited, "PYTHONPATH": path},
        start_new_session=True,  # so that a timeout kills its children too
        text=True,
        errors="replace",
    )
    try:
        _, errors = child.communicate(timeout=timeout_s)
        return child.returncode, errors
    except subprocess.TimeoutExpired:
        _end_group(child)
        return None, ""
    except BaseException:
        _end_group(child)
        raise


def _end_group(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def _outcome(result: Path, code: int | None, errors: str, timeout_s: float) -> Samples | Failure:
    if code is None:
        return Failure("timed out", f"after {timeout_s:g} s")
    if code < 0:
        return Failure("crashed", _signal_name(-code))
    if not result.exists():
        last = errors.strip().splitlines()[-1:] or [""]
        return Failure("crashed", f"exit code {code} {last[0][:120]}".strip())
    data = json.loads(result.read_text(encoding="utf-8"))
    if "seconds" in data:
        note = "; ".join(p for p in ("own process", data["note"]) if p)
        return Samples(tuple(data["seconds"]), data["clock"], note)
    return Failure(data["status"], data["note"])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
