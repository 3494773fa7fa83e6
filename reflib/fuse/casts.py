"""Casts beside matmuls: before one they become its prologue, behind one they are left to the nodes that read them.

**Prologue** (``prologues``). A Template casts what it reads to its own dtype anyway, so an operand that a loop nest
only casts can be read from that loop nest's source; if nothing else needs the cast, the loop nest is removed. When:

* The source is not wider than the result: reading it never costs more. But if a loop nest makes the source and other
  nodes need the result, the source would be stored for this alone.
* The source is wider (float32 weights under autocast), no loop nest makes it (that one casts at no cost), and nothing
  else needs the result. Each of the ceil(N/128) tiles in a row of tiles reads its rows of ``a`` again, and ``b`` is
  read ceil(M/128) times (128: a usual tile). Up to REREADS times for all matmuls together, that costs less than the
  cast kernel's load and store.

**Widening** (``widen_late``). ``x.float()`` of a bfloat16 product, read by a norm and a residual: in the matmul's
kernel it would be stored with 4 bytes per element, and read with 4. Its readers can read the 2-byte product themselves,
since a load widens at no cost. The copy is removed if nothing else needs it.
"""

from dataclasses import dataclass, replace

import torch

from ..ir.expr import Expr, ceildiv
from ..ir.loops import Load, LoopNest, Op, Store
from ..ir.program import Node, Program, Template, View
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, remove_dead, used_buffers
from .producers import make_producer, replace_loads
from .result import Fused, Group

