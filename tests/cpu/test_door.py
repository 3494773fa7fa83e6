"""The short way into a compiled function: taken when it makes no difference, and only then."""

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import reflib
from reflib.capture import door as the_door
from reflib.capture.door import door

G = torch.full((4,), 3.0)
SCALE = 2.0


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs(CompileCounter):
    """A backend that runs what Dynamo captured, and counts."""

    def __call__(self, gm, inputs):
        self.frame_count += 1
        return gm.forward


def compiled(fn, **options):
    """``fn`` behind a door, with a backend that costs nothing."""
    return door(torch.compile(fn, backend=(backend := Graphs()), **options), backend), backend


def known(opened):
    return (opened.forward if isinstance(opened, torch.nn.Module) else opened)._reflib_entries


def takes(opened, *args, short=1, **kwargs):
    """The result of a call, which must have been a short one (0: a long one)."""
    before = known(opened).taken
    result = opened(*args, **kwargs)
    assert known(opened).taken - before == short
    return result


def double(x):
    return x * 2 + 1


# -- the short way ----------------------------------------------------------------------------------
def test_is_taken_from_the_second_call_on_and_is_right():
    def fn(x, w):
        return torch.relu(x + w)

    f = reflib.compile(fn)
    x, w = torch.randn(64), torch.randn(64)
    f(x, w)
    for _ in range(3):
        torch.testing.assert_close(takes(f, x, w), fn(x, w))
    torch.testing.assert_close(takes(f, w=w, x=x), fn(x, w))


def test_is_faster():
    def fn(x, w):
        return torch.relu(x + w)

    def seconds(f):
        start = time.perf_counter()
        for _ in range(300):
            f(x, w)
        return time.perf_counter() - start

    x, w = torch.randn(8), torch.randn(8)
    backend = reflib.pipeline.Backend(reflib.Options())
    long = torch.compile(fn, backend=backend)
    short = door(long, backend)
    short(x, w)
    times = [(seconds(short), seconds(long)) for _ in range(15)]
    assert known(short).taken == 15 * 300
    assert min(a for a, _ in times) < 0.8 * min(b for _, b in times)


def test_mixed_calls_equal_eager():
    def fn(x, n=2, *, k=1.0):
        y = torch.sin(x @ x.T) * n + k * SCALE
        return {"y": y, "grad": torch.is_grad_enabled(), "sums": [y.sum(), x.shape[0]]}

    f, backend = compiled(fn)
    torch.manual_seed(0)
    inputs = [torch.randn(s, s + 1, dtype=d) for s in (2, 3, 5) for d in (torch.float32, torch.float64)]
    inputs += [torch.randn(2, 3).requires_grad_(), torch.randn(3, 2).T, torch.randn(2, 3, device="meta")]
    modes = [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ]
    calls = [((), {}), ((3,), {}), ((), {"n": 2}), ((), {"k": 4.0}), ((2,), {"k": 1.0})]
    generator = torch.Generator().manual_seed(1)
    torch._dynamo.config.recompile_limit, limit = 200, torch._dynamo.config.recompile_limit
    try:
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
                torch.testing.assert_close(y, z)
    finally:
        torch._dynamo.config.recompile_limit = limit
    assert known(f).taken > 60 and backend.frame_count > 10


def test_recompiles_and_prefers_what_holds():
    f, backend = compiled(double, dynamic=False)
    sizes = [2, 3, 4]
    for n in sizes:
        takes(f, torch.ones(n), short=0)
    for n in sizes * 2:
        torch.testing.assert_close(takes(f, torch.ones(n)), double(torch.ones(n)))
        assert known(f).entries[0].check({"x": torch.ones(n)})
    assert backend.frame_count == 3


def test_dynamic_sizes():
    def fn(x):
        return x.sum(0) * x.shape[0], x.shape

    f, backend = compiled(fn, dynamic=True)
    f(torch.randn(3, 4))
    for n in (5, 7, 9):
        x = torch.randn(n, n + 1)
        got, shape = takes(f, x)
        torch.testing.assert_close(got, fn(x)[0])
        assert shape == x.shape
    assert backend.frame_count == 1


