"""Is a candidate right? Its results, a wider reference, and the default's own error decide.

**Reference**: the default's program, every float in it widened to float64 (roundings to half dropped), interpreted
(``ir/interpret``). If something in it refuses float64, or there is no room: float32; else the default's own results.

**Errors** of a float tensor: ``relative`` = |out - ref| / |ref| (2-norms), and ``worst``, the largest
|out - ref| / (|ref| + mean |ref|), which sees the one wrong element. Of anything else: the share of elements that
differ. **Wrong** is an error of more than twice the default's plus a floor::

    floor    = max(FLOOR[dtype], 2 * u * sqrt(length)), 2 ** -10 at least if the candidate multiplies in tf32
    relative > 2 * default's + floor        worst > 2 * default's + 8 * floor

with u the unit roundoff of the accumulator (float32, or float64 for float64) and ``length`` the longest input
dimension: a sum of n products, one after the other, is off by some u * sqrt(n). Where the default's own results are
the reference the floors count four times. NaN and infinities must be where the reference, rounded to the result's
dtype, or the default has them. Sizes, strides, dtype and device must be the program's.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from ..errors import MeasureError
from ..ir.expr import Atom, Expr
from ..ir.interpret import interpret
from ..ir.loops import LoopNest, Op
from ..ir.program import Extern, KernelNode, Program, Template, Variants, View
from .inputs import copy_of

FLOOR = {torch.float64: 1e-11, torch.float32: 3e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-9}
TF32_FLOOR = 2.0**-10
BROKEN = 0.1  # a default with a larger relative error does not compute what its program says
_CHUNK = 2**24  # elements compared at once: what a comparison allocates stays small
_HALVES = (torch.float16, torch.bfloat16)


# -- the reference ----------------------------------------------------------------------------------
def widen(program: Program, wide: torch.dtype) -> Program:
    """``program`` with every float narrower than ``wide`` (float64 or float32) replaced by it, in buffers, views,
    statements and arguments of calls. Raises MeasureError where that has no meaning: a view as another dtype."""
    narrow = {d for d in (*_HALVES, torch.float32) if d.itemsize < wide.itemsize}

    def one(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return wide if x in narrow else x
        if isinstance(x, (tuple, list)):
            return type(x)(one(v) for v in x)
        if isinstance(x, dict):
            return {k: one(v) for k, v in x.items()}
        if isinstance(x, Op) and x.op in ("to_f16", "to_bf16"):
            return Op("cast", x.args, one(x.dtype))
        if isinstance(x, View) and program.buffers[x.buffer].dtype != x.dtype:
            raise MeasureError(f"{x.buffer} is seen as {x.dtype}: its bits have no wider form")
        if isinstance(x, (Expr, Atom)) or not is_dataclass(x) or isinstance(x, type):
            return x
        out: Any = replace(x, **{f.name: one(getattr(x, f.name)) for f in fields(x)})
        if isinstance(x, Extern):
            out = replace(out, target=_Promising(x.target, [one(dtype_of(program, o)) for o in x.outputs]))
        return out

    constants = {k: _wide_copy(v, wide, narrow) if k in program.buffers else v for k, v in program.constants.items()}
    return replace(one(replace(program, constants={})), constants=constants)


class _Promising:
    """A call that must return the dtypes it was declared with: one that rounds inside is no reference."""

    def __init__(self, target: Any, dtypes: Sequence[torch.dtype | None]):
        self.target, self.dtypes = target, dtypes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.target(*args, **kwargs)
        values = torch.utils._pytree.tree_leaves(result) if isinstance(result, (tuple, list, dict)) else [result]
        for v, dtype in zip(values, self.dtypes):
            if dtype is not None and isinstance(v, torch.Tensor) and v.dtype != dtype:
                raise MeasureError(f"{self.target} returned {v.dtype} for wider arguments, not {dtype}")
        return result


def dtype_of(program: Program, output: Any) -> torch.dtype | None:
    """Of a program's or a call's output: a View, a buffer's name, or what is no tensor (None)."""
    if isinstance(output, View):
        return output.dtype
    return program.buffers[output].dtype if isinstance(output, str) and output in program.buffers else None


def _wide_copy(x: Any, wide: torch.dtype, narrow: set[torch.dtype]) -> Any:
    """A copy of a tensor, layout kept, widened if it is narrow."""
    return copy_of(x, wide if x.dtype in narrow else x.dtype) if isinstance(x, torch.Tensor) else x


