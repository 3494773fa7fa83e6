"""``Options(cuda_graphs=True)``: a graph's launches recorded once, and replayed by one call of the driver.

A **recording** is a CUDA graph (``torch.cuda.CUDAGraph``) of a forward, backward or inference graph, or of a *part* of
one between calls that cannot be recorded (``graph_parts`` cuts it): it reads and writes the same addresses at every
replay. So each input is one of

* *fixed*: it was where it is at the call before (parameters, a cache, what another recording left: a part's results,
  what a forward saved for its backward). The recording is for that address, which each call compares;
* *copied*: it moved at ``MOVES`` calls. Each replay copies it first into memory of the recording's own. Inputs that the
  graph writes to, and those in a recording's memory, are never copied: each address has a recording.

**Memory.** What a recording returns is in memory of its own, which only its next replay writes over. So it is replayed
only if no reference is left to what it returned last (by the storages' use counts; ``host_replay.c`` looks, replays and
makes the outputs in one call); else another one is made, at most ``RECORDINGS`` for a *signature*: the sizes and
numbers among the inputs, and the stream. An output that is an input, or a view of one, is made of the call's own input.
Results are eager's then, whatever the caller keeps or passes. (But ``Tensor.record_stream`` holds no replay back: wait
for what another stream reads before it is released.)

All other memory, which holds nothing between two replays, is one *pool* for all recordings of a stream, of whatever
function, forward or backward: replays on a stream follow one another, so no rule of what is alive is needed. For that
results must not be in the pool: recorded is a wrapper that is given them (``with_results``). Where a call returns a
result itself (convolution, attention), that recording has a pool of its own; so has each of a loaded package, in whose
file there is no such wrapper.

Dynamo's guards come before a call of what ``torch.compile`` made; nothing comes before that of an exported program or a
package. Its recordings check the arguments themselves (``Inputs.unchecked``), and only a call whose arguments the slow
path has checked is recorded.

A pool has a stream of its own too, on which recordings are made: PyTorch frees cuBLAS's workspace of a stream when any
graph recorded on it ends (pytorch issue 193402), so graphs of one stream must end together, or keep the same pool.

A call that no recording fits runs as without this option, and ``REFLIB_LOGS=cuda_graphs`` says why: one of the first
calls (a kernel is loaded by its first launch, which cannot be recorded), the first one of its sizes, more than
``RECORDINGS``, tuning that has not ended, a caller recording a graph. It also says into how many parts a graph is cut,
and around what.

NB: TorchInductor records all graphs into one pool, as a tree of what followed what: results lie in memory that other
graphs use, so what is alive at each node must be as it was, and an older call's results are overwritten.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..ir.expr import Sym
from ..ir.program import Program
from ..logs import get as logger
from ..options import Options
from ..plan.plan import bind_symbols
from ..timing import Graphs, side_stream
from . import host
from .graph_parts import Call, Chain, Part, build, cut, with_results

RECORDINGS, SIGNATURES = 8, 64
MOVES = {"backward": 6}  # what a forward saves is at rest once the forward is recorded
OWNED: set[int] = set()  # addresses of the storages that recordings return
as_view = torch._C._dynamo.guards._reinterpret_tensor  # without gradients
use_count: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]
_recording = threading.Lock()


def cuda_graphs(call: Callable[..., Any], what: Any, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Plugs into ``pipeline.AROUND``: around what a forward, backward or inference graph became."""
    if not options.cuda_graphs or options.target is not None or isinstance(what, torch.fx.GraphModule):
        return call
    parts = cut(what.scheduled, RECORDER.kind, what)
    if why := reason(what.scheduled, parts, options) or host.replays() is None and NO_EXTENSION:
        logger("cuda_graphs").info("the %s graph is not recorded: %s", what.graph.name, why)
        return call
    return Graphed(call, what, parts)


def reason(program: Program, parts: Sequence[Part], options: Options) -> str:
    """Why no call of this program can be recorded; "" if nothing is known against it."""
    devices = {b.device for b in program.buffers.values() if b.device.type == RECORDER.kind}
    if options.check_nan:
        return "check_nan looks at values after each kernel"
    if len(devices) > 1:
        return f"its tensors are on {len(devices)} devices"
    if not any(p.recorded for p in parts):
        return next((why for p in parts for why in p.why), "it has tensors elsewhere")
    return "" if devices else "it has no tensors"


