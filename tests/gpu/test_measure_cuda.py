"""autotune/measure on a GPU: graph replay, cold weights, and what must be left as it was."""

import pytest
import torch

from reflib.autotune.measure import Limits, Result, measure, request
from reflib.errors import MeasureError
from reflib.ir.program import Extern, Program, full_view
from tests import measured

GPU = torch.device("cuda", 0)
pytestmark = pytest.mark.alone


def matmul_relu(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Program:
    return measured.matmul_relu(m, n, k, dtype, GPU)


def race(program: Program, makers=None, **more) -> Result:
    """Candidates as Python functions of the arguments; the first is the default."""
    names = {n: f for n, f in more.items() if callable(f)}
    rest = {n: v for n, v in more.items() if n not in names}
    fns = iter(names.values())

    def build(program, options):
        fn = next(fns)
        return lambda args: (fn(*args),)

    return measure(request(dict.fromkeys(names, program), next(iter(names)), **rest), build, makers)


def add_twelve() -> Program:
    kinds = {"x": "input", "y": "temp"}
    t = {name: measured.buffer(name, (256, 256), torch.float32, kind, GPU) for name, kind in kinds.items()}
    call = Extern("add", torch.ops.aten.add.Scalar, (full_view(t["x"]), 12.0), (), ("y",))
    return Program(("x",), t, (call,), (full_view(t["y"]),))


def twelve_kernels(x: torch.Tensor) -> torch.Tensor:
    for _ in range(12):
        x = x + 1.0
    return x


def one_long_kernel(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(45_000)  # cycles: some 25 us
    return x + 12.0


def test_launches_decide_only_when_asked_for() -> None:
    """Twelve short kernels against a long one: which is faster depends on whether their launches count."""
    graph = race(add_twelve(), long=one_long_kernel, short=twelve_kernels)
    plain = race(add_twelve(), long=one_long_kernel, short=twelve_kernels, graph_timing=False)
    assert [r.status for r in (*graph.rows, *plain.rows)] == ["ok"] * 4
    assert (graph.clock, plain.clock) == ("graph", "events")
    assert graph.winner == "short" and plain.winner == "long", (graph, plain)
    assert plain.row("short").time_us > 1.5 * graph.row("short").time_us


def test_cold_weights() -> None:
    """16 MiB of weights stay in a large L2 cache when they are used again and again."""
    p = matmul_relu(16, 2048, 4096)
    f = lambda x, w: torch.relu(x @ w)  # noqa: E731
    result = race(p, aten=f, weights=["w"])
    row = result.row("aten")
    assert row.time_us == row.cold_us and row.spread is not None and row.spread < 0.1
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    if l2 > 40 * 2**20:
        assert row.cold_us > 1.1 * row.warm_us, result
    bandwidth = 4096 * 2048 * 2 / (row.cold_us * 1e-6)
    assert bandwidth < 9e12, f"{bandwidth:.3g} bytes per second: not from memory"
    assert race(p, aten=f).row("aten").cold_us is None


def test_nothing_of_the_users_is_touched() -> None:
    torch.manual_seed(3)
    x = torch.randn(64, 64, device=GPU)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        states = torch.get_rng_state(), torch.cuda.get_rng_state()
        used = torch.cuda.memory_allocated()

        def random(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            torch.rand(10, device=GPU)
            return torch.relu(x @ w)

        result = race(matmul_relu(16, 64, 512), aten=random, b=lambda x, w: torch.relu(x @ w))
        assert [r.status for r in result.rows] == ["ok", "ok"], result
        assert torch.cuda.current_stream() == stream and torch.cuda.current_device() == 0
        assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], torch.cuda.get_rng_state())
    torch.cuda.synchronize()
    workspaces = 80 * 2**20  # cuBLAS keeps one for the stream
    assert torch.cuda.memory_allocated() - used < workspaces
    before = torch.cuda.memory_allocated()
    race(matmul_relu(16, 64, 512), aten=lambda x, w: torch.relu(x @ w))
    assert torch.cuda.memory_allocated() == before
    assert float(x.sum()) == float(x.sum())


def test_not_while_the_user_captures() -> None:
    p = matmul_relu(16, 64, 512)
    x = torch.ones(8, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(MeasureError, match="while a CUDA graph is being captured"):
            race(p, aten=lambda x, w: torch.relu(x @ w))
    graph.replay()
    assert float(y.sum()) == 16


def test_bad_candidates_do_not_stop_the_others() -> None:
    def synchronizes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ w)
        y[0, 0].item()
        return y

    result = race(
        matmul_relu(16, 64, 512),
        aten=lambda x, w: torch.relu(x @ w),
        synchronizes=synchronizes,
        memory=lambda x, w: torch.empty(1 << 50, dtype=torch.uint8, device=GPU),
        unwritten=lambda x, w: torch.empty(16, 64, dtype=x.dtype, device=GPU),
        last=lambda x, w: torch.relu(x @ w),
    )
    status = {r.name: r.status for r in result.rows}
    assert status == {
        "aten": "ok", "synchronizes": "ok", "memory": "error", "unwritten": "wrong", "last": "ok",
    }, result  # fmt: skip
    assert result.row("memory").why == "out of memory"
    assert "no CUDA graph" in result.row("synchronizes").why
    assert result.row("synchronizes").time_us > 1.5 * result.row("last").time_us
    assert result.winner in ("aten", "last")


def test_a_default_that_cannot_be_captured() -> None:
    def synchronizes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return torch.relu(x @ w)

    result = race(matmul_relu(16, 64, 512), aten=synchronizes, b=lambda x, w: torch.relu(x @ w))
    assert result.clock == "events" and [r.status for r in result.rows] == ["ok", "ok"], result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_compiled_candidates(dtype: torch.dtype) -> None:
    """Two equal programs, compiled: the second may not win by noise."""
    from reflib.tuning import build

    p = matmul_relu(64, 256, 4096, dtype)
    result = measure(request({"aten": p, "same": p}, "aten", weights=["w"], limits=Limits(seconds=30)), build)
    assert [r.status for r in result.rows] == ["ok", "ok"] and result.reference == "float64", result
    a, b = (r.time_us for r in result.rows)
    assert 0.9 < a / b < 1.1 and result.winner == "aten", result
