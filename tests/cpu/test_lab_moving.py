"""Figures to move: what their specifications hold, and what they say at each place. (tests/book moves them.)"""

import json
from types import SimpleNamespace

import pytest

from reflib import lab
from reflib.errors import LabError
from reflib.lab import moving, roof_slider
from reflib.lab.ceilings import Roofline
from reflib.lab.moving import MIME
from reflib.plan.memory import Change, Memory

ROOF = Roofline("a device", bandwidth=1000.0, flops=100.0, launch=5.0, dtype="float32")


@pytest.fixture(autouse=True)
def here():
    return lab.setup(device="cpu", quiet=True)


def params(found):
    return {p["name"]: p for p in found.spec["params"]}


def row(case, value, **more):
    return lab.Row("n", case, "time", value, "µs", status="ok" if value else "crashed", **more)


def test_a_figure_has_native_controls_words_and_its_numbers():
    found = lab.over_time({"a": [lab.Segment("works", 0, 2)], "b": [lab.Segment("rests", 1, 4)]}, caption="c")
    now = params(found)["now"]["bind"]
    assert now["input"] == "range" and (now["min"], now["max"]) == (0, 4)
    bundle = found._repr_mimebundle_()
    assert bundle[MIME] == found.spec
    json.dumps(found.spec)
    assert "works from 0 to 2.00" in found.alt and found.spec["description"] == found.alt
    table = moving.Numbers(found.spec)
    assert "<details><summary>" in table._repr_html_() and "<td>rests</td>" in table._repr_html_()
    assert "rests" in repr(table)
    with pytest.raises(LabError, match="caption"):
        lab.over_time({"a": [lab.Segment("works", 0, 2)]}, caption=" ")


def test_a_lane_does_one_thing_at_a_time_and_may_be_empty(capsys):
    with pytest.raises(LabError, match="lane 'a' overlap"):
        lab.over_time({"a": [lab.Segment("x", 0, 2), lab.Segment("y", 1, 3)]}, caption="c")
    assert lab.over_time({"a": []}, caption="c") is None and "Nothing to draw" in capsys.readouterr().out


def test_a_race_ends_with_the_slower_and_counts_the_faster():
    found = lab.race(lab.Rows([row("fast", 2.0), row("slow", 7.0)]), "fast", "slow", caption="c")
    calls = [s for s in found.spec["datasets"]["segments"] if s["lane"] == "fast"]
    assert [s["start"] for s in calls] == [0, 2, 4, 6] and calls[-1]["end"] == 7
    assert params(found)["now"]["bind"]["max"] == 7


def test_a_race_without_a_runner_says_so(capsys):
    rows = lab.Rows([row("fast", 2.0), row("slow", None)])
    assert lab.race(rows, "fast", "slow", caption="c") is None
    assert "no time of slow" in capsys.readouterr().out
    assert lab.race(rows, "fast", "absent", caption="c") is None


def test_a_point_is_measured_against_its_own_limit():
    versions = [("thin", 1e9, 1e9, 2000.0), lab.Version("thick", 1e12, 1e9, 20000.0), ("not here", 1.0, 1.0, None)]
    found = lab.roofline_slider(ROOF, versions, what="columns", caption="c")
    thin, thick = found.spec["datasets"]["versions"]
    assert thin["FLOPs per byte"] == 1 and thin["TFLOP/s"] == 0.5 and thin["limit"] == 1 and thin["µs at least"] == 1000
    assert thick["limit"] == 100 and thick["TFLOP/s"] == 50
    assert "thin: 1,000 MB moved; 1.00 FLOPs per byte, under the memory; 2,000 µs, 0.5 TFLOP/s: 50%" in found.alt
    assert "under the arithmetic; 20,000 µs, 50.0 TFLOP/s: 50% of its limit" in found.alt
    assert params(found)["stop"]["bind"]["max"] == 2
    with pytest.raises(LabError, match="no place under a roofline"):
        lab.roofline_slider(ROOF, [("a", 0.0, 1.0, 1.0)], what="w", caption="c")
    assert lab.roofline_slider(ROOF, [("a", 1.0, 1.0, None)], what="w", caption="c") is None
    assert roof_slider.TENS[0] > 0


