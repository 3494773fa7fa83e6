"""Cheap producers, computed again where they are read.

``cat([a + 1, b * 2])`` reads two buffers at other elements than they were written at, so it has no iteration space in
common with the kernels that make them. But ``a + 1`` costs nothing to compute again: the load of ``buf[e]`` becomes the
producer's body, with its axes recovered from the offset ``e`` (``axis = e // stride % size``, which usually simplifies
to the consumer's own variables). A masked load makes the producer's loads masked, by both masks, and the positions that
it reads at, where they may be out of range then, 0.

A pooling reads several elements of its input per result. Its producer is computed again for each of them where that is
less work than to store the input and read it back: ``avg_pool(relu(bn(x)))`` is one kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from ..ir.expr import Atom, Expr, Ref, Var, expr, nonneg, product
from ..ir.instructions import INSTRUCTIONS, LOAD, LOAD_VECTOR, PER_BYTE, POSITION
from ..ir.loops import (
    BodyBuilder,
    Const,
    Index,
    Indirect,
    Load,
    LoopNest,
    Op,
    Reduce,
    Stmt,
    Store,
    map_stmt,
    stmt_args,
    stmt_exprs,
)
from ..ir.program import Extern, Node, Program
from ..ir.transforms import divisions, eliminate_dead, needed
from ..options import Options
from ..target import Target
from .decided import Exprs, decided, narrowed
from .dependencies import Dependencies, dependencies, remove_dead
from .legality import Cluster, common_space, single
from .mapping import strides_of
from .places import LAUNCH
from .result import Fused, Reason

MAX_OPS = 24  # statements of a producer that is computed twice, or that others are joined to
MAX_OPS_ONCE = 60  # ... that is computed no more often than before
MAX_OPS_REPEATED = 6  # ... more than twice as often as before
MAX_LOADS = 4  # ... of matrices, of one computed twice: vectors, such as a norm's weights, are read from cache
MAX_BODY = 240  # statements a consumer may grow to
MAX_TEXT = 1500  # characters of an index with // and %, which double per level where bounds prove nothing
EXPENSIVE = frozenset(INSTRUCTIONS)


@dataclass(frozen=True)
class _Work:
    """What the questions below are about. ``nodes`` and ``readers``: with what was inlined until now. ``joined``:
    ``_joined`` of the producers that were asked for; ``alone``: their clusters."""

    program: Program
    nodes: list[Node]
    depends: Dependencies
    gpu: bool
    readers: dict[str, set[int]]
    calls: list[int]  # per node: the most calls one after another that it waits for
    producers: dict[str, Producer] = field(default_factory=dict)
    joined: dict[str, tuple[Producer, list[Producer]]] = field(default_factory=dict)
    alone: dict[str, Cluster] = field(default_factory=dict)

    def reads_no_more(self, position: int, name: str) -> None:
        """And a producer that nothing reads any more reads nothing either."""
        self.readers[name].discard(position)
        p = self.producers.get(name)
        if p is not None and not self.readers[name] and name not in self.depends.needed and len(p.loops.stores()) == 1:
            for read in p.loops.reads():
                if p.position in self.readers.get(read, ()):
                    self.reads_no_more(p.position, read)


@dataclass(frozen=True)
class Producer:
    """A pointwise loop nest that writes a buffer, and how its axes are computed from an offset into that buffer."""

    position: int
    loops: LoopNest
    store: Store
    strides: tuple[tuple[Atom, Expr, Expr], ...]  # (variable, stride, size), greatest stride first
    start: Expr


def inline_loads(fused: Fused, options: Options, target: Target) -> Fused:
    """Replace loads that could not be fused by the bodies of their producers, where that is cheap; a producer whose
    result nothing reads afterwards is removed. Assumes a legal order."""
    program = fused.program
    depends = dependencies(program)
    calls: list[int] = []
    for node, before in zip(program.nodes, depends.before):
        calls.append(max((calls[j] for j in before), default=0) + isinstance(node, Extern))
    readers = {name: set(found) for name, found in depends.readers.items()}
    work = _Work(program, list(program.nodes), depends, target.is_gpu, readers, calls)
    for position, node in enumerate(program.nodes):
        if not isinstance(node, LoopNest):
            continue
        node = _inline_into(node, position, work)
        for store in node.stores():
            producer = _producer(position, node, store, depends) if makes_all(program, node, store) else None
            if producer is not None:
                work.producers[store.buffer] = producer
    return replace(fused, program=remove_dead(replace(program, nodes=tuple(work.nodes))))


def makes_all(program: Program, loops: LoopNest, store: Store) -> bool:
    """Is what is read from the buffer behind ``loops`` what ``store`` stored? (Not where that is a slice.)"""
    buffer = program.buffers[store.buffer]
    alone = sum(s.buffer == store.buffer for s in loops.stores()) == 1
    return alone and (buffer.kind == "temp" or loops.numel == buffer.numel)


def _producer(position: int, loops: LoopNest, store: Store, depends: Dependencies) -> Producer | None:
    if loops.reduced or any(isinstance(s, Reduce) for s in loops.body):
        return None
    if len(loops.body) - len(_positions(loops)) > MAX_OPS_ONCE + len(loops.stores()):
        return None
    if store.reduce or len(depends.writers[store.buffer]) != 1 or set(loops.reads()) & set(loops.writes()):
        return None
    return make_producer(position, loops, store)


def make_producer(position: int, loops: LoopNest, store: Store) -> Producer | None:
    """How to find an element's axes from its offset; None if the store's strides do not determine them."""
    found = strides_of(store.index, loops.axes)
    if found is None:
        return None
    axes = [(a.var, s, a.size) for a, s in zip(loops.axes, found[0], strict=True) if a.size != 1]
    axes.sort(key=lambda t: -t[1].hint())
    below = expr(1)  # elements that the axes below reach
    for _, stride, size in reversed(axes):
        if not nonneg(stride - below):
            return None
        below = below + (size - 1) * stride
    return Producer(position, loops, store, tuple(axes), found[1])


def _inline_into(loops: LoopNest, position: int, work: _Work) -> LoopNest:
    """``loops`` with every load replaced that should be, loads in inlined bodies included. What gathers comes last: by
    then all loads of it are there, of which more than one would repeat it."""
    keep, given, own, longest = set[str](), loops, None, _longest(loops)
    while True:
        names = [n for n in loops.reads() if n in work.producers and n not in keep]
        if not names:
            return loops
        name = min(names, key=lambda n: gathers(work.producers[n].loops))
        own = own or single(position, loops, work.depends)
        for p in _forms(own, position, work.producers[name], work):
            made = cache(partial(replace_loads, loops, p))
            if _should_inline(loops, given, position, p, work, made):
                inlined = made()
                if gathers(p.loops):
                    inlined = replace(inlined, body=without_selects(inlined.body))
                    if len(inlined.body) > MAX_BODY:
                        continue
                length = _longest(inlined)
                if length <= max(MAX_TEXT, longest):
                    for read in p.loops.reads():
                        work.readers.setdefault(read, set()).add(position)
                    work.reads_no_more(position, name)
                    work.nodes[position] = loops = inlined
                    own, longest = None, length
                    break
        else:
            keep.add(name)


def _forms(own: Cluster, position: int, p: Producer, work: _Work) -> Iterator[Producer]:
    """A producer as it might be inlined: with those in it, and alone. None of one that can be grouped with ``own``, the
    consumer, as most can: this is asked first."""
    depends = work.depends
    name = p.store.buffer
    if name not in work.alone:
        work.alone[name] = single(p.position, p.loops, depends)
    if isinstance(common_space(work.alone[name], own), Reason):
        if name not in work.joined:
            work.joined[name] = _joined(p, work)
        whole, parts = work.joined[name]
        if not any(depends.written_between(b, q.position, position + 1) for q in parts for b in q.loops.reads()):
            yield whole
        yield p


def _longest(loops: LoopNest) -> int:
    """Characters of the longest index with // or %."""
    indices = {e for s in loops.body for e in stmt_exprs(s)}
    return max((len(str(e)) for e in indices if divisions(e)), default=0)


