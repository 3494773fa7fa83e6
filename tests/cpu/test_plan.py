"""plan: lifetimes, reuse in place and taken over, and what must never be reused."""

import pytest
import torch
from choices import scheduled

import reflib
from reflib.ir.expr import Sym, Var, expr
from reflib.ir.loops import Axis, BodyBuilder, LoopNest
from reflib.ir.program import Buffer, Config, Extern, Program, View, full_view
from reflib.options import Options
from reflib.plan import Alloc, Free, Launch, Let, Return
from reflib.plan import plan as plan_of
from reflib.plan.memory import memory

CPU = torch.device("cpu")
N = 64


def buffer(name, kind="temp", dtype=torch.float32, n=N):
    return Buffer(name, dtype, CPU, (expr(n),), (expr(1),), kind)


def neg(name, source, target, shift=0):
    i = Var(f"i_{name}", expr(N))
    b = BodyBuilder()
    b.store(target, expr(i), b.op("neg", b.load(source, expr(i) + shift, torch.float32)))
    return scheduled(LoopNest(name, (Axis(i, "p"),), tuple(b.body)))


def row_sum_then_scale(name, source, target):
    """One row of N: target = source * sum(source)."""
    r = Var(f"r_{name}", expr(N))
    b = BodyBuilder()
    x = b.load(source, expr(r), torch.float32)
    total = b.reduce("sum", x, dtype=torch.float32)
    b.store(target, expr(r), b.op("mul", x, total))
    return scheduled(LoopNest(name, (Axis(r, "r"),), tuple(b.body)), Config(reduction="looped"))


def program(nodes, buffers, outputs, inputs=("x",)):
    table = {b.name: b for b in buffers}
    return Program(tuple(inputs), table, tuple(nodes), tuple(full_view(table[o]) for o in outputs))


def plan(program, options):
    return memory(program, plan_of(program, options))


def allocs(p):
    return {s.buffer: s.reuse for s in p.steps if isinstance(s, Alloc)}


def test_elementwise_overwrites_a_dead_temp():
    nodes = [neg("k0", "x", "a"), neg("k1", "a", "b"), neg("k2", "b", "c")]
    p = plan(program(nodes, [buffer("x", "input"), buffer("a"), buffer("b"), buffer("c")], ["c"]), Options())
    assert allocs(p) == {"a": None, "b": "a", "c": "b"}
    assert p.peak_bytes == N * 4 and p.allocations == 1 and p.reuses == 2


def test_an_input_is_never_overwritten_but_freed():
    p = plan(program([neg("k0", "x", "a")], [buffer("x", "input"), buffer("a")], ["a"]), Options())
    assert allocs(p) == {"a": None}
    assert Free("x") in p.steps and isinstance(p.steps[-1], Return)


def test_no_overwriting_at_another_index():
    nodes = [neg("k0", "x", "a"), neg("k1", "a", "b", shift=1)]
    p = plan(program(nodes, [buffer("x", "input"), buffer("a", n=N + 1), buffer("b", n=N + 1)], ["b"]), Options())
    assert allocs(p)["b"] is None


def test_reduction_kernel_overwrites_only_in_its_last_pass():
    nodes = [neg("k0", "x", "a"), row_sum_then_scale("k1", "a", "b")]
    p = plan(program(nodes, [buffer("x", "input"), buffer("a"), buffer("b")], ["b"]), Options())
    assert allocs(p)["b"] == "a"
    r = Var("r", expr(N))
    b = BodyBuilder()
    x = b.load("a", expr(r), torch.float32)
    b.store("b", expr(r), x)  # pass 0 stores, pass 1 loads again
    b.store("c", expr(r), b.op("mul", x, b.reduce("sum", x, dtype=torch.float32)))
    both = scheduled(LoopNest("k1", (Axis(r, "r"),), tuple(b.body)), Config(reduction="looped"))
    buffers = [buffer("x", "input"), buffer("a"), buffer("b"), buffer("c")]
    p = plan(program([nodes[0], both], buffers, ["b", "c"]), Options())
    assert allocs(p)["b"] is None and allocs(p)["c"] == "a"


def test_outputs_and_pinned_buffers_keep_their_storage():
    nodes = [neg("k0", "x", "a"), neg("k1", "a", "b")]
    buffers = [buffer("x", "input"), buffer("a"), buffer("b")]
    p = plan(program(nodes, buffers, ["a", "b"]), Options())
    assert allocs(p) == {"a": None, "b": None}
    view = View("a", (expr(N),), (expr(1),), expr(0), torch.float32)
    alias = Extern("e", torch.ops.aten.view.default, (view, [N]), (), ("v",))
    users = [nodes[0], alias, neg("k1", "a", "b"), neg("k2", "v", "c")]
    p = plan(program(users, [*buffers, buffer("v"), buffer("c")], ["b", "c"]), Options())
    assert allocs(p)["b"] is None  # v still looks at a's storage


