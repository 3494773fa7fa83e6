"""What choose/measure measures with: its data and its clocks, the GPU's against a stand-in."""

from __future__ import annotations

import gc
import math
import time

import pytest
import torch

from reflib.choose import inputs, timing
from reflib.choose.inputs import InputSpec, make_inputs, rotate, storage_of, weight_copies
from reflib.choose.timing import Samples, WallClock, interleave, turns
from reflib.errors import MeasureError


# -- data to measure with ---------------------------------------------------------------------------
def spec(shape, strides, dtype="float32", role="activation", maker=None):
    return InputSpec("x", role, 0, shape, strides, dtype, "cpu", maker)


def test_inputs_are_laid_out_as_asked():
    specs = [
        spec((4, 6), (6, 1)), spec((4, 6), (1, 4), "bfloat16"), spec((4, 6), (0, 1)), spec((5, 3), (2, 1)),
        spec((0, 3), (3, 1)), spec((), ()), spec((40,), (2,), "bool"), spec((3,), (1,), "int32"),
        spec((8,), (1,), "float8_e4m3fn"), spec((8,), (1,), "complex64"),
        InputSpec("s0", "size", 7), InputSpec("", "unused"),
    ]  # fmt: skip
    state = torch.get_rng_state()
    made, again = make_inputs(specs, 1, {}), make_inputs(specs, 1, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert made[-2:] == [7, None]
    for s, t, u in zip(specs, made[:-2], again):
        assert (t.shape, t.stride(), str(t.dtype)) == (s.shape, s.strides, f"torch.{s.dtype}")
        assert t.untyped_storage().nbytes() == s.nbytes and t.storage_offset() == 0
        assert torch.equal(t.float() if t.dtype.itemsize == 1 else t, u.float() if u.dtype.itemsize == 1 else u)
    assert not torch.equal(made[0], make_inputs(specs, 2, {})[0])
    assert 0 < int(made[6].sum()) < 40 and int(made[7].abs().sum()) == 0


def test_sums_of_products_stay_moderate():
    a, b = make_inputs([spec((64, 32768), (32768, 1), "float16"), spec((32768, 64), (64, 1), "float16")], 0, {})
    y = a.float() @ b.float()
    assert 0.5 < float(y.std()) < 2


def test_makers():
    specs = [spec((4, 6), (1, 4), maker="ones"), spec((4, 6), (0, 1), maker="ones")]
    a, b = make_inputs(specs, 0, {"ones": torch.ones_like})
    assert torch.equal(a, torch.ones(4, 6)) and a.stride() == (1, 4) and b.stride() == (0, 1) and b.sum() == 24
    for maker, message in (
        (lambda t: t[0], r"made torch.float32 \(6,\), not a tensor torch.float32 \(4, 6\)"),
        (lambda t: 3, "made int, not"),
        (lambda t: t.nope, "raised AttributeError"),
    ):
        with pytest.raises(MeasureError, match=f"input maker 'ones' {message}"):
            make_inputs(specs, 0, {"ones": maker})
    with pytest.raises(MeasureError, match="no input maker 'ones' here"):
        make_inputs(specs, 0, {})


def test_weights_take_turns():
    specs = [spec((4, 6), (1, 4)), spec((4, 6), (1, 4), role="weight"), InputSpec("s0", "size", 3)]
    args = make_inputs(specs, 0, {})
    first, second, third = rotate(specs, args, 3, set())
    assert first[0] is second[0] is third[0] and second[2] == 3
    assert len({s[1].data_ptr() for s in (first, second, third)}) == 3
    assert torch.equal(second[1], args[1]) and second[1].stride() == (1, 4)
    assert all(s[1] is args[1] for s in rotate(specs, args, 3, {1}))
    mib = 2**20
    assert weight_copies(0, 1000 * mib, 50 * mib) == 1
    assert weight_copies(mib, 1000 * mib, 50 * mib) == 100
    assert weight_copies(200 * mib, 1000 * mib, 50 * mib) == 1
    assert weight_copies(30 * mib, 45 * mib, 50 * mib) == 2
    assert weight_copies(16, 1000 * mib, 50 * mib) == inputs.MAX_COPIES
    assert storage_of(torch.zeros(3, 4).t()).shape == (12,)


# -- clocks -----------------------------------------------------------------------------------------
def test_samples():
    s = Samples((1.0, 2.0, 3.0, 4.0, 5.0))
    assert s.median == 3 and s.spread == pytest.approx(2 / 3)
    busy = Samples((1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 150.0, 200.0, 170.0, 300.0))  # interrupted, four times
    assert busy.median == 1.01 and busy.spread < 0.05
    assert Samples((4.0,)).spread == 0 and Samples((0.0, 0.0)).spread == 0


def test_rounds_are_interleaved():
    said: list[str] = []
    samplers = {n: (lambda n=n: (said.append(n), 1.0)[1]) for n in "abc"}
    found = interleave(samplers, 3, 1, math.inf)
    assert said == list("abcbcacab") and {len(s.seconds) for s in found.values()} == {3}
    assert len(interleave(samplers, 9, 2, 0.0)["a"].seconds) == 2  # past the deadline
    assert gc.isenabled() and interleave({}, 3, 1, math.inf) == {}


def test_turns():
    assert turns(10e-6, 1e-3, 1) == 100 and turns(10e-6, 1e-3, 7) == 105
    assert turns(1.0, 1e-3, 1) == 1 and turns(1e-9, 1e-3, 1) == timing.MOST_CALLS


def test_wall_clock():
    calls = []
    sample = WallClock().sampler(lambda args: (calls.append(args), time.sleep(1e-3)), [[1], [2]])
    calls.clear()
    assert 1e-3 < sample() < 20e-3 and calls == [[1], [2]]


class Gpu:
    """A stand-in for torch.cuda's queue: launching costs the host 5 us, a kernel what it says, a replayed graph one
    launch. The device starts a kernel when it is launched and the one before is done."""

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
                gpu.host = max(gpu.host, gpu.device)

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
                gpu.graphs += 1

            def replay(self):
                gpu.host += 5e-6
                gpu.device = max(gpu.device, gpu.host) + sum(self.kernels)

        stream = type("Stream", (), {"synchronize": lambda self: None})()
        fakes = {"Event": Event, "CUDAGraph": Graph, "graph_pool_handle": lambda: "pool", "current_device": lambda: 0}
        fakes |= {"synchronize": lambda *a: None, "current_stream": lambda: stream}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def kernel(self, seconds):
        if self.recording is not None:
            self.recording.append(seconds)
            return
        self.host += 5e-6
        self.device = max(self.device, self.host) + seconds


def test_launches_are_in_one_clock_and_not_in_the_other(monkeypatch):
    gpu = Gpu(monkeypatch)
    three = lambda args: [gpu.kernel(1e-6) for _ in range(3)]  # noqa: E731
    one = lambda args: gpu.kernel(4e-6)  # noqa: E731
    graph, events = timing.GraphClock(), timing.EventClock()
    assert graph.sampler(three, [[]])() == pytest.approx(3e-6, rel=0.02)
    assert graph.sampler(one, [[]])() == pytest.approx(4e-6, rel=0.02)
    assert events.sampler(three, [[]])() == pytest.approx(15e-6, rel=0.02)
    assert events.sampler(one, [[]])() == pytest.approx(5e-6, rel=0.02)  # the other one is faster: wrong


def test_a_graph_is_a_whole_number_of_turns(monkeypatch):
    gpu = Gpu(monkeypatch)
    seen: list[int] = []
    sample = timing.GraphClock().sampler(lambda args: (seen.extend(args), gpu.kernel(1e-4 * args[0])), [[1], [2], [3]])
    assert sample() == pytest.approx(2e-4, rel=0.05)
    assert seen[-3:] == [1, 2, 3] and gpu.recording is None
