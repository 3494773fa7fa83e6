"""``Options.numerics="eager"``: the same bits as eager, whatever is fused.

Eager computes a model as a sequence of ATen kernels. Its bits are ours where each of these is either called, or
computed by operations that have one right answer, in the same order and rounded at the same places:

* The graph is captured without decompositions, but of ops that only move numbers, and nothing rewrites it: it is
  eager's sequence of ATen ops.
* An op that we generate code for may round once: by what IEEE 754 defines to the last bit (a sum, a product, a
  quotient) or, on a CUDA device, by a function of CUDA's mathematical library that eager calls as well, and whose bits
  Triton's copy of it shares: not ``asin``, ``acos``, ``atan``, ``erf``, ``hypot`` and ``pow``. (On a CPU eager's
  functions are those of a vector library, MKL's or SLEEF, whose last bits are its own.) Before and after that
  it may compare, select, change signs, and compute with whole numbers. An op that rounds twice has an order, and maybe
  an instruction that leaves one rounding out, that only its own kernel knows: for NVIDIA GPUs ``cuda_formulas`` has
  what eager's kernels do for activations, their derivatives, and arithmetic such as ``addcmul``.
* Sums of floats, running sums, products of matrices and convolutions are calls; maxima and sorted places are not.
* Results in half precision are rounded between ops. Compilers do not contract multiplications with additions, nor take
  numbers below 2^-126 for 0.

So views, pointwise chains, selections, gathers and copies fuse as ever; norms, softmax and reductions are eager's own
kernels. Ops that differ from run to run in eager do so here: rows that eager adds atomically in a GPU's memory, in the
tensor's dtype, are added so in float32. In the last bits, so does what ``torch.compile``'s own
capture takes apart before this compiler sees it (``addcdiv`` with a value, interpolation, recurrent layers), and batch
norms with half statistics; and a product of a transposed tensor after some updates in place (``index_copy_``), whose
functional form in the captured graph has other strides. Which zero the maximum of two zeros is, is not said either.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import frexp
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._decomp.decompositions import _get_batch_norm_reserve_tensor

from ..ir.loops import Const, Index, Load, LoopNest, Op, Reduce, Scan, Stmt, Store, stmt_args
from ..ir.program import Node
from .accumulate import UNORDERED, possible
from .context import LoweringContext
from .cuda_formulas import ROUNDED_FIRST, formula_of
from .numbers import HALF
from .rules import Unsupported, overloads

EXACT = frozenset(
    "neg abs maximum minimum and or xor not eq ne lt le gt ge where cast from_bits to_bits to_f16 to_bf16 isnan isinf"
    " signbit copysign nextafter".split()
)
ROUNDS = frozenset("add sub mul div floor ceil trunc round".split())
CUDA = frozenset(  # of its library, and the hardware's square root
    "sqrt exp expm1 log log2 log10 log1p sin cos tan sinh cosh tanh erfc".split()
)
CHOOSES = frozenset("max min any all argmax argmin sort".split())


aten = torch.ops.aten


def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, var: torch.Tensor, training: bool, *rest: float
) -> Any:
    """Of half statistics torch says that they become float32, and makes halves: taken apart they are right, if not to
    the last bit. On CUDA eager's is often cuDNN's, which the captured op never is and this one is where eager's is."""
    if mean.dtype in HALF:
        op = aten._native_batch_norm_legit_functional.default
        return decomposition_table[op](x, weight, bias, mean, var, training, *rest)
    if not (x.is_cuda and training) or weight is None or bias is None or _reserves(x, weight, mean, var, rest[1]):
        return NotImplemented
    made = aten._batch_norm_with_update_functional(x, weight, bias, mean, var, *rest)
    return (*made[:3], *made[4:])


def _batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: Any, mean: Any, var: Any, m: Any, v: Any, train: bool, *rest: Any
) -> Any:
    """Likewise: where the statistics run, so that its forward was that."""
    if not (x.is_cuda and train) or weight is None or mean is None or _reserves(x, weight, mean, var, rest[0]):
        return NotImplemented
    return aten.batch_norm_backward(grad, x, weight, mean, var, m, v, train, *rest, x.new_empty(0, dtype=torch.uint8))


def _reserves(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, eps: float) -> bool:
    """Does cuDNN's forward keep something for its backward? The captured ops do not hand it on."""
    return _get_batch_norm_reserve_tensor(x, weight, weight, mean, var, eps, True).numel() > 0


