"""Arguments that no guard of Dynamo's tells from those that a graph was compiled for, after a call with usual ones."""

import random

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch.utils.checkpoint import checkpoint

import reflib
from reflib.capture.storages import reaches_beyond
from reflib.errors import ArgumentError
from reflib.wrap import unusual
from tests.exporting import Alone

N = random.Random(7).randint(5, 9)
BOTH = pytest.mark.parametrize("wrapper", ["python", "cpp"])


def write_and_cat(a, b):
    a.add_(1)
    return torch.cat([a, b]) * 2


@pytest.mark.parametrize("apart", [True, False])
@BOTH
def test_a_view_of_what_is_written_to(wrapper, apart):
    """Captured with two tensors that are ``apart``, or with views of one."""
    f = reflib.compile(write_and_cat, wrapper=wrapper)
    if apart:
        f(torch.randn(N), torch.randn(N))
    for start in (2, 2, 1, 0, 2):
        mine, eager = torch.arange(N + 2.0), torch.arange(N + 2.0)
        got, want = f(mine[:N], mine[start : start + N]), write_and_cat(eager[:N], eager[start : start + N])
        torch.testing.assert_close((got, mine), (want, eager))


@BOTH
def test_both_in_a_larger_storage(wrapper):
    """AOTAutograd passes all of it, of which it saw what the arguments need."""

    def fn(x, y):
        x.masked_scatter_(x > 2, y * 2)
        return x.cumsum(0) + y.flip(0)

    def args(n):
        memory = torch.arange(float(n)).untyped_storage()
        return [torch.empty(0).set_(memory, 0, (N,), (1,)) for _ in range(2)]

    f = reflib.compile(fn, wrapper=wrapper, dynamic=False)
    with torch.no_grad():
        for n in (N + 4, N, N + 1):
            mine, eager = args(n), args(n)
            torch.testing.assert_close((f(*mine), mine), (fn(*eager), eager))


def counted(x):
    return x.as_strided((2,), (1,), 3) * 2


def counted_by_name(x):
    return torch.as_strided(input=x, size=(2,), stride=(1,), storage_offset=3) * 2


def counted_in_a_copy(x):
    return torch.as_strided_scatter(x, torch.zeros(1), (1,), (1,), 4)


def counted_inside(x):
    return checkpoint(counted, x, use_reentrant=False)


def counted_and_written(x):
    x.as_strided((2,), (1,), 3).mul_(2)
    return x + 1


@pytest.mark.parametrize("fn", [counted, counted_by_name, counted_in_a_copy, counted_inside, counted_and_written])
@BOTH
def test_elements_counted_from_the_begin_of_a_storage(fn, wrapper):
    """No guard of Dynamo's knows where in its storage an argument is. (PyTorch captures updates at its begin only.)"""
    f = reflib.compile(fn, wrapper=wrapper)
    for start in (0 if fn is counted_and_written else 1, 3, 0, 1):
        mine, eager = torch.arange(N + 3.0), torch.arange(N + 3.0)
        torch.testing.assert_close((f(mine[start : start + 5]), mine), (fn(eager[start : start + 5]), eager))


def wide(x):
    return x.as_strided((N,), (1,), 0) * 2


def wide_and_written(x):
    x.as_strided((N,), (1,), 0).mul_(2)
    return x + 1


@pytest.mark.parametrize("fn", [wide, wide_and_written])
@BOTH
def test_more_of_a_storage_than_the_argument(fn, wrapper):
    f = reflib.compile(fn, wrapper=wrapper)
    for _ in range(2):
        mine, eager = torch.arange(N + 3.0), torch.arange(N + 3.0)
        torch.testing.assert_close((f(mine[2:4]), mine), (fn(eager[2:4]), eager))


@BOTH
def test_a_view_beyond_its_base(wrapper):
    """The base was made smaller, in its storage."""

    def args():
        x = torch.arange(6.0).resize_(2, 2)
        return x, x.as_strided((2, 2), (2, 1), 1)

    f, mine, eager = reflib.compile(write_and_cat, wrapper=wrapper), args(), args()
    torch.testing.assert_close((f(*mine), mine), (write_and_cat(*eager), eager))


