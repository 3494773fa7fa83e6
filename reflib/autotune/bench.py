"""What a measurement holds, and how one candidate is called, checked and made ready to be timed (for ``measure``)."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..errors import MeasureError
from ..ir.decision import Candidate, Key
from ..ir.program import Program, View
from ..logs import get as logger
from ..timing import Call, CaptureFailed, Clock, Sampler, Samples, event_clock, graph_clock, wall_clock
from ..worker import first_line
from . import correct
from .inputs import (
    MIB,
    Maker,
    copy_of,
    extent,
    fingerprint,
    free_bytes,
    is_out_of_memory,
    l2_bytes,
    make_inputs,
    rotate,
    storage_of,
    weight_copies,
)
from .request import Request

FEW = 16  # weights of less than a sixteenth of all bytes are few
LOST = (  # messages of CUDA errors after which every call in this process fails
    "illegal memory access", "misaligned address", "unspecified launch failure", "device-side assert",
    "illegal instruction", "ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "LAUNCH_FAILED", "CUDA_ERROR_ASSERT",
    "ILLEGAL_INSTRUCTION", "hardware stack error", "invalid program counter",
)  # fmt: skip
POISON_BLOCKS, ON_A_CPU = 32, 256  # free blocks of each result's size that are filled before a checked call ...
POISON_BYTES = 64 * MIB  # ... and of all together, beyond one block each


@dataclass
class Entry:
    """A candidate being measured."""

    key: Key
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
    def name(self) -> str:
        return str(self.key)

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
        return Candidate(self.key, self.status, t, warm, cold, spread, self.error, self.why, dropped=self.dropped)


@dataclass
class Bench:
    """What all candidates share: arguments, positions of inputs that programs write, untouched copies of those."""

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

    def restore(self) -> None:
        for i, t in self.pristine.items():
            storage_of(self.args[i]).copy_(storage_of(t))

    def arguments(self) -> list[Any]:
        """For one call: what it writes is a copy."""
        return [copy_of(self.pristine[i]) if i in self.mutated else a for i, a in enumerate(self.args)]

    @cached_property
    def marks(self) -> dict[int, int]:
        """Fingerprints of the inputs that are only read."""
        return {i: fingerprint(a) for i, a in enumerate(self.args) if i not in self.mutated and torch.is_tensor(a)}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def recover(self) -> None:
        """After an error: what it held is free again for the others."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def seed_all(device: torch.device, seed: int) -> None:
    """NB: ``torch.manual_seed`` would reach generators that are not put back: those of every other device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def allocated(
    request: Request, entries: list[Entry], makers: Mapping[str, Maker], device: torch.device, deadline: float
) -> Bench | str:
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
        seed_all(device, request.seed)
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
    return Bench(request, device, args, mutated, pristine, output_bytes, limit - need, deadline, make)


def _view_bytes(v: View, sizes: dict[str, int]) -> int:
    try:
        shape, strides = ([int(e.evaluate(sizes)) for e in es] for es in (v.shape, v.strides))
    except KeyError:  # a size that a call will say
        return 0
    return extent(shape, strides) * v.dtype.itemsize


# -- checking ---------------------------------------------------------------------------------------
def results_of(bench: Bench, entry: Entry) -> list[list[Any]] | None:
    """The results of each of two calls, then the inputs it mutates; None if one failed (which is noted). The second is
    timed. Two, for a result that is right only by what its memory held before, or only sometimes."""
    marks = bench.marks
    if entry.call is None:
        return None
    results, seconds = [], 0.0
    try:
        for _ in range(2):
            args = bench.arguments()
            _poison(bench)
            seed_all(bench.device, bench.request.seed)
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


def _poison(bench: Bench) -> None:
    """Fill with ones (a NaN) what the allocator may hand out next, so that unwritten results show: not only the first
    free block of a result's size, which the call may use for something else, but many, and all held at once."""
    budget = min(POISON_BYTES, bench.room)
    most = ON_A_CPU if bench.device.type == "cpu" else POISON_BLOCKS  # malloc takes any that is large enough
    each = max(1, min(most, budget // max(1, sum(bench.output_bytes))))
    blocks = [torch.empty(n, dtype=torch.uint8, device=bench.device) for n in bench.output_bytes for _ in range(each)]
    for b in blocks:
        b.fill_(255)


def reference_of(bench: Bench, program: Program | None, default: list[Any] | None) -> correct.Reference | None:
    """The first that works and fits: ``program`` in float64, in float32, or the default's results."""
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
            seed_all(bench.device, request.seed)
            values, after = correct.run_wide(program, bench.args, wide)
            values += [after[i] for i in bench.mutated]
            return correct.Reference(tuple(values), tuple(dtypes), str(wide).removeprefix("torch."), length)
        except Exception as e:
            logger("autotune").info("no %s reference: %s", wide, first_line(e))
            if is_out_of_memory(e):
                bench.recover()
    return None if default is None else correct.Reference(tuple(default), tuple(dtypes), "default", length)


def judge(
    bench: Bench, entry: Entry, calls: list[list[Any]], ref: correct.Reference, default: list[Any] | None
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


def _failed(bench: Bench, entry: Entry, e: Exception) -> None:
    if bench.device.type == "cuda" and any(words in str(e) for words in LOST):
        raise DeviceLost(first_line(e)) from e
    entry.fail("error", "out of memory" if is_out_of_memory(e) else first_line(e))
    if is_out_of_memory(e):
        bench.recover()


class DeviceLost(MeasureError):
    """A candidate left the device unusable for this process: nothing can be measured, or run, in it any more."""


# -- racing -----------------------------------------------------------------------------------------
def clock_of(device: torch.device, graph_timing: bool) -> Clock:
    if device.type == "cuda":
        return graph_clock() if graph_timing else event_clock()
    return wall_clock()


def sets_of(bench: Bench) -> tuple[dict[str, list[list[Any]]], str]:
    """``warm`` or ``cold`` -> argument lists to be used in turn, many if weights are to be cold; and a note if they are
    not quite. Weights of twice the L2 cache are cold by themselves. Those that are few beside the rest (a bias) stay
    warm: it hardly shows, and a thousand copies would make every sample a thousand calls."""
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


def samplers_of(
    bench: Bench, e: Entry, sets: dict[str, list[list[Any]]], clock: Clock
) -> tuple[dict[tuple[str, str], Sampler], Clock]:
    """(candidate, warm or cold) -> sampler, and the clock in use: if the default cannot be captured as a graph, no
    candidate is timed by one; another candidate that cannot is timed with its launches in."""
    assert e.call is not None
    try:
        bench.restore()
        try:
            found = {(e.name, what): clock.sampler(e.call, args) for what, args in sets.items()}
        except CaptureFailed as error:
            e.say(f"no CUDA graph ({error}): timed with launches in")
            events = event_clock()
            clock = events if e.name == bench.request.default else clock
            found = {(e.name, what): events.sampler(e.call, args) for what, args in sets.items()}
        return {key: _guarded(bench, e, sampler) for key, sampler in found.items()}, clock
    except Exception as error:
        _failed(bench, e, error)
        return {}, clock


def _guarded(bench: Bench, entry: Entry, sampler: Sampler) -> Sampler:
    """Mutated inputs are restored before each sample; an error fails the candidate."""

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
