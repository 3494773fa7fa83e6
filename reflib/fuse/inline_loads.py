"""Cheap producers, computed again where they are read.

``cat([a + 1, b * 2])`` reads two buffers at other elements than they were written at, so it has no iteration space in
common with the kernels that make them. But ``a + 1`` costs nothing to compute again: the load becomes the producer's
body (``producers``).

A pooling reads several elements of its input per result. Its producer is computed again for each of them where that is
less work than to store the input and read it back: ``avg_pool(relu(bn(x)))`` is one kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..ir.expr import Expr, Ref, Var, expr, nonneg, product
from ..ir.instructions import INSTRUCTIONS, LOAD, PER_BYTE, weight, work_of
from ..ir.loops import Const, Indirect, Load, LoopNest, Op, Reduce, Store, stmt_exprs
from ..ir.program import Extern, Node, Program
from ..ir.transforms import divisions, needed, varying
from ..options import Options
from ..target import Target
from .decided import Exprs, held, joined
from .dependencies import Dependencies, dependencies, remove_dead
from .legality import Cluster, common_space, single
from .places import LAUNCH
from .producers import Producer, TooLong, gathers, make_producer, makes_all, places, replaced
from .result import Fused, Reason
from .shared_parts import together
from .split import row_major

MAX_OPS = 24  # statements of a producer that is computed twice, or that others are joined to
MAX_OPS_ONCE = 60  # ... that is computed no more often than before
MAX_OPS_REPEATED = 6  # ... more than twice as often as before
MAX_LOADS = 4  # ... of matrices, of one computed twice: vectors, such as a norm's weights, are read from cache
MAX_BODY = 240  # statements a consumer may grow to
NEIGHBOURS = 4  # elements of a row that a thread has, at least
MAX_TEXT = 1500  # characters of an index with // and %, which double per level where bounds prove nothing
DEEPEST = 32  # producers, each in the next, that are asked for one of them
MAX_MOVES = 4  # paddings and concatenations, one after another, that are looked through
SELECTS = {"where", "and", "or", "not", "lt", "le", "gt", "ge", "eq", "ne"}
EXPENSIVE = frozenset(INSTRUCTIONS)
NATIVE = {"rsqrt", "exp", "exp2", "sigmoid"}  # of instructions alone
Loads = list[tuple[tuple[Expr, ...], bool, float]]
Place = tuple[int, tuple[Expr, ...], float]  # the reader, where, how much


@dataclass(frozen=True)
class _Work:
    """What the questions below are about. ``nodes`` and ``readers``: with what was inlined until now. ``near``: of each
    node, the producers that it can be grouped with; ``whole``, ``again``, ``alone``: what was asked of a producer."""

    program: Program
    nodes: list[Node]
    depends: Dependencies
    gpu: bool
    readers: dict[str, set[int]]
    calls: list[int]  # per node: the most calls one after another that it waits for
    producers: dict[str, Producer] = field(default_factory=dict)
    near: dict[int, set[str]] = field(default_factory=dict)
    whole: dict[str, tuple[Producer, list[Producer]]] = field(default_factory=dict)
    again: dict[str, bool] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # for one of these, the next is asked for
    alone: dict[str, Cluster] = field(default_factory=dict)
    loads: dict[tuple[int, str], tuple[LoopNest, int, Loads]] = field(default_factory=dict)
    pairs: dict[tuple[int, int], bool] = field(default_factory=dict)  # of one that reads the other's result: alike?

    def reads_no_more(self, position: int, name: str) -> None:
        """And a producer that nothing reads any more reads nothing either."""
        self.readers[name].discard(position)
        p = self.producers.get(name)
        if p is not None and not self.readers[name] and name not in self.depends.needed and len(p.loops.stores()) == 1:
            for read in p.loops.reads():
                if p.position in self.readers.get(read, ()):
                    self.reads_no_more(p.position, read)


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


def _producer(position: int, loops: LoopNest, store: Store, depends: Dependencies) -> Producer | None:
    if loops.reduced or any(isinstance(s, Reduce) for s in loops.body):
        return None
    if len(loops.body) - len(_positions(loops)) > MAX_OPS_ONCE + len(loops.stores()):
        return None
    if store.reduce or len(depends.writers[store.buffer]) != 1 or set(loops.reads()) & set(loops.writes()):
        return None
    return make_producer(position, loops, store)


def _inline_into(loops: LoopNest, position: int, work: _Work) -> LoopNest:
    """``loops`` with every load replaced that should be, loads in inlined bodies included. What gathers comes last: by
    then all loads of it are there, of which more than one would repeat it."""
    keep, own, longest = set[str](), None, _longest(loops)
    near = work.near[position] = set()
    while True:
        names = [n for n in loops.reads() if n in work.producers and n not in keep]
        if not names:
            return loops
        name = min(names, key=lambda n: gathers(work.producers[n].loops))
        own = own or single(position, loops, work.depends)
        if _groups(own, name, work):  # as most can: this is asked first
            near.add(name)
            keep.add(name)
            continue
        for p in _forms(name, position, work):
            if not _should_inline(loops, position, p, work):
                continue
            try:
                inlined = replaced(loops, p, gpu=work.gpu, longest=max(MAX_TEXT, longest))
            except TooLong:
                continue
            length = _longest(inlined)
            if length > max(MAX_TEXT, longest) or len(inlined.body) > MAX_BODY:
                continue
            for read in p.loops.reads():
                work.readers.setdefault(read, set()).add(position)
            work.reads_no_more(position, name)
            work.nodes[position] = loops = inlined
            own, longest = None, length
            break
        else:
            keep.add(name)


def _groups(own: Cluster, name: str, work: _Work) -> bool:
    """Can the producer be grouped with ``own``, a consumer?"""
    if name not in work.alone:
        p = work.producers[name]
        work.alone[name] = single(p.position, p.loops, work.depends)
    return not isinstance(common_space(work.alone[name], own), Reason)


def _forms(name: str, position: int, work: _Work) -> Iterator[Producer]:
    """A producer as it is inlined: with those in it, unless what these read is written before ``position``; and
    alone, unless it is dear on a GPU."""
    whole, parts = _whole(p := work.producers[name], work)
    written = (work.depends.written_between(b, q.position, position + 1) for q in parts for b in q.loops.reads())
    if usable := not any(written):
        yield whole
    dear = any(isinstance(s, Op) and s.op in EXPENSIVE for s in whole.loops.body)
    if not (usable and work.gpu and dear):
        yield p


def _longest(loops: LoopNest) -> int:
    """Characters of the longest index with // or %."""
    indices = {e for s in loops.body for e in stmt_exprs(s)}
    return max((len(str(e)) for e in indices if divisions(e)), default=0)


