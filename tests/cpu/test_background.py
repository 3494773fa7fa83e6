"""Tuning while the program runs, and decisions that outlive it."""

import sqlite3
import threading
import time
import timeit
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tuner import OPS, ops  # noqa: F401

import reflib
from reflib.autotune.store import store
from reflib.background import tunings
from tests.forking import printed
from tests.processes import python, soon

Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("kept")  # nothing is known


def background(fn: Any, **options: Any) -> Any:
    return reflib.compile(fn, autotune="background", tuning_imports=(str(OPS),), candidate_seconds=30.0, **options)


def test_the_first_call_does_not_wait_and_a_later_one_is_tuned(ops: Any) -> None:  # noqa: F811
    reflib.register_custom_op_autotuning(ops.product, configs=[ops.good, ops.wrong])
    f = background(lambda a, b: torch.relu(ops.product(a, b)))
    a, b = torch.randn(8, 64), torch.randn(64, 8)
    right = torch.relu(a @ b)
    assert torch.allclose(f(a, b), right, atol=1e-5)
    (tuning,) = tunings[f]
    assert tuning.state == "running" and not reflib.tuning_progress(f).finished
    progress = reflib.wait_for_tuning(f, timeout=100)
    assert progress.finished and not progress.failed and progress.done == progress.total >= 3, progress
    assert [d.winner for d in progress.decisions] == ["good"]
    assert "finished" in repr(progress) and "<progress" in progress._repr_html_()
    assert tuning.state == "ready"
    assert torch.allclose(f(a, b), right, atol=1e-5)
    assert tuning.state == "swapped" and len(tuning.old) == 1
    assert min(timeit.repeat(lambda: f(a, b), number=1)) < 0.05  # the op itself sleeps so long
    assert any(e.name == "swap" for e in tuning.stages.timeline)


def test_what_is_known_is_used_at_once(ops: Any) -> None:  # noqa: F811
    reflib.register_custom_op_autotuning(ops.product, configs=[ops.good])
    fn = lambda a, b: torch.relu(ops.product(a, b)) - 1  # noqa: E731
    a, b = torch.randn(8, 64), torch.randn(64, 8)
    e = reflib.explain(fn, a, b, autotune="blocking", tuning_imports=(str(OPS),))
    assert e.decisions[0].winner == "good"
    kept = store().decisions()
    assert any(facts["op"].startswith("tuning_faults.product") for _, facts in kept), kept
    torch._dynamo.reset()
    again = reflib.explain(fn, a, b, autotune="blocking", tuning_imports=(str(OPS),))
    assert "decided in an earlier run" in again.decisions[0].reason
    assert not [event for event in again.timeline if event.kind in ("compile", "measure")]
    torch._dynamo.reset()
    f = background(fn)
    assert torch.allclose(f(a, b), torch.relu(a @ b) - 1, atol=1e-5)
    assert not tunings[f], "there is nothing left to measure"
    torch._dynamo.reset()
    off = reflib.explain(fn, a, b, autotune="blocking", tuning_imports=(str(OPS),), lookup_table={
        "tuning_faults.product": {"[8, 64] [64, 8]": "eager"}})  # fmt: skip
    assert off.decisions[0].winner == "eager" and "lookup_table" in off.decisions[0].reason


def test_training_and_dynamic_sizes(ops: Any) -> None:  # noqa: F811
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    f = background(model, dynamic=True)
    x = torch.randn(16, 64)
    f(x).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    progress = reflib.wait_for_tuning(f, timeout=100)
    assert progress.finished and not progress.failed, progress
    for n in (16, 5):
        x = torch.randn(n, 64) if n != 16 else x
        model.zero_grad()
        out = f(x)
        out.sum().backward()
        assert torch.allclose(out, model(x), atol=1e-5)
        if n == 16:
            assert all(torch.allclose(p.grad, g, atol=1e-4) for p, g in zip(model.parameters(), want))


def test_threads_may_call_while_it_swaps(ops: Any) -> None:  # noqa: F811
    reflib.register_custom_op_autotuning(ops.product, configs=[ops.good])
    f = background(lambda a, b: ops.product(a, b) * 3)
    a, b = torch.randn(8, 64), torch.randn(64, 8)
    right = (a @ b) * 3
    f(a, b)
    stop = threading.Event()

    def call(_: int) -> None:
        while not stop.is_set():
            assert torch.allclose(f(a, b), right, atol=1e-4)

    with ThreadPoolExecutor(3) as threads:
        calls = threads.map(call, range(3))
        try:
            assert reflib.wait_for_tuning(f, timeout=100).finished
            assert soon(lambda: tunings[f][0].state == "swapped")
        finally:
            stop.set()
        list(calls)


