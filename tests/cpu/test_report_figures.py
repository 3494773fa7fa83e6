"""The figures of a report's page: what is left out, joined or cut short in them is said, and the peak is the peak."""

import math
from typing import Any

import pytest

from reflib.lab.report import drawing


def chain(n: int) -> dict[str, Any]:
    nodes = [{"name": f"n{i}", "ops": ["add"], "call": False, "group": i, "at": (0, i), "lines": ""} for i in range(n)]
    edges = [{"from": f"n{i}", "to": f"n{i + 1}", "buffers": ["b"], "bytes": 4} for i in range(n - 1)]
    return {"nodes": nodes, "inputs": [], "edges": edges}


def test_what_cannot_be_read_is_not_drawn() -> None:
    assert drawing.graph(chain(drawing.MOST_NODES + 1), "c") is None and drawing.graph(chain(0), "c") is None
    assert drawing.timeline([], "c") is None
    assert drawing.memory({"moments": [], "peak": None, "peak_bytes": 0}, "c") is None


def test_refused_pairs_are_joined_once() -> None:
    refused = [("n0", "n2", "order", "why <not>"), ("n0", "n2", "order", "why <not>"), ("n0", "gone", "call", "")]
    figure = drawing.graph(chain(3), "c", refused)
    assert figure is not None and "n0 with n2 (order)" in figure.alt
    (line,) = [s for s in figure.shapes if s.attrs["class"] == "refused"]
    assert line.title == "n0 and n2 not fused (order): why <not>"


@pytest.mark.parametrize("more", [0, 1000])
def test_the_peak_is_where_the_bars_are_highest(more: int) -> None:
    sizes = [10, 40, *[20] * (more + 1)]
    moments = [{"label": f"k{i}", "ops": [], "bytes": b, "live": [["a", b]]} for i, b in enumerate(sizes)]
    data = {"moments": moments, "peak": 1, "peak_bytes": 40, "allocations": 1, "reuses": 2}
    figure = drawing.memory(data, "c")
    assert figure is not None and "40 B at step 2, k1" in figure.alt
    bars = [s.attrs["height"] for s in figure.shapes if s.attrs["class"].startswith("bar")]
    assert len(bars) <= drawing.MOST_BARS and bars.index(max(bars)) == (0 if more else 1)
    assert math.isclose(max(bars), 2 * bars[-1], rel_tol=0.02)


def test_a_slow_case_does_not_flatten_the_rest() -> None:
    figure = drawing.bars([("a", 1.0, 0.1, "1", 0), ("b", 1000.0, 1.0, "1000", 1)], "c", "alt")
    widths = [s.attrs["width"] for s in figure.shapes if s.tag == "rect"]
    assert math.isclose(widths[1], drawing.SLOWEST * widths[0]) and "▶ 1000" in [s.text for s in figure.shapes]
