"""A Triton kernel of the user's as one of ours: a function with our convention (pointers, then sizes) calls it.

Triton inlines the call, so the machine code is that of the user's kernel. Numbers that are known are constants in the
call; what depends on sizes is computed from them; a view is a pointer and an offset. (``launch_epilogue`` prints what
is appended to its stores.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ..ir.division import floordiv, minimum
from ..ir.expr import Expr, Var, expr, nonneg, product
from ..ir.program import Buffer, Extern, KernelNode, Program, View, kernel_variants, symbols_in
from ..ir.user_kernel import UserKernel
from ..schedule.axes import Space
from ..target import Target
from .kernel import Kernel
from .launch_epilogue import with_appended
from .triton import known_multiples
from .triton_facts import paren, pointer_name
from .triton_ops import Needs
from .triton_statements import StatementPrinter


def print_user_kernel(node: KernelNode, buffers: dict[str, Buffer], target: Target, aligned: Collection[str]) -> Kernel:
    """The function ``node.name``, which calls the user's."""
    (x,) = node.parts
    assert isinstance(x, Extern) and isinstance(x.target, UserKernel)
    p = StatementPrinter(Space("1d", (), Var("x", expr(1))), node.config, {}, Needs(), {})
    text, given = with_appended(x, node, buffers)
    pointers = x.reads()
    values = [_pointer(p, v, buffers) if isinstance(v, View) else paren(p.size(v)) for v in x.args]
    settings = x.target.settings
    blocks, *yz = dict(x.kwargs)["grid"]
    grid = packed((blocks * dict(settings).get("num_ctas", 1), *yz))
    symbols = tuple(sorted(p.symbols | grid.symbols() | symbols_in(dict(x.kwargs).get("sizes", ()))))
    lines = [*_about(x), *known_multiples(node.config, symbols), f"{x.target.function}("]
    lines += ["    " + "".join(values[i] if isinstance(i, int) else i for i in a) + "," for a in x.target.call]
    lines += [f"    {name}={value}," for name, value in given]
    head = f"@triton.jit\ndef {node.name}({', '.join([*map(pointer_name, pointers), *(s.name for s in symbols)])}):\n"
    source = f"{text}\n\n{head}" + "".join(f"    {line}\n" for line in [*lines, ")"])
    sure = tuple(i for i, b in enumerate(pointers) if buffers[b].kind == "temp" or b in aligned)
    return Kernel(
        node.name, "triton", source, tuple((b, buffers[b].dtype) for b in pointers), symbols, grid,
        node.config.num_warps, node.config.num_stages, node.config.index, sure, x.target.scratch, settings=settings,
    )  # fmt: skip


def refused(x: Extern, buffers: dict[str, Buffer], target: Target) -> str:
    """Why Triton does not take the text of ``x`` with what is appended, "" if it does (plugs into ``fuse.TAKES``)."""
    from ..schedule.user_kernels import variants
    from .compile_triton import parse

    node = variants(f"{x.target.function}_with_more", x, buffers, target)[-1].kernel
    try:
        parse(print_user_kernel(node, buffers, target, ()), target)
    except Exception as e:  # of any kind
        return f"{type(e).__name__}: {e}"
    return ""


def expect_taken(program: Program, kernels: Mapping[str, Kernel], target: Target) -> None:
    """Compiles each kernel of the user's in a scheduled program, by its fastest variant, for ``target``. Raises what
    the first call would: ToolchainError for what Triton or the assembler refuses, DeviceError for more shared memory
    than the target has; both name the kernel and the line of its launch."""
    from .compile_triton import alike, compile_kernel

    firsts = (v.variants[0].kernel for v in kernel_variants(program.nodes))
    own = [n.name for n in firsts if isinstance(getattr(n.parts[0], "target", None), UserKernel)]
    for kernel in dict.fromkeys(alike(kernels[n] for n in own).values() if target.is_gpu else ()):
        compile_kernel(kernel, target)


def _about(x: Extern) -> list[str]:
    return [f"# {o.op}" + (f" at {o.source}" if o.source else "") for o in x.origins]


def _pointer(p: StatementPrinter, v: View, buffers: dict[str, Buffer]) -> str:
    """Memory of another dtype than its buffer's is cast; truth values, whose pointers are those of bytes in our
    convention, always."""
    text = pointer_name(v.buffer)
    if v.dtype != buffers[v.buffer].dtype or v.dtype == torch.bool:
        kind = "int1" if v.dtype == torch.bool else str(v.dtype).removeprefix("torch.")
        kind = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}.get(kind, kind)
        text = f"{text}.to(tl.pointer_type(tl.{kind}))"
    return text if v.offset == 0 else f"{text} + {paren(p.size(v.offset))}"


def packed(grid: Sequence[Expr]) -> Expr:
    """A grid of up to three dimensions as one number, which the launchers take apart (``cuda_driver.h``): itself if it
    has one; else bit 62, then z - 1, y - 1 (from bits 47 and 31) and x. An empty grid is 0. Of sizes that are too large
    for their bits, y becomes 2^16, which no GPU accepts."""
    x, y, z = grid
    if y == 1 and z == 1:
        return x
    y += floordiv(z, expr(2**15)) * 2**16
    x, y, z = (minimum(n, m) for n, m in zip((x, y, z), (2**31 - 1, 2**16, 2**15)))
    some = minimum(product(n for n in (x, y, z) if not nonneg(n - 1)), 1)
    return some * (2**62 + x + (y - 1) * 2**31 + (z - 1) * 2**47)