def run_wide(program: Program, args: Sequence[Any], wide: torch.dtype) -> tuple[list[Any], list[Any]]:
    """The widened program's outputs, and its arguments afterwards. ``args`` are left alone."""
    narrow = {d for d in (*_HALVES, torch.float32) if d.itemsize < wide.itemsize}
    copies = [_wide_copy(a, wide, narrow) for a in args]
    return interpret(widen(program, wide), copies), copies


def wide_bytes(program: Program, sizes: dict[str, int], wide: torch.dtype) -> int:
    """About what ``run_wide`` allocates: every buffer, and in the largest kernel one grid a statement."""
    each = wide.itemsize
    total = sum(each * _int(b.extent, sizes) for b in program.buffers.values())
    return total + max((_node_bytes(n, sizes) for n in program.nodes), default=0)


def _node_bytes(node: Any, sizes: dict[str, int]) -> int:
    if isinstance(node, LoopNest):
        points = _int(node.numel, sizes) * _int(node.rnumel, sizes)
        return 8 * points * (len(node.body) + 2)
    if isinstance(node, Template):
        b, m, n, k = (_int(e, sizes) for e in node.sizes)
        return 8 * b * (m * k + k * n) + sum(_node_bytes(p, sizes) for p in (*node.prologues, node.epilogue))
    if isinstance(node, KernelNode):
        return sum(_node_bytes(p, sizes) for p in node.parts)
    if isinstance(node, Variants):
        return max(sum(_node_bytes(n, sizes) for n in v.nodes) for v in node.variants)
    return 0


def _int(e: Expr, sizes: dict[str, int]) -> int:
    """The value; what a call will say at run time counts as nothing."""
    try:
        return int(e.evaluate(sizes))
    except KeyError:
        return 0


def uses_tf32(program: Program) -> bool:
    def one(x: Any) -> bool:
        if isinstance(x, Template):
            return x.precision == "tf32"
        if isinstance(x, (tuple, list)):
            return any(one(v) for v in x)
        return is_dataclass(x) and not isinstance(x, (Expr, Atom)) and any(one(getattr(x, f.name)) for f in fields(x))

    return one(program.nodes)


# -- judging ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reference:
    """What is right. ``values``: tensors, possibly wider than ``dtypes`` (None for what is no tensor), then the
    mutated inputs. ``source``: ``float64``, ``float32`` or ``default``. ``length``: see the module."""

    values: tuple[Any, ...]
    dtypes: tuple[torch.dtype | None, ...]
    source: str
    length: int


@dataclass(frozen=True)
class Error:
    """See the module. ``special``: how many NaN and infinities are out of place."""

    relative: float
    worst: float
    special: int = 0


def mismatch(got: Sequence[Any], ref: Reference) -> str:
    """What is wrong with the results' number, kinds, dtypes, sizes or strides; empty if nothing."""
    if len(got) != len(ref.values):
        return f"{len(got)} results, expected {len(ref.values)}"
    for i, (g, r, dtype) in enumerate(zip(got, ref.values, ref.dtypes)):
        if not isinstance(r, torch.Tensor):
            if g != r:
                return f"result {i} is {g!r:.200}, expected {r!r:.200}"
            continue
        if not isinstance(g, torch.Tensor):
            return f"result {i} is {type(g).__name__}, expected a tensor"
        if (g.dtype, g.device, g.shape) != (dtype, r.device, r.shape):
            return f"result {i} is {g.dtype} {tuple(g.shape)} on {g.device}, expected {dtype} {tuple(r.shape)}"
        if g.numel() and any(n > 1 and s != t for n, s, t in zip(g.shape, g.stride(), r.stride())):
            return f"result {i} has strides {g.stride()}, expected {r.stride()}"
    return ""


def errors(got: Sequence[Any], ref: Reference, default: Sequence[Any] | None) -> list[Error]:
    """One for every tensor. ``default``: the default's results. Assumes no ``mismatch``."""
    wants = default if default is not None else [None] * len(got)
    return [_error(g, r, w) for g, r, w in zip(got, ref.values, wants) if isinstance(r, torch.Tensor)]


