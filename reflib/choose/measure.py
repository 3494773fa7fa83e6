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
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import MeasureError
from ..ir.data import from_data
from ..ir.program import Program, View
from ..logs import get as logger
from ..options import Options
from . import correct
from .decision import Candidate
from .inputs import (
    MIB,
    InputSpec,
    Maker,
    copy_of,
    extent,
    fingerprint,
    first_line,
    free_bytes,
    is_out_of_memory,
    l2_bytes,
    main_device,
    make_inputs,
    rotate,
    storage_of,
    weight_copies,
)
from .request import Limits, Request, Result, request
from .timing import (
    Call,
    CaptureFailed,
    Clock,
    EventClock,
    GraphClock,
    Sampler,
    Samples,
    WallClock,
    interleave,
    side_stream,
)
from .winner import NOISE, decide

__all__ = [
    "Build", "Candidate", "DeviceLost", "InputSpec", "Limits", "Request", "Result", "Session", "measure", "request",
]  # fmt: skip

Build = Callable[[Program, Options], Call]

DROP = 1.5  # after the short round, who is so many times slower than the best is out
SHORT_ROUNDS = 3
FEWEST_ROUNDS = 5
MOST_PAIRS = 60
FEW = 16  # weights of less than a sixteenth of all bytes are few
LOST = (  # what CUDA says from then on, of everything, in this process
    "illegal memory access", "misaligned address", "unspecified launch failure", "device-side assert",
    "illegal instruction", "ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "LAUNCH_FAILED", "CUDA_ERROR_ASSERT",
    "ILLEGAL_INSTRUCTION", "hardware stack error", "invalid program counter",
)  # fmt: skip
POISON_BLOCKS = 32  # free blocks of each result's size that are filled before a checked call ...
POISON_BYTES = 64 * MIB  # ... and of all together, beyond one block each


# -- all of it --------------------------------------------------------------------------------------
@dataclass
class _Entry:
    """A candidate on its way."""

    name: str
    program: Program | None = None
    call: Call | None = None
    status: str = "ok"
    why: str = ""
    error: float | None = None
    warm: Samples | None = None
    cold: Samples | None = None
    tried: bool = False
    dropped: bool = False

    @property
    def time(self) -> Samples | None:
        return self.cold or self.warm

    def say(self, what: str) -> None:
        self.why = "; ".join(filter(None, (self.why, what)))

    def fail(self, status: str, why: str) -> None:
        self.status, self.why, self.warm, self.cold = status, why, None, None

    def row(self) -> Candidate:
        t, warm, cold = (None if s is None else s.median * 1e6 for s in (self.time, self.warm, self.cold))
        spread = None if self.time is None else self.time.spread
        return Candidate(self.name, self.status, t, warm, cold, spread, self.error, self.why, dropped=self.dropped)