def _whole(p: Producer, work: _Work) -> tuple[Producer, list[Producer]]:
    """The producer with the producers in it that grouping would fuse with it (for which no call is waited between), and
    these: a chain is one computation, and the masks of the loads that it replaces are applied once."""
    name = p.store.buffer
    if name not in work.whole:
        parts: dict[str, Producer] = {}
        size, most = len(p.loops.body), MAX_BODY if work.gpu else MAX_OPS
        todo = [n for n in p.loops.reads() if n in work.near[p.position]]
        while todo:
            q = work.producers[read := todo.pop()]
            if read in parts or work.calls[q.position] != work.calls[p.position] or size + len(q.loops.body) > most:
                continue
            twice = _reads_positions(q.loops) and len(work.readers[read]) > 1  # under two masks, it would be two
            if any(work.depends.written_between(b, q.position, p.position + 1) for b in q.loops.reads()):
                continue  # (an input that is written, perhaps by ``p``: what is there now is another value)
            if not twice and _alone(q, work.depends) and _moves_less(p.loops, q, work):
                parts[read] = q
                size += len(q.loops.body)
                todo += [n for n in q.loops.reads() if n in work.near[q.position]]
        try:
            longest = 4 * MAX_TEXT
            loops = replaced(p.loops, *parts.values(), gpu=work.gpu, longest=longest) if parts else p.loops
        except TooLong:
            loops, parts = p.loops, {}
        store = next(s for s in loops.stores() if s.buffer == name)
        work.whole[name] = replace(p, loops=loops, store=store), list(parts.values())
    return work.whole[name]


