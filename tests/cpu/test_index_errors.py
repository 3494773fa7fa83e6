"""An index that is out of range: an IndexError that names the operation and the user's line, on a CPU."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from interpreter import results

import reflib
from reflib.generate.compile_triton import compile_kernel
from reflib.target import parse_target


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


def index_fill(w, i):
    return w.clone().index_fill_(0, i, 1)


FROM_THE_END = (index, index_put, index_fill)  # places may be counted so


@pytest.mark.each
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("fn", [embedding, gather, index_select, *FROM_THE_END], ids=lambda f: f.__name__)
def test_the_error_names_op_and_line(fn, wrapper):
    f, w = reflib.compile(fn, wrapper=wrapper), torch.randn(10, 4)
    good = torch.tensor([1, 9, 0])
    torch.testing.assert_close(f(w, good), fn(w, good))
    lines, first = inspect.getsourcelines(fn)
    from_the_end = torch.tensor([1, -1, -10])
    if fn in FROM_THE_END:
        torch.testing.assert_close(f(w, from_the_end), fn(w, from_the_end))
    for bad in (10, 2**40, -(2**63), *(() if fn in FROM_THE_END else (-1,))):
        with pytest.raises(IndexError, match=rf"kernel k\d+_\w+, .*aten\.{fn.__name__}\S* at test_index_errors") as e:
            f(w, torch.tensor([1, bad, 0]))
        line = int(str(e.value).split("test_index_errors.py:")[1].split()[0])
        assert first < line < first + len(lines) and fn.__name__ in lines[line - first].replace("w[i]", fn.__name__)
    torch.testing.assert_close(f(w, good), fn(w, good))


def test_negative_indices_are_legal_where_they_are_in_eager() -> None:
    """All other ops that take indices."""
    x, v, i = torch.randn(5, 4), torch.randn(3, 4), torch.tensor([0, -1, 2])
    at = torch.tensor([[0, -1, 2, 1], [-5, 3, 1, 0]])

    def legal(x, v, i, at):
        fill = x.index_fill(0, i, 2.5), x.index_fill(-1, i, v[0, 0]), x.sign().long().index_fill(1, i[1], 7)
        y, z = x.clone(), x.t().clone()
        y[i[1]], z[:, i] = 0.5, v.t()
        added = x.index_put((i,), v, accumulate=True)
        return *fill, y, z, x[i, i], x[:, i], x.take(at), x.put(at, v[:2]), added, x.take_along_dim(at, 0)

    torch.testing.assert_close(reflib.compile(legal, dynamic=False)(x, v, i, at), legal(x, v, i, at))
    illegal = [
        lambda: x.scatter(0, at, v), lambda: x.scatter_add(0, at, v), lambda: x.scatter_reduce(0, at, v, "amax"),
        lambda: x.index_add(0, i, v), lambda: x.index_copy(0, i, v), lambda: x.index_reduce(0, i, v, "prod"),
        *(lambda n=n: F.max_unpool2d(v[:, None], torch.full((3, 1, 4), n), (1, 2)) for n in (-1, 8)),
    ]  # fmt: skip
    for fn in illegal:
        for run in (fn, reflib.compile(fn)):
            with pytest.raises((IndexError, RuntimeError), match=r"index (-1 is )?out of|out of bounds|max index"):
                run()


def test_a_gpus_assertions() -> None:
    """By option, where an index is not known to be in range, with a message; they are compiled, without Triton's own
    checks of integer additions, and without a path of this machine."""
    pytest.importorskip("triton")

    def fn(w, i, j):
        known = w[i.clamp(0, 9)], w[torch.arange(5)], w[i % 10], w[w.argmax(0)], w[torch.cat([i % 4, i.clamp(3, 5)])]
        return known, embedding(w, i), torch.gather(w, 1, j + 1), index_put(w, i)

    args = torch.randn(10, 4), torch.tensor([1, 9, 0]), torch.ones(10, 3, dtype=torch.int64)
    off = reflib.explain(fn, *args, target="sm_90").kernels
    on = reflib.explain(fn, *args, target="sm_90", assert_indirect_indexing=True).kernels
    lines = [line for k in on for line in k.source.splitlines() if "device_assert" in line]
    assert not any("device_assert" in k.source for k in off)
    assert sorted({line.split("aten.")[1].split(".")[0] for line in lines}) == ["embedding", "gather", "index_put"]
    assert all("'index out of range: aten." in line and " test_index_errors.py:" in line for line in lines)
    (kernel,) = (k for k in on if "aten.gather" in k.source)
    ptx = compile_kernel(kernel, parse_target("sm_90")).ptx
    said = re.findall(r"assertMessage_\d+\[\d+\] = \{([\d, ]+)\}", ptx)
    texts = {bytes(map(int, s.split(", "))).decode().split(" ")[4] for s in said}
    assert "__assertfail" in ptx and texts <= {f"aten.{op}.default" for op in ("embedding", "gather", "index_put")}
    assert "aten.gather.default" in texts and str(Path.home()) not in ptx


def test_a_gpus_assertions_of_sums_in_one_order() -> None:
    """An index that is sorted is checked as well; from the end counts what ``index_put`` is given alone."""

    def fn(w, i, y):
        of_table = torch.ops.aten.embedding_dense_backward(y, i, 10, 3, False)
        return w.index_add(0, i, y), w.index_put((i + 1,), y, accumulate=True), of_table

    args = torch.randn(10, 4), torch.tensor([1, 9, 0]), torch.randn(3, 4)
    for said in (False, True):
        options = {"batch_invariant": True, "assert_indirect_indexing": said}
        stages = reflib.explain(fn, *args, target="sm_90", **options)
        lines = [line for k in stages.kernels for line in k.source.splitlines() if "device_assert" in line]
        ops = {line.split("aten.")[1].split(".")[0] for line in lines}
        assert ops == ({"index_add", "index_put", "embedding_dense_backward"} if said else set())
        assert str(stages.program).count("aten.sort.stable(") == 3  # (padding is skipped; -1 is a row for one alone)


def test_assertions_as_they_run() -> None:
    """(A process of its own, for Triton's interpreter.)"""
    pytest.importorskip("triton")
    found = results("triton_interpreting.py", "asserted")["asserted"]
    assert found.pop("inside") == "" and len(found) == 2
    assert all(text.startswith("InterpreterError: AssertionError(\"no 'such' row\")") for text in found.values()), found
