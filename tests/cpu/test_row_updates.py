"""What rows are reduced to is added at places that tensors name in the same kernel; one number per row, looked up, is
computed where the row is read; masks that loads do without."""

import random
from typing import Any

import pytest
import torch
from fuse_cases import kernels
from test_accumulate import adding, fused

import reflib


def adagrad(state: torch.Tensor, table: torch.Tensor, i: torch.Tensor, grad: torch.Tensor) -> Any:
    state = state.index_add(0, i, grad.square().mean(1))
    return table.index_add(0, i, grad * (-0.1 / (state[i].sqrt() + 1e-3))[:, None]), state


@pytest.mark.parametrize("seed", range(4))
def test_what_a_row_is_reduced_to_is_added_in_its_kernel(seed: int) -> None:
    r = random.Random(seed)
    rows, columns, more = (r.randint(8, 20) for _ in range(3))  # (of fewer columns the number per row is stored)
    table, i = torch.randn(rows + 50, columns), torch.randint(0, rows + 50, (30 + more,))
    given = torch.rand(rows + 50), table, i, torch.randn(len(i), columns)
    f = fused(adagrad, *given, symbolic=r.random() < 0.5)
    reduced, each = adding(f)
    assert reduced.reduced and not each.reduced and len(kernels(f)) == 4  # two are copies


def test_what_is_added_for_each_element_or_by_other_rows_is_not() -> None:
    def each(x: torch.Tensor, i: torch.Tensor) -> Any:
        return (torch.zeros(5, 8).index_add(0, i, x - x.mean(1, keepdim=True)),)

    def others(x: torch.Tensor, i: torch.Tensor) -> Any:
        return torch.zeros(5).index_add(0, i, x[:, 0]), x.sum(0)

    def scan(x: torch.Tensor, i: torch.Tensor) -> Any:
        return (torch.zeros(5).index_add(0, i, x.cumsum(1).amax(1)),)

    for fn in (each, others, scan):
        assert not any(n.reduced for n in adding(fused(fn, torch.randn(8, 8), torch.randint(0, 5, (8,)))))


def steps(x: torch.Tensor, scale: torch.Tensor, i: torch.Tensor) -> Any:
    return (x * scale[i].exp()[:, None],)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_per_row_is_looked_up_where_the_row_is_read(dtype: torch.dtype) -> None:
    """Inside, so that what neighbours have is one load; 0 where a position is out of range."""
    x, scale, i = torch.randn(40, 64, dtype=dtype), torch.randn(9, dtype=dtype), torch.randint(-9, 9, (40,))
    e = reflib.explain(lambda *a: steps(*a)[0], x, scale, i, target="sm_90")
    (kernel,) = e.kernels
    assert "mask=ok" not in kernel.source and kernel.source.count("tl.load") == 3
    assert len(kernels(fused(steps, x, scale, i))) == 1


def test_a_mask_goes_where_each_element_exists() -> None:
    def masks(fn: Any, *args: torch.Tensor) -> int:
        return reflib.explain(fn, *args, target="sm_90").kernels[0].source.count("mask=v")

    x = torch.randn(8, 1 << 12)
    assert masks(lambda x: torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1), x) == 1  # the one before the first
    assert masks(lambda x: torch.cat([x[:, :-1] - x[:, 1:], x[:, -1:]], 1), x) == 1
    assert masks(lambda x: torch.nn.functional.pad(x[:, 3:] * 2, (3, 0)), x) == 0
    assert masks(lambda x: torch.nn.functional.pad(x[:, 3:] * 2, (0, 3)), x) == 1  # past the end
    assert masks(lambda x: torch.nn.functional.pad(x[:, 2048:] * 2, (2048, 0)), x) == 1  # half of the elements


@pytest.mark.parametrize("seed", range(4))
def test_differences_that_keep_an_end(seed: int) -> None:
    r = random.Random(seed)
    x = torch.randn(r.randint(1, 5), r.randint(20, 90))
    i, j = (torch.randint(0, n, (n,)) for n in x.shape)
    k = r.randint(1, 2)

    def fn(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> Any:
        first = torch.cat([x[:, :k], x[:, k:] - 0.9 * x[:, :-k]], 1)
        last = torch.cat([x[:, :-k] * x[:, k:], x[:, -k:]], 1)
        rows = torch.cat([x[i][:, :k], x[i][:, k:] - x[i][:, :-k]], 1) + first
        columns = torch.cat([x[:, j][:, :k], x[:, j][:, k:] - x[:, j][:, :-k]], 1)
        return first, last, torch.nn.functional.pad(x[:, k:], (k, 0)) + x, rows, columns

    fused(fn, x, i, j, symbolic=r.random() < 0.3)
