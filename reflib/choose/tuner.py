"""tuner: many requests at once, compiled and measured by other processes while this one goes on.

    parent     ask, ask, ask ... (other work) ... wait, wait, wait
    workers    compile a candidate | compile another | ...          as many as there are cores
    device     open a request | try one that is ready | try ... | race          one at a time

``ask`` sends every candidate of a request to be compiled and returns. A candidate that is compiled is looked at
(``report``): who cannot win is not run. The others are tried, in the order they become ready, by the one measuring
worker of their device; when all are known, those near the best are raced. ``wait`` is where the parent waits.

What goes wrong stays with the candidate. One that crashes its worker or does not answer is noted (``crashed``,
``hung``), the measurement is opened again in a new worker without it, and those near the best are tried again there.
A default that crashes is no different, but for the reference: if that cannot be computed either, the request ends
with its default. Rows are kept in the store as they come, so a program that ends early has lost nothing: the next one
finds its kernels compiled, does not run again what crashed, hung or was wrong, nor what was far from the best, and
races the others.

Memory on the device: of the measurements that hold inputs at a time, each is within ``Limits.memory``; there are at
most OPEN_AT_ONCE, or as many as have OPEN_BYTES of inputs together.

Compared with TorchInductor, which also compiles in subprocesses: there the choice at each node waits for its own
candidates before lowering goes on; here nobody waits until all requests are out.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import MeasureError
from ..logs import get as logger
from ..options import Options
from ..timeline import Event
from . import switches
from .decision import Candidate
from .inputs import main_device
from .measure import DROP
from .pool import Job, Pool
from .report import Report
from .request import Request, Result
from .winner import decide

OPEN_AT_ONCE = 3
OPEN_BYTES = 2**30
OPENING = 20.0  # seconds for inputs and the reference, beside the default's own
STARTING = 0.05
COMPILE = "reflib.jobs:compile_candidate"
ATTEMPTS = 3  # of a race that a crash interrupts
KEPT = ("crashed", "hung", "wrong", "pruned")  # what an earlier process found out and need not be tried again
MOST_OPENED = 8  # times that one request is begun again, beside once for each candidate

# (name, reports of all that are compiled, of those that failed None, the best so far and its us) -> why it is not worth
# running, "" if it is, None if that cannot be said yet
Prune = Callable[[str, Mapping[str, list[Report] | None], tuple[str, float] | None], str | None]


@dataclass(eq=False)
class Asked:
    """One request on its way.

    rows: what is known of its candidates.   stage: of each, ``waiting`` for another's report, ``compiling``,
        ``compiled``, ``ready``, ``trying`` or ``done``.
    reports: of the kernels of those that are compiled; None for who was not, and will not be.
    session: "", ``opening``, ``open`` or ``racing``.   opened, raced: how often.
    """

    number: int
    key: str
    label: str
    request: Request
    imports: tuple[str, ...]
    prune: Prune | None
    rows: dict[str, Candidate] = field(default_factory=dict)
    stage: dict[str, str] = field(default_factory=dict)
    reports: dict[str, list[Report] | None] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    session: str = ""
    opened: int = 0
    raced: int = 0
    unknown_op: str = ""  # what no worker could import
    result: Result | None = None
    begun: float = field(default_factory=time.perf_counter)

    @property
    def device(self) -> str:
        return str(main_device(self.request.inputs))

    @cached_property
    def bytes(self) -> int:
        """Of all inputs."""
        return sum(s.nbytes for s in self.request.inputs)

    @property
    def id(self) -> str:
        return f"{self.number}.{self.opened}"

    @property
    def best(self) -> tuple[str, float] | None:
        """Name and microseconds of the fastest that is right, so far."""
        timed = [(r.time_us, r.name) for r in self.rows.values() if r.status == "ok" and r.time_us]
        return min(timed)[::-1] if timed else None


# (request, candidate, how its job ended, what it returned or why, the job)
Ended = Callable[[Asked, str, str, dict[str, Any], Job], None]


# One for all tuners, because those of one device take turns there. Made anew in a forked child.
_changed = threading.Condition(threading.RLock())
_tuners: weakref.WeakSet[Tuner] = weakref.WeakSet()


def _after_fork() -> None:
    global _changed
    _changed = threading.Condition(threading.RLock())
    _tuners.clear()


if hasattr(os, "register_at_fork"):
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
        self.since: dict[Job, float] = {}  # when it was submitted
        self.dropped: set[Job] = set()  # cancelled here
        self.stopped = self.heard = False
        self.changed = _changed
        self.begun = time.perf_counter()
        self.deadline = time.monotonic() + options.tuning_seconds
        with self.changed:
            _tuners.add(self)

    # -- the parent's side -------------------------------------------------------------------------
    def ask(
        self, key: str, request: Request, label: str = "", imports: tuple[str, ...] = (), prune: Prune | None = None
    ) -> Asked:
        """Send ``request`` on its way. ``key``: of the store."""
        asked = Asked(next(self._numbers), key, label, request, imports, prune)
        with self.changed:
            if not any(a.device == asked.device for a in self.asked):
                self._quietly("reflib.jobs:begin", {"device": asked.device}, asked.device)
            self.asked.append(asked)
            for known in self._seen(key, request):
                asked.rows[known.name] = replace(known, why=f"{known.why}; seen before".lstrip("; "), dropped=True)
                asked.stage[known.name], asked.reports[known.name] = "done", None
            for name in (request.default, *request.programs):
                if name not in asked.stage:
                    asked.stage[name] = "waiting"
            self._look(asked)
        return asked

    def _seen(self, key: str, request: Request) -> list[Candidate]:
        """What an earlier process found out, that ended before its request was decided."""
        rows = [Candidate(**r) for r in self.store.rows(key)] if self.store is not None and key else []
        rows = [r for r in rows if r.name in request.programs and r.name != request.default]
        best = min((r.time_us for r in rows if r.status == "ok" and r.time_us), default=0.0)
        far = [r for r in rows if r.status == "ok" and r.time_us and r.time_us > DROP * best]
        return far + [r for r in rows if r.status in KEPT and not (r.status == "hung" and self._more_patient(r))]

    def _more_patient(self, row: Candidate) -> bool:
        """Would it be given more time than it had?"""
        had = re.search(r"for ([\d.]+) s", row.why)
        return had is None or float(had[1]) < self.options.candidate_seconds

    def close(self) -> None:
        """Nobody waits any more: what is left of this tuner's jobs is cancelled."""
        with self.changed:
            jobs = [job for a in self.asked for job in a.jobs.values()]
            self.dropped.update(jobs)
            for a in self.asked:
                if a.result is None:
                    self._end(a, "tuning was stopped")
            _tuners.discard(self)
            self._others_go_on()
        for job in jobs:
            self.pool.cancel(job)

    def wait(self, asked: Asked) -> Result:
        """Until ``asked`` is decided, or the time for all of it is up. An exception here (Ctrl-C) ends the workers.
        Raises MeasureError if somebody else ended them (the interpreter's exit)."""
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
    def _compile(self, asked: Asked, name: str) -> None:
        r, place = asked.request, list(asked.stage).index(name)
        options = r.options | r.patches.get(name, {})
        data = {"program": r.programs[name], "options": options, "targets": dict(self.targets)}
        first = 0 if name == r.default else 1
        self._submit(asked, name, "compiling", COMPILE, data, "compile", (first, asked.number, place), self._compiled)

    def _compiled(self, asked: Asked, name: str, status: str, data: dict[str, Any], job: Job) -> None:
        self._note("compile", asked, name, status, data, job)
        why = data.get("why", "")
        if status == "done":
            asked.reports[name] = [Report.from_data(r) for r in data["reports"]]
            asked.stage[name] = "compiled"
        elif "is not registered" in why:
            asked.unknown_op = why
            self._end(asked, why)
        elif status == "failed" and name != asked.request.default:
            asked.reports[name] = None
            self._row(asked, Candidate(name, "error", why=why))
        elif name == asked.request.default:
            asked.stage[name] = "ready"  # opening says what is wrong with it
        else:
            asked.reports[name] = None
            self._row(asked, Candidate(name, status, why=f"while compiling: {why}"))

    def _look(self, asked: Asked) -> None:
        """Who is worth compiling, and running? What is best so far, and what the compiler says of others, decides."""
        for name, stage in list(asked.stage.items()):
            if stage not in ("waiting", "compiling", "compiled", "ready"):
                continue
            why = "" if asked.prune is None or name == asked.request.default else self._verdict(asked, name)
            job = asked.jobs.get(f"{name} {COMPILE}")
            if why and (stage != "compiling" or job is not None and not job.started):
                self._row(asked, Candidate(name, "pruned", why=why))
                asked.reports.setdefault(name, None)
                if job is not None:
                    self.dropped.add(job)
                    self.pool.cancel(job)
            elif stage == "waiting" and why is not None:
                self._compile(asked, name)
            elif stage == "compiled" and why is not None:
                asked.stage[name] = "ready"

    def _verdict(self, asked: Asked, name: str) -> str | None:
        assert asked.prune is not None
        return asked.prune(name, asked.reports, asked.best)

    # -- measuring ---------------------------------------------------------------------------------
    def _go_on(self, asked: Asked) -> None:
        """Whatever can be done next for it."""
        if asked.result is not None:
            return
        self._look(asked)
        default = asked.request.default
        if asked.session == "" and asked.stage[default] in ("ready", "done") and self._room(asked):
            asked.session, asked.opened = "opening", asked.opened + 1
            known = [asdict(r) for r in asked.rows.values() if r.status in ("crashed", "hung")]
            if asked.opened > MOST_OPENED + len(asked.stage):
                return self._end(asked, "its measurement ended too often")
            data = {
                "id": asked.id, "request": asked.request.to_json(), "known": known, "switches": switches.read(),
            }  # fmt: skip
            self._measure(asked, default, "trying", "reflib.jobs:open", data, 0, self._opened)
        elif asked.session == "open":
            for name in [n for n, s in asked.stage.items() if s == "ready"]:
                data = {"id": asked.id, "name": name}
                self._measure(asked, name, "trying", "reflib.jobs:try_one", data, 1, self._tried)
            if all(s == "done" for s in asked.stage.values()):
                asked.session, asked.raced = "racing", asked.raced + 1
                self._measure(asked, "", "", "reflib.jobs:finish", {"id": asked.id}, 2, self._finished)

    def _room(self, asked: Asked) -> bool:
        """On its device, whoever asked for the others: each measurement holds inputs there."""
        every = [a for t in _tuners for a in t.asked if a.session != "" and a.result is None]
        others = [a for a in every if a.device == asked.device]
        return len(others) < OPEN_AT_ONCE or sum(a.bytes for a in others) + asked.bytes <= OPEN_BYTES

    def _others_go_on(self) -> None:
        """The end of one measurement makes room for another."""
        for tuner in list(_tuners):
            if not tuner.stopped:
                for a in tuner.asked:
                    tuner._go_on(a)

    def _opened(self, asked: Asked, name: str, status: str, data: dict[str, Any], job: Job) -> None:
        self._note("measure", asked, f"{name} (opening)", status, data, job)
        if status == "done":
            asked.session = "open"
            self._row(asked, Candidate(**data["row"]))
            return
        why = data.get("why", "")
        asked.session = ""
        if asked.rows.get(name, Candidate("", "")).status in ("crashed", "hung") or status not in ("crashed", "hung"):
            self._end(asked, f"it cannot be measured: {name} {status} ({why})")
            return
        self._row(asked, Candidate(name, status, why=why))

    def _tried(self, asked: Asked, name: str, status: str, data: dict[str, Any], job: Job) -> None:
        self._note("measure", asked, name, status, data, job)
        if status == "done" and "row" in data:
            self._row(asked, Candidate(**data["row"]))
        elif status == "done":  # its session is gone: with another candidate's crash, or another request's
            asked.stage[name] = "ready"
            if job.data["id"] == asked.id and asked.session == "open":
                self._reopen(asked)
        elif status == "failed":
            self._row(asked, Candidate(name, "error", why=data.get("why", "")))
        else:
            self._row(asked, Candidate(name, status, why=data.get("why", "")))
            self._reopen(asked)

    def _reopen(self, asked: Asked) -> None:
        """The measuring worker is gone with all it held: begin again, with those that may still win."""
        best = asked.best
        asked.session = ""
        for name, row in asked.rows.items():
            near = row.time_us is not None and best is not None and row.time_us <= DROP * best[1]
            if row.status == "ok" and (near or name == asked.request.default):
                asked.stage[name] = "ready"

    def _finished(self, asked: Asked, name: str, status: str, data: dict[str, Any], job: Job) -> None:
        self._note("measure", asked, "race", status, data, job)
        if status == "done" and "result" in data:
            result = Result.from_json(data["result"])
            asked.rows |= {r.name: r for r in result.rows}
            self._end(asked, "", result)
        elif asked.raced < ATTEMPTS:
            self._reopen(asked)
        else:
            self._end(asked, f"the last race {status}: these are times of short rounds")

    def _end(self, asked: Asked, note: str, result: Result | None = None) -> None:
        """Decide by the rows there are."""
        for name in asked.stage:
            if name not in asked.rows:
                asked.rows[name] = Candidate(name, "skipped", why=note)
            asked.stage[name] = "done"
        rows = tuple(asked.rows[n] for n in asked.stage)
        if result is not None:  # those that were raced together
            winner, reason = result.winner, result.reason
        else:
            winner, reason = decide(rows, asked.request.default, asked.request.min_speedup)
        reason = f"{reason}; {note}" if note else reason
        clock, reference = (result.clock, result.reference) if result is not None else ("", "")
        if result is None and asked.session in ("open", "racing") and not self.stopped:  # else its worker is gone
            self._quietly("reflib.jobs:close", {"id": asked.id}, asked.device)
        asked.result = Result(rows, winner, reason, clock, reference, time.perf_counter() - asked.begun, not note)
        logger("choose").info("%s: %s", asked.label, reason)

    def _too_late(self, asked: Asked) -> None:
        left = [name for name, stage in asked.stage.items() if stage != "done"]
        for name in left:
            why = f"the time limit of {self.options.tuning_seconds:g} s for all tuning came first"
            asked.rows.setdefault(name, Candidate(name, "skipped", why=why))
        self._end(asked, f"out of time with {len(left)} candidates left" if left else "out of time before the race")
        for job in list(asked.jobs.values()):
            self.pool.cancel(job)

    def _quietly(self, what: str, data: dict[str, Any], where: str) -> None:
        """A job whose end nobody waits for."""
        self.pool.submit(Job(what, data, where, lambda m: None, lambda s, d: None, 60.0, (-1,)))

    # -- jobs --------------------------------------------------------------------------------------
    def _measure(
        self, asked: Asked, name: str, stage: str, what: str, data: dict[str, Any], place: int, ended: Ended
    ) -> None:
        """By the device's worker, earlier requests first."""
        self._submit(asked, name, stage, what, data, asked.device, (asked.number, place), ended)

    def _submit(
        self, asked: Asked, name: str, stage: str, what: str, data: dict[str, Any], where: str,
        priority: tuple[int, ...], ended: Ended,
    ) -> None:  # fmt: skip
        lost: list[str] = []

        def said(message: dict[str, Any]) -> None:
            if message.get("kind") == "lost":  # why its worker is about to end
                lost.append(message["why"])
            elif message.get("kind") == "locked":
                seconds = message["seconds"]
                self.events.append(Event("another process", time.perf_counter() - seconds, seconds, "lock", where))

        def over(status: str, result: dict[str, Any]) -> None:
            with self.changed:
                asked.jobs.pop(f"{name} {what}", None)
                if job in self.dropped:
                    self.dropped.discard(job)
                elif status == "cancelled" and asked.result is None:
                    self.stopped = True  # nobody here did that: the pool was closed
                elif asked.result is None and not self.stopped:
                    ended(asked, name, status, result | ({"why": lost[0]} if lost else {}), job)
                    self._go_on(asked)
                    if asked.result is not None or asked.session == "":
                        self._others_go_on()
                self.changed.notify_all()

        if stage:
            asked.stage[name] = stage
        limit = self.options.candidate_seconds + (OPENING if what.endswith((":open", ":finish")) else 0.0)
        data = {**data, "imports": list(asked.imports)}
        job = Job(what, data, where, said, over, limit, priority)
        asked.jobs[f"{name} {what}"] = job
        self.since[job] = time.perf_counter()
        self.pool.submit(job)

    def _row(self, asked: Asked, row: Candidate) -> None:
        asked.rows[row.name], asked.stage[row.name] = row, "done"
        if self.store is not None and asked.key:
            self.store.add_row(asked.key, asdict(row))

    def _note(self, kind: str, asked: Asked, name: str, status: str, data: dict[str, Any], job: Job) -> None:
        """Of the job that ended: how long it waited, and how long it ran."""
        now = time.perf_counter()
        since = self.since.pop(job, now)
        began = job.started or now
        if not self.heard:  # until then processes were started, if there were none
            self.heard = True
            if began - self.begun > STARTING:
                self.events.append(Event("worker processes", self.begun, began - self.begun, "start", "workers"))
        shown = data.get("row", {}).get("status", "ok" if status == "done" else status)
        if began - since > 1e-3:
            self.events.append(Event(name, since, began - since, "queue", job.track or job.where, asked.label))
        self.events.append(Event(name, began, now - began, kind, job.track or job.where, asked.label, shown))
