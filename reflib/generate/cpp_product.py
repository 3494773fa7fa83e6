"""A Template on a CPU: the product of ``cpp_product.h``, with the epilogue as a function of each tile.

For ``Options.batch_invariant``. On a machine with AVX2, beside MKL's own call (float32, 1024 x 1024, one thread), it
takes 1.0 to 1.3 times as long for 8 rows and more, and 2 to 3.5 times for one row, which MKL does not copy into panels;
of halves, for which that machine has no instructions, a fiftieth to a half.
"""

import torch

from ..errors import GenerateError
from ..ir.loops import Acc
from ..ir.program import Buffer, KernelNode, Template, View
from . import cpp_text as text
from .cpp import function, names_of
from .cpp_emit import Emitter, Writer, loop
from .cpp_nest import Nest
from .kernel import Kernel


def print_product(node: KernelNode, buffers: dict[str, Buffer]) -> Kernel:
    """``node``, whose one part is a Template, as a C++ function. Raises GenerateError for other dtypes than floats."""
    (t,) = node.parts
    assert isinstance(t, Template)
    if not t.dtype.is_floating_point:
        raise GenerateError(f"{t.name}: no C++ kernel for a product of {t.dtype}")
    used = list(dict.fromkeys([*t.reads(), *t.writes()]))
    axes = t.epilogue.axes
    names = names_of(used, {a.var.name for a in axes} | {s.name for s in t.symbols()} | {"sums", "stride"})
    wide = text.CTYPE[t.acc_dtype]
    y, x = (text.identifier(a.var.name) for a in axes[-2:])
    z = text.identifier(axes[0].var.name) if len(axes) == 3 else ""
    batch, m, n, k = t.sizes
    sizes = ", ".join(text.index(e) for e in (batch, m, n, k))

    def body(w: Writer) -> None:
        operands = ", ".join(_operand(v, t.dtype, wide, names, buffers) for v in (t.a, t.b))
        tile = f"int64_t {z}, int64_t {y}_from, int64_t {y}_to, int64_t {x}_from, int64_t {x}_to"
        w.line(f"op::product<{wide}>(")
        w.line(f"  {operands},")
        with w.block(f"  {sizes}, threads, [=, &failed]({tile}, const {wide}* sums, int64_t stride)"):
            nest = Nest(t.epilogue, axes[:-1], axes[-1], ())
            emitter = Emitter(w, nest, buffers, names)
            place = f"sums[({y} - {y}_from) * stride + {x} - {x}_from]"
            emitter.given = {i: place for i, s in enumerate(t.epilogue.body) if isinstance(s, Acc)}
            with w.block(loop(axes[-2], f"{y}_from", f"{y}_to")):
                emitter.rows_of_tile(loop(axes[-1], f"{x}_from", f"{x}_to"))
        w.line(");")

    return function(node.name, used, set(t.writes()), tuple(t.symbols()), buffers, names, [(t.epilogue, body)])


def _operand(v: View, dtype: torch.dtype, wide: str, names: dict[str, str], buffers: dict[str, Buffer]) -> str:
    """Where it is, its strides, and how an element is read."""
    kept = buffers[v.buffer].dtype
    if kept != v.dtype:
        raise GenerateError(f"{v.buffer} is {kept} and cannot be read as {v.dtype}")
    value = text.cast(text.loaded("x", kept), torch.float32 if kept.itemsize == 2 else kept, torch.float32)
    if dtype == torch.float64:
        value = text.cast(text.loaded("x", kept), kept, torch.float64)
    elif dtype != torch.float32 and kept != dtype:
        value = f"op::to_{'f16' if dtype == torch.float16 else 'bf16'}({value})"
    strides = ", ".join(text.index(e) for e in v.strides)
    at = names[v.buffer] + (f" + {text.index(v.offset)}" if v.offset != 0 else "")
    return f"{at}, op::Matrix{{{strides}}}, []({text.memory_type(kept)} x) -> {wide} {{ return {value}; }}"
