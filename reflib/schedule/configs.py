"""Other launches of a kernel than the heuristics' one: a few that may be faster, to be measured (``few``), and all that
may be pinned (``possible``; ``every`` is also what ``tests/bench/launches.py`` draws from).

Launches that are faster than the heuristics' one differ little from it: twice or half the warps, or the points per
program, or another length of the loop over a row. So ``STEPS`` lists, for each shape of kernel, the steps from the
heuristics' launch that most often led to a better one, the best first. A step is taken only where it is possible (a row
in registers stays whole, a loop is shorter than its row) and where ``ir.traffic`` does not expect clearly more sectors.
Over 153 kernels measured on an H200 with up to 50 launches each, the heuristics' launch takes 1.035 times the best
one's time, the best of 5 chosen so 1.006 (geometric means; of steps chosen on one half of the kernels, the best of 5
takes 1.018 on the other half). A launch changes neither what a kernel reads and writes, nor what it assumes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..fuse.mix_order import column_sums, programs
from ..ir.loops import Load, LoopNest, Scan, Store
from ..ir.program import Buffer, Config, KernelNode
from ..ir.traffic import accesses, cost
from ..target import Target
from .axes import Space, layout
from .heuristics import Traffic

MOST = 5  # launches of a kernel that are measured, the heuristics' one among them
WORSE = 1.5  # times the sectors of the heuristics' launch: too many
LONGEST = 16384  # elements of a row that may be kept in registers
FULLEST = 128  # elements of a row or tile per thread

# Steps by powers of two: (points or rows per program, elements of a loop's step, warps).
Step = tuple[int, int, int]
STEPS: dict[str, tuple[Step, ...]] = {
    "flat": ((0, 0, 1), (1, 0, 0), (1, 0, 1), (-1, 0, 0), (-2, 0, 0)),
    "tile": ((0, 0, -1), (0, 0, 1)),
    "mixed": ((0, 0, 1), (1, 0, -1), (1, 0, 0), (0, 0, -1)),
    "persistent": ((0, 0, 1), (0, 0, -1), (-1, 0, 0), (-1, 0, -1), (1, 0, 0)),
    "looped": ((0, -1, 0), (0, 0, -1), (0, 1, 0), (0, -2, -1)),
    "columns": ((-1, 0, 0), (0, 0, -1), (0, -1, -1), (0, 0, 1)),
}


def name_of(c: Config) -> str:
    """The name of a launch in tables; of one kernel, different launches have different names."""
    sides = dict(c.extras)
    if "yblock" in sides:
        return f"tile {c.xblock}x{sides['yblock']}, {c.num_warps} warps"
    if c.reduction == "none":
        return f"flat {c.xblock}, {c.num_warps} warps"
    return f"{c.reduction} {c.xblock}x{c.rblock}, {c.num_warps} warps"


def bytes_moved(kernel: KernelNode, buffers: Mapping[str, Buffer]) -> int:
    """Of all tensors that ``kernel`` reads and writes, each once, at the traced sizes: no launch moves less."""
    total = 0
    for part in kernel.parts:
        if isinstance(part, LoopNest):
            points = (part.numel * part.rnumel).hint()
            for _, b in {(type(s), s.buffer) for s in part.body if isinstance(s, (Load, Store))}:
                total += min(points, buffers[b].extent.hint()) * buffers[b].dtype.itemsize
    return total


def by_values(kernel: KernelNode, buffers: Mapping[str, Buffer]) -> bool:
    """Does ``kernel`` read or write at places that tensors name? How long that takes depends on their values."""
    for p in kernel.parts:
        whole = isinstance(p, LoopNest) and any(not buffers[b].dtype.is_floating_point for b in p.reads())
        if whole and any(a.loaded for a in accesses(p.body, buffers)):  # type: ignore[union-attr]
            return True
    return False


def few(kernel: KernelNode, buffers: Mapping[str, Buffer], target: Target) -> list[Config]:
    """The launches of ``kernel``, of LoopNests, that are worth measuring: the heuristics' one first, MOST at most."""
    traffic = _main(kernel, buffers)
    if traffic is None:
        return [kernel.config]
    space, own = traffic.space, kernel.config
    shape = _shape(traffic, own)
    out = [own]
    made = [_stepped(own, step) for step in STEPS[shape]]
    if shape == "tile":
        made.insert(0, _side(replace(own, xblock=dict(own.extras)["yblock"]), own.xblock))  # its sides exchanged
    if own.reduction == "persistent" and not any(isinstance(s, Scan) for s in space.body):
        at = 0 if shape == "columns" else 3 if own.rblock >= 1024 else len(made)
        made[at:at] = _loops(own, shape)
    least = _sectors(traffic, own)
    for c in made:
        near = c not in out and _possible(traffic, c, own, target)
        if near and _sectors(traffic, c) <= WORSE * least:
            out.append(c)
    return out[:MOST]