def plan(*live):
    pairs = zip(({}, *live), live)
    return Memory((), tuple(Change(f"k{i}", now, old) for i, (old, now) in enumerate(pairs)))


def test_memory_is_scrubbed_step_by_step():
    plans = {"apart": plan({"a": 2_000_000}, {"a": 2_000_000, "b": 1_000_000}), "fused": plan({"b": 1_000_000})}
    found = lab.memory_scrubber(plans, caption="c")
    at_two = [(d["plan"], d["buffer"], d["MB"]) for d in found.spec["datasets"]["buffers"] if d["step"] == 2]
    assert at_two == [("apart", "a", 2), ("apart", "b", 1)]
    assert "apart, peak 3.00 MB: k0 2.00 MB; k1 3.00 MB." in found.alt
    assert "fused: done after 1 kernel" in params(found)["says"]["expr"]
    with pytest.raises(LabError, match="at least one kernel"):
        lab.memory_scrubber({"empty": plan()}, caption="c")


def test_blocks_are_counted_as_the_generator_lays_them():
    found = lab.block_slider(6, 20, caption="c")
    (lines,) = found.spec["datasets"].values()
    one = next(line for line in lines if (line["XBLOCK"], line["RBLOCK"]) == (2, 32))
    assert one == {"XBLOCK": 2, "RBLOCK": 32, "programs": 3, "steps": 1, "lanes beyond the edge": 72}
    with pytest.raises(LabError, match="at most 8 rows of 32"):
        lab.block_slider(9, 20, caption="c")


def package(**bytes_of):
    """What arch_explorer asks of an inspected package."""
    variants = [SimpleNamespace(arch=arch, made_for="sm_80" if arch == "ptx" else arch) for arch in bytes_of]
    manifest = SimpleNamespace(variants=variants)
    return SimpleNamespace(manifest=manifest, machine_code=lambda variant: bytes_of[variant.arch])


def test_each_gpu_is_offered_what_runs_there(capsys):
    found = lab.arch_explorer(package(cpu=1, sm_80=100, sm_86=120, sm_90=150, ptx=300), caption="c")
    runs = {(p["GPU"], p["code"]) for p in found.spec["datasets"]["code and GPUs"]}
    assert ("RTX 4090, L4", "sm_80") in runs and ("RTX 4090, L4", "sm_86") in runs
    assert ("H100, H200", "sm_80") not in runs and ("H100, H200", "PTX of sm_80") in runs
    assert ("T4", "PTX of sm_80") not in runs and ("T4", "nothing") in runs
    assert "sm_90, 150 bytes: H100, H200." in found.alt
    ticked = {name: p["value"] for name, p in params(found).items() if name.startswith("has_")}
    assert ticked == {"has_sm_80": True, "has_sm_86": False, "has_sm_90": False, "has_ptx": False}
    assert lab.arch_explorer(package(cpu=1), caption="c") is None and "no code for GPUs" in capsys.readouterr().out


def test_live_measures_at_once_and_again():
    asked = []

    def measure(n, way):
        asked.append((n, way))
        return lab.Rows([row(way, float(n))])

    shown = lab.live(measure, n=[1, 2], way=["a", "b"])
    assert asked == [(1, "a")] and shown.box is None
    assert shown.again(n=2).value("a") == 2 and asked[-1] == (2, "a")
    assert "Measured at n = 2, way = a" in repr(shown) and "2.00" in repr(shown)
    assert set(shown._repr_mimebundle_()) == {"text/plain"}
    with pytest.raises(LabError, match="way has no values"):
        lab.live(measure, n=[1], way=[])
