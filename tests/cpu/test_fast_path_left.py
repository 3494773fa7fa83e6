"""Where the fast path into a compiled function is not taken, what ends it, and what ``reflib.compile`` returns."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import reflib
from reflib import fast_path
from tests.fast_paths import X, agree, breaks, call, close, compiled, double, known, warm


# -- the slow path ----------------------------------------------------------------------------------
class Counted:
    n = 0


def stores(x, counted):
    counted.n += 1
    return x + 1


def yields(x):
    yield x + 1


def test_graph_breaks_side_effects_and_generators():
    def changes(x, **more):
        more["new"] = x + 1
        return more

    f, backend = compiled(breaks)
    for _ in range(4):
        assert call(f, X, fast=0).tolist() == [4, 4, 4]
    assert backend.frame_count == 2 and known(f).entries == ()
    f, counted = compiled(stores)[0], Counted()
    for _ in range(4):
        call(f, X, counted, fast=0)
    assert counted.n == 4
    f, _ = compiled(changes)
    for _ in range(3):
        got = call(f, X, b=3, fast=0)
        assert got["b"] == 3 and got["new"].tolist() == [2, 2, 2] and list(got) == ["b", "new"]
    f, _ = compiled(lambda x: (y for y in x))
    for _ in range(3):
        assert list(call(f, X, fast=0)) == [1, 1, 1]
    assert not hasattr(compiled(yields)[0], "_reflib_entries")


def test_wrong_calls_raise_as_before():
    f = warm(double, X)
    for args, kwargs in [((), {}), ((1, 2), {}), ((X,), {"y": 1}), ((X,), {"x": 1})]:
        with pytest.raises(TypeError, match=r"double\(\)"):
            f(*args, **kwargs)
    call(f, X)


def test_exceptions_come_through_and_the_next_call_is_right():
    def fn(x, bad):
        if bad:
            raise ValueError("bad")
        return torch.linalg.cholesky(x)

    good, wrong = torch.eye(3), -torch.eye(3)
    f = warm(fn, good, False)
    for _ in range(2):
        with pytest.raises(torch.linalg.LinAlgError):
            call(f, wrong, False)
        with pytest.raises(ValueError, match="bad"):
            f(good, True)
        close(call(f, good, False), good)
    with pytest.raises(TypeError):
        f(3, None, 4)
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile"])
def test_stances(stance):
    f = warm(double, X)
    with torch.compiler.set_stance(stance):
        call(f, X, fast=0)
        if stance == "fail_on_recompile":
            with pytest.raises(RuntimeError, match="recompile"):
                f(X.double())
    call(f, X)
    with torch.compiler.set_stance("default", force_backend="eager"):
        call(f, X, fast=0)
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        call(f, X, fast=0)
    with torch.compiler.set_stance("default"):
        call(f, X)


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_transforms_and_tracers():
    f = warm(double, X)
    for mode in (Dispatches(), Functions(), torch.device("cpu"), torch.profiler.profile()):
        with mode:
            agree(f, double, X, fast=0)
    before = known(f).hits
    close(torch.func.vmap(f)(X), torch.func.vmap(double)(X))
    close(torch.func.grad(lambda x: f(x).sum())(X), torch.func.grad(lambda x: double(x).sum())(X))
    assert known(f).hits == before
    with pytest.raises(RuntimeError):
        torch.jit.trace(f, (X,))
    with pytest.raises(RuntimeError, match="FX"):
        torch.fx.symbolic_trace(f)
    call(f, X)


def test_a_profile_shows_compiled_regions():
    f = warm(double, X)
    call(f, X)
    with torch.profiler.profile() as p:
        f(X)
    names = {e.key for e in p.key_averages()}
    assert any("Torch-Compiled Region" in n for n in names), names


def test_inside_a_compiled_function():
    inner = warm(double, X)
    call(inner, X)

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
            agree(f, fn, X, fast=None)
        assert backend.frame_count >= 1
    f, backend = compiled(outer, fullgraph=True)
    agree(f, outer, X, fast=0)
    agree(f, outer, X)
    assert backend.frame_count == 1
    call(inner, X)


def test_a_callback_that_is_set_sees_a_call():
    f = warm(double, X)
    with torch._dynamo.config.patch(raise_on_ctx_manager_usage=False), torch._dynamo.optimize("eager"):
        before = known(f).hits
        result = f(X)
    assert known(f).hits == before
    close(result, double(X))
    assert torch._dynamo.run(f)(X).tolist() == double(X).tolist()


# -- what ends an entry -----------------------------------------------------------------------------
def test_reset_recompiles_and_frees_the_graph():
    graphs = []

    def backend(gm, inputs):
        graphs.append(weakref.ref(gm))
        return gm.forward

    f, _ = compiled(double, backend)
    for n in range(1, 4):
        call(f, X, fast=0)
        call(f, X)
        assert len(graphs) == n and graphs[-1]() is not None
        torch._dynamo.reset()
        gc.collect(), gc.collect()
        assert [g() for g in graphs] == [None] * n


def test_an_invalidated_entry():
    class Holder:
        module = torch.nn.Linear(3, 3)

    holder = Holder()
    holder.module = torch.nn.Linear(3, 3)

    def fn(x):
        return holder.module(x)

    f, backend = compiled(fn)
    f(X), call(f, X)
    count = backend.frame_count
    holder.module = torch.nn.Linear(3, 3)
    gc.collect()
    for _ in range(2):
        agree(f, fn, X, fast=None)
    assert backend.frame_count >= count


def test_the_recompile_limit():
    with torch._dynamo.config.patch(recompile_limit=2):
        f, backend = compiled(double, dynamic=False)
        for n in (2, 3, 4, 5, 2, 3, 4):
            agree(f, double, torch.ones(n), fast=None)
        assert backend.frame_count == 2 and known(f).off
        call(f, torch.ones(2), fast=0)
    torch._dynamo.reset()
    f(torch.ones(2))
    call(f, torch.ones(2))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        f, _ = compiled(double, fullgraph=True, dynamic=False)
        f(torch.ones(2))
        for _ in range(2):
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                f(X)


# -- threads and recursion --------------------------------------------------------------------------
def test_threads():
    f, _ = compiled(lambda x, n: x * n, dynamic=False)

    def work(seed):
        for i in range(100):
            n = (i + seed) % 4 + 1
            with torch.no_grad() if seed % 2 else torch.enable_grad():
                assert f(torch.full((n,), 2.0), n).tolist() == [2.0 * n] * n

    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(2):
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(work, range(8)))
            torch._dynamo.reset()
    assert known(f).hits > 50


def test_recursion():
    @torch.library.custom_op("reflib_test::down", mutates_args=())
    def down(x: torch.Tensor, n: int) -> torch.Tensor:
        return f(x, n - 1) if n else x.clone()

    down.register_fake(lambda x, n: torch.empty_like(x))
    f, _ = compiled(lambda x, n: torch.ops.reflib_test.down(x, n) + 1)
    for _ in range(3):
        assert f(torch.zeros(3), 3).tolist() == [4, 4, 4]
    assert known(f).hits


# -- modules ----------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)

    def forward(self, x, scale=1.0):
        return self.drop(torch.relu(self.linear(x))) * scale


def test_modules():
    model = Model().eval()
    f = reflib.compile(model)
    x = torch.randn(2, 4)
    assert isinstance(f, torch._dynamo.OptimizedModule) and f._orig_mod is model
    assert list(f.state_dict()) == ["_orig_mod." + n for n in model.state_dict()]
    f(x)
    agree(f, model, x)
    with torch.no_grad():
        model.linear.weight.mul_(2)
    agree(f, model, x)
    call(f, x).sum().backward()
    assert model.linear.weight.grad is not None
    f(x, scale=2.0)
    agree(f, model, x, scale=2.0)
    f.train()
    assert model.training and (f(torch.ones(64, 4)) == 0).any()
    f.eval()
    agree(f, model, x)
    model.linear = torch.nn.Linear(4, 4)
    agree(f, model, x, fast=None)
    agree(reflib.compile(copy.deepcopy(model)), model, x, fast=None)


def test_hooks_of_modules_run():
    model = Model().eval()
    x = torch.randn(2, 4)
    f = warm(model, x)
    call(f, x)
    handles = [
        model.register_forward_hook(lambda m, i, o: o + 1),
        model.register_forward_pre_hook(lambda m, i: (i[0] * 2,)),
    ]
    for _ in range(3):
        agree(f, model, x, fast=0)
    for h in handles:
        h.remove()
    agree(f, model, x, fast=None)
    agree(f, model, x)
    outer = f.register_forward_hook(lambda m, i, o: o - 1)
    close(call(f, x), model(x) - 1)
    outer.remove()
    model.forward = lambda x: x + 5
    close(call(f, x, fast=0), x + 5)
    del model.forward
    agree(f, model, x, fast=None)


def test_a_module_within_another():
    f, _ = compiled(Model().eval())
    outer, backend = compiled(torch.nn.Sequential(f, torch.nn.ReLU()))
    x = torch.randn(2, 4)
    f(x)
    for _ in range(3):
        close(outer(x), f(x).relu())
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
    assert torch.compiler.disable(f)(X).tolist() == [2, 2, 2]
    assert weakref.ref(f)() is f and copy.deepcopy(f) is f
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(f)
    f(X)
    assert torch._dynamo.explain(f)(X).graph_count == 1
    assert torch.compile(f, backend="eager")(X).tolist() == [2, 2, 2]
    assert reflib.compile(f)(X).tolist() == [2, 2, 2]
    assert reflib.wait_for_tuning(f).finished and reflib.tuning_progress(f).total == 0


def test_another_torch(monkeypatch):
    """Whose private parts behave otherwise, or are not there."""
    f, _ = compiled(double)
    known(f).api = copy.copy(known(f).api)
    known(f).api.entries = lambda code: [object()]
    for _ in range(3):
        assert call(f, X, fast=0).tolist() == [3, 3, 3]
    assert known(f).off
    monkeypatch.setattr(fast_path, "_api", lambda: None)
    f = reflib.compile(double)
    assert not hasattr(f, "_reflib_entries")
    assert f(X).tolist() == [3, 3, 3]


def test_a_disabled_dynamo_and_classes():
    with torch._dynamo.config.patch(disable=True):
        assert compiled(double)[0](X).tolist() == [3, 3, 3]

    class Callable:
        def __call__(self, x):
            return x + 1

    f, _ = compiled(Callable)
    assert f is Callable and f()(X).tolist() == [2, 2, 2]
