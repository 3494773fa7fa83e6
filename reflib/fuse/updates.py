"""What is an update, and where the elements of what it makes are: the analysis behind ``in_place``.

Captured graphs are functional: an update in place is an op that returns a new tensor. Lowered, it has one of five
forms, and only these are looked for, whatever the op was::

    copy    new[e] = old[e], then nodes that store a few elements of ``new`` (positions held in tensors, ``scatter``;
            ``as_strided_scatter``), calls that are given ``new`` to write to (a custom op that mutates its arguments),
            or loops that carry it and update it in place
    slice   new[e] = v if e in slice else old[e]                       (``slices.Write``)
    call    new = op(old, ...) of an op of PyTorch's that has a form op_(old, ...) which writes to ``old``; a
            collective, too: its functional form communicates in a copy
    each    new[e] = f(old[e], ...) for every element
    same    new[e] = old[e] for every element, where ``old`` was made by a call or another update (``cache.copy_(it)``,
            and then the cache is read) or is carried by a loop (a body may not update what it carries: it clones it)

``old`` may be a part of a buffer (``cache[layer]``), that is, ``new`` a view of it: ``Update.view``. A slice update of
the whole by such a part, ``where(e in part, new, old)``, then stores what is there already (``puts_back``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..ir.expr import Var, ceildiv, expr
from ..ir.loops import Load, LoopNest, Store
from ..ir.program import Extern, Node, Program, View, iter_views
from ..ir.regions import Region
from .dependencies import Dependencies
from .places import element, linear_view, moved, plain, slice_points
from .slices import Write, find_write, whole_copy, whole_dimensions

OWN = ("aten", "_c10d_functional")  # PyTorch's, where op_ is op in place


@dataclass(eq=False)
class Update:
    """``new`` is ``view`` of a buffer, ``old``, but for what is stored from position ``at`` on. ``position``: of the
    node that reads ``old``. ``node``: the one whose op it is."""

    kind: str
    position: int
    at: int
    view: View
    new: str
    node: Node
    write: Write | None = None

    @property
    def old(self) -> str:
        return self.view.buffer


def find_updates(program: Program, d: Dependencies) -> list[Update]:
    """All updates of a program, by ``at``."""
    found: dict[str, Update] = {}
    for position, node in enumerate(program.nodes):
        u = _call(program, d, position, node) if isinstance(node, Extern) else None
        if isinstance(node, LoopNest):
            u = _slice(program, d, position, node) or _copy(program, d, position, node)
            u = u or _same(program, d, position, node, found) or _each(program, d, position, node)
        if u is not None and program.buffers[u.new].kind == "temp" and u.new != u.old:
            found[u.new] = u
    return sorted(found.values(), key=lambda u: u.at)


# -- the five forms -----------------------------------------------------------------------------------------
def _copy(program: Program, d: Dependencies, position: int, node: LoopNest) -> Update | None:
    copy = whole_copy(program, node)
    if copy is None:
        return None
    axes, load, store = copy
    first, *more = d.writers[store.buffer]
    if first != position or not more or not all(_stores_few(program.nodes[i], store.buffer) for i in more):
        return None
    view = _seen(program, load, axes, store.buffer)
    if view is None:
        return None
    return Update("copy", position, more[0], view, store.buffer, program.nodes[more[0]])


def _stores_few(node: Node, name: str) -> bool:
    """Does the node only store elements of ``name``, or is it a call that writes to it, or a loop that carries it and
    updates it in place?"""
    if isinstance(node, Region):
        return (name, name) in node.carried
    return isinstance(node, LoopNest) or isinstance(node, Extern) and name in node.mutates


def _slice(program: Program, d: Dependencies, position: int, node: LoopNest) -> Update | None:
    w = find_write(program, position, node)
    if w is None or len(d.writers[w.buffer]) != 1 or not isinstance(w.old, Load):
        return None
    view = _seen(program, w.old, w.axes, w.buffer)
    return None if view is None else Update("slice", position, position, view, w.buffer, node, w)


def _call(program: Program, d: Dependencies, position: int, node: Extern) -> Update | None:
    op, new = in_place_form(node.target), node.outputs[0] if len(node.outputs) == 1 else None
    first = node.args[0] if node.args else None
    if op is None or not isinstance(new, str) or not isinstance(first, View) or node.mutates or node.symbols:
        return None
    b, old = program.buffers[new], program.buffers[first.buffer]
    same = (first.shape, first.dtype, old.dtype, old.device) == (b.shape, b.dtype, b.dtype, b.device)
    same = same and (op.namespace == "aten" or first.strides == b.strides)  # (a collective takes no others)
    others = sum(v.buffer == first.buffer for v in iter_views((node.args, node.kwargs))) == 1
    if not same or not others or d.writers[new][0] != position:  # (what a collective makes, its wait writes again)
        return None
    return Update("call", position, position, first, new, node)


def in_place_form(op: object) -> torch._ops.OpOverload | None:
    """``index_add_.default`` of ``index_add.default``: the same arguments; the first is written to and returned."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in OWN or op._schema.is_mutable:
        return None
    packet = getattr(getattr(torch.ops, op.namespace), op._schema.name.partition("::")[2] + "_", None)
    form = getattr(packet, op._overloadname, None)
    if form is None or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    mine, its = op._schema.arguments, form._schema.arguments
    fits = [(a.name, str(a.type)) for a in mine] == [(a.name, str(a.type)) for a in its]
    writes = [a.alias_info is not None and a.alias_info.is_write for a in its]
    return form if fits and writes == [True] + [False] * (len(its) - 1) and len(form._schema.returns) == 1 else None


