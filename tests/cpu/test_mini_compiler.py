"""The module that two chapters grow, a compiler: each step by itself, and the whole against eager."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reflib.errors import LabError
from reflib.lab import growing
from reflib.lab import notebook as nb
from tests.interpreter import interpreted

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FIRST, SECOND = (
    [cell.source for cell in nb.read(NOTEBOOKS / f"{slug}.ipynb").cells if cell.cell_type == "code"]
    for slug in ("mini-compiler", "mini-compiler-tuned")
)
STEPS = growing.steps_of([*FIRST, *SECOND])
TITLES = list(STEPS)
IT_RUNS = TITLES.index("print: build") + 1  # steps, after which


def module_after(number: int, name: str = "mini") -> dict[str, Any]:
    """The names of the module after so many steps."""
    names: dict[str, Any] = {"__name__": name}
    exec(growing.grown(list(STEPS.values())[:number]), names)
    return names


def block() -> tuple[nn.Module, torch.Tensor]:
    """The chapter's block, and an input for it."""
    (source,) = [cell for cell in FIRST if "class Block" in cell]
    names = {"nn": nn, "torch": torch, "F": nn.functional}
    exec(source.partition("def made")[0], names)
    torch.manual_seed(0)
    return names["Block"](128).eval(), torch.randn(37, 128)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() < 1e-5 * b.norm())


def test_the_chapters_have_ten_steps_in_the_order_of_the_book() -> None:
    titles = list(dict.fromkeys(map(growing.step_of, STEPS)))
    wanted = ["trace", "loop nests", "print", "fuse", "online softmax", "products", "tune", "plan", "wrap", "package"]
    assert titles == wanted


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", range(1, len(STEPS) + 1), ids=list(STEPS))
def test_each_step_is_a_module_and_the_same_as_eager(number: int) -> None:
    m = module_after(number)
    model, x = block()
    graph, inputs = m["trace_module"](model, x)
    with torch.no_grad():
        assert close(torch.fx.GraphModule({}, graph)(dict(model.named_parameters()), (x,)), model(x))
        if number < IT_RUNS:
            return
        for node in graph.nodes:  # every choice, also those that tuning would not make
            node.meta["own"] = number > TITLES.index("products") and m["op_of"](node) in m["CALL"]
            node.meta["online"] = True
        singles = [[n] for n in graph.nodes if m["op_of"](n) in {*m["FORMULA"], *m["REDUCTION"], *m["CALL"]}]
        groups = m["fuse"](graph) if "fuse" in m else singles
        kernels = m["lowered"](graph, groups)
        assert (len(kernels) < 14) == ("fuse" in m)
        assert close(m["load"](m["build"](graph, kernels, "cpu"))(*inputs), model(x))


def test_a_package_is_what_was_compiled(tmp_path: Path) -> None:
    m = module_after(len(STEPS))
    model, x = block()
    with torch.no_grad():
        program = m["compiled"](model, x)
        made = m["load"](program)
        m["save"](program, tmp_path / "block.mini")
        assert close(made(x), model(x))
        assert torch.equal(m["opened"](tmp_path / "block.mini")(x), made(x))
        other = torch.randn_like(x)
        assert close(made(other), model(other)), "nothing of the first call is kept"


def test_it_has_at_most_300_lines() -> None:
    assert growing.code_lines(growing.grown(STEPS.values())) <= 300


IN_THE_INTERPRETER = """
import sys, torch, pathlib
names = {"__name__": "mini"}
exec(pathlib.Path(sys.argv[1]).read_text(), names)
globals().update(names)
torch.manual_seed(0)
w, b = torch.randn(64, 48), torch.randn(64)

def through(*args):
    graph = trace(f, *args)
    for node in graph.nodes:
        node.meta["own"] = node.meta["online"] = True
    kernels = lowered(graph, fuse(graph))
    assert not any(is_call(k.nodes) for k in kernels)
    program = build(graph, kernels, "cuda")
    return load(program | {"text": program["text"].replace("'cuda'", "'cpu'")})(*args)

def f(x, w, b):
    y = torch.softmax(x @ w.t() + b, -1)
    return y.view(-1, 4, 16).transpose(0, 1).reshape(4, -1) * 2

for rows in (37, 1):
    x = torch.randn(rows, 48)
    print((through(x, w, b) - f(x, w, b)).abs().max().item() < 1e-5)
"""


def test_the_triton_that_it_prints_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "mini.py").write_text(growing.grown(STEPS.values()))
    assert interpreted("-c", IN_THE_INTERPRETER, str(tmp_path / "mini.py")).split() == ["True"] * 2


# ---- lab.Growing


def test_a_later_definition_takes_the_place_of_the_earlier_one(capsys: pytest.CaptureFixture[str]) -> None:
    grown = growing.Growing("toy")
    grown.step("one", "import os\n\n\ndef f():\n    return 1\n\n\nTABLE = {}\n")
    grown.step("two", 'import math\n\n\ndef f():\n    """Doc."""\n    return 2\n\n\nTABLE["x"] = f()\n')
    names: dict[str, Any] = {}
    exec(grown.text, names)
    assert names["f"]() == 2 and names["TABLE"] == {"x": 2}
    assert grown.text.count("def f") == 1 and grown.text.startswith("import math\nimport os\n")
    assert "-    return 1" in capsys.readouterr().out
    assert "return 1" in grown.after("one") and grown.before("one") == ""
    assert [row[2:] for row in grown.table().body] == [["4", "4"], ["4", "6"]]


def test_running_a_step_again_replaces_it() -> None:
    grown = growing.Growing("toy")
    grown.step("one", "a = 1\n")
    grown.step("one", "a = 2\n")
    assert grown.text == "a = 2\n"
    with pytest.raises(LabError, match="no step 'two'"):
        grown.after("two")
    with pytest.raises(LabError, match="cell of a notebook"):
        grown.step("three")


def test_a_module_continues_that_of_another_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = growing.Growing("mini", continues="mini-compiler")
    assert grown.text == growing.grown(growing.steps_of(FIRST).values())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.ipynb").write_text(
        '{"cells": [{"cell_type": "code", "source": ["toy.step(\\"one\\")\\n", "a = 1"]}]}'
    )
    toy = growing.Growing("toy", continues="toy")
    toy.step("two", "b = a\n")
    assert toy.text == "a = 1\nb = a\n" and toy.before("two") == "a = 1\n"
    with pytest.raises(LabError, match=r"other\.ipynb is not here"):
        growing.Growing("toy", continues="other")
