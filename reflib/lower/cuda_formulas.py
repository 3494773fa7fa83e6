"""Eager's CUDA kernels as formulas, for ``numerics="eager"``: each rounds where ATen's compiled kernel does.

What decides a kernel's last bits, and how it is written here:

* the order of its operations: as in ATen's source (under ``aten/src/ATen/native/cuda``, named at each group);
* nvcc makes one instruction, which rounds once, of a product that only an addition reads (``-fmad=true``): ``fma``. All
  other products and sums round. Our own kernels are compiled without contraction, so they stay as they are written;
* a product and an addition that are both exact, or that CUDA's ``exp`` ends with (its last factor is a power of two),
  give the same bits either way, and are not marked;
* divisions and reciprocals are IEEE's; ``exp``, ``tanh``, ``log1p``, ``expm1`` are CUDA's, the same in Triton's copy;
* halves are computed in float32 and rounded at the end, but for kernels that compute in the tensor's own dtype, and
  round after every operation: ``stored``;
* a Python number is a float32, and a product of two numbers is rounded to it first: ``single``.

The formulas were read from the machine code of torch 2.11 for sm_90 (2.13's has the same instructions), not only from
its source. ``tests/gpu/test_cuda_formulas.py`` compares every one with eager over whole dtypes. To try another variant
of an op, change its line: ``fma(a, b, c)`` or ``a * b + c``, ``x`` or ``stored(x)``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from reflib.ir.loops import Const, Load
from reflib.ir.program import View
from reflib.ir.transforms import needed

from . import activations
from .body import Scalar, Value, where
from .context import LoweringContext
from .more_pointwise import pow_scalar
from .numbers import HALF
from .pointwise import elementwise
from .rules import Unsupported, overloads

Formula = Callable[..., Value]
FORMULAS: dict[Any, tuple[Callable[..., Any], frozenset[torch.dtype]]] = {}  # a rule by op, and for which dtypes
CONVERSIONS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
ROUNDED_FIRST = "numerics: eager rounds an operand first"
# Versions of CUDA whose erff is the one below; Triton's copy is of an older one.
ERF = ("12.6", "12.8", "12.9", "13.0")


def kernel(*names: str, at: Sequence[int] = (0,), dtypes: Sequence[torch.dtype] = (torch.float32, *HALF)) -> Any:
    """Register a formula of the named ops' arguments; those ``at`` these places are values at the output's points."""

    def decorate(formula: Formula) -> Formula:
        def lower_op(cx: LoweringContext, *args: Any, **kwargs: Any) -> View:
            tensors = [args[i] for i in at]
            _suits(cx, tensors)

            def of(*values: Value) -> Value:
                given = dict(zip(at, values))
                return formula(*(given.get(i, a) for i, a in enumerate(args)), **kwargs)

            return elementwise(cx, of, tensors)

        for op in overloads(*names):
            FORMULAS[op] = lower_op, frozenset(dtypes)
        return formula

    return decorate


def formula_of(cx: LoweringContext, target: Any) -> Callable[..., Any] | None:
    """The formula of eager's kernel for this op and dtype on an NVIDIA GPU, if there is one."""
    if target not in FORMULAS or not cx.on_gpu or torch.version.hip is not None:
        return None
    rule, dtypes = FORMULAS[target]
    return rule if cx.dtype in dtypes else None


def _suits(cx: LoweringContext, tensors: Sequence[Any]) -> None:
    views = [x for x in tensors if isinstance(x, View)]
    if cx.dtype in HALF and any(x.dtype not in (cx.dtype, torch.bool) for x in views):
        raise Unsupported(ROUNDED_FIRST)
    if len(tensors) > 2 and any(_on_cpu(cx, x) for x in views):
        raise Unsupported("numerics: eager's kernel for a number on the CPU")


def _on_cpu(cx: LoweringContext, x: View) -> bool:
    """Is it a number in a CPU's memory that a GPU reads?"""
    return cx.low.buffers[x.buffer].device != cx.device


# -- parts ----------------------------------------------------------------------------------------------
def fma(x: Value, y: Scalar, z: Scalar) -> Value:
    """x * y + z, rounded once."""
    return x.op("fma", y, z)


def stored(x: Value) -> Value:
    """Rounded as if it were stored."""
    return x.to(x.kernel.cx.dtype)


def single(x: Any) -> float:
    """A number in float32."""
    if not isinstance(x, (int, float)):
        raise Unsupported("numerics: a number known at run time only")
    return float(torch.tensor(x, dtype=torch.float32))


def sigmoid(x: Value) -> Value:
    return 1 / ((-x).exp() + 1)


