"""Split-K in one launch (CUDA): SPLITS programs share a tile's depth, and their float32 parts are added in the order of
their numbers, so that results repeat bit for bit.

``Tiling.reducers`` more programs per tile reduce a piece of it each: they read that piece of all parts, add, run the
epilogue, and store zeros. A part is its own flag: zero means "not written yet" and is read again, so no counter and no
fence is needed. A part is stored with the bits of HOLE flipped, a signalling NaN; arithmetic results in quiet NaNs
only, so no part is ever stored as zero. Programs start in the order of their numbers and reducers have the last ones,
so they wait only for programs that run already, which do not wait: no deadlock, however few fit on the GPU. (A reducer
that waits for 10 seconds stops with an error.)

NB: elsewhere each program increments a counter, and the last one adds all parts (Stream-K's fix-up: Osama et al., PPoPP
2023). The fence, the atomic and a single reader take about 2 us more for small tiles.

The warps of one program may share a block's depth as well (``warps_k``): the product then has three dimensions and is
added up over the first.
"""

from ..errors import GenerateError
from ..ir.expr import Expr, expr
from .matmul_printer import MatmulPrinter

HOLE = -5855578  # 0xFFA6A6A6, a signalling NaN
IN_REGISTERS = 64  # words of parts that a thread holds at once
ROUNDS = 1 << 24  # of waiting, some 10 seconds


def print_split(p: MatmulPrinter) -> Expr:
    """Programs of one split have consecutive numbers, so that neighbours share operands."""
    t = p.tiling
    if t.splits < 2:
        raise GenerateError(f"{p.template.name}: a tiling of kind split with nothing split")
    if p.target.kind != "cuda" or not 1 <= t.reducers <= t.m * t.n:
        raise GenerateError(f"{p.template.name}: {t.reducers} reducers for a tile of {t.m} x {t.n} on {p.target.arch}")
    p.wait("gdc_launch_dependents, ")
    tiles = expr(1) if p.tiles == 0 else p.tiles
    p.constants["SPLITS"] = t.splits
    p.put(f"pid = {p.pid()}")
    count = p.count("tiles", tiles)
    p.put("tile, split = 0, pid" if tiles == 1 else f"tile, split = pid % {count}, pid // {count}")
    p.tile()
    p.constants["HOLE"] = HOLE
    _parts(p, tiles)
    p.put("if split < SPLITS:")
    p.indent(1)
    _product(p)
    p.indent(-1)
    p.put("else:")
    p.indent(1)
    if p.pdl:
        p.put("gdc_launch_dependents()")
    _reducer(p)
    p.indent(-1)
    return p.tiles * (t.splits + t.reducers)


def _parts(p: MatmulPrinter, tiles: Expr) -> None:
    """``parts``: the address of the tile's first part."""
    t, space = p.tiling, p.workspace.get("zeros")
    words = tiles * (t.splits * t.m * t.n)
    if space is None or (p.tiles != 0 and space.numel != words):
        raise GenerateError(f"{p.template.name}: a split tiling needs a workspace of {words} int32 of kind zeros")
    small = words.constant is not None and words.constant < 2**31
    tile = "tile" if small or p.wide else "tile.to(tl.int64)"
    p.put(f"parts = {p.body.pointer(space.name)}" + ("" if tiles == 1 else f" + {tile} * (SPLITS * MBLOCK * NBLOCK)"))


def _product(p: MatmulPrinter) -> None:
    p.span()
    p.product("split", p.tiling.splits, p.tiling.warps_k)
    if p.pdl:
        p.put("gdc_launch_dependents()")
    if p.tiling.warps_k > 1:
        p.helpers.append(sum_ways(p.tiling.warps_k))
        p.put("acc = sum_ways(acc, MBLOCK, NBLOCK)")
    p.put("place = tl.arange(0, MBLOCK)[:, None] * NBLOCK + tl.arange(0, NBLOCK)[None, :]")
    p.put("# zero would mean: not here yet")
    p.put("tl.store(parts + split * (MBLOCK * NBLOCK) + place, acc.to(tl.int32, bitcast=True) ^ HOLE)")


