"""lower.search: places in sorted sequences, as eager finds them, in sequences that are not sorted too."""

import pytest
import torch
from fuse_cases import CPU, GPU, calls, fused, kernels
from torch import Tensor
from torch.nn import functional as F

SEARCH, BUCKETIZE = torch.searchsorted, torch.bucketize


def places(s: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    rows = SEARCH(s, x), SEARCH(s, x, right=True, out_int32=True), SEARCH(s, x[:, :0])
    return *rows, SEARCH(s[0], 2, side="right"), BUCKETIZE(x, s[-1].float(), right=True), BUCKETIZE(1.5, s[1])


def sequences(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    x = torch.randint(0, 9, (6, 31), generator=g).to(dtype)
    s = torch.randint(0, 9, (6, n), generator=g).to(dtype).sort(-1).values
    if dtype.is_floating_point:
        x[:, :3] = torch.tensor([float("nan"), float("-inf"), -0.0])
        s[1, -1:] = s[2, n // 2 :] = float("nan")
    s[3] = s[3].flip(0)
    return s, x


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 100])
def test_places(n: int, dtype: torch.dtype) -> None:
    s, x = sequences(n, dtype)
    assert not calls(fused(places, (s, x), CPU if n == 8 else GPU))
    if n == 7:
        assert not calls(fused(places, (s.t().contiguous().t(), x.t().contiguous().t())))


def test_what_stays_a_call() -> None:
    s, x = sequences(7, torch.float32)
    assert len(calls(fused(lambda s, x: (SEARCH(s, x, sorter=s.argsort(-1)),), (s[:1], x[:1])))) >= 1
    assert len(calls(fused(lambda s, x: (SEARCH(s, x),), (s, x), symbolic=True))) == 1


def sample_pdf(bins: Tensor, weights: Tensor, u: Tensor) -> tuple[Tensor]:
    """Of NeRF: places drawn from a piecewise constant density, by inverting its sums."""
    cdf = F.pad((weights / weights.sum(-1, keepdim=True)).cumsum(-1), (1, 0))
    above = SEARCH(cdf, u, right=True)
    ends = torch.stack([(above - 1).clamp(min=0), above.clamp(max=cdf.shape[-1] - 1)], -1)
    shape = (*ends.shape[:2], cdf.shape[-1])
    c, b = (t[:, None].expand(shape).gather(2, ends) for t in (cdf, bins))
    width = c[..., 1] - c[..., 0]
    t = (u - c[..., 0]) / torch.where(width < 1e-5, 1.0, width)
    return (b[..., 0] + t * (b[..., 1] - b[..., 0]),)


def test_a_search_fuses_with_what_is_around() -> None:
    """The search is made once, although a ``stack`` of two that are computed from it reads it twice."""
    g = torch.Generator().manual_seed(0)
    bins, weights, u = torch.rand(9, 17, generator=g), torch.rand(9, 16, generator=g), torch.rand(9, 40, generator=g)
    sums, search = kernels(fused(sample_pdf, (bins.sort(-1).values, weights, u)))
    assert sums.rnumel == 16 and search.numel == 9 * 40 and len(search.loads()) < 12