def test_defaults_are_those_of_the_moment():
    def fn(x, n=2, *, k=1):
        return x * n + k

    f, _ = compiled(fn)
    x = torch.ones(3)
    f(x)
    assert takes(f, x).tolist() == [3, 3, 3]
    fn.__defaults__ = (5,)
    assert f(x).tolist() == [6, 6, 6]
    fn.__kwdefaults__["k"] = 2
    assert f(x).tolist() == [7, 7, 7]
    fn.__kwdefaults__ = {"k": 3}
    assert f(x).tolist() == [8, 8, 8]
    assert takes(f, x).tolist() == [8, 8, 8]


def test_another_code():
    def fn(x):
        return x + 1

    f, _ = compiled(fn)
    x = torch.ones(3)
    f(x), takes(f, x)
    fn.__code__ = (lambda x: x - 1).__code__
    assert f(x).tolist() == [0, 0, 0]
    assert takes(f, x).tolist() == [0, 0, 0]
    fn.__code__ = (lambda *xs: xs[0] * 5).__code__
    assert f(x).tolist() == [5, 5, 5]
    assert takes(f, x).tolist() == [5, 5, 5]
    fn.__code__ = (lambda x: (y for y in (x * 6,))).__code__
    for _ in range(3):
        assert [y.tolist() for y in takes(f, x, short=0)] == [[6, 6, 6]]


def test_globals_and_closures_are_read_at_each_call():
    global G, SCALE
    factor, t = 2, torch.ones(4)

    def fn(x):
        return x * factor + G * SCALE + t

    def change(value):
        nonlocal factor
        factor = value

    f, _ = compiled(fn)
    x = torch.ones(4)
    f(x)
    before = G, SCALE
    try:
        torch.testing.assert_close(takes(f, x), fn(x))
        G = torch.full((4,), -1.0)
        torch.testing.assert_close(takes(f, x), fn(x))
        SCALE = 7.0
        torch.testing.assert_close(f(x), fn(x))
        change(9)
        torch.testing.assert_close(f(x), fn(x))
        t = torch.zeros(4)
        torch.testing.assert_close(takes(f, x), fn(x))
        t = torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(f(x), fn(x))
    finally:
        G, SCALE = before


def test_an_empty_cell():
    def fn(x):
        return x + late

    f, _ = compiled(fn)
    for _ in range(2):
        with pytest.raises((NameError, torch._dynamo.exc.Unsupported)):
            f(torch.ones(3))
    late = 4.0
    for _ in range(3):
        assert f(torch.ones(3)).tolist() == [5, 5, 5]


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
        torch.testing.assert_close(x, x2)
        torch.testing.assert_close(w.grad, w2.grad)
    assert known(f).taken == 2


def test_methods():
    class Scaler:
        def __init__(self, by):
            self.by = by

        @reflib.compile
        def scale(self, x, plus=0):
            return x * self.by + plus

        def other(self, x):
            return x - self.by

    a, b, x = Scaler(2.0), Scaler(3.0), torch.ones(3)
    for _ in range(3):
        assert a.scale(x).tolist() == [2, 2, 2]
        assert b.scale(x, plus=1).tolist() == [4, 4, 4]
    assert Scaler.scale._reflib_entries.taken > 0
    f, _ = compiled(a.other)
    f(x)
    assert takes(f, x).tolist() == takes(f, x=x).tolist() == [-1, -1, -1]


# -- *args and **kwargs -----------------------------------------------------------------------------
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


def test_what_bind_returns_is_the_frames_locals():
    free = object()

    def positional(x, /, y=2, *ws, z, k=5, **more):
        return dict(locals())

    def rest(*args):
        return dict(locals())

    def others(**kwargs):
        return dict(locals())

    def closed(*args, x=1, **kwargs):
        _ = free
        return dict(locals(), _=None)

    calls = [
        (positional, [((1,), {"z": 3}), ((1, 2, 3, 4), {"z": 3, "b": 1, "a": 2, "x": 7}), ((1,), {"y": 4, "z": 5})]),
        (rest, [((), {}), ((1,), {}), ((1, (2,)), {})]),
        (others, [((), {}), ((), {"self": 1, "args": 2, "bind": 3})]),
        (closed, [((), {}), ((1, 2), {"x": 3, "kwargs": 4})]),
    ]
    for fn, ways in calls:
        bind = the_door._bind(fn)
        for args, kwargs in ways:
            got, expected = bind(*args, **kwargs), fn(*args, **kwargs)
            expected.pop("_", None)
            assert got == expected
            assert [list(v) for v in got.values() if type(v) is dict] == [
                list(v) for v in expected.values() if type(v) is dict
            ]
    for args, kwargs in [((), {}), ((1,), {}), ((1, 2), {"y": 3, "z": 1})]:
        with pytest.raises(TypeError):
            the_door._bind(positional)(*args, **kwargs)


