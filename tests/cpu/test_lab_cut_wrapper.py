"""Wrappers that return early."""

from __future__ import annotations

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


def test_blocks_stay_whole() -> None:
    text = 'extern "C" int32_t reflib_call(x) try {\n  Run run(h);\n  Tensor a;\n  run.step("b");\n  if (c) {\n    d();\n  } else {\n    e();\n  }\n  out[0] = f();\n  return 0;\n} catch\n'
    assert [s.splitlines()[-1].strip() for s in statements(text, "cpp")] == ["}", "out[0] = f();"]
    assert "f()" not in cut(text, "cpp", 1) and "e()" in cut(text, "cpp", 1) and "Tensor a" in cut(text, "cpp", 0)
    text = "def call(args):\n    a, = args\n    with g(0):\n        s = h()\n        if c:\n            d()\n        else:\n            e()\n        return (s,)\n"
    assert [s.split()[0] for s in statements(text, "python")] == ["a,", "with", "s", "if", "return"]
    for keep in range(6):
        compile(cut(text, "python", keep), "text", "exec")
    with pytest.raises(LabError, match="5 statements"):
        cut(text, "python", 6)
