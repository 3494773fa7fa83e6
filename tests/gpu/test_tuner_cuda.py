"""Tuning on a GPU: real faults, real swaps, and graphs that were captured before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loading import load_file

import reflib
from reflib.background import tunings

OPS = Path(__file__).parent.parent / "tuning_ops_cuda.py"
Tensor = torch.Tensor


@pytest.fixture(scope="module")
def ops() -> Any:
    """The same file as the workers import."""
    return load_file(OPS)


def operands(m: int = 64, k: int = 256, n: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k, device="cuda").to(dtype), torch.randn(k, n, device="cuda").to(dtype)


def test_a_broken_device_a_hang_and_no_memory_are_rows(ops: Any) -> None:
    ways = [ops.straying, ops.hanging, ops.starving, ops.good]
    reflib.register_custom_op_autotuning(ops.product, configs=ways)
    a, b = operands()

    def f(a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(ops.product(a, b))

    e = reflib.explain(f, a, b, autotune="blocking", tuning_imports=(str(OPS),), candidate_seconds=25.0)
    d = e.decisions[0]
    assert {c.name: c.status for c in d.candidates} == {
        "eager": "ok", "straying": "crashed", "hanging": "hung", "starving": "error", "good": "ok",
    }, d  # fmt: skip
    why = {c.name: c.why for c in d.candidates}
    assert "illegal" in why["straying"].lower() and "out of memory" in why["starving"]
    assert d.winner == "good"
    torch._dynamo.reset()
    assert torch.allclose(reflib.compile(f)(a, b), f(a, b), atol=1e-3), "this process's device is as it was"


def test_products_are_tuned_by_workers() -> None:
    a, b = operands(512, 1024, 768, torch.bfloat16)
    e = reflib.explain(lambda a, b: torch.relu(a @ b), a, b, autotune="blocking")
    d = e.decisions[0]
    assert sum(c.status == "ok" for c in d.candidates) >= 5, d
    assert not [c for c in d.candidates if c.status in ("crashed", "hung", "wrong", "error")], d
    assert any(", epilogue apart" in c.name for c in d.candidates)
    assert {"compile", "measure", "wait"} <= {event.kind for event in e.timeline}


def test_in_the_background_with_a_graph_captured_before(ops: Any) -> None:
    f = reflib.compile(lambda a, b: torch.relu(a @ b), autotune="background")
    a, b = operands(32, 16384, 32, torch.float16)
    right = torch.relu(a.double() @ b.double())

    def near(got: Tensor) -> bool:
        return bool((got.double() - right).abs().max() < 2e-2 * right.abs().max())

    assert near(f(a, b))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        held = f(a, b)
    assert reflib.wait_for_tuning(f, timeout=120).finished
    (tuning,) = tunings[f]
    if tuning.state == "ready":
        other = torch.cuda.CUDAGraph()
        with torch.cuda.graph(other, stream=stream):
            f(a, b)
        assert tuning.state == "ready", "nothing is loaded while a stream is captured"
        assert near(f(a, b)) and tuning.state == "swapped"
    else:
        assert tuning.state == "unchanged", tuning.error
    held.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert near(held), "what was captured runs the old kernels"


def test_training_in_the_background() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    model = model.cuda().bfloat16()
    f = reflib.compile(model, autotune="background")
    x = torch.randn(128, 1024, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        model.zero_grad()
        f(x).sum().backward()
    assert reflib.wait_for_tuning(f, timeout=150).finished
    model.zero_grad()
    f(x).sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for g, p in zip(got, model.parameters()):
        assert (g - p.grad).float().norm() < 2e-2 * p.grad.float().norm()
    states = [(t.state, t.error) for t in tunings[f]]
    assert all(state in ("swapped", "unchanged") for state, _ in states), states


def test_memory_is_given_back() -> None:
    """The measuring worker has its own: nothing of it is left in this process."""
    a, b = operands(256, 2048, 256, torch.float16)
    # cuBLAS keeps a workspace for the stream, we words for captures (``wrap.zeros``)
    reflib.explain(lambda a, b: torch.relu(a @ b) + 1, a, b, autotune="blocking", cache_decisions=False)
    del a, b
    torch._dynamo.reset()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    a, b = operands(256, 2048, 256, torch.float16)
    own = torch.cuda.memory_allocated() - before
    reflib.explain(lambda a, b: torch.relu(a @ b) + 2, a, b, autotune="blocking", cache_decisions=False)
    del a, b
    torch._dynamo.reset()
    assert torch.cuda.memory_allocated() - before < own + 2**20