def test_a_list_of_weights():
    f = reflib.compile(weighted, dynamic=False)
    x, ws = torch.randn(8), [torch.randn(8) for _ in range(3)]
    f(x, *ws)
    torch.testing.assert_close(takes(f, x, *ws), weighted(x, *ws))
    torch.testing.assert_close(takes(f, x, *ws[::-1]), weighted(x, *ws[::-1]))
    f(x, *ws, scale=3.0)
    torch.testing.assert_close(takes(f, x, *ws, scale=3.0), weighted(x, *ws, scale=3.0))
    torch.testing.assert_close(takes(f, x, *ws), weighted(x, *ws))


def test_other_numbers_of_arguments_recompile():
    f, backend = compiled(weighted)
    x, ws = torch.randn(4), [torch.randn(4) for _ in range(4)]
    for n in range(1, 5):
        takes(f, x, *ws[:n], short=0)
        assert backend.frame_count == n
    for n in (1, 4, 2, 3, 3):
        torch.testing.assert_close(takes(f, x, *ws[:n]), weighted(x, *ws[:n]))
    torch.testing.assert_close(takes(f, x, *[w.double() for w in ws], short=0), weighted(x, *[w.double() for w in ws]))
    assert backend.frame_count == 5
    f(x)  # without any there is nothing but a number to multiply by
    torch.testing.assert_close(f(x), x)


def test_the_same_tensor_twice_among_args():
    f, _ = compiled(weighted)
    x, w, v = torch.randn(4), torch.randn(4), torch.randn(4)
    f(x, w, v)
    for args in [(x, w, v), (x, w, w), (x, x, w), (w, x, w), (x, w, v)]:
        torch.testing.assert_close(f(*args), weighted(*args))
        torch.testing.assert_close(takes(f, *args), weighted(*args))


def test_keywords_in_other_orders():
    x, a, b = torch.randn(4), torch.randn(4), torch.randn(4)
    f, backend = compiled(named)
    f(x, a=a, b=b)
    torch.testing.assert_close(takes(f, x, b=b, a=a), named(x, a=a, b=b))
    torch.testing.assert_close(takes(f, b=b, x=x, a=a), named(x, a=a, b=b))
    assert backend.frame_count == 1
    with pytest.raises(KeyError):
        f(x, a=a)
    f, backend = compiled(in_turn)  # whose result depends on the order, and its guards do
    for n, kwargs in enumerate([{"a": a, "b": b}, {"b": b, "a": a}, {"b": b}, {"a": a, "b": b, "c": a}], 1):
        torch.testing.assert_close(takes(f, x, **kwargs, short=0), in_turn(x, **kwargs))
        torch.testing.assert_close(takes(f, x, **kwargs), in_turn(x, **kwargs))
        assert backend.frame_count == n
    torch.testing.assert_close(takes(f, x, a=a, b=b), in_turn(x, a=a, b=b))


def test_inputs_among_args_are_mutated():
    def fn(x, *ws, **more):
        ws[0].add_(x)
        more["out"].copy_(ws[1] * 2)
        return ws[0] + more["out"]

    f = reflib.compile(fn)
    for n in range(3):
        tensors = [torch.randn(4) for _ in range(4)]
        others = [t.clone() for t in tensors]
        torch.testing.assert_close(f(*tensors[:3], out=tensors[3]), fn(*others[:3], out=others[3]))
        torch.testing.assert_close(tensors, others)
        assert known(f).taken == n
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

    f, _ = compiled(fn)
    x, ws = torch.randn(4), [torch.randn(4) for _ in range(3)]
    f(x, *ws, b=x)
    got, expected = takes(f, x, *ws, b=x), fn(x, *ws, b=x)
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(list(got[2].values()), list(expected[2].values()))
    assert list(got[2]) == ["b", "new"] and got[2]["b"] is x and got[4] == 3
    assert type(got[1]) is tuple and all(a is b for a, b in zip(got[1], ws[1:], strict=True))
    torch.testing.assert_close(got[3], expected[3])


