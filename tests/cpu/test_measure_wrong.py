"""autotune/measure: which results are wrong, against which reference."""

import math
import weakref

import pytest
import torch

from reflib.autotune import correct
from reflib.autotune.measure import Limits, measure, request
from reflib.errors import MeasureError
from reflib.ir.expr import Var, expr
from reflib.ir.interpret import interpret
from reflib.ir.loops import Axis, BodyBuilder, LoopNest
from reflib.ir.program import Extern, Program, View, full_view
from tests.measured import buffer
from tests.races import M, N, Race, check, right, small, wrong


# -- what is wrong ----------------------------------------------------------------------------------
def one_bad_element(args):
    (y,) = right(args)
    y[3, 5] += 1.0
    return (y,)


def nan(args):
    (y,) = right(args)
    y[0, 0] = math.nan
    return (y,)


def writes_input(args):
    out = right(args)
    args[1][0, 0] += 1
    return out


WRONG = {
    "element": (one_bad_element, "allowed"),
    "nan": (nan, "NaN or infinite"),
    "inf": (lambda a: (right(a)[0] / 0.0,), "NaN or infinite"),
    "unwritten": (lambda a: (torch.empty(M, N),), ""),
    "dtype": (lambda a: (right(a)[0].double(),), "expected torch.float32"),
    "shape": (lambda a: (right(a)[0][:, :-1],), "expected torch.float32 (8, 16)"),
    "strides": (lambda a: (right(a)[0].t().contiguous().t(),), "strides (1, 8), expected (16, 1)"),
    "count": (lambda a: (*right(a), None), "2 results, expected 1"),
    "kind": (lambda a: (3,), "is int"),
    "input": (writes_input, "writes to an input"),
    "narrow": (lambda a: (torch.relu(a[0].bfloat16() @ a[1].bfloat16()).float(),), "allowed"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong(what):
    fn, why = WRONG[what]
    result = Race(aten=(right, [7.0]), bad=(fn, [1.0]), fine=(right, [6.0])).run()
    assert result.row("bad").status == "wrong" and why in result.row("bad").why
    assert result.winner == "fine"  # what the bad one wrote over is made again


class Blocks:
    """An allocator of blocks for results: of free ones the last is given first, as it was left."""

    def __init__(self):
        self.free, self.empty = [], torch.empty

    def make(self, *size, dtype=torch.float32, device="cpu"):
        if math.prod(size) * dtype.itemsize != 4 * M * N:
            return self.empty(*size, dtype=dtype, device=device)
        block = self.free.pop() if self.free else self.empty(M * N)
        made = block.view(dtype).view(size)
        weakref.finalize(made, self.free.append, block)
        return made


@pytest.mark.parametrize("others", range(5))
def test_unwritten_results_show_wherever_they_lie(others, monkeypatch):
    """Free blocks hold the right results of others; which one a call gets depends on what it makes first."""
    monkeypatch.setattr(torch, "empty", Blocks().make)

    def leaves_many(args):
        return [torch.empty(M, N).copy_(right(args)[0]) for _ in range(8)][:1]

    def unwritten(args):
        held = [torch.empty(M, N) for _ in range(others)]
        result = torch.empty(M, N)
        del held
        return (result,)

    result = Race(aten=(leaves_many, [7.0]), fine=(leaves_many, [6.0]), bad=(unwritten, [1.0])).run()
    assert result.row("bad").status == "wrong" and result.winner == "fine"


def test_right_only_the_first_time():
    calls = iter([right])
    result = Race(aten=(right, [7.0]), bad=(lambda a: next(calls, wrong)(a), [1.0])).run()
    assert result.row("bad").status == "wrong" and result.winner == "aten"


def test_one_bad_element_in_a_million():
    """Too few to move the norm of a bfloat16 result."""
    data = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)).double()
    ref = correct.Reference((data,), (torch.bfloat16,), "float64", 1000)
    good = data.bfloat16()
    bad = good.clone()
    bad[17, 3] += 1.0
    own = correct.errors([good], ref, None)
    found = correct.errors([bad], ref, [good])
    assert own[0].relative < found[0].relative < 2 * own[0].relative
    assert "worst element" in correct.judge(found, own, correct.floors(ref, False))
    assert correct.judge(own, own, correct.floors(ref, False)) == ""


