"""What is updated in place beyond one row of a cache: parts, calls, several forms in a row; what is refused, and why.

Random programs of updates are compared with eager by the interpreter, after fusion."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.graph import Graph
from reflib.ir.interpret import interpret
from reflib.ir.program import Extern, walk
from reflib.options import Options
from reflib.pipeline import run
from tests.checking import check

R = random.Random(20)
L, B, S, D = R.randrange(3, 5), R.randrange(2, 4), R.randrange(20, 30), R.randrange(4, 9)
torch.manual_seed(R.randrange(1000))
C, V, I = torch.randn(L, B, S, D), torch.randn(B, 1, D), torch.tensor([R.randrange(S)])


def layers_sliced(c: Any, v: Any, i: Any) -> Any:
    out = 0
    for n in range(L):
        c[n, :, 7:8] = v + out
        out = c[n].sum(1, keepdim=True)
    return out


def layers_copied(c: Any, v: Any, i: Any) -> Any:
    out = 0
    for n in range(L):
        c[n].index_copy_(1, i, v + out)
        out = c[n].sum(1, keepdim=True)
    return out


def of_all_forms(c: Any, v: Any, i: Any) -> Any:
    c[1].index_copy_(1, i, v)
    c[:, :, 3] = v[:, 0]
    c.mul_(2)
    c[2].index_add_(1, i, v, alpha=2)
    c[0, 1:, 2:9:3] = c[1, 1:, 2:9:3]
    return c


def calls(c: Any, v: Any, i: Any) -> Any:
    c[c > 1] = c[c > 1] * 0.5
    c.masked_scatter_(c < -1, c.new_zeros(c.numel()))
    c.index_put_((i % L,), v, accumulate=True)
    y = torch.zeros(S, D)
    return y.index_add_(0, i, v[0])


def turned(c: Any, v: Any, i: Any) -> Any:
    c.transpose(1, 2)[:, 4] = v[:, 0]
    c.scatter_add_(2, i.expand(L, B, 1, D), v.expand(L, B, 1, D))
    return c[0]


PLACES = [layers_sliced, layers_copied, of_all_forms, calls, turned]


@pytest.mark.parametrize("fn, wrapper", [(f, ("python", "cpp")[n % 2]) for n, f in enumerate(PLACES)])
def test_in_place(fn: Callable[..., Any], wrapper: str) -> None:
    check(fn, reflib.compile(fn, wrapper=wrapper, verify=True), C, V, I)
    torch._dynamo.reset()
    with torch.no_grad():
        e = reflib.explain(fn, C, V, I, target="sm_90")
    assert e.updates and not [u for u in e.updates if u.why]
    assert all("test_in_place.py" in u.source and str(u).endswith(")") for u in e.updates)
    if fn is not calls:
        assert e.memory.peak_bytes < C.nbytes / 2, e.memory.peak_bytes
    made = {b for n in walk(e.scheduled.nodes) if isinstance(n, Extern) for b in n.outputs if isinstance(b, str)}
    assert all(e.scheduled.buffers[b].numel.hint() < C.numel() for b in made)


def test_sizes_that_are_symbols() -> None:
    def fn(c: Any, v: Any, p: int) -> Any:
        c[1, :, p : p + 1] = v
        return c[1, :, : p + 1].sum(1)

    compiled = reflib.compile(fn, dynamic=True)
    for p in (5, 9, 2):
        check(fn, compiled, C, V, p)


@torch.library.custom_op("reflib_in_place::rows", mutates_args=("cache",))
def rows(cache: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(1, i, v)
    return v.sum(-1)


@rows.register_fake
def _(cache: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return v.sum(-1)


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_a_custom_op_writes_to_what_it_is_given(wrapper: str) -> None:
    def fn(c: Any, v: Any, i: Any) -> Any:
        a = rows(c[1], i, v)
        b = rows(c[0], i, v + a[..., None])
        return a + b, c[1].sum(1)

    check(fn, reflib.compile(fn, wrapper=wrapper, verify=True), C, V, I)
    torch._dynamo.reset()
    with torch.no_grad():
        e = reflib.explain(fn, C, V, I)
    assert len(e.updates) >= 2 and not [u for u in e.updates if u.why]
    assert e.memory.peak_bytes < C.nbytes / L


def shifted(c: Any, v: Any, i: Any) -> Any:
    c.copy_(torch.slice_scatter(c, c[:, :, :-1], 2, 1, S))


def layer_read_later(c: Any, v: Any, i: Any) -> Any:
    new = torch.index_copy(c[1], 1, i, v)
    old = c[1] * 2
    c.copy_(torch.select_scatter(c, new, 0, 1))
    return old


def halves(c: Any) -> Any:
    a, b = c.chunk(2, 1)
    a.copy_(b * 3)
    b.mul_(2)


def swapped(c: Any) -> Any:
    first = c[0].clone()
    c[0] = c[1]
    c[1] = first


def recurrence(c: Any) -> Any:
    for k in range(1, c.shape[1]):
        c[:, k] = c[:, k - 1] * 0.5 + c[:, k]


@pytest.mark.parametrize(
    "fn, wrapper, kernels, kept", [(halves, "cpp", 1, 0), (swapped, "python", 1, 0), (recurrence, "cpp", None, None)]
)
def test_slices_of_which_others_are_read(fn: Any, wrapper: str, kernels: Any, kept: Any) -> None:
    """In place where that costs no more than a copy of the whole, in one kernel if the slices are apart; where it is a
    copy, the report says so, once."""
    ours = torch.randn(32, 64 if fn is not recurrence else 32)
    check(fn, reflib.compile(fn, wrapper=wrapper, verify=True), ours)
    torch._dynamo.reset()
    e = reflib.explain(fn, ours, target="cpu")
    if kernels is None:
        (u,) = e.updates
        assert "older slices of" in u.why and u.copied == ours.nbytes
    else:
        assert not [u for u in e.updates if u.why] and len(e.kernels) == kernels and e.memory.peak_bytes == kept


@pytest.mark.parametrize("fn, why", [(shifted, "other elements|as it was"), (layer_read_later, "as it was before")])
def test_refused(fn: Callable[..., Any], why: str) -> None:
    graph = Graph(make_fx(fn, tracing_mode="fake")(C.clone(), V, I), "inference", frozenset())
    s = run(graph, Options(verify=True))
    ours, theirs = C.clone(), C.clone()
    got, want = s.call([ours, V, I]), fn(theirs, V, I)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(got[0] if want is not None else None, want)
    assert any(part in u.why for u in s.fused.updates for part in why.split("|"))
    assert any(u.copied for u in s.fused.updates)


# -- random programs ----------------------------------------------------------------------------------------
def program(rng: random.Random) -> Callable[..., Any]:
    """Updates of two inputs and a temporary, of parts of them, from each other, with reads in between."""
    steps = [(rng.randrange(13), rng.randrange(3), rng.randrange(3), rng.randrange(4), rng.random()) for _ in range(7)]

    def fn(x: Any, y: Any, i: Any) -> Any:
        tensors = [x, y, x * 2]
        results = []
        for kind, a, b, n, odds in steps:
            t, u = tensors[a], tensors[b]
            part = t[n % 3] if odds < 0.5 else t
            row = u[0].clone() if odds < 0.7 else u[1] * 1.5
            if kind == 0:
                part[n % 3] = row[0] if part.dim() == 2 else row
            elif kind == 1:
                part.index_copy_(part.dim() - 2, i, part.new_full((), n).expand_as(part[..., : len(i), :]))
            elif kind == 2:
                part[..., 1:3, :] = part[..., :2, :].clone() + row[1:3]
            elif kind == 3:
                part[..., n : n + 2] = row[:, :2]
            elif kind == 4:
                part.index_add_(part.dim() - 2, i, part[..., : len(i), :] * 2)
            elif kind == 5:
                part.mul_(1.25)
            elif kind == 6:
                t[:, i, n] = row[: len(i), 0]
            elif kind == 7:
                results.append(part.sum(-1))
            elif kind == 8:
                results.append(t[n % 3, ::2].clone())
            elif kind == 9:
                t[n % 3] = u[(n + 1) % 3]
            elif kind == 10:
                part.masked_fill_(part > 0.5, float(n))
            elif kind == 11:
                tensors[2] = t.transpose(1, 2).contiguous().transpose(1, 2)
            else:
                t.transpose(0, 1)[n, 1:] = row[n]
        return [*results, tensors[2]]

    return fn


def check_random(seed: int) -> int:
    """How many updates were made in place."""
    fn = program(random.Random(seed))
    g = torch.Generator().manual_seed(seed)
    args = [torch.randn(3, 5, 6, generator=g), torch.randn(3, 5, 6, generator=g), torch.tensor([3, 0])]
    traced = make_fx(torch.func.functionalize(fn, remove="mutations_and_views"), tracing_mode="fake")
    module = traced(*(a.clone() for a in args))
    s = run(Graph(module, "inference", frozenset()), Options(verify=True), until="fuse")
    ours, theirs = [a.clone() for a in args], [a.clone() for a in args]
    got, want = interpret(s.fused.program, ours), module(*theirs)
    torch.testing.assert_close(list(got), list(want), msg=f"seed {seed}")
    torch.testing.assert_close(ours, theirs, msg=f"seed {seed}")
    return sum(not u.why for u in s.fused.updates)


def test_random_programs() -> None:
    assert sum(map(check_random, range(8))) > 8


def test_slices_that_overlap_earlier_ones() -> None:
    """Rows read across the end of what was stored before, and stored over afterwards."""
    rng = random.Random(7)
    steps = [[(10, None), (0, 11), (12, None)]]
    steps += [[(rng.randrange(14), rng.choice([None, rng.randrange(14)])) for _ in range(5)] for _ in range(5)]
    for program in steps:

        def fn(x: torch.Tensor, y: torch.Tensor, program: Any = program) -> None:
            for to, of in program:
                x[to : to + 3] = y * 2 if of is None else x[of : of + 3].clone()

        torch._dynamo.reset()
        want, got, y = *[torch.arange(17.0 * 16).view(17, 16).clone() for _ in range(2)], torch.randn(3, 16)
        fn(want, y)
        with torch.no_grad():
            reflib.compile(fn, wrapper=rng.choice(("python", "cpp")), dynamic=False)(got, y)
        torch.testing.assert_close(got, want, msg=str(program))
