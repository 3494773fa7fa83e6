"""Clocks: the host's, and the GPU's against a stand-in; then ``lab``'s choice among them."""

import gc
import math
import time
from contextlib import nullcontext

import pytest
import torch

from reflib import lab, timing
from reflib.lab import timing as lab_timing
from reflib.timing import Samples, calls_for, interleave, wall_clock

LAUNCH = 5e-6


def test_samples():
    s = Samples((1.0, 2.0, 3.0, 4.0, 5.0))
    assert s.median == 3 and s.spread == pytest.approx(2 / 3)
    busy = Samples((1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 150.0, 200.0, 170.0, 300.0))  # interrupted, four times
    assert busy.median == 1.01 and busy.spread < 0.05
    assert Samples((4.0,)).spread == 0 and Samples((0.0, 0.0)).spread == 0


def test_rounds_are_interleaved():
    said: list[str] = []
    samplers = {n: (lambda n=n: (said.append(n), 1.0)[1]) for n in "abc"}
    found = interleave(samplers, 3, math.inf)
    assert said == list("abcbcacab") and {len(seconds) for seconds in found.values()} == {3}
    assert len(interleave(samplers, 9, 0.0, least=2)["a"]) == 2  # past the deadline
    assert gc.isenabled() and interleave({}, 3, math.inf) == {}


def test_how_many_calls_a_loop_has():
    assert calls_for(10e-6, 1e-3) == 100 and calls_for(10e-6, 1e-3, 7) == 105
    assert calls_for(1.0, 1e-3) == 1 and calls_for(1e-9, 1e-3) == timing.MOST_CALLS


def test_a_clock_that_stands_still_while_a_case_waits():
    calls = []
    timing.wall_sampler(lambda: (calls.append(1), time.sleep(2e-3)), torch.device("cpu"), now=lambda: 0.0)
    assert len(calls) < 2000  # not 2**16 and all before


def test_wall_clock():
    calls = []
    sample = wall_clock().sampler(lambda args: (calls.append(args), time.sleep(1e-3)), [[1], [2]])
    calls.clear()
    assert 1e-3 < sample() < 20e-3 and calls == [[1], [2]]


class Gpu:
    """A stand-in for torch.cuda's queue: a launch costs the host LAUNCH seconds, and so does replaying a graph. The
    device starts a kernel when it is launched and the one before is done."""

    def __init__(self, monkeypatch):
        self.host = self.device = 0.0
        self.recording: list[float] | None = None
        self.graphs = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                gpu.device = self.time = max(gpu.device, gpu.host)

            def synchronize(self):
                gpu.wait()

            def elapsed_time(self, other):
                return (other.time - self.time) * 1e3

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                assert capture_error_mode == "thread_local" and pool == "pool"
                gpu.recording = []

            def capture_end(self):
                if gpu.recording is None:
                    raise RuntimeError("not capturing")
                self.kernels, gpu.recording = gpu.recording, None
                gpu.graphs += bool(self.kernels)

            def replay(self):
                gpu.host += LAUNCH
                gpu.device = max(gpu.device, gpu.host) + sum(self.kernels)

        stream = type("Stream", (), {"synchronize": lambda self: None, "__init__": lambda self, device=None: None})
        fakes = {"Event": Event, "CUDAGraph": Graph, "graph_pool_handle": lambda: "pool", "current_device": lambda: 0}
        fakes |= {"synchronize": gpu.wait, "current_stream": lambda *a: stream(), "Stream": stream}
        fakes |= {"device": nullcontext, "stream": nullcontext, "is_current_stream_capturing": lambda: False}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        timing._stream.cache_clear()

    def kernel(self, seconds):
        if self.recording is not None:
            self.recording.append(seconds)
            return
        self.host += LAUNCH
        self.device = max(self.device, self.host) + seconds

    def wait(self, *_):
        self.host = max(self.host, self.device)


@pytest.fixture
def gpu(monkeypatch):
    yield Gpu(monkeypatch)
    timing._stream.cache_clear()


@pytest.mark.parametrize("seconds", [1e-6, 3e-6, 50e-6, 4e-3])
def test_graph_replay_has_no_launch_in_it(gpu, seconds):
    calls = []
    sample = timing.graph_sampler(lambda: calls.append(1) or gpu.kernel(seconds), timing.Graphs())
    assert sample() == pytest.approx(seconds, rel=1e-6)
    assert gpu.graphs <= 2
    if seconds == 1e-6:  # captured again, with more calls
        assert gpu.graphs == 2 and len(calls) > timing.MOST_CALLS


def test_events_show_the_launch_of_a_short_kernel_only(gpu):
    short = timing.event_sampler(lambda: gpu.kernel(1e-6))()
    long = timing.event_sampler(lambda: gpu.kernel(50e-6))()
    assert short == pytest.approx(LAUNCH, rel=0.05) and long == pytest.approx(50e-6, rel=0.01)


def test_a_cold_sample_leaves_the_flush_out(gpu):
    fn, flush = lambda: gpu.kernel(7e-6), lambda: gpu.kernel(60e-6)
    for sample in (timing.graph_sampler(fn, timing.Graphs(), flush), timing.event_sampler(fn, flush)):
        assert sample() == pytest.approx(7e-6, rel=1e-6)


def test_launches_are_in_one_clock_and_not_in_the_other(gpu):
    three = lambda args: [gpu.kernel(1e-6) for _ in range(3)]  # noqa: E731
    one = lambda args: gpu.kernel(4e-6)  # noqa: E731
    graph, events = timing.graph_clock(), timing.event_clock()
    assert graph.sampler(three, [[]])() == pytest.approx(3e-6, rel=0.02)
    assert graph.sampler(one, [[]])() == pytest.approx(4e-6, rel=0.02)
    assert events.sampler(three, [[]])() == pytest.approx(15e-6, rel=0.02)
    assert events.sampler(one, [[]])() == pytest.approx(5e-6, rel=0.02)  # the other one is faster: wrong


def test_a_graph_is_a_whole_number_of_turns(gpu):
    seen: list[int] = []
    sample = timing.graph_clock().sampler(lambda args: (seen.extend(args), gpu.kernel(1e-4 * args[0])), [[1], [2], [3]])
    assert sample() == pytest.approx(2e-4, rel=0.05)
    assert seen[-3:] == [1, 2, 3] and gpu.recording is None


# -- lab's ------------------------------------------------------------------------------------------
CUDA = torch.device("cuda", 0)


def test_what_cannot_be_captured_is_timed_with_events_and_says_so(gpu):
    def refusing():
        if gpu.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        gpu.kernel(50e-6)

    sample, clock, note = lab_timing.make_sampler(refusing, "auto", "warm", CUDA)
    assert clock == "events" and "operation not permitted when stream is capturing)" in note
    assert sample() == pytest.approx(50e-6, rel=0.01)


def test_running_out_of_memory_is_not_mistaken_for_that(gpu):
    def greedy():
        if gpu.recording is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        lab_timing.make_sampler(greedy, "graph", "warm", CUDA)


def test_measure_takes_the_graph_clock_on_a_gpu(gpu):
    lab.setup(device="cpu", quiet=True)
    cases = {"short": lambda: gpu.kernel(2e-6), "long": lambda: gpu.kernel(30e-6)}
    rows = lab.measure("t", cases, device=CUDA, rounds=5)
    assert rows.value("short") == pytest.approx(2.0, rel=1e-6)
    assert rows.value("long") == pytest.approx(30.0, rel=1e-6)
    assert {row.clock for row in rows} == {"graph"}
