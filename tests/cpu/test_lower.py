"""Lowering, op by op: the lowered program, interpreted, does what eager does, on inputs that are hard to get right."""

import functools
import math
import random

import pytest
import torch
import torch.nn.functional as F

from reflib.errors import LoweringError
from reflib.ir.interpret import interpret
from reflib.ir.loops import Indirect, LoopNest, Reduce
from reflib.ir.program import Extern, Program, View
from reflib.lower import decompositions
from reflib.lower.extern import has_effect
from reflib.lower.rules import RULES
from reflib.options import Options
from tests import choices

program_of = functools.partial(choices.program_of, options=Options())


def check(fn, *args, mode="fake", calls=0) -> Program:
    """Lowered and interpreted, ``fn`` gives eager's values, dtypes, sizes and strides, with ``calls`` calls of ATen."""
    copies = [a.clone() if isinstance(a, torch.Tensor) and a.is_contiguous() else a for a in args]
    program = program_of(fn, *copies, mode=mode)
    expected = torch.utils._pytree.tree_leaves(fn(*copies))
    results = interpret(program, list(args))
    assert len(expected) == len(results)
    for e, r in zip(expected, results):
        assert (e.shape, e.dtype) == (r.shape, r.dtype)
        assert e.stride() == r.stride() or e.numel() < 2
        torch.testing.assert_close(r, e, equal_nan=True)
    externs = [n for n in program.nodes if isinstance(n, Extern)]
    assert len(externs) == calls, [(str(e.target), e.reason) for e in externs]
    return program