# -- reducers ---------------------------------------------------------------------------------------
def _reducer(p: MatmulPrinter) -> None:
    """A piece of YBLOCK x XBLOCK points: whole rows of the tile, or a part of one."""
    t = p.tiling
    words = t.m * t.n // t.reducers
    rows, columns = p.points = max(1, words // t.n), min(t.n, words)
    p.constants |= {"YBLOCK": rows, "XBLOCK": columns}
    across = t.n // columns
    p.put("piece = split - SPLITS")
    top, left = ("piece * YBLOCK", "") if across == 1 else (f"piece // {across}", f"piece % {across} * XBLOCK + ")
    p.put(f"row = {top} + tl.arange(0, YBLOCK)[:, None]")
    p.put(f"column = {left}tl.arange(0, XBLOCK)[None, :]")
    clear = _add_parts(p, words)
    p.epilogue(f"tile_m * MBLOCK + row{p.wide}", f"tile_n * NBLOCK + column{p.wide}")
    for line in clear:
        p.put(line)


def _add_parts(p: MatmulPrinter, words: int) -> list[str]:
    """``total``: the sum of a piece. Returns the lines that store zeros again, to be put after the results are stored;
    none when the parts do not fit into registers together and zeros are stored in the loop."""
    t = p.tiling
    most = max(1, IN_REGISTERS * 32 * t.num_warps // words)
    count = min(1 << (t.splits - 1).bit_length(), most)  # parts that are read at once
    loop, more = count < t.splits, t.splits % count != 0
    p.helpers.append(arrived(max(1, min(32, count * words // (32 * t.num_warps)))))
    if loop:
        p.put("total = tl.zeros([YBLOCK, XBLOCK], tl.float32)")
        p.put(f"for first in tl.range(0, SPLITS, {count}):")
        p.indent(1)
    p.put(f"s = {'first + ' if loop else ''}tl.arange(0, {count})[:, None, None]")
    number = "tl.minimum(s, SPLITS - 1)" if more else "s"
    p.put(f"at = parts + {number} * (MBLOCK * NBLOCK) + (row * NBLOCK + column)[None, :, :]")
    p.put("part = (arrived(at) ^ HOLE).to(tl.float32, bitcast=True)")
    if more:
        p.put("part = tl.where(s < SPLITS, part, 0.0)")
    p.put(f"total {'+=' if loop else '='} tl.sum(part, axis=0)")
    p.body.acc = "total"
    clear = [
        "tl.debug_barrier()  # all threads have read",
        f"tl.store(at, tl.zeros([{count}, YBLOCK, XBLOCK], tl.int32))",
    ]
    if not loop:
        return clear
    for line in clear:
        p.put(line)
    p.indent(-1)
    return []


# -- helpers ----------------------------------------------------------------------------------------
def sum_ways(ways: int) -> str:
    """A function's text. Triton's own sum over the first dimension takes several shuffles per element."""
    halves = ways.bit_length() - 1
    lines = [
        "@triton.jit",
        "def sum_ways(acc, M: tl.constexpr, N: tl.constexpr):",
        f'    """[{ways}, M, N] to [M, N]: once through shared memory, so that each thread has all of its points."""',
        f"    acc = tl.reshape(tl.permute(acc, (1, 2, 0)), (M, N{', 2' * halves}))",
    ]
    for _ in range(halves):
        lines += ["    even, odd = tl.split(acc)", "    acc = even + odd"]
    return "\n".join([*lines, "    return acc", ""])


def arrived(words: int) -> str:
    """The text of a function that reads ``words`` words per thread (a power of two, at most 32), again while zero."""
    each = range(words)
    first = [f"ld.relaxed.gpu.global.b32 ${i}, [${words + i}];" for i in each]
    again = [
        f"setp.eq.b32 q, ${i}, 0; or.pred any, any, q; @q ld.relaxed.gpu.global.b32 ${i}, [${words + i}];" for i in each
    ]
    lines = [
        "{ .reg .pred q, any; .reg .u32 rounds; mov.u32 rounds, 0;", *first,
        "AGAIN: setp.ne.u32 any, 0, 0;", *again,
        f"add.u32 rounds, rounds, 1; setp.gt.u32 q, rounds, {ROUNDS}; @q trap;", "@any bra AGAIN; }",
    ]  # fmt: skip
    registers = ",".join(["=&r"] * words + ["l"] * words)
    return "\n".join([
        "@triton.jit",
        "def arrived(at):",
        '    """The words at ``at``, once none is zero."""',
        "    return tl.inline_asm_elementwise(",
        '        """', *(f"        {line}" for line in lines), '        """,',
        f'        "{registers}",',
        f"        [at], dtype=tl.int32, is_pure=False, pack={words},",
        "    )",
        "",
    ])  # fmt: skip
