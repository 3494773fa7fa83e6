"""Tuning while the program runs: ``autotune="background"``, ``reflib.wait_for_tuning``, ``reflib.tuning_progress``.

A graph has two variants: *tuned*, whose predicate is that it is ready, and the fallback, compiled as with
``autotune="off"``. After the first call a thread sends the graph's choices to the workers, as "blocking" does before
it. When all are decided the thread takes the graph through the later stages once more and waits until every kernel is
compiled. The *next call* finds the tuned variant ready: it loads the kernels, on its own thread, and from then on they
run. A call during the capture of a CUDA graph runs the fallback; graphs captured earlier replay its kernels, so those
stay loaded.

The swap is one assignment: a call runs one variant, never half of each. Both have the same inputs, outputs, strides and
aliases, so a forward graph and its backward may swap at different times. Ranks of a process group swap a graph at the
same one of its calls (``ranks/swap.py``).

Nothing is measured in this process: a choice that no worker can measure (``autotune/isolation``) keeps its heuristic
variant. What has been measured when the program ends is in the store of decisions, and used by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from .autotune.pool import threads
from .errors import ReflibError
from .logs import get as logger
from .timeline import Event
from .wrap.host_ctypes import libcuda

if TYPE_CHECKING:
    from .autotune import Tuner

everything: WeakSet[Background] = WeakSet()
tunings: WeakKeyDictionary[Any, list[Background]] = WeakKeyDictionary()  # by what ``reflib.compile`` returned
files: dict[str, Background] = {}  # of packages, by path: the last one written there
_registering = threading.Lock()


class Background:
    """The tuning of one graph. ``state``: ``waiting`` for the first call, ``running``, ``ready`` to be swapped in,
    ``swapped``, ``unchanged`` (the heuristics were right) or ``failed``."""

    def __init__(self, stages: Any, tune: Callable[[Background], Any], turn: Any = None):
        """stages: the fallback's (``pipeline.Stages``). tune: compiles the graph again, tuned; adds to ``tuners``.
        turn: with other ranks (``ranks.swap.Turn``), or None."""
        self.stages, self._tune, self.turn = stages, tune, turn
        self.name = turn.name if turn else "alone"
        self.state, self.error, self.seconds = "waiting", "", 0.0
        self.tuners: list[Tuner] = []  # of its choices, and of its kernels' launches
        self.tuned: Any = None
        self.old: list[Any] = []  # fallbacks that were swapped out: captured graphs may replay their kernels
        self._lock, self._thread = threading.Lock(), None  # type: tuple[threading.Lock, threading.Thread | None]
        self.ended = threading.Event()
        with _registering:
            everything.add(self)

    def start(self) -> None:
        """Once; later calls do nothing."""
        with self._lock:
            if self._thread is None:
                self.state = "running"
                if self.turn is not None:
                    self.turn.queue()
                self._thread = threading.Thread(target=self._work, name="reflib-tuning", daemon=True)
                threads.add(self._thread)
                self._thread.start()

    def _work(self) -> None:
        start = time.perf_counter()
        try:
            _apart_from_captures()
            with self.turn.tuning() if self.turn else contextlib.nullcontext():
                tuned = self._tune(self)
            tuned.call.wait()
            ours, theirs = ([d.config or d.winner for d in x.decisions] for x in (tuned, self.stages))
            self.tuned = tuned
            self.state = "unchanged" if ours == theirs else "ready"
            if self.turn is not None and self.state == "unchanged":
                self.turn.say(0)
        except SystemExit:  # with the interpreter
            self.state = "failed"
        except BaseException as e:
            self.failed(f"{type(e).__name__}: {e}")
        finally:
            del self._tune  # it holds the program
            self.seconds = time.perf_counter() - start
            self.ended.set()

    def failed(self, why: str) -> None:
        """The fallback stays."""
        self.state, self.error = "failed", why
        logger("autotune").warning("tuning %s in the background failed: %s", self.stages.graph.name, why)
        if self.turn is not None:
            self.turn.say(why)


class TunedOrFallback:
    """A graph with two variants: the tuned one once it is ready, until then the fallback."""

    def __init__(self, fallback: Callable[[list], Any], background: Background):
        self._call, self.background = fallback, background
        self._undecided, self._lock = True, threading.Lock()
        self._numbers, self._loaded = itertools.count(1), False

    def __call__(self, args: list) -> Any:
        if self._undecided:
            return self._check(args)
        return self._call(args)

    def _check(self, args: list) -> Any:
        """The call that starts tuning, one before the tuned variant is ready, or the one that swaps it in."""
        b, number = self.background, next(self._numbers)
        if b.state == "waiting":
            result = self._call(args)
            b.start()
            return result
        if b.state == "ready" and not _capturing():
            with self._lock:
                if b.state == "ready" and self._load(b) and (b.turn is None or self._comes(b, b.turn, number)):
                    self._swap(b)
        if b.state in ("swapped", "unchanged", "failed"):
            self._undecided = False
        return self._call(args)

    def _load(self, b: Background) -> bool:
        """Before a rank promises to swap."""
        start = time.perf_counter()
        try:
            if not self._loaded:
                b.tuned.call.load()
                self._loaded = True
                b.stages.timeline.append(Event("swap", start, time.perf_counter() - start))
        except Exception as e:
            b.failed(f"its tuned kernels cannot be loaded: {type(e).__name__}: {e}")
        return self._loaded

    def _comes(self, b: Background, turn: Any, number: int) -> bool:
        try:
            if turn.comes(number):
                return True
        except ReflibError as e:
            if turn.together:  # the others may swap at this call
                raise
            turn.why = str(e)
        if turn.why:
            b.failed(turn.why)
        return False

    def _swap(self, b: Background) -> None:
        b.old.append(self._call)
        self._call = b.tuned.call
        b.state = "swapped"
        logger("autotune").info("%s: tuned kernels swapped in after %.1f s", b.stages.graph.name, b.seconds)


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _apart_from_captures() -> None:
    """A graph that the user captures in PyTorch's default mode, ``global``, is invalid once any thread allocates or
    loads something; what a thread in mode ``relaxed`` does, does not count."""
    if torch.cuda.is_initialized() and torch.version.hip is None:
        relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
        ctypes.CDLL(libcuda()).cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


# -- entry points -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Progress:
    """How far tuning is. ``done`` of ``total`` candidates; more may follow while something runs (a subprogram that an
    earlier winner changed). ``running``: choices being measured. ``finished``: nothing is left to do; tuned variants
    run from the next call on. ``failed``: why tuning a graph ended early. ``decisions``: what was decided so far."""

    done: int
    total: int
    running: tuple[str, ...]
    seconds: float
    finished: bool
    failed: tuple[str, ...] = ()
    decisions: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        state = "finished" if self.finished else f"running: {', '.join(self.running) or 'starting'}"
        failed = "".join(f"; failed: {why}" for why in self.failed)
        return f"{self.done} of {self.total} candidates, {self.seconds:.1f} s, {state}{failed}"

    def _repr_html_(self) -> str:
        from html import escape

        return f'<progress value="{self.done}" max="{max(1, self.total)}"></progress> {escape(repr(self))}'


def tuning_progress(compiled: Any = None) -> Progress:
    """How far tuning in the background is, for ``compiled`` (what ``reflib.compile`` returned, or a package's path) or
    for this process. Returns at once."""
    found = _tunings(compiled)
    counts = [t.count() for b in found for t in b.tuners]
    running = [label for b in found if b.state == "running" for t in b.tuners for label in t.running()]
    now = time.perf_counter()
    begun = [t.begun for b in found for t in b.tuners]
    finished = all(b.ended.is_set() for b in found)
    seconds = max((b.seconds for b in found), default=0.0) if finished else now - min(begun, default=now)
    return Progress(
        sum(done for done, _ in counts),
        sum(total for _, total in counts),
        tuple(dict.fromkeys(running)),
        seconds,
        finished,
        tuple(b.error for b in found if b.error),
        tuple(d for b in found if b.tuned is not None for d in b.tuned.decisions if len(d.candidates) > 1),
    )


def wait_for_tuning(compiled: Any = None, timeout: float | None = None) -> Progress:
    """Wait until tuning in the background has ended, at most ``timeout`` seconds; with a bar in a notebook. Tuning of
    graphs that have not been called yet starts. Tuned variants run from the next call on (with several ranks: from the
    one that they agree on).

    compiled: what ``reflib.compile`` returned, or a package's path; None, or what ``torch.compile`` returned: all that
        this process tunes.
    Returns the progress; ``finished`` is False after a timeout, which is no error. Failures are in ``failed``.
    """
    found = _tunings(compiled)
    for b in found:
        b.start()
    end = None if timeout is None else time.monotonic() + timeout
    with _bar() as show:
        for b in found:
            while not b.ended.wait(0.1 if end is None else min(0.1, max(0.0, end - time.monotonic()))):
                show(tuning_progress(compiled))
                if end is not None and time.monotonic() >= end:
                    return tuning_progress(compiled)
        progress = tuning_progress(compiled)
        show(progress)
    return progress


def _tunings(compiled: Any) -> list[Background]:
    found = None
    if isinstance(compiled, str | os.PathLike):
        one = files.get(os.path.realpath(compiled))
        return [] if one is None else [one]
    if compiled is not None:
        with contextlib.suppress(TypeError):  # an object without weak references was not made by reflib.compile
            found = tunings.get(compiled)
    with _registering:
        return list(everything if found is None else found)


def _after_fork() -> None:
    """A forked child has no tuning thread: the next call, or wait, there starts one."""
    global _registering
    _registering = threading.Lock()
    for b in list(everything):
        b._lock = threading.Lock()
        if b.state in ("waiting", "running"):
            b.state, b._thread, b.ended, b.tuners = "waiting", None, threading.Event(), []


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def _bar() -> Any:
    """In a notebook, a function that shows a Progress in one place; elsewhere it does nothing."""
    kernel = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if kernel is None or "IPKernelApp" not in kernel.config:
        yield lambda progress: None
        return
    from IPython.display import display

    handle = display(display_id=True)
    yield lambda progress: handle.update(progress)