# They move, select and compare numbers: torch's parts of them have their bits, and fuse.
_MOVE = (
    "stack select_backward slice_backward diagonal_backward diag_embed block_diag rot90 unfold_copy take pixel_shuffle"
    " pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d"
    " replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d"
    " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d threshold hardshrink heaviside"
    " nan_to_num isposinf isneginf"
).split()
TABLE = {op: decomposition_table[op] for op in overloads(*_MOVE) if op in decomposition_table}
TABLE[aten._native_batch_norm_legit_functional.default] = _batch_norm
TABLE[aten.native_batch_norm_backward.default] = _batch_norm_backward


def rule(cx: LoweringContext, target: Any, usual: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """How to lower an op: by the formula of eager's kernel, or as usual if that computes eager's bits."""
    return formula_of(cx, target) or (partial(_checked, usual, target) if usual is not None else None)


def _checked(usual: Callable[..., Any], target: Any, cx: LoweringContext, *args: Any, **kwargs: Any) -> Any:
    nodes = len(cx.low.nodes)
    value = usual(cx, *args, **kwargs)
    check(cx, target, cx.low.nodes[nodes:])
    return value


def check(cx: LoweringContext, target: Any, nodes: Sequence[Node]) -> None:
    """Raises Unsupported unless ``nodes``, which a rule made of one op, compute eager's bits."""
    if not isinstance(target, torch._ops.OpOverload) or target in UNORDERED and possible(cx, cx.dtype):
        return
    rounds = ROUNDS | CUDA if cx.on_gpu else ROUNDS
    for node in nodes:
        if not isinstance(node, LoopNest):
            raise Unsupported("numerics: eager's own kernel")
        floats = [s for s in node.body if _of_floats(node.body, s)]
        if why := next(filter(None, (_reorders(s) for s in floats)), ""):
            raise Unsupported(f"numerics: {why}")
        ops = [s.op for s in floats if isinstance(s, Op) and s.op not in EXACT]
        if unknown := [op for op in ops if op not in rounds]:
            raise Unsupported(f"numerics: {unknown[0]} of eager's library")
        if len(ops) > 1:
            raise Unsupported("numerics: an op that rounds more than once")
        if ops and (any(_rounded_first(node.body, s, cx) for s in floats) or _mixed(node.body, cx)):
            raise Unsupported(ROUNDED_FIRST)


def _reorders(s: Stmt) -> str:
    if isinstance(s, Store):
        return "additions in any order" if s.reduce else ""
    return f"a {s.kind} of floats" if isinstance(s, (Reduce, Scan)) and s.kind not in CHOOSES else ""


def _rounded_first(body: tuple[Stmt, ...], s: Stmt, cx: LoweringContext) -> bool:
    """Eager on a GPU multiplies by the reciprocal of a number, and on a CPU adds a number of the tensor's own dtype."""
    if not isinstance(s, Op) or s.op not in (("div",) if cx.on_gpu else ("add", "sub")):
        return False
    if cx.on_gpu:
        divisor = body[s.args[1]]
        return _is_number(body, s.args[1]) and not (
            isinstance(divisor, Const) and abs(frexp(float(divisor.value))[0]) == 0.5
        )
    numbers = [float(body[a].value) for a in s.args if isinstance(body[a], Const)]  # type: ignore[union-attr]
    return cx.dtype in HALF and any(v != float(torch.tensor(v).to(cx.dtype)) for v in numbers)


def _is_number(body: tuple[Stmt, ...], i: int) -> bool:
    """Is it computed without reading a tensor?"""
    return not isinstance(body[i], Load) and all(_is_number(body, a) for a in stmt_args(body[i]))


def _mixed(body: tuple[Stmt, ...], cx: LoweringContext) -> bool:
    """Is there, for a half result, an operand of another dtype: integers, sizes, a float32 number?"""
    if cx.dtype not in HALF:
        return False
    return any(
        isinstance(s, Index) or (isinstance(s, Load) and cx.low.buffers[s.buffer].dtype != cx.dtype) for s in body
    )


def _of_floats(body: tuple[Stmt, ...], s: Stmt) -> bool:
    return any(body[a].dtype.is_floating_point for a in stmt_args(s))  # type: ignore[union-attr]
