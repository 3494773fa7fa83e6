"""`lab.measure`: clocks, rows, peers. Timed loosely; counts and statuses exactly."""

import ctypes
import json
import os
import subprocess
import sys
import time

import pytest
import torch

import reflib
from reflib import lab
from reflib.errors import LabError
from reflib.lab import executing, machine, recording, timing
from reflib.lab.peak_memory import peak_bytes
from reflib.lab.ratio_chart import speeds
from reflib.lab.rows import Row, Rows
from reflib.lab.session import current


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.delenv("REFLIB_LAB_BUDGET", raising=False)
    lab.setup(device="cpu", quiet=True)


def spin(seconds):
    def fn():
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return fn


def test_a_known_time_and_what_follows_from_it():
    rows = lab.measure("t", {"a": spin(1e-3)}, bytes=1e6, flops={"a": 2e9}, at={"n": 1}, budget_s=0.1)
    assert [(r.metric, r.unit) for r in rows] == [("time", "µs"), ("bandwidth", "GB/s"), ("rate", "TFLOP/s")]
    time_us = rows.value("a")
    assert 900 < time_us < 50_000  # on a busy machine, too
    assert rows.value("a", "bandwidth", n=1) == pytest.approx(1e6 / time_us / 1e3)
    assert rows.value("a", "rate") == pytest.approx(2e9 / time_us / 1e6)
    row = rows[0]
    assert row.clock == "wall" and row.cache == "warm" and row.device and row.versions["torch"] and row.date


def test_cold_calls_once_a_sample_after_a_flush():
    calls = []
    rows = lab.measure("t", {"a": lambda: calls.append(1)}, cache="cold", rounds=5)
    assert rows[0].cache == "cold" and len(calls) == 1 + 5


def test_what_this_machine_cannot_measure_is_a_row():
    for clock in ("graph", "events"):
        (row,) = lab.measure("t", {"a": lambda: None}, clock=clock)
        assert (row.status, row.value) == ("not here", None) and "needs a GPU" in row.note
    (row,) = lab.measure("t", {"a": lambda: torch.empty(2**58, dtype=torch.uint8)})
    assert row.status == "out of memory"


def test_mistakes_are_raised_with_the_case_named():
    with pytest.raises(ZeroDivisionError) as caught:
        lab.measure("t", {"wrong": lambda: 1 / 0})
    assert "wrong" in caught.value.__notes__[0]
    for arguments in ({"clock": "sundial"}, {"cache": "tepid"}):
        with pytest.raises(LabError):
            lab.measure("t", {"a": lambda: None}, **arguments)
    with pytest.raises(LabError, match="no cases"):
        lab.measure("t", {})


def test_a_clock_of_ones_own():
    def second(fn, device):
        return lambda: 1.0

    rows = lab.measure("t", {"a": lambda: None}, clock=second)
    assert rows.value("a") == 1e6 and rows[0].clock == "second"


PEER = """
import torch


def make(device, dtype, n):
    x = torch.ones(n, dtype=dtype)
    return lambda: x + 1
"""


@pytest.mark.slow
def test_peers_run_crash_refuse_and_hang_in_their_own_process():
    rows = lab.measure(
        "t",
        {
            "here": lambda: None,
            "runs": lab.peer(PEER, n=8),
            "crashes": lab.peer("import ctypes\ndef make(device, dtype): ctypes.string_at(0)\n"),
            "exits": lab.peer("import sys\nsys.exit(3)\n"),
            "refuses": lab.peer("def make(device, dtype): raise ValueError('too wide')\n"),
            "hangs": lab.peer("import time\ntime.sleep(99)\n", timeout_s=0.5),
        },
        budget_s=0.05,
    )
    assert rows.cases == ["here", "runs", "crashes", "exits", "refuses", "hangs"]
    status = {row.case: (row.status, row.note) for row in rows}
    assert status["runs"] == ("ok", "own process") and rows.value("runs") > 0
    assert status["crashes"] == ("crashed", "SIGSEGV")
    assert status["exits"] == ("crashed", "exit code 3")
    assert status["refuses"] == ("refused", "ValueError: too wide")
    assert status["hangs"] == ("timed out", "after 0.5 s")


def test_arguments_of_a_peer_must_travel():
    with pytest.raises(TypeError):
        lab.peer(PEER, n=object())


