"""Traces of a running program: what was launched, from which of the user's lines; bounded; never in the way."""

import errno
import gzip
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import reflib
from reflib import atomic, tracing
from reflib.observe import trace
from reflib.options import Options
from reflib.pipeline import AROUND
from reflib.timeline import RUNNING, Timed, chrome_trace


def read(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The complete events, and the threads' names."""
    found = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    return [e for e in found if e["ph"] == "X"], names


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(self.inner(x)), -1)


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_a_trace_links_each_launch_to_what_it_came_from(wrapper, tmp_path):
    model, x = Model(), torch.randn(4, 16)
    f = reflib.compile(model, trace=str(tmp_path), wrapper=wrapper)
    before = time.perf_counter() * 1e6
    for _ in range(2):
        got = f(x)
        got.square().sum().backward()
    after = time.perf_counter() * 1e6
    torch.testing.assert_close(got, model(x))
    (path,) = tracing.flush()
    assert path.parent == tmp_path and not tracing.flush(), "written once"
    events, tracks = read(path)
    assert all(before <= e["ts"] and e["ts"] + e["dur"] <= after + 1000 for e in events), "one clock"
    stages = [e for e in events if e["cat"] == "stage" and tracks[e["tid"]] == "main"]
    assert {"compile a graph", "lower", "fuse", "generate", "wrap"} <= {e["name"] for e in stages}
    calls = [e for e in events if e["cat"] == "call" and not e["name"].startswith("load")]
    assert [e["name"].split()[0] for e in calls] == ["forward", "backward"] * 2
    kernels = {e["name"]: e["args"] for e in events if e["cat"] == "kernel"}
    assert all(name in about["source"] and "loops " in about["nest"] for name, about in kernels.items())
    kind = "launch" if wrapper == "python" else "profiler"
    launched = [e for e in events if e["cat"] == kind and e["name"] in kernels]
    assert len(launched) == 2 * len(kernels)
    for e in launched:
        about = e["args"]
        assert about["ops"] and "loops " in about["nest"] and about["graph"] in {c["name"] for c in calls}
        assert any("test_trace.py" in line and "softmax" in line for line in about["lines"]), about
        inside = [c for c in calls if c["ts"] - 500 <= e["ts"] and e["ts"] + e["dur"] <= c["ts"] + c["dur"] + 500]
        assert about["graph"] in {c["name"] for c in inside}
    products = [e["args"] for e in events if e["cat"] == kind and "addmm" in e["name"]]
    assert products and any("inner" in m for about in products for m in about.get("modules", ())), products


def test_without_a_folder_a_call_is_what_it_was(monkeypatch, tmp_path):
    def call(args: list) -> None: ...

    stages = reflib.explain(torch.relu, torch.ones(2), target="cpu").stages
    assert AROUND["trace"](call, stages, (), Options()) is call and not tracing.folder(Options())
    monkeypatch.setenv("REFLIB_TRACE", str(tmp_path))
    assert isinstance(AROUND["trace"](call, stages, (), Options()), trace.Traced)
    assert AROUND["trace"](call, stages, (), Options(target="cpu")) is call
    with pytest.raises(reflib.OptionError, match="trace=7: must be None or the name of a folder"):
        Options(trace=7)


def test_eleven_files_of_events_are_rotated_and_the_first_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "EVENTS", 100)
    monkeypatch.setattr(tracing, "FILES", 8)
    recorder = tracing.Recorder(tmp_path)
    for i in range(1050):
        recorder.add(Timed(str(i), i * 1e-5, 5e-6, "launch"))
    assert recorder.flush() is not None and recorder.flush() is None
    paths = sorted(tmp_path.iterdir())
    assert [p.name.split("_")[2][:4] for p in paths] == ["0000", *(f"{n:04}" for n in range(4, 11))]
    names = [e["name"] for p in (paths[0], paths[-1]) for e in read(p)[0]]
    assert names == [str(i) for i in (*range(100), *range(1000, 1050))]
    recorder.add(Timed("parent's", 0.0, 0.0, "launch"))
    monkeypatch.setitem(tracing.recorders, str(tmp_path), recorder)
    tracing._in_child()
    assert recorder.flush() is None, "a forked child writes what it does itself"