def test_a_dict_of_keywords_that_changes_goes_the_long_way():
    def fn(x, **more):
        more["new"] = x + 1
        return more

    f, _ = compiled(fn)
    for _ in range(3):
        got = takes(f, torch.ones(2), b=3, short=0)
        assert got["b"] == 3 and got["new"].tolist() == [2, 2] and list(got) == ["b", "new"]


def test_functions_of_one_decorator():
    """They share their code, and so Dynamo's entries: guards on the free variable tell them apart."""

    def decorated(fn):
        def wrapper(*args, **kwargs):
            return fn(*args, **kwargs)

        return wrapper

    backend = Graphs()
    x = torch.ones(3)
    functions = [decorated(double), decorated(weighted), decorated(lambda x, **k: x - k["by"])]
    calls = [((x,), {}), ((x, x), {"scale": 2.0}), ((x,), {"by": 4})]
    doors = [door(torch.compile(fn, backend=backend), backend) for fn in functions]
    for _ in range(4):
        for f, fn, (args, kwargs) in zip(doors, functions, calls, strict=True):
            torch.testing.assert_close(f(*args, **kwargs), fn(*args, **kwargs))
    assert backend.frame_count == 3 and all(known(f).taken >= 2 for f in doors)


def test_torchs_own_functions():
    """Dynamo wraps them into ``inner(*args, **kwargs)``, of one code for them all."""
    backend, x = Graphs(), torch.randn(3)
    functions = [torch.sin, torch.cos, torch.nn.functional.relu]
    doors = [door(torch.compile(fn, backend=backend), backend) for fn in functions]
    for _ in range(4):
        for f, fn in zip(doors, functions, strict=True):
            torch.testing.assert_close(f(x), fn(x))
    assert backend.frame_count == 3 and all(known(f).taken >= 2 for f in doors)


def test_the_bytecode_of_args():
    """As this Python compiles it: Dynamo's differs between versions in the same places."""

    def called(*lines):
        scope = {}
        exec("def f(x, *ws, **more):\n" + "\n".join("    " + line for line in lines), scope)
        return the_door._called(scope["f"].__code__)

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


def test_methods_and_modules_with_args():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.by = torch.nn.Parameter(torch.full((3,), 2.0))

        def forward(self, *xs, **more):
            return sum(xs) * self.by + more.get("plus", 0)

    model, x = Scaled(), torch.ones(3)
    f = reflib.compile(model)
    f(x, x)
    torch.testing.assert_close(takes(f, x, x), model(x, x))
    f(x, plus=x)
    torch.testing.assert_close(takes(f, x, plus=x), model(x, plus=x))
    torch.testing.assert_close(takes(f, x, x), model(x, x))
    g, _ = compiled(model.forward)
    g(x, x)
    torch.testing.assert_close(takes(g, x, x), model(x, x))


# -- the long way -----------------------------------------------------------------------------------
def breaks(x):
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


class Counted:
    n = 0


def stores(x, counted):
    counted.n += 1
    return x + 1


def test_graph_breaks_and_side_effects():
    x, counted = torch.ones(3), Counted()
    f, backend = compiled(breaks)
    for _ in range(4):
        assert takes(f, x, short=0).tolist() == [4, 4, 4]
    assert backend.frame_count == 2 and known(f).entries == ()
    f, _ = compiled(stores)
    for _ in range(4):
        takes(f, x, counted, short=0)
    assert counted.n == 4


def test_generators_are_not_bound():
    f, _ = compiled(lambda x: (y for y in x))
    for _ in range(3):
        assert list(takes(f, torch.ones(3), short=0)) == [1, 1, 1]
    f, _ = compiled(yields)
    assert not hasattr(f, "_reflib_entries")


def yields(x):
    yield x + 1