def test_rounding_every_few_products_is_wrong():
    """A bfloat16 running sum of 128 pieces: four times the error of one rounding."""

    def pieces(args):
        return (torch.relu(sum(args[0][:, i : i + 8] @ args[1][i : i + 8] for i in range(0, 1024, 8))),)

    x, w, y = (buffer(n, s, torch.bfloat16, k) for n, s, k in
               (("x", (64, 1024), "input"), ("w", (1024, 64), "input"), ("y", (64, 64), "temp")))  # fmt: skip
    call = Extern("mm", torch.ops.aten.mm.default, (full_view(x), full_view(w)), (), ("y",))
    relu = Extern("relu", torch.ops.aten.relu_.default, (full_view(y),), (), (None,), mutates=("y",))
    p = Program(("x", "w"), {"x": x, "w": w, "y": y}, (call, relu), (full_view(y),))
    parts = lambda a: (torch.bmm(a[0].view(64, 8, 128).transpose(0, 1), a[1].view(8, 128, 64)).sum(0).relu(),)  # noqa: E731
    result = check(p, aten=right, running=pieces, decomposed=parts)
    assert [r.status for r in result.rows] == ["ok", "wrong", "ok"], result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_less_often_than_the_default_is_right(dtype):
    wide = lambda args: (torch.relu(args[0].float() @ args[1].float()).to(dtype),)  # noqa: E731
    result = check(small(dtype), aten=wide, one=wide)
    assert [r.status for r in result.rows] == ["ok", "ok"] and 0 < result.row("one").error < 0.01


def test_order_of_a_long_sum_is_not_wrong():
    """One float32 after another, where the default adds pairwise."""
    n = 30000
    x, y = buffer("x", (1, n), torch.float32, "input"), buffer("y", (1,), torch.float32)
    call = Extern("sum", torch.ops.aten.sum.dim_IntList, (full_view(x), (1,)), (), ("y",))
    p = Program(("x",), {"x": x, "y": y}, (call,), (full_view(y),))
    result = check(p, aten=lambda a: (a[0].sum(1),), serial=lambda a: (a[0].cumsum(1)[:, -1].clone(),))
    assert result.row("serial").status == "ok"


def test_integers_must_be_equal():
    x, y = buffer("x", (5, 9), torch.float32, "input"), buffer("y", (5,), torch.int64)
    call = Extern("argmax", torch.ops.aten.argmax.default, (full_view(x), 1), (), ("y",))
    p = Program(("x",), {"x": x, "y": y}, (call,), (full_view(y),))
    ways = {"aten": lambda a: a[0].argmax(1), "min": lambda a: a[0].argmin(1), "max": lambda a: a[0].max(1).indices}
    result = check(p, **{name: lambda a, f=f: (f(a),) for name, f in ways.items()})
    assert [r.status for r in result.rows] == ["ok", "wrong", "ok"] and result.row("min").error == 1.0


def test_overflow_is_right_where_the_dtype_overflows():
    ref = correct.Reference((torch.tensor([1.0, 1e6, -1e6, math.nan]).double(),), (torch.float16,), "float64", 4)
    inf = math.inf
    judged = lambda *v: correct.errors([torch.tensor(v).half()], ref, None)[0].special  # noqa: E731
    assert judged(1.0, inf, -inf, math.nan) == 0
    assert judged(1.0, inf, inf, math.nan) == 1
    assert judged(inf, inf, -inf, 0.0) == 2
    default = [torch.tensor([inf, inf, -inf, math.nan]).half()]
    assert correct.errors([torch.tensor([inf, inf, -inf, math.nan]).half()], ref, default)[0].special == 0


