"""Whole models captured by ``torch.export``: for the CPU, and for a GPU that need not be here."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reflib.capture import export as capture
from reflib.capture.export import Exported
from reflib.errors import CaptureError
from reflib.fuse import fuse
from reflib.ir.program import Extern
from reflib.lower import decompositions, lower
from reflib.options import Options
from reflib.target import parse_target
from tests.models import MODELS

export_for = functools.partial(capture.export_for, decompositions=decompositions())

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
DEVICES = ["cpu", "cuda"]


class Alone(nn.Module):
    def __init__(self, fn: Any):
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def calls(e: Exported, op: Any) -> list[torch.fx.Node]:
    return [n for n in e.graph.nodes if n.target == op]


def targets(e: Exported) -> list[str]:
    return [str(n.target) for n in e.graph.nodes if n.op == "call_function"]


def devices(e: Exported) -> set[torch.device]:
    """Of every value in the graph, and of every device written in it."""
    found: set[torch.device] = set()
    for n in e.graph.nodes:
        if n.op != "output":
            vals = torch.utils._pytree.tree_leaves(n.meta.get("val"))
            found |= {v.device for v in vals if isinstance(v, torch.Tensor)}
            if n.target != aten._assert_tensor_metadata.default:
                found |= {a for a in [*n.args, *n.kwargs.values()] if isinstance(a, torch.device)}
    return found


def run(e: Exported, *args: Any) -> Any:
    """The graph with its state, as numbers on the CPU; then what the user gets."""
    flat = torch.utils._pytree.tree_leaves(args)
    state = iter(e.state.values())
    users = iter(flat)
    inputs = [
        next(users) if s.kind.name == "USER_INPUT" else next(state) for s in e.program.graph_signature.input_specs
    ]
    with torch.no_grad():
        results = torch.fx.Interpreter(e.graph.module).run(*inputs)
    kinds = [s.kind.name for s in e.program.graph_signature.output_specs]
    return [r for r, kind in zip(results, kinds) if kind == "USER_OUTPUT"]


def on_cpu(e: Exported, *args: Any) -> Any:
    """A graph for cuda, run here: its device arguments become the CPU."""
    for n in e.graph.nodes:
        n.kwargs = {k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in n.kwargs.items()}
        if n.target == aten._assert_tensor_metadata.default:
            e.graph.module.graph.erase_node(n)
    e.graph.module.recompile()
    return run(e, *args)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.linear.weight
        self.register_buffer("kept", torch.arange(8.0))
        self.register_buffer("unsaved", torch.arange(8.0) * 2, persistent=False)
        self.plain = torch.ones(8) * 3
        self.nested = {"a": [torch.ones(8) * 4, (torch.ones(8) * 5,)]}
        self.listed = [nn.Parameter(torch.ones(8) * 6)]
        self.norm = nn.BatchNorm1d(8)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        y = self.tied(self.linear(t)) + self.kept + self.unsaved + self.plain + self.nested["a"][0]
        y = y + self.nested["a"][1][0] * self.listed[0] + torch.tensor([1.0, 2.0] * 4, device=t.device)
        y = y * 2 if t.is_cuda else y
        return self.norm(y + torch.zeros(8, device=t.device) + torch.arange(8, device=t.device))


@pytest.mark.parametrize("device", DEVICES)
def test_state_is_the_models_own_tensors(device: str) -> None:
    model = Everything().eval()
    e = export_for(model, (x(4, 8),), device=torch.device(device))
    state = e.state
    kinds = {s.target: s.kind.name for s in e.program.graph_signature.input_specs}
    assert list(state) == [t for t in kinds if t is not None and kinds[t] != "USER_INPUT"]
    assert state["linear.weight"] is model.linear.weight
    tied = [n for n, t in state.items() if t is model.linear.weight]
    assert set(tied) <= {"linear.weight", "tied.weight"}
    assert state["kept"] is model.kept and state["unsaved"] is model.unsaved and state["plain"] is model.plain
    held = {t.data_ptr() for t in state.values()}
    assert {t.data_ptr() for t in (*model.nested["a"][1], model.nested["a"][0], model.listed[0])} <= held
    assert any(t.numel() == 8 and t.tolist() == [1.0, 2.0] * 4 for t in state.values())
    assert all(type(t) in (torch.Tensor, nn.Parameter) and t.device.type == "cpu" for t in state.values())
    assert devices(e) == {torch.device(device, 0) if device == "cuda" else torch.device("cpu")}
    lower(e.graph, Options(verify=True))


def test_numbers_on_both_devices() -> None:
    model = Everything().eval()
    t = x(4, 8)
    torch.testing.assert_close(run(export_for(model, (t,)), t), [model(t)])
    there = export_for(model, (t,), device=CUDA)
    assert len(calls(there, aten.mul.Tensor)) > len(calls(export_for(model, (t,)), aten.mul.Tensor))  # ``if is_cuda``

    class AsIfThere(Everything):
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            y = self.tied(self.linear(t)) + self.kept + self.unsaved + self.plain + self.nested["a"][0]
            y = y + self.nested["a"][1][0] * self.listed[0] + torch.tensor([1.0, 2.0] * 4)
            return self.norm(y * 2 + torch.arange(8))

    same = AsIfThere().eval()
    same.load_state_dict(model.state_dict())
    torch.testing.assert_close(on_cpu(there, t), [same(t)])


@pytest.mark.parametrize("device", DEVICES)
def test_the_users_module_is_untouched(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    before = {n: (id(p), p.requires_grad, p.device, p._version) for n, p in model.named_parameters()}
    attributes = {id(m): dict(vars(m)) for m in model.modules()}
    export_for(model, (x(2, 4),), device=device)
    assert {n: (id(p), p.requires_grad, p.device, p._version) for n, p in model.named_parameters()} == before
    assert model.training and not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    for m in model.modules():
        assert vars(m).keys() == attributes[id(m)].keys()
    assert int(model[1].num_batches_tracked) == 0


def test_the_result_does_not_keep_the_module() -> None:
    for device in DEVICES:
        model = Everything().eval()
        arg = x(4, 8)
        e = export_for(model, (arg,), device=device)
        refs = [weakref.ref(m) for m in model.modules()] + [weakref.ref(arg)]
        weight = weakref.ref(model.linear.weight)
        del model, arg
        gc.collect()
        assert [r() for r in refs] == [None] * len(refs), device
        assert weight() is not None
        del e
        gc.collect()
        assert weight() is None


# -- as if the GPU were there -----------------------------------------------------------------------
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


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, shape = LAYERS[name]
    e = export_for(make(), (x(*shape),), device="cuda")
    assert devices(e) == {CUDA}
    lower(e.graph, Options(verify=True))


def test_gradients_never_abort_the_process() -> None:
    """In a process of its own: torch aborts, where the build has no CUDA, for a fake that requires grad."""
    code = """
