"""Sums of gradients of slices become a ``cat``: the same values, each stored once."""

import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.slice_sums import slice_sums
from reflib.options import Options

aten = torch.ops.aten


def taken(rng: random.Random, x: Tensor) -> Tensor:
    """A slice or a row: of all such, some lie apart, some overlap, some have steps."""
    dim = rng.randrange(x.dim())
    size = x.shape[dim]
    kind = rng.randrange(4)
    if kind == 0 and size > 1:
        start = rng.randrange(size - 1)
        return x.narrow(dim, start, rng.randrange(1, size - start))
    if kind == 1 and x.dim() > 1:
        return x.select(dim, rng.randrange(-size, size))
    at = [slice(None)] * dim + [slice(rng.randrange(-size, size), None, rng.choice([1, 1, 2]))]
    return x[tuple(at)]


def case(rng: random.Random) -> tuple[Callable[[Tensor], Any], Tensor]:
    x = torch.randn([rng.randrange(2, 6) for _ in range(rng.randrange(1, 4))])
    steps = rng.randrange(2, 8)
    seed, dense = rng.random(), rng.random() < 0.3

    def fn(x: Tensor) -> Any:
        again = random.Random(seed)
        total = (x * x).sum() if dense else 0
        rest = x[1:] if again.random() < 0.5 else x
        rows = range(len(rest)) if again.random() < 0.5 else ()
        for t in rows:
            total = total + (rest[t] * (t + 1)).sin().sum()
        for k in range(steps):
            part = taken(again, rest)
            total = total + (part * (k + 2)).cos().sum() if part.numel() else total
        return total

    return fn, x


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", range(4))
def test_drawn(part: int) -> None:
    rng = random.Random(part)
    for _ in range(12):
        fn, x = case(rng)
        plain = make_fx(torch.func.grad(fn), decomposition_table=DECOMPOSED, tracing_mode="fake")(x)
        torch.testing.assert_close(slice_sums(plain, Options(), False)(x), torch.func.grad(fn)(x))


DECOMPOSED = torch._decomp.get_decompositions([aten.select_backward, aten.slice_backward])


def gradients(fn: Callable[..., Tensor], *args: Tensor) -> torch.fx.GraphModule:
    """Of ``fn``'s sum."""
    wanted = torch.func.grad(lambda *a: fn(*a).sum(), tuple(range(len(args))))
    made = make_fx(wanted, decomposition_table=DECOMPOSED, tracing_mode="fake")(*args)
    made.graph.eliminate_dead_code()
    return made


def calls(made: torch.fx.GraphModule, **options: Any) -> Counter[Any]:
    """How often each op is called when the pass is through."""
    return Counter(n.target for n in slice_sums(made, Options(**options), False).graph.nodes)


def graph(fn: Callable[..., Tensor], *args: Tensor, **options: Any) -> Counter[Any]:
    return calls(gradients(fn, *args), **options)


def loop(x: Tensor) -> Tensor:
    h = x[0]
    for row in x[1:]:
        h = h.tanh() * row
    return h


def gap(x: Tensor) -> Tensor:
    return x[:, 1] * x[:, 3] + x[:, -1]


def twice(x: Tensor) -> Tensor:
    h = x[0]
    for i in range(1, 5):
        h = (h - x[i]).sin() + x[i]
    return h


def both(x: Tensor) -> Tensor:
    return x.tanh() + (x[:, :2].sin() * x[:, 2:4]).sum()


def filled(x: Tensor) -> Tensor:
    return x.tanh() + loop(x).sum()


def overlapping(x: Tensor) -> Tensor:
    return x[1:] * x[:-1]


def every_other(x: Tensor) -> Tensor:
    return x[:, ::2][:, :3] * x[:, 1::2]


X = torch.randn(5, 6)


@pytest.mark.parametrize("fn, cats, adds", [(loop, 1, 0), (gap, 1, 1), (both, 1, 2), (twice, 1, 8), (filled, 1, 3)])
def test_one_cat(fn: Callable[..., Tensor], cats: int, adds: int) -> None:
    found = graph(fn, X)
    assert found[aten.cat.default] == cats and found.get(aten.add.Tensor, 0) == adds
    assert aten.select_scatter.default not in found and aten.slice_scatter.default not in found


