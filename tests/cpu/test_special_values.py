"""What C++ kernels make of zeros, infinities, NaN, subnormals and large numbers, beside eager."""

import math

import pytest
import torch
import torch.nn.functional as F

import reflib
from reflib.ir.interpret import interpret
from reflib.pipeline import _retarget
from reflib.target import parse_target

SPECIAL = [0.0, 1.0, math.inf, 1e-45, 1e-38, 6e-8, 6.1e-5, 0.1, 1 / 3, 0.5, 1.5, 2.0, 3.0, 11.0, 20.0, 88.0, 89.0,
           104.0, 2048.0, 65504.0, 2.0**31, 2.0**63, 3.4e38, 1 + 2**-10, 1 - 2**-11]  # fmt: skip
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def specials(dtype):
    return torch.tensor([*SPECIAL, *(-x for x in SPECIAL), math.nan], dtype=torch.float64).to(dtype)


def same(name, got, want, dtype, least=None):
    """Equal, or within the tolerance of the number, or of ``least``: eager's own error may be as large."""
    assert got.dtype == want.dtype, name
    g, w = got.double(), want.double()
    least = torch.finfo(dtype).tiny if least is None else least
    close = (g == w) | (g.isnan() & w.isnan()) | ((g - w).abs() <= TOLERANCE[dtype] * w.abs().clamp_min(least))
    assert close.all(), (name, g[~close][:5], w[~close][:5])


@DTYPES
def test_powers(dtype):
    exponents = [0.0, 0.5, -0.5, 1, -1, 2, -2, 3, -3.0, 4.0, 2.5, math.inf, -math.inf, math.nan]
    x = specials(dtype)

    def fn(x):
        return [x**e for e in exponents] + [b**x for b in (0.0, 2.0, -2.0, 0.5, math.inf, 1)]

    for i, (got, want) in enumerate(zip(reflib.compile(fn)(x), fn(x), strict=True)):
        same(f"power {i}", got, want, dtype)
    a, b = (t.contiguous() for t in torch.meshgrid(x, x, indexing="ij"))
    same("pow", reflib.compile(torch.pow)(a, b), torch.pow(a, b), dtype)


def test_powers_that_a_gpu_makes_of_roots():
    """-inf among them, whose power is inf or 0; at random at most 2 units from what float64 has, also where the result
    is denormal."""
    more = (torch.randn(1000, generator=torch.Generator().manual_seed(3)) * 30).exp()
    for e in (1.5, -1.5):

        def computed(x, e=e):
            program = reflib.explain(lambda x: x**e, x, target="sm_90").program
            assert " pow " not in str(program)
            return interpret(_retarget(program, parse_target("cpu")), [x])[0]

        same(f"power {e}", computed(specials(torch.float32)), specials(torch.float32) ** e, torch.float32)
        want = more.double() ** e
        inside = (want < 3.4e38) & (more > 0)
        assert ((want[inside] > 0) & (want[inside] < 1e-38)).any()
        assert ((computed(more).double() - want).abs() <= 2**-22 * want + 2e-45)[inside].all()


@DTYPES
def test_functions_of_one_number(dtype):
    names = "exp exp2 expm1 log log2 log10 log1p tanh sigmoid erf erfc atan sinh cosh sqrt rsqrt reciprocal".split()
    table = {n: getattr(torch, n) for n in names} | {n: getattr(F, n) for n in "silu softplus elu mish".split()}
    table["gelu"] = F.gelu
    table["gelu of tanh"] = lambda x: F.gelu(x, approximate="tanh")
    x = specials(dtype)
    results = reflib.compile(lambda x: [f(x) for f in table.values()])(x)
    for (name, f), got in zip(table.items(), results, strict=True):
        want = f(x)
        if name == "gelu":  # on some CPUs eager gives NaN for an infinity, but not for one alone
            want = torch.where(want.isnan(), torch.cat([f(one) for one in x.split(1)]), want)
        same(name, got, want, dtype, 0.25 if name in ("erf", "mish", "gelu") else None)


@DTYPES
def test_functions_of_two_numbers(dtype):
    names = "atan2 hypot div mul add sub maximum minimum fmax fmin copysign nextafter logaddexp floor_divide xlogy"
    table = {n: getattr(torch, n) for n in names.split()}
    table["trunc"] = lambda a, b: torch.div(a, b, rounding_mode="trunc")
    x = specials(dtype)
    a, b = (t.contiguous() for t in torch.meshgrid(x, x, indexing="ij"))
    results = reflib.compile(lambda a, b: [f(a, b) for f in table.values()])(a, b)
    for (name, f), got in zip(table.items(), results, strict=True):
        same(name, got, f(a, b), dtype)
    inside = ((a / b).double().abs() < 2**24) | ~a.isfinite()  # beyond, eager's vector code gives NaN for some
    f = reflib.compile(lambda a, b: (torch.fmod(a, b), torch.remainder(a, b)))
    for name, got, want in zip(("fmod", "remainder"), f(a, b), (torch.fmod(a, b), torch.remainder(a, b)), strict=True):
        same(name, got[inside], want[inside], dtype)


@DTYPES
def test_means_of_rows_with_infinities(dtype):
    """Beside a variance the mean is Welford's, which is NaN; not alone, nor of one number."""
    x = torch.linspace(-2, 2, 54).reshape(6, 9).to(dtype)
    x[1, 3], x[2, 5], x[3, 4], x[4, :2] = math.inf, -math.inf, math.nan, torch.tensor([math.inf, -math.inf])

    def fn(x):
        pairs = torch.var_mean(x, 1), torch.std_mean(x, 0, correction=0), torch.var_mean(x[:, 3:4], 1, correction=0)
        return *(mean for _, mean in pairs), x.mean(1)

    for i, (got, want) in enumerate(zip(reflib.compile(fn)(x), fn(x), strict=True)):
        same(f"mean {i}", got, want, dtype, 0.25)


@DTYPES
def test_which_zero(dtype):
    """Eager's clamps keep the zero that they are given, as all in this list does. 37 numbers: vectors, and a rest."""
    x = torch.tensor([0.0, -0.0, 1.0, -1.0]).repeat(10)[:37].to(dtype)

    def fn(x):
        return (F.relu(x), F.relu6(x), F.hardtanh(x, 0, 1), x.clamp(0, 5), x.clamp(-5, -0.0), x.clamp_min(0),
                x.clamp_max(-0.0), x.clamp_max(0))  # fmt: skip

    for i, (got, want) in enumerate(zip(reflib.compile(fn)(x), fn(x), strict=True)):
        assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit()), i


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_remainders_of_halves_by_numbers(dtype):
    x = torch.tensor([0.3, 0.1, 0.2, 0.7, 1.5, 2.7, -2.7, math.inf]).to(dtype)

    def fn(x):
        whole = torch.div(x, 0.3, rounding_mode="trunc"), torch.div(x, 0.3, rounding_mode="floor")
        return (x % 0.3, torch.fmod(x, 0.3), torch.remainder(0.3, x), x % -0.3, *whole)

    for i, (got, want) in enumerate(zip(reflib.compile(fn)(x), fn(x), strict=True)):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), (i, got, want)


@pytest.mark.parametrize("wrapper", ["python", "cpp"])
@pytest.mark.parametrize("fn", [torch.max, torch.min])
def test_nothing_has_no_maximum(fn, wrapper):
    compiled = reflib.compile(lambda x: fn(x * 2), wrapper=wrapper)
    with pytest.raises(RuntimeError, match="Expected reduction dim"):
        compiled(torch.zeros(3, 0))
