"""plan.peak: kernels that hold much memory at the peak, and save little traffic for it, are formed again as two. All
sizes are those of a GPU; nothing is run there."""

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reflib
from reflib.capture import recomputable
from reflib.fuse import combine
from reflib.plan import peak
from reflib.plan.order import Lifetimes, owned


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).float().square().mean()


ROWS, WIDTH = 16384, 512
UNIT = 2 * ROWS * WIDTH  # bytes


def backward(layers: int, rounds: int = peak.ROUNDS, rows: int = ROWS, **options: Any) -> Any:
    torch._dynamo.reset()
    x = torch.empty(rows, WIDTH, dtype=torch.bfloat16)
    model = Model(WIDTH, layers).bfloat16()
    with mock.patch.object(peak, "ROUNDS", rounds):
        return reflib.explain(model, x, target="sm_90", dynamic=False, **options).backward


def moved(e: Any) -> int:
    return peak._moved(e.fused)


def test_four_blocks_computed_again_need_no_more_than_one_at_a_time() -> None:
    """The products' results are saved, 5 units per block: of the last one, two tensors of 4 units are live beside them,
    and its gradient. (TorchInductor 2.13: 28 units.)"""
    before, now = (backward(4, rounds, activation_memory_budget=0.5) for rounds in (0, peak.ROUNDS))
    saved = 4 * 5
    assert before.memory.peak_bytes > 29 * UNIT and now.memory.peak_bytes < (saved + 4.5) * UNIT
    assert moved(now) < moved(before) + 2.5 * UNIT  # no norm is kept in float32
    assert len(now.kernels) <= len(before.kernels) + 3


@pytest.mark.sample(2)
@pytest.mark.parametrize(("budget", "units"), [(0.1, 17.5), (0.3, 22.5)])
def test_products_computed_again(budget: float, units: float) -> None:
    before, now = (backward(4, rounds, activation_memory_budget=budget) for rounds in (0, peak.ROUNDS))
    less = before.memory.peak_bytes - now.memory.peak_bytes
    assert less >= 0 and now.memory.peak_bytes < units * UNIT
    more = moved(now) - moved(before) + peak.LAUNCH[1] * (len(now.kernels) - len(before.kernels))
    share = peak.SHARE * less / before.memory.peak_bytes  # (each round by itself: of a lower peak, of more traffic)
    assert more <= less or more / moved(before) <= 1.1 * share


@pytest.mark.parametrize("budget", [None, 0.5])
def test_small_programs_and_those_with_nothing_at_stake_stay_as_they_are(budget: float | None) -> None:
    rows = 64 if budget else ROWS
    programs = [backward(2, n, rows=rows, activation_memory_budget=budget).fused for n in (0, peak.ROUNDS)]
    assert str(programs[0]) == str(programs[1])


def test_gradients_are_eagers() -> None:
    x, model = torch.randn(70, 40), Model(40, 3)
    want = torch.autograd.grad(model(x), list(model.parameters()))
    found: list[bool] = []

    def looked(*args: Any) -> bool:
        found.append(pays(*args))
        return found[-1]

    pays = peak._pays
    with mock.patch.object(peak, "LAUNCH", (0, 0)), mock.patch.object(peak, "_pays", looked):
        compiled = reflib.compile(model, activation_memory_budget=0.5, verify=True)
        got = torch.autograd.grad(compiled(x), list(model.parameters()))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert any(found)


def test_time_is_linear_in_the_number_of_blocks() -> None:
    """Counted: pairs that the grouping compares in all rounds."""
    calls = {}
    for layers in (3, 6):
        graphs: list[Any] = []
        count = 0
        rule = peak._Cut.__call__

        def counted(*args: Any, rule: Callable[..., Any] = rule) -> Any:
            nonlocal count
            count += 1
            return rule(*args)

        with mock.patch.object(peak._Cut, "__call__", counted):
            graphs.append(backward(layers, activation_memory_budget=0.5))
        calls[layers] = count
    assert 0 < calls[6] <= 2.3 * calls[3]


