"""``Options.numerics="eager"``: eager's bits wherever eager has an order, and a bound where it has none to keep.

Eager computes a model as a sequence of ATen kernels. Three kinds of ops, by what can be promised of them:

* **Elementwise**: eager's bits. An op is called, or computed by operations that have one right answer, in the same
  order and rounded at the same places. It may round once: by what IEEE 754 defines to the last bit (a sum, a product,
  a quotient) or, on a CUDA device, by a function of CUDA's mathematical library that eager calls as well, and whose
  bits Triton's copy of it shares: not ``asin``, ``acos``, ``atan``, ``erf``, ``hypot`` and ``pow``. (On a CPU eager's
  functions are those of a vector library, MKL's or SLEEF, whose last bits are its own.) Before and after that it may
  compare, select, change signs, and compute with whole numbers. An op that rounds twice has an order, and maybe an
  instruction that leaves one rounding out, that only its own kernel knows: for NVIDIA GPUs ``cuda_formulas`` has what
  eager's kernels do for activations, their derivatives, and arithmetic such as ``addcmul``. Anything else is a call.
* **Sums**: running sums, means, norms, softmax, average pooling, windows of depthwise convolutions, and their
  derivatives; rows that eager sorts before it adds them (``segment_sums``). The order of additions in eager's CUDA
  kernels follows from their launches, and calling them costs what fusion saves. On a GPU they are the kernels of
  ``fast``: halves are read as float32, all is computed in float32, and what eager stores is rounded once. So they are
  within a few ULP of the exact result (``tests/sum_bounds.py`` has the bound of each op, the book's numerics page lists
  them), as eager's are; their bits are not eager's. On a CPU, where a call costs less and eager's bits are what tests
  compare with, they are calls.
* **Products**: library calls, as in eager. On a GPU their operands may be padded with zeros, convolutions may have
  channels-last order, their bias is added in a kernel that fuses, convolutions of patches are products, and a mask that
  eager would not have (``capture.masks``) is gone: cuBLAS, cuDNN and flash attention may then choose other kernels of
  theirs, which accumulate in float32 and round once as well.

So the graph is captured without decompositions but of ops that only move numbers and, on a GPU, of norms and softmax;
nothing that changes where a number is rounded rewrites it (attention written by hand stays so). Results in half
precision are rounded between ops. Compilers do not contract multiplications with additions, nor take numbers below
2^-126 for 0.

Ops that differ from run to run in eager do so here: rows that eager adds atomically in a GPU's memory, in the
tensor's dtype, are added so in float32. In the last bits, so does what ``torch.compile``'s own capture takes apart
before this compiler sees it (``addcdiv`` with a value, interpolation, recurrent layers), and batch norms with half
statistics; and a product of a transposed tensor after some updates in place (``index_copy_``), whose functional form
in the captured graph has other strides. Which zero the maximum of two zeros is, is not said either.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import frexp
from typing import Any

import torch
from torch._decomp import decomposition_table

from ..ir.loops import Const, Index, Load, LoopNest, Op, Reduce, Scan, Stmt, Store, stmt_args
from ..ir.program import Extern, Node
from ..options import Options
from ..target import parse_target
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
# Sums of few terms, which their rules write out.
_POOLS = (f"{a}avg_pool{d}d" for a in ("", "_adaptive_") for d in (2, 3))
WINDOWS = frozenset(overloads("convolution", *(f"{p}{b}" for p in _POOLS for b in ("", "_backward"))))
Parts = Callable[..., Any]


# They move, select and compare numbers: torch's parts of them have their bits, and fuse.
_MOVE = (
    "stack select_backward slice_backward diagonal_backward diag_embed block_diag rot90 unfold_copy take pixel_shuffle"
    " pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d"
    " replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d"
    " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d threshold hardshrink heaviside"
    " nan_to_num isposinf isneginf"
).split()
# They reduce. Torch's parts compute halves in float32 and round at the end, as eager's kernels do.
_NORMS = (
    "native_layer_norm native_group_norm _fused_rms_norm native_batch_norm _native_batch_norm_legit"
    " _native_batch_norm_legit_no_training _native_batch_norm_legit_functional _batch_norm_with_update"
    " _batch_norm_with_update_functional _batch_norm_no_update batch_norm_backward native_layer_norm_backward"
    " native_group_norm_backward _fused_rms_norm_backward native_batch_norm_backward _softmax _log_softmax"
    " _safe_softmax _softmax_backward_data _log_softmax_backward_data logsumexp"
).split()


def parts(table: Mapping[Any, Parts], options: Options) -> dict[Any, Parts]:
    """Of ``table``, decompositions: those with eager's bits, and on a GPU those of sums."""
    gpu = options.target is not None and parse_target(options.target).is_gpu
    found = {op: decomposition_table[op] for op in overloads(*_MOVE) if op in decomposition_table}
    names = {op: str(op).split(".")[1] for op in table}
    return found | {op: partial(_sums, table[op], gpu, "batch" in n) for op, n in names.items() if n in _NORMS}