def _joined(p: Producer, work: _Work) -> tuple[Producer, list[Producer]]:
    """The producer with the producers in it that grouping would fuse with it (for which no call is waited between), and
    these: a chain is one computation, and the masks of the loads that it replaces are applied once."""
    loops, tried, parts = p.loops, set[str](), list[Producer]()
    while names := [n for n in loops.reads() if n in work.producers and n not in tried]:
        tried.add(names[0])
        q = work.producers[names[0]]
        loads = [s for s in loops.loads() if s.buffer == names[0]]
        near = work.calls[q.position] == work.calls[p.position] and len(loops.body) + len(q.loops.body) <= MAX_OPS
        if near and _cheap(loops, loads, q) and _alone(q, work.depends) and _moves_less(loops, q, work):
            loops = replace_loads(loops, q)
            parts.append(q)
    store = next(s for s in loops.stores() if s.buffer == p.store.buffer)
    return replace(p, loops=loops, store=store), parts


def _should_inline(
    loops: LoopNest, given: LoopNest, position: int, p: Producer, work: _Work, made: Callable[[], LoopNest]
) -> bool:
    """``given``: the consumer before anything was inlined into it; ``made()``: with the producer inlined."""
    depends = work.depends
    loads = [s for s in loops.loads() if s.buffer == p.store.buffer]
    if any(depends.written_between(b, p.position, position + 1) for b in p.loops.reads()):
        return False
    positions = [s for s in p.loops.body if isinstance(s, Indirect)]
    indices = len({s.index for s in loads})
    window = work.gpu and indices > 2  # of a pooling: a load replaces a load, constants are shared
    each = sum(not isinstance(s, (Const, Store)) for s in p.loops.body) - 1 if window else len(p.loops.body)
    if not positions and len(loops.body) + indices * each > MAX_BODY:
        return False
    cheap = not window and _cheap(loops, loads, p)
    if not (cheap or work.gpu) or not _moves_less(loops, p, work):
        return False
    if not cheap and not _pays(loops, given, p, work, made):
        return False
    if any(s.mask is not None for s in loads) and not all(nonneg(s.size - 1) for s in positions):
        return False
    return _alone(p, depends)


