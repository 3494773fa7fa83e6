"""measure: which of several equivalent programs is the fastest right one, honestly.

1. **Build** all candidates (their kernels compile in the background meanwhile).
2. **Check** what each returns in two calls against a wider reference (``correct``): a wrong candidate never wins.
3. **Race** on shared inputs (``inputs``) with one clock (``timing``): on a GPU, CUDA-graph replay. A short round drops
   who is much slower than the best, rounds over the rest give medians and spreads. Weights are cold (copies used in
   turn, twice the L2 cache in all), activations warm: ``cold_us`` decides where there are weights, else ``warm_us``.
4. **Decide**: the fastest, if it beats the default by more than the spread and by ``min_speedup``.

The request is plain data, so that another process can do all this unchanged. Nothing of the user's is touched: not
their tensors, random state, stream or device.

NB: TorchInductor times choices with ``do_bench`` (launches in, everything warm, no reference by default).
"""

from __future__ import annotations

import math
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
from .winner import decide

__all__ = ["Build", "Candidate", "InputSpec", "Limits", "Request", "Result", "measure", "request"]

Build = Callable[[Program, Options], Call]

DROP = 1.5  # after the short round, who is so many times slower than the best is out
SHORT_ROUNDS = 3
FEWEST_ROUNDS = 5
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
        return Candidate(self.name, self.status, t, warm, cold, spread, self.error, self.why)


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
    own: list[correct.Error] | None = None  # the default's errors

    def restore(self) -> None:
        for i, t in self.pristine.items():
            storage_of(self.args[i]).copy_(storage_of(t))

    def arguments(self) -> list[Any]:
        """For one call: what it writes is a copy."""
        return [copy_of(a) if i in self.mutated else a for i, a in enumerate(self.args)]

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
    request that makes no sense, for an input maker that fails, and while the user's stream is being captured.
    """
    start = time.perf_counter()
    for name in (request.default, request.reference):
        if name not in request.programs:
            raise MeasureError(f"no candidate {name!r}; the candidates are {', '.join(request.programs)}")
    device = main_device(request.inputs)
    with side_stream(device), _alone(device):
        entries = [_built(request, name, build, constants or {}) for name in request.programs]
        used = reference = ""
        bench = _prepare(request, entries, makers or {}, device, start + request.limits.seconds)
        if bench is not None:
            reference = _check(bench, entries)
            clock = clock or _clock(device, request.graph_timing)
            used = _race(bench, entries, clock)
        bench = None
    rows = tuple(e.row() for e in entries)
    winner, reason = decide(rows, request.default, request.min_speedup)
    logger("choose").info("measured: %s", reason)
    return Result(rows, winner, reason, used, reference, time.perf_counter() - start)


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


def _built(request: Request, name: str, build: Build, constants: Mapping[str, Any]) -> _Entry:
    entry = _Entry(name)
    try:
        data = request.programs[name]
        entry.program = from_data(data, {c: constants[c] for c in data["constants"] if c in constants})
        if len(entry.program.inputs) != len(request.inputs):
            raise MeasureError(f"it takes {len(entry.program.inputs)} arguments, the request has {len(request.inputs)}")
        options = Options.make(request.options | request.patches.get(name, {}))
        entry.call = build(entry.program, options.but(autotune="off"))
    except Exception as e:
        entry.fail("error", first_line(e))
    return entry


def _prepare(
    request: Request, entries: list[_Entry], makers: Mapping[str, Maker], device: torch.device, deadline: float
) -> _Bench | None:
    """Make the inputs, if there is room for them; else every candidate is skipped."""
    specs = request.inputs
    programs = [e.program for e in entries if e.program is not None]
    if not programs:
        return None
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
    why = f"measuring needs {need / MIB:.1f} MiB, the limit is {limit / MIB:.1f} MiB"

    def make() -> list[Any]:
        _seed(device, request.seed)
        return make_inputs(specs, request.seed, makers)

    if need <= limit:
        try:
            args = make()
            pristine = {i: copy_of(args[i]) for i in mutated}
            return _Bench(request, device, args, mutated, pristine, output_bytes, limit - need, deadline, make)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = "out of memory when the inputs were made"
    for e in entries:
        if e.status == "ok":
            e.fail("skipped", why)
    return None


def _view_bytes(v: View, sizes: dict[str, int]) -> int:
    try:
        shape, strides = ([int(e.evaluate(sizes)) for e in es] for es in (v.shape, v.strides))
    except KeyError:  # a size that a call will say
        return 0
    return extent(shape, strides) * v.dtype.itemsize


# -- checking ---------------------------------------------------------------------------------------
def _check(bench: _Bench, entries: list[_Entry]) -> str:
    """Call every candidate and judge it, the default first. Returns where the reference came from."""
    request = bench.request
    marks = {i: fingerprint(a) for i, a in enumerate(bench.args) if i not in bench.mutated and torch.is_tensor(a)}
    default = next(e for e in entries if e.name == request.default)
    theirs = _results(bench, default, marks)
    ref = _reference(bench, entries, None if theirs is None else theirs[0])
    if ref is not None and theirs is not None:
        _judge(bench, default, theirs, ref, None)
    own = theirs[0] if theirs is not None and default.status == "ok" else None
    for e in entries:
        if e is default or e.status != "ok":
            continue
        if time.perf_counter() > bench.deadline:
            e.fail("skipped", f"the time limit of {request.limits.seconds:g} s came before it was checked")
            continue
        results = _results(bench, e, marks)
        if results is None:
            continue
        if ref is None:
            e.fail("error", "nothing to check it against: neither the reference nor the default ran")
        else:
            _judge(bench, e, results, ref, own)
    return "" if ref is None else ref.source


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


def _reference(bench: _Bench, entries: list[_Entry], default: list[Any] | None) -> correct.Reference | None:
    """The reference program in float64, in float32, or the default's results: the first that works and fits."""
    request = bench.request
    program = next((e.program for e in entries if e.name == request.reference), None)
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
    entry.fail("error", "out of memory" if is_out_of_memory(e) else first_line(e))
    if is_out_of_memory(e):
        bench.recover()


