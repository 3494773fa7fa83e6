"""``Options(cuda_graphs=True)``: a graph's launches recorded once, and replayed by one call of the driver.

A **recording** is a CUDA graph (``torch.cuda.CUDAGraph``) of a whole forward, backward or inference graph: it reads and
writes the same addresses at every replay. So each input is one of

* *fixed*: it was where it is at the call before (parameters, a cache, what a recorded forward saved for its backward).
  The recording is for that address, which each call compares;
* *copied*: it moved at ``MOVES`` calls. Each replay copies it first into memory of the recording's own. Inputs that the
  graph writes to, and those in a recording's memory, are never copied: each address has a recording.

Outputs are in memory of the recording's own, which the next replay writes over. So a recording is replayed only if
no reference is left to what it returned last (by the storages' use counts); else another one is made, at most
``RECORDINGS`` for a *signature*: the sizes and numbers among the inputs, and the stream. An output that is an input, or
a view of one, is made of the call's own input. Results are eager's then, whatever the caller keeps or passes.

A call that no recording fits runs as without this option, and ``REFLIB_LOGS=cuda_graphs`` says why: one of the first
calls (a kernel is loaded by its first launch, which cannot be recorded), more than ``RECORDINGS``, tuning that has not
ended, a caller recording a graph. A graph that communicates, has work on a CPU, or a call that cannot be recorded (it
waits for the GPU, or is tagged ``cudagraph_unsafe``) is never recorded.

NB: TorchInductor lets recordings share memory in a tree of what followed what, copies out what is still alive, and cuts
a graph around calls that cannot be recorded. Here each recording has its own memory, and a graph is recorded whole.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ir.program import Extern, walk
from ..logs import get as logger
from ..options import Options

RECORDINGS, SIGNATURES = 8, 64
MOVES = {"backward": 6}  # what a forward saves is at rest once the forward is recorded
Call = Callable[[list], Sequence[Any]]
UNSAFE = {torch.Tag.cudagraph_unsafe, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
OWNED: set[int] = set()  # addresses of the storages that recordings return
use_count: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def cuda_graphs(call: Callable[..., Any], what: Any, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Plugs into ``pipeline.AROUND``: around what a forward, backward or inference graph became."""
    if not options.cuda_graphs or options.target is not None or isinstance(what, torch.fx.GraphModule):
        return call
    if why := reason(what.scheduled, options):
        logger("cuda_graphs").info("the %s graph is not recorded: %s", what.graph.name, why)
        return call
    return Recorded(call, what.scheduled, what.graph.name, getattr(what.call, "background", None))


def reason(program: Any, options: Options) -> str:
    """Why no call of this program can be recorded; "" if nothing is known against it."""
    devices = {b.device for b in program.buffers.values()}
    if others := sorted(str(d) for d in devices if d.type != RECORDER.kind):
        return f"it has tensors on {others[0]}"
    if len(devices) != 1:
        return f"its tensors are on {len(devices)} devices"
    if options.check_nan:
        return "check_nan looks at values after each kernel"
    for node in walk(program.nodes):
        if isinstance(node, Extern) and (found := UNSAFE.intersection(getattr(node.target, "tags", ()))):
            return f"{node.target} is tagged {found.pop()}"
        if isinstance(node, Extern) and getattr(node.target, "namespace", "") == "_c10d_functional":
            return "it communicates: ranks would record at different calls"
    return ""


class Recorder:
    """Of a GPU. (Tests have another, for a CPU.)"""

    kind = "cuda"

    def stream(self, device: torch.device) -> int:
        return torch._C._cuda_getCurrentRawStream(device.index)

    def is_busy(self) -> bool:
        """Is the caller recording?"""
        return torch.cuda.is_current_stream_capturing()

    def record(self, call: Call, args: list, device: torch.device) -> tuple[Sequence[Any], Callable[[], Any], Any]:
        """(outputs, what replays, what has to stay alive). Nothing runs yet. Raises CaptureFailed, OutOfMemoryError."""
        from ..timing import Graphs, side_stream

        outputs: list[Any] = []
        with side_stream(device):
            graphs = Graphs()
            graph = graphs.capture(lambda: outputs.extend(call(list(args))))
        return outputs, graph.replay, graphs


RECORDER = Recorder()


class Recording:
    """One recorded call. ``fixed``: (input, address). ``copied``: inputs, and ``into``: where they are copied to."""

    def __init__(self, call: Call, args: list, copied: list[int], device: torch.device):
        self.fixed = [(i, x.data_ptr()) for i, x in enumerate(args) if isinstance(x, torch.Tensor) and i not in copied]
        self.copied, held = copied, [_room(args[i]) for i in copied]
        self.into = [t for t, _ in held]
        mine = list(args)
        for i, (_, as_given) in zip(copied, held):
            mine[i] = as_given
        outputs, self.replay, self._alive = RECORDER.record(call, mine, device)
        self.outputs = [_output(x, mine) for x in outputs]
        self._storages = list({s._cdata: s for x in outputs if (s := _own(x, mine))}.values())
        del outputs, mine, held
        self._counts = [(s._cdata, use_count(s._cdata)) for s in self._storages]
        owned = {s.data_ptr() for s in self._storages}
        OWNED.update(owned)
        weakref.finalize(self, OWNED.difference_update, owned)

    def fits(self, args: list) -> bool:
        """Are the inputs where they were, and is nothing alive of what the last replay returned?"""
        for i, address in self.fixed:
            if args[i].data_ptr() != address:
                return False
        return self.is_free()

    def is_free(self) -> bool:
        for storage, count in self._counts:
            if use_count(storage) != count:
                return False
        return True

    def run(self, args: list) -> list[Any]:
        if self.copied:
            torch._foreach_copy_(self.into, [_flat(args[i]) for i in self.copied])
        self.replay()
        return [make(args) for make in self.outputs]


