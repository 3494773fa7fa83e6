"""tuner: many requests at once, compiled and measured by other processes while this one goes on.

    parent     ask, ask, ask ... (other work) ... wait, wait, wait
    workers    compile a candidate | compile another | ...          as many as there are cores
    device     try the default | try one that is ready | try ... | race         one at a time

``ask`` sends every candidate of a request to be compiled and returns. When one is compiled, ``prune`` looks at the
compiler's report: candidates that cannot win are skipped. The others are tried, in the order they become ready, by the
one measuring worker of their device; when all are known, those near the best are raced. ``wait`` is where the parent
waits.

    a candidate     waiting (for another's report) -> compiling -> compiled -> ready -> trying -> done

The default is tried first. A fault is recorded for its candidate: the worker says what it is about to run, so that one
that crashes it or does not answer is noted (``crashed``, ``hung``). The next job opens the measurement again in another
worker, where the race begins by trying those near the best. A default that crashes is still the reference; if that
cannot be computed either, the request ends with its default. Rows are stored as they come: a program that ends
early has lost nothing: the next one finds its kernels compiled, skips what crashed, hung, was wrong or far from the
best, and races the others.

Memory on the device: each open measurement holds inputs within ``Limits.memory``; at most OPEN_AT_ONCE are open, or as
many as have OPEN_BYTES of inputs together.

Compared with TorchInductor, which also compiles in subprocesses: there the choice at each node waits for its own
candidates before lowering goes on; here all requests are sent before the first wait.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import MeasureError
from ..ir.decision import Candidate
from ..logs import get as logger
from ..options import Options
from ..timeline import Event
from . import switches
from .inputs import main_device
from .measure import DROP
from .pool import Job, Pool
from .report import Report
from .request import RACE, Request, Result
from .winner import pick_winner

OPEN_AT_ONCE = 3
OPEN_BYTES = 2**30
STARTING = 0.05
COMPILE, TRY = "reflib.jobs:compile_candidate", "reflib.jobs:try_some"
ATTEMPTS = 3  # of a race that a crash interrupts, and of what is lost before any candidate ran
KEPT = ("crashed", "hung", "wrong", "pruned")  # what an earlier process found out and need not be tried again

# (name, reports of all that are compiled, None of those that failed) -> why it is not worth running, "" if it is, None
# if that cannot be said yet
Prune = Callable[[str, Mapping[str, list[Report] | None]], str | None]


@dataclass(eq=False)
class Asked:
    """One request that was sent. ``stage``: of each candidate, as in the module's docstring.

    rows: what is known of its candidates.   reports: of the kernels of those that are compiled; None: it cannot be.
    jobs: those that run or are queued, by (candidate, what).   open: it may hold inputs on the device.
    races: how many were begun.   lost: workers that ended before they ran anything.
    unknown_op: the message of a worker that could not import an op.
    """

    number: int
    key: str
    label: str
    request: Request
    prune: Prune | None
    rows: dict[str, Candidate] = field(default_factory=dict)
    stage: dict[str, str] = field(default_factory=dict)
    reports: dict[str, list[Report] | None] = field(default_factory=dict)
    jobs: dict[tuple[str, str], Job] = field(default_factory=dict)
    open: bool = False
    races: int = 0
    lost: int = 0
    unknown_op: str = ""
    result: Result | None = None
    begun: float = field(default_factory=time.perf_counter)

    @cached_property
    def device(self) -> str:
        return str(main_device(self.request.inputs))

    @cached_property
    def bytes(self) -> int:
        """Of all inputs."""
        return sum(s.nbytes for s in self.request.inputs)

    @property
    def failed(self) -> list[Candidate]:
        """The default's row, if it must not run again."""
        row = self.rows.get(self.request.default)
        return [row] if row is not None and row.status in ("crashed", "hung") else []

    @property
    def near(self) -> list[str]:
        """Those that are right and near the fastest so far, and the default: they are raced."""
        timed = {r.name: r.time_us for r in self.rows.values() if r.status == "ok" and r.time_us and not r.dropped}
        best = min(timed.values(), default=0.0)
        return [n for n, us in timed.items() if us <= DROP * best or n == self.request.default]


# Shared by all tuners, because those of one device take turns there. Made anew in a forked child.
_changed = threading.Condition(threading.RLock())
_tuners: weakref.WeakSet[Tuner] = weakref.WeakSet()


