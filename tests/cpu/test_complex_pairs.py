"""Complex numbers as pairs of real ones: the same results, and no calls where every op has a rule."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import reflib
from reflib.ir.program import Extern
from tests.semantics import Compiled

C = torch.view_as_complex


def rotary(x: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
    turned = C(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return (torch.view_as_real(turned).flatten(-2),)


def polar(x: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
    z = C(x.unflatten(-1, (-1, 2)))
    return z.abs(), z.angle(), (z / (z.abs() + 1)).real, (z.conj() * z).real, torch.sgn(z).imag


def arithmetic(x: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
    z = C(x.unflatten(-1, (-1, 2)))
    w = torch.complex(angle, angle.cos() + 2)[:, None]
    parts = (
        z * 2 - w, z / w, 3 - z, (1 + 2j) * z + 1j, z * angle[:, None], -z - 0.5 * w, torch.exp(z * 0.1j),
        angle[:, None] / w,
    )  # fmt: skip
    return tuple(torch.view_as_real(p) for p in parts)


def shapes(x: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
    z = C(x.unflatten(-1, (-1, 2))) * (1 - 2j)
    both = torch.cat([z.transpose(0, 1).flatten(1), z.transpose(0, 1).reshape(z.shape[1], -1)], 1)
    chosen = torch.where(angle[:, None] > 0, z, 0.5)
    return both.sum(1).real, chosen.mean((0, 1)).imag, z[1:, None].flip(0).abs(), z.cumsum(0).real.clone()


def spectra(x: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
    z = torch.fft.rfft(x.unfold(-1, 5, 2) * angle[:, :1, None, None])
    w = torch.fft.rfft(angle, dim=0) * torch.complex(angle[:3], angle[1:4])
    both = torch.fft.fft2(torch.complex(x[0], x[1]))
    back = torch.fft.ifft2(both * both.conj() + 1).real
    return z.abs().clamp(1e-3).log(), torch.fft.irfft(w, 4, 0).contiguous(), back


def power(x: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
    """A transform of which only the parts are used, after views."""
    z = torch.fft.rfft(x * 2).transpose(0, 1)
    return ((z.real.square() + z.imag.square() + 1).log(),)


def few_modes(x: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
    """A Fourier neural operator's layer, which writes to slices."""
    z = torch.fft.rfft2(x)
    out = torch.zeros_like(z)
    out[:, :2, :2] = z[:, :2, :2] * torch.complex(angle[:, :2], angle[:, 2:])[:, None]
    return (torch.fft.irfft2(out, s=x.shape[-2:]),)


FUNCTIONS: list[Callable[..., Any]] = [rotary, polar, arithmetic, shapes, spectra, power, few_modes]


def transforms(c2c: int, c2r: int, r2c: int) -> list[str]:
    return [f"reflib.fft_{k}.default" for k in (*["c2c"] * c2c, *["c2r"] * c2r, *["r2c"] * r2c)]


# The gradients of real transforms are transforms to real numbers, of half the size.
SPECTRA = {spectra: transforms(4, 3, 3), power: transforms(0, 1, 1), few_modes: transforms(1, 1, 2)}


def made(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(s, dtype=dtype, requires_grad=True) for s in ((5, 3, 8), (5, 4)))  # type: ignore[return-value]


def results(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Tensor]:
    out = list(fn(*args))
    torch.manual_seed(1)
    return [*out, *torch.autograd.grad(out, args, [torch.randn_like(t) for t in out], allow_unused=True)]


FEW = (arithmetic, torch.float32), (polar, torch.float64), (spectra, torch.float32), (few_modes, torch.float64)
EACH = [*itertools.product(FUNCTIONS, (torch.float32, torch.float64))]


