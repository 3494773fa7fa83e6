"""Kernels by what they take above their floor: the bytes, the operations, and whose time is whose."""

import pytest
import torch
import torch.nn.functional as F

import reflib
from reflib.ir.program import Extern, KernelNode
from reflib.observe.explain import Explanation
from reflib.observe.ranking import DataSheet, names_of, ranking, times, work
from reflib.observe.trace import recorded_calls
from reflib.target import parse_target
from reflib.timeline import Timed

E = reflib.explain


def only(e: Explanation) -> tuple[int, int]:
    """Bytes and flops of the only kernel or call."""
    [row] = e.ranking(calls=0)
    return row.bytes, row.flops


def test_bytes_and_operations_are_the_least_ones() -> None:
    x, table = torch.randn(8, 16), torch.randn(1000, 16)
    assert only(E(lambda v: v * 2 + 1, x)) == (2 * 8 * 16 * 4, 2 * 8 * 16)
    assert only(E(lambda v: v[:2] + 1, x)) == (2 * 2 * 16 * 4, 2 * 16), "of a slice no more than the slice"
    assert only(E(lambda t: t.expand(8, 16) + 1, x[:1]))[0] == (16 + 8 * 16) * 4, "an expanded row once"
    assert only(E(lambda v: v.sum(-1), x)) == (8 * 16 * 4 + 8 * 4, 8 * 16)
    rows = only(E(lambda t, i: t[i] + 1, table, torch.arange(3)))[0]
    assert rows == 3 * 16 * 4 * 2 + 3 * 8, "of a table the rows that are looked up"
    assert only(E(torch.mm, x, x.t().contiguous()))[1] == 2 * 8 * 8 * 16
    pictures, filters = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert sum(r.flops for r in E(F.conv2d, pictures, filters).ranking(calls=0)) == 2 * 2 * 4 * 36 * 27


def test_what_is_updated_in_place_is_read_and_written() -> None:
    x = torch.zeros(1000, 100)
    (row,) = reflib.explain(lambda x: x.add_(1), x, target="sm_90").ranking()
    assert row.bytes == 2 * x.nbytes


def test_a_product_on_a_gpu_has_its_data_sheets_floor() -> None:
    a, b = torch.randn(512, 1024, dtype=torch.float16), torch.randn(1024, 2048, dtype=torch.float16)
    e = E(lambda a, b: torch.relu(a @ b), a, b, target="sm_90")
    row = e.ranking()[0]
    assert row.us is None and row.flops >= 2 * 512 * 1024 * 2048 and "aten.mm.default" in row.ops
    sheet = DataSheet(parse_target("sm_90"), torch.float16)
    assert row.floor_us == sheet.time(row.bytes, row.flops) == pytest.approx(row.flops / 989e6, rel=0.01)