def _should_inline(loops: LoopNest, position: int, p: Producer, work: _Work) -> bool:
    loads = [s for s in loops.loads() if s.buffer == p.store.buffer]
    if any(work.depends.written_between(b, p.position, position + 1) for b in p.loops.reads()):
        return False
    positions = [s for s in p.loops.body if isinstance(s, Indirect)]
    if not positions and len(loops.body) + len({s.index for s in loads}) * _repeated(p.loops)[1] > MAX_BODY:
        return False
    if not _moves_less(loops, p, work):
        return False
    row = [a.var for a in loops.axes if a.size != 1][-1:]  # (which has one number, and is long enough to share it)
    long = row and row[0].size.hint() >= 2 * NEIGHBOURS and not any(s.index.has(row[0]) for s in loads)
    once = not _reads_positions(p.loops) or long and len({s.index for s in loads}) == 1 or _one_row(loads, p)
    weighed = work.gpu and work.again.get(p.store.buffer) and once
    if not weighed and not _cheap(loops, loads, p):
        return False
    if any(s.mask is not None for s in loads) and not all(nonneg(s.size - 1) for s in positions):
        return False
    return _alone(p, work.depends)


def _moves_less(loops: LoopNest, p: Producer, work: _Work) -> bool:
    """Is the producer's result better computed again by its reader ``loops`` than stored and read?

    Where it is stored in any case, if that takes fewer bytes. Else if it is better computed again by all of its readers
    (``_again``), or where a result is small beside a launch, and so is the consumer's work."""
    buffers, name = work.program.buffers, p.store.buffer
    size, points = buffers[name].nbytes.hint(), p.loops.numel.hint()
    if _stored(p, work):
        read = [buffers[b] for b in set(p.loops.reads()) - set(loops.reads())]
        bytes_read = sum(min(b.nbytes.hint(), points * b.dtype.itemsize) for b in read)
        in_any_case = any(b.kind != "temp" for b in read)  # one is in memory: an input
        return bytes_read < size or in_any_case and bytes_read == size
    if name not in work.again:
        if len(work.asked) == DEEPEST:
            return False
        work.asked.append(name)
        work.again[name] = _again(work.producers[name], work)
        work.asked.pop()
    done = (work_of(loops) + work_of(p.loops)) * (loops.numel * loops.rnumel).hint() / PER_BYTE if work.gpu else 0
    return work.again[name] or 2 * size <= LAUNCH[work.gpu] // 10 and done <= LAUNCH[work.gpu] // 4


def _again(p: Producer, work: _Work) -> bool:
    """Are fewer bytes moved if every reader computes the producer's result again, than if all read it?

    A result of S bytes, computed from L, of which n kernels read all (or parts that amount to that), at m places:
    stored, L + S + n S; computed again, n L, and on a GPU m times the work, in what is moved meanwhile. (A kernel
    computes ``p`` and ``p.roll(1)`` from the same bytes, each by itself. A recurrence would compute all steps before in
    every step; in a residual network each block would compute all blocks before it.) For one reader at one place that
    is always less, unless it reads each result often and then computes longer than memory moves its bytes. Readers are
    one kernel if they may be and none waits for another in between; of L, what they read in any case is free. The
    answer is one for all readers: what one of them reads is stored, for all of them."""
    buffers, name, points = work.program.buffers, p.store.buffer, max(1, p.loops.numel.hint())
    kernels: dict[tuple[int, int, int], float] = {}  # readers that may become one kernel, by how much they read
    had: dict[tuple[int, int, int], set[str]] = {}  # ... and what else they read
    lanes: dict[tuple[object, tuple[Expr, ...]], float] = {}  # that compute it, masked off or not
    places: dict[tuple[object, tuple[Expr, ...]], float] = {}  # ... which computes once what they read at one place
    for r, at, share in sorted(_places(name, points, work, known={}), key=lambda place: place[0]):
        node = work.nodes[r]
        alike = work.calls[r], (node.numel * node.rnumel).hint() if isinstance(node, LoopNest) else 0
        first = (k[2] for k in kernels if k[:2] == alike and not _waits(r, k[2], work))
        key = (*alike, next(first, r))
        kernels[key] = min(1, kernels.get(key, 0) + share)
        had[key] = had.get(key, set()) | _had(r, name, work)
        places[key, at], lanes[key, at] = share, max(share, alike[1] / points)
    n, m = sum(kernels.values()), sum(places.values()) + (name in work.depends.needed)
    if n <= 1 and m <= 1:
        return True
    m = sum(lanes.values()) + (name in work.depends.needed)
    whole = _whole(p, work)[0].loops
    made = {s.buffer for s in whole.loads() if not any(isinstance(a, Ref) for a in s.index.atoms())}
    own = all(at for _, at in places) and all(buffers[b].kind != "temp" for b in made)  # a kernel more for it alone
    stored = (n + (name not in work.depends.needed)) * buffers[name].nbytes.hint()
    if work.gpu and own and len(places) == 1 and _hidden(work.nodes[r], name, whole, work):
        return True
    repeated, statements = _repeated(whole)
    light = max(repeated, statements) <= MAX_OPS_REPEATED  # a broadcast is read often, and is there once
    if work.gpu and (min(m, len(places)) if light else m) * statements > MAX_BODY and not gathers(whole):
        return False
    size = lambda b: min(buffers[b].nbytes.hint(), points * buffers[b].dtype.itemsize)  # noqa: E731
    read = [(part, sum(size(b) for b in set(whole.reads()) - had[k])) for k, part in kernels.items()]
    again = sum(part * more for part, more in read) * max(0, n - 1) / n
    again += max(0, m - 1) * (repeated - LOAD) * points / PER_BYTE if work.gpu else 0
    return again < stored + (light and own) * LAUNCH[work.gpu]


