"""lab.measure_memory: the allocator's peak of a call, eager's and a compiled one's in the same way."""

import torch

import reflib
from reflib import lab
from reflib.lab.peak_memory import peak_bytes
from reflib.lab.ratio_chart import speeds

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
