"""Convolutions in channels-last order: the same values and strides outside, no transposed tensor between them."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture import layouts
from reflib.ir.program import Extern
from reflib.lower import decompositions
from reflib.options import Options
from reflib.pipeline import rewritten, targets
from tests.semantics import Compiled

LAST = torch.channels_last


class Net(nn.Module):
    """Convolutions of every kind with what networks put between them, drawn from ``seed``."""

    def __init__(self, seed: int):
        super().__init__()
        rng = random.Random(seed)
        c = rng.choice([4, 8, 12])
        self.stem = nn.Conv2d(3, c, 3, rng.choice([1, 2]), 1, bias=rng.random() < 0.5)
        self.blocks, self.kinds = nn.ModuleList(), []
        for _ in range(rng.choice([2, 3, 4])):
            kind = rng.choice(["residual", "depthwise", "squeeze", "group", "dense", "pool"])
            self.kinds.append(kind)
            inner = nn.Conv2d(c, c, 5, padding=2, groups=c) if kind == "depthwise" else nn.Conv2d(c, c, 3, padding=1)
            norm = nn.GroupNorm(2, c) if kind == "group" else nn.BatchNorm2d(c)
            out = nn.Conv2d(2 * c if kind == "dense" else c, c, 1)
            self.blocks.append(nn.ModuleList([inner, norm, out]))
        self.up = nn.ConvTranspose2d(c, 3, 2, 2)
        self.head = nn.Linear(c, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for kind, (inner, norm, out) in zip(self.kinds, self.blocks):
            y = F.silu(norm(inner(x)))
            if kind == "squeeze":
                y = y * y.mean((2, 3), keepdim=True).sigmoid()
            if kind == "dense":
                y = torch.cat([x, y], 1)
            x = F.avg_pool2d(out(y), 3, 1, 1) if kind == "pool" else out(y) + x
        pooled = F.adaptive_avg_pool2d(x, 1)
        tokens = x.flatten(2).transpose(1, 2)
        return self.head(pooled.view(x.shape[0], -1)), self.up(x), tokens.softmax(-1), x.view(x.shape[0], -1).sum(1)


def convolutions(module: torch.fx.GraphModule):
    return [n for n in module.graph.nodes if n.op == "call_function" and "convolution" in str(n.target)]


def is_last(value: torch.Tensor) -> bool:
    return value.is_contiguous(memory_format=LAST)


def same(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> None:
    assert (a - b).abs().max() <= 1e-4 * max(scale, float(b.abs().max()))
    assert [s for s, n in zip(a.stride(), a.shape) if n > 1] == [s for s, n in zip(b.stride(), b.shape) if n > 1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sample(2)
def test_inference(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Net(seed).eval(), torch.randn(3, 3, 16, 16)
    torch._dynamo.reset()
    with torch.no_grad():
        e = reflib.explain(model, x, target="sm_90")
        changed = rewritten(e.graph.module, Options(), targets(Options(target="sm_90")))
        assert changed is not e.graph.module
        for n in convolutions(changed):
            assert is_last(n.meta["val"]) and is_last(n.args[0].meta["val"]) and is_last(n.args[1].meta["val"])
        inputs = e.graph.placeholders()
        args = [*model.parameters(), *model.buffers(), x]
        given = [next(a for a in args if a.shape == i.shape and a.dtype == i.dtype) for i in inputs]
        args = [torch.randn(i.shape) if i.is_floating_point() else g for i, g in zip(inputs, given)]
        args = [a.abs() + 0.5 for a in args]  # variances among them
        for a, b in zip(torch.fx.Interpreter(changed).run(*args), torch.fx.Interpreter(e.graph.module).run(*args)):
            same(a, b)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sample(4)
def test_training(seed: int) -> None:
    """The joint graph is rewritten, so what forward saves is what backward expects."""
    torch.manual_seed(seed)
    model, x = Net(seed), torch.randn(3, 3, 16, 16, requires_grad=True)
    compiled = Compiled(model, target="sm_90")

    def results(fn):
        outputs = fn(x)
        return [*outputs, *torch.autograd.grad([o.square().sum() for o in outputs], [x, *model.parameters()])]

    expected = results(model)
    scale = max(float(g.abs().max()) for g in expected[4:])  # of gradients: a bias before a norm has one of about 0
    for i, (a, b) in enumerate(zip(results(compiled), expected, strict=True)):
        same(a, b, scale if i >= 4 else 1.0)
    assert [s.graph.name for s in compiled.stages] == ["forward", "backward"]
    for s in compiled.stages:
        for n in convolutions(s.graph.module):
            big = [v for v in [n.args[0].meta["val"], *torch.utils._pytree.tree_leaves(n.meta["val"])] if v is not None]
            assert all(is_last(v) for v in big if v.dim() == 4), n


def externs(fn, *args, **options) -> list[Extern]:
    torch._dynamo.reset()
    with torch.no_grad():
        return [n for n in reflib.explain(fn, *args, **options).scheduled.nodes if isinstance(n, Extern)]


def conv(x, w):
    return F.conv2d(F.relu(F.conv2d(x, w)), w)


def test_when_it_does_not_pay() -> None:
    x, w = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)

    def laid_out(fn, *args, **options) -> bool:
        torch._dynamo.reset()
        with torch.no_grad():
            module = reflib.explain(fn, *args, target="cpu").graph.module
        return rewritten(module, Options(**options), targets(Options(target="sm_90"))) is not module

    assert laid_out(conv, x, w)
    assert not laid_out(conv, x, w, channels_last=False)
    assert not laid_out(lambda x, w: F.conv2d(x, w) + 1, x, w)  # one, between an input and an output
    assert not laid_out(lambda x, w: F.conv2d(x, w, groups=2), x, w[:, :4])
    assert not laid_out(lambda x, w: F.conv1d(F.conv1d(x[:, :, 0], w[..., 0]), w[..., 0]), x, w)
    dropped = lambda x, w: F.dropout(conv(x, w))  # noqa: E731
    assert laid_out(dropped, x, w)  # its numbers belong to elements, in whatever order
    assert not laid_out(dropped, x, w, fallback_random=True)  # and eager's to places in memory


def test_convolutions_in_groups() -> None:
    """In channels-last order where that was seen to be faster: halves, inference, narrow groups."""

    def block(x, w, v):
        conv = F.conv1d if x.dim() == 3 else F.conv2d
        return conv(F.relu(conv(F.relu(conv(x, v)), w, groups=x.shape[1] // w.shape[1])), v)

    def gradients(x, w, v):
        return torch.autograd.grad(block(x, w.requires_grad_(), v).sum(), [w])

    def laid_out(fn, dtype: torch.dtype, channels: int, group: int, lines: bool = False) -> bool:
        with torch._subclasses.FakeTensorMode():
            sizes = (2, channels, 16, 16), (channels, group, 3, 3), (channels, channels, 1, 1)
            graph = make_fx(fn)(*(torch.empty(s[: 3 if lines else 4], dtype=dtype) for s in sizes))
        return rewritten(graph, Options(), targets(Options(target="sm_90"))) is not graph

    assert laid_out(block, torch.bfloat16, 32, 4)
    assert laid_out(block, torch.float16, 128, 64)
    assert not laid_out(block, torch.float32, 32, 4)
    assert not laid_out(block, torch.bfloat16, 256, 128)
    assert not laid_out(gradients, torch.bfloat16, 32, 4)
    assert laid_out(gradients, torch.bfloat16, 32, 32)
    assert laid_out(block, torch.bfloat16, 32, 4, lines=True)
    assert not laid_out(block, torch.float32, 32, 32, lines=True)


def test_few_channels_each_convolved_alone_in_float32_stay() -> None:
    def laid_out(dtype: torch.dtype, channels: int) -> bool:
        with torch._subclasses.FakeTensorMode():
            x, w = torch.empty(2, channels, 99, 99, dtype=dtype), torch.empty(channels, 1, 1, 5, dtype=dtype)
            graph = make_fx(lambda x, w: F.conv2d(F.conv2d(x, w, groups=channels), w, groups=channels))(x, w)
        return rewritten(graph, Options(), targets(Options(target="sm_90"))) is not graph

    assert [laid_out(torch.float32, n) for n in (4, 64)] == [False, True]
    assert laid_out(torch.bfloat16, 4)


class Audio(nn.Module):
    """Convolutions over time, as in whisper and wav2vec2."""

    def __init__(self, rng: random.Random):
        super().__init__()
        c = 16 * rng.choice([1, 2])
        self.first = nn.Conv1d(rng.choice([1, 8]), c, rng.choice([3, 10]), stride=rng.choice([1, 3]), bias=False)
        self.norm = nn.GroupNorm(4, c)
        self.second = nn.Conv1d(c, c, 3, stride=2, padding=1)
        self.third = nn.Conv1d(c, c, 5, padding=4, dilation=2)
        self.positions = nn.utils.parametrizations.weight_norm(nn.Conv1d(c, c, 8, padding=4))
        self.back = nn.ConvTranspose1d(c, 8, 4, stride=2, padding=1, output_padding=1)

    def forward(self, x):
        x = F.gelu(self.second(F.gelu(self.norm(self.first(x)))))
        x = x + F.gelu(self.third(x))
        tokens = x.transpose(1, 2).contiguous()  # in channels-last order before anything is done
        x = tokens.transpose(1, 2) + F.gelu(self.positions(tokens.transpose(1, 2))[:, :, :-1])
        return self.back(x), x.transpose(1, 2).softmax(-1)


def follow_from_arguments(module: torch.fx.GraphModule) -> None:
    """Every value that is noted has the strides that its op gives for its arguments' noted values."""
    for n in module.graph.nodes:
        if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor):
            with n.meta["val"].fake_mode, torch.no_grad():
                assert layouts._same(layouts._run(n), n.meta["val"]), n


