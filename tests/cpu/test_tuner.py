"""Tuning by worker processes: faults stay with the candidate, and no wait is longer than needed."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.autotune.inputs import InputSpec
from reflib.autotune.pool import pool
from tests.loading import load_file
from tests.processes import gone

OPS = Path(__file__).parent.parent / "tuning_ops.py"


@pytest.fixture(scope="module")
def ops() -> Any:
    """The same file as the workers import."""
    return load_file(OPS)


def explained(fn: Any, *args: Any, **options: Any) -> Any:
    return reflib.explain(fn, *args, autotune="blocking", cache_decisions=False, **options)


def statuses(e: Any) -> dict[str, str]:
    return {c.name: c.status for c in e.decisions[0].candidates}


def test_every_fault_is_a_row_and_the_rest_go_on(ops: Any) -> None:
    ways = [ops.wrong, ops.crashing, ops.starving, ops.leaving, ops.hanging, ops.raising, ops.good]
    reflib.register_custom_op_autotuning(ops.product, configs=ways)
    a, b = torch.randn(8, 64), torch.randn(64, 8)

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(ops.product(a, b) + 1)

    start = time.monotonic()
    e = explained(f, a, b, tuning_imports=(str(OPS),), candidate_seconds=4.0)
    seconds = time.monotonic() - start
    assert statuses(e) == {
        "eager": "ok", "wrong": "wrong", "crashing": "crashed", "starving": "error", "leaving": "crashed",
        "hanging": "hung", "raising": "error", "good": "ok",
    }, e.decisions  # fmt: skip
    why = {c.name: c.why for c in e.decisions[0].candidates}
    assert "segmentation fault" in why["crashing"].lower() and "3" in why["leaving"]
    assert "out of memory" in why["starving"] and "no such luck" in why["raising"]
    assert e.decisions[0].winner == "good"
    assert seconds < 90
    kinds = {event.kind for event in e.timeline}
    assert {"stage", "compile", "measure", "wait"} <= kinds
    assert any(event.status == "crashed" for event in e.timeline)
    assert all("not isolated" not in w for w in why.values())


def test_what_opens_a_measurement_again_has_the_time_for_it(ops: Any) -> None:
    """The inputs take longer than a candidate may, also where the worker before was lost to a candidate."""
    ways = [ops.leaving, ops.good]
    reflib.register_custom_op_autotuning(ops.product, configs=ways, input_gen_fns={"a": ops.slow_input})
    a, b = torch.randn(8, 48), torch.randn(48, 8)
    options = {"tuning_imports": (str(OPS),), "candidate_seconds": 1.5}
    e = explained(lambda a, b: ops.product(a, b) + 2, a, b, **options)
    assert statuses(e) == {"eager": "ok", "leaving": "crashed", "good": "ok"}, e.decisions
    assert e.decisions[0].winner == "good"


def test_candidates_that_fork(ops: Any) -> None:
    """Nothing that they leave behind holds up tuning, or outlives the worker."""
    reflib.register_custom_op_autotuning(ops.product, configs=[ops.daemonizing, ops.forking, ops.doubling, ops.good])
    a, b = torch.randn(8, 32), torch.randn(32, 8)
    start = time.monotonic()
    e = explained(lambda a, b: ops.product(a, b) + 3, a, b, tuning_imports=(str(OPS),), candidate_seconds=8.0)
    assert time.monotonic() - start < 150  # (it was 400)
    found = statuses(e)
    assert found.pop("doubling") in ("ok", "crashed")  # (however often it is called)
    assert found == {"eager": "ok", "daemonizing": "crashed", "forking": "crashed", "good": "ok"}, e.decisions
    assert "forked too many" in next(c.why for c in e.decisions[0].candidates if c.name == "forking")


def test_matrix_products_are_measured_by_workers() -> None:
    a, b = torch.randn(16, 4096), torch.randn(4096, 16)
    e = explained(lambda a, b: torch.relu(a @ b), a, b, verify=True)
    d = e.decisions[0]
    assert "ok" in {c.status for c in d.candidates} and all(c.status == "ok" for c in d.candidates), d
    assert len(d.candidates) > 1
    tracks = {event.track for event in e.timeline}
    assert any(t.startswith("compile") for t in tracks) and "cpu" in tracks
    assert pool().processes()


def test_what_exists_here_alone_is_measured_in_a_worker() -> None:
    """An op, a candidate that crashes, a function that makes inputs: of this function's body, with what they hold."""
    place, seen = torch.tensor([2, 0, 1, 3]), torch.full((4,), 3.0)

    def op(name: str, body: Any) -> Any:
        def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return body(a, b)

        made = torch.library.custom_op(f"here_alone::{name}", mutates_args=())(fn)
        made.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
        return made

    inner = op("inner", lambda a, b: (a @ b)[place])

    def slow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert bool((a == 3).all()), "made as it is asked for"
        time.sleep(0.002)
        return inner(a, b)[place]

    crashing = op("crashing", lambda a, b: os.abort())

    def crash(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return crashing(a, b)

    def fast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b)[place[place]]

    for turn in range(2):  # defined again, as by a cell that runs again: with another result
        slow_op = op("slow", slow if turn == 0 else lambda a, b: slow(a, b) + 1)
        reflib.register_custom_op_autotuning(
            slow_op, configs=[crash, fast], input_gen_fns={"a": lambda a: torch.full_like(a, seen[0].item())}
        )
        args = torch.full((4, 8), 3.0), torch.randn(8, 4)
        e = explained(lambda a, b, op=slow_op: op(a, b) * 2, *args, candidate_seconds=20.0)
        wanted = {"crash": "crashed", "eager": "ok", "fast": "wrong" if turn else "ok"}
        assert statuses(e) == wanted, e.decisions
        torch._dynamo.reset()


