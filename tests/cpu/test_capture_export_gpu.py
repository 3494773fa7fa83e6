"""Models captured by ``torch.export`` for a GPU that need not be here."""

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reflib.errors import CaptureError
from reflib.fuse import fuse
from reflib.ir.program import Extern
from reflib.lower import lower
from reflib.options import Options
from reflib.target import parse_target
from tests.exporting import CUDA, Alone, aten, calls, devices, export_for, on_cpu, run, targets, x
from tests.forking import printed


def in_autocast(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.float16):
        assert torch.is_autocast_enabled("cuda")
        y = t @ w
    with torch.autocast(t.device.type):
        z = t @ w
    with torch.autocast("cuda", torch.bfloat16):
        u = t @ w
    with torch.autocast("cuda", enabled=False):
        return y.float() + z.float() + u.float() + t @ w


def test_autocast_stays_on() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = aten.scaled_dot_product_attention.default
    watched = [
        lambda: torch.cuda.amp.common.amp_definitely_not_available,
        lambda: torch.cuda.is_bf16_supported,
        lambda: FakeTensorMode.avoid_device_init,
        lambda: FakeTensorMode._dispatch_impl,
        lambda: torch.fx.experimental.proxy_tensor.CONSTANT_NUMEL_LIMIT,
        lambda: dict(op.py_kernels),
        lambda: torch.is_autocast_enabled("cuda"),
        lambda: torch.get_autocast_dtype("cuda"),
        lambda: torch.is_grad_enabled(),
        lambda: torch._dynamo.config.fake_tensor_cache_enabled,
    ]
    before = [w() for w in watched]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*autocast.*")
        e = export_for(in_autocast, (x(4, 4), x(4, 4)), device=CUDA)
    dtypes = [n.meta["val"].dtype for n in calls(e, aten.mm.default)]
    assert dtypes == [torch.float16, torch.float16, torch.bfloat16, torch.float32]
    assert [n.args[0].meta["val"].dtype for n in calls(e, aten.mm.default)] == dtypes
    lower(e.graph, Options(verify=True))
    assert [w() for w in watched] == before

    def fails(t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda"):
            raise RuntimeError("mine")

    with pytest.raises(CaptureError, match="mine"):
        export_for(fails, (x(2),), device=CUDA)
    assert [w() for w in watched] == before
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="not available"), torch.autocast("cuda"):
            assert not torch.is_autocast_enabled("cuda")


MADE = {
    "list": lambda t: t + torch.tensor([1.0, 2.0, 3.0], device=t.device),
    "number": lambda t: t * torch.tensor(3.0, device=t.device),
    "one element": lambda t: t * torch.tensor([3.0], device=t.device),
    "as_tensor": lambda t: t + torch.as_tensor([1.0, 2.0, 3.0], device=t.device),
    "new_tensor": lambda t: t + t.new_tensor([1.0, 2.0, 3.0]),
    "another dtype": lambda t: t + torch.tensor([1.0, 2.0, 3.0]).to(t.device, torch.float64),
    "returned": lambda t: (t + 1, torch.tensor([1.0, 2.0, 3.0], device=t.device)),
    "written to": lambda t: torch.tensor([1.0, 2.0, 3.0], device=t.device).add_(t[0]),
    "indices": lambda t: t[:, torch.tensor([2, 0], device=t.device)],
}


@pytest.mark.parametrize("name", MADE)
def test_constants_made_in_forward(name: str) -> None:
    e = export_for(Alone(MADE[name]), (x(3, 3),), device="cuda")
    assert devices(e) == {CUDA}
    (value,) = e.state.values()
    assert value.device.type == "cpu" and value.numel() in (1, 2, 3)
    lower(e.graph, Options(verify=True))
    expected = MADE[name](x(3, 3))
    torch.testing.assert_close(on_cpu(e, x(3, 3)), list(expected) if isinstance(expected, tuple) else [expected])


