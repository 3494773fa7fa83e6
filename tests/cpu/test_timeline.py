"""What ran when: on one clock, as a table, as a Chrome trace that a viewer can nest, and as a Gantt chart."""

import json
import time
from collections import defaultdict
from typing import Any

import pytest
import torch

import reflib
from reflib import lab, timeline
from reflib.errors import LabError
from reflib.lab import gantt_chart, trace_chart
from reflib.lab.moving import MIME
from reflib.timeline import Event, Timeline, chrome_trace, write_chrome_trace
from tests.processes import python


def small() -> Timeline:
    """Two stages; a wait in one of them; two candidates for one compile worker, of which the second crashed."""
    return Timeline(
        [
            Event("fuse", 10.0, 0.5),
            Event("autotune", 10.5, 4.5),
            Event("decisions", 11.0, 3.5, "wait"),
            Event("a", 11.0, 0.0, "queue", "compile 1", "op0"),
            Event("a", 11.0, 1.0, "compile", "compile 1", "op0", "ok"),
            Event("b", 11.0, 1.0, "queue", "compile 1", "op0"),
            Event("b", 12.0, 1.0, "compile", "compile 1", "op0", "crashed"),
            Event("a", 12.0, 0.25, "measure", "cpu", "op0", "ok"),
        ]
    )


def many(candidates: int = 160, workers: int = 8) -> Timeline:
    """About as many events as a program of six matrix products has."""
    events = [Event("autotune", 0.0, 30.0), Event("decisions", 0.1, 29.0, "wait")]
    for i in range(candidates):
        name, track = f"triton tiled 128x64x32 w4 s3 number {i}", f"compile {i % workers + 1}"
        begin, status = 0.5 + i // workers * 1.4, "hung" if i % 50 == 3 else "ok"
        events += [
            Event(name, 0.2, begin - 0.2, "queue", track, f"op{i % 6}"),
            Event(name, begin, 1.3, "compile", track, f"op{i % 6}"),
            Event(name, begin + 1.3 + i % workers * 0.1, 0.09, "measure", "cuda:0", f"op{i % 6}", status),
        ]
    return Timeline(events)


# -- the events -------------------------------------------------------------------------------------
def test_an_event_unpacks_as_a_stage_did():
    stages = [(name, start, seconds) for name, start, seconds in small()[:2]]
    assert stages == [("fuse", 10.0, 0.5), ("autotune", 10.5, 4.5)]


def test_processes_share_the_clock():
    program = "import time; print(time.perf_counter())"
    before = time.perf_counter()
    there = float(python(program))
    assert before < there < time.perf_counter()


def test_the_summary_counts_seconds_of_work_once():
    found = small().summary()
    assert found["events"] == {"stage": 2, "compile": 2, "measure": 1, "queue": 2, "wait": 1}
    assert found["seconds"]["compile"] == 2.0 and found["seconds"]["stage"] == 5.0
    assert found["busy"] == {"main": 1.5, "compile 1": 2.0, "cpu": 0.25}, "main waited for 3.5 of its 5 s"
    assert small().seconds == 5.0
    twice = Timeline([Event("a", 0.0, 2.0, "compile"), Event("b", 1.0, 2.0, "compile")])
    assert twice.summary()["busy"] == {"main": 3.0}
    assert Timeline().summary() == {"events": {}, "seconds": {}, "busy": {}} and Timeline().seconds == 0.0


def test_it_shows_itself_and_a_long_one_its_first_part():
    text = repr(small())
    assert "b [op0]" in text and "crashed" in text and text.endswith("2 queue (1.00 s), 1 wait (3.50 s)"), text
    assert "5.00 s in all: 2 stage (5.00 s), 2 compile (2.00 s), 1 measure (0.25 s)" in text
    html = Timeline([Event("<b>", 0.0, 1.0)])._repr_html_()
    assert "&lt;b&gt;" in html and "<b>" not in html
    assert f"and {len(many()) - timeline.SHOWN} more" in repr(many())
    assert repr(Timeline()).endswith("no events")
    assert isinstance(small()[1:], Timeline) and isinstance(small() + small(), Timeline)