class Recorder:
    """Of a GPU. (Tests have another, for a CPU.)"""

    kind = "cuda"

    def __init__(self) -> None:
        self._lanes: weakref.WeakValueDictionary[Any, Lane] = weakref.WeakValueDictionary()

    def stream(self, device: torch.device) -> int:
        return torch._C._cuda_getCurrentRawStream(device.index)

    def place(self, device: torch.device) -> tuple[int, int]:
        """(the index of the device, the current stream), which replays compare; (-1, 0) where there is none."""
        return device.index, self.stream(device)

    def is_busy(self) -> bool:
        """Is the caller recording?"""
        return torch.cuda.is_current_stream_capturing()

    def lane(self, device: torch.device, shared: bool) -> Any:
        """What recordings for the current stream are made on. shared: the one for all of them."""
        key = device.index, self.stream(device)
        found = self._lanes.get(key) if shared else None
        if found is None:
            found = Lane(device)
            if shared:
                self._lanes[key] = found
        return found

    def record(self, call: Call, args: list, lane: Any, shared: bool) -> tuple[Sequence[Any], Callable[[], Any], Any]:
        """(outputs, what replays, what has to stay alive). Nothing runs yet. Raises CaptureFailed, OutOfMemoryError."""
        outputs: list[Any] = []
        with _recording, side_stream(lane.device, lane.stream):
            if lane.graphs is None or not shared:
                lane.graphs = Graphs()
            graph = lane.graphs.capture(lambda: outputs.extend(call(list(args))))
        # (its class in Python only asks whether it is being debugged)
        return outputs, super(torch.cuda.CUDAGraph, graph).replay, (lane, lane.graphs)  # type: ignore[misc]


