"""`lab.trade`, `lab.cut_picture` and `lab.counted`: memory of a training step, counted and drawn."""

from types import SimpleNamespace

import pytest
import torch

from reflib import lab
from reflib.errors import LabError
from reflib.lab import rows, session
from reflib.lab.rows import Row, Rows

CPU = SimpleNamespace(device=torch.device("cpu"), machine=SimpleNamespace(name="a CPU"), versions={}, commit="")


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(session, "current", lambda: CPU)


def test_counted_rows_are_recorded(here, tmp_path, monkeypatch):
    monkeypatch.setenv(rows.ROWS_FILE, str(tmp_path / "rows"))
    found = lab.counted("step", "memory", {"eager": 12})
    assert found.value("eager", "memory") == 12 and found[0].unit == "bytes" and found[0].device == "a CPU"
    assert '"metric": "memory"' in (tmp_path / "rows").read_text()


def test_points_of_a_case_are_joined_in_order():
    def both(case, ms, mb, device="a CPU"):
        pairs = ("time", ms * 1e3, "µs"), ("memory", mb * 1e6, "bytes")
        return [Row("step", case, metric, value, unit, device=device) for metric, value, unit in pairs]

    mine = Rows(both("eager", 9, 30) + both("x, budget 1", 5, 20) + both("x, budget 0", 7, 22))
    mine += [Row("step", "never measured", "time", 1.0, "µs", device="a CPU")]
    picture = lab.trade(mine, recorded=Rows(both("eager", 1, 2, "a GPU")), floor=("least", 2e3), caption="A step.")
    assert "x: budget 1: 20.0 MB, 5.00 ms, budget 0: 22.0 MB, 7.00 ms" in picture.alt
    assert "a GPU (recorded), eager: 2.00 MB" in picture.alt and "A line at 2.00 ms: least" in picture.alt
    assert "never" not in picture.alt and picture.svg.count("<svg") == 1


def test_nothing_to_draw_is_said(capsys):
    assert lab.trade(Rows(), caption="A step.") is None
    assert "no memory was measured" in capsys.readouterr().out


def test_a_cut_is_drawn():
    values = {"x": (4096, ()), "d": (4 << 20, ("x",)), "s": (4096, ("d",))}
    fate = {"x": "saved", "d": "computed again", "s": "forward only"}
    picture = lab.cut_picture(values, fate, ["d"], caption="Three.")
    assert "x, 4 KiB: saved; d, 4 MiB: computed again, read; s, 4 KiB: forward only." in picture.alt
    with pytest.raises(LabError, match="lost is not one of"):
        lab.cut_picture(values, fate | {"s": "lost"}, [], caption="Three.")