def _after_fork() -> None:
    global _changed
    _changed = threading.Condition(threading.RLock())
    _tuners.clear()


os.register_at_fork(after_in_child=_after_fork)


class Tuner:
    """Requests of one program. ``targets``: kind of device -> its Target's fields. ``events``: gets what happened.
    ``store``: keeps rows between processes (an object with ``rows`` and ``add_row``), or None."""

    _numbers = itertools.count()

    def __init__(
        self, pool: Pool, options: Options, targets: Mapping[str, Mapping[str, Any]], events: list[Event], store: Any
    ):
        self.pool, self.options, self.targets, self.events, self.store = pool, options, targets, events, store
        self.asked: list[Asked] = []
        self.stopped = False  # the pool was closed
        self.heard = False  # from any worker
        self.changed = _changed
        self.begun = time.perf_counter()
        self.deadline = time.monotonic() + options.tuning_seconds
        with self.changed:
            _tuners.add(self)

    # -- the parent's side -------------------------------------------------------------------------
    def ask(self, key: str, request: Request, label: str = "", prune: Prune | None = None) -> Asked:
        """Send ``request``. ``key``: of the store."""
        asked = Asked(next(self._numbers), key, label, request, prune)
        with self.changed:
            if not any(a.device == asked.device for a in self.asked):
                self._unheard("reflib.jobs:begin", {"device": asked.device}, asked.device)
            self.asked.append(asked)
            for known in self._seen(key, request):
                asked.rows[known.name] = replace(known, why=f"{known.why}; seen before".lstrip("; "), dropped=True)
                asked.stage[known.name], asked.reports[known.name] = "done", None
            for name in (request.default, *request.programs):
                asked.stage.setdefault(name, "waiting")
            self._look(asked)
        return asked

    def _seen(self, key: str, request: Request) -> list[Candidate]:
        """What an earlier process found out, that ended before its request was decided."""
        rows = self.store.rows(key) if self.store is not None and key else []
        rows = [r for r in rows if r.name in request.programs and r.name != request.default]
        best = min((r.time_us for r in rows if r.status == "ok" and r.time_us), default=0.0)
        far = [r for r in rows if r.status == "ok" and r.time_us and r.time_us > DROP * best]
        return far + [r for r in rows if r.status in KEPT]

    def wait(self, asked: Asked) -> Result:
        """Until ``asked`` is decided, or the time for all tuning is up. An exception here (Ctrl-C) ends the workers.
        Raises MeasureError if the pool was closed elsewhere (at the interpreter's exit)."""
        start = time.perf_counter()
        try:
            with self.changed:
                while asked.result is None:
                    self.changed.wait(0.1)
                    if self.stopped:
                        raise MeasureError("tuning was stopped: its worker processes were ended")
                    if time.monotonic() > self.deadline and asked.result is None:
                        self._too_late(asked)
        except MeasureError:
            raise
        except BaseException:
            self.stopped = True
            self.pool.close()
            raise
        self.events.append(Event(f"waiting for {asked.label}", start, time.perf_counter() - start, "wait"))
        return asked.result

    def close(self) -> None:
        """Cancel what is left of this tuner's jobs: no result is waited for any more."""
        with self.changed:
            for a in self.asked:
                if a.result is None:
                    self._end(a, "tuning was stopped")
            _tuners.discard(self)
            self._others_go_on()

    def count(self) -> tuple[int, int]:
        """(candidates whose row is known, all)."""
        with self.changed:
            done = sum(s == "done" for a in self.asked for s in a.stage.values())
            return done, sum(len(a.stage) for a in self.asked)

    def running(self) -> list[str]:
        """Labels of requests that are not decided."""
        with self.changed:
            return [a.label for a in self.asked if a.result is None]

    # -- compiling ---------------------------------------------------------------------------------
    def _look(self, asked: Asked) -> None:
        """Compile, and make ready to run, the candidates that may still win; drop the others."""
        r = asked.request
        for place, (name, stage) in enumerate(list(asked.stage.items())):
            if stage not in ("waiting", "compiling", "compiled", "ready"):
                continue
            why = asked.prune(name, asked.reports) if asked.prune and name != r.default else ""
            job = asked.jobs.get((name, COMPILE))
            if why and (stage != "compiling" or job is not None and not job.started):
                self._row(asked, Candidate(asked.request.key(name), "pruned", why=why))
                asked.reports.setdefault(name, None)
                self._cancel(asked, (name, COMPILE))
            elif stage == "waiting" and why is not None:
                options = r.options | r.patches.get(name, {})
                data = {"program": r.programs[name], "options": options, "targets": dict(self.targets)}
                asked.stage[name] = "compiling"
                self._submit(asked, name, COMPILE, data, (0 if name == r.default else 1, asked.number, place))
            elif stage == "compiled" and why is not None:
                asked.stage[name] = "ready"

    def _compiled(self, asked: Asked, name: str, status: str, data: dict[str, Any], job: Job) -> None:
        why = data.get("why", "")
        if status == "done":
            asked.reports[name], asked.stage[name] = data["reports"], "compiled"
        elif "is not registered" in why:
            asked.unknown_op = why
            self._end(asked, why)
        elif name == asked.request.default:
            asked.stage[name] = "ready"  # opening says what is wrong with it
        else:
            asked.reports[name] = None
            how = ("error", why) if status == "failed" else (status, f"while compiling: {why}")
            self._row(asked, Candidate(asked.request.key(name), how[0], why=how[1]))

    # -- measuring ---------------------------------------------------------------------------------
    def _go_on(self, asked: Asked) -> None:
        """Send whatever can be done next."""
        if asked.result is not None:
            return
        self._look(asked)
        default = asked.request.default
        asked.open = asked.open or asked.stage[default] == "ready" and self._room(asked)
        if not asked.open:
            return
        first = asked.stage[default] != "done"  # its results are what the others are compared with
        for name in [default] if first else list(asked.stage):
            if asked.stage[name] == "ready":
                asked.stage[name] = "trying"
                self._try(asked, name, [name], 0 if first else 1)
        if all(s == "done" for s in asked.stage.values()) and (RACE, TRY) not in asked.jobs:
            asked.races += 1
            self._try(asked, RACE, asked.near, 2)

    def _try(self, asked: Asked, name: str, names: list[str], place: int) -> None:
        r = asked.request
        programs = {n: r.programs[n] for n in {r.default, r.reference, *names}}
        data = {"id": asked.number, "request": replace(r, programs=programs), "names": names, "race": name == RACE,
                "failed": asked.failed, "switches": switches.read()}  # fmt: skip
        self._submit(asked, name, TRY, data, (asked.number, place))

    def _room(self, asked: Asked) -> bool:
        """On its device, those of other tuners included: each measurement holds inputs there."""
        every = [a for t in _tuners for a in t.asked if a.open and a.result is None]
        others = [a for a in every if a.device == asked.device]
        return len(others) < OPEN_AT_ONCE or sum(a.bytes for a in others) + asked.bytes <= OPEN_BYTES

    def _others_go_on(self) -> None:
        """The end of one measurement makes room for another."""
        for tuner in list(_tuners):
            if not tuner.stopped:
                for a in tuner.asked:
                    tuner._go_on(a)

    def _tried(self, asked: Asked, name: str, status: str, data: dict[str, Any], job: Job) -> None:
        for row in data.get("rows", ()):
            self._row(asked, row)
        if status == "done":
            if name == RACE:
                asked.rows |= {r.name: r for r in data["result"].rows}
                self._end(asked, "", data["result"])
            return
        default, why = asked.request.default, data.get("why", "")
        ran = data.get("at", "")  # "": what all candidates need
        if name in asked.stage:
            asked.stage[name] = "ready"  # again, unless its row says otherwise below
        if "at" not in data and status != "failed":  # while it waited for the device, say
            asked.lost += 1
            if asked.lost >= ATTEMPTS:
                self._end(asked, f"it cannot be measured: its worker {status} ({why})")
        elif not ran and (status == "failed" or asked.failed):
            self._end(asked, f"it cannot be measured: {default} {status} ({why})")
        elif ran != RACE:
            how = "error" if status == "failed" else status
            self._row(asked, Candidate(asked.request.key(ran or default), how, why=why))
        if name == RACE and asked.races >= ATTEMPTS and asked.result is None:
            self._end(asked, f"the last race {status}: these are times of short rounds")

    # -- deciding ----------------------------------------------------------------------------------
    def _end(self, asked: Asked, note: str, raced: Result | None = None) -> None:
        """Decide by the rows there are; ``raced``: the result of the race."""
        for name in asked.stage:
            asked.rows.setdefault(name, Candidate(asked.request.key(name), "skipped", why=note))
            asked.stage[name] = "done"
        self._cancel(asked, *asked.jobs)
        rows = tuple(asked.rows[n] for n in asked.stage)
        if raced is None and asked.open and not self.stopped:
            self._unheard("reflib.jobs:close", {"id": asked.number}, asked.device)
        if raced is None:
            r = asked.request
            raced = Result(rows, *pick_winner(rows, r.default, r.min_speedup))
        reason = f"{raced.reason}; {note}" if note else raced.reason
        seconds = time.perf_counter() - asked.begun
        asked.result = replace(raced, rows=rows, reason=reason, seconds=seconds, complete=raced.complete and not note)
        logger("autotune").info("%s: %s", asked.label, reason)

    def _too_late(self, asked: Asked) -> None:
        left = [name for name, stage in asked.stage.items() if stage != "done"]
        for name in left:
            why = f"the time limit of {self.options.tuning_seconds:g} s for all tuning came first"
            asked.rows.setdefault(name, Candidate(asked.request.key(name), "skipped", why=why))
        self._end(asked, f"out of time with {len(left)} candidates left" if left else "out of time before the race")

    def _row(self, asked: Asked, row: Candidate) -> None:
        asked.rows[row.name], asked.stage[row.name] = row, "done"
        if self.store is not None and asked.key:
            self.store.add_row(asked.key, row)

    # -- jobs --------------------------------------------------------------------------------------
    def _submit(self, asked: Asked, name: str, what: str, data: dict[str, Any], priority: tuple[int, ...]) -> None:
        """To any compile worker, or to the device's worker; earlier requests first."""
        where = "compile" if what == COMPILE else asked.device
        ended = self._compiled if what == COMPILE else self._tried
        heard: dict[str, Any] = {}

        def said(message: dict[str, Any]) -> None:
            if message.get("kind") == "lost":  # why its worker is about to end
                heard["why"] = message["why"]
            elif message.get("kind") == "at":
                heard["at"] = message["name"]
            elif message.get("kind") == "locked":
                seconds = message["seconds"]
                self.events.append(Event("another process", time.perf_counter() - seconds, seconds, "lock", where))

        def over(status: str, result: dict[str, Any]) -> None:
            with self.changed:
                ours = asked.jobs.get((name, what)) is job  # else it was cancelled here
                if ours:
                    del asked.jobs[name, what]
                if ours and status == "cancelled":
                    self.stopped = self.stopped or asked.result is None  # the pool was closed
                elif ours and asked.result is None and not self.stopped:
                    if status == "crashed" and not job.started:  # before any candidate ran
                        status = "failed"
                    self._note(asked, name, status, result, job)
                    ended(asked, name, status, result | heard, job)
                    self._go_on(asked)
                    if asked.result is not None:
                        self._others_go_on()
                self.changed.notify_all()

        limit = self.options.candidate_seconds
        job = Job(what, {**data, "imports": asked.request.imports}, where, said, over, limit, priority)
        asked.jobs[name, what] = job
        self.pool.submit(job)

    def _cancel(self, asked: Asked, *keys: tuple[str, str]) -> None:
        for key in keys:
            if (job := asked.jobs.pop(key, None)) is not None:
                self.pool.cancel(job)

    def _unheard(self, what: str, data: dict[str, Any], where: str) -> None:
        """A job whose end does not matter."""
        self.pool.submit(Job(what, data, where, lambda message: None, lambda how, facts: None, 60.0, (-1,)))

    def _note(self, asked: Asked, name: str, status: str, data: dict[str, Any], job: Job) -> None:
        """In the timeline: how long the job that ended waited, and how long it ran."""
        kind = "compile" if job.what == COMPILE else "measure"
        shown = name.strip("<>")
        shown = f"{shown} (opening)" if job.what == TRY and name == asked.request.default else shown
        now, track = time.perf_counter(), job.track or job.where
        began = job.started or now
        if not self.heard:  # until then processes were started, if there were none
            self.heard = True
            if began - self.begun > STARTING:
                self.events.append(Event("worker processes", self.begun, began - self.begun, "start", "workers"))
        if began - job.since > 1e-3:
            self.events.append(Event(shown, job.since, began - job.since, "queue", track, asked.label))
        rows = data.get("rows") or ()
        how = rows[-1].status if rows and name != RACE else "ok" if status == "done" else status
        self.events.append(Event(shown, began, now - began, kind, track, asked.label, how))