def test_rows_and_claims_reach_the_recorder_and_come_back(tmp_path, monkeypatch, capsys):
    file = tmp_path / "rows.jsonl"
    monkeypatch.setenv("REFLIB_LAB_ROWS", str(file))
    lab.measure("t", {"a": spin(1e-5)}, at={"bytes": 4}, budget_s=0.02)
    lab.claim("one is two", 1 == 2, otherwise="it is not")
    lab.claim("graphs are faster", None, otherwise="no GPU")
    rows, claims = executing.records_of(file.read_bytes())
    assert claims == [
        {"claim": "one is two", "holds": False, "otherwise": "it is not"},
        {"claim": "graphs are faster", "otherwise": "no GPU"},
    ]
    recording.dump(tmp_path / "recorded" / "t.h200.json", rows, claims)
    monkeypatch.setenv("REFLIB_RECORDED", str(tmp_path / "recorded"))
    (row,) = lab.recorded("t")
    assert row.at == {"bytes": 4} and row.to_data() == rows[0] and row.device
    assert lab.recorded("no such chapter") == ()
    recording.dump(tmp_path / "recorded" / "spoken.h200.json", [], claims, {"device": "D", "versions": {"torch": "2"}})
    spoken = json.loads((tmp_path / "recorded" / "spoken.h200.json").read_text())
    assert spoken["shared"] == {"device": "D", "versions": {"torch": "2"}} and spoken["claims"] == claims
    said = capsys.readouterr().out
    assert "✗ Does not hold here: one is two" in said and "it is not" in said and "? Not decided here: graphs" in said


def test_the_same_rows_make_the_same_file(tmp_path):
    rows = [{"name": "t", "case": c, "metric": "time", "value": 1 / 3, "unit": "µs"} for c in "ba"]
    recording.dump(tmp_path / "one.json", rows, [])
    recording.dump(tmp_path / "two.json", reversed(rows), [])
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_tables():
    rows = Rows(
        [
            Row("t", "a", "time", 1234.5, "µs", 10.0, {"bytes": 4096}),
            Row("t", "b", "time", None, "µs", None, {"bytes": 4096}, status="crashed", note="SIGSEGV"),
        ]
    )
    text = repr(rows)
    assert "1,234 ±5" in text and "crashed: SIGSEGV" in text and "4,096" in text
    assert '<th scope="row">a</th>' in rows._repr_html_()
    assert isinstance(rows[:1], Rows) and isinstance(rows + rows, Rows) and len(rows + rows) == 4
    assert rows.value("b") is None
    with pytest.raises(LabError, match="cases here: a, b"):
        rows.value("c")


def test_contenders_agree_and_have_their_own_code():
    def f(x):
        return torch.relu(x) + 1

    x = torch.randn(8)
    cases = lab.contenders(f, x, only=["eager"])
    assert list(cases) == ["eager"] and torch.equal(cases["eager"](), f(x))
    from reflib.lab.rivals import own_copy

    assert own_copy(f).__code__ is not f.__code__ and torch.equal(own_copy(f)(x), f(x))


def test_contenders_of_a_second_size_are_compiled_for_it(monkeypatch):
    """A copy of a function does not isolate it from what Dynamo has seen of its sizes."""
    compile = torch.compile
    monkeypatch.setattr("reflib.lab.rivals.has", lambda name: True)

    def f(x):
        return torch.relu(x + 1)

    def left_open(**how):
        torch._dynamo.reset()
        found = []

        def look(graph, inputs):
            found.append(any(isinstance(i, torch.SymInt) for i in inputs))
            return graph.forward

        monkeypatch.setattr(torch, "compile", lambda f, dynamic, mode: compile(f, backend=look, dynamic=dynamic))
        for n in (30, 40):
            lab.contenders(f, torch.randn(n), only=["TorchInductor"], **how)
        return found

    assert left_open() == [False, False]
    assert left_open(dynamic=None) == [False, True], "if copies do isolate now, dynamic=False need not be the default"


def test_a_long_text_of_a_peer_gets_its_settings():
    from reflib.lab.peer_texts import peer_text

    text = peer_text("ranged", compiler="reflib", points=[4, 128])
    assert text.endswith("SETTINGS.update({'compiler': 'reflib', 'points': [4, 128]})\n")
    for source in (text, peer_text("registered")):
        compile(source, "peer_source", "exec")
        assert "def make(device, dtype, " in source


def test_a_prediction_fails_in_both_directions(tmp_path, monkeypatch, capsys):
    file = tmp_path / "rows.jsonl"
    monkeypatch.setenv("REFLIB_LAB_ROWS", str(file))
    for measured in (1.9, 2.6, 1.4, None):
        lab.as_predicted("times as fast", measured, 2.0, otherwise="the cache holds it")
    _, claims = executing.records_of(file.read_bytes())
    assert [c.get("holds") for c in claims] == [True, False, False, None]
    assert claims[1]["otherwise"] == "more than predicted; the cache holds it"
    assert "✓ Holds here: times as fast: 1.90, predicted 2.00" in capsys.readouterr().out