def erf(x: Value) -> Value:
    """CUDA's erff: a polynomial near 0, 1 - 2^polynomial elsewhere. Same steps; the coefficients are chosen."""
    if torch.version.cuda not in (None, *ERF):
        raise Unsupported("numerics: erf of eager's library")
    size = x.abs()
    far = size >= 1.0029599666595459
    t = where(far, size, x * x)
    p = where(far, x.like(1.1219871521461755e-4), x.like(8.483494457323104e-5))
    for a, b in (
        (-1.3275252422317863e-3, -8.213091641664505e-4), (8.39653518050909e-3, 5.2134888246655464e-3),
        (-4.024658352136612e-2, -2.6868773624300957e-2), (0.15950430929660797, 0.11284004896879196),
        (0.9129176735877991, -0.3761266469955444), (0.6290600299835205, 0.12837915122509003),
    ):  # fmt: skip
        p = fma(p, t, where(far, x.like(a), x.like(b)))
    p = fma(p, where(far, -size, x), where(far, -size, x))
    return where(far, (1 - p.op("exp2")).op("copysign", x), p)


# -- arithmetic: CUDAFunctor_add, BinaryDivTrueKernel, PointwiseOpsKernel, Lerp, UnaryOpsKernel, PowKernel ----------
@kernel("add.Tensor", "add.Scalar", at=(0, 1))
def add(x: Value, y: Value, alpha: Scalar = 1) -> Value:
    return x + y if alpha == 1 else fma(y, alpha, x)


@kernel("sub.Tensor", "sub.Scalar", at=(0, 1))
def sub(x: Value, y: Value, alpha: Scalar = 1) -> Value:
    return x - y if alpha == 1 else fma(-y, alpha, x)


def div(cx: LoweringContext, x: Any, y: Any) -> View:
    """Of a number the reciprocal is taken first, once: of a Python number in float64, of a tensor on the CPU in the
    result's dtype. A tensor of one number on the GPU is no number."""
    wide = _python_number(cx)
    _suits(cx, (x, y) if wide is None else (x,))
    if isinstance(y, (int, float)):
        return elementwise(cx, lambda a: a * _inverse(y, torch.float64, a.dtype), (x,))
    if wide is not None:
        return elementwise(cx, lambda a: a * (1 / a.kernel.load(wide)).to(a.dtype), (x,))
    number = not isinstance(y, View) or _on_cpu(cx, y)
    return elementwise(cx, lambda a, b: a * _reciprocal(b) if number else a / b, (x, y))


def _python_number(cx: LoweringContext) -> View | None:
    """The divisor in float64, if it is a number that changes: one that Dynamo passes so, and converts."""
    node = cx.node.args[1]
    while isinstance(node, torch.fx.Node) and node.target in CONVERSIONS:
        node = node.args[0]
    wide = cx.low.values.get(node) if isinstance(node, torch.fx.Node) and node is not cx.node.args[1] else None
    return wide if isinstance(wide, View) and wide.dtype == torch.float64 and _on_cpu(cx, wide) else None


def _reciprocal(x: Value) -> Scalar:
    body = x.kernel.b.body
    s = body[x.id]
    if isinstance(s, Const):
        return _inverse(s.value, x.dtype, x.dtype)
    if any(isinstance(body[i], Load) for i in needed(body, [x.id])):  # (a size is none)
        raise Unsupported("numerics: a number known at run time only")
    return 1 / x


def _inverse(value: Any, dtype: torch.dtype, stored: torch.dtype) -> float:
    number = torch.tensor(value, dtype=dtype)
    if 0 < min(number.abs(), (1 / number).abs()) < torch.finfo(stored).tiny:
        raise Unsupported("numerics: a subnormal number, or its reciprocal")
    return float((1 / number).to(stored))


for _op in overloads("div.Tensor", "div.Scalar", "true_divide"):
    FORMULAS[_op] = div, frozenset((torch.float32, torch.float64, *HALF))


kernel("rsub.Tensor", "rsub.Scalar", at=(0, 1))(lambda x, y, alpha=1: sub(y, x, alpha))
kernel("addcmul", at=(0, 1, 2))(lambda x, a, b, value=1: fma(a, b, x) if single(value) == 1 else fma(a * b, value, x))
kernel("addcdiv", at=(0, 1, 2))(lambda x, a, b, value=1: x + a / b if value == 1 else fma(a / b, value, x))
kernel("lerp.Scalar", "lerp.Tensor", at=(0, 1, 2))(
    lambda x, y, w: where(w.abs() < 0.5, fma(w, y - x, x), fma(-(y - x), 1 - w, y))
)
kernel("rsqrt")(lambda x: x.op("rsqrt"))