def test_a_view_of_what_has_no_storage():
    values = torch.eye(N).to_sparse().coalesce().values()
    assert values._is_view() and not reaches_beyond(values, values._base)


@pytest.mark.parametrize("grad", [False, True])
@BOTH
def test_results_in_one_storage_are_updated_in_the_next_graph(wrapper, grad):
    """Of sizes that may change."""

    def fn(x):
        whole = torch.cat([x * 2, x])
        part = whole[:, 1]
        torch._dynamo.graph_break()
        whole.mul_(2)
        return whole, part + 1

    f = reflib.compile(fn, wrapper=wrapper, dynamic=True)
    with torch.set_grad_enabled(grad):
        for n in (N, N + 2):
            torch.testing.assert_close(f(torch.arange(3.0 * n).view(n, 3)), fn(torch.arange(3.0 * n).view(n, 3)))


@pytest.mark.parametrize("dynamic", [False, True])
@BOTH
def test_elements_in_one_place(wrapper, dynamic):
    """Eager's own order of reads and writes is the result; an expanded tensor is refused."""

    def fn(x):
        return x.mul_(2).add_(1) * 2

    f = reflib.compile(fn, wrapper=wrapper, dynamic=dynamic)
    for step in (7, 2, 3, 6):
        mine, eager = (torch.arange(60.0).as_strided((N, 4), (step, 1)) for _ in range(2))
        torch.testing.assert_close((f(mine), mine), (fn(eager), eager))
    with pytest.raises(RuntimeError, match="single memory location"):
        f(torch.ones(1, 4).expand(N, 4))


@BOTH
def test_negated_in_passing(wrapper):
    def fn(x, v):
        return (x * 2 + 1).sin() * v

    f = reflib.compile(fn, wrapper=wrapper)
    v = torch.randn(N)
    for x in (torch.randn(N), torch._neg_view(torch.randn(N)), torch.randn(N, dtype=torch.complex64).conj().imag):
        torch.testing.assert_close(f(x, v), fn(x, v))
    x = torch.randn(N, requires_grad=True)
    g = torch._neg_view(torch.randn(N))
    torch.testing.assert_close(torch.autograd.grad(f(x, v), x, g), torch.autograd.grad(fn(x, v), x, g))


@BOTH
def test_a_storage_of_no_bytes(wrapper):
    f = reflib.compile(lambda x, y: (x * y).sin(), wrapper=wrapper)
    x, y = torch.randn(N, requires_grad=True), torch.randn(N)
    out = f(x, y)
    y.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"without memory: its storage was resized to 0"):
        out.sum().backward()
    with pytest.raises(ArgumentError, match=r"argument 1 .* without memory"):
        f(x, y)
    y.untyped_storage().resize_(4 * N)
    y.fill_(2.0)
    torch.testing.assert_close(f(x, y), (x * 2).sin())


@BOTH
def test_a_storage_that_shrinks(wrapper):
    def fn(x, y):
        y.mul_(2)
        return (x * y).sin()

    f = reflib.compile(fn, wrapper=wrapper)
    x, y = torch.randn(N), torch.randn(2 * N)[N:]
    f(x, y)
    for held in (8 * N - 1, 4 * N, 4):
        y.untyped_storage().resize_(held)
        with pytest.raises(ArgumentError, match=rf"argument \d .* storage has {held} bytes, too few for it"):
            f(x, y)
    exported = reflib.compile(torch.export.export(torch.nn.ReLU(), (torch.randn(N),)), wrapper=wrapper)
    x.untyped_storage().resize_(4 * N - 4)
    with pytest.raises(reflib.ReflibError, match="too few for it"):
        exported(x)


@BOTH
def test_a_parameter_replaced_or_freed(wrapper):
    """By ``set_``, before a call and between forward and backward."""

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(N))

        def forward(self, x):
            return (x * self.w).sin()

    m = Scale()
    f, x = reflib.compile(m, wrapper=wrapper), torch.randn(3, N, requires_grad=True)
    f(x).sum().backward()
    other = torch.randn(2 * N)
    for data in (other[N:], other[1 : N + 1], other[::2]):
        with torch.no_grad():
            m.w.set_(data)
        torch.testing.assert_close(f(x), m(x))
    for freed in (torch.empty(0), torch.empty(N - 1)):
        m.w.data = torch.randn(N)
        out = f(x)
        m.w.data = freed
        with pytest.raises(ArgumentError, match=r"primals_\d.*\[" + str(len(freed)) + r"\]"):
            out.sum().backward()
    with torch.no_grad():
        m.w.set_()
    with pytest.raises(RuntimeError):
        f(x)