class Lane:
    """A stream to record on. ``graphs``: with the pool of memory that recordings share."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.graphs: Graphs | None = None


RECORDER = Recorder()
NO_EXTENSION = "what replays it is in reflib's C extension, which is not to be had here"


class Graphed:
    """A compiled graph: ``call`` until tuning has ended, then it, or a chain of its parts, with recordings.
    ``unchecked``: inputs that nothing looks at before, of an exported program; what replays it is then ``recorded``."""

    def __init__(self, call: Call, stages: Any, parts: Sequence[Part]):
        self._call, self._stages, self._parts = call, stages, parts
        self.unchecked: frozenset[int] = frozenset()
        self.quick = Quick()  # of the whole graph, if that is recorded as one
        self._background = getattr(stages.call, "background", None)
        self._run: Call | None = None

    def __call__(self, args: list) -> Sequence[Any]:
        if self._run is None:
            if self._background is not None and self._background.state not in ("swapped", "unchanged", "failed"):
                return self._call(args)
            self._run = self._made()
        return self._run(args)

    @property
    def recorded(self) -> Recorded | None:
        return self._run if isinstance(self._run, Recorded) else None

    def _made(self) -> Call:
        stages, parts, name = self._stages, self._parts, self._stages.graph.name
        if self._background is not None and self._background.state == "swapped":
            stages = self._background.tuned
            parts = cut(stages.scheduled, RECORDER.kind, stages)
        if len(parts) == 1:
            make, what = partial(_given_results, stages), f"the {name} graph"
            return _recorded(self._call, stages.scheduled, name, make, what, self.unchecked, self.quick)
        try:
            return _chain(stages, parts, name)
        except Exception as e:  # it runs as it did
            logger("cuda_graphs").warning("the %s graph is not recorded: %s", name, str(e).partition("\n")[0])
            return self._call


def _given_results(stages: Any, program: Program) -> Call:
    """``program``, as recorded: in Python, since a replay costs the host the same whatever printed it."""
    return build(program, stages.options.but(cuda_graphs=False, wrapper="python"), stages)


def _chain(stages: Any, parts: Sequence[Part], name: str) -> Call:
    if hasattr(stages.call, "wait"):
        stages.call.wait()  # the parts' kernels are the same: found in the cache
    recorded = [p for p in parts if p.recorded]
    text = "the %s graph is recorded in %d parts, of %d of its %d steps; around: %s"
    counts = len(recorded), sum(len(p.program.nodes) for p in recorded), len(stages.scheduled.nodes)
    logger("cuda_graphs").info(text, name, *counts, "; ".join(dict.fromkeys(w for p in parts for w in p.why)))
    options, make = stages.options.but(cuda_graphs=False), partial(_given_results, stages)
    calls: list[Call] = [build(p.program, options, stages) for p in parts]
    for k, p in enumerate(parts):
        if p.recorded:
            calls[k] = _recorded(calls[k], p.program, name, make, f"part {k + 1} of the {name} graph")
    return Chain(stages.scheduled, parts, calls)


def _recorded(
    call: Call, program: Program, name: str, make: Callable[[Program], Call], what: str,
    unchecked: frozenset[int] = frozenset(), quick: Quick | None = None,
) -> Recorded:  # fmt: skip
    return Recorded(call, inputs_of(program, unchecked), what, MOVES.get(name, 2), Results.of(program, make), quick)


class Recording:
    """One recorded call. ``run``: replays it for a list of inputs, which it empties, and returns the outputs; None if
    it does not fit them (``host_replay.c``). ``copied``: inputs that are copied into memory of the recording's own; the
    others are fixed. ``results``: memory that ``call`` is given for what it returns, after its inputs."""

    def __init__(
        self, call: Call, args: list, copied: list[int], results: list[torch.Tensor], lane: Any, shared: bool,
        inputs: Inputs,
    ):  # fmt: skip
        held = [_room(args[i]) for i in copied]
        into = [t for t, _ in held]
        mine = list(args)
        for i, (_, as_given) in zip(copied, held):
            mine[i] = as_given
        outputs, replay, self._alive = RECORDER.record(call, [*mine, *results], lane, shared)
        results.clear()
        made = tuple(_output(x, mine) for x in outputs)
        storages = list({s._cdata: s for x in outputs if (s := _own(x, mine))}.values())
        del outputs, mine, held
        counts = tuple((s._cdata, use_count(s._cdata), s) for s in storages)  # (they count themselves: kept)
        copy = (lambda given: torch._foreach_copy_(into, [_flat(given[i]) for i in copied])) if into else None
        letters = dict.fromkeys(inputs.numbers, "n") | dict.fromkeys(inputs.tensors, "f") | dict.fromkeys(copied, "c")
        kinds = "".join(letters.get(i, "-") for i in range(len(args)))
        sized = inputs.dynamic or inputs.unchecked
        layouts = [(*x.shape, *x.stride()) if sized and isinstance(x, torch.Tensor) else None for x in args]
        wanted = tuple(layout if isinstance(x, torch.Tensor) else x for layout, x in zip(layouts, args))
        replayed = host.replays()
        assert replayed is not None, NO_EXTENSION
        self.run = replayed(
            kinds.encode(), tuple(x.data_ptr() if kind == "f" else 0 for x, kind in zip(args, kinds)), wanted,
            tuple(x if i in inputs.unchecked else None for i, x in enumerate(args)), use_count, counts, copy, replay,
            made, call, *RECORDER.place(inputs.device),
        )  # fmt: skip
        owned = {s.data_ptr() for s in storages}
        OWNED.update(owned)
        weakref.finalize(self, OWNED.difference_update, owned)


@dataclass(frozen=True)
class Inputs:
    """What is known of a program's inputs, by their positions. ``written``: tensors that it writes to. ``dynamic``: do
    their sizes differ? ``unchecked``: those of a caller that nothing looks at before. (What is neither a tensor nor a
    number is not read.)"""

    tensors: tuple[int, ...]
    numbers: tuple[int, ...]
    written: frozenset[int]
    dynamic: bool
    device: torch.device
    unchecked: frozenset[int] = frozenset()


def inputs_of(program: Program, unchecked: frozenset[int] = frozenset()) -> Inputs:
    tensors = tuple(i for i, x in enumerate(program.inputs) if x in program.buffers)
    numbers = tuple(i for i in range(len(program.inputs)) if i not in tensors)
    writes = {b for n in program.nodes for b in n.writes()}
    written = frozenset(i for i in tensors if program.inputs[i] in writes)
    dynamic = any(e.symbols() for i in tensors for e in program.buffers[program.inputs[i]].shape)
    unchecked = unchecked.intersection((*tensors, *(i for i in numbers if isinstance(program.inputs[i], Sym))))
    return Inputs(tensors, numbers, written, dynamic, next(b.device for b in program.buffers.values()), unchecked)


class Results:
    """A program that is given memory for its results, after its inputs. ``make``: builds it, at its first call."""

    def __init__(self, program: Program, results: Sequence[Any], make: Callable[[Program], Call], given: Program):
        self._inputs, self._lets, self._results = program.inputs, bind_symbols(program), results
        self._make, self._given, self._call = make, given, None  # type: tuple[Any, Program, Call | None]

    @staticmethod
    def of(program: Program, make: Callable[[Program], Call]) -> Results | None:
        """None where it cannot be, or nothing would be shared."""
        kept = program.output_buffers()
        if not any(b.kind == "temp" and b.name not in kept for b in program.buffers.values()):
            return None
        found = with_results(program)
        return None if found is None else Results(program, found[1], make, found[0])

    def call(self, args: list) -> Sequence[Any]:
        if self._call is None:
            self._call = self._make(self._given)
        return self._call(args)

    def alone(self, args: list) -> Sequence[Any]:
        return self.call([*args, *self.memory(args)])

    def memory(self, args: list) -> list[torch.Tensor]:
        of = dict(zip(self._inputs, args))
        sizes = {x: of[x] for x in of if isinstance(x, Sym)}
        for let in self._lets:
            sizes[let.sym] = (getattr(of[let.buffer], let.what)(let.dim) - let.plus) // let.times
        known = [[[int(e.evaluate(sizes)) for e in es] for es in (b.shape, b.strides)] for b in self._results]
        return [torch.empty_strided(*n, dtype=b.dtype, device=b.device) for n, b in zip(known, self._results)]


class Quick:
    """``run`` replays the last recording that fitted, and turns gradients and autocast off for it; it returns None,
    and has done nothing, if that does not fit. (What calls a compiled graph has it too, and saves four calls.)"""

    __slots__ = ("run",)

    def __init__(self) -> None:
        self.run: Callable[[list], Any] = _none


class Recorded:
    """A compiled program, ``call``, of which recordings are made and replayed. ``given``: it, given memory for its
    results; that is recorded, in the shared pool. ``what``: it, for messages. ``most``: an input that has moved so
    often is copied."""

    def __init__(
        self, call: Call, inputs: Inputs, what: str, most: int = 2, given: Results | None = None,
        quick: Quick | None = None,
    ):  # fmt: skip
        self._call, self._what, self._given, self._most = call, what, given, most
        self.inputs = inputs
        self._moves, self._last = dict.fromkeys(inputs.tensors, 0), {}  # type: tuple[dict[int, int], dict[int, int]]
        self.recordings: dict[tuple, list[Recording]] = {}
        self._lanes: dict[int, Any] = {}  # per stream
        self.quick = quick or Quick()
        self._calls: dict[tuple, int] = {}  # of signatures, before they are recorded
        self.failed = False  # to be recorded: no further try
        self._lock, self._said = threading.Lock(), set()  # type: tuple[Any, set[str]]

    def __call__(self, args: list) -> Sequence[Any]:
        outputs = self.quick.run(args)
        if outputs is None:
            outputs = self._slow(args)
        return outputs

    def settled(self, args: list) -> bool:
        """Will there be no further recording of calls like this one?"""
        return self.failed or not self._has_room(self.recordings.get(self._key(args), ()))

    def close(self) -> None:
        """Give the recordings back. Results that are still referenced stay."""
        self.recordings, self.quick.run, self.failed = {}, _none, True

    def again(self, args: list) -> Sequence[Any] | None:
        """The result of any recording that fits, for inputs that it checks itself."""
        return self._by(self.recordings.get(self._key(args), ()), args)

    def _by(self, recordings: Sequence[Recording], args: list) -> Sequence[Any] | None:
        for recording in recordings:
            if (outputs := recording.run(args)) is not None:
                self.quick.run = recording.run
                return outputs
        return None

    def _key(self, args: list) -> tuple:
        """What calls with the same recordings have in common; (): these are not what it takes."""
        try:
            sizes = [args[i].shape for i in self.inputs.tensors if self.inputs.dynamic]
            key = (RECORDER.stream(self.inputs.device), *[args[i] for i in self.inputs.numbers], *sizes)
            hash(key)
            return key
        except (AttributeError, TypeError):
            return ()

    def _slow(self, args: list) -> Sequence[Any]:
        if self.failed or RECORDER.is_busy() or not self._lock.acquire(blocking=False):  # another thread's turn
            return self._call(args)
        try:
            outputs = self._replayed(args)
        finally:
            self._lock.release()
        return self._call(args) if outputs is None else outputs

    def _replayed(self, args: list) -> Sequence[Any] | None:
        """What a recording returns for this call, maybe a new one; None: it is to run as without recordings."""
        recordings = self.recordings.get(key := self._key(args), ())
        if (outputs := self._by(recordings, args)) is not None:
            return outputs
        number = self._calls.pop(key, 0)
        self._calls = dict([*self._calls.items()][-4 * SIGNATURES :]) | {key: number + 1}
        may = self._may_record(number, recordings, args)
        loads = self._given if number == 1 else None  # its kernels
        try:
            call = loads.alone if loads is not None else self._new(key, args).run if may else _none
        except Exception as e:  # it runs as it did
            self.failed = True
            logger("cuda_graphs").warning("%s is not recorded: %s", self._what, str(e).partition("\n")[0])
            return None
        return call(args)

    def _may_record(self, number: int, recordings: Sequence[Recording], args: list) -> bool:
        """Not in the first calls, and not before it is known which inputs move. ``number``: of earlier calls like it
        (sizes that differ at every call are not worth a recording each)."""
        last, self._last = self._last, {i: args[i].data_ptr() for i in self.inputs.tensors}
        moved = [i for i in self._may_be_copied(args) if last and last.get(i) != self._last[i]]
        for i in moved:
            self._moves[i] += 1
        if not number or any(self._moves[i] < self._most for i in moved):
            return self._no("it is one of the first of its sizes, or inputs are not where they were")
        if not {type(args[i]) for i in self.inputs.unchecked} <= {int, torch.Tensor, torch.nn.Parameter}:
            return self._no("an argument is of a subclass of torch.Tensor")
        return self._has_room(recordings)

    def _has_room(self, recordings: Sequence[Recording]) -> bool:
        if len(recordings) >= RECORDINGS:
            return self._no(f"{RECORDINGS} recordings are of other addresses, or what they returned is in use")
        return bool(recordings) or len(self.recordings) < SIGNATURES or self._no(f"{SIGNATURES} other sizes have some")

    def _may_be_copied(self, args: list) -> list[int]:
        places = {i: args[i].untyped_storage().data_ptr() for i in self.inputs.tensors}
        stay = OWNED | {places[i] for i in self.inputs.written}
        return [i for i, place in places.items() if place not in stay]

    def _new(self, key: tuple, args: list) -> Recording:
        copied = [i for i in self._may_be_copied(args) if self._moves[i] >= self._most]
        given, stream = self._given, key[0]
        lane = self._lanes[stream] = self._lanes.get(stream) or RECORDER.lane(self.inputs.device, given is not None)
        with torch.inference_mode(False), torch.no_grad():  # its results serve calls in any mode
            call, results = (self._call, []) if given is None else (given.call, given.memory(args))
            recording = Recording(call, args, copied, results, lane, given is not None, self.inputs)
        self.recordings.setdefault(key, []).append(recording)
        return recording

    def _no(self, why: str) -> bool:
        if why not in self._said:
            self._said.add(why)
            logger("cuda_graphs").info("calls of %s run unrecorded: %s", self._what, why)
        return False


# -- inputs and outputs -----------------------------------------------------------------------------------
def _flat(x: torch.Tensor) -> torch.Tensor:
    """``x``, or the memory it is spread over, if its elements share places (``expand``)."""
    if 0 in x.shape or torch._debug_has_internal_overlap(x) != 1:
        return x
    return x.as_strided((1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())),), (1,))


def _room(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(what ``_flat(x)`` is copied to, the same memory with the strides of ``x``)."""
    flat = _flat(x)
    into = torch.empty_strided(flat.shape, flat.stride(), dtype=x.dtype, device=x.device)
    return into, into if flat is x else into.as_strided(x.shape, x.stride())


def _input_of(x: torch.Tensor, args: list) -> int | None:
    """Which of ``args`` is ``x``, or else the first in whose storage it is, of the same dtype if there is one."""
    place = x.untyped_storage().data_ptr()
    held = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == place]
    return min(held, key=lambda i: (args[i] is not x, args[i].dtype != x.dtype)) if place and held else None


def _own(x: Any, args: list) -> torch.UntypedStorage | None:
    """The recording's storage that an output is in."""
    return x.untyped_storage() if isinstance(x, torch.Tensor) and _input_of(x, args) is None else None


def _output(x: Any, args: list) -> Any:
    """How an output of a call is made: a tensor, in whose memory it is; a number: that input; (value,); or a function
    of the call's inputs. ``args``: those of the recorded call."""
    if not isinstance(x, torch.Tensor):
        return (x,)
    i = _input_of(x, args)
    if i is None:
        return x
    if x is args[i]:
        return i
    sizes, strides, further = x.shape, x.stride(), x.storage_offset() - args[i].storage_offset()
    return lambda given: as_view(given[i], sizes, strides, further)


def _none(args: list) -> None:
    return None
