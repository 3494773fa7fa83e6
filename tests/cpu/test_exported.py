"""A compiled ExportedProgram checks its arguments: no guard does it otherwise."""

import contextlib
import functools
import gc
import inspect
import sys
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import reflib
from reflib.errors import ArgumentError
from tests.exporting import Alone


class Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y


def test_extreme_of_nothing_is_eagers_error():
    with pytest.raises(Exception, match=r"(?i)dim|zero"):
        torch.compile(lambda x: x.max(0), backend="reflib")(torch.randn(0, 4))


def test_options_are_refused_before_capture():
    with pytest.raises(reflib.OptionError, match="wrapper='c\\+\\+': must be one of 'python', 'cpp', 'auto'"):
        reflib.compile(Scale(), wrapper="c++")
    with pytest.raises(reflib.OptionError, match="sm_1"):
        reflib.compile(Scale(), target="sm_1")
    with pytest.raises(reflib.OptionError, match="at least 1"):
        reflib.Options(max_fused_ops=0)


# -- the fast path --------------------------------------------------------------------------------------
def exported(fn, x, sizes=None, way="cpp"):
    """``sizes``: those of ``x`` that may change."""
    return reflib.compile(torch.export.export(Alone(fn), (x,), dynamic_shapes=((sizes,),)), wrapper=way)


def test_strides_that_depend_on_sizes():
    f = exported(lambda x: x * 2 + 1, torch.randn(5, 7), dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC))
    whole = torch.arange(40.0).reshape(4, 10)
    for x in (whole, whole[:, :6], whole[:, ::2], torch.arange(5.0).expand(7, 5), whole.t()):
        torch.testing.assert_close(f(x), x * 2 + 1)


def test_names_of_arguments_may_be_any():
    class Named(torch.nn.Module):
        def forward(self, a, a_is, python_0_op0, int64_t, run):
            return (a + a_is + python_0_op0 + int64_t + run).sort().values

    args = tuple(torch.randn(3) for _ in range(5))
    f = reflib.compile(torch.export.export(Named(), args), wrapper="cpp")
    torch.testing.assert_close(f(*args), Named()(*args))


@pytest.fixture(params=["cpp", "python"])
def way(request):
    return request.param


class Weighted(torch.nn.Module):
    """``log``: the gradient mode in each call of the op. It refuses a tensor that begins below zero."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5))

    def forward(self, x, y):
        return noted(x + self.weight) * y


log: list[bool] = []
X, Y = torch.randn(8, 5), torch.randn(5)


@torch.library.custom_op("exported_test::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    log.append(torch.is_grad_enabled())
    if float(x[0, 0]) < -1000:
        raise ArgumentError("argument 0 is the op's own affair")
    return x.clone()


noted.register_fake(torch.empty_like)


class Watched:
    """A program, 2 arguments, and how often its slow path was taken. Sizes are 4 to 100 by 5, and 5."""

    def __init__(self, way):
        self.module, self.slow, self.entered = Weighted(), 0, way == "cpp"
        shapes = ({0: torch.export.Dim("n", min=4, max=100)}, None)
        program = torch.export.export(self.module, (torch.randn(4, 5), torch.randn(5)), dynamic_shapes=shapes)
        self.f = reflib.compile(program, wrapper=way)
        slow = self.f._slow

        def counting(*args, **kwargs):
            self.slow += 1
            return slow(*args, **kwargs)

        self.f._slow = counting
        self.f(X, Y)
        assert self.slow == (not self.entered)

    def goes(self, *args, slow=0, says=None, error=reflib.ReflibError, **kwargs):
        """It takes the slow path ``slow`` times (each time, without an entry in C), and is right or raises what it
        ``says``. Grad mode is unchanged."""
        before = self.slow
        for mode in (True, False):
            with torch.set_grad_enabled(mode):
                if says is None:
                    out = self.f(*args, **kwargs)
                    assert not out.requires_grad
                    torch.testing.assert_close(out, self.module(*args, **kwargs).detach())
                else:
                    with pytest.raises(error, match=says):
                        self.f(*args, **kwargs)
                assert torch.is_grad_enabled() == mode
        assert self.slow - before == 2 * (slow if self.entered else 1)


watch = functools.cache(Watched)


@pytest.fixture
def watched(way):
    log.clear()
    return watch(way)


class Sub(torch.Tensor):
    pass


def negative(t):
    """``t``'s numbers with the neg bit set."""
    return torch._neg_view(-t)