@pytest.mark.parametrize(
    "fn, dtype", [pytest.param(*c, marks=() if c in FEW else pytest.mark.slow) for c in EACH],
    ids=lambda c: getattr(c, "__name__", str(c)),
)  # fmt: skip
def test_as_eager(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    """And nothing is left to calls where sizes are known."""
    dynamic = dtype == torch.float64
    compiled = Compiled(fn, dynamic)
    for want, got in zip(results(fn, made(dtype)), results(compiled, made(dtype)), strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            assert want.stride() == got.stride()
            torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-5)
    assert dynamic or sorted(str(e.target) for e in compiled.externs) == SPECTRA.get(fn, [])


@pytest.mark.parametrize("fn", [rotary, polar, shapes, power, few_modes], ids=lambda f: f.__name__)
def test_nothing_is_left_to_calls_on_a_gpu(fn: Callable[..., Any]) -> None:
    graphs = reflib.explain(fn, *made(), target="sm_90").graphs
    calls = [str(n.target) for s in graphs for n in s.scheduled.nodes if isinstance(n, Extern)]
    assert sorted(calls) == SPECTRA.get(fn, [])


def test_division_at_the_edges() -> None:
    """By 0, by an infinity, and where squares overflow or vanish: x / 0 was NaN, and so was x / inf."""
    inf = float("inf")
    z = torch.tensor([0, 1 + 2j, complex(-3, 0.5), complex(1e30, -1e30), complex(1e-30, 1e-30)], dtype=torch.complex64)
    w = torch.tensor([0, complex(inf, 1), complex(1, -inf), 1e30 - 2e30j, complex(0, 1e-30)], dtype=torch.complex64)
    fn = lambda z, w: torch.view_as_real(z[:, None] / w)  # noqa: E731
    torch.testing.assert_close(reflib.compile(fn)(z, w), fn(z, w), equal_nan=True)


def test_what_has_no_rule_stays() -> None:
    """A spectrum, and what is made of it; results that are complex; inputs are read as they are."""
    z = torch.randn(4, 6, dtype=torch.complex64)
    for fn, args in (
        (lambda x: torch.fft.rfft(x * 2).abs() + 1, (torch.randn(3, 8),)),
        (lambda z, x: (z * x, x * 2), (z, torch.randn(6))),
        (lambda z, x: (z.conj() * x).imag + 1, (z, torch.randn(6))),
        (lambda z, x: (z * x).real, (z.conj(), torch.randn(6))),
        (lambda z, x: torch.add(z, x, alpha=2j).real * 2, (z, torch.randn(6))),
        (lambda z: torch.view_as_real(z), (z,)),
    ):
        want, got = fn(*args), reflib.compile(fn)(*args)
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g, w)


def test_like_eager_leaves_them() -> None:
    graphs = reflib.explain(rotary, *made(), target="sm_90", numerics="eager").graphs
    assert any(isinstance(n, Extern) for s in graphs for n in s.scheduled.nodes)


def test_a_complex_number_copied_into_a_real_tensor() -> None:
    """Its real part, with eager's warning."""
    x, z = torch.randn(5), torch.randn(5, dtype=torch.complex64)
    compiled = torch.compile(lambda x, z: torch.zeros_like(x).copy_(z * z), backend="reflib")
    torch.testing.assert_close(compiled(x, z), (z * z).real)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.fft.hfftn(x, dim=(0, 2)), lambda x: torch.fft.hfft2(x.permute(2, 0, 1), dim=(0, 1)),
        lambda x: torch.view_as_real(torch.complex(x, x * 2).transpose(0, 2) * 3),
    ],
)  # fmt: skip
def test_strides_of_what_is_made_of_a_complex_tensor_are_those_of_eager(fn, dynamic):
    x = torch.randn(5, 6, 7)
    got, want = reflib.compile(fn, dynamic=dynamic)(x), fn(x)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_view_of_a_conjugated_input():
    z = torch.randn(3, 4, dtype=torch.complex64).conj()
    for fn in (lambda z: torch._neg_view(z.real), lambda z: (z.imag, z.imag + 1, z.conj().real)):
        got, want = (r if isinstance(r, tuple) else (r,) for r in (reflib.compile(fn)(z), fn(z)))
        for g, w in zip(got, want, strict=True):
            assert g.is_neg() == w.is_neg() and g.stride() == w.stride() and torch.equal(g, w)
            assert (g.data_ptr() == z.data_ptr()) == (w.data_ptr() == z.data_ptr())
