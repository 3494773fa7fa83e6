"""Fusing inside of branches and bodies of loops: each block is a program by itself (``ir.regions``)."""

from __future__ import annotations

from dataclasses import replace

from ..ir.program import Node
from ..ir.regions import Region, block
from ..options import Options
from ..target import Target
from .driver import fuse
from .result import Fused


def fuse_blocks(fused: Fused, options: Options, target: Target) -> Fused:
    """Every Region's blocks, and those nested in them. Blocks are not fused with what is around them."""
    buffers, nodes = dict(fused.program.buffers), list[Node]()
    refusals = fused.refusals
    for n in fused.program.nodes:
        if isinstance(n, Region):
            variants = []
            for v in n.variants:
                inner = fuse(block(n, v, buffers), options, target)
                buffers |= {name: b for name, b in inner.program.buffers.items() if name not in buffers}
                variants.append(replace(v, nodes=inner.program.nodes))
                refusals += inner.refusals
            n = replace(n, variants=tuple(variants))
        nodes.append(n)
    if nodes == list(fused.program.nodes):
        return fused
    return replace(fused, program=replace(fused.program, buffers=buffers, nodes=tuple(nodes)), refusals=refusals)