def hostile(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One matrix, laid out in memory in every unpleasant way."""
    g = torch.Generator().manual_seed(1)
    if dtype.is_floating_point:
        base = (torch.rand(6, 10, generator=g) * 4 - 2).to(dtype)
        base[1, 2], base[2, 4], base[4, 0] = math.nan, math.inf, -math.inf
    elif dtype == torch.bool:
        base = torch.rand(6, 10, generator=g) > 0.5
    else:
        base = torch.randint(-5, 6, (6, 10), generator=g).to(dtype)
    return {
        "contiguous": base.clone(), "transposed": base.t(), "strided": base[::2, 1::3],
        "expanded": base[:, :1].expand(6, 4), "empty": base[:0], "scalar": base[3, 3], "offset": base[2:, 3:],
    }  # fmt: skip


LAYOUTS = list(hostile(torch.float32))
UNARY = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "relu": lambda x: F.relu(x),
    "sigmoid": torch.sigmoid,
    "gelu": lambda x: F.gelu(x.nan_to_num(0, 3, -3)),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
    "sqrt_pow": lambda x: (x**2).sqrt() + x**3 - x**-1 + x**5,
    "sign": torch.sign,
    "round": lambda x: torch.round(x) + torch.floor(x) + torch.trunc(x),
    "clamp": lambda x: x.clamp(-1, 1) + x.clamp(min=0.5),
    "tests": lambda x: (x.isnan(), x.isinf(), x.isfinite(), x > 0, x == 1),
    "remainder": lambda x: (x % 3, torch.fmod(x, 3), torch.div(x, 3, rounding_mode="floor")),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "half_cast": lambda x: x.to(torch.bfloat16).float() + x.half(),
    "int_cast": lambda x: x.nan_to_num().to(torch.int32) // 2,
    "elu": lambda x: F.elu(x) + F.leaky_relu(x) + F.hardswish(x) + F.softplus(x),
}


@pytest.mark.each
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", UNARY)
def test_elementwise_on_hostile_floats(name, layout):
    check(UNARY[name], hostile(torch.float32)[layout])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_arithmetic_and_promotion(dtype):
    x = hostile(dtype)["transposed"]
    y = hostile(torch.float32)["contiguous"].t()
    check(lambda a, b: (a + b, a * b, b - 1, a / 2, a * 2.5, a == b, a < b, a.float() * a), x, y)
    check(lambda a: (a + a, a * a, a.logical_not(), a.bool() | (a == 0)), x)


def test_integers():
    x = hostile(torch.int64)["offset"]
    check(lambda a: (a // 2, a % 3, a**3, a & 6, a << 2, a >> 1, ~a, a / 3, torch.fmod(a, -2), a.clamp(0.5, 2)), x)


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "expanded", "scalar"])
def test_reductions(dtype, layout):
    x = hostile(dtype)[layout]
    check(lambda a: (a.sum(), a.sum(-1), a.any(), a.all(-1), a.prod(-1), a.amin(-1), a.amax()), x)
    if dtype != torch.bool:
        check(lambda a: (a.argmax(), a.argmin(-1)), x)
    if x.ndim == 2:
        check(lambda a: (a.sum((0, 1)), a.sum(0, keepdim=True), a.max(1), a.min(0, keepdim=True)), x)


def test_float_reductions():
    x = hostile(torch.float32)["transposed"].nan_to_num(0.5, 1, -1)
    check(lambda a: (a.mean(), a.mean(0), a.var(1), a.std(0, correction=0), *torch.var_mean(a, 1, keepdim=True)), x)
    check(lambda a: (torch.softmax(a, 0), torch.log_softmax(a, 1), torch.logsumexp(a, 1), a.norm(), a.norm(1, 0)), x)
    check(lambda a: F.layer_norm(a, (6,)), x)


def test_reduction_over_nothing():
    x = torch.empty(3, 0)
    check(lambda a: (a.sum(1), a.mean(1), a.prod(), a.any(1), a.all(1)), x)


def test_views_need_no_node():
    def fn(x):
        y = x.view(4, 3, 2).permute(2, 0, 1)[:, 1:3].unsqueeze(0).expand(5, 2, 2, 3)
        return y, x.t(), x.as_strided((2, 2), (3, 1), 4), x.diagonal(), x.unfold(1, 3, 2), *x.split(2), *x.unbind(1)

    x = torch.randn(5, 24)[1:].reshape(-1)[:24].view(4, 6)
    assert not check(fn, x).nodes


def test_a_reshape_that_must_copy_is_one():
    program = check(lambda x: x.t().reshape(-1) + 1, torch.randn(4, 6))
    assert all(isinstance(n, LoopNest) for n in program.nodes)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_moving_elements(mode):
    x, y = torch.randn(4, 6), torch.randn(3, 6).t()
    check(lambda x, y: (torch.cat([x, y.t()]), torch.cat([x, x[:, :0], x], 1), torch.stack([x, x], 1)), x, y, mode=mode)
    check(
        lambda x, y: (F.pad(x, (1, -2, 0, 3), value=2.0), x.flip(0, 1), x.roll((1, -2), (0, 1)), x.roll(5)),
        x,
        y,
        mode=mode,
    )
    check(lambda x, y: (x.repeat(2, 1, 3), x.tril(1), y.triu(-1), x.slice_scatter(x[:2], 0, 1, 3)), x, y, mode=mode)
    check(lambda x, y: (x.select_scatter(x[0], 0, -1), x.diagonal_scatter(x[0, :4]), torch.eye(3)), x, y, mode=mode)


@pytest.mark.parametrize("seed", range(4))
def test_a_cross_product_reads_no_positions(seed):
    r = random.Random(seed)
    dim, shape = r.randrange(3), [r.randrange(1, 7) for _ in range(3)]
    shape[dim] = 3
    one = [n if r.random() < 0.6 or i == dim else 1 for i, n in enumerate(shape)]
    args = torch.randn(shape, dtype=r.choice([torch.float32, torch.float64])), torch.randn(one)
    for x, y in (args, args[::-1], [t.mul(9).int() for t in args]):
        program = check(lambda x, y: torch.linalg.cross(x, y.to(x.dtype), dim=dim), x, y)
        assert not any(isinstance(s, Indirect) for n in program.nodes for s in n.body)


def test_positions_from_tensors():
    x, i, j = torch.randn(5, 6, 4), torch.tensor([[0, -1, 2]]), torch.tensor([1, 3, -2])
    check(lambda x, i, j: (x[i], x[:, i], x[i, j], x[i, :, j % 4], x[:, j, j % 4]), x, i, j)
    check(
        lambda x, i, j: (x.index_select(1, j.abs()), x.gather(1, i.abs()[:, :, None]), F.embedding(i.abs(), x[0])),
        x,
        i,
        j,
    )


@pytest.mark.each
@pytest.mark.parametrize("shape, index", [((), 0), ((), [0]), ((5,), 2), ((5,), [2, 0]), ((1,), 0)])
@pytest.mark.parametrize("op", [torch.index_select, torch.gather])
def test_positions_without_dimensions(op, shape, index):
    check(lambda x, i: op(x, 0, i), torch.randn(shape), torch.tensor(index))


def test_created_tensors():
    check(lambda: (torch.arange(7), torch.arange(0, 1, 0.1), torch.full((2, 3), 7), torch.linspace(0, 1, 5)))
    program = check(lambda x: x + torch.zeros(3), torch.randn(2, 3))
    assert len(program.nodes) == 1, "a tensor of one number everywhere is that number"


def test_foreach_is_one_loops_per_element():
    def fn(a, b):
        return torch._foreach_add([a, b], [b, a], alpha=2), torch._foreach_mul([a, b], 3.0)

    program = check(fn, torch.randn(3, 4), torch.randn(3, 4))
    assert len(program.nodes) == 4


def test_mutation_of_an_input_by_a_view_of_itself():
    def fn(x):
        x.copy_(x.t().clone().relu().t().t())
        return x

    x = torch.randn(4, 4)
    expected = x.t().relu()
    interpret(program_of(lambda x: torch.ops.aten.copy_(x, x.t().clone().relu()), x.clone()), [x])
    assert torch.equal(x, expected)


def test_calls_have_reasons_and_out_variants():
    program = check(lambda x: (x @ x.t(), torch.erfinv(x), x.sort(0).values), torch.rand(4, 5), calls=3)
    calls = {str(n.target): n for n in program.nodes}
    assert calls["aten.mm.default"].out == (torch.ops.aten.mm.out, ("out",))
    assert calls["aten.erfinv.default"].out == (torch.ops.aten.erfinv.out, ("out",))
    assert calls["aten.mm.default"].reason == "library call"


def test_random_ops_are_ordered_calls():
    program = program_of(lambda x: torch.rand_like(x) + torch.bernoulli(x), torch.rand(4))
    assert [n.effect for n in program.nodes if isinstance(n, Extern)] == [True, True]
    flash, x = torch.ops.aten._scaled_dot_product_flash_attention, torch.rand(1, 1, 8, 8)
    assert has_effect(flash.default, (x, x, x, 0.1), {}) and has_effect(flash.default, (x, x, x), {"dropout_p": 0.1})
    assert not has_effect(flash.default, (x, x, x), {}) and not has_effect(flash.default, (x, x, x, 0.0, True), {})
    noisy, tags = "test_lower::noisy", (torch.Tag.nondeterministic_seeded,)
    torch.library.define(noisy, "(Tensor x, float sigma, float dropout_p=0.0) -> Tensor", tags=tags)
    assert has_effect(torch.ops.test_lower.noisy.default, (x, 1.0), {})  # may draw others than dropout's


def test_complex_and_reinterpreted_tensors_are_calls():
    x = torch.randn(4, 6)
    check(lambda x: x.view(torch.int32) + 1, x)
    check(lambda x: (x.view(torch.int32) & -65536).view(torch.float32) * 2, x)
    check(lambda x: x.bfloat16().view(torch.int16) + 1, x, calls=1)
    check(lambda x: torch.view_as_real(torch.fft.rfft(x)).sum(-1), x, calls=2)


def test_gradient_of_a_product_with_a_complex_number():
    def fn(x):
        return (torch.complex(x, x.exp()) * (2 + 1j)).abs()

    x = torch.randn(5, requires_grad=True)
    got, want = (torch.autograd.grad(f(x).sum(), x) for f in (torch.compile(fn, backend="reflib"), fn))
    torch.testing.assert_close(got, want)


def test_sizes_are_expressions():
    def fn(x, y):
        return (x[1:] + y).view(-1, 2), x.sum(0) / x.shape[0], x.new_zeros(x.shape[0] * 2 + 1)

    program = check(fn, torch.randn(5, 6), torch.randn(6), mode="symbolic")
    assert not any(isinstance(n, Extern) for n in program.nodes)


def test_softmax_is_two_reductions_over_one_shape():
    program = program_of(lambda x: torch.softmax(x, -1), torch.randn(3, 8))
    kinds = [s.kind for n in program.nodes for s in n.body if isinstance(s, Reduce)]
    assert kinds == ["max", "sum"]


def test_outputs_are_views_of_buffers():
    program = program_of(lambda x: (x.t(), x + 1), torch.randn(3, 4))
    assert all(isinstance(o, View) for o in program.outputs)
    assert program.outputs[0].buffer == program.inputs[0]


def test_a_broken_rule_names_the_op(monkeypatch):
    def broken(cx, *args):
        raise KeyError("oops")

    monkeypatch.setitem(RULES, torch.ops.aten.add.Tensor, broken)
    with pytest.raises(LoweringError, match=r"aten\.add\.Tensor.*KeyError"):
        program_of(lambda x: x + x, torch.randn(3))


def test_calls_are_logged_on_request(monkeypatch, caplog):
    monkeypatch.setenv("REFLIB_LOGS", "fallback")
    program_of(lambda x: torch.erfinv(x), torch.rand(3))
    assert any("erfinv" in r.getMessage() for r in caplog.records)


def test_decompositions_leave_random_ops_and_attention_whole():
    names = {str(op) for op in decompositions()}
    assert not names & {"aten.native_dropout.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"}
    assert "aten.native_layer_norm.default" in names


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_one_position_per_row_written(dim, dtype):
    x = (torch.randn(4, 6, 5) * 9).to(dtype)
    one = x.sum(dim, keepdim=True).to(dtype)
    i = torch.randint(0, x.shape[dim], one.shape)
    check(lambda x, i, s: (x.scatter(dim, i, s), x.scatter(dim, i, 3), x.scatter_add(dim, i, s)), x, i, one)
    few = i.narrow(dim - 1, 0, 2)  # other rows stay as they are
    check(lambda x, i, s: x.scatter(dim, i, s), x, few, one, calls=1)


def test_the_gradient_of_cross_entropy_scatters_nothing():
    def gradient(x, t):
        loss = F.cross_entropy(x, t, ignore_index=2)
        return torch.autograd.grad(loss, x)[0]

    check(gradient, torch.randn(6, 11, requires_grad=True), torch.tensor([1, 2, 0, 10, 5, 2]))