def _moves_less(loops: LoopNest, p: Producer, work: _Work) -> bool:
    """Are fewer bytes moved if every reader computes the producer's result again, than if all read it?

    A result of S bytes, computed from L, of which n kernels read all (or parts that amount to that), at m places:
    stored, L + S + n S; computed again, n L, and on a GPU m times the work, in what is moved meanwhile. (A kernel
    computes ``p`` and ``p.roll(1)`` from the same bytes, each by itself. A recurrence would compute all steps before in
    every step; in a residual network each block would compute all blocks before it.) For one reader at one place that
    is always less. So it is taken to be where S is small beside a launch, and so is the consumer's work. What is stored
    in any case is only computed again if L is less than S."""
    buffers, name = work.program.buffers, p.store.buffer
    size, points, own = buffers[name].nbytes.hint(), p.loops.numel.hint(), work_of(p.loops)
    read = [buffers[b] for b in set(p.loops.reads()) - set(loops.reads())]
    bytes_read = sum(min(b.nbytes.hint(), points * b.dtype.itemsize) for b in read)
    if _stored(p, work):
        in_any_case = any(b.kind != "temp" for b in read)  # one is in memory: an input
        return bytes_read < size or in_any_case and bytes_read == size
    shares: dict[tuple[int, int], float] = {}  # of readers that may become one kernel
    places: dict[object, float] = {}  # ... which computes once what they read at one place
    for r in work.readers[name]:
        share, n, read_at = _share(work.nodes[r], p)
        shares[work.calls[r], n] = min(1, shares.get((work.calls[r], n), 0) + share)
        places |= {(work.calls[r], n, e): share / len(read_at) for e in read_at}
    kernels, times = sum(shares.values()), sum(places.values())
    again = max(0, kernels - 1) * bytes_read
    again += max(0, times - 1) * own * points / PER_BYTE if work.gpu else 0
    stored = (kernels + 1) * size
    if again == 0 or again < stored:
        return True
    done = (work_of(loops) + own) * (loops.numel * loops.rnumel).hint() / PER_BYTE if work.gpu else 0
    return stored <= LAUNCH[work.gpu] // 10 and done <= LAUNCH[work.gpu] // 4


def _share(reader: Node, p: Producer) -> tuple[float, int, set[Expr]]:
    """How much of the producer's result it reads, where 1 is all; the points that it has; and where it reads, in terms
    that two loop nests have in common."""
    if not isinstance(reader, LoopNest):
        return 1, 0, {expr(0)}
    axes = [a for a in reader.axes if a.size != 1]
    numbered: Exprs = {a.var: expr(Var(f"axis{k}", a.size)) for k, a in enumerate(axes)}
    indices = {s.index.subs(numbered) for s in reader.loads() if s.buffer == p.store.buffer}
    points = (reader.numel * reader.rnumel).hint()
    return min(1, len(indices) * points / max(1, p.loops.numel.hint())), points, indices