@kernel("pow.Tensor_Scalar")
def pow_(x: Value, exponent: Any) -> Value:
    if exponent == 3:
        return stored(x * x) * x
    if exponent == -2:
        return 1 / stored(x * x)
    if exponent not in (0, 0.5, -0.5, 1, -1, 2):
        raise Unsupported("numerics: pow of eager's library")
    return pow_scalar(x, exponent)


# -- activations: Activation*Kernel; of sigmoid and tanh BinaryMiscBackwardOpsKernels; dropout: Dropout -----------
kernel("sigmoid")(sigmoid)
kernel("sigmoid_backward", at=(0, 1))(lambda grad, y: stored(grad * stored(1 - y)) * y)
kernel("silu")(lambda x: x / ((-x).exp() + 1))
kernel("erf")(erf)
kernel("mish")(lambda x: x * x.exp().log1p().tanh())
kernel("softplus")(activations.softplus)
kernel("softplus_backward", at=(0, 1))(activations.softplus_backward)
kernel("hardswish")(lambda x: x * (x + 3).maximum(0).minimum(6) * (1 / 6))
kernel("hardswish_backward", at=(0, 1))(activations.hardswish_backward)
kernel("hardsigmoid")(lambda x: (x + 3).maximum(0).minimum(6) * (1 / 6))
kernel("native_dropout_backward")(activations.native_dropout_backward)


@kernel("tanh_backward", at=(0, 1))
def tanh_backward(grad: Value, y: Value) -> Value:
    half = y.kernel.cx.dtype in HALF
    return grad * (stored(1 - stored(y * y)) if half else fma(-y, y, 1))


@kernel("silu_backward", at=(0, 1))
def silu_backward(grad: Value, x: Value) -> Value:
    s = sigmoid(x)
    return grad * s * fma(x, 1 - s, 1)


_CUBIC = single(0.044715)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


@kernel("gelu")
def gelu(x: Value, approximate: str = "none") -> Value:
    inner = erf(x * math.sqrt(0.5)) if approximate == "none" else _gelu_tanh(x)
    return x * 0.5 * (inner + 1)


def _gelu_tanh(x: Value) -> Value:
    return (fma(x * x * x, _CUBIC, x) * _SQRT_2_OVER_PI).tanh()


@kernel("gelu_backward", at=(0, 1))
def gelu_backward(grad: Value, x: Value, approximate: str = "none") -> Value:
    if approximate == "none":
        pdf = (x * -0.5 * x).exp() * (1 / math.sqrt(2 * math.pi))
        return grad * fma(erf(x * math.sqrt(0.5)) + 1, 0.5, x * pdf)
    t = _gelu_tanh(x)
    slope = fma(x * x, 3 * _CUBIC, 1) * _SQRT_2_OVER_PI
    return grad * fma(t + 1, 0.5, x * 0.5 * fma(-t, t, 1) * slope)


@kernel("mish_backward", at=(0, 1))
def mish_backward(grad: Value, x: Value) -> Value:
    t = x.exp().log1p().tanh()
    return grad * fma(x * sigmoid(x), fma(-t, t, 1), t)


def log_sigmoid_forward(cx: LoweringContext, x: View) -> tuple[View, View]:
    """And what a CPU's kernel keeps for the backward; CUDA's keeps an empty tensor."""
    if tuple(cx.fakes[1].shape) != (0,):
        raise Unsupported("captured on a CPU, whose kernel returns more")
    out = elementwise(cx, lambda v: v.minimum(0) - (-v.abs()).exp().log1p(), [x])
    return out, cx.call(torch.ops.aten.full.default, [0], 0, fake=cx.fakes[1])


FORMULAS[torch.ops.aten.log_sigmoid_forward.default] = log_sigmoid_forward, frozenset((torch.float32, *HALF))


@kernel("log_sigmoid_backward", at=(0, 1))
def log_sigmoid_backward(grad: Value, x: Value, buffer: Any) -> Value:
    z = (-x.abs()).exp()
    part = z / (z + 1)
    return grad * where(x < 0, 1 - part, part)


@kernel("elu")
def elu(x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    below = (x * input_scale).op("expm1") * (single(alpha) * single(scale))
    return where(x > 0, x * scale, below)


@kernel("elu_backward", at=(0, 5))
def elu_backward(grad: Value, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Value) -> Value:
    factor, inner = single(alpha) * single(scale), grad * input_scale
    below = inner * (x + factor) if is_result else inner * factor * (x * input_scale).exp()
    return where(x <= 0, below, grad * scale)
