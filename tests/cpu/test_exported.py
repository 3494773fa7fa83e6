"""A compiled ExportedProgram checks its arguments: no guard does it otherwise."""

import os
import threading

import pytest
import torch

import reflib
from reflib.errors import ArgumentError


class Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y


@pytest.fixture(params=["python", "cpp"])
def wrapper(request):
    return request.param


def compiled(wrapper: str, dynamic: bool = True):
    shapes = ({0: torch.export.Dim("n", min=4, max=100)}, None) if dynamic else None
    args = (torch.randn(4, 5), torch.randn(5))
    return reflib.compile(torch.export.export(Scale(), args, dynamic_shapes=shapes), wrapper=wrapper)


def test_sizes_within_the_range(wrapper):
    f = compiled(wrapper)
    for n in (4, 9, 100):
        x, y = torch.randn(n, 5), torch.randn(5)
        torch.testing.assert_close(f(x, y), x * 2 + y)


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (torch.randn(200, 5), torch.randn(5), "exported for 4 to 100"),
        (torch.randn(2, 5), torch.randn(5), "exported for 4 to 100"),
        (torch.randn(8, 6), torch.randn(5), "argument x: size 6 in dimension 1"),
        (torch.randn(8, 5, 1), torch.randn(5), "argument x: ndim 3"),
        (torch.ones(8, 5, dtype=torch.int64), torch.randn(5), "argument x: dtype torch.int64"),
        (torch.randn(8, 5), 3.0, "argument y: expected a tensor"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_does_not_fit_is_refused(x, y, says, wrapper):
    with pytest.raises(reflib.ReflibError, match=says):
        compiled(wrapper)(x, y)


def test_static_sizes_are_kept(wrapper):
    with pytest.raises(reflib.ReflibError, match="size 7 in dimension 0"):
        compiled(wrapper, dynamic=False)(torch.randn(7, 5), torch.randn(5))


def test_other_strides_are_copied(wrapper):
    x, y = torch.randn(5, 8).t(), torch.randn(10)[::2]
    torch.testing.assert_close(compiled(wrapper)(x, y), x * 2 + y)


def test_compiling_in_a_forked_child():
    torch.set_num_threads(1)
    f = torch.compile(lambda x: x + 1, backend="reflib")
    f(torch.ones(3))
    pid = os.fork()
    if pid == 0:
        threading.Timer(60, lambda: os._exit(9)).start()
        out = torch.compile(lambda x: x.exp() + 1, backend="reflib")(torch.zeros(3))
        os._exit(0 if bool((out == 2).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    torch.set_num_threads(2)


def test_options_are_refused_before_capture():
    with pytest.raises(reflib.OptionError, match="wrapper='c\\+\\+': must be one of 'python', 'cpp', 'auto'"):
        reflib.compile(Scale(), wrapper="c++")
    with pytest.raises(reflib.OptionError, match="sm_1"):
        reflib.compile(Scale(), target="sm_1")
    with pytest.raises(reflib.OptionError, match="at least 1"):
        reflib.Options(max_fused_ops=0)


def test_extreme_of_nothing_is_eagers_error():
    with pytest.raises(Exception, match=r"(?i)dim|zero"):
        torch.compile(lambda x: x.max(0), backend="reflib")(torch.randn(0, 4))


# -- the short way --------------------------------------------------------------------------------------
class Alone(torch.nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


def exported(fn, x, **shapes):
    return reflib.compile(torch.export.export(Alone(fn), (x,), **shapes), wrapper="cpp")


def test_strides_that_depend_on_sizes():
    both = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    f = exported(lambda x: x * 2 + 1, torch.randn(5, 7), dynamic_shapes=both)
    whole = torch.arange(40.0).reshape(4, 10)
    for x in (whole, whole[:, :6], whole[:, ::2], torch.arange(5.0).expand(7, 5), whole.t()):
        torch.testing.assert_close(f(x), x * 2 + 1)


def test_least_size_of_the_range():
    f = exported(lambda x: x + 1, torch.randn(4, 6), dynamic_shapes=({0: torch.export.Dim("b", min=2, max=8)},))
    assert f(torch.zeros(2, 6)).shape == (2, 6)
    for n in (0, 1, 9):
        with pytest.raises(reflib.ReflibError, match="exported for 2 to 8"):
            f(torch.zeros(n, 6))


def test_what_is_raised_inside_is_not_tried_again():
    calls = []

    @torch.library.custom_op("exported_test::refuses", mutates_args=())
    def refuses(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        raise ArgumentError("mine")

    refuses.register_fake(torch.empty_like)
    f = exported(lambda x: refuses(x) + 1, torch.randn(3))
    with pytest.raises(ArgumentError, match="mine"):
        f(torch.randn(3))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.eye(3).to_sparse_csr(), "layout torch.sparse_csr"),
    ],
    ids=["coo", "csr"],
)
def test_memory_of_its_own(x, says):
    f = exported(lambda x: x * 2, torch.eye(3))
    with pytest.raises(reflib.ReflibError, match=says):
        f(x)
    with pytest.raises(reflib.ReflibError, match="memory of its own"):
        torch.vmap(f)(torch.ones(2, 3, 3))
    negative = torch.view_as_complex(torch.ones(3, 3, 2)).conj().imag
    torch.testing.assert_close(f(negative), negative * 2)


def test_names_of_arguments_may_be_any():
    class Named(torch.nn.Module):
        def forward(self, a, a_is, python_0_op0, int64_t, run):
            return (a + a_is + python_0_op0 + int64_t + run).sort().values

    args = tuple(torch.randn(3) for _ in range(5))
    f = reflib.compile(torch.export.export(Named(), args), wrapper="cpp")
    torch.testing.assert_close(f(*args), Named()(*args))