# -- the reference ----------------------------------------------------------------------------------
def test_widened_programs_round_nothing():
    """x rounded to bfloat16 twice, as a cast and as a buffer: the reference has neither."""
    x, t = buffer("x", (9,), torch.float32, "input"), buffer("t", (9,), torch.bfloat16)
    y = buffer("y", (9,), torch.float32)
    i = Var("i", expr(9))
    b, c = BodyBuilder(), BodyBuilder()
    b.store("t", i, b.cast(b.load("x", i, torch.float32), torch.bfloat16))
    c.store("y", i, c.load("t", i, torch.float32))
    loops = tuple(LoopNest(n, (Axis(i, "p"),), tuple(body.body)) for n, body in (("b", b), ("c", c)))
    p = Program(("x",), {"x": x, "t": t, "y": y}, loops, (full_view(y),))
    data = torch.randn(9)
    (got,), _ = correct.run_wide(p, [data], torch.float64)
    assert got.dtype == torch.float64 and torch.equal(got, data.double())
    assert not torch.equal(interpret(p, [data])[0], data)
    (got,), _ = correct.run_wide(p, [data], torch.float32)
    assert torch.equal(got, data)
    views = Program(("x",), {"x": x}, (), (View("x", (expr(9),), (expr(1),), expr(0), torch.int32),))
    with pytest.raises(MeasureError, match="no wider form"):
        correct.widen(views, torch.float64)


@torch.library.custom_op("reflib_test::mm_no_double", mutates_args=())
def mm_no_double(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    assert x.dtype != torch.float64, "float64 is not supported"
    return x @ w


@torch.library.custom_op("reflib_test::mm_half", mutates_args=())
def mm_half(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.double() @ w.double()).half()


@pytest.mark.parametrize("op, source", [(mm_no_double, "float32"), (mm_half, "default")])
def test_an_op_that_refuses_float64(op, source):
    half = lambda a: (torch.relu((a[0].double() @ a[1].double()).half()),)  # noqa: E731
    bad, good = lambda a: (half(a)[0] * 1.05,), lambda a: (torch.relu(a[0] @ a[1]),)
    result = check(small(torch.float16, target=op._opoverload), aten=half, bad=bad, good=good)
    assert result.reference == source
    assert [x.status for x in result.rows] == ["ok", "wrong", "ok"], result


def test_no_room_for_a_reference(monkeypatch):
    monkeypatch.setattr(correct, "wide_bytes", lambda *a: 1 << 60)
    result = Race(aten=(right, [7.0]), bad=(wrong, [1.0]), fast=(right, [2.0])).run()
    assert result.reference == "default" and result.winner == "fast" and result.row("bad").status == "wrong"


# -- inputs that are written ------------------------------------------------------------------------
def test_mutated_inputs_start_the_same_for_all():
    x, y = buffer("x", (9,), torch.float32, "input"), buffer("y", (9,), torch.float32)
    i = Var("i", expr(9))
    b = BodyBuilder()
    value = b.op("mul", b.load("x", i, torch.float32), b.const(3.0, torch.float32))
    b.store("x", i, value)
    b.store("y", i, value)
    p = Program(("x",), {"x": x, "y": y}, (LoopNest("l", (Axis(i, "p"),), tuple(b.body)),), (full_view(y),))
    seen: list[torch.Tensor] = []

    def in_place(args):
        (t,) = args
        seen.append(t.clone())
        t.mul_(3)
        return (t.clone(),)

    fns = iter([in_place, in_place, lambda a: (a[0] * 3,), lambda a: (a[0].mul_(4) * 0.75,)])
    r = request({"a": p, "b": p, "forgets": p, "bad": p}, "a", limits=Limits(rounds=2))
    result = measure(r, lambda p, o: next(fns), clock=OneCall())
    assert [x.status for x in result.rows] == ["ok", "ok", "wrong", "wrong"]
    assert all(torch.equal(t, seen[0]) for t in seen) and len(seen) > 6


class OneCall:
    name = "one"

    def sampler(self, call, sets):
        return lambda: (call(list(sets[0])), 1e-6)[1]