def test_many_events_take_time_in_proportion():
    events = [Timed("call", i * 1e-3, 9e-4, "call") for i in range(2000)]
    events += [Timed("k", i * 1e-3 + j * 1e-4, 5e-5, "launch") for i in range(2000) for j in range(1, 9)]
    start = time.process_time()
    found = chrome_trace(events)["traceEvents"]
    assert time.process_time() - start < 2
    assert {e["tid"] for e in found if e["ph"] == "X"} == {0}, "they nest, however short they are"


@pytest.mark.parametrize("fault", ["a file", "no room"])
def test_what_cannot_be_written_is_one_warning(fault, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "traces"
    if fault == "a file":
        folder.write_text("")
    else:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(atomic, "write", full)
    monkeypatch.setattr(tracing, "EVENTS", 3)
    x = torch.randn(5)
    with caplog.at_level(logging.WARNING, "reflib"):
        f = reflib.compile(lambda x: torch.relu(x) + 1, trace=str(folder))
        for _ in range(4):
            assert torch.equal(f(x), torch.relu(x) + 1)
        tracing.flush()
    said = [r.getMessage() for r in caplog.records if r.name == "reflib.trace"]
    assert len(said) == 1 and "no more traces" in said[0] and str(folder) in said[0], said
    assert not tracing.recorder(str(folder))._events


def test_a_users_own_profiler_goes_before_ours(tmp_path):
    x = torch.randn(5)
    f = reflib.compile(lambda x: torch.sin(x) + 1, trace=str(tmp_path), wrapper="cpp")
    with torch.profiler.profile() as theirs:
        f(x)
    assert any("sin" in e.name for e in theirs.events())
    (path,) = tracing.flush()
    assert not [e for e in read(path)[0] if e["cat"] == "profiler"]
    f(x)
    (path,) = tracing.flush()
    assert [e for e in read(path)[0] if e["cat"] == "profiler"]


def test_what_a_device_did_hangs_on_its_launch():
    def event(name: str, device: torch.autograd.DeviceType, start: float, flow: int) -> Any:
        cuda = device != torch.autograd.DeviceType.CPU
        values = {"name": name, "device_type": device, "start_ns": int(start * 1e9), "duration_ns": 3000,
                  "device_index": 0, "device_resource_id": 7 if cuda else 11, "correlation_id": flow}  # fmt: skip
        return SimpleNamespace(**{k: lambda v=v: v for k, v in values.items()})

    kinds = torch.autograd.DeviceType
    found = [
        event("aten::mm", kinds.CPU, 1e9 + 5.0, 42),
        event("cuLaunchKernelEx", kinds.CPU, 1e9 + 5.1, 42),
        event("k0_relu", kinds.CUDA, 1e9 + 5.2, 42),
    ]
    events = trace.profiled(found, {"k0_relu": {"ops": ["aten.relu.default"]}}, 1e9, "main")
    assert [(e.kind, e.track, e.flow) for e in events] == [
        ("profiler", "main: torch", 0), ("profiler", "main: torch", 42), ("device", "cuda:0 stream 7", 42),
    ]  # fmt: skip
    assert abs(events[2].start - 5.2) < 1e-6 and {e.kind for e in events} <= set(RUNNING)
    made = chrome_trace(events)["traceEvents"]
    (start,), (end,) = ([e for e in made if e["ph"] == phase] for phase in "sf")
    kernel = next(e for e in made if e["name"] == "k0_relu")
    assert start["id"] == end["id"] == 42 and (end["tid"], end["ts"]) == (kernel["tid"], kernel["ts"])
    assert kernel["args"]["ops"] == ["aten.relu.default"]