def test_failing_in_the_background_changes_nothing(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    import reflib.tuning as tuning

    reflib.register_custom_op_autotuning(ops.product, configs=[ops.good])
    f = background(lambda a, b: ops.product(a, b) * 4)
    a, b = torch.randn(8, 64), torch.randn(64, 8)

    def fails(*args: Any) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(tuning, "tuned", fails)
    f(a, b)
    progress = reflib.wait_for_tuning(f, timeout=60)
    assert progress.finished and "no such luck" in progress.failed[0]
    assert torch.allclose(f(a, b), (a @ b) * 4, atol=1e-4)


TUNES = """
from reflib.background import Background
def tune(background):
    while True:
        torch.ones(9, 9) @ torch.ones(9, 9)
        inside.set()
Background(None, tune).start()
"""
BEATS = """
from reflib.ranks import share
share.BEAT, s = 0.0, object.__new__(share.Sharing)
s.rank, s.mine, s.beating = 0, set(), None
s.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
s.measuring("a question")
inside.set()
"""


@pytest.mark.parametrize("program", [TUNES, BEATS], ids=["tunes", "beats"])
def test_a_thread_in_pytorch_when_the_program_ends(program: str) -> None:
    """The process is not aborted."""
    python(f"import threading, torch\ninside = threading.Event(){program}inside.wait()")


def test_beats_pause_while_another_thread_outlives_the_main_one() -> None:
    python("""
import os, threading, time, types
from reflib.ranks import share
asked = []
s = object.__new__(share.Sharing)
s.rank, s.mine, s.beating = 0, set(), None
s.store = types.SimpleNamespace(add=lambda *args: asked.append(args))
def outlives():
    threading.main_thread().join()
    s.measuring("a question")
    time.sleep(0.3)
    if len(asked) != 1:
        os._exit(1)
threading.Thread(target=outlives).start()
""")


@pytest.mark.slow
def test_nothing_is_lost_when_the_program_ends(tmp_path: Path) -> None:
    """It ends while a candidate hangs; the others' rows are there for the next."""
    python(f"""
import sys, time, torch, reflib
sys.path.insert(0, {str(OPS.parent)!r})
import tuning_ops as ops
reflib.register_custom_op_autotuning(ops.product, configs=[ops.wrong, ops.good, ops.hanging])
f = reflib.compile(lambda a, b: ops.product(a, b) + 5, autotune="background", tuning_imports=({str(OPS)!r},))
f(torch.randn(8, 64), torch.randn(64, 8))
while reflib.tuning_progress().done < 3:
    time.sleep(0.1)
""")
    (path,) = (tmp_path / "cache" / "tuning").glob("decisions-*.sqlite3")
    names = {name for (name,) in sqlite3.connect(path).execute("SELECT name FROM measured")}
    assert {"eager", "good", "wrong"} <= names


BODY = """
import time, torch
@torch.library.custom_op("tuning_bodies::op", mutates_args=())
def op(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    time.sleep(0.03)
    return a @ b * FACTOR
op.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
def plain(a, b):
    return a @ b
"""


@pytest.mark.slow
def test_another_body_is_another_question(tmp_path: Path) -> None:
    """An op whose function was changed between two runs is measured, and checked, again."""

    def run(factor: int) -> str:
        (tmp_path / "bodies.py").write_text(BODY.replace("FACTOR", str(factor)))
        return python(f"""
import sys, torch, reflib
sys.path.insert(0, {str(tmp_path)!r})
import bodies
reflib.register_custom_op_autotuning(bodies.op, configs=[bodies.plain])
e = reflib.explain(lambda a, b: bodies.op(a, b) + 1, torch.randn(8, 64), torch.randn(64, 8), autotune="blocking")
d = e.decisions[0]
print(d.winner, "earlier" in d.reason, [c.status for c in d.candidates])
""").strip()

    assert run(1) == "plain False ['ok', 'ok']"
    assert run(1) == "plain True ['ok', 'ok']"
    assert run(2) == "eager False ['ok', 'wrong']"


def test_what_a_limit_cut_short_is_no_decision(ops: Any) -> None:  # noqa: F811
    reflib.register_custom_op_autotuning(ops.product, configs=[ops.hanging, ops.good])
    fn = lambda a, b: ops.product(a, b) + 7  # noqa: E731
    a, b = torch.randn(8, 64), torch.randn(64, 8)
    start = time.monotonic()
    e = reflib.explain(fn, a, b, autotune="blocking", tuning_imports=(str(OPS),), tuning_seconds=2.0)
    assert time.monotonic() - start < 50  # one candidate has 60
    assert any("time limit" in c.why for c in e.decisions[0].candidates), e.decisions
    assert not store().decisions()


def test_workers_have_this_process_switches() -> None:
    from reflib.autotune import switches

    before = switches.read()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    try:
        here = switches.read()
        program = f"from reflib.autotune import switches; switches.write({here!r}); print(switches.read() == {here!r})"
        assert printed("-c", program).strip() == "True"
        assert here != before and here["threads"] == 1 and here["deterministic"]
    finally:
        torch.set_float32_matmul_precision("highest")
        switches.write(before)
    assert switches.read()["threads"] == before["threads"]