@BOTH
def test_dynamic_sizes_freed_between_forward_and_backward(wrapper):
    f = reflib.compile(lambda x, y: (x * y).sin(), wrapper=wrapper, dynamic=True)
    for n in (N, 0, N + 1):
        x, y = torch.randn(n, requires_grad=True), torch.randn(n, requires_grad=True)
        f(x, y).sum().backward()
    x, y = torch.randn(N, requires_grad=True), torch.randn(N, requires_grad=True)
    out = f(x, y)
    y.data = torch.empty(0)
    with pytest.raises(ArgumentError, match="primals_"):
        out.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
@BOTH
def test_saved_tensors_in_another_layout(wrapper, dynamic):
    """As a hook brings them, or as data that replaced a parameter's."""

    def fn(x, w):
        return (x.sin() @ w).sigmoid().sin() + w.sin().mean(1, keepdim=True)

    def turned(t):
        order = tuple(reversed(range(t.dim())))
        return t.detach().permute(order).contiguous().permute(order)

    f = reflib.compile(fn, wrapper=wrapper, dynamic=dynamic)
    for n in (N, N + 1):
        x, w = torch.randn(3, n, 4, requires_grad=True), torch.randn(3, 4, n, requires_grad=True)
        want = torch.autograd.grad(fn(x, w).sum(), (x, w))
        f(x, w).sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, turned):
            torch.testing.assert_close(torch.autograd.grad(f(x, w).sum(), (x, w)), want)
        out = f(x, w)
        x.data, w.data = turned(x), turned(w)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (x, w)), want)


@BOTH
def test_tangents_and_layouts_are_eager_s(wrapper):
    def fn(x):
        return torch.relu(x) * x

    f = reflib.compile(fn, wrapper=wrapper)
    x, t = torch.randn(N, 4), torch.randn(N, 4)
    f(x)
    with fw.dual_level():
        dual = fw.make_dual(x, t)
        torch.testing.assert_close(fw.unpack_dual(f(dual)).tangent, fw.unpack_dual(fn(dual)).tangent)
        torch.testing.assert_close(f(x), fn(x))
    if torch.backends.mkldnn.is_available():
        torch.testing.assert_close(f(x.to_mkldnn()).to_dense(), fn(x))


def test_the_check_in_c_and_in_python_agree(monkeypatch):
    """Random slices of one buffer, some of them written to."""
    usual = unusual._usual()
    rng = random.Random(3)
    for _ in range(300):
        base = torch.zeros(60, dtype=rng.choice([torch.float64, torch.bfloat16, torch.int8]))
        views = []
        for _ in range(rng.randint(1, 5)):
            first, size, step = rng.randint(0, 40), rng.randint(0, 4), rng.randint(1, 4)
            views.append(base[first : first + size * step : step])
        kinds = bytes(rng.choice(b"-rw") for _ in views)
        assert usual(tuple(views), kinds, ()) == unusual._as_captured(views, kinds, set()), (views, kinds)
        sizes, strides = ([rng.randint(0, 4) for _ in range(3)] for _ in range(2))
        view, places = (t.as_strided(sizes, strides) for t in (base, torch.arange(60)))
        apart = usual((view,), b"w", ())
        assert apart == unusual._as_captured([view], b"w", set()) and usual((view,), b"r", ()), (sizes, strides)
        assert not apart or len(places.unique()) == view.numel(), (sizes, strides)
    many = list(torch.zeros(80).split(2))
    assert usual(many, b"w" * 40, ()) and not usual([*many[:39], many[0]], b"w" * 40, ())
    assert not usual([torch._neg_view(torch.ones(2))], b"r", ()) and usual([torch._neg_view(torch.ones(2))], b"-", ())


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr("reflib.wrap.host.checks", lambda: None)
    unusual._usual.cache_clear()
    try:
        test_a_view_of_what_is_written_to("python", True)
    finally:
        unusual._usual.cache_clear()


