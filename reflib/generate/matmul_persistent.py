"""The persistent kernel for sm_90 and later: as many programs as multiprocessors, each computing several tiles.

Operands are read through descriptors (TMA): one thread requests a whole block, and the hardware computes addresses,
checks bounds (elements outside read as zero) and writes the block to shared memory in the order of the tensor cores.
The two loops, over tiles and over depth, are flattened into one, so that the next tile's first blocks are loaded while
this tile's epilogue runs (triton-lang/triton#5063, tutorial 09).

The kernel itself makes the descriptors, in TMA_SCRATCH bytes of global memory per program.
"""

from ..autotune.matmul import TMA_SCRATCH, unfit_for_tma
from ..errors import GenerateError
from ..ir.expr import Expr, minimum
from ..ir.program import View
from .matmul_printer import MatmulPrinter
from .triton_facts import blocks


def print_persistent(p: MatmulPrinter) -> Expr:
    """Raises GenerateError where the operands' strides or alignment rule out TMA, or the target has none."""
    if p.target.kind != "cuda" or p.target.capability < 90:
        raise GenerateError(f"{p.template.name}: a persistent kernel needs TMA (sm_90 or later), not {p.target.arch}")
    if p.batch != 1 or p.k == 0:
        raise GenerateError(f"{p.template.name}: a persistent kernel is for one product of some depth")
    p.scratch = TMA_SCRATCH
    p.wait()
    a = _descriptor(p, "a", p.template.a, ("MBLOCK", "KBLOCK"), ("tile_m * MBLOCK", "k0"))
    b = _descriptor(p, "b", p.template.b, ("KBLOCK", "NBLOCK"), ("k0", "tile_n * NBLOCK"))
    flat = ", flatten=True" if blocks(p.k, p.tiling.k) != 1 else ""
    p.put(f"for tile in tl.range(tl.program_id(0), {p.size(p.tiles)}, tl.num_programs(0){flat}):")
    p.indent(1)
    p.tile()
    p.span()
    p.put("acc = tl.zeros([MBLOCK, NBLOCK], tl.float32)")
    p.put(f"for k0 in range(0, {p.size(p.k)}, KBLOCK):")
    p.indent(1)
    p.put(f"a = {p.cast(p.template.a, a)}")
    p.put(f"b = {p.cast(p.template.b, b)}")
    p.put(p.dot())
    p.indent(-1)
    p.epilogue()
    p.indent(-1)
    return minimum(p.tiles, p.target.units)


def _descriptor(p: MatmulPrinter, name: str, v: View, block: tuple[str, str], at: tuple[str, str]) -> str:
    """Make ``{name}_blocks``; returns the text that reads one. A matrix with contiguous columns is described
    transposed."""
    sizes, strides = v.shape[1:], v.strides[1:]
    turned = strides[1] != 1
    if turned:
        sizes, strides, block, at = sizes[::-1], strides[::-1], block[::-1], at[::-1]
    known = dict(p.config.extras).get("divisible", ())
    why = unfit_for_tma(v, known) if p.sure(v.buffer) else "its address may not be a multiple of 16 bytes"
    if why:
        raise GenerateError(f"{p.template.name}: no TMA descriptor for operand {name} ({v.buffer}): {why}")
    pointer = p.pointers[name] + (f" + {p.size(v.offset)}" if v.offset != 0 else "")
    p.put(f"{name}_blocks = tl.make_tensor_descriptor(")
    p.put(f"    {pointer}, shape=[{p.size(sizes[0])}, {p.size(sizes[1])}], strides=[{p.size(strides[0])}, 1],")
    p.put(f"    block_shape=[{block[0]}, {block[1]}],")
    p.put(")")
    return f"{name}_blocks.load([{at[0]}, {at[1]}])" + (".T" if turned else "")
