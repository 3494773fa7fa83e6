"""Activation functions and their derivatives: one formula each, computed in float32 for half tensors."""

import math
from typing import Any

from .body import Scalar, Value, where
from .pointwise import formulas, pointwise


def softplus(x: Value, beta: Scalar = 1, threshold: Scalar = 20) -> Value:
    return where(x * beta > threshold, x, (x * beta).exp().log1p() / beta)


def softplus_backward(grad: Value, x: Value, beta: Scalar, threshold: Scalar) -> Value:
    z = (x * beta).exp()
    return where(x * beta > threshold, grad, grad * z / (z + 1))


def hardswish_backward(grad: Value, x: Value) -> Value:
    return where(x <= -3, 0, where(x < 3, grad * (x / 3 + 0.5), grad))


def native_dropout_backward(grad: Value, mask: Any, scale: Scalar) -> Value:
    return grad * grad.kernel.load(mask).to(grad.dtype) * scale


formulas(1, {
    "leaky_relu": lambda x, negative_slope=0.01: where(x > 0, x, x * negative_slope),
    "elu": lambda x, alpha=1, scale=1, input_scale=1: where(
        x > 0, x * scale, (x * input_scale).op("expm1") * (alpha * scale)),
    "hardtanh": lambda x, min_val=-1, max_val=1: x.maximum(min_val).minimum(max_val),
    "hardsigmoid": lambda x: (x + 3).maximum(0).minimum(6) / 6,
    "hardswish": lambda x: x * (x + 3).maximum(0).minimum(6) / 6,
    "silu": lambda x: x / ((-x).exp() + 1),
    "mish": lambda x: x * where(x > 20, x, x.exp().log1p()).tanh(),
    "softplus": softplus,
    "native_dropout_backward": native_dropout_backward,
})  # fmt: skip
formulas(2, {
    "leaky_relu_backward": lambda grad, x, negative_slope, self_is_result: where(x > 0, grad, grad * negative_slope),
    "hardtanh_backward": lambda grad, x, min_val, max_val: where((x <= min_val) | (x >= max_val), 0, grad),
    "hardsigmoid_backward": lambda grad, x: where((x > -3) & (x < 3), grad * (1 / 6), 0),
    "hardswish_backward": hardswish_backward,
    "sigmoid_backward": lambda grad, y: grad * (1 - y) * y,
    "tanh_backward": lambda grad, y: grad * (1 - y * y),
    "softplus_backward": softplus_backward,
    "_prelu_kernel": lambda x, weight: where(x > 0, x, x * weight),
})  # fmt: skip


@pointwise("silu_backward", n=2)
def silu_backward(grad: Value, x: Value) -> Value:
    s = x.sigmoid()
    return grad * s * (x * (1 - s) + 1)


_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


@pointwise("gelu")
def gelu(x: Value, approximate: str = "none") -> Value:
    if approximate == "none":
        return x * 0.5 * ((x * _SQRT_HALF).erf() + 1)
    inner = (x + x * x * x * _CUBIC) * _SQRT_2_OVER_PI
    return x * 0.5 * (inner.tanh() + 1)


@pointwise("gelu_backward", n=2)
def gelu_backward(grad: Value, x: Value, approximate: str = "none") -> Value:
    if approximate == "none":
        cdf = ((x * _SQRT_HALF).erf() + 1) * 0.5
        pdf = (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
        return grad * (cdf + x * pdf)
    inner = (x + x * x * x * _CUBIC) * _SQRT_2_OVER_PI
    t = inner.tanh()
    slope = (x * x * (3 * _CUBIC) + 1) * _SQRT_2_OVER_PI
    return grad * ((t + 1) * 0.5 + x * 0.5 * (1 - t * t) * slope)


@pointwise("logit_backward", n=2)
def logit_backward(grad: Value, x: Value, eps: float | None = None) -> Value:
    slope = grad / (x * (1 - x))
    if eps is None:
        return where((x < 0) | (x > 1), math.nan, slope)
    return where((x < eps) | (x > 1.0 - eps), 0, slope)
