"""Activation functions and their derivatives: one formula each, computed in float32 for half tensors."""

import math
from typing import Any

from .body import Scalar, Value, where
from .pointwise import pointwise


@pointwise("leaky_relu")
def leaky_relu(x: Value, negative_slope: Scalar = 0.01) -> Value:
    return where(x > 0, x, x * negative_slope)


@pointwise("leaky_relu_backward", n=2)
def leaky_relu_backward(grad: Value, x: Value, negative_slope: Scalar, self_is_result: bool) -> Value:
    return where(x > 0, grad, grad * negative_slope)


@pointwise("elu")
def elu(x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    return where(x > 0, x * scale, (x * input_scale).op("expm1") * (alpha * scale))


@pointwise("hardtanh")
def hardtanh(x: Value, min_val: Scalar = -1, max_val: Scalar = 1) -> Value:
    return x.maximum(min_val).minimum(max_val)


@pointwise("hardtanh_backward", n=2)
def hardtanh_backward(grad: Value, x: Value, min_val: Scalar, max_val: Scalar) -> Value:
    return where((x <= min_val) | (x >= max_val), 0, grad)


@pointwise("hardsigmoid")
def hardsigmoid(x: Value) -> Value:
    return (x + 3).maximum(0).minimum(6) / 6


@pointwise("hardsigmoid_backward", n=2)
def hardsigmoid_backward(grad: Value, x: Value) -> Value:
    return where((x > -3) & (x < 3), grad * (1 / 6), 0)


@pointwise("hardswish")
def hardswish(x: Value) -> Value:
    return x * (x + 3).maximum(0).minimum(6) / 6


@pointwise("hardswish_backward", n=2)
def hardswish_backward(grad: Value, x: Value) -> Value:
    return where(x <= -3, 0, where(x < 3, grad * (x / 3 + 0.5), grad))


@pointwise("silu")
def silu(x: Value) -> Value:
    return x / ((-x).exp() + 1)


@pointwise("silu_backward", n=2)
def silu_backward(grad: Value, x: Value) -> Value:
    s = x.sigmoid()
    return grad * s * (x * (1 - s) + 1)


@pointwise("sigmoid_backward", n=2)
def sigmoid_backward(grad: Value, y: Value) -> Value:
    return grad * (1 - y) * y


@pointwise("tanh_backward", n=2)
def tanh_backward(grad: Value, y: Value) -> Value:
    return grad * (1 - y * y)


@pointwise("softplus")
def softplus(x: Value, beta: Scalar = 1, threshold: Scalar = 20) -> Value:
    return where(x * beta > threshold, x, (x * beta).exp().log1p() / beta)


@pointwise("softplus_backward", n=2)
def softplus_backward(grad: Value, x: Value, beta: Scalar, threshold: Scalar) -> Value:
    z = (x * beta).exp()
    return where(x * beta > threshold, grad, grad * z / (z + 1))


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


@pointwise("mish")
def mish(x: Value) -> Value:
    return x * where(x > 20, x, x.exp().log1p()).tanh()


@pointwise("logit_backward", n=2)
def logit_backward(grad: Value, x: Value, eps: float | None = None) -> Value:
    slope = grad / (x * (1 - x))
    if eps is None:
        return where((x < 0) | (x > 1), math.nan, slope)
    return where((x < eps) | (x > 1.0 - eps), 0, slope)


@pointwise("native_dropout_backward", n=1)
def native_dropout_backward(grad: Value, mask: Any, scale: Scalar) -> Value:
    return grad * grad.kernel.load(mask).to(grad.dtype) * scale


@pointwise("_prelu_kernel", n=2)
def prelu(x: Value, weight: Value) -> Value:
    return where(x > 0, x, x * weight)