@dataclass
class _Bench:
    """The shared things: arguments, positions of inputs that programs write, untouched copies of those."""

    request: Request
    device: torch.device
    args: list[Any]
    mutated: list[int]
    pristine: dict[int, torch.Tensor]
    output_bytes: list[int]
    room: int
    deadline: float
    make: Callable[[], list[Any]]
    pulse: Callable[[], None] = lambda: None  # called before every sample: this process is alive
    own: list[correct.Error] | None = None  # the default's errors
    marks: dict[int, int] | None = None  # fingerprints of the inputs that are only read

    def restore(self) -> None:
        for i, t in self.pristine.items():
            storage_of(self.args[i]).copy_(storage_of(t))

    def arguments(self) -> list[Any]:
        """For one call: what it writes is a copy."""
        return [copy_of(self.pristine[i]) if i in self.mutated else a for i, a in enumerate(self.args)]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def recover(self) -> None:
        """After an error: what it held is free again for the others."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


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
        self.entries: dict[str, _Entry] = {}
        self.bench: _Bench | None = None
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
        e = self.entries[row.name] = _Entry(row.name, tried=True)
        e.program = _decoded(self.request, row.name, self.constants)
        e.fail(row.status, row.why)

    def open(self) -> Candidate:
        """Make inputs and reference, try the default; its row. Without room for them nothing can be tried."""
        with self._working() as deadline:
            default = self._entry(self.request.default)
            self._entry(self.request.reference)
            known = [e for e in self.entries.values() if e.program is not None]
            if known:
                made = _prepare(self.request, known, self.makers, self.device, deadline)
                self.bench, self.why = (None, made) if isinstance(made, str) else (made, "")
            if self.bench is None:
                return self._row(default)
            self.bench.pulse = self.pulse
            marks = _marks(self.bench)
            theirs = _results(self.bench, default, marks)
            ref = _reference(self.bench, self.entries[self.request.reference].program, theirs and theirs[0])
            if ref is not None and theirs is not None:
                _judge(self.bench, default, theirs, ref, None)
            self.judged = ref, theirs[0] if theirs is not None and default.status == "ok" else None
            self.clock = self.clock or _clock(self.device, self.request.graph_timing)
            self.sets, self.note = _sets(self.bench)
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
            results = _results(self.bench, e, _marks(self.bench))
            if results is None:
                return self._row(e)
            if ref is None:
                e.fail("error", "nothing to check it against: neither the reference nor the default ran")
            else:
                _judge(self.bench, e, results, ref, own)
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

    def _entry(self, name: str) -> _Entry:
        if name not in self.entries:
            self.entries[name] = _built(self.request, name, self.build, self.constants)
        return self.entries[name]

    def _row(self, e: _Entry) -> Candidate:
        if self.bench is None and self.why and e.status == "ok" and e.time is None:
            e.fail("skipped", self.why)
        return e.row()

    def _time(self, e: _Entry) -> None:
        """A short round, warm and cold; none for who was too slow for more than one call."""
        if e.status != "ok" or e.time is not None or self.bench is None:
            return
        assert self.clock is not None
        found, self.clock = _samplers(self.bench, e, self.sets, self.clock)
        self.samplers |= found
        short = interleave(found, SHORT_ROUNDS, 1, self.bench.deadline)
        if e.status == "ok":
            e.warm, e.cold = short[e.name, "warm"], short.get((e.name, "cold"))
            e.say(self.note)

    def _best(self) -> float:
        return min((e.time.median for e in self.entries.values() if e.time is not None), default=0.0)

    def _near(self, e: _Entry, best: float) -> bool:
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
        stay = {key: self.samplers[key] for key in self._finalists().values()}
        self.samplers = dict(stay)  # and so the graphs of those that are out are gone
        for (name, what), samples in interleave(stay, self.request.limits.rounds, FEWEST_ROUNDS, deadline).items():
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


def _seed(device: torch.device, seed: int) -> None:
    """NB: ``torch.manual_seed`` would reach generators that nobody puts back: those of every other device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def _decoded(request: Request, name: str, constants: Mapping[str, Any]) -> Program:
    data = request.programs[name]
    return from_data(data, {c: constants[c] for c in data["constants"] if c in constants})


def _built(request: Request, name: str, build: Build, constants: Mapping[str, Any]) -> _Entry:
    entry = _Entry(name)
    try:
        entry.program = _decoded(request, name, constants)
        if len(entry.program.inputs) != len(request.inputs):
            raise MeasureError(f"it takes {len(entry.program.inputs)} arguments, the request has {len(request.inputs)}")
        options = Options.make(request.options | request.patches.get(name, {}))
        entry.call = build(entry.program, options.but(autotune="off"))
    except Exception as e:
        entry.fail("error", first_line(e))
    return entry


