"""How to launch a kernel that reduces rows and sums columns (``fuse.mix_order``): one program per row of partial sums,
which is one or two per multiprocessor.

It holds about 4096 elements of each tensor, and of the next rows, which are being read meanwhile: of two bfloat16
tensors 16 KB, of two programs the 32 KB that a multiprocessor's bandwidth needs (``heuristics``). Few threads with many
registers each do better than many: on an H200 the backward of a layer norm with 781 columns takes 64 us with 8 warps
and 4 rows, 109 with 16 and 8. Where the sums and what is read take more registers than there are (two RMS norms, one
after the other, with a residual), it holds fewer rows: spilled, that took six times as long. Only long rows that are
alone on a multiprocessor want 16. Of two programs each has half of its registers: 128 for each of 256 threads, which
the assembler is told (a layer norm of 1,024 columns takes 147).
"""

from dataclasses import replace

from ..errors import GenerateError
from ..fuse.mix_order import HELD, REGISTERS, THREADS, block, column_sums, per_element, programs, rows_held
from ..ir.expr import Var, expr
from ..ir.program import Assume, Buffer, Config
from ..ir.transforms import substitute
from ..options import Options
from ..target import Target
from .axes import Space
from .heuristics import Traffic
from .uneven import turned


def by_group(space: Space, buffers: dict[str, Buffer]) -> Space:
    """``space`` with the group of rows that a program has as a variable of its own, ``z``, where rows are summed in
    groups: what is read of a group does not change from row to row."""
    x, r = space.x, space.r
    own = [s for s in space.stores if s.reduce and s.index.has(x)]
    if not own or r is None:
        return space
    groups = expr(programs(own, int(r.size), buffers)) // buffers[own[0].buffer].shape[0]
    z = Var("z", groups)
    return replace(space, z=z, body=substitute(space.body, {(expr(x) // (x.size // groups)).atom: expr(z)}))  # type: ignore[dict-item]


def mixed(
    traffic: list[Traffic], target: Target, options: Options, general: bool
) -> tuple[Config, tuple[Assume, ...]] | None:
    """The launch of a kernel with column sums, which is one part; None for others."""
    t = traffic[0]
    sums = column_sums(t.part)
    if not sums:
        return None
    s = by_group(t.space, t.buffers)
    if s.r is None:
        raise GenerateError(f"{t.part.name} sums columns and reduces no rows: fusion should not have left it so")
    length = int(s.r.size)
    rblock, count = block(length), programs(sums, length, t.buffers)
    reads = {(ld.buffer, ld.index): (t.buffers[ld.buffer], ld.index.has(s.x)) for ld in s.loads if ld.index.has(s.r)}
    each, two = per_element(len(sums), reads.values()), count > target.units
    xblock = rows_held(length, each, 1 + two)
    while xblock > 1 and s.x.size.hint() // count < xblock:
        xblock //= 2
    two = two and xblock * rblock * each <= REGISTERS * THREADS / 2
    warps = 16 if xblock == 1 and rblock >= HELD and not two else 8
    extras = (("registers", 2**15),) if two and target.kind == "cuda" else ()  # of its threads, at most
    warps = max(1, min(warps, xblock * rblock // (4 * target.warp)))
    return turned(Config("mixed", xblock, rblock, warps, extras=extras), t, target), ()
