"""Each rule of the verifier, by a program that breaks it."""

from dataclasses import replace

import pytest
import torch
from choices import scheduled
from test_ir_interpret import F32, buffer, program, softmax_program

from reflib.errors import VerifyError
from reflib.ir.expr import Ref, Sym, Var, expr
from reflib.ir.loops import Axis, Const, Index, Indirect, Load, LoopNest, Op, Reduce, Store
from reflib.ir.printer import format_loop_nest, format_program
from reflib.ir.program import Assume, Config, KernelNode, kernel_with_fallback
from reflib.ir.verify import linear_ends, verify

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