def _prepare(
    request: Request, entries: list[_Entry], makers: Mapping[str, Maker], device: torch.device, deadline: float
) -> _Bench | str:
    """Make the inputs; why not, if there is no room for them."""
    specs = request.inputs
    programs = [e.program for e in entries if e.program is not None]
    mutated = sorted(
        i
        for i, s in enumerate(specs)
        if s.is_tensor and any(p.inputs[i] in n.writes() for p in programs for n in p.nodes)
    )
    outputs = [v for v in programs[0].outputs if isinstance(v, View)]
    output_bytes = [_view_bytes(v, request.sizes) for v in outputs]
    need = sum(s.nbytes for s in specs) + 2 * sum(specs[i].nbytes for i in mutated) + 3 * sum(output_bytes)
    limit = request.limits.memory
    if limit is None:
        limit = min(2048 * MIB, free_bytes(device) // 2)

    def make() -> list[Any]:
        _seed(device, request.seed)
        return make_inputs(specs, request.seed, makers)

    if need > limit:
        return f"measuring needs {need / MIB:.1f} MiB, the limit is {limit / MIB:.1f} MiB"
    try:
        args = make()
        pristine = {i: copy_of(args[i]) for i in mutated}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return "out of memory when the inputs were made"
    return _Bench(request, device, args, mutated, pristine, output_bytes, limit - need, deadline, make)


def _view_bytes(v: View, sizes: dict[str, int]) -> int:
    try:
        shape, strides = ([int(e.evaluate(sizes)) for e in es] for es in (v.shape, v.strides))
    except KeyError:  # a size that a call will say
        return 0
    return extent(shape, strides) * v.dtype.itemsize


# -- checking ---------------------------------------------------------------------------------------
def _marks(bench: _Bench) -> dict[int, int]:
    """Fingerprints of the inputs that nobody may write to."""
    if bench.marks is None:
        bench.marks = {
            i: fingerprint(a) for i, a in enumerate(bench.args) if i not in bench.mutated and torch.is_tensor(a)
        }
    return bench.marks


def _results(bench: _Bench, entry: _Entry, marks: dict[int, int]) -> list[list[Any]] | None:
    """What each of two calls returns, then the inputs it mutates; None if one failed (which is noted). The second is
    timed. Two, for a result that is right only by what its memory held before, or only sometimes."""
    if entry.call is None:
        return None
    results, seconds = [], 0.0
    try:
        for _ in range(2):
            args = bench.arguments()
            _poison(bench)
            _seed(bench.device, bench.request.seed)
            bench.wait()
            start = time.perf_counter()
            results.append([*entry.call(list(args)), *(args[i] for i in bench.mutated)])
            bench.wait()
            seconds = time.perf_counter() - start
        if any(fingerprint(bench.args[i]) != mark for i, mark in marks.items()):
            bench.args[:] = bench.make()
            entry.fail("wrong", "it writes to an input that the program only reads")
            return None
        if 8 * seconds > bench.request.limits.candidate_seconds:
            entry.warm, entry.why = Samples((seconds,)), "slow: timed by a single call"
        return results
    except Exception as e:
        _failed(bench, entry, e)
        return None


def _poison(bench: _Bench) -> None:
    """Fill with ones (a NaN) what the allocator may hand out next, so that unwritten results show: not only the first
    free block of a result's size, which the call may use for something else, but many, and all held at once."""
    budget = min(POISON_BYTES, bench.room)
    each = max(1, min(POISON_BLOCKS, budget // max(1, sum(bench.output_bytes))))
    blocks = [torch.empty(n, dtype=torch.uint8, device=bench.device) for n in bench.output_bytes for _ in range(each)]
    for b in blocks:
        b.fill_(255)


def _reference(bench: _Bench, program: Program | None, default: list[Any] | None) -> correct.Reference | None:
    """``program`` in float64, in float32, or the default's results: the first that works and fits."""
    request = bench.request
    length = max((n for s in request.inputs for n in s.shape), default=1)
    if program is None:
        return None
    dtypes = [correct.dtype_of(program, o) for o in program.outputs]
    dtypes += [correct.dtype_of(program, program.inputs[i]) for i in bench.mutated]
    for wide in (torch.float64, torch.float32):
        try:
            if correct.wide_bytes(program, request.sizes, wide) > free_bytes(bench.device) // 2:
                continue
            _seed(bench.device, request.seed)
            values, after = correct.run_wide(program, bench.args, wide)
            values += [after[i] for i in bench.mutated]
            return correct.Reference(tuple(values), tuple(dtypes), str(wide).removeprefix("torch."), length)
        except Exception as e:
            logger("choose").info("no %s reference: %s", wide, first_line(e))
            if is_out_of_memory(e):
                bench.recover()
    return None if default is None else correct.Reference(tuple(default), tuple(dtypes), "default", length)


def _judge(
    bench: _Bench, entry: _Entry, calls: list[list[Any]], ref: correct.Reference, default: list[Any] | None
) -> None:
    """Note the entry's error, and whether it is wrong. ``calls``: the results of each. ``default``: the default's
    results, if those are right."""
    try:
        for got in calls:
            why = correct.mismatch(got, ref)
            if not why:
                found = correct.errors(got, ref, default)
                entry.error = max((entry.error or 0.0, *(e.relative for e in found)))
                if entry.name == bench.request.default:
                    why, bench.own = correct.judge_default(found), found
                else:
                    tf32 = entry.program is not None and correct.uses_tf32(entry.program)
                    own = bench.own if default is not None else None
                    why = correct.judge(found, own, correct.floors(ref, tf32))
            if why:
                entry.fail("wrong", why)
                return
    except Exception as e:
        _failed(bench, entry, e)


def _failed(bench: _Bench, entry: _Entry, e: Exception) -> None:
    if bench.device.type == "cuda" and any(words in str(e) for words in LOST):
        raise DeviceLost(first_line(e)) from e
    entry.fail("error", "out of memory" if is_out_of_memory(e) else first_line(e))
    if is_out_of_memory(e):
        bench.recover()


class DeviceLost(MeasureError):
    """A candidate left the device unusable for this process: nothing can be measured, or run, in it any more."""


# -- racing -----------------------------------------------------------------------------------------
def _clock(device: torch.device, graph_timing: bool) -> Clock:
    if device.type == "cuda":
        return GraphClock() if graph_timing else EventClock()
    return WallClock()


def _sets(bench: _Bench) -> tuple[dict[str, list[list[Any]]], str]:
    """What is timed -> argument lists to be used in turn, many if weights are to be cold; and a note if they are not
    quite. Weights of twice the L2 cache are cold by themselves. Those that are few beside the rest (a bias) stay warm:
    whether they are hardly shows, and a thousand copies would make every sample a thousand calls."""
    specs = bench.request.inputs
    sets = {"warm": [bench.args]}
    weights = sum(s.nbytes for i, s in enumerate(specs) if s.role == "weight" and i not in bench.mutated)
    if bench.device.type != "cuda" or FEW * weights < sum(s.nbytes for s in specs):
        return sets, ""
    l2 = l2_bytes(bench.device)
    copies = weight_copies(weights, bench.room, l2)
    try:
        turning = rotate(specs, bench.args, copies, set(bench.mutated))
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        bench.recover()
        copies, turning = 1, [bench.args]
    if copies * weights >= 2 * l2:
        return sets | {"cold": turning}, ""
    if copies == 1:
        return sets, "weights warm: no room for copies"
    return sets | {"cold": turning}, f"weights not quite cold: {copies} copies"


def _samplers(
    bench: _Bench, e: _Entry, sets: dict[str, list[list[Any]]], clock: Clock
) -> tuple[dict[tuple[str, str], Sampler], Clock]:
    """(candidate, warm or cold) -> sampler, and the clock in use: if the default cannot be captured as a graph, nobody
    is timed by one; another candidate that cannot is timed with its launches in."""
    assert e.call is not None
    try:
        bench.restore()
        try:
            found = {(e.name, what): clock.sampler(e.call, args) for what, args in sets.items()}
        except CaptureFailed as error:
            e.say(f"no CUDA graph ({error}): timed with launches in")
            events = EventClock()
            clock = events if e.name == bench.request.default else clock
            found = {(e.name, what): events.sampler(e.call, args) for what, args in sets.items()}
        return {key: _guarded(bench, e, sampler) for key, sampler in found.items()}, clock
    except Exception as error:
        _failed(bench, e, error)
        return {}, clock


def _guarded(bench: _Bench, entry: _Entry, sampler: Sampler) -> Sampler:
    """Mutated inputs are as they were before each sample; an error is the candidate's."""

    def sample() -> float:
        if entry.status != "ok":
            return math.inf
        try:
            bench.pulse()
            bench.restore()
            return sampler()
        except Exception as e:
            _failed(bench, entry, e)
            return math.inf

    return sample