def test_what_cannot_be_sent_is_not_measured(recwarn: pytest.WarningsRecorder) -> None:
    lock = threading.Lock()

    @torch.library.custom_op("here_alone::locked", mutates_args=())
    def locked(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with lock:
            return a @ b

    locked.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    reflib.register_custom_op_autotuning(locked, configs=[lambda a, b: a @ b])
    e = explained(lambda a, b: locked(a, b) + 1, torch.randn(4, 8), torch.randn(8, 4))
    explained(lambda a, b: locked(a, b) + 2, torch.randn(5, 8), torch.randn(8, 4))
    d = e.decisions[0]
    assert d.winner == "eager" and {c.status for c in d.candidates} == {"skipped"}
    (said,) = [str(w.message) for w in recwarn if "not measured" in str(w.message)]  # once, not for each graph
    assert "here_alone::locked" in said and "lock" in said and "define it in a module" in said
    e = explained(lambda a, b: locked(a, b) + 3, torch.randn(4, 8), torch.randn(8, 4), isolate=False)
    assert {c.status for c in e.decisions[0].candidates} == {"ok"}, "by an option, here"


def test_constants_that_matter_reach_the_worker() -> None:
    from reflib.autotune.by_value import makers
    from reflib.autotune.inputs import make_inputs
    from reflib.autotune.isolation import isolated
    from reflib.autotune.request import Request

    specs = tuple(
        InputSpec(name, "weight", 0, (4,), (1,), dtype, "cpu", maker=f"constant {name}")
        for name, dtype in (("zeros", "float32"), ("index", "int64"), ("noise", "float32"))
    )
    program: dict[str, Any] = {"constants": [], "nodes": [{"args": ["noise"]}]}
    constants = {"zeros": torch.zeros(4), "index": torch.full((4,), 3), "noise": torch.randn(4)}
    found = isolated(Request({"a": program}, "a", "a", specs), constants, reflib.Options())
    assert isinstance(found, Request)
    zeros, index, noise = make_inputs(found.inputs, 0, {})
    assert not zeros.any() and bool((index == 3).all()) and len(set(noise.tolist())) == 4
    constants["index"] = torch.arange(4)
    found = isolated(Request({"a": program}, "a", "a", specs), constants, reflib.Options())
    assert isinstance(found, Request)
    assert make_inputs(found.inputs, 0, makers(found.makers))[1].tolist() == [0, 1, 2, 3]
    alone = {"a": {**program, "nodes": []}, "b": program}  # what is right does not read it
    found = isolated(Request(alone, "a", "a", specs), constants, reflib.Options())
    assert isinstance(found, Request)
    assert torch.equal(make_inputs(found.inputs, 0, makers(found.makers))[2], constants["noise"])


def test_equal_regions_are_decided_once_and_say_so_once(ops: Any) -> None:
    reflib.register_custom_op_autotuning(ops.product, configs=[ops.good])
    xs = [torch.randn(8, 64) for _ in range(3)]
    b = torch.randn(64, 8)
    e = explained(lambda *xs: tuple(ops.product(x, b) for x in xs), *xs, tuning_imports=(str(OPS),), dynamic=False)
    reasons = [d.reason for d in e.decisions if len(d.candidates) > 1]
    assert [r.count("for an equal region") for r in reasons] == [0, 1, 1], reasons
    assert len(e.timeline.only("compile")) == 2


def test_kernels_without_a_choice_are_built_meanwhile() -> None:
    def f(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(a @ b), torch.softmax(x * 2, -1)

    args = torch.randn(16, 4096), torch.randn(4096, 16), torch.randn(64, 32)
    e = explained(f, *args, verify=True)
    names = {k.name for k in e.stages.built}
    assert names and all("softmax" in n or "exp" in n or "mul" in n for n in names), names
    assert names <= {k.name for k in e.kernels}, "the program has the kernels that were built"
    assert all(k in e.stages.built for k in e.kernels if k.name in names)
    assert "kernels without a choice" in [event.name for event in e.timeline]
    torch._dynamo.reset()
    for mine, theirs in zip(reflib.compile(f, autotune="blocking")(*args), f(*args)):
        assert torch.allclose(mine, theirs, atol=1e-3)


def test_ctrl_c_while_tuning(tmp_path: Path) -> None:
    """It ends at once, and leaves no process."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, threading, time, torch, traceback, reflib
        from reflib.autotune.pool import pool
        from reflib.autotune.tuner import Tuner
        sys.path.insert(0, {str(OPS.parent)!r})
        import tuning_ops as ops
        reflib.register_custom_op_autotuning(ops.product, configs=[ops.hanging])
        def tell():
            main = threading.main_thread().ident
            while len(pool().processes()) < 2 or not any(
                frame.f_code is Tuner.wait.__code__ for frame, _ in traceback.walk_stack(sys._current_frames()[main])
            ):
                time.sleep(0.05)
            print(*pool().processes(), flush=True)
        threading.Thread(target=tell, daemon=True).start()
        f = reflib.compile(lambda a, b: ops.product(a, b) + 5, autotune="blocking", tuning_imports=({str(OPS)!r},))
        f(torch.randn(8, 64), torch.randn(64, 8))
        """)
    )
    child = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pids = [int(p) for p in child.stdout.readline().split()]
    assert pids
    child.send_signal(signal.SIGINT)
    assert gone(pids)
    _, errors = child.communicate(timeout=60)  # the interpreter's own end takes a while where torch was imported
    assert "KeyboardInterrupt" in errors and child.returncode != 0
