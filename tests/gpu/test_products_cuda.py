"""The library's products and convolutions, prepared by kernels of ours: padding, biases, channels-last order."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from reflib.ir.traffic import SECTOR
from reflib.lower.padding import IN_PLACE_SHARED
from reflib.target import device_target
from tests.checking import check
from tests.semantics import Compiled, compare

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(torch.version.hip is not None, reason="cuBLAS and cuDNN")


def microseconds(fn, *args) -> float:
    """Of one of 20 calls, after a warm-up."""
    for _ in range(3):
        fn(*args)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        fn(*args)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / 20


@pytest.mark.parametrize("seed", range(3))
def test_odd_vocabularies(seed: int) -> None:
    """Forward in place, where a GPU has memory for that, else and backward by padded products; as exact as eager."""
    rng = random.Random(seed)
    tokens, width, vocabulary = rng.choice([512, 1000, 2048]), 64 * rng.randint(6, 16), rng.randint(20000, 50000) | 1
    x, w = (torch.randn(s, device="cuda", dtype=BF16) * 0.3 for s in ((tokens, width), (vocabulary, width)))
    b = torch.randn(vocabulary, device="cuda", dtype=BF16)
    args = [t.requires_grad_() for t in (x, w, b)]
    compiled = Compiled(F.linear)
    check(F.linear, compiled, *args, backward=True)
    calls = [n for n in compiled.externs if "padded" in n.reason]  # a product in strips is several
    padded = {b.split(end)[0] for n in calls for b in n.writes() for end in ("_part", "_rest", "_padded") if end in b}
    target = device_target("cuda")
    in_place = target.capability >= 90 and target.shared >= IN_PLACE_SHARED
    assert len(padded) == 3 - in_place, "the result, and the gradients of x and of w"


@pytest.mark.alone
@pytest.mark.parametrize(("m", "n", "k"), [(2048, 30522, 768), (512, 51865, 384), (2048, 768, 30522)])
def test_padding_pays(m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k, device="cuda", dtype=BF16), torch.randn(n, k, device="cuda", dtype=BF16)
    plain, padded = microseconds(F.linear, a, b), microseconds(Compiled(F.linear).fn, a, b)
    print(f"{m} x {n} x {k}: {plain:.0f} us, padded, with its copies, {padded:.0f} us")
    assert padded < plain


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(64, 128, 1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1, groups=32), nn.ReLU(), nn.Conv2d(128, 64, 1)
    )


def audio() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(80, 384, 3, padding=1), nn.GELU(), nn.Conv1d(384, 384, 3, 2, 1), nn.GELU(),
        nn.Conv1d(384, 384, 16, padding=8, groups=8), nn.GELU(),
    )  # fmt: skip


class Short(nn.Module):
    """A depthwise convolution of a transposed sequence, as in Mamba and Conformer."""

    def __init__(self, taps: int, padding: int):
        super().__init__()
        self.mix, self.conv = nn.Linear(96, 2 * 160), nn.Conv1d(160, 160, taps, padding=padding, groups=160)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, x = self.mix(x).chunk(2, -1)
        return F.silu(self.conv(x.mT)[..., : x.shape[1]].mT) * gate


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("taps", "padding"), [(4, 3), (7, 3), (31, 15)])
def test_depthwise_sequences(taps: int, padding: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    net = Short(taps, padding).to("cuda", dtype)
    names, args = zip(*net.named_parameters())

    def fn(x: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, dict(zip(names, args)), (x,))

    compiled = Compiled(fn)
    check(fn, compiled, torch.randn(3, 301, 96, device="cuda", dtype=dtype), *args, backward=True)
    convolutions = [n for n in compiled.externs if "convolution" in str(n.target)]
    assert len(convolutions) == 2 * (taps * dtype.itemsize > SECTOR), "each lane would read several sectors of weights"


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("window", "stride"), [((4, 4), 2), ((1, 7), 1), ((2, 2), 2), ((3, 2), (2, 1))])
def test_depthwise_windows_of_channels_last_images(
    window: tuple[int, int], stride: int | tuple[int, int], dtype: torch.dtype
) -> None:
    """Of which cuDNN's only kernel is slow: loops, gradients too, where a lane's weights are one sector."""
    x = torch.randn(3, 40, 33, 29, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.gelu(x), w, None, stride, (1, 0), 1, 40).sin()

    compiled = Compiled(fn)
    check(fn, compiled, x, torch.randn(40, 1, *window, device="cuda", dtype=dtype), backward=True)
    assert bool(compiled.externs) == (window[0] * window[1] * dtype.itemsize > SECTOR)


NETS = {"grouped": (grouped, (4, 64, 28, 28)), "audio": (audio, (2, 80, 1000))}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_convolutions(name: str, train: bool) -> None:
    """No call adds a bias or sums its gradient; in inference every operand is in channels-last order."""
    torch.manual_seed(1)
    make, shape = NETS[name]
    net = make().to("cuda", BF16).requires_grad_(train)
    names, args = zip(*net.named_parameters())

    def fn(x: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, dict(zip(names, args)), (x,))

    compiled = Compiled(fn)
    check(fn, compiled, torch.randn(shape, device="cuda", dtype=BF16), *args, backward=train)
    for n in compiled.externs:
        if n.target is torch.ops.aten.convolution.default:
            assert n.args[2] is None
            assert train or all(v.strides[1] == 1 for v in n.args[:2])
        elif n.target is torch.ops.aten.convolution_backward.default:
            assert not n.args[-1][2]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_of_small_depth(seed: int, dtype: torch.dtype) -> None:
    """Points times few coefficients, and the coefficients' gradients, sums over all points: no call of the library."""
    rng = random.Random(seed)
    points, depth, columns = rng.randint(40_000, 90_000), rng.randint(2, 8), rng.randint(1, 3)
    x, w, b = (torch.randn(s, device="cuda", dtype=dtype) for s in ((points, depth), (depth, columns), (columns,)))
    args = [t.requires_grad_() for t in (x, w, b)]
    of_points = compare(lambda x, w, b: torch.addmm(b, x * 2, w, alpha=0.5).sigmoid(), *args, backward=True)
    batch = torch.randn(points // 4, 3, depth, device="cuda", dtype=dtype)
    of_matrices = compare(lambda x, w: torch.einsum("bij,bjk->bki", x, w).abs(), batch, batch.mT.contiguous())
    assert not of_points.externs and not of_matrices.externs
