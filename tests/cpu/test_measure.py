"""autotune/measure: what wins, what must never win, and what is left as it was."""

import pickle
import random
import time
from itertools import chain, repeat

import pytest
import torch
from test_timing import Gpu
from torch._subclasses import FakeTensorMode

from reflib import timing
from reflib.autotune import bench as benches
from reflib.autotune.inputs import InputSpec
from reflib.autotune.measure import Limits, Request, measure, request
from reflib.autotune.winner import overall, pick_winner
from reflib.errors import MeasureError
from reflib.ir.decision import Candidate, Key
from reflib.ir.expr import Sym
from reflib.options import Options
from tests.choices import program_of
from tests.races import Flat, K, M, N, Race, right, small, wrong


# -- deciding ---------------------------------------------------------------------------------------
def test_fastest_right_candidate_wins():
    race = Race(aten=(right, [6.95, 7.0, 7.05]), fast=(right, [4.2, 4.2]), slow=(right, [20.0]))
    result = race.run()
    assert result.winner == "fast"
    assert result.reason == "fast 4.2 us, aten 7.0 us: 1.67x faster, spread 1%"
    assert [r.status for r in result.rows] == ["ok"] * 3
    assert "out after a short round: 4.8x" in result.row("slow").why
    assert result.clock == "table" and result.reference == "float64"
    assert result.row("aten").error is not None and result.row("aten").error < 1e-5
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_raising_candidate_is_a_row():
    def raises(args):
        raise ValueError("no such luck\nsecond line")

    def memory(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    result = Race(
        aten=(right, [7.0]),
        built=(RuntimeError("ptxas: too many registers\nmore"), [1.0]),
        called=(raises, [1.0]),
        memory=(memory, [1.0]),
        fast=(right, [3.0]),
    ).run()
    assert result.winner == "fast"
    assert [r.status for r in result.rows] == ["ok", "error", "error", "error", "ok"]
    assert result.row("built").why == "RuntimeError: ptxas: too many registers"
    assert result.row("called").why == "ValueError: no such luck"
    assert result.row("memory").why == "out of memory"


def test_a_candidate_may_fail_while_it_is_timed():
    class Failing(Race):
        def sampler(self, call, sets):
            if call.candidate == "fast":
                return lambda: call(["not", "tensors"])
            return super().sampler(call, sets)

    result = Failing(aten=(right, [7.0]), fast=(right, [3.0])).run()
    assert result.winner == "aten" and result.row("fast").status == "error"


def test_a_default_that_is_wrong_or_raises_does_not_win_if_another_is_right():
    result = Race(aten=(wrong, [1.0]), tiled=(right, [3.0])).run()
    assert result.winner == "tiled" and result.row("aten").status == "wrong"
    assert result.reason.startswith("aten is wrong (error 0.") and "tiled 3.0 us is the fastest" in result.reason
    result = Race(aten=(RuntimeError("cuBLAS"), [1.0]), tiled=(right, [3.0])).run()
    assert result.reason == "aten failed (RuntimeError: cuBLAS); tiled 3.0 us is the fastest that is right"
    result = Race(aten=(RuntimeError("cuBLAS"), [1.0]), other=(wrong, [1.0])).run()
    assert result.winner == "aten" and "no other" in result.reason


def rows(**times):
    return [Candidate(Key(n), "ok", t, t, None, spread, 0.0) for n, (t, spread) in times.items()]


@pytest.mark.parametrize(
    "times, least, winner, reason",
    [
        ({"a": (100, 0.1), "b": (95, 0.0)}, 1.0, "a", "a 100 us: 1.05x is inside the spread of 10%, so a stays"),
        ({"a": (100, 0.0), "b": (95, 0.1)}, 1.0, "a", "inside the spread of 10%"),
        ({"a": (100, 0.02), "b": (95, 0.02)}, 1.0, "b", "b 95.0 us, a 100 us: 1.05x faster, spread 2%"),
        ({"a": (100, 0.0), "b": (99.5, 0.0)}, 1.0, "a", "inside the spread of 2%"),
        ({"a": (100, 0.0), "b": (80, 0.0)}, 1.3, "a", "1.25x faster is less than the 1.30x asked for, so a stays"),
        ({"a": (100, 0.0), "b": (80, 0.0)}, 1.2, "b", "1.25x faster"),
        ({"a": (100, 0.0), "b": (120, 0.0)}, 1.0, "a", "a 100 us is the fastest; b 120 us comes next"),
        ({"a": (100, 0.0), "noisy": (80, 0.5), "b": (85, 0.0)}, 1.0, "b", "b 85.0 us, a 100 us: 1.18x faster"),
        ({"a": (100, 0.0)}, 1.0, "a", "a 100 us: no other candidate is right and was timed"),
    ],
)
def test_decide(times, least, winner, reason):
    name, why = pick_winner(rows(**times), "a", least)
    assert name == winner and reason in why


def test_a_clear_lead_is_not_lost_to_interruptions():
    """A busy machine: a third of the samples of both are many times too long."""
    race = Race(aten=(right, [46.0, 46.1, 2000.0]), fast=(right, [1.0, 1.01, 157.0]))
    result = race.run()
    assert result.winner == "fast", result.reason
    race = Race(aten=(right, [1.02, 1.2, 0.9]), fast=(right, [1.0, 1.2, 0.9]))
    assert race.run().winner == "aten"


def test_one_row_for_several_sizes():
    a = Key("a")
    at = [Candidate(a, "ok", t, spread=s) for t, s in ((1.0, 0.01), (4.0, 0.01), (2.0, 150.0))]
    row = overall(a, at)
    assert row.time_us == pytest.approx(2.0) and 0.01 < row.spread < 5  # not 150
    assert overall(a, [at[0], Candidate(a, "guard", why="odd")]) == Candidate(a, "guard", why="odd")
    assert overall(a, []).status == overall(a, [Candidate(a, "ok")]).status == "unmeasured"


@pytest.mark.parametrize("paired", [False, True])
def test_who_was_dropped_in_a_quiet_moment_does_not_win(paired):
    """The device is three times as busy when the race begins."""
    race = Race(aten=(right, [10.0] * 3 + [30.0]), slow=(right, [16.0]), near=(right, [9.0] * 3 + [33.0]))
    race.sampler = lambda call, sets: (lambda times: lambda: next(times) * 1e-6)(
        chain(race.candidates[call.candidate][1][:3], repeat(race.candidates[call.candidate][1][-1]))
    )
    result = race.run(paired=paired)
    assert result.winner == "aten" and result.row("slow").dropped and not result.row("near").dropped, result


def test_pairs_see_through_a_busy_device():
    """Each sample takes up to five times as long, in no order; the ratio is what it is."""
    noise = random.Random(0)

    class Busy(Race):
        def sampler(self, call, sets):
            us = self.candidates[call.candidate][1][0]
            return lambda: us * self.load() * 1e-6

        def load(self):
            self.turn = getattr(self, "turn", 0) + 1
            if self.turn % 2:
                self.now = noise.uniform(1, 5)
            return self.now

    result = Busy(aten=(right, [10.0]), fast=(right, [8.0]), same=(right, [9.99])).run(paired=True)
    assert result.winner == "fast", result
    assert result.row("aten").time_us / result.row("fast").time_us == pytest.approx(1.25, rel=0.25)


# -- limits -----------------------------------------------------------------------------------------
def test_a_race_under_load_is_run_again():
    """The quieter of two counts; where both were disturbed, nothing is stored."""
    load = [20.0, 1.0, 45.0, 14.0, 1.0, 40.0]
    rounds = 3 + Limits().rounds  # short ones, then the race
    race = Race(aten=(right, (load * rounds)[:rounds] + [9.0] * 100), fast=(right, [5.0]))
    result = race.run()
    assert result.winner == "fast" and result.complete and result.row("aten").time_us == pytest.approx(9.0)
    result = Race(aten=(right, [7.0] * rounds + load * 20), fast=(right, [5.0])).run()
    assert result.complete and result.row("aten").time_us == pytest.approx(7.0), "none needed a second race"
    result = Race(aten=(right, load), fast=(right, [5.0])).run()
    assert not result.complete and "the device was busy (spread" in result.reason


def test_limits_of_time_and_memory(monkeypatch):
    def run(**limits):
        return Race(aten=(right, [7.0]), fast=(right, [1.0])).run(limits=Limits(**limits))

    result = run(seconds=0.0)
    assert result.winner == "aten" and result.row("aten").status == "ok"
    assert result.row("fast").status == "skipped" and "time limit of 0 s" in result.row("fast").why
    result = run(memory=1000)
    assert {r.status for r in result.rows} == {"skipped"} and result.winner == "aten"
    assert "the limit is 0.0 MiB" in result.row("fast").why

    def fail(*args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(benches, "make_inputs", fail)
    result = run()
    assert {r.status for r in result.rows} == {"skipped"} and "out of memory" in result.reason


def test_a_slow_candidate_is_timed_by_one_call():
    def slow(args):
        time.sleep(0.05)
        return right(args)

    result = Race(aten=(slow, [1.0]), fast=(right, [100.0])).run(limits=Limits(candidate_seconds=0.2))
    assert result.winner == "fast" and "single call" in result.row("aten").why
    assert result.row("aten").time_us > 50e3


# -- requests ---------------------------------------------------------------------------------------
def test_request_is_plain_data():
    p = small(torch.bfloat16, m=Sym("s0", 2, 4096, 12))
    r = request(
        {"aten": p, "b": p}, "aten", weights=["w"], makers={"x": "gen"}, options=Options(cpp_flags=("-O1",)),
        patches={"b": {"fuse": False}}, min_speedup=1.1, graph_timing=False, seed=3, limits=Limits(seconds=5),
    )  # fmt: skip
    assert pickle.loads(pickle.dumps(r)) == r
    size, x, w = r.inputs
    assert size == InputSpec("s0", "size", 12) and r.sizes == {"s0": 12}
    assert x == InputSpec("x", "activation", 0, (12, K), (K, 1), "bfloat16", "cpu", "gen")
    assert (w.role, w.shape, w.nbytes) == ("weight", (K, N), K * N * 2)
    assert request({"a": p}, "a", sizes={"s0": 99}).inputs[1].shape == (99, K)


def test_sizes_and_options_reach_the_candidates():
    p = small(m=Sym("s0", 2, 4096, 12))
    seen = []

    def build(program, options):
        def call(args):
            seen.append((options.fuse, options.autotune, args[0], args[1].shape))
            return right(args[1:])

        return call

    options, patches = Options(autotune="blocking"), {"b": {"fuse": False}}
    r = request({"a": p, "b": p}, "a", sizes={"s0": 7}, options=options, patches=patches)
    result = measure(pickle.loads(pickle.dumps(r)), build, clock=Flat())
    assert [x.status for x in result.rows] == ["ok", "ok"]
    assert set(seen) == {(True, "off", 7, (7, K)), (False, "off", 7, (7, K))}
    r = request({"a": p, "b": p}, "a", patches={"b": {"fuze": False}})
    assert "did you mean 'fuse'" in measure(r, build, clock=Flat()).row("b").why


def test_requests_that_make_no_sense():
    p = small()
    with pytest.raises(MeasureError, match="no candidate 'c'; the candidates are a"):
        request({"a": p}, "c")
    with pytest.raises(MeasureError, match="'b' takes other inputs than 'a'"):
        request({"a": p, "b": small(torch.float16)}, "a")
    r = request({"a": p}, "a")
    with pytest.raises(MeasureError, match="no candidate 'zzz'"):
        measure(Request(r.programs, "zzz", "a", r.inputs), lambda p, o: right)


# -- together with its parts -----------------------------------------------------------------------
def test_makers_are_asked():
    got = []
    race = Race(aten=(lambda a: (got.append(float(a[0].sum())), right(a))[1], [1.0]))
    race.run(makers={"x": "ones"}, makers_by_key={"ones": torch.ones_like})
    assert got[0] == M * K


def test_what_a_gpu_would_be_timed_on(monkeypatch):
    p = small()
    bench = lambda room, weights: benches.Bench(  # noqa: E731
        request({"a": p}, "a", weights=weights), torch.device("cuda"), [torch.zeros(M, K), torch.zeros(K, N)],
        [], {}, [], room, 0.0, list,
    )  # fmt: skip
    monkeypatch.setattr(benches, "l2_bytes", lambda d: 10 * K * N * 4)
    sets, note = benches.sets_of(bench(1 << 30, ["w"]))
    assert len(sets["cold"]) == 20 and len(sets["warm"]) == 1 and not note
    sets, note = benches.sets_of(bench(K * N * 4 * 5, ["w"]))
    assert len(sets["cold"]) == 6 and note == "weights not quite cold: 6 copies"
    sets, note = benches.sets_of(bench(0, ["w"]))
    assert list(sets) == ["warm"] and "no room" in note
    assert benches.sets_of(bench(1 << 30, []))[0].keys() == {"warm"}
    monkeypatch.setattr(benches, "l2_bytes", lambda d: K * N)
    sets, note = benches.sets_of(bench(0, ["w"]))
    assert len(sets["cold"]) == 1 and not note  # larger than the cache: cold by themselves


# -- nothing of the user's is touched ---------------------------------------------------------------
def test_random_state_and_modes():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    seen = []

    def draws(args):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), float(torch.rand(()))))
        return right(args)

    race = Race(aten=(draws, [7.0]), b=(draws, [3.0]))
    with torch.autocast("cpu", dtype=torch.bfloat16), FakeTensorMode():
        result = race.run()
    assert result.winner == "b"
    assert seen[0][:2] == (False, False) and seen[0] == seen[2]  # each starts from the same seed
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()


