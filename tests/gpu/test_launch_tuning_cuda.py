"""Launches of memory-bound kernels, and products with an epilogue, decided by measuring on a GPU."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import reflib
from reflib.autotune.known import decided
from reflib.autotune.store import store
from reflib.background import tunings
from tests.checking import check

Tensor = torch.Tensor
HALF = torch.bfloat16
pytestmark = pytest.mark.usefixtures("kept")  # nothing is known


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=HALF)


def microseconds(fn: Callable[..., Any], *args: Tensor) -> float:
    """Of a call in a CUDA graph of ten: the least of 20 replays."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            fn(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(10):
                fn(*args)
        times = []
        for _ in range(20):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 100)
    return min(times)


NAMES = (
    "softmax", "long softmax", "rms norm", "layer norm, odd rows", "columns", "pointwise", "odd pointwise", "transpose",
    "cumsum", "pooling", "batch norm",
)  # fmt: skip


def functions() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Of about 2**25 elements, sizes at random."""
    rng = random.Random(5)

    def rows(low: int, high: int) -> tuple[int, int]:
        n = rng.randint(low, high)
        return 2**25 // n, n

    w = half(rng.randint(300, 3000))
    return {
        "softmax": (lambda x: x.softmax(-1), (half(*rows(100, 4000)),)),
        "long softmax": (lambda x: x.softmax(-1), (half(*rows(17000, 90000)),)),
        "rms norm": (lambda x, w: F.rms_norm(x, w.shape, w), (half(2**25 // len(w), len(w)), w)),
        "layer norm, odd rows": (lambda x: F.layer_norm(x, x.shape[-1:]), (half(2**25 // 781, 781),)),
        "columns": (lambda x: (x * x).sum(0), (half(*rows(500, 5000)),)),
        "pointwise": (lambda x, y: torch.relu(x + y) * y, (half(2**25), half(2**25))),
        "odd pointwise": (lambda x, y: torch.relu(x + y) * y, (half(2**25 - 77), half(2**25 - 77))),
        "transpose": (lambda x, y: x.t() + y, (half(5003, 6007), half(6007, 5003))),
        "cumsum": (lambda x: x.cumsum(-1), (half(*rows(1000, 4000)),)),
        "pooling": (lambda x: F.max_pool2d(x, 3, 2, 1), (half(64, 64, 90, 90),)),
        "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), (half(64, 128, 56, 56),)),
    }


@pytest.mark.alone
@pytest.mark.parametrize("name", NAMES)
def test_tuned_launches_are_right_and_no_slower(name: str) -> None:
    fn, args = functions()[name]
    e = reflib.explain(fn, *args, autotune="blocking")
    measured = [d for d in e.decisions if len(d.candidates) > 1]
    assert measured and all(d.op.startswith("launch of ") for d in measured), e.decisions
    assert {c.status for d in measured for c in d.candidates} <= {"ok", "error", "skipped"}, e.decisions
    assert all(sum(c.status == "ok" for c in d.candidates) >= 2 for d in measured), e.decisions
    torch._dynamo.reset()
    tuned = reflib.compile(fn, autotune="blocking", dynamic=False)
    check(fn, tuned, *args)
    with_launches = microseconds(tuned, *args)
    torch._dynamo.reset()
    heuristic = microseconds(reflib.compile(fn, dynamic=False), *args)
    print(f"{name}: {heuristic:.1f} us, tuned {with_launches:.1f} us; {[(d.winner, d.reason) for d in measured]}")
    assert with_launches <= 1.03 * heuristic + 0.5


def test_backward_of_a_norm() -> None:
    """Column sums in the kernel that reduces rows: which rows a partial sum has depends on the launch."""
    x, w = half(40000, 781).requires_grad_(), half(781).requires_grad_()
    f = reflib.compile(lambda x, w: F.layer_norm(x, (781,), w), autotune="blocking", dynamic=False)
    check(lambda x, w: F.layer_norm(x, (781,), w), f, x, w, backward=True)
    found = [o for o, _ in store().decisions()]
    mixed = [o for o in found if str(o.rows[0].key).startswith("mixed")]
    assert mixed and all(r.status != "wrong" for o in mixed for r in o.rows), mixed


def test_a_table_is_used_with_autotune_off(tmp_path: Path) -> None:
    x = half(20000, 1001)
    (d,) = reflib.explain(lambda x: x.softmax(-1), x, autotune="blocking").decisions
    table = tmp_path / "table.json"
    table.write_text(decided(store()).to_text())
    torch._dynamo.reset()
    (again,) = reflib.explain(lambda x: x.softmax(-1), x, lookup_table=str(table)).decisions
    assert again.config == d.config and again.reason == "pinned by lookup_table"
    path = reflib.aot_compile(lambda x: x.softmax(-1), (x,), tmp_path / "m.reflib", ["native"], autotune="blocking")
    assert torch.allclose(reflib.load(path)(x), x.softmax(-1), atol=1e-2)


def test_in_the_background() -> None:
    f = reflib.compile(lambda x: x.softmax(-1), autotune="background", dynamic=False)
    x = half(20000, 1001)
    assert torch.allclose(f(x), x.softmax(-1), atol=1e-2)
    progress = reflib.wait_for_tuning(f, timeout=120)
    assert progress.finished and not progress.failed and progress.total >= 3, progress
    (tuning,) = tunings[f]
    state = tuning.state
    assert torch.allclose(f(x), x.softmax(-1), atol=1e-2)
    assert tuning.state == ("swapped" if state == "ready" else "unchanged")


@pytest.mark.alone
@pytest.mark.parametrize(("m", "n", "k"), [(4096, 3584, 8192), (4096, 8192, 7168), (1024, 8192, 7168)])
def test_large_products_with_an_epilogue(m: int, n: int, k: int) -> None:
    """The library's call with one kernel behind it is a candidate, and what wins is as fast as the best."""
    x, w, b = half(m, k) / 8, half(n, k) / 8, half(n)

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    e = reflib.explain(fn, x, w, b, autotune="blocking")
    d = next(d for d in e.decisions if d.op == "aten.addmm")
    assert d.candidates[0].name == "aten" and d.candidates[0].status == "ok" and len(d.members) == 1, d
    print(d)
    torch._dynamo.reset()
    tuned = reflib.compile(fn, autotune="blocking", dynamic=False)
    check(fn, tuned, x, w, b)
    times = {"tuned": microseconds(tuned, x, w, b), "eager": microseconds(fn, x, w, b)}
    torch._dynamo.reset()
    times["library and a kernel"] = microseconds(reflib.compile(fn, dynamic=False), x, w, b)
    torch._dynamo.reset()
    times["TorchInductor"] = microseconds(torch.compile(fn, dynamic=False), x, w, b)
    print(f"{m} x {n} x {k}: {times}")
    best = min(us for name, us in times.items() if name != "tuned")
    assert times["tuned"] <= best / 0.97, times
