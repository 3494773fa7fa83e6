"""Matrix products: mm, addmm, bmm and baddbmm become a Choice of ATen's call, a Template, and decompose-K.

There is a Choice for float16, bfloat16 and float32 on a GPU, with ``autotune="off"`` too, where a static rule decides;
on a CPU only when something is measured, and without a Template, which CPUs have no kernel for. Other products are
plain calls. Sizes that libraries have no fast kernels for are padded first (``padding``).

**Rounding.** Eager multiplies halves in float32 and rounds once, after alpha and beta: so does the Template's epilogue,
and what is fused behind it sees the rounded value. float32 is multiplied as tf32 only where torch's switches say so
when the graph is lowered (Dynamo guards on them). Sums are always float32:
``allow_fp16_accumulation`` and ``allow_fp16_reduced_precision_reduction`` permit less, and need not be taken up.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import Expr, Var, expr
from reflib.ir.loops import Acc, Axis, LoopNest
from reflib.ir.program import Choice, Extern, Template, Variant, View, iter_views

from . import padding
from .body import NestBuilder, Value
from .context import LoweringContext
from .depth_in_parts import added, operands, parts
from .extern import extern
from .rules import Unsupported, rule
from .small_products import deep_product, is_deep, is_small, small_product
from .strips import in_strips

aten = torch.ops.aten

HALVES = (torch.float16, torch.bfloat16)
CHOSEN = (*HALVES, torch.float32)
_PLAIN = "library call"


@rule("mm.default")
def mm(cx: LoweringContext, a: View, b: View) -> Any:
    return _product(cx, aten.mm.default, a, b, (a, b), {})


@rule("bmm.default")
def bmm(cx: LoweringContext, a: View, b: View) -> Any:
    return _product(cx, aten.bmm.default, a, b, (a, b), {})


@rule("addmm.default")
def addmm(cx: LoweringContext, bias: View, a: View, b: View, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _product(cx, aten.addmm.default, a, b, (bias, a, b), {"beta": beta, "alpha": alpha})


@rule("baddbmm.default")
def baddbmm(cx: LoweringContext, bias: View, a: View, b: View, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _product(cx, aten.baddbmm.default, a, b, (bias, a, b), {"beta": beta, "alpha": alpha})


def _product(cx: LoweringContext, target: Any, a: View, b: View, args: tuple[View, ...], kwargs: dict[str, Any]) -> Any:
    """A Choice, if there is anything to choose from; Unsupported (a plain call) if there is not."""
    gpu = cx.on_gpu
    if a.shape[-1] == 1 and len(args) == 2 and a.dtype == b.dtype == cx.dtype:  # rotary angles, for one
        return cx.call(aten.mul.Tensor, a, b)  # rounded once, too, and fused with what uses it
    if cx.low.options.batch_invariant:
        return _in_one_order(cx, a, b, args, kwargs)
    if is_small(cx, a, b):
        bias = args[0] if len(args) == 3 else None
        return small_product(cx, a, b, bias, kwargs.get("alpha", 1), kwargs.get("beta", 1))
    if len(args) == 2 and is_deep(cx, a, b):
        return deep_product(cx, a, b)
    if not worth_choosing(cx, gpu, a, b):
        raise Unsupported(_PLAIN)
    scale = {k: v for k, v in kwargs.items() if v != 1}
    low = cx.low
    tensor_cores = gpu and (cx.dtype in HALVES or float32_precision() == "tf32")
    padded = padding.padded_sizes(cx, a, b, args[0] if len(args) == 3 else None) if tensor_cores else None
    if padded is not None and low.options.autotune == "off":
        tiling = padding.in_place(cx, a, b, padded) if templates_can_read(cx, args, kwargs) else None
        if tiling is not None:
            out = cx.out()
            t = template(cx, low.next_node(), a, b, out, args[0] if len(args) == 3 else None, **kwargs)
            low.nodes.append(replace(t, tiling=tiling))
            return out
        made = in_strips(cx, a, b, padded) if len(args) == 2 and not scale else None
        value = padding.padded_product(cx, target, args, scale, padded) if made is None else made
        if made is not None or cx.shape[-2:] != padded[:2]:
            return value
        args = low.nodes[-1].args  # type: ignore[union-attr]
    else:
        value = extern(cx, target, args, scale, _PLAIN)
    default = low.nodes.pop()
    assert isinstance(default, Extern)
    others: list[Variant] = []
    if gpu and templates_can_read(cx, args, kwargs):
        bias = args[0] if len(args) == 3 else None
        scales = kwargs.get("alpha", 1), kwargs.get("beta", 1)
        t = template(cx, default.name, args[-2], args[-1], value, bias, *scales)
        others.append(Variant("triton", (t,)))
    failed: tuple[tuple[str, str, str], ...] = ()
    if low.options.autotune != "off":
        from .decompose_k import matmul_variants  # it is lowered by these rules in its turn

        more, failed = matmul_variants(cx, target, args, scale, value)
        others += more
        if padded is not None:
            more, not_padded = padding.padded_variants(cx, target, args, scale, value, padded)
            others, failed = others + more, failed + not_padded
    if not others:
        low.nodes.append(default)
        return value
    return as_choice(cx, target, default, value, others, failed)


def as_choice(
    cx: LoweringContext, target: Any, default: Extern, value: Any, others: Sequence[Variant],
    failed: tuple[tuple[str, str, str], ...] = (),
) -> Any:  # fmt: skip
    """ATen's call ``default``, which returns ``value``, or one of ``others``."""
    first = Variant("aten", (default,))
    outputs = tuple(o for o in default.outputs if isinstance(o, str))
    op = f"aten.{target._schema.name.partition('::')[2]}"
    cx.low.nodes.append(Choice(default.name, op, outputs, (first, *others), failed=failed, origins=(cx.origin,)))
    return value


