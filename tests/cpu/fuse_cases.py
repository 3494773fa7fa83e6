"""Helpers for the fusion tests: functions become programs; a fused program must compute what the unfused one does."""

import itertools

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from reflib.capture import Graph
from reflib.fuse import fuse
from reflib.ir.interpret import interpret
from reflib.ir.loops import Loops
from reflib.ir.program import Extern
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
    return [n for n in f.program.nodes if isinstance(n, Loops)]


def calls(f):
    return [n for n in f.program.nodes if isinstance(n, Extern)]