def test_the_fast_path_is_taken(watched, way):
    watched.goes(X, Y)
    watched.goes(torch.nn.Parameter(X), Y)
    watched.goes(X[:4], Y.requires_grad_(False))
    assert type(watched.f.__call__).__name__ == ("Entry" if way == "cpp" else "function")


def test_gradients_are_off_inside(watched):
    watched.goes(X, Y)  # the first call looks at the kernel as well
    log.clear()
    with torch.enable_grad():
        out = watched.f(torch.nn.Parameter(X), Y)
    assert log == [False] and not out.requires_grad
    with torch.inference_mode():
        assert watched.f(X, Y).is_inference()
    modes = []
    for mode in (True, False):
        thread = threading.Thread(target=lambda mode=mode: modes.append(grad_mode_after(watched.f, mode)))
        thread.start(), thread.join()
    assert modes == [True, False]


def grad_mode_after(f, mode):
    torch.set_grad_enabled(mode)
    f(X, Y)
    return torch.is_grad_enabled()


def attention(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x) * 2


HEADS = torch.randn(2, 3, 8, 8)


def agrees_under_autocast(f):
    """As without: PyTorch's own ops, which its kernels read after, would give bfloat16."""
    want = attention(HEADS)
    for kind in ("cpu", "cuda"):
        torch.set_autocast_enabled(kind, True)
        try:
            for _ in range(2):
                torch.testing.assert_close(f(HEADS), want)
            assert torch.is_autocast_enabled(kind), "it is on again"
        finally:
            torch.set_autocast_enabled(kind, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(HEADS).dtype == torch.bfloat16, "or this would show nothing"
        with pytest.raises(reflib.ReflibError, match="ndim 1"):
            f(HEADS[0, 0, 0])
        assert torch.is_autocast_enabled("cpu")
        torch.testing.assert_close(f(HEADS.transpose(2, 3)), attention(HEADS.transpose(2, 3)).float(), atol=0.1, rtol=0)
    torch.testing.assert_close(f(HEADS), want)


@pytest.mark.sample(3)
def test_autocast_is_off_inside(way):
    f = exported(attention, HEADS, way=way)
    f(HEADS)
    agrees_under_autocast(f)


def test_autocast_is_off_inside_packages(tmp_path):
    agrees_under_autocast(reflib.load(reflib.aot_compile(attention, (HEADS,), tmp_path / "a.reflib", "cpu")))


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((X.as_subclass(Sub), Y), {}, None),
        ((X,), {"y": Y}, "structure.*: .*'y'"),
        ((), {"x": X, "y": Y}, "structure"),
        ((X, Y), {"y": Y}, "structure"),
        ((X,), {}, "structure .*: missing a required .*'y'$"),
        ((X, Y, Y), {}, "structure .*: too many positional arguments$"),
        ((X, [Y]), {}, "argument y: expected a tensor, got list"),
        ((X, 3.0), {}, "argument y: expected a tensor, got float"),
        ((X.double(), Y), {}, "argument x: dtype torch.float64, but it was exported with torch.float32"),
        ((X[:3], Y), {}, "argument x: size 3 in dimension 0, which was exported for 4 to 100"),
        ((X[:0], Y), {}, "size 0 in .*exported for 4 to 100"),
        ((torch.randn(101, 5), Y), {}, "size 101 in .*exported for 4 to 100"),
        ((X[0, 0], Y), {}, "argument x: ndim 0"),
        ((X, Y[:4]), {}, "argument y: size 4 in dimension 0"),
        ((negative(X), Y), {}, None),
        ((X, negative(Y)), {}, None),
        ((X.t().contiguous().t(), Y), {}, None),
        ((X.to_sparse(), Y), {}, "argument x: layout torch.sparse_coo"),
        ((X, Y.to_sparse()), {}, "argument y: layout torch.sparse_coo"),
        ((X.to_mkldnn(), Y), {}, "argument x: layout torch._mkldnn"),
        ((X.to("meta"), Y), {}, "argument x: device meta"),
        ((FakeTensorMode().from_tensor(X), Y), {}, "argument x: a tensor with memory of its own is needed, got Fake"),
    ],
    ids=[
        "subclass", "keyword", "keywords", "more keywords", "few", "many", "list", "float", "dtype", "small", "empty",
        "large", "rank", "size", "neg", "neg, second", "strides", "sparse", "sparse, second", "mkldnn", "meta", "fake",
    ],
)  # fmt: skip
def test_every_other_call_takes_the_slow_path(args, kwargs, says, watched):
    watched.goes(*args, slow=1, says=says, **kwargs)
    watched.goes(X, Y)


