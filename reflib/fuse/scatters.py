"""Loop nests that store, or add atomically, at places that tensors name (``lower.scatter``, ``lower.accumulate``).

Their neighbours join them like those of any elementwise loop nest: a gradient is computed where it is added. What fills
the buffer stays outside by the rule about indices: it touches other elements. What reads it, and reductions but those
of which a row adds one number, stay outside by ``scatter_rule``.

The fill copies the tensor that is written to; ``in_place`` drops the copies that are not needed.

**Sums of sums** are one. The gradient of what is read at several places (a table's rows by two lists of indices, both
ends of a graph's edges) is a sum of tensors, each filled with zeros and added to::

    a[..] = 0;  a[i] += u;  b[..] = 0;  b[j] += v        a[..] = 0;  a[i] += u;  a[j] += v
    out = a + b                                          out = a

Of k such tensors of S bytes, k S are filled and k S read back; in one, S and S. The order of atomic additions is open
in any case. A sum that is copied, as here to ``out``, is made there at once: no S is read back.
"""

from dataclasses import replace

from ..ir.expr import Ref, product
from ..ir.loops import Const, Load, LoopNest, Op, Stmt, Store, stmt_args
from ..ir.program import Program
from ..ir.rename import renamed
from ..ir.transforms import eliminate_dead, select
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies
from .legality import Cluster, FusionContext
from .recompute import drop_stores
from .result import Fused, Reason
from .slices import same_layout


def scatters(s: Store) -> bool:
    """Does it touch single elements, at places that a tensor names?"""
    return s.reduce == "atomic" or any(isinstance(a, Ref) for a in s.index.atoms())


