"""The fusion graph as a figure: what it holds, and that its words say why not."""

import pytest
import torch

import reflib
from reflib import lab
from reflib.lab.moving import MIME


def f(x, w):
    y = torch.relu(x)
    return y + torch.sort(y, 0).values * w, x.sum(0)


@pytest.fixture(scope="module")
def e():
    return reflib.explain(f, torch.randn(1000, 8), torch.randn(1000, 8), target="sm_90", dynamic=False)


def test_it_says_why_not_in_words_and_on_the_edge(e):
    chart = lab.fusion_graph(e, caption="why not")
    spec = chart._repr_mimebundle_()[MIME]
    assert "needs the one and is needed by the other" in spec["description"]
    dashed = next(p for p in spec["layer"] if p["mark"].get("strokeDash"))
    assert {"order", "call"} <= {v["reason"] for v in dashed["data"]["values"]}
    assert {t["field"] for t in dashed["encoding"]["tooltip"]} == {"pair", "reason", "because"}


def test_every_node_and_nothing_off_the_page(e):
    spec = lab.fusion_graph(e, caption="c").spec
    low, high = spec["encoding"]["x"]["scale"]["domain"]
    boxes = next(p for p in spec["layer"] if p["mark"]["type"] == "rect")["data"]["values"]
    assert {b["node"] for b in boxes} == {n.name for n in e.program.nodes}
    assert all(low <= v["x"] <= high for p in spec["layer"] for v in p["data"]["values"] if "x" in v)
