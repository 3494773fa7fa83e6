"""measure: which of several equivalent programs is the fastest right one, honestly.

1. **Build** all candidates (their kernels compile in the background meanwhile).
2. **Check** the results of two calls against a wider reference (``correct``): a wrong candidate never wins.
3. **Race** on shared inputs (``inputs``) with one clock (``reflib.timing``): on a GPU, CUDA-graph replay. A short round
   drops candidates that are much slower than the best; rounds over the rest give medians and spreads. Weights are cold
   (copies used in turn, twice the L2 cache in all), activations warm: ``cold_us`` decides where there are weights, else
   ``warm_us``.
   A race whose spreads say that the device was busy is run once more; the quieter one counts.
4. **Decide**: the fastest, if it beats the default by more than the spread and by ``min_speedup``. What was measured
   under load both times is not ``complete``: it holds for this program, and is not stored.

A ``Session`` does this for one request, one candidate at a time, in any order: ``open`` makes the inputs and the
reference and tries the default, ``try_one`` builds, checks and times one more, ``finish`` races those near the best.
``measure`` is all of it at once. The request is plain data, so another process does it unchanged (``bench``). Beside
inputs and reference, a session holds on the device the graphs of the candidates near the best so far: a hundred
candidates need no more memory than ten.

``Request.paired``: other work runs on the device meanwhile (tuning in the background). Every contender is then timed in
turn with the default, and the median of the pairs' ratios counts: whatever slows the device down slows both. Pairs are
added until the ratio is outside of its spread, or MOST_PAIRS.

Nothing of the user's is touched: not their tensors, random state, stream or device.

NB: TorchInductor times choices with ``do_bench`` (launches in, everything warm, no reference by default).
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..errors import MeasureError
from ..ir.data import from_data
from ..ir.decision import Candidate
from ..ir.program import Program
from ..logs import get as logger
from ..options import Options
from ..timing import Call, Clock, Sampler, Samples, interleave, side_stream
from ..worker import first_line
from . import correct
from .bench import Bench, DeviceLost, Entry, allocated, clock_of, judge, reference_of, results_of, samplers_of, sets_of
from .inputs import InputSpec, Maker, main_device
from .request import Limits, Request, Result, request
from .winner import NOISE, pick_winner

__all__ = ["Build", "DeviceLost", "InputSpec", "Limits", "Request", "Result", "Session", "measure", "request"]

Build = Callable[[Program, Options], Call]
Timed = tuple[str, str]  # a candidate's name, and ``warm`` or ``cold``

DROP = 1.5  # after the short round, candidates that are so many times slower than the best are dropped
LATE_DROP = 1.1  # after FEWEST_ROUNDS of the race
SHORT_ROUNDS = 3
FEWEST_ROUNDS = 5
MOST_PAIRS = 60
BUSY = 0.5  # of a time: with a wider spread a race is run again
TOO_BUSY = 1.0  # with a wider one nothing is stored


def measure(
    request: Request, build: Build, makers: Mapping[str, Maker] | None = None, clock: Clock | None = None
) -> Result:
    """Build, check, race, decide.

    build: compiles a whole program; returns a callable that takes a list of arguments and returns a tuple. It may
        return at once and compile in the background. makers: key -> function that is shown a tensor and makes another
        one like it. clock: in place of the device's own.

    A candidate's failure, out of memory included, is its row's ``status``; the others go on. Raises MeasureError for a
    request that makes no sense, for an input maker that fails, and while the user's stream is being captured;
    DeviceLost when a candidate leaves the device unusable.
    """
    session = Session(request, build, makers, clock)
    session.prepare()
    session.open()
    for name in request.programs:
        session.try_one(name)
    return session.finish()


class Session:
    """One request being measured; see the module's docstring. ``build``, ``makers``, ``clock`` are as
    for ``measure``. Raises what ``measure`` does."""

    def __init__(
        self, request: Request, build: Build, makers: Mapping[str, Maker] | None = None, clock: Clock | None = None
    ):
        for name in (request.default, request.reference):
            if name not in request.programs:
                raise MeasureError(f"no candidate {name!r}; the candidates are {', '.join(request.programs)}")
        self.request, self.build, self.makers = request, build, makers or {}
        self.device = main_device(request.inputs)
        self.clock = clock
        self.entries: dict[str, Entry] = {}
        self.bench: Bench | None = None
        self.sets: dict[str, list[list[Any]]] = {}
        self.samplers: dict[Timed, Sampler] = {}
        self.reference: correct.Reference | None = None
        self.default_results: list[Any] | None = None  # if they are right
        self.note, self.why, self.spent = "", "", 0.0
        self.pulse: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Begin to build all candidates: their kernels compile in the background."""
        with self._working():
            for name in self.request.programs:
                self._entry(name)

    def add(self, programs: Mapping[str, Any]) -> None:
        """More candidates of the request."""
        self.request = replace(self.request, programs={**self.request.programs, **programs})

    def given(self, row: Candidate) -> None:
        """A candidate that is not to be run: it crashed or hung in an earlier process."""
        e = self.entries[row.name] = Entry(row.key, tried=True)
        e.program = from_data(self.request.programs[row.name])
        e.fail(row.status, row.why)

    def open(self) -> Candidate:
        """Make inputs and reference, try the default; its row. Without room for them nothing can be tried."""
        with self._working() as deadline:
            default, reference = (self._entry(name) for name in (self.request.default, self.request.reference))
            built = [e for e in self.entries.values() if e.program is not None]
            if built:
                made = allocated(self.request, built, self.makers, self.device, deadline)
                self.bench, self.why = (None, made) if isinstance(made, str) else (made, "")
            if self.bench is None:
                return self._row(default)
            self.bench.pulse = self.pulse
            results = results_of(self.bench, default)
            self.pulse()
            self.reference = reference_of(self.bench, reference.program, results and results[0])
            if self.reference is not None and results is not None:
                judge(self.bench, default, results, self.reference, None)
            self.default_results = results[0] if results is not None and default.status == "ok" else None
            self.clock = self.clock or clock_of(self.device, self.request.graph_timing)
            self.sets, self.note = sets_of(self.bench)
            self._time(default)
            default.tried = True
            return self._row(default)

    def try_one(self, name: str) -> Candidate:
        """Build, check, and time by a short round."""
        with self._working() as deadline:
            e = self._entry(name)
            if not e.tried and self.bench is not None and e.status == "ok":
                e.tried = True
                if time.perf_counter() > deadline:
                    e.fail("skipped", f"the time limit of {self.request.limits.seconds:g} s came before it was checked")
                else:
                    self._check(e, self.bench)
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
                    self._race_in_quiet(deadline)
        busy = max((s.spread for s in self._raced().values()), default=0.0)
        rows = tuple(self._row(e) for e in self.entries.values())
        self.close()
        winner, reason = pick_winner(rows, self.request.default, self.request.min_speedup)
        logger("autotune").info("measured: %s", reason)
        used = "" if self.clock is None else self.clock.name
        if busy > TOO_BUSY:
            reason += f"; the device was busy (spread {busy:.0%}), so this is not stored"
        source = self.reference.source if self.reference else ""
        return Result(rows, winner, reason, used, source, self.spent, complete=busy <= TOO_BUSY)

    def close(self) -> None:
        """Release everything on the device."""
        self.samplers.clear()
        self.sets, self.bench, self.default_results = {}, None, None
        for e in self.entries.values():
            e.call = None
        if self.reference is not None:
            self.reference = correct.Reference((), (), self.reference.source, self.reference.length)

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
            self.entries[name] = self._built(name)
        return self.entries[name]

    def _built(self, name: str) -> Entry:
        request = self.request
        entry = Entry(request.key(name))
        try:
            entry.program = p = from_data(self.request.programs[name])
            if len(p.inputs) != len(request.inputs):
                raise MeasureError(f"it takes {len(p.inputs)} arguments, the request has {len(request.inputs)}")
            options = Options.make(request.options | request.patches.get(name, {}))
            entry.call = self.build(p, options.but(autotune="off"))
        except Exception as e:
            entry.fail("error", first_line(e))
        return entry

    def _row(self, e: Entry) -> Candidate:
        if self.bench is None and self.why and e.status == "ok" and e.time is None:
            e.fail("skipped", self.why)
        return e.row()

    def _check(self, e: Entry, bench: Bench) -> None:
        results = results_of(bench, e)
        if results is not None and self.reference is None:
            e.fail("error", "nothing to check it against: neither the reference nor the default ran")
        elif results is not None and self.reference is not None:
            judge(bench, e, results, self.reference, self.default_results)

    def _time(self, e: Entry) -> None:
        """A short round, warm and cold; none for a candidate that is too slow for more than one call."""
        if e.status != "ok" or e.time is not None or self.bench is None:
            return
        assert self.clock is not None
        found, self.clock = samplers_of(self.bench, e, self.sets, self.clock)
        self.samplers |= found
        short = _samples(found, SHORT_ROUNDS, 1, self.bench.deadline)
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
        self.samplers = {key: s for key, s in self.samplers.items() if self._near(self.entries[key[0]], best)}

    def _finalists(self) -> dict[str, Timed]:
        """Candidate to race -> the sampler that decides for it."""
        best = self._best()
        keys = {n: (n, "cold" if e.cold else "warm") for n, e in self.entries.items() if e.status == "ok" and e.time}
        return {n: key for n, key in keys.items() if key in self.samplers and self._near(self.entries[n], best)}

    def _raced(self) -> dict[Timed, Samples]:
        """What decides, of those that were raced."""
        return {key: s for key in self._finalists().values() if (s := getattr(self.entries[key[0]], key[1]))}

    def _race_in_quiet(self, deadline: float) -> None:
        self._race(deadline)
        first = self._raced()
        widest = max((s.spread for s in first.values()), default=0.0)
        if widest > BUSY and time.perf_counter() < deadline:
            self._race(deadline)
            if max((s.spread for s in self._raced().values()), default=0.0) > widest:
                for key, samples in first.items():
                    self._timed(key, samples)

    def _race(self, deadline: float) -> None:
        finalists = self._finalists().values()
        self.samplers = {key: self.samplers[key] for key in finalists}  # the graphs of those that are out are gone
        rounds = self.request.limits.rounds
        found = _samples(self.samplers, min(rounds, FEWEST_ROUNDS), FEWEST_ROUNDS, deadline)
        best = min((samples.median for samples in found.values()), default=0.0)
        last = {
            key: self.samplers[key]
            for key, samples in found.items()
            if samples.median <= LATE_DROP * best or key[0] == self.request.default
        }
        for key, more in _samples(last, rounds - FEWEST_ROUNDS, 0, deadline).items():
            found[key] = Samples(found[key].seconds + more.seconds)
        for key, samples in found.items():
            self._timed(key, samples)

    def _race_pairs(self, deadline: float) -> None:
        """Each finalist in turn with the default, until the ratio is clear. Its samples are then the default's median
        times each pair's ratio: what it would have taken on a device as busy as it was for the default."""
        keys = self._finalists()
        default = keys.pop(self.request.default, None)
        if default is None:
            return self._race(deadline)
        times: list[float] = []  # the default's
        pairs: dict[Timed, _Pairs] = {}
        for key in sorted(keys.values(), key=lambda key: self.entries[key[0]].time.median):  # type: ignore[union-attr]
            pairs[key] = p = _Pairs(self.samplers[key], self.samplers[default])
            while not p.clear() and (len(p.ratios) < FEWEST_ROUNDS or time.perf_counter() < deadline):
                if (seconds := p.take()) is None:
                    break
                times.append(seconds)
        if times and self.entries[default[0]].status == "ok":
            steady = statistics.median(times)
            self._timed(default, Samples((steady,) * len(times)))  # its spread is in the ratios'
            for key, p in pairs.items():
                if p.ratios:
                    self._timed(key, p.samples(steady))

    def _timed(self, key: Timed, samples: Samples) -> None:
        entry = self.entries[key[0]]
        if entry.status == "ok":
            setattr(entry, key[1], samples)