def every(c: Config, length: int, warp: int = 32) -> list[Config]:
    """Launches that a kernel with the heuristics' ``c`` might have, ``length`` elements being reduced."""
    out: list[Config] = []
    if c.reduction == "none":
        if "yblock" in dict(c.extras):
            sides = [(x, y) for x in (16, 32, 64, 128) for y in (16, 32, 64, 128) if 512 <= x * y <= 8192]
            return [_side(replace(c, xblock=x, num_warps=w), y) for x, y in sides for w in (4, 8)]
        return [replace(c, xblock=e * warp * w, num_warps=w) for w in (4, 8) for e in (1, 2, 4, 8, 16)]
    rblock = 1 << max(0, length - 1).bit_length()
    for w in (1, 2, 4, 8, 16, 32):
        for e in (4, 8, 16, 32, 64):  # elements per thread
            x = e * warp * w // (c.rblock if c.reduction == "mixed" else rblock)
            if c.reduction == "mixed" and x:
                out.append(replace(c, xblock=x, num_warps=w))
            elif 1 <= x <= 512 and length <= LONGEST:
                out.append(replace(c, reduction="persistent", xblock=x, rblock=rblock, num_warps=w))
    if c.reduction == "mixed":
        return out
    for x in (1, 4, 16, 32, 64):
        for r in (16, 32, 64, 512, 1024, 2048, 4096, 8192):
            fits = [w for w in (2, 4, 8, 16, 32) if 2 <= x * r / (warp * w) <= 16 and r <= rblock]
            out += [replace(c, reduction="looped", xblock=x, rblock=r, num_warps=w) for w in fits]
    return out


def possible(kernel: KernelNode, buffers: Mapping[str, Buffer], target: Target) -> list[Config]:
    """Every launch of ``kernel`` that a table may name."""
    traffic = _main(kernel, buffers)
    if traffic is None:
        return []
    r, own = traffic.space.r, kernel.config
    more = every(own, 1 if r is None else r.size.hint(), target.warp)
    if r is not None and r.size.constant is None:  # what the heuristics chose is what the variant's predicate is about
        more = [c for c in more if c.reduction == own.reduction]
    return [c for c in more if _possible(traffic, c, own, target)]


# -- steps ------------------------------------------------------------------------------------------
def _main(kernel: KernelNode, buffers: Mapping[str, Buffer]) -> Traffic | None:
    """What decides how ``kernel`` is launched; None for reductions that share a launch, and Templates."""
    parts = [p for p in kernel.parts if isinstance(p, LoopNest)]
    if len(parts) < len(kernel.parts) or len(parts) > 1 and kernel.config.reduction != "none":
        return None
    tile = "yblock" in dict(kernel.config.extras)
    found = [Traffic(p, dict(buffers), layout(p, buffers, tile)) for p in parts]
    return max(found, key=lambda t: t.space.x.size.hint())


def _shape(t: Traffic, c: Config) -> str:
    if c.reduction == "none":
        return "tile" if "yblock" in dict(c.extras) else "flat"
    if c.reduction != "mixed" and t.columns():
        return "columns"
    return c.reduction


def _stepped(c: Config, step: Step) -> Config:
    x, r, warps = (int(n * 2.0**by) for n, by in zip((c.xblock, c.rblock, c.num_warps), step))
    return replace(c, xblock=x, rblock=r, num_warps=warps)


def _side(c: Config, y: int) -> Config:
    return replace(c, extras=tuple(sorted({**dict(c.extras), "yblock": y}.items())))


def _loops(c: Config, shape: str) -> Iterable[Config]:
    """Rows that are in registers, looped over: columns in squares of 32 lanes, rows in two steps or in four."""
    looped = replace(c, reduction="looped")
    if shape == "columns":
        return [replace(looped, xblock=min(32, c.xblock), rblock=r, num_warps=4) for r in (16, 32)]
    return [_stepped(looped, step) for step in ((0, -1, 1), (0, -2, 0))]


def _possible(t: Traffic, c: Config, own: Config, target: Target) -> bool:
    """Can Triton have it, and does it cover what ``own`` does? ``own``: what the heuristics chose."""
    s = t.space
    if c.num_warps * target.warp > 1024 or min(c.xblock, c.rblock, c.num_warps) < 1:
        return False
    if c.reduction == "none":
        y = dict(c.extras).get("yblock", 1)
        return target.warp * c.num_warps <= c.xblock * y <= FULLEST * target.warp * c.num_warps
    assert s.r is not None
    rows, length, own_rows = s.x.size.hint(), s.r.size.hint(), max(1, own.xblock)
    if not target.warp * c.num_warps <= c.xblock * c.rblock <= FULLEST * target.warp * c.num_warps:
        return c == own
    if c.xblock > max(own_rows, rows):
        return False
    if c.reduction == "mixed":
        each = rows // max(1, programs(column_sums(t.part), length, t.buffers))
        return c.rblock == own.rblock and c.xblock <= max(own_rows, each)
    if c.reduction == "looped":
        scans = any(isinstance(i, Scan) for i in s.body) and own.reduction != "looped"
        return not scans and 8 <= c.rblock < max(2 * length, 16)
    return c.rblock >= length and (own.reduction == "persistent" or s.r.size.constant is not None)


def _sectors(t: Traffic, c: Config) -> float:
    """Weighed sectors per point of what one program reads and writes at a time."""
    s: Space = t.space
    tile = {s.x: min(c.xblock, max(1, s.x.size.hint()))}
    if s.r is not None:
        tile[s.r] = min(c.rblock, max(1, s.r.size.hint()))
    if s.y is not None:
        tile[s.y] = min(dict(c.extras).get("yblock", 1), max(1, s.y.size.hint()))
    return cost(accesses(s.body, t.buffers), tile)
