"""What the benchmark rests on: nothing of a child is left, and a disturbed device is noticed."""

import contextlib
import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reflib.lab.timing import Samples
from tests.bench import children, products, quiet
from tests.processes import running, soon

# a worker in a session of its own, whose parent does not wait for it
PARENT = """import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(worker.pid))
time.sleep(float(sys.argv[2]))
"""


@contextlib.contextmanager
def parent(folder: Path, seconds: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """(A child that ends by itself after so long, a worker that it has started)."""
    (folder / "a_parent.py").write_text(PARENT)
    words, pid = [str(folder / "pid"), str(seconds)], folder / "pid"
    with children.started("a_parent", words, {"PYTHONPATH": str(folder)}, subprocess.DEVNULL) as child:
        assert soon(lambda: pid.exists() and pid.read_text(), 60)
        yield child, int(pid.read_text())


@pytest.mark.parametrize("seconds", [0, 600])
def test_a_childs_workers_end_with_it(tmp_path: Path, seconds: int) -> None:
    with parent(tmp_path, seconds) as (child, worker):
        assert running(worker)
        if not seconds:
            child.wait()
    assert bool(child.returncode) == bool(seconds) and not running(worker)


def test_all_that_is_left_is_found(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with parent(tmp_path, 600) as (child, worker):
            children.end_all()
            assert not running(worker) and not running(child.pid) and other.poll() is None
    finally:
        other.kill()
        other.wait()


class Scripted(quiet.Reference):
    """A reference whose samples are given: times idle, the last for ever."""

    def __init__(self, *values: float):
        self.device, self.patience, self.idle, self.fn = torch.device("cpu"), 1e9, 1.0, lambda: None
        self.values = values

        def told() -> Iterator[float]:
            yield from values
            while True:
                yield values[-1]

        self.sample = told().__next__


@pytest.mark.parametrize(
    "readings, attempts, disturbed",
    [([1.0], 1, False), ([1.0, 1.1, 1.0], 1, False), ([1.0, 1.0, 3.0, 1.0], 2, False), ([2.0], 3, True)],
)
def test_a_disturbed_case_is_timed_again_then_labelled(
    readings: list[float], attempts: int, disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading is a number of samples: before, among the contenders and after, attempt by attempt."""
    reference = Scripted(*(r for r in readings for _ in range(quiet.SAMPLES)))

    def timed(fns: dict, *_: object) -> dict[str, Samples]:
        among = tuple(reference.sample() for _ in range(quiet.SAMPLES))
        return {who: Samples(among if who == quiet.REFERENCE else (1.0,) * 5, "own") for who in fns}

    monkeypatch.setattr(quiet, "time_cases", timed)
    monkeypatch.setattr(quiet, "WAIT", 0.0)
    found, about = quiet.time_quietly({"a": lambda: None}, reference, 5, 0.1)
    assert list(found) == ["a"] and (about["attempts"], about["disturbed"]) == (attempts, disturbed)


# -- weight-only, scaled and grouped products, on a CPU ---------------------------------------------
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "fp8 gelu", "grouped", "grouped gradient"])
def test_products_agree_with_their_reference(kind: str) -> None:
    made = next(m for m in products.MODELS if m.name.startswith(f"{kind} "))
    module = made.build(False)[0].to(torch.bfloat16)
    for got, exact in zip(module(), copy.deepcopy(module).to(torch.float64)(), strict=True):
        assert got.dtype == torch.bfloat16 and exact.dtype == torch.float64
        assert float((got - exact).abs().max() / exact.abs().max()) < 2e-2