def _error(got: torch.Tensor, ref: torch.Tensor, want: torch.Tensor | None) -> Error:
    want = got if want is None or want.shape != got.shape else want
    if got.is_complex():
        got, ref, want = (torch.view_as_real(t.resolve_conj()) for t in (got, ref, want))
    if not got.dtype.is_floating_point:
        share = _differing(got, ref)
        return Error(0.0, 0.0) if want is not got and not _differing(got, want) else Error(share, share)
    square = norm = total = worst = 0.0
    special = 0
    for g, r, ok in _chunks(got, ref, want):
        special += int((~ok).sum())
        square += float((g - r).square().sum())
        norm += float(r.square().sum())
        total += float(r.abs().sum())
    mean = total / max(1, got.numel()) or 1e-300
    for g, r, _ in _chunks(got, ref, want):
        worst = max(worst, float(((g - r).abs() / (r.abs() + mean)).max()))
    return Error(math.sqrt(square / norm) if norm else math.sqrt(square), worst, special)


def _chunks(got: torch.Tensor, ref: torch.Tensor, want: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Pieces in float64 as (got, ref, in place): zeros where a value is not finite; ``in place``: NaN and
    infinities are where the reference (rounded to the results' dtype) or the default has them."""
    limit = torch.finfo(got.dtype).max
    for g, r, w in zip(*(t.reshape(-1).split(_CHUNK) for t in (got, ref, want))):
        if not g.numel():
            continue
        g, r, w, rounded = g.double(), r.double(), w.double(), r.to(g.dtype).double()
        finite = g.isfinite() & rounded.isfinite()
        ok = finite | (r.abs() > 0.99 * limit) & (g.sign() == r.sign())  # overflows, or just does not
        for t in (rounded,) if want is got else (rounded, w):
            ok = ok | (g == t) | (g.isnan() & t.isnan())
        zero = torch.zeros((), dtype=torch.float64, device=g.device)
        yield torch.where(finite, g, zero), torch.where(finite, r, zero), ok


def _differing(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a != b).sum()) / max(1, a.numel())


def floors(ref: Reference, tf32: bool) -> list[float]:
    """One for every tensor."""
    out = []
    for dtype in ref.dtypes:
        if dtype is None:
            continue
        if not (dtype.is_floating_point or dtype.is_complex):
            out.append(0.0)
            continue
        real = dtype.to_real() if dtype.is_complex else dtype
        unit = 2.0**-53 if real == torch.float64 else 2.0**-24
        floor = max(FLOOR.get(real, 0.25), 2 * unit * math.sqrt(ref.length), TF32_FLOOR if tf32 else 0.0)
        out.append(floor * (4 if ref.source == "default" else 1))
    return out


def judge(found: Sequence[Error], own: Sequence[Error] | None, least: Sequence[float]) -> str:
    """Why a candidate is wrong; empty if it is right. ``own``: the default's errors (None: it has none to compare
    with). ``least``: the ``floors``."""
    for i, (e, floor) in enumerate(zip(found, least)):
        mine = own[i] if own is not None else Error(0.0, 0.0)
        if e.special:
            return f"{e.special} NaN or infinite values out of place"
        for what, value, theirs, allowed in (
            ("error", e.relative, mine.relative, 2 * mine.relative + floor),
            ("worst element's error", e.worst, mine.worst, 2 * mine.worst + 8 * floor),
        ):
            if not value <= allowed:
                return f"{what} {value:.2g}, allowed {allowed:.2g} (the default's {theirs:.2g})"
    return ""


def judge_default(found: Sequence[Error]) -> str:
    """Why the default itself is wrong; empty if it is right: it may be inaccurate, but not another function."""
    for e in found:
        if e.special:
            return f"{e.special} NaN or infinite values out of place"
        if not e.relative <= BROKEN:
            return f"error {e.relative:.2g}"
    return ""


def beside_eager(got: Any, want: Any, wide: Any) -> tuple[str, Error, Error]:
    """Of one result: why it is wrong, or ""; its errors; eager's own. ``want``: eager's result; ``wide``: eager's in
    float64, against which both are held; without it (None, or of another shape) eager's is what is right."""
    tensor = isinstance(want, torch.Tensor)
    exact = tensor and isinstance(wide, torch.Tensor) and wide.shape == want.shape
    dtypes, length = (want.dtype if tensor else None,), max(want.shape, default=1) if tensor else 1
    ref = Reference((wide if exact else want,), dtypes, "float64" if exact else "default", length)
    if why := mismatch([got], replace(ref, values=(want,))):
        return why.removeprefix("result 0 "), Error(math.nan, math.nan), Error(0.0, 0.0)
    if not tensor:
        return "", Error(0.0, 0.0), Error(0.0, 0.0)
    [ours], [own] = errors([got], ref, [want]), errors([want], ref, None)
    return judge([ours], [own] if exact else None, floors(ref, False)), ours, own