def test_taken_over_soon_or_not_at_all():
    call = Extern("e", torch.ops.aten.mm.default, (full_view(buffer("a")),), (), ("m",))
    nodes = [neg("k0", "x", "a"), call, neg("k1", "x", "b")]
    buffers = [buffer("x", "input"), buffer("a"), buffer("m", n=7), buffer("b")]
    p = plan(program(nodes, buffers, ["m", "b"]), Options())
    assert allocs(p)["b"] == "a" and p.steps[p.steps.index(Alloc("b", "a")) + 1] == Free("a")
    p = plan(program(nodes, buffers, ["m", "b"]), Options(reuse_buffers=False, inplace_buffers=False))
    assert allocs(p)["b"] is None and Free("a") in p.steps


def test_size_symbols_are_read_from_inputs():
    s = Sym("s0", lo=2, hint=8)
    x = Buffer("x", torch.float32, CPU, (expr(s), expr(4)), (expr(4), expr(1)), "input")
    p = plan(Program(("x",), {"x": x}, (), (full_view(x),)), Options())
    assert p.steps[0] == Let(s, "x", "size", 0)
    p = plan(Program((s, "x"), {"x": x}, (), (full_view(x),)), Options())
    assert not any(isinstance(step, Let) for step in p.steps)


def test_launch_steps_follow_the_nodes():
    nodes = [neg("k0", "x", "a"), neg("k1", "a", "b")]
    p = plan(program(nodes, [buffer("x", "input"), buffer("a"), buffer("b")], ["b"]), Options())
    assert [s.kernel.name for s in p.steps if isinstance(s, Launch)] == ["k0", "k1"]
    assert [m.label for m in p.moments] == ["k0", "k1"]


def standardized(x, w):
    y = x @ w
    d = y - y.mean(0)
    return d, d * torch.rsqrt(y.var(0) + 1e-5)


def ranked(x, w):
    y = x @ w
    return y - y.amax(0), y * y.argmax(0)


def of_a_first_element(x, w):
    """A number per row is stored in one pass, and a later one reads such a number for a few points of the row."""
    whole = torch.cat([x.topk(1, 1)[0], x], 1)
    total = whole.abs().sum(1)
    return w[:, 0] - total, whole - total[:, None]


@pytest.mark.parametrize("rows", [1, 600])
def test_not_over_a_number_per_row_that_points_read(rows):
    torch.manual_seed(0)
    x, w = torch.randn(rows, 48), torch.randn(rows, 3)
    for got, want in zip(reflib.compile(of_a_first_element)(x, w), of_a_first_element(x, w), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fn", [standardized, ranked])
def test_not_over_what_a_second_pass_of_a_variance_or_a_position_reads(fn):
    torch.manual_seed(0)
    x, w = torch.randn(600, 48), torch.randn(48, 96)
    for got, want in zip(reflib.compile(fn)(x, w), fn(x, w), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def columns(later: str):
    """``b`` = -a, stored in the pass that sums the columns of -a, and per ``later`` what a second pass reads."""
    r, p = Var("r", expr(N)), Var("p", expr(8))
    at = 8 * expr(r) + expr(p)
    b = BodyBuilder()
    x = b.op("neg", b.load("a", at, torch.float32))
    b.store("b", at, x)
    total = b.reduce("sum" if later != "two passes of one" else "m2", x, dtype=torch.float32)
    b.store("s", expr(p), total)
    if later == "another sum":
        b.store("t", expr(p), b.reduce("sum", b.op("mul", b.load("w", at, torch.float32), total), dtype=torch.float32))
    elif later == "of the same":
        b.store("t", expr(p), b.reduce("sum", b.op("mul", x, total), dtype=torch.float32))
    return scheduled(LoopNest("k1", (Axis(r, "r"), Axis(p, "p")), tuple(b.body)), Config(reduction="looped"))


@pytest.mark.parametrize(
    ("later", "over"),
    [("", True), ("another sum", True), ("of the same", False), ("two passes of one", False)],
)
def test_what_is_summed_too_is_overwritten_if_no_later_pass_reads_it(later, over):
    table = [buffer("x", "input", n=N * 8), buffer("w", "input", n=N * 8), buffer("a", n=N * 8), buffer("b", n=N * 8)]
    table += [buffer("s", n=8), buffer("t", n=8)]
    i = Var("i", expr(N * 8))
    first = BodyBuilder()
    first.store("a", expr(i), first.op("neg", first.load("x", expr(i), torch.float32)))
    nodes = [scheduled(LoopNest("k0", (Axis(i, "p"),), tuple(first.body))), columns(later)]
    outputs = ["b", "s", *(["t"] if later not in ("", "two passes of one") else [])]
    p = plan(program(nodes, table, outputs, ("x", "w")), Options())
    assert allocs(p)["b"] == ("a" if over else None)


@pytest.mark.parametrize("rows", [70, 1030])
def test_a_gradient_that_is_summed_is_eagers(rows):
    torch.manual_seed(rows)
    x, w, v, mask = torch.randn(rows, 33), torch.randn(33, 50), torch.randn(50, 20), torch.randn(rows, 50)

    def fn(x, w, v, mask):
        g = torch.where(mask > 0, x @ w, 0)
        return g @ v, g.sum(0), g.t() @ x

    for got, want in zip(reflib.compile(fn)(x, w, v, mask), fn(x, w, v, mask), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
