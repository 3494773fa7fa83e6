"""Helpers for the fusion tests: functions become programs; a fused program must compute what the unfused one does."""

import itertools
from dataclasses import replace

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from reflib.capture import Graph
from reflib.fuse import fuse
from reflib.ir.expr import ONE, Var, expr
from reflib.ir.interpret import interpret
from reflib.ir.loops import Acc, Axis, BodyBuilder, LoopNest
from reflib.ir.ops import value_dtype
from reflib.ir.program import Extern, Template, View
from reflib.ir.verify import verify
from reflib.lower import decompositions, lower
from reflib.options import Options
from reflib.target import parse_target

CPU, GPU = parse_target("cpu"), parse_target("sm_90")


def lowered(fn, args, symbolic=False, options=None):
    """``fn`` as a program; ``fn`` must return a tuple, and mutate its arguments with ``copy_`` only."""
    mode = "symbolic" if symbolic else "fake"
    gm = make_fx(torch.func.functionalize(fn), decomposition_table=decompositions(), tracing_mode=mode)(*args)
    program = lower(Graph(gm), options or Options())
    verify(program)
    return program


def fused(fn, args, target=GPU, symbolic=False, run_on=(), **options):
    """Fuse ``fn`` and check the result against the program before and against eager; returns the Fused."""
    o = Options(**options)
    program = lowered(fn, args, symbolic, o)
    f = fuse(program, o, target)
    check_same(program, f, fn, args)
    for other in run_on:
        check_same(program, f, fn, other)
    return f


def gpu_fused(fn, *args, symbolic=False, **options):
    """``fused``, lowered for a GPU too."""
    o = Options(target="sm_90", **options)
    program = lowered(fn, args, symbolic, o)
    f = fuse(program, o, GPU)
    check_same(program, f, fn, args)
    return f


def atomic(f):
    """The kernels that add atomically."""
    return [n for n in kernels(f) if any(s.reduce == "atomic" for s in n.stores())]


def check_same(program, f, fn, args):
    verify(f.program)
    members = [m for g in f.groups for m in g.members]
    assert len(members) == len(set(members))
    assert [g.name for g in f.groups] == [n.name for n in f.program.nodes]
    copies = [[a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(3)]
    want = fn(*copies[0])
    before = interpret(program, copies[1])
    after = interpret(f.program, copies[2])
    close(before, want)
    close(after, before)
    for x, y in itertools.pairwise(copies[1:]):
        close([a for a in x if isinstance(a, torch.Tensor)], [a for a in y if isinstance(a, torch.Tensor)])


def close(got, want):
    for g, w in zip(got, want, strict=True):
        if isinstance(w, torch.Tensor):
            assert g.stride() == w.stride() or w.numel() <= 1
            if w.dtype in (torch.float16, torch.bfloat16):
                torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2, equal_nan=True)
            else:
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5, equal_nan=True)
        else:
            assert g == w


def kernels(f):
    return [n for n in f.program.nodes if isinstance(n, LoopNest)]


def calls(f):
    return [n for n in f.program.nodes if isinstance(n, Extern)]


def templates(f):
    return [n for n in f.program.nodes if isinstance(n, Template)]


# -- matrix products --------------------------------------------------------------------------------
aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}


def templated(program, only=None):
    """The program with its mm, bmm, addmm and baddbmm calls as Templates. ``only``: the positions, among them, that
    become one (None: all)."""
    nodes, count = [], itertools.count()
    for n in program.nodes:
        if isinstance(n, Extern) and n.target in PRODUCTS and not n.kwargs:
            number = next(count)
            n = as_template(program, n) if only is None or number in only else n
        nodes.append(n)
    program = replace(program, nodes=tuple(nodes))
    verify(program)
    return program


def as_template(program, call):
    """acc, plus the bias of an addmm, rounded to the result's dtype and stored."""
    first = PRODUCTS[call.target]
    a, b = (batched(v) for v in call.args[first : first + 2])
    out = program.buffers[call.outputs[0]]
    axes = tuple(Axis(Var(f"{call.name}_{'bmn'[3 - len(out.shape) :][d]}", n), "p") for d, n in enumerate(out.shape))
    if len(out.shape) == 3 and out.shape[0] == 1:
        axes = axes[1:]
    body = BodyBuilder()
    value = body.add(Acc(torch.float64 if out.dtype == torch.float64 else torch.float32))
    if first:
        bias = call.args[0]
        term = body.load(bias.buffer, bias.offset + index(bias.shape, bias.strides, axes), value_dtype(bias.dtype))
        value = body.op("add", value, term)
    body.store(out.name, index(out.shape, out.strides, axes), body.cast(value, out.dtype))
    return Template(call.name, a, b, LoopNest(call.name, axes, tuple(body.body), call.origins), out.dtype)


def batched(v):
    return v if len(v.shape) == 3 else View(v.buffer, (ONE, *v.shape), (expr(0), *v.strides), v.offset, v.dtype)


def index(shape, strides, axes):
    """An element of a tensor whose last axes are ``axes``; sizes of 1 are broadcast."""
    pairs = list(zip(reversed(shape), reversed(strides), strict=True))
    return sum(
        (expr(a.var) * s for a, (n, s) in zip(reversed(axes), pairs, strict=False) if n != 1 or a.size == 1), expr(0)
    )


def products(fn, args, target=GPU, symbolic=False, run_on=(), only=None, **options):
    """Like ``fused``, with matrix products as Templates; fused twice, which must change nothing more."""
    o = Options(**options)
    program = templated(lowered(fn, args, symbolic, o), only)
    f = fuse(program, o, target)
    again = fuse(f.program, o, target)
    for a in (args, *run_on):
        check_same(program, f, fn, a)
        check_same(f.program, again, fn, a)
    assert str(again.program) == str(f.program)
    for t in templates(f):
        assert [str(a.var) for a in t.epilogue.axes] == ["p0", "p1", "p2"][: len(t.epilogue.axes)]
    return f


def refused(f):
    """Codes of refusals."""
    return {r.reason.code for r in f.refusals}
