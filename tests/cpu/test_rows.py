"""Pointwise kernels in blocks of rows: what is aligned is found out, and where it is not no element divides."""

import random
import re

import pytest
import torch
import torch.nn.functional as F
from awkward_layouts import bytes_of, differences_in_time, normalized_pixels, shuffled_channels

import reflib
from reflib.ir.expr import Expr, Var, expr
from reflib.ir.traffic import Access
from reflib.schedule.uneven import in_pieces


def random_index(rng: random.Random, x: Var) -> Expr:
    """What a flattened view of x may be: rows and columns, padded, reversed, rolled, of odd and even lengths."""
    columns = rng.choice([3, 8, 24, 40, 51, 64])
    row, column = expr(x) // columns, expr(x) % columns
    if rng.random() < 0.3:
        row = (row + rng.choice([1, 4, 8])) % 7
    if rng.random() < 0.2:
        column = (column + rng.choice([1, 8])) % columns
    stride = rng.choice([0, 1, columns, columns, columns + 1, 2 * columns, 64])
    return row * stride + column * rng.choice([1, 1, 1, 2]) + rng.choice([0, 0, 0, 1, 8])


def test_pieces_are_contiguous_and_aligned() -> None:
    rng, x = random.Random(0), Var("x", expr(24 * 40 * 51))
    found = {True: 0, False: 0}
    for _ in range(300):
        index, itemsize = random_index(rng, x), rng.choice([2, 4])
        lane = 16 // itemsize
        at = torch.as_tensor(index.evaluate({x: torch.arange(4096)})).view(-1, lane)
        whole = bool((at[:, :1] % lane == 0).all()) and bool((at - at[:, :1] == torch.arange(lane)).all())
        said = in_pieces(Access(index, itemsize, False), x)
        assert whole or not said, index
        found[said == whole] += 1
    assert found[False] < 0.1 * found[True]  # few are missed


AWKWARD = {
    "channels": (shuffled_channels, lambda: (torch.empty(16, 116, 57, 57, dtype=torch.bfloat16),)),
    "gather": (lambda x, i: x[i], lambda: (torch.empty(3011, 333), torch.zeros(40009, dtype=torch.int64))),
    "differences": (differences_in_time, lambda: (torch.empty(64, 80, 3001),)),
    "interpolated": (lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"), lambda: (torch.empty(64, 80, 1001),)),
    "frames": (lambda x: x.unfold(-1, 401, 160) * 0.5, lambda: (torch.empty(32, 48003),)),
    "pixels": (normalized_pixels, lambda: (bytes_of(8, 224, 224, 3), torch.empty(3), torch.empty(3))),
}


# (Of padded rows whose sizes are symbols the padding's own division by a sum of symbols stays.)
CASES = [(n, d) for n in AWKWARD for d in (False, True) if not (d and n == "differences")]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_no_element_divides(name: str, dynamic: bool) -> None:
    """Rows do: x is in no quotient. And all is one kernel."""
    fn, make = AWKWARD[name]
    (kernel,) = reflib.explain(fn, *make(), target="sm_90", dynamic=dynamic).kernels
    assert "YBLOCK" in kernel.source
    assert not re.search(r"\bx (//|%) ", kernel.source)
    assert "tl.div_rn" not in kernel.source


def test_aligned_rows_stay_flat() -> None:
    x = torch.empty(64, 232, 28, 28, dtype=torch.bfloat16)
    (kernel,) = reflib.explain(shuffled_channels, x, target="sm_90").kernels
    assert "YBLOCK" not in kernel.source


def test_several_kernels_in_one_launch_stay_flat() -> None:
    """Parts share their blocks."""
    x, y = torch.empty(8, 12, 57, 57), torch.empty(8, 16, 51, 51)
    (kernel,) = reflib.explain(lambda x, y: (shuffled_channels(x), shuffled_channels(y)), x, y, target="sm_90").kernels
    assert "YBLOCK" not in kernel.source
