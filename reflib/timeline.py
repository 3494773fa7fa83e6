"""What ran when: every stage, compile, wait and measurement of a compilation, in whatever process.

All times are of ``time.perf_counter()``, which counts from the same moment in every process of a machine.

    Timeline        a list of Events: a table as text and in a notebook; ``summary()``
    chrome_trace    the same in the Trace Event Format, which Perfetto and chrome://tracing open
    Timed           an event of a running program, which ``tracing.py`` records and writes
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from . import atomic
from .logs import Event as Event

KINDS = {
    "stage": "a stage of the pipeline",
    "start": "a worker process starts",
    "compile": "a candidate is compiled",
    "measure": "a candidate is checked and timed",
    "queue": "a job waits for a worker",
    "wait": "the pipeline waits for decisions",
    "lock": "waiting for another process that tunes the same",
}
RUNNING = {
    "call": "a graph is called",
    "launch": "a kernel is launched (on a CPU: it runs), or an op of ATen is called",
    "profiler": "what torch.profiler saw on the host in such a call",
    "device": "a kernel runs",
    "kernel": "a kernel was generated",
}
WORK = ("stage", "compile", "measure")  # a track is busy during these
SHOWN = 60  # events that the table lists


@dataclass(frozen=True)
class Timed(Event):
    """Something that a clock was read around, of a kind in ``RUNNING``: it nests exactly. about: what a trace shows of
    it. flow: the same number for a launch on the host and for what it started on a device."""

    about: Mapping[str, Any] = field(default_factory=dict)
    flow: int = 0


class Timeline(list[Event]):
    """Events that show themselves as a table. Slices and sums of timelines are timelines."""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return Timeline(found) if isinstance(key, slice) else found

    def __add__(self, other: Iterable[Event]) -> Timeline:  # type: ignore[override]
        return Timeline([*self, *other])

    def only(self, *kinds: str) -> Timeline:
        """The events of these kinds."""
        return Timeline(e for e in self if e.kind in kinds)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max((e.end for e in self), default=0.0) - first_start(self)

    def summary(self) -> dict[str, dict[str, Any]]:
        """``events``: how many of each kind; ``seconds``: the sum of each kind; ``busy``: seconds in which a track
        worked and did not wait."""
        kinds = [k for k in KINDS if any(e.kind == k for e in self)]
        of_kind = {k: self.only(k) for k in kinds}
        tracks = dict.fromkeys(e.track for e in self if e.kind in WORK)
        return {
            "events": {k: len(events) for k, events in of_kind.items()},
            "seconds": {k: sum(e.seconds for e in events) for k, events in of_kind.items()},
            "busy": {t: busy_seconds([e for e in self if e.track == t]) for t in tracks},
        }

    def __repr__(self) -> str:
        heads, body = self._cells()
        widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
        sides = (">" if head.endswith("ms") else "<" for head in heads)
        form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
        lines = [form.format(*line).rstrip() for line in (heads, *body)]
        return "\n".join([*lines, *self._rest(), self._said()])

    def _repr_html_(self) -> str:
        heads, body = self._cells()
        head = "".join(f"<th>{escape(h)}</th>" for h in heads)
        rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in line) + "</tr>" for line in body)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return "".join([table, *(f"<p>{escape(line)}</p>" for line in (*self._rest(), self._said()))])

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        begin = first_start(self)
        body = [
            [f"{e.name} [{e.region}]" if e.region else e.name, e.kind, e.track, f"{(e.start - begin) * 1e3:.1f}",
             f"{e.seconds * 1e3:.1f}", e.status]
            for e in self[:SHOWN]
        ]  # fmt: skip
        return ["what", "kind", "track", "start, ms", "ms", "status"], body

    def _rest(self) -> list[str]:
        return [f"and {len(self) - SHOWN} more"] if len(self) > SHOWN else []

    def _said(self) -> str:
        found = self.summary()
        kinds = ", ".join(f"{n} {k} ({found['seconds'][k]:.2f} s)" for k, n in found["events"].items())
        return f"{self.seconds:.2f} s in all: {kinds}" if self else "no events"


def first_start(events: Iterable[Event]) -> float:
    return min((e.start for e in events), default=0.0)


def busy_seconds(events: Sequence[Event]) -> float:
    """Seconds in which at least one of ``events`` worked and none waited."""
    waits = [e for e in events if e.kind in ("wait", "lock")]
    work = [e for e in events if e.kind in WORK]
    return _covered([*work, *waits]) - _covered(waits)


def _covered(events: Iterable[Event]) -> float:
    """The length of the union."""
    total, reached = 0.0, float("-inf")
    for e in sorted(events, key=lambda e: e.start):
        total += max(0.0, e.end - max(e.start, reached))
        reached = max(reached, e.end)
    return total


def waiting(events: Iterable[Event]) -> list[tuple[float, int]]:
    """(moment, how many jobs wait from then on), at each change, from the events of kind "queue"."""
    changes: dict[float, int] = {}
    for e in events:
        if e.kind == "queue":
            changes[e.start] = changes.get(e.start, 0) + 1
            changes[e.end] = changes.get(e.end, 0) - 1
    depth, steps = 0, []
    for moment, change in sorted(changes.items()):
        depth += change
        if change:
            steps.append((moment, depth))
    return steps


# -- the Trace Event Format -------------------------------------------------------------------------
SLACK = 1_000_000  # ns: two events that overlap by less are neighbours, whose ends were noted a little late


def chrome_trace(events: Iterable[Event], begin: float | None = None) -> dict[str, Any]:
    """The events in the Trace Event Format: open the file at ui.perfetto.dev.

    One thread per track, with complete events (``X``) in µs after ``begin`` (None: the first start). A track whose
    events overlap without nesting gets a second thread, because a thread's events must nest. Waits for a worker overlap
    all the time: they are asynchronous events (``b``, ``e``) and a counter (``C``) of how many wait. An arrow (``s``,
    ``f``) goes from each launch that a profiler saw to what it started on the device (``Timed.flow``).
    """
    events = sorted(events, key=lambda e: (e.start, -e.seconds))
    begin = first_start(events) if begin is None else begin
    out: list[dict[str, Any]] = [_metadata("process_name", 0, name="reflib")]
    threads = _threads([e for e in events if e.kind != "queue"], begin)
    for tid, label in enumerate(threads):
        out += [_metadata("thread_name", tid, name=label), _metadata("thread_sort_index", tid, sort_index=tid)]
    for tid, spans in enumerate(threads.values()):
        for start, end, e in spans:
            out.append({**_head(e, "X", start), "tid": tid, "dur": (end - start) / 1e3})
            if isinstance(e, Timed) and e.flow:
                end_of_arrow = {"ph": "f", "bp": "e"} if e.kind == "device" else {"ph": "s"}
                at = {"pid": 1, "tid": tid, "ts": start / 1e3}
                out.append({"name": "launch", "cat": "launch", "id": e.flow, **at, **end_of_arrow})
    for number, e in enumerate(e for e in events if e.kind == "queue"):
        same = {"id": number, "tid": 0, "name": f"waits for {e.track}", "args": {"job": e.name, "region": e.region}}
        for phase, moment in (("b", e.start), ("e", e.end)):
            out.append({**_head(e, phase, _ns(moment, begin)), **same})
    for moment, depth in waiting(events):
        ts = _ns(moment, begin) / 1e3
        out.append({"name": "waiting", "ph": "C", "pid": 1, "tid": 0, "ts": ts, "args": {"jobs": depth}})
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _ns(moment: float, begin: float) -> int:
    return round((moment - begin) * 1e9)


def _metadata(what: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": tid, "args": args}


def _head(e: Event, phase: str, start: int) -> dict[str, Any]:
    args = e.about if isinstance(e, Timed) else {"region": e.region, "status": e.status}
    return {"name": e.name, "cat": e.kind, "ph": phase, "pid": 1, "ts": start / 1e3, "args": args}


_Span = tuple[int, int, Event]  # an event's place in a thread: start and end in ns after the first start


def _threads(events: Sequence[Event], begin: float) -> dict[str, list[_Span]]:
    """label -> spans, each within an earlier one of its thread or after it. ``events``: by start, longer first."""
    tracks: dict[str, list[_Lane]] = {track: [] for track in track_order(events)}
    for e in events:
        lanes = tracks[e.track]
        slack = 0 if isinstance(e, Timed) else SLACK
        if not any(lane.add(e, _ns(e.start, begin), _ns(e.end, begin), slack) for lane in lanes):
            lanes.append(_Lane())
            lanes[-1].add(e, _ns(e.start, begin), _ns(e.end, begin), slack)
    return {
        track if i == 0 else f"{track} ({i + 1})": lane.spans
        for track, lanes in tracks.items() for i, lane in enumerate(lanes)
    }  # fmt: skip


class _Lane:
    """A thread of the trace: its spans, and the ends of those that the next one may be within."""

    def __init__(self) -> None:
        self.spans: list[_Span] = []
        self.open: list[int] = []

    def add(self, e: Event, start: int, end: int, slack: int) -> bool:
        """As the next span, cut where it overlaps by up to ``slack``; False where it does not fit."""
        while self.open and self.open[-1] <= start + slack:
            start = max(start, self.open.pop())
        if self.open and end > self.open[-1] + slack:
            return False
        end = max(start, min(end, self.open[-1]) if self.open else end)
        self.open.append(end)
        self.spans.append((start, end, e))
        return True


def track_order(events: Iterable[Event]) -> list[str]:
    """The tracks: main first, then compile workers by number, then devices."""

    def place(track: str) -> tuple[int, int, str]:
        word, _, number = track.partition(" ")
        if track == "main":
            return 0, 0, ""
        return 1 if word == "compile" else 2, int(number) if number.isdigit() else 0, track

    return sorted({e.track for e in events}, key=place)


def write_chrome_trace(events: Iterable[Event], path: str | os.PathLike[str]) -> Path:
    """Write ``chrome_trace(events)`` to ``path``, all of it or nothing, and return the path. Raises OSError."""
    path = Path(path)
    atomic.write(path, json.dumps(chrome_trace(events), allow_nan=False))
    return path
