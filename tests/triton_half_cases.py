"""The cheap forms of ``reflib.generate.triton_half``, each on every float16 (or bfloat16) there is."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton_cases import F16, F32, Case, pointwise

from reflib.ir.loops import BodyBuilder
from reflib.ir.program import Config

Build = Callable[[BodyBuilder, int], int]
Meaning = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Half:
    """What the loop body says, what it means in float64, and what the Triton text must contain."""

    build: Build
    meaning: Meaning
    text: str


def _times(b: BodyBuilder, x: int, factor: float, op: str = "mul") -> int:
    return b.op(op, x, b.const(factor, F32))


def _plus_one(b: BodyBuilder, op: str, x: int) -> int:
    return b.op("add", b.op(op, x), b.const(1, F32))


def _gelu(b: BodyBuilder, x: int) -> int:
    return b.op("mul", _times(b, x, 0.5), _plus_one(b, "erf", _times(b, x, math.sqrt(0.5))))


def _gelu_by_division(b: BodyBuilder, x: int) -> int:
    return b.op("mul", _plus_one(b, "erf", _times(b, x, math.sqrt(2), "div")), _times(b, x, 0.5))


def _gelu_tanh(b: BodyBuilder, x: int) -> int:
    cube = _times(b, b.op("mul", b.op("mul", x, x), x), 0.044715)
    inner = _times(b, b.op("add", x, cube), math.sqrt(2 / math.pi))
    return b.op("mul", _times(b, x, 0.5), _plus_one(b, "tanh", inner))


def _normal_cdf(b: BodyBuilder, x: int) -> int:
    return _times(b, _plus_one(b, "erf", _times(b, x, math.sqrt(0.5))), 0.5)


def _silu(b: BodyBuilder, x: int) -> int:
    return b.op("div", x, _plus_one(b, "exp", b.op("neg", x)))


def _normal(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.erfc(x * -math.sqrt(0.5))


def _by_tanh(x: torch.Tensor) -> torch.Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return x * torch.sigmoid(2 * inner)


HALF = {
    "gelu": Half(_gelu, lambda x: x * _normal(x), "normal_cdf_half"),
    "gelu_by_division": Half(_gelu_by_division, lambda x: x * _normal(x), "normal_cdf_half"),
    "gelu_tanh": Half(_gelu_tanh, _by_tanh, "fast_dividef(2.0"),
    "normal_cdf": Half(_normal_cdf, _normal, "normal_cdf_half"),
    "silu": Half(_silu, lambda x: x / (1 + torch.exp(-x)), "fast_dividef"),
    "erf": Half(lambda b, x: b.op("erf", x), torch.erf, "erf_half"),
    "tanh": Half(lambda b, x: b.op("tanh", x), torch.tanh, "tanh_half"),
    "sigmoid": Half(lambda b, x: b.op("sigmoid", x), torch.sigmoid, "fast_dividef"),
    "power": Half(lambda b, x: b.op("pow", x, b.const(0.7, F32)), lambda x: x**0.7, "pow_half"),
    "power_of_positive": Half(lambda b, x: b.op("pow", b.op("abs", x), x), lambda x: x.abs() ** x, "pow_half"),
    "root": Half(lambda b, x: b.op("sqrt", b.op("abs", x)), lambda x: x.abs().sqrt(), "root_half"),
    "exp": Half(lambda b, x: b.op("exp", x), torch.exp, "tl.exp2"),
}


def half_case(name: str, dtype: torch.dtype = F16) -> Case:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return pointwise((2**16,), {"x": (every, lambda i: i)}, HALF[name].build, dtype, config=Config("none", xblock=4096))


def half_cases() -> dict[str, Callable[[], Case]]:
    return {name: lambda name=name: half_case(name) for name in HALF}


def half_problem(name: str, x: torch.Tensor, got: torch.Tensor) -> str:
    """Is ``got`` the float64 result, rounded? A little over half a unit in the last place is allowed; and 1e-12 where
    the normal distribution is that small: eager's 1 + erf, in float32, knows it to 6e-8 only."""
    info = torch.finfo(got.dtype)
    truth = HALF[name].meaning(x.double())
    unit = (2 ** torch.floor(torch.log2(truth.abs().clamp(min=info.tiny, max=info.max)))) * info.eps
    flushed = 1e-35 if got.dtype == torch.bfloat16 else 0.0  # powers under 2^-126, reciprocals of those over 2^126
    tail = 1e-12 if HALF[name].text == "normal_cdf_half" else 0.0
    ok = (got.double() - truth).abs() <= 0.53 * unit + flushed + tail
    ok |= (got == truth.to(got.dtype)) | (got.isnan() & truth.isnan())
    ok |= got.isinf() & (truth.abs() >= info.max)
    bad = (~ok).nonzero().flatten()
    shown = [(x[i].item(), got[i].item(), truth[i].item()) for i in bad[:: max(1, len(bad) // 5)][:6].tolist()]
    return f"{len(bad)} of {len(x)} wrong: (x, got, truth) {shown}" if len(bad) else ""
