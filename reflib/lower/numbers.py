"""A number on the CPU that a kernel on a GPU reads: one of the kernel's arguments.

PyTorch allows a tensor without dimensions on the CPU among tensors on a GPU. A copy to the GPU would wait for it, and
cannot be part of a CUDA graph. Kernels take sizes as integers, so the number is passed like a size: as the integer with
the same bits, which the wrapper reads from the tensor at each call. A CUDA graph keeps the value from its capture.
"""

from dataclasses import replace

import torch

from reflib.ir.expr import Expr, Sym, expr
from reflib.ir.loops import Index
from reflib.ir.program import Extern, View

from .body import NestBuilder, Value
from .rules import Unsupported

aten = torch.ops.aten
BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bool: torch.uint8}
HALF = (torch.float16, torch.bfloat16)


def number(k: NestBuilder, view: View) -> Value:
    """``view``, one number in a CPU's memory, as a value of a kernel on another device."""
    low = k.cx.low
    cpu = low.buffers[view.buffer].device
    if view.shape or cpu.type != "cpu":
        raise Unsupported(f"a tensor on {cpu} among those on {k.device}")
    if view not in low.moved:
        wide = view
        if view.dtype in HALF:
            like = replace(view, dtype=torch.float32)
            wide = k.cx.extern_to(aten._to_copy.default, (view,), {"dtype": torch.float32}, like, cpu)
        low.moved[view] = _read(k, wide)
    dtype = torch.float32 if view.dtype in HALF else view.dtype
    if not dtype.is_floating_point:
        return k.index(low.moved[view]).to(dtype)
    bits = k.b.add(Index(low.moved[view], BITS[dtype]))
    return Value(k, k.b.op("from_bits", bits, dtype=dtype))


def _read(k: NestBuilder, view: View) -> Expr:
    """The bits of a float or a bool, or an integer itself, as a symbol that a call gives."""
    low = k.cx.low
    as_int = replace(view, dtype=BITS.get(view.dtype, view.dtype))
    info = torch.iinfo(as_int.dtype)
    sym = Sym(low.unique(f"{view.buffer}_number"), info.min, info.max, 1)
    low.symbols.known[sym.name] = sym
    low.symbols.bind(expr(sym))
    low.nodes.append(
        Extern(
            low.next_node(), aten._local_scalar_dense.default, (as_int,), (), (None,), symbols=((sym, 0, None),),
            reason="a number on the CPU", origins=(k.cx.origin,),
        )
    )  # fmt: skip
    return expr(sym)