def _each(program: Program, d: Dependencies, position: int, node: LoopNest) -> Update | None:
    store, stores = node.body[-1], list(node.stores())
    if not isinstance(store, Store) or len(stores) != 1 or node.reduced or d.writers[store.buffer] != [position]:
        return None
    axes = whole_dimensions(program.buffers[store.buffer], node, store)
    loads = [s for s in node.loads() if s.index == store.index and s.mask is None]
    for load in loads:
        view = None if axes is None else _seen(program, load, axes, store.buffer)
        if view is not None and plain(view, program.buffers[store.buffer]):
            return Update("each", position, position, view, store.buffer, node)
    return None


def _same(
    program: Program, d: Dependencies, position: int, node: LoopNest, found: Mapping[str, Update]
) -> Update | None:
    copy = whole_copy(program, node)
    if copy is None or d.writers[copy[2].buffer] != [position]:
        return None
    makers = [program.nodes[i] for i in d.writers.get(copy[1].buffer, ())]
    view = _seen(program, copy[1], copy[0], copy[2].buffer)
    stored = copy[1].buffer in found and found[copy[1].buffer].kind != "each"
    if view is None or not (stored or makers and isinstance(makers[0], Extern)):  # (else: in the same kernel)
        return None
    return Update("same", position, position, view, copy[2].buffer, node)


def _seen(program: Program, load: Load, axes: Sequence[Var | None], new: str) -> View | None:
    """The elements that are loaded, as a view of the shape of ``new``."""
    a, b = program.buffers[load.buffer], program.buffers[new]
    if load.mask is not None or (a.dtype, a.device) != (b.dtype, b.device):
        return None
    return linear_view(load.buffer, load.index, [*axes], b)


def region(u: Update, place: View) -> View:
    """What the update may store to, where ``new`` lives at ``place``."""
    w = u.write
    if w is None:
        return place
    shape, strides = list(place.shape), list(place.strides)
    offset = place.offset + w.low * strides[w.dim]
    shape[w.dim], strides[w.dim] = ceildiv(w.high - w.low, w.step), strides[w.dim] * w.step
    return replace(place, shape=tuple(shape), strides=tuple(strides), offset=offset)


def puts_back(program: Program, u: Update, places: Mapping[str, View], place: View) -> bool:
    """Is each element that the slice update stores there already, where ``new`` lives at ``place``?"""
    w = u.write
    if w is None or not isinstance(w.new, Load) or w.new.buffer not in places:
        return False
    env, source = slice_points(w), places[w.new.buffer]
    there = moved(w.new.index.subs(env), program.buffers[w.new.buffer], source)
    here = element(place, [0 if v is None else expr(v).subs(env) for v in w.axes])
    return source.buffer == place.buffer and there is not None and there == here