@pytest.mark.parametrize("seed", range(2))
def test_one_dimension(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves, in one dimension, as planes of one row: forward and backward."""
    lay_out = layouts._lay_out
    monkeypatch.setattr(layouts, "_lay_out", lambda *args: min(1, lay_out(*args)))  # small as it is, it pays
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Audio(rng).to(torch.bfloat16)
    x = torch.randn(2, model.first.in_channels, rng.randint(60, 80)).to(torch.bfloat16)
    names, args = zip(*model.named_parameters())

    def fn(x, *args):
        outputs = torch.func.functional_call(model, dict(zip(names, args)), x)
        return [*outputs, *torch.autograd.grad([o.float().square().sum() for o in outputs], args)]

    graph = make_fx(fn, decomposition_table=decompositions(), tracing_mode="fake")(x, *args)
    changed = rewritten(graph, Options(), targets(Options(target="sm_90")))
    assert changed is not graph
    for n in convolutions(changed):
        operands = [a.meta["val"] for a in n.args[: 3 if len(n.args) == 11 else 2]]
        assert all(v.dim() == 4 and is_last(v) for v in operands), n
    follow_from_arguments(changed)
    backward = torch.ops.aten._weight_norm_interface_backward.default  # its kernel takes grad's rows to be in order
    (norm,) = (n for n in changed.graph.nodes if n.target is backward)
    assert all(a.meta["val"].is_contiguous() for a in norm.args[:4])
    given = [x, *(a.detach() for a in args)]
    for a, b in zip(torch.fx.Interpreter(changed).run(*given), torch.fx.Interpreter(graph).run(*given), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03 * max(1, float(b.abs().max())))


class Stream(nn.Module):
    """A residual stream whose norms are over channels; no convolution is its stem."""

    def __init__(self, c: int):
        super().__init__()
        self.convs, self.scale = (
            nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(3)),
            nn.Parameter(R(c, 1, 1)),
        )

    def forward(self, x):
        for conv in self.convs:
            y = x - x.mean(1, keepdim=True)
            x = x + conv(y / (y.square().mean(1, keepdim=True) + 1e-3).sqrt()) * self.scale
        return x


class Permuted(nn.Module):
    """Blocks of a ConvNeXt."""

    def __init__(self, c: int):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 7, padding=3, groups=c) for _ in range(3))
        self.scale = nn.Parameter(R(c))

    def forward(self, x):
        for conv in self.convs:
            y = F.layer_norm(conv(x).permute(0, 2, 3, 1), self.scale.shape)
            x = x + (F.gelu(y) * self.scale).permute(0, 3, 1, 2)
        return x


class Skip(nn.Module):
    """Of a U-Net: what an index makes is in NCHW whatever it reads."""

    def __init__(self, c: int):
        super().__init__()
        self.enter, self.below = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, 2, 1)
        self.norm, self.main, self.side = nn.GroupNorm(2, 2 * c), nn.Conv2d(2 * c, c, 1), nn.Conv2d(2 * c, c, 1)

    def forward(self, x):
        x = self.enter(x)
        y = torch.cat((F.interpolate(self.below(x), scale_factor=2.0), x), 1)
        return self.main(F.silu(self.norm(y))) + self.side(y)


def across(module: torch.fx.GraphModule) -> list[object]:
    """Ops of tensors of one size in two orders. (A broadcast that is computed again counts, too, if it was one.)"""
    found = []
    for n in module.graph.nodes:
        large = [
            t
            for a in n.all_input_nodes
            for t in layouts._tensors(a.meta["val"])[:1]
            if t.dim() == 4 and t.numel() >= BIG
        ]
        if n.op == "call_function" and len({t.stride() for t in large if t.shape == large[0].shape}) > 1:
            found.append(n.target)
    return found


R, BIG = torch.randn, 2 * 8 * 12 * 12


@pytest.mark.parametrize("kind", [Stream, Permuted, Skip])
def test_what_meets_is_in_one_order(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: tensors are copied where they begin, and where they are results."""
    torch.manual_seed(0)
    model, x = kind(8), R(2, 8, 12, 12)
    names, args = zip(*model.named_parameters())

    def fn(x, grad, *args):
        out = torch.func.functional_call(model, dict(zip(names, args)), x)
        return [out, *torch.autograd.grad(out, [x, *args], grad)]

    given = [x.requires_grad_(), R(x.shape), *args]
    graph = make_fx(fn, decomposition_table=decompositions(), tracing_mode="fake")(*given)
    changed = layouts.channels_last(graph, Options(), True)
    given = [a.detach() for a in given]
    for a, b in zip(torch.fx.Interpreter(changed).run(*given), torch.fx.Interpreter(graph).run(*given), strict=True):
        same(a, b, float(b.abs().max()))
    follow_from_arguments(changed)
    monkeypatch.setattr(layouts, "_beginnings", lambda graph: set())
    assert 2 * len(across(layouts.channels_last(graph, Options(), True))) >= 3 * len(across(changed)) + 3


@torch.library.custom_op("test_layouts::raw", mutates_args=())
def raw(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@raw.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_op_of_the_users_gets_the_strides_of_eager() -> None:
    x, w = torch.randn(2, 8, 32, 32), torch.randn(8, 8, 3, 3)
    calls = externs(lambda x, w: raw(conv(conv(x, w), w)).relu(), x, w, target="sm_90")
    assert is_last(torch.empty_strided((2, 8, 30, 30), [int(s) for s in strides(calls[1], 0)]))
    assert strides(calls[-1], 0) == torch.empty(2, 8, 24, 24).stride()


def strides(call: Extern, argument: int) -> tuple[int, ...]:
    return tuple(int(s) for s in call.args[argument].strides)


def test_blocks_that_are_alike_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each has memory of its own."""
    runs, run = [], torch._ops.OpOverload.__call__

    def counted(op, /, *args, **kwargs):
        runs.append(op)
        return run(op, *args, **kwargs)

    body = [m for _ in range(6) for m in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.SiLU())]
    with torch.no_grad():
        graph = reflib.explain(nn.Sequential(*body), torch.randn(2, 8, 16, 16), target="sm_90").graph.module
        monkeypatch.setattr(torch._ops.OpOverload, "__call__", counted)
        changed = layouts.channels_last(graph, Options(), True)
    assert runs.count(torch.ops.aten.convolution.default) <= 2
    own = {n.meta["val"].untyped_storage()._cdata for n in convolutions(changed)}
    assert len(own) == len(convolutions(changed)) == 6


def test_a_cpu_keeps_its_order() -> None:
    x, w = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)
    assert len(externs(conv, x, w, target="cpu")) == 2
    torch.testing.assert_close(reflib.compile(conv)(x, w), conv(x, w))


@pytest.mark.parametrize("fn", [torch.logaddexp, torch.logaddexp2, torch.xlogy, torch.heaviside])
def test_parts_of_an_op_of_two_tensors_lie_as_eager_lays_out_the_op(fn):
    a, b, c = torch.rand(1, 4, 1), torch.rand(5, 1, 3).permute(2, 1, 0), torch.rand(5, 4, 3).permute(2, 1, 0)
    for x, y in ((a, b), (b, a), (b, c), (c, a), (c.contiguous(), c), (c, c.contiguous())):
        got, want = reflib.compile(fn)(x, y), fn(x, y)
        assert got.stride() == want.stride(), (x.stride(), y.stride())
        torch.testing.assert_close(got, want)


def test_as_if_on_a_gpu_results_lie_as_cudnn_has_them() -> None:
    """A build without cuDNN says of tensors on a GPU that convolutions make them contiguous."""

    def only_there(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return F.conv2d(F.interpolate(F.conv2d(x, w), scale_factor=2, mode="bilinear"), v, padding=1)

    x, w, v = torch.zeros(2, 64, 16, 16), torch.zeros(64, 64, 1, 1), torch.zeros(64, 64, 3, 3)
    half = [t.to(torch.bfloat16) for t in (x, w, v)]
    buffers = reflib.explain(only_there, *half, target="sm_90").stages.fused.program.buffers
    made = [b for name, b in buffers.items() if name.startswith("convolution")]
    assert len(made) == 2 and all(b.strides[1] == 1 for b in made)
