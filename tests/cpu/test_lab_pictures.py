"""Pictures of a compilation, of fusion, memory and decisions; kernels from a reader's own text."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import reflib
from reflib import lab
from reflib.errors import LabError
from reflib.ir.decision import Candidate, Decision, Key
from reflib.lab import pictures, rows, session
from reflib.lab.moving import MIME
from reflib.lab.rows import ROWS_FILE, Row, Rows


def f(x, b, w):
    y = torch.softmax(torch.nn.functional.gelu(x + b), dim=-1)
    return y @ w, y.sum(0)


@pytest.fixture(scope="module")
def e():
    args = torch.randn(64, 100), torch.randn(100), torch.randn(100, 8)
    return reflib.explain(f, *args, target="cpu", dynamic=False)


def test_moved_bytes_counts_each_buffer_once_a_kernel():
    e = reflib.explain(lambda x: (x * x + 1).relu(), torch.randn(10, 100), target="cpu", dynamic=False)
    assert lab.moved_bytes(e.program) == 3 * 2 * 4000
    assert lab.moved_bytes(e.fused) == 2 * 4000


def test_each_picture_says_in_words_what_it_shows(e):
    stages = lab.stages_picture(e, caption="stages")
    assert "lower: a program of 9 nodes" in stages.alt and "1 pair refused" in stages.alt
    fusion = lab.fusion_picture(e, caption="fusion")
    assert "before: 9 kernels" in fusion.alt and "after: 3 kernels" in fusion.alt and "axes" in fusion.alt
    memory = lab.memory_picture({"fused": e.memory}, caption="memory")
    assert f"peak {pictures.megabytes(e.memory.peak_bytes)}" in memory.alt
    assert "fuse" in lab.timeline_picture(e, caption="time").alt
    assert all(p.svg.startswith("<svg") for p in (stages, fusion, memory))


def test_refusals_are_told_with_the_names_of_the_ops(e):
    assert [(r["producer"], r["code"]) for r in lab.refusals(e)] == [("op6 (div)", "axes")]


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_a_readers_kernel_runs():
    source = 'extern "C" void twice(const float* x, float* y) { for (int i = 0; i < 8; ++i) y[i] = 2 * op::erf(x[i]); }'
    x, y = torch.randn(8), torch.empty(8)
    lab.load_kernel("twice", source, "cpp")(x, y)
    torch.testing.assert_close(y, 2 * torch.erf(x))
    double = lab.load_kernel("twice", source, "cpp", result=x)
    torch.testing.assert_close(torch.fx.Interpreter(as_graph(double)).run(x), y)
    with pytest.raises(LabError, match="cpp"):
        lab.load_kernel("twice", source, "fortran")


def as_graph(kernel):
    graph = torch.fx.Graph()
    graph.output(graph.call_function(kernel, (graph.placeholder("x"),)))
    module = torch.fx.GraphModule({}, graph)
    assert "kernels_twice(x)" in module.code
    return module


def test_who_is_in_many_figures_has_the_same_colour_in_all():
    from reflib.lab.figures import COLOURS, colour, colours, palette

    assert palette(["reflib", "eager"]) == {"reflib": 2, "eager": 0}
    assert palette(["reflib, tuned", "reflib", "TorchInductor max-autotune", "by hand"]) == {
        "reflib, tuned": 3, "reflib": 2, "TorchInductor max-autotune": 1, "by hand": 4,
    }  # fmt: skip
    assert palette(["limit", "a", "b", "c", "d", "reflib"]) == {"reflib": 2, "limit": 6, "a": 3, "b": 4, "c": 5, "d": 7}
    assert colours(["limit", "reflib"]) == {"domain": ["limit", "reflib"], "range": [COLOURS[6], COLOURS[2]]}
    assert palette(["parts: 1", "parts: 4"]) == {"parts: 1": 3, "parts: 4": 4}
    assert COLOURS[-1] not in {colour(i) for i in palette(list("abcdefgh")).values()}  # the limit's
    assert not {colour(i) for i in range(3, 30)} & set(COLOURS[:3])


def test_axes_write_plain_numbers():
    import matplotlib.pyplot as plt

    from reflib.lab.figures import plain, to_svg

    assert [plain(v) for v in (1048576, 65536.0, 0.25, 20, 0)] == ["1,048,576", "65,536", "0.25", "20", "0"]
    fig, ax = plt.subplots()
    ax.plot([0, 1], [0, 4000])
    assert "<!-- 4,000 -->" in to_svg(fig)


# -- the fusion graph, as a figure to move ------------------------------------------------------------
def sorted_too(x, w):
    y = torch.relu(x)
    return y + torch.sort(y, 0).values * w, x.sum(0)


@pytest.fixture(scope="module")
def whynot():
    return reflib.explain(sorted_too, torch.randn(1000, 8), torch.randn(1000, 8), target="sm_90", dynamic=False)


def test_it_says_why_not_in_words_and_on_the_edge(whynot):
    chart = lab.fusion_graph(whynot, caption="why not")
    spec = chart._repr_mimebundle_()[MIME]
    assert "needs the one and is needed by the other" in spec["description"]
    dashed = next(p for p in spec["layer"] if p["mark"].get("strokeDash"))
    assert {"order", "call"} <= {v["reason"] for v in dashed["data"]["values"]}
    assert {t["field"] for t in dashed["encoding"]["tooltip"]} == {"pair", "reason", "because"}


def test_every_node_and_nothing_off_the_page(whynot):
    spec = lab.fusion_graph(whynot, caption="c").spec
    assert json.loads(json.dumps(spec)) == spec
    low, high = spec["encoding"]["x"]["scale"]["domain"]
    boxes = next(p for p in spec["layer"] if p["mark"]["type"] == "rect")["data"]["values"]
    assert {b["node"] for b in boxes} == {n.name for n in whynot.program.nodes}
    assert all(low <= v["x"] <= high for p in spec["layer"] for v in p["data"]["values"] if "x" in v)


# -- memory of a training step, counted and drawn -----------------------------------------------------
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


# -- decisions: every candidate, the failed ones with their reason ------------------------------------
TIMED = tuple(Candidate(Key(f"tiled {i}"), "ok", 10.0 + i, 9.0 + i, 10.0 + i, 0.05, 1e-6) for i in range(20))
DECISION = Decision(
    "op0",
    (Key("split(k=4)"),),
    (
        Candidate(Key("eager"), "ok", 7.0, 6.0, 7.0, spread=0.02, error=1e-6),
        Candidate(Key("split(k=4)"), "ok", 4.0, 3.5, 4.0, 0.5, 2e-6, "weights not quite cold: 3 copies"),
        Candidate(Key("worst"), "ok", 400.0, 399.0, 400.0, why="out after a short round"),
        *TIMED,
        Candidate(Key("bad"), "raised", why="ValueError: not today"),
    ),
    "split(k=4) is faster",
)


@pytest.fixture(scope="module")
def chosen():
    @torch.library.custom_op("lab_tests::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        torch.randn(300, 300) @ torch.randn(300, 300)
        return x / 2

    @halved.register_fake
    def _(x):
        return torch.empty_like(x)

    def half(x):
        return x * 0.5

    def wrong(x):
        return x * 0.25

    reflib.register_custom_op_autotuning(halved, configs=[half, wrong])
    return reflib.explain(lambda x: halved(x + 1).relu(), torch.randn(64, 64), autotune="blocking", dynamic=False)


def test_every_candidate_is_drawn_or_counted_with_its_time_or_reason():
    picture = lab.candidates(DECISION, caption="c")
    assert "split(k=4): 4.00 chosen, spread 2" in picture.alt and "eager: 7.00 (1.75x)" in picture.alt
    assert "and 11 slower candidates" in picture.alt and "bad: raised: ValueError: not today" in picture.alt
    assert picture.alt.index("split(k=4)") < picture.alt.index("eager") < picture.alt.index("tiled 0")
    assert "and 11 slower" not in lab.candidates(DECISION, caption="c", most=99).alt


def test_a_winner_beyond_the_limit_is_drawn_all_the_same():
    picture = lab.candidates(replace(DECISION, winners=(Key("worst"),)), caption="c", most=3)
    assert "worst: 400 (100.00x) chosen" in picture.alt


def test_a_panel_a_place_and_another_for_a_recording():
    rows = tuple(replace(c, where=w) for w in ("m=8", "m=64") for c in DECISION.candidates[:2])
    own = lab.decision_rows("here", replace(DECISION, candidates=rows))
    other = lab.Rows(replace(r, device="NVIDIA H200") for r in own)
    alt = lab.candidates(own, caption="c", recorded=other).alt
    assert alt.count("split(k=4): 4.00 chosen") == 4 and "m=64 (recorded)" in alt and "H200" in alt
    assert "(recorded)" not in lab.candidates(own, caption="c", recorded=own).alt


def test_rows_of_a_decision_reach_the_recording_and_drawing_adds_none(tmp_path, monkeypatch):
    monkeypatch.setenv(ROWS_FILE, str(tmp_path / "rows"))
    rows = lab.decision_rows("problem", DECISION, k=4096)
    lab.candidates(DECISION, caption="c")
    kept = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(kept) == len(rows) and all(r["at"] == {"k": 4096} for r in kept)
    assert rows.value("split(k=4)") == 4.0 and rows.value("split(k=4)", "time, all warm") == 3.5
    assert rows.value("split(k=4)", "error") == 2e-6
    assert rows.where(case="bad")[0].status == "raised"
    assert rows.where(case="split(k=4)", metric="time")[0].spread == 2.0


def test_nothing_timed_is_nothing_drawn(capsys):
    none = Decision("k0", (), (Candidate(Key("heuristic"), "heuristic"),), "")
    assert lab.candidates(none, caption="c") is None
    assert "Nothing to draw" in capsys.readouterr().out


def test_before_a_choice_is_a_wall_and_afterwards_its_winner_is_part_of_a_kernel(chosen):
    assert chosen.decisions[0].winner == "half", chosen.decisions
    picture = lab.before_after(chosen, caption="c")
    assert "before: 2 kernels and 1 call" in picture.alt and "after: 1 kernel, " in picture.alt
    assert "? lab_tests.halved 3 ways" in picture.alt or "halved" in picture.alt
    assert picture.alt.endswith("What holds a part of a winner: add, mul, relu.")
    assert picture.svg == lab.before_after(chosen, caption="c").svg
    assert "wrong: wrong" in lab.candidates(chosen.decisions[0], caption="c").alt


def test_when_the_eager_op_stays_it_is_what_holds_the_winner():
    args = torch.randn(8, 8192), torch.randn(8192, 8)
    with lab.told_times(lambda name, sizes: 1.0 if name == "aten" else 2.0):
        chosen = reflib.explain(lambda x, y: torch.relu(x @ y), *args, autotune="blocking", dynamic=False)
    assert lab.before_after(chosen, caption="c").alt.endswith("What holds a part of a winner: mm (a call).")
