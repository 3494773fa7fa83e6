"""A compiled ExportedProgram checks its arguments: no guard does it otherwise."""

import os
import threading

import pytest
import torch

import reflib


class Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y


def compiled(dynamic: bool = True):
    shapes = ({0: torch.export.Dim("n", min=4, max=100)}, None) if dynamic else None
    args = (torch.randn(4, 5), torch.randn(5))
    return reflib.compile(torch.export.export(Scale(), args, dynamic_shapes=shapes))


def test_sizes_within_the_range():
    f = compiled()
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
def test_what_does_not_fit_is_refused(x, y, says):
    with pytest.raises(reflib.ReflibError, match=says):
        compiled()(x, y)


def test_static_sizes_are_kept():
    with pytest.raises(reflib.ReflibError, match="size 7 in dimension 0"):
        compiled(dynamic=False)(torch.randn(7, 5), torch.randn(5))


def test_other_strides_are_copied():
    x, y = torch.randn(5, 8).t(), torch.randn(10)[::2]
    torch.testing.assert_close(compiled()(x, y), x * 2 + y)


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
