"""Every op of ``lower.cuda_formulas`` as a function of tensors of one dtype, and tensors that hold whole dtypes."""

from collections.abc import Callable
from functools import cache

import torch

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Case = Callable[..., torch.Tensor]


def _empty(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0)


ONE: dict[str, Case] = {
    "sigmoid": aten.sigmoid, "silu": aten.silu, "gelu": aten.gelu, "erf": aten.erf, "mish": aten.mish,
    "gelu, tanh": lambda x: aten.gelu(x, approximate="tanh"), "hardswish": aten.hardswish,
    "hardsigmoid": aten.hardsigmoid, "elu": aten.elu, "selu": aten.selu,
    "elu, numbers": lambda x: aten.elu(x, 0.7, 1.3, 0.9),
    "softplus": aten.softplus, "softplus, numbers": lambda x: aten.softplus(x, 0.7, 5.0), "rsqrt": aten.rsqrt,
    "x ** 3": lambda x: x**3, "x ** -2": lambda x: x**-2, "x ** -0.5": lambda x: x**-0.5, "x ** -1": lambda x: x**-1,
    "x / 3": lambda x: x / 3, "x / 0.001": lambda x: x / 0.001, "x / 3e-39": lambda x: x / 3e-39,
    "x / 8": lambda x: x / 8, "x / 0": lambda x: x / 0, "x / size": lambda x: x / x.shape[0],
    "leaky_relu": lambda x: aten.leaky_relu(x, 0.1),
    "tanh": aten.tanh, "exp": aten.exp, "log": aten.log, "log1p": aten.log1p, "expm1": aten.expm1, "sqrt": aten.sqrt,
    "reciprocal": aten.reciprocal, "sin": aten.sin, "cos": aten.cos, "tan": aten.tan, "log2": aten.log2,
    "log10": aten.log10, "sinh": aten.sinh, "cosh": aten.cosh, "erfc": aten.erfc,
    "add, number": lambda x: torch.add(x, 0.7, alpha=3), "number, add": lambda x: torch.rsub(x, 0.7, alpha=0.3),
    "dropout, backward": lambda x: aten.native_dropout_backward(x, x > 0.1, 1.1),
}  # fmt: skip
TWO: dict[str, Case] = {
    "sigmoid_backward": aten.sigmoid_backward, "tanh_backward": aten.tanh_backward, "silu_backward": aten.silu_backward,
    "gelu_backward": aten.gelu_backward,
    "gelu_backward, tanh": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    "mish_backward": aten.mish_backward, "hardswish_backward": aten.hardswish_backward,
    "hardsigmoid_backward": aten.hardsigmoid_backward,
    "softplus_backward": lambda g, x: aten.softplus_backward(g, x, 1, 20),
    "softplus_backward, numbers": lambda g, x: aten.softplus_backward(g, x, 0.7, 5.0),
    "log_sigmoid_backward": lambda g, x: aten.log_sigmoid_backward(g, x, _empty(x) if x.is_cuda else (-x.abs()).exp()),
    "elu_backward": lambda g, x: aten.elu_backward(g, 1.67, 1.05, 0.9, False, x),
    "elu_backward, result": lambda g, x: aten.elu_backward(g, 1.67, 1.05, 0.9, True, x),
    "add, alpha": lambda x, y: torch.add(x, y, alpha=0.3), "sub, alpha": lambda x, y: torch.sub(x, y, alpha=0.3),
    "rsub, alpha": lambda x, y: torch.rsub(x, y, alpha=0.3),
    "addcmul": lambda x, y: torch.addcmul(y, x, y + 1),
    "addcmul, value": lambda x, y: torch.addcmul(y, x, x, value=0.3),
    "addcdiv": lambda x, y: torch.addcdiv(y, x, y), "lerp, near": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp, far": lambda x, y: torch.lerp(x, y, 0.9), "lerp, tensor": lambda x, y: torch.lerp(x, y, x), "div": torch.div,
}  # fmt: skip
CASES = {**ONE, **TWO}
GPU_ONLY: dict[str, Case] = {  # whose captured op returns something else on a CPU
    "log_sigmoid": torch.nn.functional.logsigmoid,
}


@cache
def every(dtype: torch.dtype, device: str, seed: int, count: int = 2**24) -> torch.Tensor:
    """All numbers of a half dtype, in a random order; ``count`` random patterns of bits of float32."""
    g = torch.Generator().manual_seed(seed)
    if dtype.itemsize == 2:
        bits = torch.randperm(2**16, generator=g).to(torch.int16)
    else:
        bits = torch.randint(-(2**31), 2**31, (count,), generator=g, dtype=torch.int64).to(torch.int32)
    return bits.view(dtype).to(device)


@cache
def numbers(dtype: torch.dtype, device: str, seed: int, count: int) -> torch.Tensor:
    """Of ordinary sizes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=g)
    return (x * 10 ** torch.randn(count, generator=g)).to(dtype).to(device)


def different_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """In how many places they differ; NaN is NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return int(((a.contiguous().view(bits) != b.contiguous().view(bits)) & ~(a.isnan() & b.isnan())).sum())
