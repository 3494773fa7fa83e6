"""What worker processes do when candidates are tuned: functions of (state, data, say); data and results are pickled.

``compile_candidate`` runs in any worker and touches no device: the later stages up to ``generate``, then the compilers.
Its kernels stay in the on-disk cache, for the measuring worker and the user's process; it returns the compilers' own
report, from which ``autotune`` sees which candidates cannot win.

``try_some`` and ``close`` run in a device's one measuring worker. A measurement (``measure.Session``) lives in its
``state`` between them, by its id; a worker that has none, because the one before it crashed, opens it again.

(Beside pipeline.py, not in autotune/: these are the whole compiler, as a process of its own.)
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from .autotune import switches
from .autotune.by_value import makers
from .autotune.inputs import main_device
from .autotune.lock import device_lock
from .autotune.measure import DeviceLost, Session
from .autotune.request import RACE, Request
from .ir.data import from_data
from .ir.decision import Candidate
from .ir.program import fallback_kernels
from .options import Options
from .target import Target, device_target

State = dict[str, Any]
Data = Mapping[str, Any]
Say = Callable[[dict[str, Any]], None]
OPENING = 20.0  # seconds for inputs and the reference, beside those of the default as a candidate
LOST_EXIT = 86  # exit code of a measuring worker whose device context a candidate has broken


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
    fields of its Target). Returns {reports}. Raises what a stage or a compiler raises."""
    from .autotune.report import report
    from .generate.compile_triton import compile_kernel
    from .tuning import generated
    from .wrap.build import compile_cpp

    options = Options.make(dict(data["options"])).but(autotune="off")
    targets = {kind: Target(**fields) for kind, fields in data["targets"].items()}

    def target_of(device: torch.device) -> Target:
        return targets[device.type] if device.type in targets else device_target(device.type, device.index or 0)

    scheduled, kernels = generated(from_data(data["program"]), options, target_of)
    late = fallback_kernels(scheduled.nodes)
    triton = [k for name, k in kernels.items() if name not in late and k.language == "triton" and k.grid != 0]
    reports = [report(compile_kernel(k, targets["cuda"]), targets["cuda"]) for k in triton]
    if cpp := tuple(k for k in kernels.values() if k.language == "cpp"):
        compile_cpp(cpp, options)
    return {"reports": reports}


def try_some(state: State, data: Data, say: Say) -> dict[str, Any]:
    """Try candidates, alone on the device, with torch's switches as they are in the parent. What runs is said first:
    {"kind": "at", "name": ...}, "" for the inputs, the reference and the default. A lost device ends this process:
    nothing runs in it any more.

    data: ``id``, ``request`` (with these candidates, the default and the reference), ``names``, ``race`` (those near
    the best, at the end), ``failed`` (rows of candidates that are not to run), ``switches`` (``autotune.switches``).
    Returns {rows, result}: the default's row too if it was tried; result: None without a race."""
    request: Request = data["request"]
    switches.write(dict(data["switches"]))
    try:
        with device_lock(str(main_device(request.inputs)), say):
            rows = [] if data["id"] in state else [_open(state, data, say)]
            session = state[data["id"]][0]
            session.add(request.programs)
            for name in data["names"]:
                say({"kind": "at", "name": name, "more": 0.0})
                rows.append(session.try_one(name))
            say({"kind": "at", "name": RACE, "more": 0.0})
            return {"rows": rows, "result": session.finish() if data["race"] else None}
    except DeviceLost as e:
        say({"kind": "lost", "why": str(e)})
        os._exit(LOST_EXIT)
    finally:
        if data["race"]:
            close(state, data, say)


def _open(state: State, data: Data, say: Say) -> Candidate:
    """Make inputs and the reference, try the default: its row."""
    from .tuning import build
    from .wrap.zeros import zeros

    say({"kind": "at", "name": "", "more": OPENING})
    keep = ExitStack()
    keep.enter_context(zeros.for_a_while())  # the words of the graphs that measuring captures
    session = Session(data["request"], build, makers(data["request"].makers))
    session.pulse = _pulse(say)
    for row in data["failed"]:
        session.given(row)
    state[data["id"]] = session, keep
    try:
        return session.open()
    except BaseException:
        close(state, data, say)
        raise


def close(state: State, data: Data, say: Say) -> dict[str, Any]:
    """Give up a session's memory, on the device too."""
    if data["id"] in state:
        session, keep = state.pop(data["id"])
        session.close()
        keep.close()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return {}


def _pulse(say: Say) -> Callable[[], None]:
    """Says that work goes on, once a second at most: a long race is no hang."""
    last = time.monotonic()

    def pulse() -> None:
        nonlocal last
        if time.monotonic() - last > 1:
            last = time.monotonic()
            say({"kind": "alive"})

    return pulse
