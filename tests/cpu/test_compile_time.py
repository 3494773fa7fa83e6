"""What keeps compiling fast, and must change nothing."""

import contextlib
import gc
import itertools
from collections.abc import Sequence

import pytest
import torch

import reflib
from reflib import pipeline
from reflib.fuse.slices import coordinates
from reflib.ir.expr import Expr, Var, expr, in_range, nonneg
from reflib.ir.program import Buffer


@pytest.mark.parametrize("how", ["off", "off, and it fails", "blocking"])
def test_no_garbage_is_collected_while_a_graph_is_compiled(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Forward and backward; a compilation that measures takes longer, and has tensors of its own."""
    seen, fuse = [], pipeline._STAGE["fuse"]

    def look(s: pipeline.Stages) -> None:
        seen.append(gc.isenabled())
        if "fails" in how:
            raise reflib.ReflibError("planted")
        fuse(s)

    monkeypatch.setitem(pipeline._STAGE, "fuse", look)
    call = reflib.compile(lambda x: (x.sin() * 2).sum(), autotune=how.split(",")[0], isolate=False)
    with pytest.raises(Exception, match="planted") if "fails" in how else contextlib.nullcontext():
        call(torch.randn(8, requires_grad=True)).backward()
    assert gc.isenabled() and len(seen) == (1 if "fails" in how else 2)
    assert all(seen) if how == "blocking" else not any(seen)


def at(index: Expr, env: dict[Var, int]) -> int:
    return int(index.evaluate(env))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_coordinates_of_an_element_are_those_of_its_loops(order: Sequence[int]) -> None:
    """Of a plain index, and of others."""
    shape, step, strides = (3, 4, 5), 1, [0, 0, 0]
    for d in order:
        strides[d], step = step, step * shape[d]
    b = Buffer("b", torch.float32, torch.device("cpu"), tuple(map(expr, shape)), tuple(map(expr, strides)))
    i, j, k = (Var(name, expr(size)) for name, size in zip("ijk", shape, strict=True))
    s, t, u = strides
    plain = expr(i) * s + expr(j) * t + expr(k) * u
    for index in (plain, expr(k) * u + t, expr(i) * s + expr(k) * u):
        found = coordinates(index, b)
        assert found is not None
        for at_i, at_j, at_k in itertools.product(*map(range, shape)):
            env = {i: at_i, j: at_j, k: at_k}
            there = [at(c, env) for c in found]
            assert sum(c * stride for c, stride in zip(there, strides, strict=True)) == at(index, env)
            assert all(0 <= c < size for c, size in zip(there, shape, strict=True))


def test_a_range_is_proved_exactly_where_it_holds() -> None:
    """Of sums of loop variables of known sizes: by their least and their greatest value."""
    i, j = Var("i", expr(3)), Var("j", expr(4))
    for a, b, c, size in itertools.product((-5, -1, 0, 2), (-3, 0, 1), (-2, 0, 7), (1, 6, 12)):
        e = expr(i) * a + expr(j) * b + c
        values = [at(e, {i: x, j: y}) for x in range(3) for y in range(4)]
        assert nonneg(e) == (min(values) >= 0), e
        assert in_range(e, expr(size)) == (min(values) >= 0 and max(values) < size), e