def _sums(apart: Parts, gpu: bool, batch: bool, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """On a CPU batch norms with half statistics too: torch says that these become float32, and its kernel makes
    halves."""
    taken = gpu or x.is_cuda or batch and isinstance(args[2], torch.Tensor) and args[2].dtype in HALF
    return apart(x, *args, **kwargs) if taken else NotImplemented


def rule(cx: LoweringContext, target: Any, usual: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """How to lower an op: by the formula of eager's kernel, or as usual if that computes eager's bits."""
    return formula_of(cx, target) or (partial(_checked, usual, target) if usual is not None else None)


def _checked(usual: Callable[..., Any], target: Any, cx: LoweringContext, *args: Any, **kwargs: Any) -> Any:
    nodes = len(cx.low.nodes)
    value = usual(cx, *args, **kwargs)
    check(cx, target, cx.low.nodes[nodes:])
    return value


def check(cx: LoweringContext, target: Any, nodes: Sequence[Node]) -> None:
    """Raises Unsupported unless ``nodes``, which a rule made of one op, compute eager's bits, or on a GPU a sum."""
    if not isinstance(target, torch._ops.OpOverload) or target in UNORDERED and possible(cx, cx.dtype):
        return
    loops = [n for n in nodes if isinstance(n, LoopNest)]
    if len(loops) < len(nodes) and (not cx.on_gpu or any(not isinstance(n, (LoopNest, Extern)) for n in nodes)):
        raise Unsupported("numerics: eager's own kernel")
    if any(isinstance(s, Store) and s.reduce for n in loops for s in n.body):
        raise Unsupported("numerics: additions in any order")
    floats = [[s for s in n.body if _of_floats(n.body, s)] for n in loops]
    if any(_adds(s) for found in floats for s in found) or target in WINDOWS or len(loops) < len(nodes):
        if not cx.on_gpu:
            raise Unsupported("numerics: a sum of floats")
        return
    rounds = ROUNDS | CUDA if cx.on_gpu else ROUNDS
    for node, found in zip(loops, floats):
        ops = [s.op for s in found if isinstance(s, Op) and s.op not in EXACT]
        if unknown := [op for op in ops if op not in rounds]:
            raise Unsupported(f"numerics: {unknown[0]} of eager's library")
        if len(ops) > 1:
            raise Unsupported("numerics: an op that rounds more than once")
        if ops and (any(_rounded_first(node.body, s, cx) for s in found) or _mixed(node.body, cx)):
            raise Unsupported(ROUNDED_FIRST)


def _adds(s: Stmt) -> bool:
    return isinstance(s, (Reduce, Scan)) and s.kind not in CHOOSES


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
    """Is there, for a half result, an operand of another dtype: integers, sizes, a float32 number? Masks are exact."""
    if cx.dtype not in HALF:
        return False
    own = (cx.dtype, torch.bool)
    return any(
        isinstance(s, Index) or (isinstance(s, Load) and cx.low.buffers[s.buffer].dtype not in own) for s in body
    )


def _of_floats(body: tuple[Stmt, ...], s: Stmt) -> bool:
    return any(body[a].dtype.is_floating_point for a in stmt_args(s))  # type: ignore[union-attr]
