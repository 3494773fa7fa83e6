"""The GPU's clocks, against a stand-in GPU that runs on a clock of its own.

The stand-in has a queue: a call costs the host `LAUNCH` and the device its own length, the
device starts when the host has launched and the last kernel is done. Replaying a graph costs
the host `LAUNCH` once.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

from reflib import lab
from reflib.lab import timing

LAUNCH = 5e-6
DEVICE = torch.device("cpu")  # tensors stay here; only torch.cuda is replaced


class Gpu:
    """Time in seconds since the start, on the host and on the device."""

    def __init__(self):
        self.host = 0.0
        self.device = 0.0
        self.captured = None
        self.captures = 0

    def kernel(self, seconds):
        if self.captured is not None:
            self.captured.append(seconds)
            return
        self.host += LAUNCH
        self.device = max(self.device, self.host) + seconds

    def wait(self, *_):
        self.host = max(self.host, self.device)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            self.time = max(gpu.device, gpu.host)
            gpu.device = self.time

        def synchronize(self):
            gpu.wait()

        def elapsed_time(self, other):
            return (other.time - self.time) * 1e3

    class Graph:
        def replay(self):
            gpu.host += LAUNCH
            gpu.device = max(gpu.device, gpu.host) + sum(self.kernels)

    @contextmanager
    def capturing(graph, capture_error_mode):
        gpu.captured, gpu.captures = [], gpu.captures + 1
        try:
            yield
            graph.kernels = gpu.captured
        finally:
            gpu.captured = None

    class Stream:
        def __init__(self, device=None): ...

        def wait_stream(self, other): ...

    for name, value in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capturing,
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": Stream,
        "synchronize": gpu.wait,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return gpu


@pytest.mark.parametrize("seconds", [1e-6, 3e-6, 50e-6, 4e-3])
def test_graph_replay_has_no_launch_in_it(gpu, seconds):
    sample = timing.graph_sampler(lambda: gpu.kernel(seconds), DEVICE)
    assert sample() == pytest.approx(seconds, rel=1e-6)
    assert gpu.captures <= 2


def test_a_short_kernel_is_captured_again_with_more_calls(gpu):
    calls = []
    timing.graph_sampler(lambda: calls.append(1) or gpu.kernel(1e-6), DEVICE)
    assert gpu.captures == 2 and len(calls) >= timing.GRAPH_SECONDS / 1e-6


def test_events_show_the_launch_of_a_short_kernel_only(gpu):
    short = timing.event_sampler(lambda: gpu.kernel(1e-6))()
    long = timing.event_sampler(lambda: gpu.kernel(50e-6))()
    assert short == pytest.approx(LAUNCH, rel=0.05) and long == pytest.approx(50e-6, rel=0.01)


@pytest.mark.parametrize("make", [timing.graph_sampler, lambda fn, d, flush: timing.event_sampler(fn, flush)])
def test_a_cold_sample_leaves_the_flush_out(gpu, make):
    sample = make(lambda: gpu.kernel(7e-6), DEVICE, lambda: gpu.kernel(60e-6))
    assert sample() == pytest.approx(7e-6, rel=1e-6)


def test_what_cannot_be_captured_is_timed_with_events_and_says_so(gpu, monkeypatch):
    def refusing(graph, capture_error_mode):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", refusing)
    cuda = torch.device("cuda", 0)
    sample, clock, note = timing.make_sampler(lambda: gpu.kernel(50e-6), "auto", "warm", cuda)
    assert clock == "events" and "operation not permitted when stream is capturing)" in note
    assert sample() == pytest.approx(50e-6, rel=0.01)


def test_running_out_of_memory_is_not_mistaken_for_that(gpu):
    def greedy():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        timing.make_sampler(greedy, "graph", "warm", torch.device("cuda", 0))


def test_measure_takes_the_graph_clock_on_a_gpu(gpu, monkeypatch):
    lab.setup(device="cpu", quiet=True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    cases = {"short": lambda: gpu.kernel(2e-6), "long": lambda: gpu.kernel(30e-6)}
    rows = lab.measure("t", cases, device=torch.device("cuda", 0), rounds=5)
    assert rows.value("short") == pytest.approx(2.0, rel=1e-6)
    assert rows.value("long") == pytest.approx(30.0, rel=1e-6)
    assert {row.clock for row in rows} == {"graph"}
