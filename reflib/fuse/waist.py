"""What goes from one kernel to the next, at its narrowest: fewer tensors from which the others follow.

Fusion keeps results that later kernels read elsewhere. The backward of a stencil reads the gradients ``gu`` and
``gv`` of a step at the neighbours and, times this and that, at home: seven products of them were stored and read, 56
bytes per element, where the two gradients and the forward's ``u`` and ``v``, from which the next kernel can compute
these, are 24. So were the gradients of a bilateral filter's nine weights, each read at one place, where two tensors
and the image give all of them. And so were, of a norm of channels, ``-g`` and ``g / std`` by the kernel that sums the
gradients of its weights, for the one that sums along channels: ``g`` is one tensor.

Which values? Each one of the first kernel's body may be

* stored: it is written once, and read by each kernel behind it; ``bytes * (1 + readers)``,
* computed again by the readers, at each place where they read what follows from it: its instructions, in bytes
  (``PER_BYTE``), times the places. What was loaded at the same point is loaded there, which takes its bytes.

From what is stored now, one value at a time is added, by the cost of the whole, and those go that it makes needless.

NB: TorchInductor stores what has several users by counting reads and operations (``realize_hint``), one value at a
time, before kernels are formed. AOTAutograd's partition of a training step is such a cut, with other weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import inf
from operator import or_

import torch

from ..ir.expr import Expr, Ref
from ..ir.instructions import PER_BYTE, weight
from ..ir.loops import Const, Index, Load, LoopNest, Op, Stmt, Store, stmt_args
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import needed, select, varying
from ..lower.context import contiguous_strides
from ..options import Options
from ..target import Target
from .casts import ROUND
from .dependencies import Dependencies, dependencies
from .driver import grouped
from .inline_loads import MAX_BODY
from .producers import make_producer, makes_all, replaced
from .recompute import drop_stores
from .result import Fused
from .split import row_major

NARROWER = 0.8  # of the bytes: what is left where it pays

Place = tuple[int, Expr, int | None]  # the reader, where, under which mask


@dataclass(frozen=True)
class _Wanted:
    """A result of a kernel that only later elementwise kernels read: by ``readers``, at ``places``. exact: what is
    stored is the value; else it is rounded to 16 bits, and what follows from the value cannot be computed from it."""

    store: Store
    bytes: int
    exact: bool
    readers: frozenset[int]
    places: frozenset[Place]


def waist(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results with fewer bytes between kernels. Assumes a legal order; for GPUs."""
    if not target.is_gpu:
        return fused
    program, changed = fused.program, False
    depends = dependencies(program)
    nodes, buffers = list(program.nodes), dict(program.buffers)
    for position in range(len(nodes)):
        node = nodes[position]
        if isinstance(node, LoopNest) and len(node.stores()) > 1:
            wanted = list(_wanted(program, depends, nodes, position, node))
            if len(wanted) > 1 and (cut := _cut(_Values(program, depends, nodes, position, node, wanted))):
                changed |= _apply(nodes, position, wanted, cut, buffers)
    done = replace(program, nodes=tuple(nodes), buffers=buffers)
    return grouped(fused.regrouped(drop_stores(done)), options, target) if changed else fused


def _wanted(
    program: Program, depends: Dependencies, nodes: list[Node], position: int, loops: LoopNest
) -> Iterable[_Wanted]:
    for s in loops.stores():
        readers = depends.readers.get(s.buffer, [])
        buffer, found = program.buffers[s.buffer], [nodes[r] for r in readers]
        if s.reduce or s.buffer in depends.needed or depends.writers[s.buffer] != [position] or not readers:
            continue
        if not all(isinstance(n, LoopNest) and r > position for r, n in zip(readers, found)):
            continue
        single = getattr(loops.body[s.value], "dtype", None) == torch.float32 and buffer.dtype.is_floating_point
        if single and makes_all(program, loops, s) and loops.numel * loops.rnumel == buffer.numel:
            loads = ((r, n) for r, n in zip(readers, found) if isinstance(n, LoopNest))
            places = {(r, x.index, x.mask) for r, n in loads for x in n.loads() if x.buffer == s.buffer}
            value = loops.body[s.value]
            exact = buffer.dtype in (torch.float32, ROUND.get(getattr(value, "op", "")))
            yield _Wanted(s, buffer.nbytes.hint(), exact, frozenset(r for r, _, _ in places), frozenset(places))


