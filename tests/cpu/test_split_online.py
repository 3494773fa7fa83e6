"""Few, long rows, or columns: a maximum and the sum of exponentials that needs it, in one pass over each piece. (In
Triton's interpreter: test_triton_programs.)"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_cases import CPU, GPU, fused, kernels, lowered

from reflib.fuse.split import pieces_wanted
from reflib.ir.loops import LoopNest

SIZES = random.Random(7)
FUNCTIONS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "softmax": lambda x: (x.softmax(-1),),
    "log_softmax": lambda x: (x.log_softmax(-1),),
    "logsumexp": lambda x: (x.logsumexp(-1, keepdim=True) * 2,),
    "scaled": lambda x: ((x * 0.5 + 1).softmax(-1),),
    "weighted": lambda x: ((x.cos() * torch.exp(x - x.amax(-1, keepdim=True) + 1)).sum(-1),),
    "by a factor": lambda x: (torch.exp(x - x.amax(-1, keepdim=True) * 0.5).mul(x.cos()).sum(-1),),
}


def rows(n: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, length, generator=torch.Generator().manual_seed(length)).to(dtype)


def read(f: Any, name: str) -> int:
    """Kernels that read this buffer."""
    return sum(name in n.reads() for n in f.program.nodes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_row_is_read_once_for_both(name: str) -> None:
    """An odd length, whose last piece is shorter; the expected number of passes over x."""
    x = rows(3, 2 * SIZES.randint(10_000, 40_000) + 1)
    f = fused(FUNCTIONS[name], (x,))
    source = f.program.inputs[0]
    if name == "weighted":  # + 1 is behind the difference: not of the form, cut one after the other as before
        assert read(f, source) == 2
        return
    elementwise = "softmax" in name or name == "scaled"
    assert read(f, source) == (2 if elementwise else 1)
    assert len(kernels(f)) == (3 if elementwise else 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_columns_are_read_once_too(dim: int) -> None:
    columns, length = SIZES.randint(40, 90), 2 * SIZES.randint(4_000, 9_000) + 1
    x = rows(length * 3**dim, columns).reshape(*[3] * dim, length, columns)
    f = fused(lambda x: (x.logsumexp(dim),), (x,))
    assert read(f, f.program.inputs[0]) == 1 and len(kernels(f)) == 2


def test_columns_behind_a_copy_too() -> None:
    """The rows of a transposed tensor, which was copied, are columns of memory."""
    x = rows(2 * SIZES.randint(500, 900) + 1, SIZES.randint(40, 90))
    f = fused(lambda x: (x.t().contiguous().logsumexp(1),), (x,))
    assert read(f, f.program.inputs[0]) == 1 and len(kernels(f)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = rows(2, 65536, dtype)
    f = fused(lambda x: (x.float().logsumexp(-1) if dtype == torch.bfloat16 else x.logsumexp(-1),), (x,))
    assert read(f, f.program.inputs[0]) == 1


def test_sizes_known_at_run_time() -> None:
    x = rows(2, 50_001)
    f = fused(FUNCTIONS["logsumexp"], (x,), symbolic=True, run_on=[(rows(3, 70_002),)])
    assert read(f, next(i for i in f.program.inputs if isinstance(i, str))) == 1


def test_infinities_and_nan() -> None:
    """In some pieces, in all, and next to numbers far from 0, whose exponentials are 0 or infinite."""
    inf, nan = float("inf"), float("nan")
    x = rows(8, 60_000)
    x[0, :40_000], x[1], x[2, 7], x[3, 50_000], x[4, 9] = -inf, -inf, inf, nan, -inf
    x[5] -= 1000
    x[6] += 1000
    x[7], x[7, 30_000:] = -inf, -1000
    for name in ("softmax", "log_softmax", "logsumexp"):
        f = fused(FUNCTIONS[name], (x,))
        assert read(f, f.program.inputs[0]) <= 2


def test_what_is_in_between_is_not_read_again_if_it_changes() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        top = x.amax(-1, keepdim=True)
        d = x - top
        x.copy_(x + 1)
        return torch.exp(d).sum(-1), top

    fused(fn, (rows(2, 40_000),))


def test_cross_entropy_has_three_passes_less() -> None:
    f = fused(lambda x, t: (F.cross_entropy(x, t),), (rows(3, 80_001), torch.tensor([5, 70_000, 3])))
    source = f.program.inputs[0]
    walked = [n for n in f.program.nodes if isinstance(n, LoopNest) and n.rnumel.hint() > 100 and source in n.reads()]
    assert len(walked) == 1  # the other read is of one logit per row


def test_a_cpu_splits_as_before() -> None:
    f = fused(FUNCTIONS["logsumexp"], (rows(1, 1 << 17),), target=CPU)
    assert not any("isinf" in str(n) for n in f.program.nodes)


def test_rows_are_weighed_against_multiprocessors() -> None:
    """What idle multiprocessors could have read must be worth a second kernel."""

    def pieces(n: int, length: int, dtype: torch.dtype = torch.float32) -> int:
        program = lowered(lambda x: (x.amax(-1),), (torch.empty(n, length, dtype=dtype),))
        (node,) = (x for x in program.nodes if isinstance(x, LoopNest))
        return pieces_wanted(node, program.buffers, GPU)

    assert GPU.units == 132
    assert pieces(8, 128_256) > 1 and pieces(8, 8192) > 1
    assert pieces(241, 12_000) == 1  # 23 of 264 places are free, for 48 KB each
    assert pieces(140, 128_256) > 1  # most of the second round's are
    assert pieces(264, 128_256) == 1 and pieces(120, 9000) == 1
