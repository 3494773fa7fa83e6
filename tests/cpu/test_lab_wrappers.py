"""Wrappers that return early, and both printers' texts beside each other."""

import pytest
import torch

import reflib
from reflib.errors import LabError
from reflib.lab.cut_wrapper import cut, cut_graphs, statements
from reflib.lab.step_table import step_table

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


# -- both printers' texts beside each other -----------------------------------------------------------
def steps_of(target: str):
    def f(x, w):
        return torch.relu(x @ w) + 1

    return step_table(reflib.explain(f, torch.randn(4, 8), torch.randn(8, 8), target=target, dynamic=False))


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_every_step_is_printed_in_both_languages(target: str) -> None:
    table = steps_of(target)
    kinds = [what.split()[0].rstrip(":") for what, _, _ in table.steps]
    assert kinds[0] == "entry" and kinds[-1] == "Return"
    assert {"Launch", "Branch"} & set(kinds)
    for what, python, cpp in table.steps:
        assert bool(python) or bool(cpp), what
        assert not any(line.strip().startswith("//") for line in cpp.splitlines())  # the IR is the heading


def test_it_shows_itself_as_a_table_and_as_text() -> None:
    table = steps_of("cpu")
    html = table._repr_html_()
    assert html.count('<th scope="rowgroup"') == len(table.steps)
    assert "<pre" in html and "empty&lt;2&gt;(" in html
    text = repr(table)
    assert text.splitlines()[0] == table.title
    assert "   Python | " in text and "   C++    | " in text