@pytest.mark.parametrize("of", [torch.vmap, torch.func.jacrev], ids=["vmap", "jacrev"])
def test_a_tensor_of_functorch_takes_the_slow_path(of, watched):
    before = watched.slow
    with pytest.raises(reflib.ReflibError, match="memory of its own"):
        of(lambda x: watched.f(x, Y))(torch.stack([X, X]) if of is torch.vmap else X)
    assert watched.slow == before + 1 and torch.is_grad_enabled()


def transformed(of, f):
    """``f`` called with a tensor of the transform's."""
    if of == "functional":
        return f(torch._to_functional_tensor(X))
    if of == "subclass":
        return f(TwoTensor(X, X))
    return {"vmap": torch.vmap, "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
            "functionalize": torch.func.functionalize}[of](f)(X)  # fmt: skip


@pytest.mark.parametrize("of", ["vmap", "grad", "functionalize", "functional", "subclass"])
@pytest.mark.parametrize("fn", [lambda x: x * 2, lambda x: x.sort().values], ids=["kernel", "no kernel"])
@pytest.mark.sample(6)
def test_tensors_of_transforms_are_refused(of, fn, way):
    """Also by a graph that reads no tensor's memory: PyTorch would be called with them, and lose the gradients."""
    f = exported(fn, X, way=way)
    f(X)
    with pytest.raises(reflib.ReflibError, match=r"args_0: a tensor with memory of its own is needed, got T"):
        transformed(of, f)
    torch.testing.assert_close(f(X), fn(X))


@pytest.mark.sample(3)
def test_zeros_that_are_nowhere_are_refused(way):
    f = exported(lambda x: x * 2 + 1, X, way=way)
    with pytest.raises(reflib.ReflibError, match="memory of its own"):
        f(torch._efficientzerotensor(8, 5))
    empty = exported(lambda x: x * 2 + 1, X, {0: torch.export.Dim("n", min=0)}, way)
    slow = empty._slow
    if way == "cpp":
        empty._slow = lambda *args: pytest.fail("not the fast path")
    assert empty(X[:0]).shape == (0, 5) and empty(X[:1]).shape == (1, 5)
    empty._slow = slow


def test_an_argument_error_of_an_op_is_the_ops(watched):
    far = torch.full((8, 5), -1e4)
    watched.goes(far, Y, says="the op's own affair", error=ArgumentError)
    assert log == [False, False], "once per call"
    watched.goes(X, Y)


@pytest.mark.sample(3)
def test_counts_of_references_are_flat(watched, way):
    watched.f(X, Y)
    far, double, flat, weight = torch.full((8, 5), -1e4), X.double(), X[0], watched.module.weight
    held = [X, Y, far, double, flat, weight, watched.f, watched.f.__call__, watched.f._call.load(), None, True]

    def rounds(n):
        for _ in range(n):
            for _ in range(17):
                watched.f(X, Y)
            for bad in ((far, Y), (double, Y), (flat, Y)):
                with contextlib.suppress(reflib.ReflibError):
                    watched.f(*bad)
        log.clear()
        gc.collect()
        return [sys.getrefcount(o) for o in held[:-2]], sys.getallocatedblocks()

    rounds(10)
    counts, blocks = rounds(10)
    after, more = rounds(1000 if way == "cpp" else 50)
    assert after == counts
    assert more - blocks < 500, "of 20,000 calls"


@pytest.mark.sample(3)
def test_a_program_is_freed_with_its_cycle(way):
    module = Weighted()
    f = reflib.compile(torch.export.export(module, (X, Y)), wrapper=way)
    f(X, Y)
    entry = f.__call__
    assert gc.is_tracked(entry) and (way != "cpp" or f._slow in gc.get_referents(entry))
    ref, weight = weakref.ref(f), weakref.ref(f._weights["weight"])
    del f, module
    gc.collect()
    assert ref() is not None, "the entry holds it"
    del entry
    gc.collect()
    assert ref() is None and weight() is None


@pytest.mark.sample(3)
def test_it_looks_like_a_function(watched):
    assert callable(watched.f) and str(inspect.signature(watched.f)) == "(x, y, /)"
    torch.testing.assert_close(torch.compile(watched.f, backend="eager")(X, Y), watched.f(X, Y))
