"""Wrappers that return early."""

import pytest
import torch

import reflib
from reflib.errors import LabError
from reflib.lab.cut_wrapper import cut, cut_graphs, statements

X, W = torch.randn(8), torch.randn(8)


def explained(language: str, **options):
    return reflib.explain(lambda x, w: torch.relu(x + w), X, W, wrapper=language, dynamic=False, **options)


@pytest.mark.parametrize("language", ["python", "cpp"])
def test_each_graph_does_one_statement_more(language: str) -> None:
    graphs = cut_graphs(explained(language), language)
    assert graphs[0][0] == "" and len(graphs) > 4
    for _, call in graphs[:-1]:
        given = [X, W]
        assert all(value is None for value in call(given))
    assert torch.equal(graphs[-1][1]([X, W])[0], torch.relu(X + W))


CPP = """
extern "C" int32_t reflib_call(x) try {
  Run run(h);
  Tensor a;
  run.step("b");
  if (c) {
    d();
  } else {
    e();
  }
  out[0] = f();
  return 0;
} catch
"""
PYTHON = """
def call(args):
    a, = args
    with g(0):
        s = h()
        if c:
            d()
        else:
            e()
        return (s,)
"""


def test_blocks_stay_whole() -> None:
    assert [s.splitlines()[-1].strip() for s in statements(CPP, "cpp")] == ["}", "out[0] = f();"]
    one = cut(CPP, "cpp", 1)
    assert "f()" not in one and "e()" in one and "Tensor a" in cut(CPP, "cpp", 0)
    assert [s.split()[0] for s in statements(PYTHON, "python")] == ["a,", "with", "s", "if", "return"]
    for keep in range(6):
        compile(cut(PYTHON, "python", keep), "text", "exec")
    with pytest.raises(LabError, match="5 statements"):
        cut(PYTHON, "python", 6)