def test_constants_of_the_cpu_stay_there() -> None:
    e = export_for(lambda t: t * torch.tensor(3.0) + torch.ones(3).add(1).to(t.device), (x(3),), device="cuda")
    assert devices(e) == {CUDA, torch.device("cpu")}
    torch.testing.assert_close(on_cpu(e, x(3)), [x(3) * 3 + 2])
    e = export_for(lambda t: t * torch.tensor(3.0).item(), (x(3),), device="cuda")
    assert [n.args[1] for n in calls(e, aten.mul.Tensor)] == [3.0]


FACTORIES = {
    "cuda()": lambda t: torch.ones(3).cuda() + t,
    "to": lambda t: t.to("cuda") + torch.zeros(3, device="cuda"),
    "context": lambda t: t + _in_context(),
    "random": lambda t: torch.randn_like(t) + torch.rand(3, device=t.device),
    "mask": lambda t: t.masked_fill(torch.ones(3, 3, dtype=torch.bool, device=t.device).tril(), 0.0),
    "written": lambda t: t.new_zeros(3, 3).index_put_((torch.arange(3, device=t.device),), t),
}


def _in_context() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.zeros(3)


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str) -> None:
    e = export_for(Alone(FACTORIES[name]), (x(3, 3),), device="cuda")
    assert all(n.meta["val"].device == CUDA for n in e.graph.nodes if n.op == "placeholder")
    assert devices(e) - ({torch.device("cpu")} if name == "cuda()" else set()) == {CUDA}
    lower(e.graph, Options(verify=True))


def test_a_gpu_is_always_the_first() -> None:
    assert devices(export_for(nn.Linear(3, 3), (x(2, 3),), device=torch.device("cuda", 5))) == {CUDA}
    assert devices(export_for(nn.Linear(3, 3), (x(2, 3),), device=torch.device("cuda"))) == {CUDA}
    with pytest.raises(CaptureError, match="cpu and cuda"):
        export_for(nn.Linear(3, 3), (x(2, 3),), device=torch.device("meta"))


LAYERS = {
    "batch norm, training": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 8, 8)),
    "lstm": (lambda: nn.LSTM(4, 5, 2).eval(), (3, 2, 4)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (2, 3, 8)),
    "encoder, training": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 3, 8)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (2, 4)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, shape = LAYERS[name]
    e = export_for(make(), (x(*shape),), device="cuda")
    assert devices(e) == {CUDA}
    lower(e.graph, Options(verify=True))


def test_gradients_never_abort_the_process() -> None:
    """In another process: torch aborts, where the build has no CUDA, for a fake that requires grad."""
    code = """
import torch
from reflib.errors import CaptureError
from tests.exporting import export_for
class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3))
    def forward(self, x):
        with torch.enable_grad():
            y = (self.w * x.detach().requires_grad_()).sum()
            return torch.autograd.grad(y, self.w)[0] if x.shape[0] == 2 else y
print(len(export_for(M(), (torch.randn(3, requires_grad=True),), device="cuda").graph.nodes) > 0)
try:
    export_for(M(), (torch.randn(2, 3),), device="cuda")
except CaptureError:
    print("refused")
w = torch.ones(3, requires_grad=True)
(w * 2).sum().backward()
print(w.grad.tolist() == [2.0, 2.0, 2.0])
"""
    assert printed("-c", code).split() == ["True", "refused", "True"]