@BOTH
def test_exported_without_memory(wrapper):
    f = reflib.compile(torch.export.export(torch.nn.ReLU(), (torch.randn(N),)), wrapper=wrapper)
    x = torch.randn(N)
    torch.testing.assert_close(f(x), torch.relu(x))
    x.untyped_storage().resize_(0)
    with pytest.raises(reflib.ReflibError, match="without memory"):
        f(x)


@BOTH
def test_a_second_derivative_is_refused_and_a_graph_can_be_kept(wrapper):
    f = reflib.compile(lambda x, w: ((x * w).tanh().exp() * w).sum(), wrapper=wrapper)
    x, w = torch.randn(N, requires_grad=True), torch.randn(N, requires_grad=True)
    (grad,) = torch.autograd.grad(f(x, w), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(grad.sum(), w)
    out = f(x, w)
    kept = [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(kept[0], kept[1])


def test_a_later_backward_may_retain_the_graph() -> None:
    fn = lambda x: (x.softmax(-1) * x.sin()).cumsum(0)  # noqa: E731
    f, x = reflib.compile(fn), torch.randn(6, 40, requires_grad=True)
    (want,) = torch.autograd.grad(fn(x).sum(), x)
    for keep in ((False,), (True, True, False)):  # in this order: AOTAutograd compiles the backward in the first
        y = f(x)
        for retain in keep:
            (g,) = torch.autograd.grad(y.sum(), x, retain_graph=retain)
            torch.testing.assert_close(g, want)


@BOTH
def test_elements_counted_from_the_begin_of_a_storage_after_updates(wrapper):
    def fn(x):
        first = torch.as_strided(x, (1,), (1,), 3).mul_(3)
        second = torch.as_strided(x, (2,), (2,), 4).add_(first)
        return first, second, torch.minimum(first, x)

    mine, eager = (torch.arange(-8, 3)[3:].view(4, 2) for _ in range(2))
    torch.testing.assert_close((reflib.compile(fn, wrapper=wrapper)(mine), mine), (fn(eager), eager))


def _second(x):
    return torch.as_strided(x.view(2, 3)[1], (2,), (1,), 7) + 1


def _zeroed(x):
    return x.mul_(2).as_strided((2,), (1,), 1).zero_() + x.sum()


def _in_a_branch(x):
    return torch.cond(x.sum() > 0, lambda x: x.as_strided((2,), (1,), 7) * 2, lambda x: x[:2] + 1, (x,))


@pytest.mark.parametrize(("fn", "begin"), [(_second, 6), (_zeroed, 0), (_in_a_branch, 6)])
@pytest.mark.parametrize("way", ["python", "cpp", "package"])
def test_exported_programs_that_count_from_the_begin_of_a_storage(fn, begin, way, tmp_path):
    """An argument that begins elsewhere in its storage than at capture is refused; so is a copy of one, of other
    strides. (What a view without an offset shows is where the view's own operand is.)"""

    def compiled(fn, x):
        if way != "package":
            return reflib.compile(torch.export.export(Alone(fn), (x,)), wrapper=way)
        return reflib.load(reflib.aot_compile(Alone(fn), (x,), tmp_path / "m.reflib", archs=["cpu"]))

    def at(start, step=1):
        return torch.arange(40.0)[start : start + 6 * step : step]

    f = compiled(fn, at(begin))
    torch.testing.assert_close(f(at(begin)), fn(at(begin)))
    for start, step in ((6 - begin, 1), (12, 1), (12, 2)):
        says = f"begins at element {start} of its storage, at element {begin} when"
        with pytest.raises(reflib.ReflibError, match=says):
            f(at(start, step))
    f = compiled(lambda x: torch.as_strided(x, (3,), (2,)) * torch.as_strided(x + 1, (3,), (1,), 2), at(6))
    for start in (6, 0, 12):
        x = at(start)
        torch.testing.assert_close(f(x), x[::2] * (x[2:5] + 1))
