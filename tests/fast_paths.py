"""A function with the fast path of ``reflib.fast_path``: compiled, called, compared with eager."""

import torch
from torch._dynamo.testing import CompileCounter

from reflib.fast_path import add_fast_path

X = torch.ones(3)
close = torch.testing.assert_close


class Graphs(CompileCounter):
    """A backend that runs what Dynamo captured, and counts the graphs."""

    def __call__(self, gm, inputs):
        self.frame_count += 1
        return gm.forward


def compiled(fn, backend=None, **options):
    """``fn`` with a fast path, and its backend, which costs nothing."""
    backend = backend or Graphs()
    return add_fast_path(torch.compile(fn, backend=backend, **options), backend), backend


def known(f):
    return (f.forward if isinstance(f, torch.nn.Module) else f)._reflib_entries


def call(f, *args, fast=1, **kwargs):
    """The result of a call, which must have taken the fast path (0: the slow one)."""
    before = known(f).hits
    result = f(*args, **kwargs)
    assert known(f).hits - before == fast
    return result


def agree(f, fn, *args, fast=1, **kwargs):
    """A call returns what ``fn`` returns, by the path that is expected (None: either)."""
    got = f(*args, **kwargs) if fast is None else call(f, *args, fast=fast, **kwargs)
    close(got, fn(*args, **kwargs))


def warm(fn, *args, **kwargs):
    """``fn`` with a fast path, after the first call."""
    f, _ = compiled(fn)
    f(*args, **kwargs)
    return f


def double(x):
    return x * 2 + 1


def breaks(x):
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2