TILE = 128
REREADS = 4  # of a source wider than the operand
_SOURCES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8)
ROUND = {"to_f16": torch.float16, "to_bf16": torch.bfloat16}
_EXACT_IN_FLOAT32 = (torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Cast:
    """A loop nest that copies ``source`` to ``result``, element by element at one index, through ``dtypes``."""

    position: int
    loops: LoopNest
    source: str
    result: str
    dtypes: tuple[torch.dtype, ...]


def cast_of(program: Program, depends: Dependencies, position: int) -> Cast | None:
    """The node as a Cast, if that is all it does and nothing else writes its result."""
    node = program.nodes[position]
    if not isinstance(node, LoopNest) or node.reduced or len(node.body) < 2:
        return None
    load, *ops, store = node.body
    if not isinstance(load, Load) or not isinstance(store, Store) or load.mask is not None:
        return None
    dtypes = []
    for i, s in enumerate(ops):
        if not isinstance(s, Op) or s.args != (i,) or s.op not in ("cast", *ROUND):
            return None
        dtypes.append(ROUND.get(s.op, s.dtype))
    if store.value != len(ops) or store.index != load.index or store.buffer == load.buffer:
        return None
    if len(depends.writers[store.buffer]) != 1 or program.buffers[store.buffer].kind != "temp":
        return None
    dtypes.append(program.buffers[store.buffer].dtype)
    return Cast(position, node, load.buffer, store.buffer, tuple(dtypes))


# -- before a product -------------------------------------------------------------------------------
def prologues(fused: Fused, options: Options, target: Target) -> Fused:
    """Operands read from what they were cast from, where that pays. A cast that is removed is a member of its
    Template's group. Assumes a legal order and that dead nodes have been removed."""
    program = fused.program
    absorbed: dict[str, list[str]] = {}
    if not any(isinstance(n, Template) for n in program.nodes):
        return fused
    depends = dependencies(program)
    for position in reversed(range(len(program.nodes))):  # a cast of a cast: the last one first
        cast = cast_of(program, depends, position)
        users = [] if cast is None else _users(program, depends, cast)
        if cast is None or not users:
            continue
        nodes: list[Node] = list(program.nodes)
        for p in users:
            nodes[p] = _read_source(program, nodes[p], cast)
        if cast.result not in depends.needed and len(users) == len(depends.readers[cast.result]):
            absorbed.setdefault(nodes[users[0]].name, []).append(cast.loops.name)
            del nodes[position]
        program = replace(program, nodes=tuple(nodes))
        depends = dependencies(program)
    program = replace(program, buffers=used_buffers(program, program.nodes))
    groups = tuple(Group(name, (*casts, name), "template") for name, casts in absorbed.items())
    return replace(fused, program=program, groups=groups)


def _users(program: Program, depends: Dependencies, cast: Cast) -> list[int]:
    """The Templates that should read the cast's source instead of its result."""
    readers = depends.readers.get(cast.result, [])
    users = [p for p in readers if _may_read_source(program, depends, program.nodes[p], p, cast)]
    others = len(users) < len(readers) or cast.result in depends.needed
    maker = depends.last_writer(cast.source, cast.position)
    made_here = maker is not None and isinstance(program.nodes[maker], (LoopNest, Template))
    source, result = program.buffers[cast.source], program.buffers[cast.result]
    if others and made_here:
        return []
    if source.dtype.itemsize <= result.dtype.itemsize:
        return users
    if others or made_here:
        return []
    return users if sum(_times(program.nodes[p], cast.result) for p in users) <= REREADS else []


def _may_read_source(program: Program, depends: Dependencies, node: Node, position: int, cast: Cast) -> bool:
    """Is the result an operand (and nothing else) of the Template, and would the Template read the same values?"""
    if not isinstance(node, Template) or node.closed:
        return False
    if cast.result in node.epilogue.reads() or cast.source in node.writes():
        return False
    result, source = program.buffers[cast.result], program.buffers[cast.source]
    if source.dtype not in _SOURCES:
        return False
    views = [v for v in (node.a, node.b) if v.buffer == cast.result]
    if not views or any(v.dtype != result.dtype for v in views):
        return False
    if depends.written_between(cast.source, cast.position, position + 1):
        return False
    return all(d == node.dtype or _holds(d, source.dtype) for d in cast.dtypes)


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Is every value of ``other`` one of ``dtype``?"""
    if dtype == other:
        return True
    exact = (*_EXACT_IN_FLOAT32, torch.float32) if dtype == torch.float64 else _EXACT_IN_FLOAT32
    return dtype in (torch.float32, torch.float64) and other in exact


def _times(node: Node, buffer: str) -> int:
    """How often a product's tiles read each element of an operand, by hint."""
    assert isinstance(node, Template)
    _, m, n, _ = node.sizes
    return sum(_tiles(size) for view, size in ((node.a, n), (node.b, m)) if view.buffer == buffer)


def _tiles(size: Expr) -> int:
    return max(1, ceildiv(size, TILE).hint())


def _read_source(program: Program, node: Node, cast: Cast) -> Template:
    assert isinstance(node, Template)
    dtype = program.buffers[cast.source].dtype

    def moved(v: View) -> View:
        return replace(v, buffer=cast.source, dtype=dtype) if v.buffer == cast.result else v

    origins = tuple(dict.fromkeys((*cast.loops.origins, *node.origins)))
    return replace(node, a=moved(node.a), b=moved(node.b), epilogue=replace(node.epilogue, origins=origins))


# -- behind a product -------------------------------------------------------------------------------
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
    copies: dict[str, Cast] = {}
    for position, node in enumerate(program.nodes):
        if isinstance(node, Template):
            products.update(node.writes())
        if not isinstance(node, LoopNest):
            continue
        if not node.reduced and products.intersection(node.reads()):
            products.update(node.writes())
            cast = cast_of(program, depends, position)
            if cast is not None and _widens(program, depends, cast):
                copies[cast.result] = cast
        for name in node.reads():
            if name in copies:
                nodes[position] = _read_original(nodes[position], position, copies[name], depends)
    return replace(fused, program=remove_dead(replace(program, nodes=tuple(nodes))))


def _widens(program: Program, depends: Dependencies, cast: Cast) -> bool:
    """Is it a wider copy, read by loop nests only?"""
    source, result = program.buffers[cast.source].dtype, program.buffers[cast.result].dtype
    if cast.result in depends.needed:
        return False
    if not all(isinstance(program.nodes[r], LoopNest) for r in depends.readers.get(cast.result, [])):
        return False
    return source.itemsize < result.itemsize and all(_holds(d, source) for d in cast.dtypes)


def _read_original(node: Node, position: int, cast: Cast, depends: Dependencies) -> Node:
    store = cast.loops.body[-1]
    assert isinstance(node, LoopNest) and isinstance(store, Store)
    producer = make_producer(cast.position, cast.loops, store)
    if producer is None or depends.written_between(cast.source, cast.position, position + 1):
        return node
    return replace_loads(node, producer)