def _cut(work: _Values) -> set[int]:
    """The statements whose values are stored instead; none if that is not much less. From what is stored now, one value
    is added at a time: that with which most can go."""
    kept = {w.store.value for w in work.wanted}
    cost = now = work.cost(kept)
    users = Counter(a for i in work.places() for a in stmt_args(work.loops.body[i]))
    several = [i for i, n in users.items() if n > 1 and work.storable(i) and i not in kept]
    while several:
        trials = [work.with_(kept, v) for v in several]
        costs = [work.cost(t) for t in trials]
        if min(costs) >= cost:
            break
        cost = min(costs)
        kept = trials[costs.index(cost)]
        several = [v for v in several if v not in kept]
    return kept if cost <= NARROWER * now else set()


@dataclass(frozen=True)
class _Values:
    """Of the body of the loop nest at ``position``: what may be stored."""

    program: Program
    depends: Dependencies
    nodes: list[Node]
    position: int
    loops: LoopNest
    wanted: list[_Wanted]
    prices: dict[tuple[int, int, int], float] = field(default_factory=dict, init=False)

    @cached_property
    def asked(self) -> dict[int, int]:
        """By value that is wanted: the places where it is read, a bit each."""
        bits = {place: 1 << n for n, place in enumerate(self.everywhere)}
        out: dict[int, int] = {}
        for w in self.wanted:
            out[w.store.value] = out.get(w.store.value, 0) | sum(bits[place] for place in w.places)
        return out

    @cached_property
    def everywhere(self) -> list[Place]:
        return list(dict.fromkeys(place for w in self.wanted for place in w.places))

    @cached_property
    def arguments(self) -> list[tuple[int, tuple[int, ...]]]:
        """Of each statement that a wanted value needs, the last one first."""
        args = [(i, tuple(stmt_args(s))) for i, s in enumerate(self.loops.body)]
        kept, needs = set(self.asked), list[tuple[int, tuple[int, ...]]]()
        for i, found in reversed(args):
            if i in kept:
                kept.update(found)
                needs.append((i, found))
        return needs

    def places(self, stored: Container[int] = ()) -> dict[int, int]:
        """Where each value would be computed if these are ``stored``, and where those are read."""
        out = dict(self.asked)
        for i, args in self.arguments:
            if i in out and i not in stored:
                for a in args:
                    out[a] = out.get(a, 0) | out[i]
        return out

    def readers(self, found: int) -> frozenset[int]:
        return frozenset(place[0] for n, place in enumerate(self.everywhere) if found >> n & 1)

    def storable(self, i: int) -> bool:
        s = self.loops.body[i]
        return isinstance(s, Op) and s.dtype == torch.float32 and self.per_element[i]

    @cached_property
    def per_element(self) -> list[bool]:
        """Of each value of a reduction: is it of an element, not of a row?"""
        loops = self.loops
        return varying(loops.body, loops.reduced_vars) if loops.reduced else [True] * len(loops.body)

    def cost(self, kept: set[int], free: int = -1) -> float:
        """In bytes, one of them being there in any case."""
        places, total = self.places(kept), 0.0
        for i, found in places.items():
            if i not in kept:
                total += self._price(i, found)
            elif i != free:
                computing = (places[j] for j, args in self.arguments if i in args and j not in kept and j in places)
                total += self._stored(i, found, reduce(or_, computing, 0))
        return total

    def _price(self, i: int, found: int) -> float:
        """Of computing one value at these places; the same few are asked for again and again."""
        if (key := (i, found, -1)) not in self.prices:
            s = self.loops.body[i]
            if isinstance(s, Load):
                self.prices[key] = self._read_again(s, self.readers(found), found.bit_count())
            else:
                at = (_nest(self.nodes[place[0]]) for n, place in enumerate(self.everywhere) if found >> n & 1)
                points = sum(_points(n) for n in at)  # (of one number per row, the reader has more)
                self.prices[key] = weight(s) * points / PER_BYTE if isinstance(s, (Op, Const, Index)) else inf
        return self.prices[key]

    def _stored(self, i: int, found: int, computing: int) -> float:
        """What it costs to store a value and to read it, in bytes. computing: the places where what follows from it is
        computed. There it is needed in float32, beside a result that is rounded."""
        if (key := (i, found, computing)) not in self.prices:
            single, own = 4 * _points(self.loops), [w for w in self.wanted if w.store.value == i]
            if not own or any(w.exact for w in own):
                size = min((w.bytes for w in own if w.exact), default=single)
                self.prices[key] = size * (1 + self._kernels(self.readers(found)))
            else:
                beside = single * (1 + self._kernels(self.readers(computing))) if computing else 0
                self.prices[key] = beside + sum(w.bytes * (1 + self._kernels(w.readers)) for w in own)
        return self.prices[key]

    def with_(self, kept: set[int], new: int) -> set[int]:
        """With that one, without those that it then costs less to compute: the last ones first, or the first ones."""
        found: list[tuple[float, set[int]]] = []
        for order in (sorted(kept), sorted(kept, reverse=True)):
            left = kept | {new}
            cost = self.cost(left, new)
            for i in order:
                if (less := self.cost(left - {i}, new)) < cost:
                    left, cost = left - {i}, less
            found.append((cost, left))
        return min(found, key=lambda f: f[0])[1]

    def _read_again(self, s: Load, readers: frozenset[int], places: int) -> float:
        """What it costs that the readers read it, in bytes; infinite where they cannot."""
        buffer = self.program.buffers.get(s.buffer)
        if buffer is None or any(isinstance(a, Ref) for a in s.index.atoms()) or s.buffer in self.loops.writes():
            return inf
        if self.depends.written_between(s.buffer, self.position, max(readers) + 1):
            return inf
        there = [r for r in readers if s.buffer in self.nodes[r].reads()]
        have = sum(x.buffer == s.buffer for r in there for x in _nest(self.nodes[r]).loads())  # most of a window
        points = _points(self.loops)
        size = min(buffer.nbytes.hint(), points * buffer.dtype.itemsize)
        return size * self._kernels(readers - frozenset(there)) + weight(s) * max(0, places - have) * points / PER_BYTE

    def _kernels(self, readers: Iterable[int]) -> int:
        """How many kernels they are, once those that read the same tensors and do not wait for each other are one."""
        found: list[int] = []
        for r in sorted(readers):
            alike = _nest(self.nodes[r]).numel, _nest(self.nodes[r]).rnumel
            same = [q for q in found if (_nest(self.nodes[q]).numel, _nest(self.nodes[q]).rnumel) == alike]
            if not same or any(q in self.depends.before[r] for q in same):
                found.append(r)
        return len(found)