def _samples(samplers: Mapping[Timed, Sampler], rounds: int, least: int, deadline: float) -> dict[Timed, Samples]:
    found = interleave(samplers, rounds, deadline - time.perf_counter(), least)
    return {key: Samples(seconds) for key, seconds in found.items()}


class _Pairs:
    """Ratios of a contender's time to the default's, measured one after the other."""

    def __init__(self, mine: Sampler, default: Sampler) -> None:
        self.mine, self.default = mine, default
        self.ratios: list[float] = []

    def take(self) -> float | None:
        """One more pair, in the other order than the last; the default's seconds, None if one of them failed."""
        if len(self.ratios) % 2:
            theirs, mine = self.default(), self.mine()
        else:
            mine, theirs = self.mine(), self.default()
        if not math.isfinite(mine) or not math.isfinite(theirs):
            return None
        self.ratios.append(mine / theirs)
        return theirs

    def clear(self) -> bool:
        """Is the median ratio outside of its spread, or never going to be?"""
        n = len(self.ratios)
        if n < FEWEST_ROUNDS or n >= MOST_PAIRS:
            return n >= MOST_PAIRS
        middle, error = self._median()
        return abs(middle - 1) > error + NOISE or n >= FEWEST_ROUNDS * 3 and error < NOISE / 2

    def samples(self, base: float) -> Samples:
        """The ratio's median, known to within its error, as times."""
        middle, error = self._median()
        return Samples(tuple(base * middle * (1 + d) for d in (-error / 2, 0.0, error / 2)))

    def _median(self) -> tuple[float, float]:
        """The median of the ratios, and its error: two standard deviations, robustly."""
        middle = statistics.median(self.ratios)
        deviation = 1.4826 * statistics.median(abs(r - middle) for r in self.ratios)
        return middle, 2 * deviation / math.sqrt(len(self.ratios))


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
