"""Launches of `@triton.jit` functions, run in the interpreter and compiled ahead of time."""

import pytest
import torch

from reflib import lab

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor


@triton.jit
def plus(x, amount):
    return x + amount


@triton.jit
def twice_by_blocks(x, out, amount, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i = tl.program_id(0) * ROWS
    out.store([i, 0], plus(2 * x.load([i, 0]), amount))


def by_blocks(x: torch.Tensor, out: torch.Tensor, columns: int) -> lab.Plan:
    blocks = [TensorDescriptor.from_tensor(t, [2, columns]) for t in (x, out)]
    return lab.Plan(twice_by_blocks, 2, (*blocks, 3), {"ROWS": 2, "COLUMNS": columns, "num_warps": 2})


def test_plans_run_without_a_gpu_with_descriptors_numbers_and_helpers() -> None:
    x, out, more = torch.arange(15.0).view(3, 5)[:, :4], torch.zeros(3, 4), torch.zeros(3, 4)
    x = torch.nn.functional.pad(x, (0, 4))[:, :4]  # rows of 32 bytes, as a descriptor wants them
    lab.run_plans([by_blocks(x, out, 4), by_blocks(out, more, 4)])
    assert torch.equal(out, 2 * x + 3) and torch.equal(more, 4 * x + 9)


def test_a_plan_is_compiled_for_a_gpu_that_is_not_here() -> None:
    made = lab.compile_plan(by_blocks(torch.zeros(4, 32), torch.zeros(4, 32), 32))
    assert "cp.async.bulk.tensor" in made.texts["ptx"] and made.shared > 0
    assert "sm_90" in made.texts["ptx"] and "plus" not in made.texts["ptx"]
