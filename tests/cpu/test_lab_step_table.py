"""Both printers' texts beside each other."""

import pytest
import torch

import reflib
from reflib.lab.step_table import step_table


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
    assert html.count("<th scope=\"rowgroup\"") == len(table.steps)
    assert "<pre" in html and "&lt;" in html  # empty<2>(...) is escaped
    text = repr(table)
    assert text.splitlines()[0] == table.title
    assert "   Python | " in text and "   C++    | " in text
