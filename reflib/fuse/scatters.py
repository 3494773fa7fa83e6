"""Loop nests that store, or add atomically, at places that tensors name (``lower.scatter``, ``lower.accumulate``).

Their neighbours join them like those of any elementwise loop nest: a gradient is computed where it is added. What fills
the buffer, and what reads it, stays outside by the rule about indices: it touches other elements. Reductions stay
outside by ``scatter_rule``.

The fill copies the tensor that is written to. Where nothing else needs that tensor any more, ``scatter_in_place`` drops
the copy, and for an input that gets the result in the end, the copy back as well: a cache is written where it is.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import Ref
from ..ir.loops import LoopNest, Store
from ..ir.program import Extern, Program, Template
from ..ir.rename import renamed
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, used_buffers
from .legality import Cluster, FusionContext
from .result import Fused, Reason
from .slices import whole_copy


def scatters(s: Store) -> bool:
    return s.reduce == "atomic" or any(isinstance(a, Ref) for a in s.index.atoms())


def scatter_rule(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    """A reduction may go over its row several times, and keeps what is done once per row apart from what is done for
    each element; an atomic addition must happen exactly once at every point."""
    if not any(scatters(s) for x in (a, b) for _, loops, _ in x.parts for s in loops.stores()):
        return None
    if a.reduces or b.reduces:
        return Reason("scatter", "one stores at places in a tensor, the other reduces")
    if a.template is not None or b.template is not None:
        return Reason("template", "a matrix product's kernel stores nothing at places in a tensor")
    return None


# -- in place -------------------------------------------------------------------------------------------------
def scatter_in_place(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results, with the copies dropped. Assumes a legal order."""
    program = fused.program
    depends = dependencies(program)
    names: dict[str, str] = {}  # a copy -> what it was copied from, which is used instead
    dropped: set[int] = set()
    for position in reversed(range(len(program.nodes))):  # a chain from its end
        found = whole_copy(program, program.nodes[position])
        if found is None or position in dropped or found[1].index != found[2].index:
            continue
        old, new = found[1].buffer, found[2].buffer
        if not _alike(program, old, new) or not _is_scattered_to(program, depends, position, new):
            continue
        if depends.readers[old][-1] != position:
            continue
        back: list[int] | None
        if program.buffers[old].kind == "temp":
            back = [] if _is_ours(program, depends, position, old) else None
        else:
            back = _copied_back(program, depends, old, new, names)
        if back is not None:
            names = {n: old if m == new else m for n, m in names.items()} | {new: old}
            dropped |= {position, *back}
    if not names:
        return fused
    nodes = [n for i, n in enumerate(program.nodes) if i not in dropped]
    touched = [not names.keys().isdisjoint((*n.reads(), *n.writes())) for n in nodes]
    nodes = [renamed([n], (), names)[0][0] if t else n for n, t in zip(nodes, touched, strict=True)]
    return replace(fused, program=replace(program, nodes=tuple(nodes), buffers=used_buffers(program, nodes)))


def _alike(program: Program, old: str, new: str) -> bool:
    """Is every element of the one where it is in the other?"""
    a, b = program.buffers[old], program.buffers[new]
    return b.kind == "temp" and (a.shape, a.strides, a.dtype, a.device) == (b.shape, b.strides, b.dtype, b.device)


def _is_scattered_to(program: Program, depends: Dependencies, position: int, name: str) -> bool:
    """Is it filled at ``position``, and otherwise only scattered to, by loop nests?"""
    first, *others = depends.writers[name]
    users = [program.nodes[i] for i in depends.readers.get(name, ())]
    if first != position or not others or name in depends.needed:
        return False
    if not all(isinstance(n, (LoopNest, Template, Extern)) for n in users):
        return False
    writers = [program.nodes[i] for i in others]
    return all(isinstance(n, LoopNest) and _scatters_to(n, name) for n in writers)


def _scatters_to(loops: LoopNest, name: str) -> bool:
    return all(scatters(s) for s in loops.stores() if s.buffer == name) and name not in loops.reads()


def _is_ours(program: Program, depends: Dependencies, position: int, name: str) -> bool:
    """Is it written by loop nests alone, all before ``position``, and not visible to calls?"""
    users = [program.nodes[i] for i in (*depends.writers[name], *depends.readers[name])]
    return (
        name not in depends.needed
        and depends.writers[name][-1] < position
        and all(isinstance(n, (LoopNest, Template)) for n in users)
    )


def _copied_back(
    program: Program, depends: Dependencies, old: str, new: str, names: dict[str, str]
) -> list[int] | None:
    """The nodes that copy the result onto the input, if nothing else writes that. (A temporary may stand between.)"""
    if len(depends.writers.get(old, ())) != 1:
        return None
    out = [depends.writers[old][0]]
    while True:
        found = whole_copy(program, program.nodes[out[-1]])
        if found is None or found[1].index != found[2].index:
            return None
        source = found[1].buffer
        if names.get(source, source) == new:
            return out if depends.writers[source][-1] < out[-1] else None
        alone = depends.readers[source] == out[-1:] and source not in depends.needed
        if not alone or len(depends.writers[source]) != 1:
            return None
        out.append(depends.writers[source][0])