def _in_one_order(cx: LoweringContext, a: View, b: View, args: tuple[View, ...], kwargs: dict[str, Any]) -> View:
    """For ``Options.batch_invariant``: a Template, on a CPU too, whose blocks are the same for all products."""
    args = tuple(cx.readable(v) for v in args)
    floats = CHOSEN if cx.on_gpu else (*CHOSEN, torch.float64)
    if cx.dtype not in floats or any(v.dtype != cx.dtype for v in args) or not templates_can_read(cx, args, kwargs):
        raise Unsupported(_PLAIN)
    if any(size == 0 for v in (a, b) for size in v.shape):
        raise Unsupported("an empty product")
    (a, b), bias = args[-2:], args[0] if len(args) == 3 else None
    scale = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    count = parts(a.shape[1].constant) if cx.on_gpu and len(a.shape) == 2 else 1
    cores = cx.on_gpu and cx.dtype in HALVES
    if count == 1 and cores and (sizes := padding.padded_sizes(cx, a, b, None)) is not None:
        a, b = padding.padded_operands(cx, a, b, sizes)  # (a block has zeros after the depth anyway)
    if count == 1:
        name, out = cx.low.next_node(), cx.out()
        t = template(cx, name, a, b, out, bias, *scale)
    else:
        name, out = cx.low.next_node(), cx.temp("parts", (count, *cx.shape), torch.float32)
        t = template(cx, name, *operands(a, b, count), out, None)
    halves = {_narrowest(n) for n in cx.node.args[-2:]}
    narrow = halves.pop() if len(halves) == 1 else torch.float32
    if cx.on_gpu and out.dtype == torch.float32 and narrow in HALVES:
        t = replace(t, dtype=narrow, precision="ieee")  # their products are exact in float32: tensor cores' work
    cx.low.nodes.append(t)
    return out if count == 1 else added(cx, out, bias, *scale)


def _narrowest(node: Any) -> torch.dtype:
    """The dtype that a float32 tensor of the graph was cast from, if it was only moved since then; else its own."""
    while node.target in MOVED or node.target is aten._to_copy.default:
        before = node.args[0]
        if before.meta["val"].dtype != node.meta["val"].dtype:
            return before.meta["val"].dtype
        node = before
    return node.meta["val"].dtype


MOVED = {
    aten.view.default, aten.permute.default, aten.transpose.int, aten.expand.default, aten.clone.default,
    aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.reshape.default, aten._unsafe_view.default,
    aten.select.int, aten.slice.Tensor,
}  # fmt: skip