def test_wrong_calls_raise_as_before():
    f, _ = compiled(double)
    f(torch.ones(3))
    for args, kwargs in [((), {}), ((1, 2), {}), ((torch.ones(3),), {"y": 1}), ((torch.ones(3),), {"x": 1})]:
        with pytest.raises(TypeError, match=r"double\(\)"):
            f(*args, **kwargs)
    takes(f, torch.ones(3))


def test_exceptions_come_through_and_the_next_call_is_right():
    def fn(x, bad):
        if bad:
            raise ValueError("bad")
        return torch.linalg.cholesky(x)

    f, _ = compiled(fn)
    good, wrong = torch.eye(3), -torch.eye(3)
    f(good, False)
    for _ in range(2):
        with pytest.raises(torch.linalg.LinAlgError):
            takes(f, wrong, False)
        with pytest.raises(ValueError, match="bad"):
            f(good, True)
        torch.testing.assert_close(takes(f, good, False), good)
    with pytest.raises(TypeError):
        f(3, None, 4)
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile"])
def test_stances(stance):
    f, _ = compiled(double)
    x = torch.ones(3)
    f(x)
    with torch.compiler.set_stance(stance):
        takes(f, x, short=0)
        if stance == "fail_on_recompile":
            with pytest.raises(RuntimeError, match="recompile"):
                f(x.double())
    takes(f, x)
    with torch.compiler.set_stance("default", force_backend="eager"):
        takes(f, x, short=0)
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        takes(f, x, short=0)
    with torch.compiler.set_stance("default"):
        takes(f, x)


def test_modes_transforms_and_tracers():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    f, _ = compiled(double)
    x = torch.ones(3)
    f(x)
    for mode in (Seen(), Functions(), torch.device("cpu"), torch.profiler.profile()):
        with mode:
            torch.testing.assert_close(takes(f, x, short=0), double(x))
    for transform in (torch.func.vmap, torch.func.grad):
        other = torch.func.vmap(f) if transform is torch.func.vmap else torch.func.grad(lambda x: f(x).sum())
        plain = torch.func.vmap(double) if transform is torch.func.vmap else torch.func.grad(lambda x: double(x).sum())
        before = known(f).taken
        torch.testing.assert_close(other(x), plain(x))
        assert known(f).taken == before
    with pytest.raises(RuntimeError):
        torch.jit.trace(f, (x,))
    with pytest.raises(RuntimeError, match="FX"):
        torch.fx.symbolic_trace(f)
    takes(f, x)


def test_a_profile_shows_what_it_did():
    f, _ = compiled(double)
    x = torch.ones(3)
    f(x), takes(f, x)
    with torch.profiler.profile() as p:
        f(x)
    names = {e.key for e in p.key_averages()}
    assert any("Torch-Compiled Region" in n for n in names), names


def test_inside_a_compiled_function():
    inner, _ = compiled(double)
    x = torch.ones(3)
    inner(x), takes(inner, x)

    def outer(x):
        return inner(x) * 3

    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return inner(y) * 3

    def with_a_skipped_frame(x):
        return torch._dynamo.disable(lambda y: inner(y))(x) * 3

    for fn in (outer, broken, with_a_skipped_frame):
        f, backend = compiled(fn)
        for _ in range(3):
            torch.testing.assert_close(f(x), fn(x))
        assert backend.frame_count >= 1
    f, backend = compiled(outer, fullgraph=True)
    torch.testing.assert_close(f(x), outer(x))
    torch.testing.assert_close(takes(f, x), outer(x))
    assert backend.frame_count == 1
    takes(inner, x)


def test_a_callback_that_is_set_sees_a_call():
    f, _ = compiled(double)
    x = torch.ones(3)
    f(x)
    with torch._dynamo.config.patch(raise_on_ctx_manager_usage=False), torch._dynamo.optimize("eager"):
        before = known(f).taken
        result = f(x)
    assert known(f).taken == before
    torch.testing.assert_close(result, double(x))
    assert torch._dynamo.run(f)(x).tolist() == double(x).tolist()


# -- what ends an entry -----------------------------------------------------------------------------
def test_reset_recompiles():
    f, backend = compiled(double)
    x = torch.ones(3)
    for n in range(1, 4):
        takes(f, x, short=0)
        takes(f, x)
        assert backend.frame_count == n
        torch._dynamo.reset()


