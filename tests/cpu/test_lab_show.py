"""`lab.show`, `lab.check`, figures and the package itself."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from reflib import lab
from reflib.errors import LabError
from reflib.lab import figures, pipeline_strip, showing, timing
from reflib.lab.rows import Row, Rows


def test_importing_the_lab_is_cheap():
    code = (
        "import sys, reflib.lab as lab; assert 'measure' in dir(lab);"
        "heavy = set(sys.modules) & {'torch', 'matplotlib', 'numpy', 'IPython'}; assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_of_the_lab_loads():
    for name in lab.__all__:
        assert callable(getattr(lab, name)), name
    with pytest.raises(AttributeError):
        _ = lab.no_such_name


def test_source_comes_from_its_module_without_paths_of_this_machine():
    listing = showing.listing(timing.quantile)
    assert listing.title == "reflib/timing.py: quantile"
    assert listing.source.startswith("def quantile") and "```python" in listing._repr_markdown_()
    assert showing.listing(torch.nn.Linear).title == "torch/nn/modules/linear.py: Linear"
    assert showing.listing(timing).title == "reflib/lab/timing.py"
    assert showing.listing(3) is None
    with pytest.raises(LabError, match="no Python source"):
        showing.listing(len)


def test_kernels_are_shown_in_their_language(capsys):
    kernels = [SimpleNamespace(name="k0", language="cpp", source="int x;\n")]
    lab.show(kernels)
    assert capsys.readouterr().out == "k0\n\nint x;\n"
    assert "```cpp\nint x;\n```" in showing.listing(kernels[0])._repr_markdown_()


def test_tables_of_dicts_and_lines(capsys):
    lab.table([{"a": 1, "b": 2.5}, {"a": 10_000}])
    lab.table([("x", 1)], "name", "n")
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["a", "b"] and out[2].split() == ["10,000"] and out[4].split() == ["x", "1"]


def stub(x):
    """To be written."""
    ...


def stub_that_raises(x):
    raise NotImplementedError


@pytest.mark.parametrize("answer", [None, ..., stub, stub_that_raises, lambda x: None])
def test_an_unfilled_stub_is_not_a_failure(answer, capsys):
    assert lab.check(answer, ((1,), 2), hint="add one") is None
    assert "Not filled in yet. Hint: add one" in capsys.readouterr().out


def test_right_and_wrong_answers(capsys):
    tests = [((1,), 2), ((torch.ones(2),), torch.full((2,), 2.0)), lambda f: f(0) == 1]
    assert lab.check(lambda x: x + 1, *tests) is True
    assert lab.check(lambda x: x * 2, *tests, hint="add") is False
    assert lab.check(lambda x: 1 / 0, *tests) is False
    assert lab.check(lambda x: x, lambda f: "it does nothing") is False
    for other in (torch.ones(2, dtype=torch.float64), torch.ones(2, 1)):
        assert lab.check(lambda x, other=other: other, ((0,), torch.ones(2))) is False

    def asserting(f):
        assert f(1) == 2, "one more is two"

    assert lab.check(lambda x: x, asserting) is False
    out = capsys.readouterr().out
    for said in ("3 of 3 tests", "test 3 of 3", "Hint: add", "ZeroDivisionError", "it does nothing", "one more is two"):
        assert said in out


def sweep(device, scale):
    return Rows(
        Row("t", case, "time", v * scale, "µs", 0.1, {"bytes": 1024 * 4**i}, device=device)
        for case in ("eager", "fused")
        for i, v in enumerate((3.0, 5.0, 60.0))
    )


def test_lines_say_in_words_what_they_draw(capsys):
    picture = lab.lines(sweep("CPU", 1), recorded=sweep("NVIDIA H200", 0.1), caption="c", levels={"floor": 1.0},
                        curves={"the limit": lambda size: size / 1024})  # fmt: skip
    assert picture.alt.endswith("the limit: 1.00 at 1 KiB, 16.0 at 16 KiB.")
    assert "eager, CPU: 3.00 at 1 KiB, 60.0 at 16 KiB." in picture.alt
    assert "fused, H200 (recorded): 0.3 at 1 KiB" in picture.alt and "at 1.00: floor" in picture.alt
    html = picture._repr_html_()
    assert 'alt="Line chart' in html and ">c</figcaption>" in html and "max-width" in html
    assert "[figure: Line chart" in capsys.readouterr().out


def test_rows_of_the_recordings_own_device_replace_it():
    picture = lab.lines(sweep("NVIDIA H200", 1), recorded=sweep("NVIDIA H200", 0.1), caption="c")
    assert "recorded" not in picture.alt


def test_bars_keep_a_place_for_what_failed():
    rows = Rows([*sweep("CPU", 1)[:1], Row("t", "peer", "time", None, "µs", status="crashed", device="CPU")])
    picture = lab.bars(rows, recorded=sweep("NVIDIA H200", 0.1)[:1], caption="c")
    assert "eager 3.00, peer crashed" in picture.alt and "NVIDIA H200 (recorded)" in picture.alt


def test_nothing_to_draw_is_said(capsys):
    assert lab.lines(Rows(), caption="c") is None and lab.bars(Rows(), caption="c") is None
    assert "none is recorded yet" in capsys.readouterr().out


def test_a_figure_is_the_same_bytes_every_time():
    roof = lab.Roofline("x", 1000.0, 1.0, 5.0, "float32")
    one, two = (lab.roofline_plot(roof, {"add": (0.1, 0.05)}, caption="c") for _ in range(2))
    assert one.svg == two.svg and "50% of its limit" in one.alt
    assert "<metadata>" not in one.svg and "scale(0.0)" not in one.svg


def test_a_figure_needs_words():
    import matplotlib.pyplot as plt

    with pytest.raises(LabError, match="caption and an alt"):
        lab.figure(plt.figure(), caption="c", alt=" ")
    plt.close("all")


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_stand_out_on_their_white_ground():
    contrast = {c: 1.05 / (luminance(c) + 0.05) for c in (*figures.COLOURS, figures.INK, figures.QUIET)}
    assert all(v >= 3 for c, v in contrast.items() if c in figures.COLOURS), contrast
    assert contrast[figures.INK] >= 7 and contrast[figures.QUIET] >= 4.5


def test_the_strip_lights_its_stage():
    assert "**[fuse]**" in lab.strip("fuse") and "**" not in lab.strip()
    assert lab.strip().split(" → ") == list(pipeline_strip.STAGES)
    with pytest.raises(LabError):
        lab.strip("cook")  # noqa: B005