@rule("mv.default")
def mv(cx: LoweringContext, a: View, v: View) -> Any:
    """For ``Options.batch_invariant``: a product with one column."""
    if not cx.low.options.batch_invariant:
        raise Unsupported(_PLAIN)
    column = replace(v, shape=(*v.shape, expr(1)), strides=(*v.strides, expr(1)))
    out = cx.call(aten.mm.default, a, column, fake=cx.fakes[0].unsqueeze(1))
    return replace(out, shape=out.shape[:1], strides=out.strides[:1])


# -- when -------------------------------------------------------------------------------------------
def worth_choosing(cx: LoweringContext, gpu: bool, a: View, b: View) -> bool:
    """Is there more than one good way to multiply these? An empty product is a fill, which ATen does."""
    if not cx.low.choices:  # inside a variant that has chosen
        return False
    if cx.dtype not in CHOSEN or a.dtype != cx.dtype or b.dtype != cx.dtype:
        return False
    if any(size == 0 for size in (*a.shape, *b.shape)):
        return False
    return gpu or cx.low.options.autotune != "off"


def templates_can_read(cx: LoweringContext, args: tuple[View, ...], kwargs: dict[str, Any]) -> bool:
    """A Template reads buffers as what they are, where they are; its scalars are numbers or sizes."""
    buffers = [(v, cx.low.buffers[v.buffer]) for v in iter_views(args)]
    if any(b.dtype != v.dtype or b.device != cx.device for v, b in buffers):
        return False
    return all(
        isinstance(x, (int, float)) or isinstance(x, Expr) and not cx.low.symbols.is_float(x) for x in kwargs.values()
    )


def float32_precision() -> str:
    """``tf32`` if torch may multiply float32 matrices so on a GPU, else ``ieee``."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # what is unset there is looked up further out, by torch
    if precision is None:
        return "tf32" if matmul.allow_tf32 else "ieee"
    return "tf32" if precision == "tf32" else "ieee"


# -- the template -----------------------------------------------------------------------------------
def template(
    cx: LoweringContext, name: str, a: View, b: View, out: View, bias: View | None, alpha: Any = 1, beta: Any = 1,
    scales: Sequence[View] = (),
) -> Template:  # fmt: skip
    """alpha * a @ b * scales + beta * bias into ``out``, with scales and bias broadcast. Assumes that
    ``templates_can_read`` all."""
    k = product_kernel(cx, out)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    value = Value(k, k.b.add(Acc(wide)))
    if alpha != 1:
        value = value * k.value(alpha, wide)
    for scale in scales:
        value = value * k.load(scale)
    if bias is not None and beta != 0:  # with beta == 0 not even a NaN of the bias counts
        term = k.load(bias).to(wide)
        value = value + (term if beta == 1 else term * k.value(beta, wide))
    k.store(out, value.to(out.dtype))
    epilogue = LoopNest(name, tuple(k.axes), tuple(k.b.body), (cx.origin,))
    precision = float32_precision() if out.dtype == torch.float32 else "ieee"
    a, b, product = batched(a), batched(b), batched(out)
    depth = min(a.shape[2], b.shape[1], key=lambda e: (e.constant is None, len(e.terms), str(e)))
    # What is known to be equal may be written in two ways: a guard says so, the expressions do not. One is used.
    a = replace(a, shape=(product.shape[0], product.shape[1], depth))
    b = replace(b, shape=(product.shape[0], depth, product.shape[2]))
    return Template(name, a, b, epilogue, out.dtype, precision)


def product_kernel(cx: LoweringContext, out: View) -> NestBuilder:
    """An empty epilogue: unlike other kernels it has an axis for each of m and n, even of size 1; and one for the
    batch unless that is 1."""
    k = NestBuilder(cx, out.shape)
    first = 1 if len(out.shape) == 3 and out.shape[0] == 1 else 0
    dims, number = range(first, len(out.shape)), cx.low.next_kernel()
    made = iter(k.axes)
    k.axes = [Axis(Var(f"i{d}_{number}", expr(1)), "p") if out.shape[d] == 1 else next(made) for d in dims]
    return k


def batched(v: View) -> View:
    """A matrix as a batch of one."""
    if len(v.shape) == 3:
        return v
    return replace(v, shape=(expr(1), *v.shape), strides=(expr(0), *v.strides))
