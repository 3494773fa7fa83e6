"""The interpreter on programs written by hand: what each kind of statement means."""

import pytest
import torch

from reflib.errors import IndexOutOfRange, ReflibError
from reflib.ir.expr import Sym, Var, expr
from reflib.ir.interpret import interpret
from reflib.ir.loops import Axis, BodyBuilder, LoopNest
from reflib.ir.printer import format_program
from reflib.ir.program import Buffer, Extern, Program, View, full_view
from reflib.ir.verify import verify
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