def _hidden(reader: Node, name: str, whole: LoopNest, work: _Work) -> bool:
    """Does memory take as long as a reader that computes the producer of ``name``, a number per row, for each element?
    (For those of a row that a thread has, once; not the functions of a library: LLVM does not see that calls are one.)
    """
    if not isinstance(reader, LoopNest) or not whole.loads():
        return False
    row = [a.var for a in reader.axes if a.size != 1][-1:]
    if any(s.index.has(v) for s in reader.loads() if s.buffer == name for v in row):
        return False
    points, added = (reader.numel * reader.rnumel).hint(), [s.buffer for s in reader.stores() if s.reduce]
    calls = sum(weight(s) for s in whole.body if isinstance(s, Op) and s.op in EXPENSIVE - NATIVE)
    each = work_of(reader) + calls + (work_of(whole) - calls) / NEIGHBOURS
    used = [work.program.buffers[b] for b in (*reader.reads(), *reader.writes(), *added)]
    return each * points <= PER_BYTE * sum(min(b.nbytes.hint(), points * b.dtype.itemsize) for b in used)


def _waits(reader: int, first: int, work: _Work) -> bool:
    """Does ``reader`` need a result of the node ``first`` that goes through what it cannot be one kernel with?"""
    todo, seen = [(reader, False)], set[tuple[int, bool]]()
    while todo:
        i, apart = todo.pop()
        node = work.nodes[i]
        for name in node.reads() if isinstance(node, LoopNest) else ():
            w = work.depends.last_writer(name, i)
            if w is None or w < first:
                continue
            at = w, apart or not _together(w, i, work)
            if at == (first, True):
                return True
            if at not in seen:
                seen.add(at)
                todo.append(at)
    return False


def _had(reader: int, name: str, work: _Work) -> set[str]:
    """The buffers that a reader of ``name`` reads beside it, or that these are computed from, elementwise."""
    todo, found = [reader], set[str]()
    while todo and len(found) < DEEPEST:
        i = todo.pop()
        node = work.nodes[i]
        if isinstance(node, LoopNest) and (i == reader or not node.reduced):
            new = set(node.reads()) - found - {name}
            found |= new
            todo += [w for b in new if (w := work.depends.last_writer(b, i)) is not None]
    return found


def _together(maker: int, reader: int, work: _Work) -> bool:
    """Can the two nodes be one kernel?"""
    if (maker, reader) not in work.pairs:
        work.pairs[maker, reader] = together(work.nodes, work.depends, maker, reader)
    return work.pairs[maker, reader]


def _places(
    name: str, points: int, work: _Work, known: dict[object, Place | None], at: tuple[Expr, ...] = (), deep: int = 0
) -> Iterator[Place]:
    """What reads a producer's result, where, in terms that two loop nests have in common, and how much of it (1: all).
    What only moves elements (a padding, a concatenation) is looked through, and so is what reads it at one place
    and is itself read at one, in the end: it becomes a part of its reader, and is computed wherever that asks for it.
    (A window's gradient reads a weight's sum where it stands. The sum of nine windows' gradients reads that sum at nine
    places.) ``known``: the one place where what is read at a place is read in the end, if it is one."""
    for r in work.readers.get(name, ()):
        reader = work.nodes[r]
        if not isinstance(reader, LoopNest):
            yield r, at, 1
            continue
        n, loads = _loads(name, r, reader, work)
        places: dict[tuple[Expr, ...], float] = {}
        for there, whole, part in loads:
            places[at if n == points and whole else (*at, *there)] = n * part / points
        if len(at) < MAX_MOVES and deep < DEEPEST and _passed_on(reader, work.depends):
            moves, made = _moves(reader), reader.writes()[0]
            for place, share in places.items():
                on = _places(made, n, work, known, place, deep + 1) if moves or len(places) == 1 else iter(())
                if moves:
                    yield from ((q, there, part * share) for q, there, part in on)
                    continue
                if (made, place) not in known:
                    end = next(on, None)
                    known[made, place] = end if end is not None and all(e[:2] == end[:2] for e in on) else None
                q, there, part = known[made, place] or (r, place, 1)
                yield q, there, part * share
        else:
            for place, share in places.items():
                yield r, place, share


