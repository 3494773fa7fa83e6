"""Casts behind matmuls are left to the nodes that read them. (One before a matmul may be computed where that reads its
operand: a variant of the choice, ``autotune.prologue``.)

``x.float()`` of a bfloat16 product, read by a norm and a residual: in the matmul's kernel it would be stored with 4
bytes per element, and read with 4. Its readers can read the 2-byte product themselves, since a load widens at no cost.
The copy is removed if nothing else needs it.
"""

from dataclasses import replace

import torch

from ..ir.loops import Load, LoopNest, Op, Store
from ..ir.program import Program, Template
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, remove_dead
from .producers import Producer, make_producer, replace_loads
from .result import Fused

ROUND = {"to_f16": torch.float16, "to_bf16": torch.bfloat16}
_EXACT_IN_FLOAT32 = (torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool)


def widen_late(fused: Fused, options: Options, target: Target) -> Fused:
    """Loop nests that read a wider copy of a product, or of what elementwise loop nests made of one, read the original.

    Assumes a legal order; nothing is left dead. A copy that something else needs is read: the product is not stored.
    """
    program = fused.program
    if not any(isinstance(n, Template) for n in program.nodes):
        return fused
    depends = dependencies(program)
    nodes = list(program.nodes)
    products: set[str] = set()
    copies: dict[str, Producer] = {}
    for position, node in enumerate(program.nodes):
        if isinstance(node, Template):
            products.update(node.writes())
        if not isinstance(node, LoopNest):
            continue
        if not node.reduced and products.intersection(node.reads()):
            products.update(node.writes())
            if (copy := _widens(program, depends, position, node)) is not None:
                copies[copy.store.buffer] = copy
        for copy in (copies[name] for name in node.reads() if name in copies):
            (source,) = copy.loops.reads()
            if not depends.written_between(source, copy.position, position + 1):
                nodes[position] = node = replace_loads(node, copy)
    return replace(fused, program=remove_dead(replace(program, nodes=tuple(nodes))))


def _widens(program: Program, depends: Dependencies, position: int, loops: LoopNest) -> Producer | None:
    """The node, if it only copies one temporary to a wider one, by casts that lose nothing, for loop nests to read."""
    load, *ops, store = loops.body
    if not isinstance(load, Load) or not isinstance(store, Store) or load.mask is not None or store.value != len(ops):
        return None
    source, result = program.buffers[load.buffer].dtype, program.buffers[store.buffer]
    if result.kind != "temp" or result.name in depends.needed or depends.writers[result.name] != [position]:
        return None
    dtypes = [result.dtype]
    for i, s in enumerate(ops):
        if not isinstance(s, Op) or s.args != (i,) or s.op not in ("cast", *ROUND):
            return None
        dtypes.append(ROUND.get(s.op, s.dtype))
    wider = source.itemsize < result.dtype.itemsize and all(_holds(d, source) for d in dtypes)
    readers = (program.nodes[r] for r in depends.readers.get(result.name, []))
    if store.index != load.index or not wider or not all(isinstance(n, LoopNest) for n in readers):
        return None
    return make_producer(position, loops, store)


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Is every value of ``other`` one of ``dtype``?"""
    if dtype == other:
        return True
    exact = (*_EXACT_IN_FLOAT32, torch.float32) if dtype == torch.float64 else _EXACT_IN_FLOAT32
    return dtype in (torch.float32, torch.float64) and other in exact
