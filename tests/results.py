"""Which memory a compiled function's results share, and how they lie in it. Shared by tests/cpu and tests/gpu, which
give the fixture ``device``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.semantics import compare, randn


def _seen(z: torch.Tensor, x: torch.Tensor) -> Any:
    w, v = z + 1, x * 2
    return (
        w.conj().t(), w, w.conj().imag, w.real, v.view(torch.int16), v.t(), v.view(torch.uint8).chunk(2)[1],
        torch.view_as_complex(v.unflatten(1, (-1, 2))), (x + 1).view(torch.int32), x.view(torch.int32),
    )  # fmt: skip


SHARE: dict[str, Callable[..., Any]] = {
    "another dtype, parts, conjugates": _seen,
    "parts of what is computed as pairs": lambda z, x: (lambda p: (p.imag, p.real, p.abs()))(torch.polar(x, x) * z),
    "through unlike views": lambda z, x: (lambda p: (p.imag.t(), p.t().real, p.abs()))(torch.polar(x, x) * z),
    "a transform's parts": lambda z, x: (lambda p: (p.imag, p.real, p.abs()))(torch.fft.fft(z * z)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SHARE)
def test_results_share_memory_as_eagers_do(device: str, name: str, dynamic: bool) -> None:
    x = randn(6, 8, device=device)
    z = torch.complex(x, x.flip(0))
    for wrapper in ("python", "cpp"):
        compiled = compare(SHARE[name], z, x, dynamic=dynamic, wrapper=wrapper)
        for now, want in zip(compiled(z, x), SHARE[name](z, x), strict=True):
            assert (now.is_conj(), now.is_neg()) == (want.is_conj(), want.is_neg())


@pytest.mark.parametrize("fn", [F.channel_shuffle, F.pixel_unshuffle, F.pixel_shuffle])
def test_shuffled_tensors_are_new_and_lie_as_eagers_do(device: str, fn: Callable[..., Any]) -> None:
    """Also where nothing moves, or the tensor is channels-last."""
    shapes = [(2, 4, 4, 6), (5, 4, 2, 2), (4, 4, 4)]
    for n in (1, 2, 4) if fn is F.channel_shuffle else (1, 2):
        xs = [randn(*shape, device=device) for shape in shapes]
        xs.append(xs[0].to(memory_format=torch.channels_last))
        xs += [xs[1].mT] if fn is not F.channel_shuffle else []  # (eager views it: 2.11 raises on a GPU)
        compare(lambda *xs, n=n: [fn(x, n) for x in xs], *xs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_size_that_a_guard_says_is_one(device: str, dynamic: bool) -> None:
    """(Its expression does not: half of 3, rounded down.)"""

    def f(x: torch.Tensor) -> torch.Tensor:
        last = x.clone().chunk(2, 0)[-1]
        last.copy_(last.cumsum(0)).mul_(last.softmax(0))
        return last

    compare(f, randn(3, device=device), dynamic=dynamic)
    compare(f, randn(3, 4, device=device), dynamic=dynamic)
