"""The IR: what each kind of statement means to the interpreter, the verifier's rules, programs as JSON."""

import json
import math
import operator
from dataclasses import replace

import pytest
import torch
from choices import scheduled

from reflib.errors import IndexOutOfRange, ReflibError, VerifyError
from reflib.ir.data import decode, encode, from_data, to_data
from reflib.ir.expr import Ref, Sym, Var, expr
from reflib.ir.interpret import interpret
from reflib.ir.loops import Axis, BodyBuilder, Const, Index, Indirect, Load, LoopNest, Op, Reduce, Store
from reflib.ir.printer import format_loop_nest, format_program
from reflib.ir.program import Assume, Buffer, Config, Extern, KernelNode, Program, View, full_view, kernel_with_fallback
from reflib.ir.verify import linear_ends, verify
from tests.hand_loops import contiguous

CPU = torch.device("cpu")
F32 = torch.float32


def buffer(name, shape, strides=None, dtype=F32, kind="temp"):
    strides = contiguous(shape) if strides is None else tuple(map(expr, strides))
    return Buffer(name, dtype, CPU, tuple(map(expr, shape)), strides, kind)


def program(buffers, nodes, outputs, inputs=None, constants=None):
    table = {b.name: b for b in buffers}
    names = inputs or tuple(b.name for b in buffers if b.kind == "input")
    p = Program(names, table, tuple(nodes), tuple(full_view(table[o]) for o in outputs), constants or {})
    verify(p)
    format_program(p)
    return p