def _stored(p: Producer, work: _Work) -> bool:
    """Is the producer's result stored whatever this reader does: for a call, or for the last of several readers, since
    more would be in memory until then while calls run? (Else the last state of a recurrent cell would be computed again
    from the first one on; and a U-Net's sum of two gradients, of which a part is read late, be kept as two.)"""
    name, buffers, readers = p.store.buffer, work.program.buffers, work.depends.readers[p.store.buffer]
    if any(isinstance(work.program.nodes[r], Extern) for r in readers):
        return True
    if len(readers) == 1 or work.calls[readers[-1]] == work.calls[p.position]:
        return False
    freed = (b for b in p.loops.reads() if buffers[b].kind == "temp" and max(work.readers[b]) < readers[-1])
    return sum(buffers[b].nbytes.hint() for b in freed) > 1.02 * buffers[name].nbytes.hint()


def _pays(loops: LoopNest, given: LoopNest, p: Producer, work: _Work, made: Callable[[], LoopNest]) -> bool:
    """Is the work that is repeated cheaper than to store a result and read it, where nothing else does? All of the work
    that ``given`` has got until now: of a chain, only what ``given`` itself reads would be stored. Not for a broadcast,
    whose source is small, and which may be fused with what made it."""
    name, points, elements = p.store.buffer, (loops.numel * loops.rnumel).hint(), p.loops.numel.hint()
    if name in work.depends.needed or len(work.readers[name]) != 1 or points >= 2 * elements:
        return False
    gone = set(given.reads()) - (set(loops.reads()) - {name})
    saved = 2 * sum(work.program.buffers[b].nbytes.hint() for b in gone)
    repeated = (work_of(made()) - work_of(given)) * points - work_of(p.loops) * elements
    return repeated <= PER_BYTE * saved


def work_of(loops: LoopNest) -> int:
    """Instructions per point."""

    def weight(s: Stmt) -> int:
        if isinstance(s, Op):
            return INSTRUCTIONS.get(s.op, 1)
        if isinstance(s, Load):
            return LOAD if len(s.index.variables()) > 1 else LOAD_VECTOR
        return POSITION if isinstance(s, Indirect) else 0

    return sum(map(weight, loops.body))


def _alone(p: Producer, depends: Dependencies) -> bool:
    """Can the producer's store go? If not, reading it must cost no less than reading what it was made from."""
    return p.store.buffer not in depends.needed or len(p.loops.reads()) <= 1


def gathers(loops: LoopNest) -> bool:
    return any(isinstance(s, Indirect) for s in loops.body)


def _positions(loops: LoopNest) -> set[int]:
    """Statements that only compute where to read."""
    body = loops.body
    stores = (i for i, s in enumerate(body) if isinstance(s, Store))
    return set(range(len(body))) - set(needed(body, stores, lambda i: not isinstance(body[i], Indirect)))


def _reads_positions(loops: LoopNest) -> bool:
    """Does it gather at places that a tensor holds? (Those of a reflected or repeated edge are computed.)"""
    places = (i for i, s in enumerate(loops.body) if isinstance(s, Indirect))
    return any(isinstance(loops.body[i], Load) for i in needed(loops.body, places))


