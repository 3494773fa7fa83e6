"""Grouped products, of a mixture of experts: ``torch.nn.functional.grouped_mm``.

Groups are slices of one dimension, whose ends are in a tensor on the device, or of a third dimension:

    a 2-d, b 3-d    a row's group says which matrix multiplies it     out[start:end] = a[start:end] @ b[g]
    a 3-d, b 2-d    the same of columns                               out[:, start:end] = a[g] @ b[:, start:end]
    a 2-d, b 2-d    gradients of the matrices: divides the depth      out[g] = a[:, start:end] @ b[start:end]
    a 3-d, b 3-d    no ends: a batched product, which is lowered as one

The call becomes a Choice of ATen's and one kernel (``grouped_kernel``), an ordinary Triton function: it is launched
like those of users (``user_kernels``), with a few tilings. ATen has a grouped kernel for Hopper and data-centre
Blackwell, and elsewhere waits for the ends to loop over the groups on the host: there, unmeasured, ours is the default.

NB: TorchInductor has a template for scaled 8-bit floats too.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from reflib.ir.expr import Expr, ceildiv, expr, minimum
from reflib.ir.program import Assume, Choice, Extern, Variant, View
from reflib.target import Target

from .context import LoweringContext, contiguous_strides
from .extern import extern
from .flex_makers import ends_of_groups
from .flex_template import target_of
from .matmul import CHOSEN, HALVES, as_choice, templates_can_read
from .rules import Unsupported, rule

aten = torch.ops.aten
LIBRARY = (90, 100, 103)  # compute capabilities that ATen has a grouped kernel for, of bfloat16
PROGRAMS = 2  # for each multiprocessor
# m, n, k, warps, stages
TILINGS = ((128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (128, 256, 64, 8, 3), (32, 128, 128, 4, 3), (16, 128, 128, 4, 4))
# read through descriptors, on Hopper and later
DESCRIBED = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (64, 256, 64, 4, 4), (64, 128, 64, 4, 5), (32, 64, 256, 4, 4))
MOST_GROUPS = 1024  # that are looked up


@dataclass(frozen=True)
class _Tiling:
    m: int
    n: int
    k: int
    warps: int
    stages: int
    described: bool = False

    def __str__(self) -> str:
        return f"triton {self.m}x{self.n}x{self.k} w{self.warps} s{self.stages}" + " tma" * self.described


@dataclass(frozen=True)
class _Grouped:
    """One call. ``ragged``: the dimension that is divided. ``strides``: of a, b, result, as (group, row, column)."""

    ragged: str
    groups: Expr
    sizes: tuple[Expr, Expr, Expr]
    strides: tuple[tuple[Expr, ...], ...]


@rule("_grouped_mm.default")
def grouped_mm(
    cx: LoweringContext, a: View, b: View, offs: View | None = None, bias: View | None = None, out_dtype: Any = None
) -> Any:
    batch = len(a.shape) == len(b.shape) == 3 and bias is None and cx.dtype == a.dtype and offs is None
    if batch and contiguous_strides(cx.shape) == tuple(cx.low.symbols.exprs(cx.fakes[0].stride())):
        return cx.call(aten.bmm.default, a, b)
    target = target_of(cx)
    _check(cx, a, b, offs, bias, target)
    assert target is not None
    args = (a, b, offs, bias, out_dtype)
    value = extern(cx, aten._grouped_mm.default, args, {}, "library call")
    default = cx.low.nodes.pop()
    assert isinstance(default, Extern)
    g = _grouped(a, b, offs, value)
    found = _tilings(g, a, target)
    found += _tilings(g, a, target, described=True) if _can_be_described(g, (a, b), target) else []
    inputs = [v.buffer for v in (a, b) if cx.low.buffers[v.buffer].kind != "temp"]
    aligned = tuple(Assume("aligned", x, 16) for x in inputs)
    views = a, b, offs, value
    launches = [Variant(str(t), (_launch(cx, g, views, t, target),), aligned if t.described else ()) for t in found]
    as_choice(cx, aten._grouped_mm.default, default, value, launches)
    made = cx.low.nodes[-1]
    assert isinstance(made, Choice)
    first, *others = made.variants
    loops = a.dtype != torch.bfloat16 or target.capability not in LIBRARY
    if offs is not None:
        total = g.sizes["mnk".index(g.ragged)].hint()
        made = replace(made, inputs_from=((offs.buffer, ends_of_groups(total)),))
    cx.low.nodes[-1] = replace(made, variants=(*others, first) if loops else made.variants, custom=True)
    return value


def _check(cx: LoweringContext, a: View, b: View, offs: View | None, bias: View | None, target: Target | None) -> None:
    low = cx.low
    read = [v for v in (a, b, offs) if v is not None]
    if not cx.on_gpu or target is None or not low.choices or low.options.batch_invariant or bias is not None:
        raise Unsupported("library call")
    if not templates_can_read(cx, tuple(read), {}) or a.dtype not in HALVES or b.dtype != a.dtype:
        raise Unsupported("library call")
    if (offs is None) != (len(a.shape) == len(b.shape) == 3) or cx.dtype not in CHOSEN:
        raise Unsupported("library call")
    if target.kind == "cuda" and target.capability < 80:
        raise Unsupported("no tensor cores that Triton uses")
    try:
        import triton  # noqa: F401
    except ImportError:
        raise Unsupported("Triton is not installed") from None


def _grouped(a: View, b: View, offs: View | None, out: View) -> _Grouped:
    ragged = {(2, 3): "m", (3, 2): "n", (2, 2): "k", (3, 3): ""}[len(a.shape), len(b.shape)]
    groups = a.shape[0] if offs is None else offs.shape[0]
    strides = tuple((expr(0), *v.strides) if len(v.strides) == 2 else v.strides for v in (a, b, out))
    return _Grouped(ragged, groups, (a.shape[-2], b.shape[-1], a.shape[-1]), strides)


def _can_be_described(g: _Grouped, operands: tuple[View, View], target: Target) -> bool:
    """Can TMA read both, from aligned buffers? Groups are of rows; what is not contiguous is a multiple of 16 bytes."""
    known = g.groups.constant is not None and g.groups.constant <= MOST_GROUPS
    if target.kind != "cuda" or target.capability < 90 or g.ragged != "m" or not known:
        return False
    a, b = operands
    if a.strides[-1] != 1 or 1 not in b.strides[1:]:
        return False
    far = (a.strides[0], a.offset, b.strides[0], b.strides[1] if b.strides[2] == 1 else b.strides[2], b.offset)
    return all(e.constant is not None and e.constant * a.dtype.itemsize % 16 == 0 for e in far)


def _tilings(g: _Grouped, a: View, target: Target, described: bool = False) -> list[_Tiling]:
    """Those that fit, the one whose blocks are nearest to a group's rows first."""
    rows = ceildiv(g.sizes[0], g.groups).hint() if g.ragged == "m" else g.sizes[0].hint()
    found = []
    for m, n, k, warps, stages in DESCRIBED if described else TILINGS:
        stages = stages if target.kind == "cuda" else 2
        while stages > 1 and stages * (m + n) * k * a.dtype.itemsize > target.shared:
            stages -= 1
        found.append(_Tiling(m, n, k, warps, stages, described))
    return sorted(found, key=lambda t: abs(min(128, max(16, rows)) - t.m))