class Recorded:
    """A compiled graph, ``call``, of which recordings are made and replayed."""

    def __init__(self, call: Call, program: Any, name: str, background: Any = None):
        self._call, self._name, self._background = call, name, background
        self._tensors = [i for i, x in enumerate(program.inputs) if x in program.buffers]
        self._numbers = [i for i in range(len(program.inputs)) if i not in self._tensors]
        written = {b for n in program.nodes for b in n.writes()}
        self._written = {i for i in self._tensors if program.inputs[i] in written}
        self._dynamic = any(e.symbols() for i in self._tensors for e in program.buffers[program.inputs[i]].shape)
        self._device = next(iter(program.buffers.values())).device
        self._most = MOVES.get(name, 2)
        self._moves, self._last = dict.fromkeys(self._tensors, 0), {}  # type: tuple[dict[int, int], dict[int, int]]
        self.recordings: dict[tuple, list[Recording]] = {}
        self.failed = False  # to be recorded: no further try
        self._lock, self._said = threading.Lock(), set()  # type: tuple[Any, set[str]]

    def __call__(self, args: list) -> Sequence[Any]:
        if self.failed or RECORDER.is_busy() or not self._lock.acquire(blocking=False):  # another thread's turn
            return self._call(args)
        try:
            found = self._find(args)
            if found is None:
                return self._call(args)
            outputs = found.run(args)
        finally:
            self._lock.release()
        args.clear()  # as ``call`` does: what was saved for a backward is free
        return outputs

    def _find(self, args: list) -> Recording | None:
        key = (RECORDER.stream(self._device), *[args[i] for i in self._numbers])
        if self._dynamic:
            key += tuple(args[i].shape for i in self._tensors)
        recordings = self.recordings.get(key, ())
        for recording in recordings:
            if recording.fits(args):
                return recording
        return self._new(key, args) if self._may_record(recordings, args) else None

    def _may_record(self, recordings: Sequence[Recording], args: list) -> bool:
        """Not in the first calls, and not before it is known which inputs move."""
        if self._background is not None and self._background.state not in ("swapped", "unchanged", "failed"):
            return self._no("tuning has not ended")
        last, self._last = self._last, {i: args[i].data_ptr() for i in self._tensors}
        moved = [i for i in self._may_be_copied(args) if last and last.get(i) != self._last[i]]
        for i in moved:
            self._moves[i] += 1
        if not last or any(self._moves[i] < self._most for i in moved):
            return self._no("it is one of the first calls, or inputs are not where they were")
        if len(recordings) >= RECORDINGS:
            return self._no(f"{RECORDINGS} recordings are of other addresses, or what they returned is in use")
        return bool(recordings) or len(self.recordings) < SIGNATURES or self._no(f"{SIGNATURES} other sizes have some")

    def _may_be_copied(self, args: list) -> list[int]:
        places = {i: args[i].untyped_storage().data_ptr() for i in self._tensors}
        stay = OWNED | {places[i] for i in self._written}
        return [i for i, place in places.items() if place not in stay]

    def _new(self, key: tuple, args: list) -> Recording | None:
        copied = [i for i in self._may_be_copied(args) if self._moves[i] >= self._most]
        try:
            recording = Recording(self._call, args, copied, self._device)
        except Exception as e:  # the graph runs as it did
            self.failed = True
            logger("cuda_graphs").warning("the %s graph is not recorded: %s", self._name, str(e).partition("\n")[0])
            return None
        self.recordings.setdefault(key, []).append(recording)
        return recording

    def _no(self, why: str) -> bool:
        if why not in self._said:
            self._said.add(why)
            logger("cuda_graphs").info("calls of the %s graph run unrecorded: %s", self._name, why)
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
    """The first of ``args`` in whose storage ``x`` is."""
    place = x.untyped_storage().data_ptr()
    held = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == place]
    return held[0] if place and held else None


def _own(x: Any, args: list) -> torch.UntypedStorage | None:
    """The recording's storage that an output is in."""
    return x.untyped_storage() if isinstance(x, torch.Tensor) and _input_of(x, args) is None else None


def _output(x: Any, args: list) -> Callable[[list], Any]:
    """What makes an output of a call from the call's inputs. ``args``: those of the recorded call."""
    if not isinstance(x, torch.Tensor):
        return lambda given: x
    i = _input_of(x, args)
    if i is None:
        return lambda given: x.detach()
    if x is args[i]:
        return lambda given: given[i]
    sizes, strides, further = x.shape, x.stride(), x.storage_offset() - args[i].storage_offset()
    return lambda given: given[i].as_strided(sizes, strides, given[i].storage_offset() + further)
