"""A sum of matrix products is one buffer that each product is added to.

Where a weight is used several times (each step of a recurrent network, tied layers), its gradient is a sum of products,
one per use. Fusion would make one kernel of the additions, which waits for all products::

    p1 = a1 @ b1;  p2 = a2 @ b2;  ...         sum = a1 @ b1
    sum = p1 + p2 + ...                       sum = addmm(sum, a2, b2), stored over sum;  ...

That needs the memory of all of them at once, where eager adds each as it comes and has two. In one buffer, the bytes
that are moved are the same, and the additions need no kernel. A sum of two is left alone: it needs no more than eager.
With ``numerics="eager"`` nothing is changed, since a product is not rounded before it is added here.
"""

from dataclasses import replace

import torch

from ..ir.loops import Load, LoopNest, Op, Store
from ..ir.program import Extern, Node, Program, View, full_view, iter_views
from ..ir.rename import renamed
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, used_buffers
from .result import Fused
from .slices import same_layout, whole_dimensions

aten = torch.ops.aten
FEWEST = 3  # products
Added = tuple[int, int, str, str]  # positions of an addition and of its product; what is added to; the sum


def sums_of_products(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. Assumes a legal order."""
    program = fused.program
    if options.numerics == "eager":
        return fused
    d = dependencies(program)
    chains: dict[str, list[Added]] = {}  # by the last sum
    for i, node in enumerate(program.nodes):
        added = _added(program, d, i, node, chains) if isinstance(node, LoopNest) else None
        if added is not None:
            chains[added[3]] = [*chains.pop(added[2], []), added]
    found = [a for chain in chains.values() if len(chain) + 1 >= FEWEST for a in chain]
    if not found:
        return fused
    names: dict[str, str] = {}
    nodes: list[Node | None] = list(program.nodes)
    for i, product, before, now in found:
        names[now] = names.get(before, before)
        nodes[i], nodes[product] = _add_to(program, nodes[product], program.nodes[i], before), None
    kept = renamed([n for n in nodes if n is not None], [], names)[0]
    results = (replace(v, buffer=names.get(v.buffer, v.buffer)) if isinstance(v, View) else v for v in program.outputs)
    program = replace(program, nodes=tuple(kept), outputs=tuple(results))
    return replace(fused, program=replace(program, buffers=used_buffers(program, kept)))


def _added(program: Program, d: Dependencies, i: int, node: LoopNest, chains: dict[str, list[Added]]) -> Added | None:
    """If the node adds a product, that nothing else reads, to another or to a sum of them."""
    if len(node.body) != 4 or node.reduced:
        return None
    x, y, add, store = node.body
    if not (isinstance(x, Load) and isinstance(y, Load) and isinstance(add, Op) and isinstance(store, Store)):
        return None
    plain = add.op == "add" and set(add.args) == {0, 1} and x.mask is None and y.mask is None
    b = program.buffers[store.buffer]
    if not plain or not x.index == y.index == store.index or whole_dimensions(b, node, store) is None:
        return None
    if b.kind != "temp" or not all(same_layout(program.buffers[s.buffer], b) for s in (x, y)):
        return None
    made = {s.buffer: d.writers.get(s.buffer, [-1])[-1] for s in (x, y) if _alone(program, d, s.buffer, i)}
    products = [s for s, at in made.items() if at >= 0 and _is_product(program.nodes[at])]
    ready = sorted(made, key=lambda s: (s not in chains, made[s]))
    if len(made) != 2 or not products or ready[0] not in chains and len(products) != 2 or ready[1] not in products:
        return None
    at = made[ready[1]]
    read = {v.buffer for v in iter_views(program.nodes[at].args)}  # type: ignore[union-attr]
    moved = any(d.written_between(r, at, i) for r in read) or d.writers[store.buffer] != [i]
    return None if moved else (i, at, ready[0], store.buffer)


def _alone(program: Program, d: Dependencies, b: str, i: int) -> bool:
    """Is it a temporary that one node writes and node ``i`` alone reads?"""
    once = len(d.writers.get(b, ())) == 1 and d.readers.get(b) == [i]
    return once and program.buffers[b].kind == "temp" and b not in d.needed


def _is_product(node: Node) -> bool:
    return isinstance(node, Extern) and node.target is aten.mm.default and node.out is not None


def _add_to(program: Program, product: Node | None, addition: Node, to: str) -> Extern:
    assert isinstance(product, Extern)
    view = full_view(program.buffers[to])
    return replace(
        product, target=aten.addmm.default, args=(view, *product.args), kwargs=(("out", view),), outputs=(None,),
        mutates=(to,), out=(aten.addmm.out, ("out",)), origins=(*product.origins, *addition.origins),
    )  # fmt: skip
