"""What rows are reduced to is added at places that tensors name in the same kernel; one number per row, looked up, is
computed where the row is read."""

import random
from typing import Any

import pytest
import torch
from fuse_cases import kernels
from test_accumulate import adding, fused


def adagrad(state: torch.Tensor, table: torch.Tensor, i: torch.Tensor, grad: torch.Tensor) -> Any:
    state = state.index_add(0, i, grad.square().mean(1))
    return table.index_add(0, i, grad * (-0.1 / (state[i].sqrt() + 1e-3))[:, None]), state


@pytest.mark.parametrize("seed", range(4))
def test_what_a_row_is_reduced_to_is_added_in_its_kernel(seed: int) -> None:
    r = random.Random(seed)
    rows, columns, more = (r.randint(1, 12) for _ in range(3))
    table, i = torch.randn(rows + 1, columns + 1), torch.randint(0, rows + 1, (30 + more,))
    given = torch.rand(rows + 1), table, i, torch.randn(len(i), columns + 1)
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