def _launch(cx: LoweringContext, g: _Grouped, views: tuple[Any, ...], t: _Tiling, target: Target) -> Extern:
    import triton

    from .grouped_kernel import grouped_mm, grouped_rows_described
    from .user_kernels import KernelCall

    a, b, ends, out = views
    names = [f"{v}_{d}" for v, dims in (("a", "gmk"), ("b", "gkn"), ("c", "gmn")) for d in dims]
    given = {"a": a, "b": b, "ends": a if ends is None else ends, "c": out, "groups": g.groups}
    given |= dict(zip("MNK", g.sizes)) | dict(zip(names, (s for each in g.strides for s in each)))
    if t.described:
        given |= {"B_ROWS": b.strides[-1] == 1, "GROUPS": 1 << (int(g.groups) - 1).bit_length()}
        given = {n: v for n, v in given.items() if n not in ("a_g", "a_k", "c_g")}
    else:
        given |= {"RAGGED": g.ragged}
    config = triton.Config({"MBLOCK": t.m, "NBLOCK": t.n, "KBLOCK": t.k}, num_warps=t.warps, num_stages=t.stages)
    blocks = {"m": ceildiv(g.sizes[0], t.m), "n": ceildiv(g.sizes[1], t.n)}
    if g.ragged in blocks:  # each group may have a block more
        blocks[g.ragged] = blocks[g.ragged] + g.groups
    tiles = blocks["m"] * blocks["n"] * (1 if g.ragged in blocks else g.groups)
    named = replace(cx, origin=replace(cx.origin, op="grouped_mm"))
    grid = (minimum(tiles, PROGRAMS * target.units), expr(1), expr(1))
    kernel = grouped_rows_described if t.described else grouped_mm
    return KernelCall(named, kernel, given, {}).extern(cx.low.next_node(), config, grid, (out.buffer,))
