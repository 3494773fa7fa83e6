"""A program written as JSON and read back is the same program."""

import json
import math
import operator

import pytest
import torch
from test_ir_interpret import buffer, gather_program, program, softmax_program

from reflib.errors import ReflibError
from reflib.ir.data import decode, encode, from_data, to_data
from reflib.ir.expr import Sym, Var, expr
from reflib.ir.interpret import interpret
from reflib.ir.program import Extern, Program, full_view


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
