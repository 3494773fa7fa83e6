"""An index that is out of range: an IndexError that names the operation and the user's line, on a CPU."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import reflib


def embedding(w, i):
    return F.embedding(i, w) * 2


def gather(w, i):
    return torch.gather(w, 0, i[:, None].expand(-1, 4)) + 1


def index_select(w, i):
    return (w.sin() + torch.index_select(w, 0, i).sum()).exp()


def index(w, i):
    return w[i].relu()


def index_put(w, i):
    w = w.clone()
    w[i] = 1
    return w


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("fn", [embedding, gather, index_select, index, index_put], ids=lambda f: f.__name__)
def test_the_error_names_op_and_line(fn, wrapper):
    f, w = reflib.compile(fn, wrapper=wrapper), torch.randn(10, 4)
    good = torch.tensor([1, 9, 0])
    torch.testing.assert_close(f(w, good), fn(w, good))
    lines, first = inspect.getsourcelines(fn)
    for bad in (10, 2**40, -(2**63)):
        with pytest.raises(IndexError, match=rf"kernel k\d+_\w+, .*aten\.{fn.__name__}\S* at test_index_errors") as e:
            f(w, torch.tensor([1, bad, 0]))
        line = int(str(e.value).split("test_index_errors.py:")[1].split()[0])
        assert first < line < first + len(lines) and fn.__name__ in lines[line - first].replace("w[i]", fn.__name__)
    torch.testing.assert_close(f(w, good), fn(w, good))