def _cheap(loops: LoopNest, loads: list[Load], p: Producer) -> bool:
    """By how often each element of the producer would be computed."""
    points = loops.numel.hint() * loops.rnumel.hint()
    unmasked = len({s.index for s in loads if s.mask is None})
    masked = {(s.index, s.mask): s for s in loads if s.mask is not None}  # lanes that are masked off cost little
    repeat: float = sum(max(1, points // _lanes(loops, s)) for s in masked.values())
    repeat += unmasked * points / max(1, p.loops.numel.hint())
    work = [s for s in p.loops.body if isinstance(s, (Op, Indirect))]
    matrices = sum(len(s.index.variables()) > 1 or len(p.loops.axes) < 2 for s in p.loops.loads())
    dear = len(p.loops.body) > MAX_OPS or matrices > MAX_LOADS
    dear = dear or _reads_positions(p.loops) or any(isinstance(s, Op) and s.op in EXPENSIVE for s in work)
    if repeat <= (1 if dear else 2):
        return True
    return not dear and len(work) <= MAX_OPS_REPEATED and len(p.loops.loads()) <= 2


def _lanes(loops: LoopNest, s: Load) -> int:
    """Points along the axes that a masked load's index or mask has: of a broadcast, fewer than there are."""
    if any(isinstance(a, Ref) for a in s.index.atoms()):
        return sys.maxsize
    tests = needed(loops.body, () if s.mask is None else (s.mask,))
    asked = {v for i in tests for e in stmt_exprs(loops.body[i]) for v in e.variables()}
    return max(1, product(v.size for v in asked | s.index.variables()).hint())


def replace_loads(loops: LoopNest, p: Producer) -> LoopNest:
    """``loops`` with every load of the producer's buffer replaced by its computation."""
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(loops.body):
        new = map_stmt(s, ids)
        if isinstance(new, Load) and new.buffer == p.store.buffer:
            ids[i] = _insert(b, p, new)
        else:
            ids[i] = b.add(new)
    origins = tuple(dict.fromkeys((*p.loops.origins, *loops.origins)))
    return replace(loops, body=decided(tuple(b.body)), origins=origins)


def without_selects(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Without each ``where m ...`` whose value matters only where ``m`` holds, since another selects by ``m`` later."""
    under: dict[int, set[int]] = {}  # per statement: the masks that hold wherever its value matters

    def used(i: int, masks: set[int]) -> None:
        under[i] = under[i] & masks if i in under else set(masks)

    same: dict[int, int] = {}
    for i in reversed(range(len(body))):
        s, mine = body[i], under.get(i, set())
        if isinstance(s, Op) and s.op == "where":
            m, a, b = s.args
            if m in mine:
                same[i] = a
            used(m, mine - {m})
            used(a, mine | {m})
            used(b, mine)
        else:
            for a in stmt_args(s):  # an access is made, and a position checked, whether its value matters or not
                used(a, mine if isinstance(s, (Op, Index)) else set())
    if not same:
        return body
    out = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(body):
        ids[i] = ids[same[i]] if i in same else out.add(map_stmt(s, ids))
    return eliminate_dead(tuple(out.body))


def _insert(b: BodyBuilder, p: Producer, load: Load) -> int:
    """The producer's body at the element that ``load`` reads; returns the position of the value."""
    env = _axes_at(load.index, p, *narrowed(b, load.mask))
    ids: dict[int, int] = {}
    known = _known(p.loops, env) if load.mask is not None and gathers(p.loops) else set()
    for i, s in enumerate(p.loops.body):
        if isinstance(s, Store):
            if s == p.store:
                value = ids[s.value]
                break
            continue
        if isinstance(s, Indirect) and load.mask is not None and s.arg not in known:  # in range, where it is not read
            ids[s.arg] = b.op("where", load.mask, ids[s.arg], b.const(0, torch.int64))
        new = map_stmt(s, ids, env)
        if isinstance(s, Load) and isinstance(new, Load) and load.mask is not None and not _small(s, env):
            mask = load.mask if new.mask is None else b.op("and", load.mask, new.mask)
            new = replace(new, mask=mask)
        ids[i] = b.add(new)
    if load.mask is None:
        return value
    return b.op("where", load.mask, value, b.const(load.other, b.dtype(value)))


def _known(loops: LoopNest, env: Exprs) -> set[int]:
    """Statements whose value, where a mask does not hold, is one that they have elsewhere: computed from coordinates
    that are in range in any case."""
    out: set[int] = set()
    for i, s in enumerate(loops.body):
        if isinstance(s, Load):
            if _small(s, env):
                out.add(i)
        elif all(_in_range(v, env) for e in stmt_exprs(s) for v in e.variables()) and out.issuperset(stmt_args(s)):
            out.add(i)
    return out


def _in_range(v: Var, env: Exprs) -> bool:
    return v in env and nonneg(env[v]) and nonneg(v.size - 1 - env[v])


def _small(load: Load, env: Exprs) -> bool:
    """Is it an element of a vector, such as a norm's weights, that can be read whatever the mask? Loads for several
    masks are then one."""
    walked = load.index.variables()
    if load.mask is not None or len(walked) > 1 or load.index.atoms() - set(walked):
        return False
    return all(_in_range(v, env) for v in walked)


def _axes_at(index: Expr, p: Producer, narrow: Exprs, widen: Exprs) -> Exprs:
    """The producer's variables as functions of the consumer's, for the element at ``index``."""
    env: Exprs = {a.var: expr(0) for a in p.loops.axes if a.size == 1}
    rest = index.subs(narrow) - p.start
    for n, (var, stride, size) in enumerate(p.strides):
        quotient = rest // stride
        env[var] = (quotient if n == 0 or size == 0 else quotient % size).subs(widen)
        rest = rest % stride
    return env