def scatter_rule(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    """A reduction may go over its row several times, and does once what is done per row; an atomic addition must happen
    exactly once at every point. (A store may happen again.)"""
    for left, right in ((a, b), (b, a)):
        for name in left.writes.keys() & right.reads.keys():
            if _added(name, c):  # (a tensor of one element, or row: the places are known, and the same as the reader's)
                return Reason("scatter", f"{name} is added to by any thread, and read")
    reduces, template = a.reduces or b.reduces, a.template is not None or b.template is not None
    if not reduces and not template:
        return None
    found = [s for x in (a, b) for _, loops, _ in x.parts for s in loops.stores() if scatters(s)]
    if reduces and any(s.reduce for s in found) and not _once_per_row(a, b):
        return Reason("scatter", "one adds each element at places in a tensor, the other reduces")
    if template and found:
        return Reason("template", "a matrix product's kernel stores nothing at places in a tensor")
    return None


def _once_per_row(a: Cluster, b: Cluster) -> bool:
    """Do two groups of which one reduces, both over the same rows, add at places for each row, none for elements?"""
    rows = product(x.size for x in (a if a.reduces else b).axes if x.kind == "p")
    loops = [n for x in (a, b) for _, n, _ in x.parts]
    plain = not (a.scans or b.scans) and all(s.reduce != "sum" for n in loops for s in n.stores())
    return plain and all(n.numel == rows for n in loops if any(s.reduce for s in n.stores()))


def _added(buffer: str, c: FusionContext) -> bool:
    found = (c.program.nodes[w] for w in c.depends.writers.get(buffer, ()))
    return any(s.buffer == buffer and s.reduce for n in found if isinstance(n, LoopNest) for s in n.stores())


def one_sum(fused: Fused, options: Options, target: Target) -> Fused:
    """Sums of sums become one, and are not copied. The same results but for the order of additions. Assumes a legal
    order."""
    program = fused.program
    d = dependencies(program)
    names, copies = dict[str, str](), dict[str, str]()
    nodes = list(program.nodes)
    for position, node in enumerate(nodes):
        while isinstance(node, LoopNest) and (found := _sum_of_sums(program, d, position, node, names)):
            keep, gone, body = found
            node = nodes[position] = replace(node, body=body)
            names |= {gone: keep, **{old: keep for old, new in names.items() if new == gone}}
        if isinstance(node, LoopNest) and (copied := _copied(program, d, position, node)):
            at, sum, copy = copied
            rest = (i for i in range(len(node.body)) if i != at)
            nodes[position] = replace(node, body=eliminate_dead(select(node.body, rest)))
            copies[sum] = copy
    if not names and not copies:
        return fused
    fills = {d.writers[b][0] for b in names}
    nodes = [n if i in fills else renamed([n], (), names)[0][0] for i, n in enumerate(nodes)]
    nodes, _ = renamed((n for n in nodes if not isinstance(n, LoopNest) or n.body), (), copies)
    return fused.regrouped(drop_stores(replace(program, nodes=tuple(nodes))))


def _copied(program: Program, d: Dependencies, position: int, node: LoopNest) -> tuple[int, str, str] | None:
    """A store in ``node`` of what a sum that nothing else reads has there: its position, the sum and the copy."""
    for i, s in enumerate(node.body):
        x = node.body[s.value] if isinstance(s, Store) and not s.reduce else None
        if not (isinstance(s, Store) and isinstance(x, Load)) or x.mask is not None or x.index != s.index:
            continue
        sum, copy = program.buffers[x.buffer], program.buffers[s.buffer]
        whole = node.numel == copy.numel and d.writers[copy.name] == [position] and copy.kind == "temp"
        if whole and same_layout(sum, copy) and _fill(program, d, sum.name, position) is not None:
            return i, sum.name, copy.name
    return None


def _sum_of_sums(
    program: Program, d: Dependencies, position: int, node: LoopNest, names: dict[str, str]
) -> tuple[str, str, tuple[Stmt, ...]] | None:
    """An addition in ``node`` of two such sums, that nothing else reads: the buffer that is kept, the one that is not,
    and the body without the addition. ``names``: what has been replaced by what."""
    body, read = node.body, [s.buffer for s in node.loads()]
    used = [a for s in body for a in stmt_args(s)]
    for i, s in enumerate(body):
        x, y = (body[a] for a in s.args) if isinstance(s, Op) and s.op == "add" else (s, s)
        if not (isinstance(x, Load) and isinstance(y, Load)) or x == y or replace(x, buffer=y.buffer) != y:
            continue
        if x.other or any(used.count(a) != 1 for a in stmt_args(s)) or any(read.count(v.buffer) != 1 for v in (x, y)):
            continue
        if not same_layout(program.buffers[x.buffer], program.buffers[y.buffer]):
            continue
        for keep, gone in ((x.buffer, y.buffer), (y.buffer, x.buffer)):
            merged = [gone, *(old for old, new in names.items() if new == gone)]
            fills = [_fill(program, d, b, position) for b in (keep, *merged)]
            if any(f is None for f in fills) or fills[1] != 0:
                continue
            if all(d.writers[keep][0] < d.writers[b][1] for b in merged):
                kept = replace(x, buffer=keep)
                return keep, gone, eliminate_dead(tuple(kept if j == i else t for j, t in enumerate(body)))
    return None


def _fill(program: Program, d: Dependencies, b: str, position: int) -> object:
    """What a temporary is filled with that is only added to afterwards, and read at ``position`` alone; else None."""
    if program.buffers[b].kind != "temp" or b in d.needed or d.readers.get(b) != [position]:
        return None
    first, *others = (program.nodes[w] for w in d.writers[b])
    loops = [n for n in (first, *others) if isinstance(n, LoopNest)]
    added = all(s.reduce == "atomic" for n in loops[1:] for s in n.stores() if s.buffer == b)
    if not added or not others or len(loops) <= len(others) or loops[0].numel != program.buffers[b].numel:
        return None
    store, *more = (s for s in loops[0].stores() if s.buffer == b)
    value = loops[0].body[store.value]
    return None if more or store.reduce else value.value if isinstance(value, Const) else value
