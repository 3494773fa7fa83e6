"""Fusing inside of branches and bodies of loops: each block is a program by itself (``ir.regions``).

What a loop carries is the body's own: it may be updated in place (``in_place``), and is the next value then. Passes may
also put a result into another tensor of the block's, which then gets the result's name.
"""

from dataclasses import replace

from ..ir.program import Buffer, Node, Program, Variant, View, full_view
from ..ir.regions import Region, block, carried_in
from ..ir.rename import renamed
from ..options import Options
from ..target import Target
from .dependencies import remove_dead
from .driver import fuse, grouped
from .result import Fused


def fuse_blocks(fused: Fused, options: Options, target: Target) -> Fused:
    """Every Region's blocks, and those nested in them. Blocks are not fused with what is around them."""
    buffers, nodes = dict(fused.program.buffers), list[Node]()
    for n in fused.program.nodes:
        if isinstance(n, Region):
            variants = []
            for v in n.variants:
                v, fused, pairs = fused_block(fused, n, v, buffers, options, target)
                variants.append(v)
            n = replace(n, variants=tuple(variants), carried=pairs)
        nodes.append(n)
    if nodes == list(fused.program.nodes):
        return fused
    return replace(fused, program=replace(fused.program, buffers=buffers, nodes=tuple(nodes)))


def fused_block(
    fused: Fused, region: Region, v: Variant, buffers: dict[str, Buffer], options: Options, target: Target
) -> tuple[Variant, Fused, tuple[tuple[str, str], ...]]:
    """The block, fused; what else there is to tell; the pairs that are carried now. New buffers go into ``buffers``."""
    body = v is region.variants[-1] or not region.repeats
    own = tuple(old for old, new in region.carried if old != new) if body else ()
    made = carried_in(region, own)
    program = block(region, v, buffers, own)
    program = replace(program, nodes=(*((made,) if own else ()), *program.nodes))
    inner = fuse(program, options, target)
    places = _places(program, inner.program, region)
    if places is None:
        inner, places = grouped(Fused(remove_dead(program)), options, target), {}
    names = {now: result for result, now in places.items() if now not in own}
    buffers |= {name: b for name, b in inner.program.buffers.items() if name not in buffers}
    kept = {new: old for old, new in region.carried if places.get(new) == old}
    pairs = tuple((old, kept.get(new, new)) for old, new in region.carried)
    told = replace(fused, refusals=fused.refusals + inner.refusals, updates=fused.updates + inner.updates)
    nodes = renamed([n for n in inner.program.nodes if n.name != made.name], [], names)[0]
    return replace(v, nodes=tuple(nodes)), told, pairs


def _places(program: Program, fused: Program, region: Region) -> dict[str, str] | None:
    """The results that are in another buffer after fusing, each with that buffer: one of the block's own, or the old
    value of what is carried. None if a result is anywhere else."""
    out: dict[str, str] = {}
    for was, now in zip(program.outputs, fused.outputs, strict=True):
        if was == now:
            continue
        assert isinstance(was, View) and isinstance(now, View)
        b, result = fused.buffers[now.buffer], program.buffers[was.buffer]
        same = now == full_view(b) and (b.shape, b.strides, b.dtype) == (result.shape, result.strides, result.dtype)
        old = (now.buffer, was.buffer) in region.carried
        if not same or b.kind != "temp" or now.buffer in out.values() or not old and now.buffer in dict(region.carried):
            return None
        out[was.buffer] = now.buffer
    return out
