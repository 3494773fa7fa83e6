"""measure: which of several equivalent programs is the fastest right one, honestly.

1. **Build** all candidates (their kernels compile in the background meanwhile).
2. **Check** what each returns in two calls against a wider reference (``correct``): a wrong candidate never wins.
3. **Race** on shared inputs (``inputs``) with one clock (``timing``): on a GPU, CUDA-graph replay. A short round drops
   who is much slower than the best, rounds over the rest give medians and spreads. Weights are cold (copies used in
   turn, twice the L2 cache in all), activations warm: ``cold_us`` decides where there are weights, else ``warm_us``.
4. **Decide**: the fastest, if it beats the default by more than the spread and by ``min_speedup``.

A ``Session`` does this for one request, a candidate at a time, in whatever order they come: ``open`` makes the inputs
and the reference and tries the default, ``try_one`` builds, checks and times one more, ``finish`` races those near the
best. ``measure`` is all of it at once. The request is plain data, so another process does it unchanged (``bench``).
What a session holds on the device, beside the inputs and the reference, are the graphs of those near the best so far:
a hundred candidates need no more memory than ten.

``Request.paired``: others work on the device meanwhile (tuning in the background). Every contender is then timed in
turn with the default, and what counts is the median of the pairs' ratios: whatever slows the device down slows both.
Pairs are added until the ratio is outside of its spread, or MOST_PAIRS.

Nothing of the user's is touched: not their tensors, random state, stream or device.

NB: TorchInductor times choices with ``do_bench`` (launches in, everything warm, no reference by default).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..errors import MeasureError
from ..ir.data import from_data
from ..ir.program import Program
from ..logs import get as logger
from ..options import Options
from . import correct
from .bench import (
    Bench,
    DeviceLost,
    Entry,
    allocated,
    clock_of,
    judge,
    marks_of,
    reference_of,
    results_of,
    samplers_of,
    sets_of,
)
from .decision import Candidate
from .inputs import InputSpec, Maker, first_line, main_device
from .request import Limits, Request, Result, request
from .timing import Call, Clock, Sampler, Samples, interleave, side_stream
from .winner import NOISE, decide

__all__ = [
    "Build", "Candidate", "DeviceLost", "InputSpec", "Limits", "Request", "Result", "Session", "measure", "request",
]  # fmt: skip

Build = Callable[[Program, Options], Call]

DROP = 1.5  # after the short round, who is so many times slower than the best is out
LATE_DROP = 1.1  # after FEWEST_ROUNDS of the race
SHORT_ROUNDS = 3
FEWEST_ROUNDS = 5
MOST_PAIRS = 60


def measure(
    request: Request,
    build: Build,
    makers: Mapping[str, Maker] | None = None,
    constants: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> Result:
    """Build, check, race, decide.

    build: compiles a whole program; returns a callable that takes a list of arguments and returns a tuple. It may
        return at once and compile in the background. makers: key -> function that is shown a tensor and makes another
        one like it. constants: what the programs hold by reference. clock: in place of the device's own.

    A candidate's failure, out of memory included, is its row's ``status``; the others go on. Raises MeasureError for a
    request that makes no sense, for an input maker that fails, and while the user's stream is being captured;
    DeviceLost when a candidate leaves the device unusable.
    """
    session = Session(request, build, makers, constants, clock)
    for name in request.programs:
        session.prepare(name)
    session.open()
    for name in request.programs:
        session.try_one(name)
    return session.finish()


class Session:
    """One request being measured; see the module's docstring. ``build``, ``makers``, ``constants``, ``clock`` are as
    for ``measure``. Raises what ``measure`` does."""

    def __init__(
        self,
        request: Request,
        build: Build,
        makers: Mapping[str, Maker] | None = None,
        constants: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ):
        for name in (request.default, request.reference):
            if name not in request.programs:
                raise MeasureError(f"no candidate {name!r}; the candidates are {', '.join(request.programs)}")
        self.request, self.build, self.makers, self.constants = request, build, makers or {}, constants or {}
        self.device = main_device(request.inputs)
        self.clock = clock
        self.entries: dict[str, Entry] = {}
        self.bench: Bench | None = None
        self.sets: dict[str, list[list[Any]]] = {}
        self.samplers: dict[tuple[str, str], Sampler] = {}
        self.judged: tuple[correct.Reference | None, list[Any] | None] = (None, None)
        self.note, self.why, self.spent = "", "", 0.0
        self.pulse: Callable[[], None] = lambda: None

    def prepare(self, name: str) -> None:
        """Begin to build a candidate, so that its kernels compile while others are looked at."""
        with self._working():
            self._entry(name)

    def add(self, name: str, program: dict[str, Any], patches: dict[str, Any] | None = None) -> None:
        """One more candidate for the request."""
        self.request.programs[name] = program
        if patches:
            self.request.patches[name] = patches

    def given(self, row: Candidate) -> None:
        """What is known of a candidate that is not to be run: it crashed or hung in an earlier process."""
        e = self.entries[row.name] = Entry(row.name, tried=True)
        e.program = _decoded(self.request, row.name, self.constants)
        e.fail(row.status, row.why)

    def open(self) -> Candidate:
        """Make inputs and reference, try the default; its row. Without room for them nothing can be tried."""
        with self._working() as deadline:
            default = self._entry(self.request.default)
            self._entry(self.request.reference)
            known = [e for e in self.entries.values() if e.program is not None]
            if known:
                made = allocated(self.request, known, self.makers, self.device, deadline)
                self.bench, self.why = (None, made) if isinstance(made, str) else (made, "")
            if self.bench is None:
                return self._row(default)
            self.bench.pulse = self.pulse
            marks = marks_of(self.bench)
            theirs = results_of(self.bench, default, marks)
            ref = reference_of(self.bench, self.entries[self.request.reference].program, theirs and theirs[0])
            if ref is not None and theirs is not None:
                judge(self.bench, default, theirs, ref, None)
            self.judged = ref, theirs[0] if theirs is not None and default.status == "ok" else None
            self.clock = self.clock or clock_of(self.device, self.request.graph_timing)
            self.sets, self.note = sets_of(self.bench)
            self._time(default)
            default.tried = True
            return self._row(default)

    def try_one(self, name: str) -> Candidate:
        """Build, check, and time by a short round."""
        with self._working() as deadline:
            e = self._entry(name)
            if e.tried or self.bench is None or e.status != "ok":
                return self._row(e)
            e.tried = True
            ref, own = self.judged
            if time.perf_counter() > deadline:
                e.fail("skipped", f"the time limit of {self.request.limits.seconds:g} s came before it was checked")
                return self._row(e)
            results = results_of(self.bench, e, marks_of(self.bench))
            if results is None:
                return self._row(e)
            if ref is None:
                e.fail("error", "nothing to check it against: neither the reference nor the default ran")
            else:
                judge(self.bench, e, results, ref, own)
            del results
            self._time(e)
            self._drop()
            return self._row(e)

    def finish(self) -> Result:
        """Race those near the best, and decide among all that were tried."""
        with self._working() as deadline:
            if self.bench is not None:
                best = self._best()
                for e in self.entries.values():
                    if e.time is not None and not self._near(e, best):
                        e.dropped = True
                        e.say(f"out after a short round: {e.time.median / best:.1f}x the best's time")
                if self.request.paired:
                    self._race_pairs(deadline)
                else:
                    self._race(deadline)
        rows = tuple(self._row(e) for e in self.entries.values())
        self.close()
        winner, reason = decide(rows, self.request.default, self.request.min_speedup)
        logger("choose").info("measured: %s", reason)
        ref = self.judged[0]
        used = "" if self.clock is None else self.clock.name
        return Result(rows, winner, reason, used, "" if ref is None else ref.source, self.spent)

    def close(self) -> None:
        """Give up everything on the device."""
        self.samplers.clear()
        self.sets, self.bench = {}, None
        for e in self.entries.values():
            e.call = None
        ref, _ = self.judged
        self.judged = (None if ref is None else correct.Reference((), (), ref.source, ref.length)), None

    # -- within ------------------------------------------------------------------------------------
    @contextmanager
    def _working(self) -> Iterator[float]:
        """Inside, this process works for the session; gives the deadline (perf_counter). Waiting does not count."""
        start = time.perf_counter()
        deadline = start + self.request.limits.seconds - self.spent
        try:
            with side_stream(self.device), _alone(self.device):
                if self.bench is not None:
                    self.bench.deadline = deadline
                yield deadline
        finally:
            self.spent += time.perf_counter() - start

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            self.entries[name] = _built(self.request, name, self.build, self.constants)
        return self.entries[name]

    def _row(self, e: Entry) -> Candidate:
        if self.bench is None and self.why and e.status == "ok" and e.time is None:
            e.fail("skipped", self.why)
        return e.row()

    def _time(self, e: Entry) -> None:
        """A short round, warm and cold; none for who was too slow for more than one call."""
        if e.status != "ok" or e.time is not None or self.bench is None:
            return
        assert self.clock is not None
        found, self.clock = samplers_of(self.bench, e, self.sets, self.clock)
        self.samplers |= found
        short = interleave(found, SHORT_ROUNDS, 1, self.bench.deadline)
        if e.status == "ok":
            e.warm, e.cold = short[e.name, "warm"], short.get((e.name, "cold"))
            e.say(self.note)

    def _best(self) -> float:
        return min((e.time.median for e in self.entries.values() if e.time is not None), default=0.0)

    def _near(self, e: Entry, best: float) -> bool:
        return e.name == self.request.default or e.time is not None and e.time.median <= DROP * best

    def _drop(self) -> None:
        """The graphs of those that are out."""
        best = self._best()
        for key in [k for k in self.samplers if not self._near(self.entries[k[0]], best)]:
            del self.samplers[key]

    def _finalists(self) -> dict[str, tuple[str, str]]:
        """Who is raced -> the sampler that decides for it."""
        best = self._best()
        keys = {n: (n, "cold" if e.cold else "warm") for n, e in self.entries.items() if e.status == "ok" and e.time}
        return {n: key for n, key in keys.items() if key in self.samplers and self._near(self.entries[n], best)}

    def _race(self, deadline: float) -> None:
        finalists = self._finalists().values()
        self.samplers = {key: self.samplers[key] for key in finalists}  # the graphs of those that are out are gone
        rounds = self.request.limits.rounds
        found = interleave(self.samplers, min(rounds, FEWEST_ROUNDS), FEWEST_ROUNDS, deadline)
        best = min((samples.median for samples in found.values()), default=0.0)
        last = {
            key: self.samplers[key]
            for key, samples in found.items()
            if samples.median <= LATE_DROP * best or key[0] == self.request.default
        }
        for key, more in interleave(last, rounds - FEWEST_ROUNDS, 0, deadline).items():
            found[key] = Samples(found[key].seconds + more.seconds)
        for (name, what), samples in found.items():
            if self.entries[name].status == "ok":
                setattr(self.entries[name], what, samples)

    def _race_pairs(self, deadline: float) -> None:
        """Each finalist in turn with the default, until the ratio is clear. Its samples are then the default's median
        times each pair's ratio: what it would have taken on a device as busy as it was for the default."""
        keys = self._finalists()
        base = self.entries[self.request.default]
        if base.name not in keys:
            return self._race(deadline)
        what = keys[base.name][1]
        pairs = {name: _Pairs() for name in keys if name != base.name}
        all_base: list[float] = []
        for name, p in sorted(pairs.items(), key=lambda item: self.entries[item[0]].time.median):  # type: ignore[union-attr]
            mine, theirs = self.samplers[name, keys[name][1]], self.samplers[base.name, what]
            while not p.clear() and (len(p.ratios) < FEWEST_ROUNDS or time.perf_counter() < deadline):
                first, second = (theirs, mine) if len(p.ratios) % 2 else (mine, theirs)
                seconds = [first(), second()]
                own, other = seconds if first is mine else seconds[::-1]
                if not math.isfinite(own) or not math.isfinite(other):
                    break
                p.ratios.append(own / other)
                all_base.append(other)
        if all_base and base.status == "ok":
            setattr(base, what, Samples(tuple(all_base)))
            for name, p in pairs.items():
                if p.ratios and self.entries[name].status == "ok":
                    setattr(self.entries[name], keys[name][1], p.samples(Samples(tuple(all_base)).median))
            steady = statistics.median(all_base)
            setattr(base, what, Samples((steady,) * len(all_base)))  # its spread is in the ratios'


