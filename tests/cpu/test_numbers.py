"""Tensors without dimensions on the CPU, read by kernels on a GPU: literals in the code, or kernel arguments."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.constants import constructors, literals
from reflib.capture.graph import Graph
from reflib.ir.program import Extern
from reflib.lower import lower
from reflib.options import Options
from reflib.pipeline import Stages, run
from reflib.target import parse_target
from reflib.wrap.cpp import CppPrinter
from reflib.wrap.python import PythonPrinter

CPU = torch.device("cpu")


def graph_for_gpu(fn: Callable[..., Any], *args: torch.Tensor) -> Graph:
    """``fn`` with every argument that has dimensions on a GPU, the others on the CPU."""
    mode = FakeTensorMode()
    fakes = [FakeTensor(mode, a.to("meta"), torch.device("cuda:0") if a.dim() else CPU) for a in args]
    with mode:
        return Graph(make_fx(fn)(*fakes), "inference", frozenset())


def for_gpu(graph: Graph) -> Stages:
    sm_90, cpu = parse_target("sm_90"), parse_target("cpu")
    target_of = {"cuda": sm_90, "cpu": cpu}
    return run(graph, Options(verify=True), until="generate", target_of=lambda d: target_of[d.type])


def all_on_cpu(graph: Graph, **options: Any) -> Callable[[list], Any]:
    """The program for a GPU, run by C++ kernels."""
    program = lower(graph, Options())
    buffers = {name: replace(b, device=CPU) for name, b in program.buffers.items()}
    call = run(graph, Options(verify=True, **options), program=replace(program, buffers=buffers)).call
    assert call is not None
    return call


NUMBERS: dict[str, Any] = {
    "bool": [True, False], "uint8": [0, 1, 255], "int8": [-128, 1, 127], "int16": [-32768, 16], "int32": [-(2**31), 5],
    "int64": [-(2**63), 2**62 + 1, 1], "float16": [1.5, -0.0, float("inf"), 6e-8], "bfloat16": [3e38, -2.5],
    "float32": [0.1, -0.0, float("nan"), 1e-40, float("-inf")], "float64": [0.1, 1 + 2**-40, float("nan"), 5e-324],
}  # fmt: skip


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_every_dtype_keeps_its_value(wrapper: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, *numbers: torch.Tensor) -> Any:
        return [torch.where(y, n, x.to(n.dtype)) for n in numbers]

    x, y = torch.ones(3, 5), torch.arange(15).view(3, 5) % 2 == 0
    rounds = [[torch.tensor(v[i % len(v)], dtype=getattr(torch, d)) for d, v in NUMBERS.items()] for i in range(5)]
    call = all_on_cpu(graph_for_gpu(fn, x, y, *rounds[0]), wrapper=wrapper)
    for numbers in rounds:
        for got, want in zip(call([x, y, *numbers]), fn(x, y, *numbers), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got[y].view(torch.uint8), want[y].view(torch.uint8))  # the sign of zero


def test_arguments_and_no_copies() -> None:
    def fn(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return x * a + torch.sqrt(b), x.sum() / a

    graph = graph_for_gpu(fn, torch.ones(64, 64), torch.tensor(0.5), torch.tensor(2.0))
    s = for_gpu(graph)
    calls = [n for n in s.scheduled.nodes if isinstance(n, Extern)]
    assert {str(n.target) for n in calls} == {"aten._local_scalar_dense.default"} and len(calls) == 2
    gpu = [k for k in s.kernels.values() if k.language == "triton"]
    assert all(s.scheduled.buffers[b].device.type == "cuda" for k in gpu for b, _ in k.buffers)
    assert {k.index_type for k in gpu if not k.name.endswith("fallback")} == {"int32"}
    assert any("a_1_number.to(tl.int32)" in k.source and "bitcast=True" in k.source for k in gpu)
    for printer in (PythonPrinter, CppPrinter):
        text = printer(s.scheduled, s.plan, s.kernels).print()
        assert "a_1_number" in text and "_to_copy" not in text
    assert "a_1_number = *(const int32_t*)(a_1.ptr" in text  # without Python


def test_a_number_of_64_bits_takes_64_bits() -> None:
    s = for_gpu(graph_for_gpu(lambda x, d: x + d, torch.ones(8, 8), torch.tensor(0.1, dtype=torch.float64)))
    assert {k.index_type for k in s.kernels.values()} == {"int64"}


def test_a_position() -> None:
    graph = graph_for_gpu(lambda x, i: torch.ops.aten.index.Tensor(x, [i]), torch.arange(8.0), torch.tensor(3))
    got = all_on_cpu(graph)([torch.arange(8.0), torch.tensor(-3)])
    assert got[0] == 5.0


# -- literals ------------------------------------------------------------------------------------------
def scaled(x: torch.Tensor) -> torch.Tensor:
    scale = torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * 3)
    return x / scale.to(dtype=x.dtype) + torch.tensor(2.5, dtype=torch.float64)


@pytest.mark.parametrize("grad", [False, True])
def test_literals_are_computed_once(grad: bool) -> None:
    x = torch.randn(8, 64, requires_grad=grad)
    e = reflib.explain(scaled, x, target="sm_90")
    (kernel,) = e.kernels
    assert "0.0721687" in kernel.source  # 1 / 13.85640: a quotient by a number is a product
    assert not e.program.constants and len(e.program.nodes) == (2 if not grad else len(e.program.nodes))
    if grad:
        assert not e.backward.program.constants
    f = reflib.compile(scaled)
    torch.testing.assert_close(f(x), scaled(x))


def test_a_literal_that_is_returned_is_new_at_every_call() -> None:
    def fn(x: torch.Tensor) -> Any:
        t = torch.tensor(3)
        return x + t * 2, t, t.add_(1)

    f = reflib.compile(fn)
    first = f(torch.zeros(3))
    first[1].add_(5)
    for got, want in zip(f(torch.zeros(3)), fn(torch.zeros(3)), strict=True):
        assert torch.equal(got, want)


def test_a_tensor_that_the_model_holds_is_read_at_every_call() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor(2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.scale * 3)

    model = Scaled()
    f = reflib.compile(model)
    x = torch.ones(4)
    assert torch.equal(f(x), 6 * x)
    model.scale.fill_(5.0)
    assert torch.equal(f(x), 15 * x)


def test_random_numbers_are_no_literals() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(torch.tensor(1.0))

    f = reflib.compile(fn)
    assert f(torch.zeros(1)) != f(torch.zeros(1))


@pytest.mark.parametrize("wide", [torch.tensor(2.5, dtype=torch.float64), torch.tensor(2**40)], ids=["float", "int"])
def test_a_product_with_64_bits_counts_in_as_many(wide: torch.Tensor) -> None:
    graph = graph_for_gpu(lambda a, b, s: (a @ b) * s, torch.ones(64, 64).half(), torch.ones(64, 64).half(), wide)
    kernels = [k for k in (for_gpu(graph).kernels or {}).values() if "_number" in k.source]
    assert kernels and all(k.index_type == "int64" for k in kernels)


def test_a_literal_that_raises_is_left_to_the_call() -> None:
    fn = lambda: torch.ones(()) * (torch.tensor(1) // torch.tensor(0))  # noqa: E731
    with pytest.raises(RuntimeError, match=r"(?i)zero"):
        reflib.compile(fn)()


# -- positions that are computed on the CPU -------------------------------------------------------------
def relative(n: int) -> torch.Tensor:
    """Where each place of a window finds its bias, as BEiT and Swin compute it."""
    at = torch.stack(torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")).flatten(1)
    at = (at[:, :, None] - at[:, None, :] + n - 1).permute(1, 2, 0).contiguous()
    at[:, :, 0] *= 2 * n - 1
    out = torch.zeros(n * n + 1, n * n + 1, dtype=at.dtype)
    out[1:, 1:] = at.sum(-1)
    out[0, 0:] = 4 * n
    return out


def moved(fn: Callable[..., Any], x: torch.Tensor) -> torch.fx.GraphModule:
    """``fn`` as for an argument on a GPU. (Traced for a CPU: a PyTorch without CUDA indexes no fakes on a GPU.)"""
    mode, on_gpu = FakeTensorMode(), set[torch.fx.Node]()
    with mode:
        module = make_fx(torch.func.functionalize(fn))(mode.from_tensor(x))
    for n in module.graph.nodes:
        if n.op == "placeholder" or on_gpu.intersection(n.all_input_nodes):
            on_gpu.add(n)
            if "val" in n.meta:
                n.meta["val"] = FakeTensor(mode, n.meta["val"].to("meta"), torch.device("cuda:0"))
    return constructors(literals(module, Options(), True), Options(), True)


def test_positions_are_computed_where_they_are_read() -> None:
    """Once, though each layer computes them."""
    fn = lambda t: t[relative(3).view(-1)] * 2 + t.sin()[relative(3).view(-1)]  # noqa: E731
    module = moved(fn, x := torch.randn(40, 4))
    values = [n.meta["val"] for n in module.graph.nodes if "val" in n.meta]
    assert {v.device.type for v in values} == {"cuda"} and str(module.graph).count("aten.arange") == 1
    assert {k.language for k in (for_gpu(Graph(module, "inference", frozenset())).kernels or {}).values()} == {"triton"}
    for n in module.graph.nodes:
        n.kwargs = {k: CPU if k == "device" else v for k, v in n.kwargs.items()}
    torch.testing.assert_close(torch.fx.Interpreter(module).run(x), fn(x))


def buckets(n: int) -> torch.Tensor:
    """T5's, by the logarithm, as MPNet computes them."""
    far = (torch.arange(n)[None] - torch.arange(n)[:, None]).abs()
    large = 4 + (torch.log(far.float() / 4) / math.log(8) * 4).to(torch.long)
    return torch.where(far < 4, far, torch.min(large, torch.full_like(large, 7)))


def test_what_is_computed_with_floating_point_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, though each layer computes it, and as eager computes it."""
    monkeypatch.setattr("reflib.capture.constants.on_device", lambda value, _: value)
    fn = lambda t: t[buckets(40)] * 2 + t.sin()[buckets(40)] + t[(torch.arange(3.0) * 2).long()].sum()  # noqa: E731
    module = moved(fn, x := torch.randn(8, 4))
    assert sorted(n for n, _ in module.named_buffers()) == ["_computed0", "_computed1"]
    assert not any(str(n.target) == "aten.log.default" for n in module.graph.nodes)
    torch.testing.assert_close(torch.fx.Interpreter(module).run(x), fn(x))


def test_what_else_is_on_the_cpu_stays() -> None:
    rates = lambda t: torch.ops.aten._to_copy.default(torch.arange(4.0).exp(), device=t.device) * t  # noqa: E731
    random = lambda t: t[torch.randint(4, (4,))]  # noqa: E731
    for fn in (rates, random):
        nodes = moved(fn, torch.randn(4, 4)).graph.nodes
        assert any(n.meta["val"].device.type == "cpu" for n in nodes if "val" in n.meta)