def softmax_program(n, m, dtype=F32):
    i, r = Var("i", expr(n)), Var("r", expr(m))
    b = BodyBuilder()
    x = b.load("x", expr(i) * m + r, F32)
    e = b.op("exp", b.op("sub", x, b.reduce("max", x, dtype=F32)))
    b.store("y", expr(i) * m + r, b.op("div", e, b.reduce("sum", e, dtype=F32)))
    loops = LoopNest("softmax", (Axis(i, "p"), Axis(r, "r")), tuple(b.body))
    return program([buffer("x", (n, m), dtype=dtype, kind="input"), buffer("y", (n, m), dtype=dtype)], [loops], ["y"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax(dtype):
    x = torch.randn(3, 5, dtype=dtype)
    (y,) = interpret(softmax_program(3, 5, dtype), [x])
    torch.testing.assert_close(y, torch.softmax(x, -1))


def test_symbols_come_from_sizes():
    n = Sym("s0", 2)
    p = softmax_program(expr(n), expr(4))
    x = torch.randn(7, 4)
    torch.testing.assert_close(interpret(p, [x])[0], torch.softmax(x, -1))
    with pytest.raises(ReflibError, match="size 1 of x"):
        interpret(p, [torch.randn(7, 5)])


def test_masked_load_and_index():
    i = Var("i", expr(6))
    b = BodyBuilder()
    at = b.index(expr(i))
    inside = b.op("lt", at, b.const(4, torch.int64))
    b.store("y", i, b.load("x", i, F32, mask=inside, other=-1.0))
    loops = LoopNest("pad", (Axis(i, "p"),), tuple(b.body))
    p = program([buffer("x", (4,), kind="input"), buffer("y", (6,))], [loops], ["y"])
    x = torch.randn(4)
    assert torch.equal(interpret(p, [x])[0], torch.nn.functional.pad(x, (0, 2), value=-1.0))


def gather_program():
    i = Var("i", expr(3))
    b = BodyBuilder()
    at = b.indirect(b.load("at", i, torch.int64), 5)
    b.store("y", i, b.load("x", at * 2, F32))
    loops = LoopNest("gather", (Axis(i, "p"),), tuple(b.body))
    x = buffer("x", (5,), (2,), kind="input")
    return program([x, buffer("at", (3,), dtype=torch.int64, kind="input"), buffer("y", (3,))], [loops], ["y"])


def test_indirect_wraps_and_checks():
    x = torch.randn(10)[::2]
    assert torch.equal(interpret(gather_program(), [x, torch.tensor([0, -1, 3])])[0], x[[0, -1, 3]])
    with pytest.raises(IndexOutOfRange):
        interpret(gather_program(), [x, torch.tensor([0, 5, 3])])


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min", "argmax", "argmin"])
def test_reductions_over_two_axes(kind):
    a, i, c = Var("a", expr(3)), Var("i", expr(2)), Var("c", expr(4))
    at = expr(a) * 8 + expr(i) * 4 + c
    b = BodyBuilder()
    x = b.load("x", at, F32)
    flat_index = (b.index(expr(a) * 4 + c),) if kind.startswith("arg") else ()
    dtype = torch.int64 if flat_index else F32
    b.store("y", i, b.reduce(kind, x, *flat_index, dtype=dtype))
    loops = LoopNest("red", (Axis(a, "r"), Axis(i, "p"), Axis(c, "r")), tuple(b.body))
    p = program([buffer("x", (3, 2, 4), kind="input"), buffer("y", (2,), dtype=dtype)], [loops], ["y"])
    x = torch.randn(3, 2, 4).round(decimals=1)
    x[0, 0, 1] = float("nan")
    flat = x.transpose(0, 1).reshape(2, 12)
    want = getattr(flat, {"max": "amax", "min": "amin"}.get(kind, kind))(-1)
    torch.testing.assert_close(interpret(p, [x])[0], want, equal_nan=True)


def test_extern_views_and_mutation():
    """y = mm(x.t(), x) by a call; then x += 1 in place; the second output is x itself."""
    i, j = Var("i", expr(3)), Var("j", expr(2))
    b = BodyBuilder()
    at = expr(i) * 2 + j
    b.store("x", at, b.op("add", b.load("x", at, F32), b.const(1, F32)))
    x = buffer("x", (3, 2), kind="input")
    t = View("x", x.shape[::-1], x.strides[::-1], expr(0), F32)
    mm = Extern("mm", torch.ops.aten.mm.default, (t, full_view(x)), (), ("y",))
    add = LoopNest("add", (Axis(i, "p"), Axis(j, "p")), tuple(b.body))
    p = program([x, buffer("y", (2, 2))], [mm, add], ["y", "x"])
    a = torch.randn(3, 2)
    before = a.clone()
    y, again = interpret(p, [a])
    torch.testing.assert_close(y, before.t() @ before)
    assert torch.equal(a, before + 1)
    assert again.data_ptr() == a.data_ptr()


def test_zero_size():
    (y,) = interpret(softmax_program(0, 5), [torch.randn(0, 5)])
    assert y.shape == (0, 5)


# -- each rule of the verifier, by a program that breaks it -------------------------------------------
I, J = Var("i", expr(4)), Var("j", expr(3))
LOAD = Load("x", expr(I), F32)


def check(*body, axes=(Axis(I, "p"),), y=(4,)):
    return program([buffer("x", (4,), kind="input"), buffer("y", y)], [LoopNest("k", axes, body)], ["y"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ((Op("neg", (1,), F32), LOAD), "not computed before it"),
        ((LOAD, Op("nag", (0,), F32)), "no op 'nag'"),
        ((LOAD, Op("add", (0,), F32)), "takes 2 operands"),
        ((LOAD, Const(1, torch.int64), Op("add", (0, 1), F32)), "different dtypes"),
        ((LOAD, Op("neg", (0,), torch.float64)), "is marked"),
        ((LOAD, Op("not", (0,), F32)), "takes intbool"),
        ((Load("x", expr(I), torch.float64),), "float64 for a buffer"),
        ((Load("z", expr(I), F32),), "z is not declared"),
        ((Load("y", expr(I), F32), Store("y", expr(I), 0)), "before it is written"),
        ((Load("x", expr(J), F32),), "not an axis"),
        ((Load("x", expr(I) * Sym("s9"), F32),), "s9 is not known"),
        ((Load("x", expr(I) + 1, F32),), "goes up to 4"),
        ((Load("x", expr(I) - 1, F32),), "goes down to -1"),
        ((Load("x", expr(Ref(0, expr(4))), F32),), "not computed before"),
        ((LOAD, Load("x", expr(Ref(0, expr(4))), F32)), "not an indirect"),
        ((LOAD, Indirect(0, expr(4))), "takes an int64"),
        ((LOAD, Load("x", expr(I), F32, mask=0)), "not a bool"),
        ((LOAD, Store("y", expr(I), 0), Op("neg", (1,), F32)), "no value"),
        ((LOAD, Store("y", expr(0), 0)), "every i writes the same element"),
        ((Const(1.0, torch.float16),), "not allowed"),
        ((Index(expr(I), F32),), "not allowed"),
        ((LOAD, Reduce("median", (0,), F32)), "no reduction"),
        ((LOAD, Reduce("argmax", (0,), torch.int64)), "takes 2 operands"),
        ((LOAD, Reduce("sum", (0,), torch.float64)), "is marked"),
    ],
)
def test_broken(body, message):
    with pytest.raises(VerifyError, match=message):
        check(*body)


def test_reduced_store_must_not_race():
    axes = (Axis(I, "p"), Axis(J, "r"))
    check(LOAD, Reduce("sum", (0,), F32), Store("y", expr(I), 1), axes=axes)
    with pytest.raises(VerifyError, match="every j"):
        check(Index(expr(J), torch.int64), Op("cast", (0,), F32), Store("y", expr(I), 1), axes=axes)


def test_an_empty_tensors_strides_may_be_any():
    """``torch.empty_strided((0, 4), (1, 0))``: nothing is written twice, since nothing is written."""
    none = Var("i", expr(0))
    body = (Const(1.0, F32), Store("y", expr(none), 0))
    check(*body, axes=(Axis(none, "p"), Axis(J, "p")), y=(0, 3))


def test_tables():
    p = softmax_program(3, 4)
    with pytest.raises(VerifyError, match="two nodes"):
        verify(replace(p, nodes=p.nodes * 2))
    with pytest.raises(VerifyError, match="never written"):
        verify(replace(p, nodes=()))
    with pytest.raises(VerifyError, match="filed under"):
        verify(replace(p, buffers={**p.buffers, "z": p.buffers["x"]}))


def test_variants():
    p = softmax_program(3, 4)
    (k,) = p.nodes
    node = scheduled(k)
    verify(replace(p, nodes=(node,)))
    empty = KernelNode("k", (replace(k, body=k.body[:1]),), Config())
    with pytest.raises(VerifyError, match="the variant fast writes"):
        both = kernel_with_fallback(empty, (), node.variants[0].kernel)
        verify(replace(p, nodes=(replace(node, variants=both),)))
    with pytest.raises(VerifyError, match="the last variant must have no predicate"):
        only = replace(node.variants[0], predicate=(Assume("at_most", expr(3), 4),))
        verify(replace(p, nodes=(replace(node, variants=(only,)),)))


def test_ends():
    assert linear_ends(expr(I) * 3 - expr(J) * 2 + 5) == (expr(1), expr(14))
    assert linear_ends(expr(I) // 2) is None


def test_text():
    (k,) = softmax_program(3, 4).nodes
    assert format_loop_nest(k).splitlines()[:3] == [
        "loops softmax [i < 3 : p, r < 4 : r] {",
        "  %0 = load x[4*i + r] : float32",
        "  %1 = reduce max %0 : float32",
    ]
    assert format_program(softmax_program(3, 4)).splitlines()[1] == "  x: input float32[3, 4] strides (4, 1) on cpu"


# -- a program written as JSON and read back is the same program --------------------------------------
def through_json(p: Program, constants=None) -> Program:
    return from_data(json.loads(json.dumps(to_data(p), allow_nan=False)), constants)


@pytest.mark.parametrize("p", [softmax_program(3, 5), softmax_program(expr(Sym("s0", 2, hint=7)), 4), gather_program()])
def test_round_trip(p):
    back = through_json(p)
    assert back == p
    assert to_data(back) == to_data(p)


def test_symbols_keep_their_bounds():
    (s,) = through_json(softmax_program(expr(Sym("s0", 2, 99, 7)), 4)).buffers["x"].shape[0].symbols()
    assert (s.lo, s.hi, s.hint) == (2, 99, 7)


def test_extern_and_constants():
    x, c, y = buffer("x", (2, 2), kind="input"), buffer("c", (2, 2), kind="const"), buffer("y", (2, 2))
    call = Extern("add", torch.ops.aten.add.Tensor, (full_view(x), full_view(c)), (("alpha", 2),), ("y",))
    p = program([x, c, y], [call], ["y"], constants={"c": torch.ones(2, 2)})
    with pytest.raises(ReflibError, match="needs the constants c"):
        through_json(p)
    back = through_json(p, p.constants)
    assert back == p and back.nodes[0].target is torch.ops.aten.add.Tensor
    assert torch.equal(interpret(back, [torch.zeros(2, 2)])[0], torch.full((2, 2), 2.0))


PLAIN = [1.5, math.inf, True, None, 2 + 1j, [1, (2, 3)], {"a": (1,)}]
TORCH = [torch.float16, torch.strided, torch.channels_last, torch.device("cuda", 1)]


@pytest.mark.parametrize("value", [*PLAIN, *TORCH, operator.mul, expr(Var("i", expr(4))) // 3])
def test_values(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)


def test_unnamed_callable():
    with pytest.raises(ReflibError, match="cannot be written"):
        encode(lambda x: x)
