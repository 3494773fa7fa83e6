"""The fast path into a compiled function: the calls that take it agree with eager."""

import time

import pytest
import torch

import reflib
from reflib import fast_path
from reflib.fast_path import add_fast_path
from reflib.pipeline import Backend
from tests.fast_paths import Graphs, X, agree, breaks, call, close, compiled, double, known, warm

G = torch.full((4,), 3.0)
SCALE = 2.0


# -- the fast path ----------------------------------------------------------------------------------
def weighted(x, *ws, scale=1.0):
    for w in ws:
        x = torch.relu(x + w)
    return x * scale


def named(x, **ws):
    return (x + ws["a"]) * ws["b"]


def in_turn(x, **ws):
    for w in ws.values():
        x = x * 2 + w
    return x


def sized(x):
    return x.sum(0) * x.shape[0], x.shape


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.full((4,), 2.0))

    def forward(self, *xs, **more):
        return sum(xs) * self.by + more.get("plus", 0)


A, B, C, D = torch.randn(4, 4)
ABC = (A, B, C)
SLOW, FAST, EITHER = 0, 1, None
# name: (function, graphs, options of torch.compile, calls: (path, arguments, keywords))
CALLS = {
    "by position": (weighted, 1, {}, [(SLOW, ABC, {}), (FAST, ABC, {}), (FAST, ABC, {}), (FAST, (A, C, B), {})]),
    "by keyword": (double, 1, {}, [(SLOW, (A,), {}), (FAST, (), {"x": A}), (FAST, (), {"x": B})]),
    "sizes": (double, 3, {"dynamic": False}, [(path, (A[:n],), {}) for path in (SLOW, FAST, FAST) for n in (2, 3, 4)]),
    "dynamic sizes": (sized, 1, {"dynamic": True}, [
        (SLOW, (torch.randn(3, 4),), {}), *((FAST, (torch.randn(n, n + 1),), {}) for n in (5, 7, 9)),
    ]),
    "a keyword more": (weighted, 2, {"dynamic": False}, [
        (SLOW, ABC, {}), (FAST, ABC, {}), (SLOW, ABC, {"scale": 3.0}), (FAST, ABC, {"scale": 3.0}), (FAST, ABC, {}),
    ]),
    "numbers of arguments": (weighted, 5, {}, [
        *((SLOW, (A, *ABC[:n]), {}) for n in (1, 2, 3)), *((FAST, (A, *ABC[:n]), {}) for n in (1, 3, 2, 2)),
        (SLOW, (A, B.double()), {}), (FAST, (A, B.double()), {}), (EITHER, (A,), {}), (EITHER, (A,), {}),
    ]),
    "the same tensor twice": (weighted, None, {}, [
        (path, args, {}) for args in [ABC, (A, B, B), (A, A, B), (B, A, B), ABC] for path in (EITHER, FAST)
    ]),
    "keywords in another order": (named, 1, {}, [
        (SLOW, (A,), {"a": B, "b": C}), (FAST, (A,), {"b": C, "a": B}), (FAST, (), {"b": C, "x": A, "a": B}),
    ]),
    "the order of keywords matters": (in_turn, 4, {}, [
        *((path, (A,), kwargs) for kwargs in ({"a": B, "b": C}, {"b": C, "a": B}, {"b": C}, {"a": B, "b": C, "c": D})
          for path in (SLOW, FAST)), (FAST, (A,), {"a": B, "b": C}),
    ]),
    "a module": (Scaled(), None, {}, [
        (SLOW, (A, B), {}), (FAST, (A, B), {}), (EITHER, (A,), {"plus": B}), (FAST, (A,), {"plus": B}),
        (FAST, (A, B), {}),
    ]),
    "a method": (Scaled().forward, None, {}, [(SLOW, (A, B), {}), (FAST, (A, B), {})]),
    "fullgraph": (double, 1, {"fullgraph": True}, [(SLOW, (A,), {}), (FAST, (A,), {})]),
    "a graph break": (breaks, 2, {}, [(SLOW, (A,), {})] * 4),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_agree_with_eager_and_take_the_path(name):
    fn, graphs, options, calls = CALLS[name]
    f, backend = compiled(fn, **options)
    for path, args, kwargs in calls:
        agree(f, fn, *args, fast=path, **kwargs)
    assert graphs is None or backend.frame_count == graphs
    if name == "keywords in another order":
        with pytest.raises(KeyError):
            f(A, a=B)
    if name == "sizes":
        assert known(f).entries[0].check({"x": A}), "the most recent is checked first"


def test_bind_returns_the_frames_locals():
    def fn(x, /, y=2, *ws, z, k=5, **more):
        return dict(locals())

    bind = fast_path._bind(fn)
    for args, kwargs in [((1,), {"z": 3}), ((1, 2, 3, 4), {"z": 3, "b": 1, "x": 7}), ((1,), {"y": 4, "z": 5})]:
        assert bind(*args, **kwargs) == fn(*args, **kwargs)
    for args, kwargs in [((), {}), ((1,), {}), ((1, 2), {"y": 3, "z": 1})]:
        with pytest.raises(TypeError):
            bind(*args, **kwargs)


def test_fullgraph_raises_at_a_graph_break():
    f, _ = compiled(breaks, fullgraph=True)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            f(X)


def test_entries_of_other_backends_are_not_ours():
    (f, one), (g, two) = compiled(double), compiled(double)
    for path in (SLOW, FAST):
        agree(f, double, X, fast=path), agree(g, double, X, fast=path)
    assert one.frame_count == two.frame_count == 1 and len(known(f).entries) == len(known(g).entries) == 1


def test_is_faster():
    def fn(x, w):
        return torch.relu(x + w)

    def seconds(f):
        start = time.perf_counter()
        for _ in range(300):
            f(x, w)
        return time.perf_counter() - start

    x, w = torch.randn(8), torch.randn(8)
    backend = Backend(reflib.Options())
    slow = torch.compile(fn, backend=backend)
    fast = add_fast_path(slow, backend)
    fast(x, w)
    times = [(seconds(fast), seconds(slow)) for _ in range(25)]
    assert known(fast).hits == 25 * 300
    assert min(a for a, _ in times) < 0.9 * min(b for _, b in times)


def test_mixed_calls_equal_eager():
    def fn(x, n=2, *, k=1.0):
        y = torch.sin(x @ x.T) * n + k * SCALE
        return {"y": y, "grad": torch.is_grad_enabled(), "sums": [y.sum(), x.shape[0]]}

    f, backend = compiled(fn)
    torch.manual_seed(0)
    inputs = [torch.randn(s, s + 1, dtype=d) for s in (2, 3, 5) for d in (torch.float32, torch.float64)]
    inputs += [torch.randn(2, 3).requires_grad_(), torch.randn(3, 2).T, torch.randn(2, 3, device="meta")]
    autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    modes = [torch.enable_grad, torch.no_grad, torch.inference_mode, autocast]
    calls = [((), {}), ((3,), {}), ((), {"n": 2}), ((), {"k": 4.0}), ((2,), {"k": 1.0})]
    generator = torch.Generator().manual_seed(1)
    with torch._dynamo.config.patch(recompile_limit=200):
        for _ in range(250):
            a, b, c = (int(torch.randint(n, (), generator=generator)) for n in (len(inputs), len(modes), len(calls)))
            args, kwargs = calls[c]
            with modes[b]():
                got, expected = f(inputs[a], *args, **kwargs), fn(inputs[a], *args, **kwargs)
            assert got["grad"] == expected["grad"] and got["sums"][1] == expected["sums"][1]
            y, z = got["y"], expected["y"]
            assert (y.dtype, y.device, y.requires_grad) == (z.dtype, z.device, z.requires_grad)
            assert y.is_inference() == z.is_inference()
            if y.device.type != "meta":
                close(y, z)
    assert known(f).hits > 60 and backend.frame_count > 10


def test_current_defaults_are_used():
    def fn(x, n=2, *, k=1):
        return x * n + k

    f = warm(fn, X)
    assert call(f, X).tolist() == [3, 3, 3]
    fn.__defaults__ = (5,)
    assert f(X).tolist() == [6, 6, 6]
    fn.__kwdefaults__["k"] = 2
    assert f(X).tolist() == [7, 7, 7]
    fn.__kwdefaults__ = {"k": 3}
    assert f(X).tolist() == call(f, X).tolist() == [8, 8, 8]


def test_current_code_is_used():
    def fn(x):
        return x + 1

    f = warm(fn, X)
    call(f, X)
    for other, value in ((lambda x: x - 1, 0), (lambda *xs: xs[0] * 5, 5)):
        fn.__code__ = other.__code__
        assert f(X).tolist() == call(f, X).tolist() == [value] * 3
    fn.__code__ = (lambda x: (y for y in (x * 6,))).__code__
    for _ in range(3):
        assert [y.tolist() for y in call(f, X, fast=0)] == [[6, 6, 6]]


def test_globals_and_closures_are_read_at_each_call(monkeypatch):
    factor, t = 2, torch.ones(4)

    def fn(x):
        return x * factor + G * SCALE + t

    x = torch.ones(4)
    f = warm(fn, x)
    agree(f, fn, x)
    monkeypatch.setitem(globals(), "G", torch.full((4,), -1.0))
    agree(f, fn, x)
    monkeypatch.setitem(globals(), "SCALE", 7.0)
    agree(f, fn, x, fast=0)
    factor = 9
    agree(f, fn, x, fast=None)
    t = torch.zeros(4)
    agree(f, fn, x)
    t = torch.zeros(4, dtype=torch.float64)
    agree(f, fn, x, fast=None)


def test_an_empty_cell():
    def fn(x):
        return x + late

    f, _ = compiled(fn)
    for _ in range(2):
        with pytest.raises((NameError, torch._dynamo.exc.Unsupported)):
            f(X)
    late = 4.0
    for _ in range(3):
        assert f(X).tolist() == [5, 5, 5]


def test_mutation_of_inputs_and_gradients():
    def fn(x, w):
        x.mul_(2)
        return (x * w).sum()

    f = reflib.compile(fn)
    for _ in range(3):
        x, w = torch.randn(5), torch.randn(5, requires_grad=True)
        x2, w2 = x.clone(), w.detach().clone().requires_grad_()
        f(x, w).backward()
        fn(x2, w2).backward()
        close((x, w.grad), (x2, w2.grad))
    assert known(f).hits == 2


def test_methods():
    class Scaler:
        def __init__(self, by):
            self.by = by

        @reflib.compile
        def scale(self, x, plus=0):
            return x * self.by + plus

        def other(self, x):
            return x - self.by

    a, b = Scaler(2.0), Scaler(3.0)
    for _ in range(3):
        assert a.scale(X).tolist() == [2, 2, 2]
        assert b.scale(X, plus=1).tolist() == [4, 4, 4]
    assert Scaler.scale._reflib_entries.hits > 0
    f = warm(a.other, X)
    assert call(f, X).tolist() == call(f, x=X).tolist() == [-1, -1, -1]


# -- *args and **kwargs -----------------------------------------------------------------------------


def test_inputs_among_args_are_mutated():
    def fn(x, *ws, **more):
        ws[0].add_(x)
        more["out"].copy_(ws[1] * 2)
        return ws[0] + more["out"]

    f = reflib.compile(fn)
    for n in range(3):
        tensors = [torch.randn(4) for _ in range(4)]
        others = [t.clone() for t in tensors]
        close(f(*tensors[:3], out=tensors[3]), fn(*others[:3], out=others[3]))
        close(tensors, others)
        assert known(f).hits == n
    w = torch.randn(4, requires_grad=True)
    for g in (f, fn):
        g(torch.ones(4), torch.zeros(4), w, out=torch.zeros(4)).sum().backward()
    assert w.grad.tolist() == [4, 4, 4, 4]


def test_args_that_are_returned_captured_and_passed_on():
    def total(*vs):
        return sum(vs[1:], vs[0])

    def fn(x, *ws, **more):
        def within():
            return x + ws[0] + more["b"]

        a, *rest = ws
        return within(), ws[1:], {**more, "new": a * 2}, total(x, *rest), len(ws)

    x, ws = torch.randn(4), [torch.randn(4) for _ in range(3)]
    f = warm(fn, x, *ws, b=x)
    got, expected = call(f, x, *ws, b=x), fn(x, *ws, b=x)
    close(got, expected)
    assert list(got[2]) == ["b", "new"] and got[2]["b"] is x and got[4] == 3
    assert type(got[1]) is tuple and all(a is b for a, b in zip(got[1], ws[1:], strict=True))


def test_functions_that_share_their_code():
    """And so Dynamo's entries: guards on the free variable tell them apart. Those of one decorator; torch's own, which
    Dynamo wraps into ``inner(*args, **kwargs)``."""

    def decorated(fn):
        def wrapper(*args, **kwargs):
            return fn(*args, **kwargs)

        return wrapper

    mine = [
        (decorated(double), (X,), {}), (decorated(weighted), (X, X), {"scale": 2.0}),
        (decorated(lambda x, **k: x - k["by"]), (X,), {"by": 4}),
    ]  # fmt: skip
    torchs = [(fn, (torch.randn(3),), {}) for fn in (torch.sin, torch.cos, torch.nn.functional.relu)]
    for rows in (mine, torchs):
        backend = Graphs()
        made = [compiled(fn, backend)[0] for fn, _, _ in rows]
        for _ in range(4):
            for f, (fn, args, kwargs) in zip(made, rows, strict=True):
                agree(f, fn, *args, fast=None, **kwargs)
        assert backend.frame_count == 3 and all(known(f).hits >= 2 for f in made)


def test_the_bytecode_of_args():
    """As this Python compiles it: Dynamo's differs between versions in the same places."""

    def called(*lines):
        scope = {}
        exec("def f(x, *ws, **more):\n" + "\n".join("    " + line for line in lines), scope)
        return fast_path._called(scope["f"].__code__)

    graph, utils = "__compiled_fn_1", "__import_torch_dot__dynamo_dot_utils"
    result = "return y[0], ws, {'a': more, 'b': [ws[1]]}"
    assert called(f"y = {graph}(x, ws[0], more['a'])", result) == {graph}
    assert called("a, b = ws", f"y = {graph}(a, b)", result) == {graph}
    assert called(f"size = {utils}.call_size", f"y = {graph}(size(ws[0], 1), x)", result) == {graph, utils}
    assert called(f"{graph}(x)", "return None") == {graph}
    for line in [
        "ws[0].add_(x)", "more.update(a=x)", "more['a'] = x", "del more['a']", "x.y = ws", "x = f(ws)", "x = f(*ws)",
        f"x = {graph}(*ws)", "x = [w for w in ws]", "x = more if ws else x", f"x = {utils}.other(x)", "x = ws[0](x)",
    ]:  # fmt: skip
        assert called(f"y = {graph}(x)", line, result) is None, line