def test_reset_frees_the_graph():
    graphs = []

    class Weak:
        def __call__(self, gm, inputs):
            graphs.append(weakref.ref(gm))
            return gm.forward

    backend = Weak()
    f = door(torch.compile(double, backend=backend), backend)
    f(torch.ones(3)), takes(f, torch.ones(3))
    torch._dynamo.reset()
    gc.collect()
    assert [g() for g in graphs] == [None]
    takes(f, torch.ones(3), short=0)
    assert len(graphs) == 2 and graphs[1]() is not None


def test_an_invalidated_entry():
    class Holder:
        pass

    holder = Holder()
    holder.module = torch.nn.Linear(3, 3)

    def fn(x):
        return holder.module(x)

    f, backend = compiled(fn)
    x = torch.ones(3)
    f(x), takes(f, x)
    count = backend.frame_count
    holder.module = torch.nn.Linear(3, 3)
    gc.collect()
    torch.testing.assert_close(f(x), fn(x))
    torch.testing.assert_close(f(x), fn(x))
    assert backend.frame_count >= count


def test_the_recompile_limit():
    with torch._dynamo.config.patch(recompile_limit=2):
        f, backend = compiled(double, dynamic=False)
        for n in (2, 3, 4, 5, 2, 3, 4):
            torch.testing.assert_close(f(torch.ones(n)), double(torch.ones(n)))
        assert backend.frame_count == 2 and known(f).shut
        takes(f, torch.ones(2), short=0)
    torch._dynamo.reset()
    f(torch.ones(2))
    takes(f, torch.ones(2))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        f, _ = compiled(double, fullgraph=True, dynamic=False)
        f(torch.ones(2))
        for _ in range(2):
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                f(torch.ones(3))


def test_fullgraph_raises_at_a_graph_break():
    f, _ = compiled(breaks, fullgraph=True)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            f(torch.ones(3))
    f, _ = compiled(double, fullgraph=True)
    f(torch.ones(3)), takes(f, torch.ones(3))


def test_entries_of_other_backends_are_not_ours():
    f, one = compiled(double)
    g, two = compiled(double)
    x = torch.ones(3)
    f(x), g(x)
    takes(f, x), takes(g, x)
    assert one.frame_count == two.frame_count == 1 and len(known(f).entries) == len(known(g).entries) == 1


# -- threads and recursion --------------------------------------------------------------------------
def test_threads():
    def fn(x, n):
        return x * n

    f, _ = compiled(fn, dynamic=False)
    wrong, resets = [], 3

    def work(seed):
        for i in range(200):
            n = (i + seed) % 4 + 1
            x = torch.full((n,), 2.0)
            with torch.no_grad() if seed % 2 else torch.enable_grad():
                try:
                    if f(x, n).tolist() != [2.0 * n] * n:
                        wrong.append((seed, i))
                except BaseException as e:
                    wrong.append(e)

    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(resets):
            threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            torch._dynamo.reset()
    assert not wrong
    assert known(f).taken > 100


def test_recursion():
    @torch.library.custom_op("reflib_test::down", mutates_args=())
    def down(x: torch.Tensor, n: int) -> torch.Tensor:
        return f(x, n - 1) if n else x.clone()

    @down.register_fake
    def _(x, n):
        return torch.empty_like(x)

    def fn(x, n):
        return torch.ops.reflib_test.down(x, n) + 1

    f, _ = compiled(fn)
    x = torch.zeros(3)
    for _ in range(3):
        assert f(x, 3).tolist() == [4, 4, 4]
    assert known(f).taken


# -- modules ----------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)
        self.seen: list[str] = []

    def forward(self, x, scale=1.0):
        return self.drop(torch.relu(self.linear(x))) * scale