# -- racing -----------------------------------------------------------------------------------------
def _clock(device: torch.device, graph_timing: bool) -> Clock:
    if device.type == "cuda":
        return GraphClock() if graph_timing else EventClock()
    return WallClock()


def _race(bench: _Bench, entries: list[_Entry], clock: Clock) -> str:
    """Time whoever is right: a short round for all, warm and cold, then rounds of what decides for those near the
    best (and for the default). Returns the clock's name."""
    request = bench.request
    live = {e.name: e for e in entries if e.status == "ok" and e.time is None}
    if not live:
        return clock.name
    sets, note = _sets(bench)
    samplers, clock = _samplers(bench, live, sets, clock)
    short = interleave(samplers, SHORT_ROUNDS, 1, bench.deadline)
    for name, e in live.items():
        if e.status == "ok":
            e.warm, e.cold = short[name, "warm"], short.get((name, "cold"))
            e.say(note)
    best = min((e.time.median for e in entries if e.time is not None), default=0.0)
    stay: dict[tuple[str, str], Sampler] = {}
    for name, e in live.items():
        if e.time is None:
            continue
        if e.time.median <= DROP * best or name == request.default:
            key = (name, "cold" if e.cold else "warm")
            stay[key] = samplers[key]
        else:
            e.say(f"out after a short round: {e.time.median / best:.1f}x the best's time")
    samplers.clear()  # and so the graphs of those that are out
    for (name, what), samples in interleave(stay, request.limits.rounds, FEWEST_ROUNDS, bench.deadline).items():
        if live[name].status == "ok":
            setattr(live[name], what, samples)
    return clock.name


def _sets(bench: _Bench) -> tuple[dict[str, list[list[Any]]], str]:
    """What is timed -> argument lists to be used in turn, many if weights are to be cold; and a note if they are not
    quite. Weights of twice the L2 cache are cold by themselves."""
    specs = bench.request.inputs
    sets = {"warm": [bench.args]}
    weights = sum(s.nbytes for i, s in enumerate(specs) if s.role == "weight" and i not in bench.mutated)
    if bench.device.type != "cuda" or not weights:
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
    bench: _Bench, live: dict[str, _Entry], sets: dict[str, list[list[Any]]], clock: Clock
) -> tuple[dict[tuple[str, str], Sampler], Clock]:
    """(candidate, warm or cold) -> sampler, and the clock in use: if the default cannot be captured as a graph, nobody
    is timed by one; another candidate that cannot is timed with its launches in."""
    out: dict[tuple[str, str], Sampler] = {}
    default = bench.request.default
    for name in sorted(live, key=lambda n: n != default):
        e = live[name]
        if time.perf_counter() > bench.deadline and name != default:
            e.fail("skipped", f"the time limit of {bench.request.limits.seconds:g} s came before it was timed")
            continue
        assert e.call is not None
        try:
            bench.restore()
            try:
                found = {(name, what): clock.sampler(e.call, args) for what, args in sets.items()}
            except CaptureFailed as error:
                e.say(f"no CUDA graph ({error}): timed with launches in")
                events = EventClock()
                clock = events if name == default else clock
                found = {(name, what): events.sampler(e.call, args) for what, args in sets.items()}
            out |= {key: _guarded(bench, e, sampler) for key, sampler in found.items()}
        except Exception as error:
            _failed(bench, e, error)
    return out, clock


def _guarded(bench: _Bench, entry: _Entry, sampler: Sampler) -> Sampler:
    """Mutated inputs are as they were before each sample; an error is the candidate's."""

    def sample() -> float:
        if entry.status != "ok":
            return math.inf
        try:
            bench.restore()
            return sampler()
        except Exception as e:
            _failed(bench, entry, e)
            return math.inf

    return sample
