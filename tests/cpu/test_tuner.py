"""Tuning by worker processes: what goes wrong stays with the candidate, and nobody waits longer than needed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.choose.pool import pool

OPS = Path(__file__).parent.parent / "tuning_ops.py"


@pytest.fixture(scope="module")
def ops() -> Any:
    """The same file as the workers import."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("tuning_ops", OPS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


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
    e = explained(f, a, b, tuning_imports=(str(OPS),), candidate_seconds=8.0)
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


def test_matrix_products_are_measured_by_workers() -> None:
    a, b = torch.randn(16, 4096), torch.randn(4096, 16)
    e = explained(lambda a, b: torch.relu(a @ b), a, b, verify=True)
    d = e.decisions[0]
    assert "ok" in {c.status for c in d.candidates} and all(c.status == "ok" for c in d.candidates), d
    assert len(d.candidates) > 1
    tracks = {event.track for event in e.timeline}
    assert any(t.startswith("compile") for t in tracks) and "cpu" in tracks
    assert pool().processes()


def test_an_op_of_this_process_alone_is_measured_here() -> None:
    @torch.library.custom_op("tuning_faults::here", mutates_args=())
    def here(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return a @ b

    here.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    reflib.register_custom_op_autotuning(here, configs=[lambda a, b: a @ b])
    e = explained(lambda a, b: here(a, b) + 1, torch.randn(4, 8), torch.randn(8, 4))
    assert e.decisions[0].winner == "<lambda>"
    assert all("not isolated" in c.why and "tuning_imports" in c.why for c in e.decisions[0].candidates)


def test_a_default_that_crashes(ops: Any) -> None:
    """Its reference cannot be computed either: it stays, and the program goes on."""
    reflib.register_custom_op_autotuning(ops.crash, configs=[ops.good])
    a, b = torch.randn(8, 64), torch.randn(64, 8)
    e = explained(lambda a, b: ops.crash(a, b) * 2, a, b, tuning_imports=(str(OPS),), candidate_seconds=5.0)
    d = e.decisions[0]
    assert {c.name: c.status for c in d.candidates}["eager"] == "crashed", d


def test_time_for_all_of_it(ops: Any) -> None:
    reflib.register_custom_op_autotuning(ops.product, configs=[ops.hanging, ops.good])
    a, b = torch.randn(8, 64), torch.randn(64, 8)
    start = time.monotonic()
    e = explained(lambda a, b: ops.product(a, b) + 2, a, b, tuning_imports=(str(OPS),), tuning_seconds=8.0)
    assert time.monotonic() - start < 20
    assert any("time limit" in c.why for c in e.decisions[0].candidates), e.decisions