def _loads(name: str, r: int, reader: LoopNest, work: _Work) -> tuple[int, Loads]:
    """The points of a reader, and its loads of a buffer: where, in terms that two loop nests have in common; is it
    where the reader stands? how much of the points? (Of a chain of producers, each asks for all that come behind.)"""
    known = work.loads.get((r, name))
    if known is None or known[0] is not reader:
        axes = [a for a in reader.axes if a.size != 1]
        numbered: Exprs = {a.var: expr(Var(f"axis{k}", a.size)) for k, a in enumerate(axes)}
        whole = row_major(axes)
        found: Loads = []
        for s in (s for s in reader.loads() if s.buffer == name):
            own = [expr(r)] if any(isinstance(a, Ref) for a in s.index.atoms()) else []  # where its own values say
            found.append(((s.index.subs(numbered), *own), s.index == whole, held(reader.body, s.mask)))
        work.loads[r, name] = known = reader, max(1, (reader.numel * reader.rnumel).hint()), found
    return known[1], known[2]


def _passed_on(loops: LoopNest, depends: Dependencies) -> bool:
    """Is it elementwise, and its result one tensor for others to read?"""
    return not loops.reduced and len(loops.writes()) == 1 and loops.writes()[0] not in depends.needed


def _moves(loops: LoopNest) -> bool:
    """Does it store what it reads, at other elements?"""
    ops = {s.op for s in loops.body if isinstance(s, Op)}
    return ops <= SELECTS


def _repeated(loops: LoopNest) -> tuple[int, int]:
    """Instructions per point, and statements, of what differs from element to element: not those that few axes have, of
    which the readers of a window share one."""
    level = [varying(loops.body, [a.var]) for a in loops.axes if a.size != 1]
    own = [s for i, s in enumerate(loops.body) if not isinstance(s, (Const, Store)) and all(x[i] for x in level)]
    return sum(map(weight, own)), len(own)


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


def _alone(p: Producer, depends: Dependencies) -> bool:
    """Can the producer's store go? If not, reading it must cost no less than reading what it was made from."""
    return p.store.buffer not in depends.needed or len(p.loops.reads()) <= 1


def _positions(loops: LoopNest) -> set[int]:
    """Statements that only compute where to read."""
    body = loops.body
    stores = (i for i, s in enumerate(body) if isinstance(s, Store))
    return set(range(len(body))) - set(needed(body, stores, lambda i: not isinstance(body[i], Indirect)))


def _reads_positions(loops: LoopNest) -> bool:
    """Does it gather at places that a tensor holds? (Those of a reflected or repeated edge are computed.)"""
    places = (i for i, s in enumerate(loops.body) if isinstance(s, Indirect))
    return any(isinstance(loops.body[i], Load) for i in needed(loops.body, places))


def _one_row(loads: list[Load], p: Producer) -> bool:
    """Do all ``loads`` read elements of the rows that one position of a tensor chooses?"""
    body = p.loops.body
    chosen = needed(body, [i for i, s in enumerate(body) if isinstance(s, Indirect)])
    along = {v for i in chosen for e in stmt_exprs(body[i]) for v in e.variables()}
    rows = {tuple(at[v] for v in sorted(along, key=str)) for s in loads for at in [places(s.index, p)]}
    return len(along) < sum(a.size != 1 for a in p.loops.axes) and len(rows) == 1


def _cheap(loops: LoopNest, loads: list[Load], p: Producer) -> bool:
    """By how often each element of the producer would be computed."""
    points = loops.numel.hint() * loops.rnumel.hint()
    unmasked = len({s.index for s in loads if s.mask is None})
    masked = {(s.index, s.mask): s for s in loads if s.mask is not None}  # lanes that are masked off cost little
    repeat: float = sum(max(1, points // _lanes(loops, s)) * joined(loops.body, s.mask) for s in masked.values())
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