def test_what_does_not_hold_here_is_told_from_the_recording(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REFLIB_RECORDED", str(tmp_path))
    monkeypatch.setattr(recording._Asked, "paths", {})
    made = [
        {"claim": "rows of 64: times a copy: 1.02, predicted 1.00", "otherwise": "exponentials", "holds": True},
        {"claim": "rows of 1024: times a copy: 1.31, predicted 1.00", "holds": False,
         "otherwise": "more than predicted; exponentials"},
        {"claim": "cutting two long rows makes their sum 6.06 times as fast", "holds": True,
         "otherwise": "two threads"},
    ]  # fmt: skip
    recording.dump(tmp_path / "t.h200.json", [], made, {"device": "NVIDIA H200"})

    def said(text, condition, otherwise):
        lab.claim(text, condition, otherwise=otherwise)
        return capsys.readouterr().out

    assert "Recorded" not in said("cutting two long rows", None, "two threads")  # no recording was asked for
    lab.recorded("t")
    assert "Recorded" not in said("cutting two long rows makes their sum 2.00 times as fast", True, "two threads")
    fast = "  Recorded on NVIDIA H200: ✓ cutting two long rows makes their sum 6.06 times as fast\n"
    assert said("cutting two long rows makes their sum (not measured) as fast", None, "two threads").endswith(fast)
    assert "Recorded" not in said("something else altogether", False, "two threads")
    lab.as_predicted("rows of 64: times a copy", 2.0, 1.0, otherwise="exponentials")
    lab.as_predicted("rows of 1024: times a copy", None, 1.0, otherwise="exponentials")
    first, second = (line for line in capsys.readouterr().out.splitlines() if "Recorded" in line)
    assert "✓ rows of 64: times a copy: 1.02" in first and "✗ rows of 1024: times a copy: 1.31" in second
    recording.dump(tmp_path / "t.h200.json", [], made, {"device": current().machine.name})
    assert "Recorded" not in said("cutting two long rows makes their sum 1.00 times as fast", False, "two threads")


# -- a CPU that is shared, and memory of the system's ---------------------------------------------------
def test_a_busy_cpu_has_fewer_threads_and_the_processors_clock(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: numbers.append(n))
    for name in ("OMP_NUM_THREADS", timing.CPU_CLOCK):
        monkeypatch.setenv(name, "wall")
    for got, threads, clock in ((3.6, None, "wall"), (2.7, 2, "wall"), (0.2, 1, "processor")):
        numbers = []
        monkeypatch.setattr(machine, "cores_got", lambda got=got: got)
        assert bool(machine.use_free_cores()) is (threads is not None)
        assert numbers == ([threads] if threads else [])
        assert lab.measure("t", {"a": lambda: None}, budget_s=0.01)[0].clock == clock
        if threads:
            assert os.environ["OMP_NUM_THREADS"] == str(threads)
    slept = lab.measure("t", {"a": lambda: time.sleep(0.02)}, rounds=5)
    assert slept.value("a") < 10_000  # a process that waits uses no processor


FAULTS = """
import resource
import torch
from reflib.lab import machine

def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(size // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

size = 2**27
new = faults(size)
machine.keep_pages()
for _ in range(4):  # until there are holes enough: an aligned piece needs a little more than it fills
    faults(size)
print(new > 1000, faults(size) < new / 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_kept_pages_are_not_asked_for_again():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"


def test_the_roofline_bounds():
    roof = lab.Roofline("x", bandwidth=1000.0, flops=1.0, launch=5.0, dtype="float32")
    assert roof.ridge == 1.0 and roof.limit(0.5) == 0.5 and roof.limit(9) == 1.0
    assert roof.time(1e6) == pytest.approx(1.0) and roof.time(0, 1e6) == pytest.approx(1.0)


# -- `lab.measure_memory`: the allocator's peak of a call -------------------------------------------
CPU = torch.device("cpu")


def three(x):
    y = torch.tanh(x + x)
    return y + x


def test_the_peak_is_what_is_alive_at_once(capfd):
    x = torch.randn(512, 33)
    assert peak_bytes(lambda: three(x), CPU) == 2 * x.nbytes  # y beside x + x, or beside the result
    assert peak_bytes(lambda: x.tanh().tanh().tanh(), CPU) == 2 * x.nbytes
    assert peak_bytes(lambda: [x + x, x.neg(), x * x], CPU) == 3 * x.nbytes
    lab.setup(device="cpu", quiet=True)
    assert peak_bytes(lambda: None) == 0
    compiled = reflib.compile(three, dynamic=False)
    compiled(x)
    assert peak_bytes(lambda: compiled(x), CPU) == reflib.explain(three, x).memory.peak_bytes == x.nbytes
    assert capfd.readouterr() == ("", "")


def test_rows_and_their_ratios():
    x = torch.randn(1000, 250)
    cases = {"eager": lambda: x.neg().exp(), "one": lambda: x.neg()}
    rows = lab.measure_memory("peak", cases, at={"model": "m"}, device=CPU)
    assert [(r.case, r.metric, r.value, r.unit) for r in rows] == [
        ("eager", "peak memory", 2.0, "MB"), ("one", "peak memory", 1.0, "MB"),
    ]  # fmt: skip
    assert speeds(rows, "eager", ("model",), "peak memory") == {"one": {"m": 2.0}}
    assert speeds(rows, "eager", ("model",)) == {}
