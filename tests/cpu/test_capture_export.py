"""Whole models captured by ``torch.export``, on both devices."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from reflib.errors import CaptureError
from reflib.fuse import fuse
from reflib.lower import lower
from reflib.options import Options
from reflib.target import parse_target
from tests.exporting import CUDA, DEVICES, Everything, aten, calls, devices, export_for, on_cpu, run, targets, x
from tests.models import MODELS


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


@pytest.mark.parametrize("device", DEVICES)
def test_nested_arguments_and_keywords(device: str) -> None:
    def fn(pair: Any, scale: float, *, more: Any = None) -> Any:
        return {"sum": pair[0] + pair[1]["b"] * scale, "more": more}

    a, b, c = x(3), x(4)[:3], x(3)
    e = export_for(fn, ((a, {"b": b}), 2.0), {"more": c}, device=device)
    assert e.state == {}
    assert e.program.call_spec.in_spec == torch.utils._pytree.tree_structure((((a, {"b": b}), 2.0), {"more": c}))
    assert e.program.call_spec.out_spec == torch.utils._pytree.tree_structure({"sum": a, "more": c})


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


# -- whole models -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(3)
def test_models(name: str) -> None:
    """(On a CPU: test_package.py.)"""
    make, inputs = MODELS[name]
    e = export_for(make(), inputs(), device="cuda")
    assert devices(e) == {CUDA}
    fuse(lower(e.graph, Options(verify=True)), Options(), parse_target("sm_80"))


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


def test_a_number_without_limits() -> None:
    e = export_for(lambda a: a * (a > 0).sum().item(), (x(4),))
    ((least, most),) = e.graph.ranges.values()
    assert least <= 0 and most is None
    torch.testing.assert_close(run(e, x(4)), [x(4) * int((x(4) > 0).sum())])


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


@torch.library.custom_op("reflib_capture::doubled", mutates_args=())
def doubled(t: torch.Tensor) -> torch.Tensor:
    return t * 2


@doubled.register_fake
def _(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t)


class Config:
    """Holds what cannot be copied, beside a tensor that must be."""

    def __init__(self) -> None:
        self.lock, self.lines, self.scale = threading.Lock(), (line for line in "abc"), torch.ones(3)


def test_what_cannot_be_copied_and_need_not_be_stays() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.op, self.config = nn.Linear(3, 3), doubled, Config()

        def forward(self, t: torch.Tensor) -> torch.Tensor:
            with self.config.lock:
                return self.op(self.inner(t) * self.config.scale)

    model = Holds()
    e = export_for(model, (x(2, 3),), device="cuda")
    assert "reflib_capture.doubled.default" in targets(e)
    assert next(iter(model.config.lines)) == "a" and model.config.scale.device.type == "cpu"
    torch.testing.assert_close(model(x(2, 3)), doubled(model.inner(x(2, 3))))


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


@pytest.mark.parametrize("start", [0, 3])
def test_more_of_a_storage_than_the_tensor(start: int) -> None:
    """What is not in the tensor would be read from wherever a call's tensor lies."""
    part = x(20)[start : start + 8]
    export_for(lambda t: t[1:6].as_strided((3,), (2,), start + 1) * 2, (part,))
    for first, count in ((0, 12), (12, 1)) if start == 0 else ((0, 4),):
        with pytest.raises(CaptureError, match="of the storage of t that are not in t"):
            export_for(lambda t, first=first, count=count: t.as_strided((count,), (1,), first) * 2, (part,))
