"""What worker processes do when candidates are tuned: functions of (state, data, say), all of it plain data.

``compile_candidate`` runs in any worker and touches no device: the later stages up to ``generate``, then the compilers.
What it leaves is in the on-disk cache, where the measuring worker and the user's process find it; what it returns is
the compilers' own report, from which ``choose`` sees who cannot win.

``open``, ``try_one``, ``finish``, ``close`` run in a device's one measuring worker. A measurement (``measure.Session``)
lives in its ``state`` between them, by its id; a worker that was replaced has none, and says so.

(Beside pipeline.py, not in choose/: these are the whole compiler, as a process of its own.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from .choose.decision import Candidate
from .choose.measure import DeviceLost, Request, Session
from .ir.data import from_data
from .options import Options
from .target import Target, device_target

State = dict[str, Any]
Data = Mapping[str, Any]
Say = Callable[[dict[str, Any]], None]
LOST_EXIT = 86  # how a measuring worker ends whose device context a candidate has broken


def begin(state: State, data: Data, say: Say) -> dict[str, Any]:
    """Start the device (data: ``device``), its library for matrix products too, before there is anything to measure."""
    device = torch.device(data["device"])
    if device.type == "cuda":
        with torch.cuda.device(device):
            x = torch.ones(16, 16, device=device)
            (x @ x).sum().item()
    return {}


def compile_candidate(state: State, data: Data, say: Say) -> dict[str, Any]:
    """data: ``program`` (``ir.data.to_data``), ``options`` (fields of Options), ``targets`` (kind of device ->
    fields of its Target). Returns {kernels, reports}. Raises what a stage or a compiler raises."""
    from .pipeline import generated
    from .wrap.wrap import compile_cpp

    options = Options.make(dict(data["options"])).but(autotune="off")
    targets = {kind: Target(**fields) for kind, fields in data["targets"].items()}

    def target_of(device: torch.device) -> Target:
        return targets[device.type] if device.type in targets else device_target(device.type, device.index or 0)

    _, kernels = generated(from_data(data["program"]), options, target_of)
    first = [k for (_, arm), k in kernels.items() if arm == 0]
    reports = []
    for k in first:
        if k.language == "triton" and k.grid != 0:
            from .choose.report import report
            from .generate.compile_triton import compile_kernel

            found = report(compile_kernel(k, targets["cuda"]), targets["cuda"])
            reports.append(None if found is None else found.to_data())
    cpp = tuple(k for k in kernels.values() if k.language == "cpp")
    if cpp:
        compile_cpp(cpp, options)
    return {"kernels": len(first), "reports": reports}


def open(state: State, data: Data, say: Say) -> dict[str, Any]:
    """data: ``id``, ``request`` (``Request.to_json``), ``switches`` (``choose.switches.read``), ``known`` (rows of
    those that are not to run). Makes inputs and the reference, tries the default: {row}."""
    from .pipeline import build
    from .wrap.runtime import zeros

    keep = ExitStack()
    keep.enter_context(zeros.for_a_while())  # the words of the graphs that measuring captures
    session = Session(Request.from_json(data["request"]), build)
    session.pulse = _pulse(say)
    for row in data.get("known", ()):
        session.given(Candidate(**row))
    state.setdefault("sessions", {})[data["id"]] = session, keep, dict(data["switches"])
    try:
        return {"row": asdict(_guarded(session, data, state, say, session.open))}
    except BaseException:
        close(state, data, say)
        raise


def try_one(state: State, data: Data, say: Say) -> dict[str, Any]:
    """data: ``id``, ``name``; for one that is not in the request, ``program`` and ``patches``.
    {row} or {gone: True}."""
    session = _session(state, data)
    if session is None:
        return {"gone": True}
    if "program" in data:
        session.add(data["name"], data["program"], data.get("patches"))
    row = _guarded(session, data, state, say, lambda: session.try_one(data["name"]))
    return {"row": asdict(row)}


def finish(state: State, data: Data, say: Say) -> dict[str, Any]:
    """The race: {result} (``Result.to_json``) or {gone: True}. The session is over."""
    session = _session(state, data)
    if session is None:
        return {"gone": True}
    try:
        return {"result": _guarded(session, data, state, say, session.finish).to_json()}
    finally:
        close(state, data, say)


def close(state: State, data: Data, say: Say) -> dict[str, Any]:
    """Give up a session's memory, on the device too."""
    session, keep, _ = state.get("sessions", {}).pop(data["id"], (None, None, None))
    if session is not None:
        session.close()
        keep.close()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return {}


def _session(state: State, data: Data) -> Session | None:
    return state.get("sessions", {}).get(data["id"], (None,))[0]


def _pulse(say: Say) -> Callable[[], None]:
    """Says that work goes on, once a second at most: a long race is no hang."""
    last = time.monotonic()

    def pulse() -> None:
        nonlocal last
        if time.monotonic() - last > 1:
            last = time.monotonic()
            say({"kind": "alive"})

    return pulse


def _guarded(session: Session, data: Data, state: State, say: Say, work: Callable[[], Any]) -> Any:
    """Alone on the device while anything is timed, with torch's switches as they are where it was asked. A lost device
    ends this process: nothing runs in it any more."""
    from .choose import switches
    from .choose.lock import device_lock

    switches.write(state["sessions"][data["id"]][2])
    try:
        with device_lock(str(session.device), say):
            return work()
    except DeviceLost as e:
        say({"kind": "lost", "why": str(e)})
        os._exit(LOST_EXIT)