@pytest.mark.parametrize("dense_last", [False, True])
def test_strides_are_those_of_the_sum(dense_last: bool) -> None:
    """A view of the sum relies on them when the graph itself runs, as for ``explain(target=)``."""

    def fn(x: Tensor) -> Tensor:
        rows, turned = (lambda: (x[0] * x[2]).sum()), (lambda: (x.t() @ torch.arange(20.0).view(5, 4)).sum())
        return rows() + turned() if dense_last else turned() + rows()

    plain = make_fx(torch.func.grad(fn), decomposition_table=DECOMPOSED, tracing_mode="fake")(X)
    made = slice_sums(plain, Options(), False)
    assert made is not plain and made(X).stride() == plain(X).stride()


def test_an_expanded_gradient_and_a_dense_one() -> None:
    """Their sum has a number per element, though all of the first's are one in memory (stride 0)."""
    fn = lambda x: sum(x[t].sum() + x[t].exp().sum() for t in range(5))  # noqa: E731
    plain = make_fx(torch.func.grad(fn), decomposition_table=DECOMPOSED, tracing_mode="fake")(X)
    made = slice_sums(plain, Options(), False)
    assert made is not plain
    assert all(0 not in n.meta["val"].stride() for n in made.graph.nodes if n.target is aten.add.Tensor)


def test_many_rows() -> None:
    """One sum in another, deeper than Python's stack."""
    made = gradients(lambda x: sum(x[t].sin() for t in range(240)), torch.randn(240, 2))  # type: ignore[arg-type, return-value]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 120)
    try:
        found = calls(made)
    finally:
        sys.setrecursionlimit(limit)
    assert found[aten.cat.default] == 1 and aten.select_scatter.default not in found


@pytest.mark.parametrize("fn", [overlapping, every_other])
def test_left_alone(fn: Callable[..., Tensor]) -> None:
    assert aten.cat.default not in graph(fn, X)


def test_bits() -> None:
    """-0.0 + 0.0 is 0.0."""
    assert aten.cat.default not in graph(loop, X, numerics="eager")


def shifted(x: Tensor, g: Tensor) -> Tensor:
    """Each step takes its row twice."""
    most, out = x[:, 0], []
    for t in range(x.shape[1]):
        most = torch.maximum(most + g[:, t], x[:, t])
        out.append((x[:, t] - most).exp())
    return torch.stack(out, 1)


def gated(x: Tensor, g: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.sigmoid(g[:, t]) * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


@pytest.mark.parametrize("fn", [gated, shifted])
def test_two_kernels(fn: Callable[..., Tensor]) -> None:
    """A recurrence, forward and backward: each reads what it needs once."""
    args = [torch.randn(64, 12, 384, requires_grad=True) for _ in range(2)]
    forward, backward = reflib.explain(fn, *args, target="sm_90").graphs
    for g in (forward, backward):
        assert len([name for name in g.kernels if not name.endswith("_fallback")]) == 1


@pytest.mark.parametrize("fn", [loop, gap, twice, both, overlapping, every_other])
def test_compiled(fn: Callable[..., Tensor]) -> None:
    x, y = (X.clone().requires_grad_() for _ in range(2))
    torch.compile(fn, backend="reflib")(x).sum().backward()
    fn(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def backwards(x: Tensor, y: Tensor) -> Tensor:
    h, out = torch.zeros_like(y[0]), []
    x, y = x.flip(0), y.flip(0)
    for t in range(len(x)):
        h = 0.9 * h + x[t] * 0.5 - y[t]
        out.append(h)
    return torch.stack(out[::-1])


def test_a_loop_back_in_time() -> None:
    x, y = torch.randn(6, 33), torch.randn(6, 33)
    assert graph(backwards, x, y)[aten.flip.default] == 2  # what the loop reads: its gradients are not flipped
    args = [t.clone().requires_grad_() for t in (x, y)]
    got = torch.autograd.grad(reflib.compile(backwards)(*args).square().sum(), args)
    for a, b in zip(got, torch.autograd.grad(backwards(*args).square().sum(), args), strict=True):
        torch.testing.assert_close(a, b)