class Slow(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        values = torch.relu(self.norm(x)).sort(0).values
        return torch.tanh(values) + 1


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_the_slow_kernel_comes_first_with_its_line(wrapper: str) -> None:
    model, x, seen = Slow(), torch.randn(4000, 64), torch.zeros(1)
    e = E(model, x, seen, wrapper=wrapper)
    before = model.norm.running_mean.clone(), seen.clone()

    class Roof:
        def time(self, bytes: float, flops: float = 0.0) -> float:
            return bytes / 1e5

    rows = e.ranking(Roof(), calls=3)
    assert torch.equal(before[0], model.norm.running_mean) and torch.equal(before[1], seen), "it ran on copies"
    assert rows[0].name.startswith("aten.sort") and any("values = torch.relu" in line for line in rows[0].lines)
    assert [r.above for r in rows] == sorted((r.above for r in rows), reverse=True)
    assert {r.graph for r in rows} == {0, 1}, "forward and backward"
    kernels = {k.name for i in (0, 1) for k in Explanation(e.graphs, i).kernels}
    assert {r.name for r in rows if r.is_kernel} == kernels
    for r in rows:
        assert r.us and r.us > 0 and r.floor_us == pytest.approx(r.bytes / 1e5) and r.ratio == r.us / r.floor_us
    assert str(rows).splitlines()[1].strip().startswith(f"{rows[0].us:,.1f}")


def test_nothing_stays_in_the_way_of_the_launches() -> None:
    f, x = (lambda v: torch.relu(v).sort().values), torch.randn(50)
    e = E(f, x)
    scope = e.stages.call.load().__globals__
    before = dict(scope)
    [events] = recorded_calls(lambda: e.stages.call([x]), e.graphs, 1)
    assert len([v for v in events if v.kind == "launch"]) == 2 and dict(scope) == before


# -- whose time is whose ----------------------------------------------------------------------------
def event(name: str, start: float, seconds: float, kind: str, flow: int = 0, graph: str = "0") -> Timed:
    return Timed(name, start, seconds, kind, "main", about={"graph": graph}, flow=flow)


def program() -> list[tuple[int, KernelNode | Extern]]:
    """Two products and a kernel, and the first product's name once more in another graph."""
    mm = torch.ops.aten.mm.default
    product = Extern("e", mm, (), (), ("b",))
    kernel = KernelNode("k0", (), None)  # type: ignore[arg-type]
    return [(0, product), (0, kernel), (0, product), (1, product)]


def test_launches_of_one_name_are_those_of_its_steps_in_order() -> None:
    name = names_of(program()[0][1])[0]
    events = [
        event(name, 0, 1, "launch"), event("k0", 2, 2, "launch"), event(name, 5, 3, "launch"),
        event(name, 9, 4, "launch", graph="1"), event("aten::mm", 5.5, 1, "profiler"),
    ]  # fmt: skip
    assert times(program(), events, False) == {0: [1], 1: [2], 2: [3], 3: [4]}
    again = [event("k0", 20 + i, 0.5, "launch") for i in range(3)]  # in a loop
    assert times(program(), [*events, *again], False)[1] == [2, 0.5, 0.5, 0.5]


def test_on_a_gpu_it_is_what_the_launch_started() -> None:
    name = names_of(program()[0][1])[0]
    launches = [event(name, 0, 1, "launch"), event("k0", 2, 1, "launch")]
    runtime = [event("cudaLaunchKernel", 0.2 + i / 10, 0.01, "profiler", 7 + i) for i in range(2)]
    runtime += [event("cuLaunchKernel", 2.5, 0.01, "profiler", 9)]
    device = [event("gemm", 10, 5, "device", 7), event("reduce", 16, 1, "device", 8), event("k0", 20, 2, "device", 9)]
    assert times(program(), [*launches, *runtime, *device], True) == {0: [6], 1: [2]}
    assert times(program(), device, True) == {1: [2]}, "replayed: by the kernel's name"
    assert times(program(), launches, True) == {}, "the profiler saw nothing: not the host's time"


def test_kernels_with_the_same_code_run_under_the_name_of_the_first() -> None:
    steps = [(0, KernelNode(f"k{i}", (), None)) for i in range(3)]  # type: ignore[arg-type]
    device = [event("k0", 3 * i, i + 1, "device") for i in range(4)] + [event("k1", 20, 9, "device")]
    found = times(steps, device, True, {(0, "k0"): "k0", (0, "k1"): "k1", (0, "k2"): "k0"})
    assert found == {0: [1, 3], 2: [2, 4], 1: [9]}


def test_without_times_or_limits_there_is_still_an_order() -> None:
    e = E(lambda v: torch.relu(v).sort().values + 1, torch.randn(50))
    rows = ranking(e.graphs)
    assert [r.bytes for r in rows] == sorted((r.bytes for r in rows), reverse=True) and len(rows) == 3
    assert all(r.us is r.floor_us is r.ratio is r.above is None for r in rows)
    assert work(e.scheduled, next(n for n in e.scheduled.nodes if isinstance(n, Extern)))[0] == 2 * 50 * 4


# -- attention that is called, forward and backward -------------------------------------------------
def test_the_products_of_attention_are_counted():
    b, h, n, d = 2, 3, 32, 16
    q, k, v = (torch.randn(b, h, n, d, requires_grad=True) for _ in range(3))
    e = reflib.explain(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    found = {r.name: r.flops for r in e.ranking() if "attention" in r.name}
    forward, backward = sorted(found.values())
    assert forward == 2 * (2 * b * h * n * n * d)  # q @ k, and the weights @ v
    assert backward == 5 * (2 * b * h * n * n * d)  # the scores again, and two gradients of each product


# -- modules: a kernel's own, not every one with the same op at the same line -----------------------
class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.inner(x), -1)


def test_each_kernel_has_its_own_module():
    e = reflib.explain(torch.nn.Sequential(Layer(), Layer(), Layer()), torch.randn(4, 8))
    kernels = [r.modules for r in e.ranking() if r.is_kernel]  # of the forward and of the backward
    assert kernels and all(len(m) == 1 for m in kernels), kernels
    assert {f"L['fn'].{i}" for i in range(3)} <= {m for (m,) in kernels}