def test_modules():
    model = Model().eval()
    f = reflib.compile(model)
    x = torch.randn(2, 4)
    assert isinstance(f, torch._dynamo.OptimizedModule) and f._orig_mod is model
    assert list(f.state_dict()) == ["_orig_mod." + n for n in model.state_dict()]
    f(x)
    torch.testing.assert_close(takes(f, x), model(x))
    with torch.no_grad():
        model.linear.weight.mul_(2)
    torch.testing.assert_close(takes(f, x), model(x))
    takes(f, x).sum().backward()
    assert model.linear.weight.grad is not None
    f(x, scale=2.0)
    torch.testing.assert_close(takes(f, x, scale=2.0), model(x, 2.0))
    f.train()
    assert model.training and (f(torch.ones(64, 4)) == 0).any()
    f.eval()
    torch.testing.assert_close(takes(f, x), model(x))
    model.linear = torch.nn.Linear(4, 4)
    torch.testing.assert_close(f(x), model(x))
    copied = copy.deepcopy(model)
    torch.testing.assert_close(reflib.compile(copied)(x), model(x))


def test_hooks_of_modules_run():
    model = Model().eval()
    f, _ = compiled(model)
    x = torch.randn(2, 4)
    f(x), takes(f, x)
    handles = [
        model.register_forward_hook(lambda m, i, o: o + 1),
        model.register_forward_pre_hook(lambda m, i: (i[0] * 2,)),
    ]
    for _ in range(3):
        torch.testing.assert_close(takes(f, x, short=0), model(x))
    for h in handles:
        h.remove()
    torch.testing.assert_close(f(x), model(x))
    torch.testing.assert_close(takes(f, x), model(x))
    outer = f.register_forward_hook(lambda m, i, o: o - 1)
    torch.testing.assert_close(takes(f, x), model(x) - 1)
    outer.remove()
    model.forward = lambda x: x + 5
    torch.testing.assert_close(takes(f, x, short=0), x + 5)
    del model.forward
    torch.testing.assert_close(f(x), model(x))


def test_a_module_within_another():
    f, _ = compiled(Model().eval())
    outer, backend = compiled(torch.nn.Sequential(f, torch.nn.ReLU()))
    x = torch.randn(2, 4)
    f(x)
    for _ in range(3):
        torch.testing.assert_close(outer(x), f(x).relu())
    assert backend.frame_count == 1


# -- what reflib.compile returns --------------------------------------------------------------------
def documented(x, n=1):
    """What it does."""
    return x + n


def test_the_attributes_are_those_of_torchs_wrapper():
    f, theirs = reflib.compile(documented), torch.compile(documented)
    assert type(f) is type(theirs)
    assert (f.__name__, f.__qualname__, f.__doc__, f.__module__) == ("documented",) * 2 + ("What it does.", __name__)
    assert f.__wrapped__ is documented and f._torchdynamo_orig_callable is documented
    assert set(theirs.__dict__) <= set(f.__dict__)
    assert torch._dynamo.eval_frame.innermost_fn(f) is documented
    assert torch.compiler.disable(f)(torch.ones(2)).tolist() == [2, 2]
    assert weakref.ref(f)() is f and copy.deepcopy(f) is f
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(f)
    f(torch.ones(2))
    assert torch._dynamo.explain(f)(torch.ones(2)).graph_count == 1
    assert torch.compile(f, backend="eager")(torch.ones(2)).tolist() == [2, 2]
    assert reflib.compile(f)(torch.ones(2)).tolist() == [2, 2]
    assert reflib.wait_for_tuning(f).finished and reflib.tuning_progress(f).total == 0


def test_without_the_private_api_it_is_torchs_own(monkeypatch):
    monkeypatch.setattr(the_door, "_api", lambda: None)
    f = reflib.compile(double)
    assert not hasattr(f, "_reflib_entries")
    assert f(torch.ones(2)).tolist() == [3, 3]


def test_an_api_that_behaves_otherwise_shuts_the_door():
    f, _ = compiled(double)
    known(f).api = copy.copy(known(f).api)
    known(f).api.entries = lambda code: [object()]
    for _ in range(3):
        assert takes(f, torch.ones(2), short=0).tolist() == [3, 3]
    assert known(f).shut


def test_a_disabled_dynamo_and_classes():
    with torch._dynamo.config.patch(disable=True):
        assert compiled(double)[0](torch.ones(2)).tolist() == [3, 3]

    class Callable:
        def __call__(self, x):
            return x + 1

    f, _ = compiled(Callable)
    assert f is Callable and f()(torch.ones(2)).tolist() == [2, 2]
