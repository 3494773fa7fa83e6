"""The minifier: planted faults in random graphs become graphs of a few ops, whatever way they fail.

Each test runs another process (tests/planted_faults.py says why): seconds, and 0.2 s for a trial.
"""

import json
from pathlib import Path

import pytest

from tests.forking import printed

OTHERS = """
import os, sys, time, torch, reflib
from reflib.observe.rebuild import load, run_file
from tests.planted_faults import *
from reflib.observe.minify import Trials, minify, minify_file
from pathlib import Path

def graph(*steps):
    g = torch.fx.Graph()
    x = v = g.placeholder("x")
    for f in steps:
        v = g.call_function(f, (v,)) if f is not torch.chunk else g.call_function(f, (v, 2))
        if f is torch.chunk:
            v = g.call_function(operator.getitem, (v, 1))
    g.output((v,))
    return Subject(torch.fx.GraphModule(torch.nn.Module(), g), [Tensor((6, 4), (4, 1), grad=True, seed=1)])

import operator
steps = [torch.chunk, torch.tanh, torch.exp]
def raises(*args):
    raise RuntimeError("no")
for name, op, rule in (
    ("error", aten.tanh.default, raises),
    ("crash", aten.exp.default, lambda *a: os.abort()),
    ("gradient", aten.tanh_backward.default, RULES[aten.mul.Tensor]),
):
    before, RULES[op] = RULES[op], rule
    found = minify(graph(*steps))
    RULES[op] = before
    print(name, found.kind, [n.name for n in found.subject.module.graph.nodes], sep="|")
def of_gpus(rule):
    return lambda cx, *args: raises() if cx.on_gpu else rule(cx, *args)
before, RULES[aten.exp.default] = RULES[aten.exp.default], of_gpus(RULES[aten.exp.default])
with torch.no_grad():
    try:
        reflib.explain(lambda x: x.tanh().exp().sin(), torch.rand(6, 4), target="sm_90", repro=sys.argv[1] + "/gpu")
    except Exception:
        pass
[path] = Path(sys.argv[1], "gpu").glob("*.py")
found = minify_file(path, Path(sys.argv[1], "gpu.py"), None, 60.0, lambda line: None)
print("target", found.kind, [n.name for n in found.subject.module.graph.nodes], sep="|")
RULES[aten.exp.default] = before
Path(sys.argv[1], "gpu.py").unlink()
program = torch.export.export(graph(torch.tanh, torch.exp, torch.sin).module, (torch.rand(6, 4),))
reflib.compile(program, repro=sys.argv[1])
before, RULES[aten.exp.default] = RULES[aten.exp.default], RULES[aten.neg.default]
[path] = Path(sys.argv[1]).glob("*.py")
minify_file(path, Path(sys.argv[1], "small.py"), None, 60.0, lambda line: None)
small = load(run_file(sys.argv[1] + "/small.py"))
print("exported", Trials().of(small), [n.name for n in small.module.graph.nodes], "ranges" in small.exported, sep="|")
RULES[aten.exp.default] = before
print(Trials().of(graph(torch.sin)), Trials(slower=1e-9).of(graph(torch.sin)), sep="|")
RULES[aten.exp.default] = lambda *a: time.sleep(99)
print(Trials(limit=1).of(graph(torch.exp)))
"""


def run(*command: str) -> list[str]:
    return printed(*command).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_a_planted_fault_is_found(number: int) -> None:
    [line] = run("tests.planted_faults", str(number))
    found = json.loads(line)
    assert found["before"] == 100 and found["kind"] == "wrong"
    assert len(found["ops"]) <= 5 and found["seconds"] < 120, found
    assert any(op.startswith(found["fault"]) for op in found["ops"]), found


def test_errors_crashes_and_gradients_are_found_too(tmp_path: Path) -> None:
    assert run("-c", OTHERS, str(tmp_path)) == [
        "error|error: LoweringError|['getitem', 'tanh', 'output']",
        "crash|crash|['tanh', 'exp', 'output']",
        "gradient|wrong|['getitem', 'tanh', 'output']",
        "target|error: LoweringError|['tanh', 'exp', 'output']",
        "exported|wrong|['tanh', 'exp', 'output']|True",
        "|slower",
        "hang",
    ]


@pytest.mark.slow
def test_a_trial_may_be_a_fresh_process() -> None:
    code = "from tests.planted_faults import *; from reflib.observe.minify import Trials; subject = planted(0)[1]; "
    # the fault is in this process only
    assert run("-c", code + "print(Trials(forks=False).of(subject), Trials().of(subject), sep='|')") == ["|wrong"]