def test_what_cannot_be_captured_is_timed_with_launches(monkeypatch):
    gpu = Gpu(monkeypatch)

    def launches(seconds, may=True):
        def fn(args):
            if gpu.recording is not None and not may:
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            gpu.kernel(seconds)
            return right(args)

        return fn

    race = Race(aten=(launches(8e-6), []), b=(launches(1e-6, False), []), c=(launches(6e-6), []))
    race.sampler = None
    r = request(dict.fromkeys(race.candidates, race.program), "aten")
    result = measure(r, race.build, clock=timing.graph_clock())
    assert result.clock == "graph" and result.winner == "b"
    assert result.row("b").time_us == pytest.approx(5, rel=0.05)
    assert "no CUDA graph (operation not permitted" in result.row("b").why
    assert result.row("c").time_us == pytest.approx(6, rel=0.05)
    race = Race(aten=(launches(8e-6, False), []), b=(launches(1e-6), []))
    r = request(dict.fromkeys(race.candidates, race.program), "aten")
    result = measure(r, race.build, clock=timing.graph_clock())
    assert result.clock == "events" and result.row("b").time_us == pytest.approx(5, rel=0.05)


# -- the real compiler ------------------------------------------------------------------------------
def test_compiled_candidates():
    """Decompose-K against a matrix product, both fused with the relu that follows."""
    from reflib.tuning import build

    x, w = torch.randn(16, 2048), torch.randn(2048, 16)

    def decomposed(x, w):
        parts = torch.bmm(x.view(16, 4, 512).transpose(0, 1), w.view(4, 512, 16))
        return torch.relu(parts.sum(0))

    programs = {
        "aten": program_of(lambda x, w: torch.relu(x @ w), x, w, options=Options()),
        "decompose_k(4)": program_of(decomposed, x, w, options=Options()),
        "half": program_of(lambda x, w: torch.relu(x.half() @ w.half()).float(), x, w, options=Options()),
    }
    r = request(programs, "aten", limits=Limits(rounds=3))
    result = measure(pickle.loads(pickle.dumps(r)), build)
    assert result.clock == "wall" and result.reference == "float64"
    assert [c.status for c in result.rows] == ["ok", "ok", "wrong"], result
    assert all(c.time_us > 0 and c.error < 1e-5 for c in result.rows[:2])
    assert result.winner in ("aten", "decompose_k(4)")