import torch
from reflib.errors import CaptureError
from tests.cpu.test_capture_export import export_for
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
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "refused", "True"]


@pytest.mark.gpu
def test_a_machine_with_a_gpu_captures_the_same() -> None:
    model, t = Everything().eval(), x(4, 8)
    without = export_for(model, (t,), device="cuda")
    model = model.cuda()
    model.plain, model.listed = model.plain.cuda(), [p.cuda() for p in model.listed]
    model.nested = {"a": [model.nested["a"][0].cuda(), (model.nested["a"][1][0].cuda(),)]}
    e = export_for(model, (t.cuda(),))
    assert targets(e) == targets(without) and devices(e) == {CUDA}
    assert e.state["linear.weight"] is model.linear.weight
    there = Exported(e.graph, e.program, {n: v.cuda() for n, v in e.state.items()})
    torch.testing.assert_close(run(there, t.cuda()), [model(t.cuda())])


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


# -- whole models -----------------------------------------------------------------------------------
@pytest.mark.parametrize("device", [None, "cuda"], ids=["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, device: str | None) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, args = make(), inputs()
    e = export_for(model, args, device=device)
    assert devices(e) == {CUDA if device else torch.device("cpu")}
    program = lower(e.graph, Options(verify=True))
    fuse(program, Options(), parse_target("sm_80" if device else "cpu"))
    if device is None:
        torch.manual_seed(1)
        actual = run(e, *args)
        torch.manual_seed(1)
        torch.testing.assert_close(actual, [model(*args)])


# -- arguments --------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_shapes(device: str) -> None:
    model = Everything().eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    e = export_for(model, (x(4, 8),), dynamic_shapes={"t": {0: batch}}, device=device)
    val = e.graph.nodes[-2].meta["val"]
    assert isinstance(val.shape[0], torch.SymInt)
    (bounds,) = e.program.range_constraints.values()
    assert (bounds.lower, bounds.upper) == (2, 64)
    lower(e.graph, Options(verify=True))
    if device == "cpu":
        torch.testing.assert_close(run(e, x(9, 8)), [model(x(9, 8))])


@pytest.mark.parametrize("device", DEVICES)
def test_nested_arguments_and_keywords(device: str) -> None:
    def fn(pair: Any, scale: float, *, more: Any = None) -> Any:
        return {"sum": pair[0] + pair[1]["b"] * scale, "more": more}

    a, b, c = x(3), x(4)[:3], x(3)
    e = export_for(fn, ((a, {"b": b}), 2.0), {"more": c}, device=device)
    assert e.state == {}
    assert e.program.call_spec.in_spec == torch.utils._pytree.tree_structure((((a, {"b": b}), 2.0), {"more": c}))
    assert e.program.call_spec.out_spec == torch.utils._pytree.tree_structure({"sum": a, "more": c})


def test_callables() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def encode(self, left: torch.Tensor) -> torch.Tensor:
            return self.a(left)

    two = Two()
    for device in DEVICES:
        e = export_for(two.encode, (x(2, 3),), dynamic_shapes={"left": {0: torch.export.Dim("n")}}, device=device)
        assert e.state["owner.a.weight"] is two.a.weight
    torch.testing.assert_close(run(export_for(two.encode, (x(2, 3),)), x(2, 3)), [two.encode(x(2, 3))])
    assert targets(export_for(torch.relu, (x(2),), device="cuda")) == ["aten.relu.default"]
    with pytest.raises(CaptureError, match="got int"):
        export_for(3, ())  # type: ignore[arg-type]


def test_strides_and_shared_arguments() -> None:
    t = x(4, 6)
    e = export_for(lambda a, b: a + b, (t.t(), t.t()), device="cuda")
    first = next(n for n in e.graph.nodes if n.op == "placeholder")
    assert first.meta["val"].stride() == (1, 6)


def test_exported_programs() -> None:
    model = Everything().eval()
    program = torch.export.export(model, (x(4, 8),), strict=False)
    for device in (None, torch.device("cpu")):
        e = export_for(program, device=device)
        torch.testing.assert_close(run(e, x(4, 8)), [model(x(4, 8))])
        assert e.state["linear.weight"].data_ptr() == model.linear.weight.data_ptr()
    with pytest.raises(CaptureError, match=r"exported for cpu, not for cuda.*pass the module"):
        export_for(program, device="cuda")
    with pytest.raises(CaptureError, match="without any"):
        export_for(program, (x(4, 8),))
    with pytest.raises(CaptureError, match="no data"):
        export_for(export_for(model, (x(4, 8),), device="cuda").program)


# -- what cannot be captured ------------------------------------------------------------------------
class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a socket cannot be copied")


def test_what_cannot_be_copied_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].connection = Uncopied()
    assert export_for(model, (x(2, 3),)).state
    with pytest.raises(CaptureError, match=r"cannot be copied \(TypeError: a socket cannot be copied\)") as e:
        export_for(model, (x(2, 3),), device="cuda")
    assert isinstance(e.value.__cause__, TypeError)


def test_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **kw: made.append(self) or real(self, **kw))
    model = nn.Linear(8, 8)
    e = export_for(model, (x(2, 8),), device="cuda")
    assert not any(t is model.weight or t is model.bias for t in made)
    assert e.state["weight"].data_ptr() == model.weight.data_ptr()


def test_errors_say_what_to_do() -> None:
    outside = x(3, 3)
    cases = [
        (lambda t: t + outside, None, "make it a buffer"),
        (lambda t: t + 1 if t.sum() > 0 else t, None, "torch.where"),
        (lambda t: t + torch.zeros(3, 3, device=t.device), ({0: torch.export.Dim("n")},), "dynamic_shapes"),
    ]
    for fn, shapes, advice in cases:
        with pytest.raises(CaptureError, match=advice) as e:
            export_for(fn, (x(3, 3),), dynamic_shapes=shapes, device="cuda")
        assert e.value.__cause__ is not None and "<lambda>" in str(e.value)
    with pytest.raises(CaptureError, match="lazy"):
        export_for(nn.LazyLinear(3), (x(2, 3),), device="cuda")
    with pytest.raises(CaptureError, match="weight has no data"):
        export_for(nn.Linear(3, 3, device="meta"), (torch.zeros(2, 3, device="meta"),))
    with pytest.raises(CaptureError, match="sparse"):
        export_for(lambda t: t * 2, (torch.eye(3).to_sparse(),), device="cuda")
