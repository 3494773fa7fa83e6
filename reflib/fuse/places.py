"""Where the elements of a buffer are that lives in another one: a View of it, its place. (For ``updates``.)"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..ir import instructions
from ..ir.expr import Atom, Expr, IntLike, Ref, Var, ceildiv, expr, nonneg
from ..ir.loops import Load, LoopNest, Store
from ..ir.program import Buffer, Extern, Node, View, map_tree
from .mapping import fresh
from .slices import Write, coordinates, region_of

LAUNCH = (10_000, instructions.LAUNCH)  # bytes that are moved while a kernel is started, by a CPU and by a GPU


def linear_view(buffer: str, index: Expr, axes: Sequence[Var | None], like: Buffer | View) -> View | None:
    """The view whose element at ``axes`` is at ``index``; None if there is none."""
    strides, rest = [], index
    for v, old in zip(axes, like.strides):
        c = index.coefficient(v) if v is not None else old
        if c is None:
            return None
        strides.append(c)
        rest = rest if v is None else rest - c * expr(v)
    if rest.variables() or any(isinstance(a, Ref) for a in rest.atoms()):
        return None
    return View(buffer, like.shape, tuple(strides), rest, like.dtype)


def plain(place: View, buffer: Buffer) -> bool:
    """Is every element where it would be in a buffer of its own?"""
    if place.offset != 0 or place.shape != buffer.shape:
        return False
    return all(s == t for n, s, t in zip(place.shape, place.strides, buffer.strides) if n != 1)


def folded(place: View) -> bool:
    """May two elements be in one place? (It is not proved that each stride is beyond what smaller ones reach.)"""
    dims = [(-s if s.hint() < 0 else s, n) for n, s in zip(place.shape, place.strides) if n != 1]
    below = expr(1)
    for stride, size in sorted(dims, key=lambda d: d[0].hint()):
        if not nonneg(stride - below):
            return True
        below = below + (size - 1) * stride
    return False


def moved(index: Expr, buffer: Buffer, place: View) -> Expr | None:
    """An index into ``buffer``, which lives at ``place``, as an index into that one's buffer; None: not known."""
    if plain(place, buffer):
        return index
    coords = coordinates(index, buffer)
    return None if coords is None else element(place, coords)


def moved_load(node: LoopNest, load: Load, buffer: Buffer, place: View) -> Expr | None:
    """As :func:`moved`, of a load in ``node``: the index is right where its mask holds (a part of a ``cat``)."""
    found = moved(load.index, buffer, place)
    region = None if found is not None or load.mask is None else region_of(node.body, load.mask)
    if region is None or region[3] != 1:
        return found
    var, low, high, _ = region
    inner = fresh(high - low)
    there = moved(load.index.subs({var: low + expr(inner)}), buffer, place)
    return None if there is None else there.subs({inner: expr(var) - low})


def element(v: View, coords: Sequence[IntLike]) -> Expr:
    at = v.offset
    for c, stride in zip(coords, v.strides, strict=True):
        at = at + expr(c) * stride
    return at


def rehomed(node: Node, places: Mapping[str, View], buffers: Mapping[str, Buffer]) -> Node:
    """``node``, a loop nest or a call, using what lives at ``places`` there. Assumes that where that is is known."""
    if places.keys().isdisjoint((*node.reads(), *node.writes())):
        return node

    def there(x: Any) -> Any:
        if isinstance(x, View) and x.buffer in places:
            return within(x, buffers[x.buffer], places[x.buffer])
        if isinstance(x, (Load, Store)) and x.buffer in places:
            old, place = buffers[x.buffer], places[x.buffer]
            masked = isinstance(x, Load) and isinstance(node, LoopNest)
            index = moved_load(node, x, old, place) if masked else moved(x.index, old, place)  # type: ignore
            assert index is not None
            return replace(x, buffer=places[x.buffer].buffer, index=index)
        return x

    if isinstance(node, LoopNest):
        return replace(node, body=tuple(map(there, node.body)))
    assert isinstance(node, Extern)
    args, kwargs = map_tree((node.args, node.kwargs), there)
    mutates = (places[b].buffer if b in places else b for b in node.mutates)
    return replace(node, args=args, kwargs=kwargs, mutates=tuple(dict.fromkeys(mutates)))


def points(v: View) -> Expr:
    """The index of an element of a view, over loop variables of its own."""
    return element(v, [0 if size == 1 else expr(fresh(size)) for size in v.shape])


def within(v: View, buffer: Buffer, place: View) -> View | None:
    """``v``, a view of ``buffer``, which lives at ``place``, as a view of that one's buffer."""
    if plain(place, buffer):
        return replace(v, buffer=place.buffer)
    axes = [None if size == 1 else fresh(size) for size in v.shape]
    there = moved(element(v, [0 if a is None else expr(a) for a in axes]), buffer, place)
    return None if there is None else linear_view(place.buffer, there, axes, v)


def slice_points(w: Write) -> dict[Atom, IntLike]:
    """The variable of the sliced dimension, in terms of one over the slice."""
    var = w.axes[w.dim]
    assert var is not None
    size = ceildiv(w.high - w.low, w.step)
    return {var: w.low if size == 1 else w.low + expr(fresh(size)) * w.step}


def only_in_slice(w: Write, index: Expr, place: View, root: Buffer) -> bool:
    """Is every element of ``index``, into ``root``, in the slice that ``w`` writes, whose buffer is at ``place``?"""
    coords = coordinates(index - place.offset, replace(root, shape=place.shape, strides=place.strides))
    return coords is not None and w.holds(coords[w.dim]) is True


def apart(root: Buffer, a: Expr, b: Expr) -> bool:
    """Do two indices into ``root``, over different loops, never meet?"""
    b = b.subs({x: expr(fresh(x.size)) for x in b.atoms() if isinstance(x, (Var, Ref))})  # whatever names both have
    here, there = coordinates(a, root), coordinates(b, root)
    if here is None or there is None:
        return False
    return any(nonneg(x - y - 1) or nonneg(y - x - 1) for x, y in zip(here, there))