class Retargeted(nn.Module):
    """Devices everywhere: in factories, autocast, constants, branches, weights of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("unsaved", torch.arange(8.0), persistent=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, t: torch.Tensor) -> Any:
        y = torch.relu(self.linear(t)) + torch.arange(8, device=t.device) * torch.tensor([2.0], device=t.device)
        y = torch.cond(y.sum() > 0, lambda y: y + torch.ones(8, device=y.device), lambda y: y * 2, (y,))
        with torch.autocast(t.device.type, torch.bfloat16):
            z = y @ self.linear.weight
        self.count.add_(1)
        q = y.view(1, 1, -1, 8)
        return F.scaled_dot_product_attention(q, q, q) + self.unsaved, z


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_program_of_a_cpu_is_captured_for_a_gpu(dynamic: bool) -> None:
    """As the module it was made of; the program itself stays as it is."""
    model, t = Retargeted().eval(), x(6, 8)
    shapes = ({0: torch.export.Dim("n")},) if dynamic else None
    program = torch.export.export(model, (t,), dynamic_shapes=shapes)
    text = str(program.graph_module)
    e, wanted = export_for(program, device=CUDA), export_for(model, (t,), dynamic_shapes=shapes, device=CUDA)
    assert targets(e) == targets(wanted) and devices(e) == {CUDA}
    assert e.state["linear.weight"].data_ptr() == model.linear.weight.data_ptr()
    assert list(e.state) == list(wanted.state) and {s.device.type for s in e.state.values()} == {"cpu"}
    texts = (str(lower(c.graph, Options(verify=True))) for c in (e, wanted))
    assert len({re.sub(r"_to_copy(_\d)?|clone", "copy", text) for text in texts}) == 1
    assert str(program.graph_module) == text and devices(export_for(program)) == {torch.device("cpu")}


def test_a_kernel_that_only_a_cpu_has_is_named() -> None:
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    program = torch.export.export(Alone(lambda q: op(q, q, q)[0]), (x(1, 1, 8, 8),))
    with pytest.raises(CaptureError, match=r"calls aten._scaled_dot_product_flash_attention_for_cpu.*only a CPU has"):
        export_for(program, device=CUDA)


# -- attention --------------------------------------------------------------------------------------
ATTENTION = {
    "plain": ({}, 4, None),
    "causal": ({"is_causal": True}, 4, None),
    "grouped": ({"enable_gqa": True}, 2, None),
    "mask": ({}, 4, torch.float32),
    "boolean mask": ({"scale": 0.3}, 4, torch.bool),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.sample(4)
def test_attention_is_one_call(case: str, dtype: torch.dtype, dynamic: bool) -> None:
    options, heads, masked = ATTENTION[case]

    class Attention(nn.Module):
        def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
            out = F.scaled_dot_product_attention(q, k, v, mask, **options)
            return out.transpose(1, 2).view(out.shape[0], out.shape[2], -1) * 2  # a view of what fused kernels return

    q, k, v = (torch.zeros(3, h, 16, 32, dtype=dtype) for h in (4, heads, heads))
    mask = None if masked is None else torch.ones(16, 16, dtype=dtype if masked.is_floating_point else masked)
    batch = {0: torch.export.Dim("batch")}
    shapes = {"q": batch, "k": batch, "v": batch, "mask": None} if dynamic else None
    e = export_for(Attention(), (q, k, v, mask), dynamic_shapes=shapes, device="cuda")
    (call,) = calls(e, aten.scaled_dot_product_attention.default)
    assert call.meta["val"].stride()[1:] == (32, 128, 1) and call.meta["val"].dtype == dtype
    assert not any("softmax" in t or "bmm" in t for t in targets(e))
    program = lower(e.graph, Options(verify=True))
    externs = [n for n in program.nodes if isinstance(n, Extern)]
    assert [n.target for n in externs] == [aten.scaled_dot_product_attention.default]
    fuse(program, Options(), parse_target("sm_80"))


def test_attention_in_autocast_and_of_other_ranks() -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        with torch.autocast(q.device.type, torch.bfloat16):
            return F.scaled_dot_product_attention(q, q, q)

    (call,) = calls(export_for(attend, (x(2, 2, 8, 16),), device="cuda"), aten.scaled_dot_product_attention.default)
    assert call.meta["val"].dtype == torch.bfloat16
    e = export_for(lambda q: F.scaled_dot_product_attention(q, q, q), (x(2, 8, 16),), device="cuda")
    (call,) = calls(e, aten.scaled_dot_product_attention.default)
    assert call.meta["val"].stride() == (128, 16, 1)
    with pytest.raises(CaptureError, match="not of one dtype"):
        export_for(lambda q: F.scaled_dot_product_attention(q, q, q.half()), (x(2, 2, 8, 16),), device="cuda")


def test_attention_on_the_cpu_is_as_it_was() -> None:
    q = x(2, 4, 8, 16)
    e = export_for(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (q,))
    assert targets(e) == ["aten.scaled_dot_product_attention.default"]
    torch.testing.assert_close(run(e, q), [F.scaled_dot_product_attention(q, q, q, is_causal=True)])
