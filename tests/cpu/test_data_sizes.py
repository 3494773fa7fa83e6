"""Sizes that depend on data, and what the program says of them."""

import pytest
import torch
import torch._dynamo.config

import reflib

BOTH = pytest.mark.parametrize("wrapper", ["python", "cpp"])


@pytest.fixture(autouse=True)
def captured():
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@torch.library.custom_op("test_data_sizes::ones", mutates_args=())
def ones(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(int(x.max()))


@ones.register_fake
def _(x):
    return torch.empty(torch.library.get_ctx().new_dynamic_size())


def number(x):
    n = x.sum().item()
    torch._check(n == 3)
    return torch.zeros(n) + 1


def rows(x):
    y = x.nonzero()
    torch._check(y.shape[0] == 3)
    return y * 2 + x.sum()


def returned(x):
    y = x.nonzero()
    torch._check(y.shape[0] == 3)
    return y


def two(x):
    a, b = torch.unique(x, return_inverse=True)
    torch._check(a.shape[0] == 2)
    return a * 2, b


def custom(x):
    y = ones(x)
    torch._check(y.shape[0] == x.shape[0] + 1)
    return y[1:] + x


CASES = [(number, [1, 1, 1], [2, 2, 0]), (rows, [1, 2, 0, 1], [1, 0, 2, 0]), (returned, [1, 2, 0, 1], [1, 1, 1, 1]),
         (two, [5, 3, 3], [5, 4, 3]), (custom, [4, 1, 1], [2, 1, 1])]  # fmt: skip


@pytest.mark.sample(3)
@BOTH
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("fn, good, bad", CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_check_that_fails_is_its_own_error(fn, good, bad, dynamic, wrapper):
    f = reflib.compile(fn, fullgraph=True, dynamic=dynamic, wrapper=wrapper)
    for values in (good, bad, good):
        x = torch.tensor(values)
        if values is bad:
            with pytest.raises(RuntimeError, match="Runtime assertion failed"):
                f(x)
        else:
            torch.testing.assert_close(f(x), fn(x))


def test_with_a_backward():
    def fn(x, mask):
        i = mask.nonzero()
        torch._check(i.shape[0] == 2)
        return (x[i[:, 0]] * 3).sin()

    f, x = reflib.compile(fn, fullgraph=True), torch.randn(4, requires_grad=True)
    mask = torch.tensor([1, 0, 0, 1])
    torch.testing.assert_close(torch.autograd.grad(f(x, mask).sum(), x), torch.autograd.grad(fn(x, mask).sum(), x))
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        f(x, torch.ones(4))


@torch.library.custom_op("test_data_sizes::spread", mutates_args=())
def spread(x: torch.Tensor) -> torch.Tensor:
    step = int(x.max())
    return torch.arange(4.0 * step)[::step]


@spread.register_fake
def _(x):
    return torch.empty_strided((4,), (torch.library.get_ctx().new_dynamic_size(),))


@BOTH
def test_a_symbol_that_only_a_stride_introduces(wrapper):
    def fn(x):
        y = spread(x)
        return y, y.view(2, 2)[1:] * 2

    f = reflib.compile(fn, fullgraph=True, wrapper=wrapper, verify=True)
    for step in (3, 5, 1):
        x = torch.tensor([step, 1])
        got, want = f(x), fn(x)
        assert got[0].stride() == (step,)
        torch.testing.assert_close(got, want)


def product(x, n):
    return x * n.item(), n.item()


def chosen(x, n):
    return torch.where(torch.scalar_tensor((n > 0).item(), dtype=torch.bool), x, -x)


def full(x, n):
    return torch.full((3,), n.item())


@pytest.mark.sample(3)
@BOTH
@pytest.mark.parametrize("n", [True, False, 2.5, -7], ids=str)
@pytest.mark.parametrize("fn", [product, chosen, full], ids=lambda f: f.__name__)
def test_a_number_read_from_a_tensor_keeps_its_kind(fn, n, wrapper):
    f, x = reflib.compile(fn, fullgraph=True, wrapper=wrapper), torch.randn(5)
    for value in (n, type(n)(1)):
        got, want = f(x, torch.tensor(value)), fn(x, torch.tensor(value))
        torch.testing.assert_close(got, want)
        assert fn is not product or type(got[1]) is type(want[1])


@BOTH
def test_a_float_saved_for_backward(wrapper):
    def fn(x, n):
        return (x * n.item()).sin()

    f, x = reflib.compile(fn, fullgraph=True, wrapper=wrapper), torch.randn(5, requires_grad=True)
    n = torch.tensor(2.5)
    torch.testing.assert_close(torch.autograd.grad(f(x, n).sum(), x), torch.autograd.grad(fn(x, n).sum(), x))


@BOTH
def test_jagged_nested_tensors(wrapper):
    linear = torch.nn.Linear(8, 8)
    f = reflib.compile(lambda x: linear(x).relu() * 2, wrapper=wrapper)
    for sizes in ((3, 5), (3, 7, 2)):
        parts = [torch.randn(n, 8) for n in sizes]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        out, want = f(x).values(), (linear(x).relu() * 2).values()
        torch.testing.assert_close(out, want)
        gradients = [torch.autograd.grad(o.sum(), x)[0].values() for o in (out, want)]
        torch.testing.assert_close(*gradients)
