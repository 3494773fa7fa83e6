"""Pictures of a compilation, and kernels from a reader's own text."""

import shutil

import pytest
import torch

import reflib
from reflib import lab
from reflib.errors import LabError
from reflib.lab import pictures


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
    from reflib.lab.figures import COLOURS, colour, palette

    assert palette(["reflib", "eager"]) == {"reflib": 2, "eager": 0}
    assert palette(["reflib, tuned", "reflib", "TorchInductor max-autotune", "by hand"]) == {
        "reflib, tuned": 3, "reflib": 2, "TorchInductor max-autotune": 1, "by hand": 4,
    }  # fmt: skip
    assert palette(["parts: 1", "parts: 4"]) == {"parts: 1": 3, "parts: 4": 4}
    assert not {colour(i) for i in range(3, 30)} & set(COLOURS[:3])