def test_how_many_wait_is_known_at_each_moment():
    queue = [Event("a", 1.0, 2.0, "queue"), Event("b", 1.0, 3.0, "queue"), Event("c", 3.0, 1.0, "queue")]
    assert timeline.waiting(queue) == [(1.0, 2), (4.0, 0)]  # at 3 one left and another came
    assert timeline.waiting([Event("x", 0.0, 1.0, "compile")]) == []


def test_tracks_are_in_the_order_of_the_work():
    tracks = ("cuda:0", "compile 10", "compile 2", "cpu", "main")
    assert timeline.track_order([Event("e", 0, 1, track=t) for t in tracks]) == [
        "main", "compile 2", "compile 10", "cpu", "cuda:0",
    ]  # fmt: skip


def test_explain_gives_one():
    e = reflib.explain(lambda x: torch.relu(x) + 1, torch.randn(8), target="cpu", dynamic=False)
    assert isinstance(e.timeline, Timeline)
    assert [s.name for s in e.timeline.only("stage")] == ["lower", "fuse", "autotune", "schedule", "plan", "generate"]
    assert all(s.seconds >= 0 for s in e.timeline)


# -- the trace --------------------------------------------------------------------------------------
def check_trace(trace: dict[str, Any]) -> dict[int, str]:
    """What the Trace Event Format asks of the events used here. Returns the threads' names."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    names: dict[int, str] = {}
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    open_: dict[Any, float] = {}
    for e in trace["traceEvents"]:
        assert isinstance(e["name"], str) and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name", "thread_sort_index") and len(e["args"]) == 1
            if e["name"] == "thread_name":
                names[e["tid"]] = e["args"]["name"]
            continue
        assert isinstance(e["ts"], int | float) and e["ts"] >= 0
        if e["ph"] == "X":
            assert e["dur"] >= 0 and e["cat"] in timeline.KINDS and {"region", "status"} <= set(e["args"])
            spans[e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
        elif e["ph"] == "b":
            open_[e["cat"], e["id"], e["name"]] = e["ts"]
        elif e["ph"] == "e":
            assert open_.pop((e["cat"], e["id"], e["name"])) <= e["ts"]
        else:
            assert e["ph"] == "C" and all(isinstance(v, int | float) for v in e["args"].values())
    assert not open_ and set(spans) <= set(names)
    assert len(set(names.values())) == len(names)
    for thread in spans.values():
        stack: list[float] = []
        for start, end in sorted(thread, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= start + 1e-6:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-6, f"{(start, end)} overlaps what ends at {stack[-1]}"
            stack.append(end)
    return names


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X"]


def test_a_trace_has_every_event_in_microseconds_from_the_first_start():
    trace = chrome_trace(small())
    names = check_trace(trace)
    assert list(names.values()) == ["main", "compile 1", "cpu"]
    (crashed,) = (e for e in complete(trace) if e["args"]["status"] == "crashed")
    assert (crashed["name"], crashed["ts"], crashed["dur"]) == ("b", 2e6, 1e6)
    assert crashed["args"]["region"] == "op0" and names[crashed["tid"]] == "compile 1"
    assert len(complete(trace)) == 6, "the two waits for a worker are asynchronous"
    assert [e["args"]["job"] for e in trace["traceEvents"] if e["ph"] == "b"] == ["b", "a"]
    assert [(e["ts"], e["args"]["jobs"]) for e in trace["traceEvents"] if e["ph"] == "C"] == [(1e6, 1), (2e6, 0)]
    check_trace(chrome_trace([]))
    check_trace(chrome_trace(many()))


def test_what_overlaps_on_a_track_gets_a_thread_of_its_own():
    clash = [Event("a", 0.0, 2.0, "compile", "compile 1"), Event("b", 1.0, 2.0, "compile", "compile 1")]
    within = [Event("c", 0.5, 1.0, "measure", "compile 1")]
    names = check_trace(chrome_trace(clash + within))
    assert list(names.values()) == ["compile 1", "compile 1 (2)"]


def test_neighbours_that_overlap_a_little_share_a_thread():
    begin, long = 25_000.123456789, 0.1000000003
    late = (3e-7, 9e-4)  # what rounding does, and a thread that was slow to note an end
    events = [Event(str(i), begin + i * long, long + late[i % 2], "compile", "compile 1") for i in range(200)]
    trace = chrome_trace(events)
    assert list(check_trace(trace).values()) == ["compile 1"] and len(complete(trace)) == 200


def test_a_trace_is_written_whole(tmp_path):
    path = write_chrome_trace(small(), tmp_path / "trace.json")
    check_trace(json.loads(path.read_text(encoding="utf-8")))
    with pytest.raises(ValueError, match="NaN"):
        write_chrome_trace([Event("a", 0.0, 1.0), Event("b", 1.0, float("nan"))], path)
    check_trace(json.loads(path.read_text(encoding="utf-8")))


# -- the figure -------------------------------------------------------------------------------------
def test_a_gantt_chart_has_a_form_for_every_reader(capsys):
    found = lab.gantt(small(), caption="What ran when.")
    printed = capsys.readouterr().out
    assert "compile 1" in printed and "1 crashed" in printed and "40%" in printed, "a table with the same numbers"
    assert set(found._repr_mimebundle_()) == {MIME, "text/plain"}
    assert found.spec["usermeta"]["caption"] == "What ran when." and found.alt == found.spec["description"]
    assert "main: 2 stages, 1 wait, busy 30% of the time." in found.alt
    assert "compile 1: 2 compiles, busy 40% of the time; 1 crashed." in found.alt
    assert lab.gantt(small(), caption="What ran when.").spec == found.spec, "the same events give the same figure"


def test_a_gantt_charts_bars_are_the_events():
    found = lab.gantt(small(), caption="c")
    bars = found.spec["datasets"]["events"]
    assert len(bars) == 6 and {"name": "b", "kind": "compile", "track": "compile 1", "start": 2000, "ms": 1000,
                               "end": 3000, "region": "op0", "status": "crashed"} in bars  # fmt: skip
    assert found.spec["datasets"]["depths"] == [{"at": 1000, "waiting": 1}, {"at": 2000, "waiting": 0}]
    tracks = found.spec["vconcat"][0]["encoding"]["y"]["sort"]
    assert tracks == ["main", "compile 1", "cpu"]
    alone = lab.gantt([Event("lower", 0.0, 0.0)], caption="c")
    assert len(alone.spec["vconcat"]) == 1, "nothing waited"


def test_every_kind_is_drawn_in_a_colour_of_its_own():
    assert {*gantt_chart.LOOKS, "queue"} == set(timeline.KINDS)
    colours = [colour for colour, _ in gantt_chart.LOOKS.values()]
    assert len(set(colours)) == len(colours)


def test_a_status_without_a_mark_of_its_own_is_drawn_all_the_same():
    found = lab.gantt([Event("a", 0.0, 1.0, "compile", "compile 1", "op0", "melted")], caption="c")
    assert "1 melted" in found.alt and "melted" in json.dumps(found.spec["vconcat"])


def test_five_hundred_events_are_a_small_figure():
    events = many()
    assert 450 < len(events) < 550
    found = lab.gantt(events, caption="c")
    assert len(json.dumps(found.spec)) < 200_000


def test_a_gantt_chart_needs_events_and_a_caption(capsys):
    assert lab.gantt([], caption="none") is None and "Nothing to draw" in capsys.readouterr().out
    with pytest.raises(LabError, match="caption"):
        lab.gantt(small(), caption=" ")


def test_a_picture_of_a_trace_has_a_row_per_depth_and_says_what_is_long():
    def event(name: str, start: float, dur: float, tid: int = 0) -> dict[str, object]:
        return {"name": name, "cat": "call" if name == "call" else "launch", "ts": start, "dur": dur, "tid": tid}

    events = [event("k", 3.0, 2.0), event("call", 1.0, 9.0), event("inner", 3.0, 1.0), event("d", 4.0, 8.0, tid=1)]
    assert [(row, e["name"]) for row, e in trace_chart.placed(events)] == [
        (0, "call"), (1, "k"), (2, "inner"), (3, "d"),
    ]  # fmt: skip
    found = lab.trace_picture({"a call": events}, caption="A call.")
    assert found.alt == "a call: 4 events in 11.0 µs; the longest: call 9.00 µs, d 8.00 µs, k 2.00 µs, inner 1.00 µs."
    assert lab.trace_picture({"a call": events}, caption="A call.").svg == found.svg