class _Pairs:
    """Ratios of a contender's time to the default's, measured one after the other."""

    def __init__(self) -> None:
        self.ratios: list[float] = []

    def clear(self) -> bool:
        """Is the median ratio outside of its spread, or never going to be?"""
        n = len(self.ratios)
        if n < FEWEST_ROUNDS:
            return False
        if n >= MOST_PAIRS:
            return True
        middle = statistics.median(self.ratios)
        error = 2 * 1.4826 * statistics.median(abs(r - middle) for r in self.ratios) / math.sqrt(n)  # of the median
        return abs(middle - 1) > error + NOISE or n >= FEWEST_ROUNDS * 3 and error < NOISE / 2

    def samples(self, base: float) -> Samples:
        """The ratio's median, known to within its error, as times."""
        middle, n = statistics.median(self.ratios), len(self.ratios)
        error = 2 * 1.4826 * statistics.median(abs(r - middle) for r in self.ratios) / math.sqrt(n)
        return Samples(tuple(base * middle * (1 + d) for d in (-error / 2, 0.0, error / 2)))


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Without the caller's modes (tracing, autocast, gradients), and with the random state put back afterwards."""
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.random.fork_rng(devices))
        yield


def _decoded(request: Request, name: str, constants: Mapping[str, Any]) -> Program:
    data = request.programs[name]
    return from_data(data, {c: constants[c] for c in data["constants"] if c in constants})


def _built(request: Request, name: str, build: Build, constants: Mapping[str, Any]) -> Entry:
    entry = Entry(name)
    try:
        entry.program = _decoded(request, name, constants)
        if len(entry.program.inputs) != len(request.inputs):
            raise MeasureError(f"it takes {len(entry.program.inputs)} arguments, the request has {len(request.inputs)}")
        options = Options.make(request.options | request.patches.get(name, {}))
        entry.call = build(entry.program, options.but(autotune="off"))
    except Exception as e:
        entry.fail("error", first_line(e))
    return entry