def test_views_of_one_saved_tensor_are_one_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are saved where torch's list is used alone."""
    monkeypatch.setattr(recomputable, "VIEWS", ())

    def fn(x: Tensor, w: Tensor) -> Tensor:
        gate, up = (x @ w).chunk(2, -1)
        return F.silu(gate) * up

    x, w = torch.randn(64, 32), torch.randn(32, 2 * 96, requires_grad=True)
    back = reflib.explain(fn, x, w, dynamic=False).backward
    found = owned(back.stages)
    product = 4 * 64 * 2 * 96
    assert [own.bytes for own in found.values()].count(product) == 2
    assert sum({own.storage: own.bytes for own in found.values()}.values()) < 2 * product
    alive = Lifetimes(back.scheduled, found)
    assert alive.start <= product + 4 * 64 * 96 + x.nbytes  # and the gradient; x transposed
    at_peak = alive.peak(range(alive.n))
    apart = {name: own._replace(storage=name) for name, own in found.items()}
    assert Lifetimes(back.scheduled, apart).peak(range(alive.n)) == at_peak + product


def test_a_long_sum_is_added_up_as_its_terms_come() -> None:
    """``total = total + y @ v`` in every layer: one sum of all at the end would keep each of the terms until then."""

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for i in range(8):
            y = (x @ w[i]).tanh()
            total, x = total + y @ v[i], x + y
        return total.relu()

    args = torch.empty(4096, 512), torch.empty(8, 512, 512), torch.empty(8, 512, 512)
    peaks = []
    for rounds in (0, peak.ROUNDS):
        with mock.patch.object(peak, "ROUNDS", rounds):
            peaks.append(reflib.explain(fn, *args, target="sm_90").memory.peak_bytes // (4096 * 512 * 4))
    assert peaks[0] >= 9 and peaks[1] <= 6  # (eager: x, y, total, a term, and their sum)


class Skips(nn.Module):
    """Gated convolutions over audio (arXiv:2009.09761): half of each result goes on, the other halves are summed."""

    def __init__(self, c: int, layers: int):
        super().__init__()
        self.gated = nn.ModuleList(nn.Conv1d(c, 2 * c, 3, padding=1) for _ in range(layers))
        self.halves = nn.ModuleList(nn.Conv1d(c, 2 * c, 1) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0
        for gated, halves in zip(self.gated, self.halves):
            a, b = gated(x).chunk(2, 1)
            more, skip = halves(a.tanh() * b.sigmoid()).chunk(2, 1)
            x, total = (x + more) * 0.5**0.5, total + skip
        return total.relu()


def test_a_sum_that_forms_the_peak_itself() -> None:
    """Its terms are halves of something larger, so that no term's storage becomes the sum's."""
    model, x = Skips(64, 5).bfloat16(), torch.empty(8, 64, 8192, dtype=torch.bfloat16)
    peaks = []
    for rounds in (0, peak.ROUNDS):
        torch._dynamo.reset()
        with mock.patch.object(peak, "ROUNDS", rounds):
            memory = reflib.explain(model, x, target="sm_90", dynamic=False).memory
        peaks.append(memory.peak_bytes)
    eager = memory.eager_peak_bytes
    assert eager is not None and peaks[1] < eager < peaks[0]


class Upscaler(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(width, width, 3, padding=1) for _ in range(layers)))
        self.last = nn.Sequential(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x).relu())


def test_copies_of_weights_wait_behind_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in channels-last order of all weights share a launch, which the last convolution's backward waits for:
    here also with the image's, which has a launch of its own."""
    monkeypatch.setattr(combine, "TURNED_POINTS", combine.MAX_POINTS)
    rng = random.Random(7)
    width, layers = 64, rng.randint(16, 20)
    x = torch.empty(rng.randint(3, 5), width, 96, 96, dtype=torch.bfloat16)

    def backward() -> Any:
        torch._dynamo.reset()
        return reflib.explain(Upscaler(width, layers).bfloat16(), x, target="sm_90", dynamic=False).backward

    now = backward()
    with mock.patch.object(peak, "_launched_later", lambda fused, mine, target: fused):
        before = backward()
    assert len(now.kernels) == len(before.kernels) + 1
    copies = (layers - 1) * width * width * 9 * 2  # (the peak is at most one layer behind the last one)
    assert now.memory.peak_bytes <= before.memory.peak_bytes - copies