def _nest(node: Node) -> LoopNest:
    assert isinstance(node, LoopNest)
    return node


def _points(loops: LoopNest) -> int:
    return (loops.numel * loops.rnumel).hint()


def _apply(
    nodes: list[Node], position: int, wanted: list[_Wanted], cut: set[int], buffers: dict[str, Buffer]
) -> bool:
    loops = nodes[position]
    assert isinstance(loops, LoopNest)
    body, made = list(loops.body), list[Stmt]()
    like = buffers[wanted[0].store.buffer]
    shape, home = tuple(a.size for a in loops.axes), row_major(loops.axes)
    strides = contiguous_strides(shape)
    if loops.reduced:  # (its axes are in another order than those of what it stores)
        shape, home, strides = like.shape, wanted[0].store.index, like.strides
    kept = {w.store.value: w.store for w in sorted(wanted, key=lambda w: -w.bytes) if w.exact}
    new: dict[str, Buffer] = {}
    for i in sorted(cut):
        if i in kept:
            body[i] = Load(kept[i].buffer, kept[i].index, torch.float32)
            continue
        name = f"{loops.name}_waist{i}"
        new[name] = Buffer(name, torch.float32, like.device, shape, strides)
        body[i] = Load(name, home, torch.float32)
        made.append(Store(name, home, i))
    producers = []
    for w in wanted:
        if w.store.value not in cut:
            store = body.index(w.store)
            axes = tuple(replace(a, kind="p") for a in loops.axes)
            slice_ = replace(loops, axes=axes, body=select(tuple(body), needed(tuple(body), [store])))
            producers.append(make_producer(position, slice_, slice_.stores()[0]))
    after: dict[int, LoopNest] = {}
    for r in frozenset[int]().union(*(w.readers for w in wanted)):
        reader = nodes[r]
        assert isinstance(reader, LoopNest)
        if None in producers:
            return False
        after[r] = replaced(reader, *producers, gpu=True)  # type: ignore[arg-type]
        if len(after[r].body) > max(MAX_BODY, len(reader.body) + len(loops.body)):
            return False
    buffers |= new
    nodes[position] = replace(loops, body=(*loops.body, *made))
    for r, reader in after.items():
        nodes[r] = reader
    return True
