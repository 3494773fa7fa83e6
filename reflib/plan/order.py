"""An order of the nodes that needs less memory at its peak, where nothing gets slower.

Nodes arrive in a legal order. Each one allocates what it writes first, and frees what nothing reads after it; the peak
depends on the order alone, as long as dependencies are kept. Finding the best order is NP-hard, so the search is
bounded, by a number of nodes looked at that grows with the program (``_LOOKS``), and says what it knows: no order can
have less than the largest node needs for itself, nor less than the outputs together (``Order.least``). It tries two
that are made by a rule (``Lifetimes.late`` and ``hills``), and then depth first only orders below the best peak so far,
no set of finished nodes twice. A node that frees at least what it allocates, and fits, is run without alternatives:
whatever order follows, it would be no worse with the node moved to its front. Where the search ends before its bound,
the best order found is the best there is.

Nothing gets slower: the kernels are the same; what waits for a device, moves data between two, or has an effect keeps
its place among all others; and an order is refused that reads more bytes again, so late that a cache has lost them,
than it saves.

NB: TorchInductor (``reorder_for_peak_memory``) takes the best of three greedy orders, and does not say how good it is.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..capture.saved import is_callers
from ..fuse.dependencies import dependencies, has_effect
from ..ir.loops import Load, LoopNest, Store
from ..ir.program import Choice, Extern, Node, Program, Template, Variants, iter_views, walk
from ..lower.symbols import Symbols
from ..options import Options
from ..timing import uncollected
from .memory import made
from .plan import STEPS, can_overwrite, escaping, is_kernel, steps_of
from .steps import Branch

_LOOKS = 3000, 6  # nodes looked at in the search: at least, and per node of the program
WORTH = 0.01  # of the peak: an order that saves less is not worth another order than the user's
_CACHE = 32 << 20  # bytes touched since: what was written before is not in a cache any more
_DEEP = 16  # nodes of a hill
Rank = tuple[int, int, int]


class Own(NamedTuple):
    """The storage that an input is in, and its bytes. ``given``: a kernel may store over it (``plan.taken``)."""

    storage: Any
    bytes: int
    given: bool = False


# Inputs whose memory is free after their last use, by name. Several may be views of one storage.
Owned = Mapping[str, Own]


@dataclass(frozen=True)
class Order:
    """sequence: positions in the given program.   peak, given: bytes at the peak, of this and of the given order.
    least: that no order can have less than.   whole: have all orders been ruled out that need less?"""

    sequence: tuple[int, ...]
    peak: int
    given: int
    least: int
    whole: bool

    @property
    def optimal(self) -> bool:
        return self.whole or self.peak <= self.least

    def __str__(self) -> str:
        if self.optimal:
            return f"no order of the steps needs less than {self.peak:,} bytes at its peak"
        return f"{self.peak:,} bytes at the peak; no order needs less than {self.least:,}; not all orders were tried"


def ordered(s: Any) -> Program:
    """Of Stages, ``s.scheduled`` in the order that is best."""
    assert s.scheduled is not None
    if not s.options.reorder_for_peak_memory:
        return s.scheduled
    return in_order(s.scheduled, owned(s))


@uncollected()
def in_order(program: Program, mine: Owned) -> Program:
    """``program`` in the best order. Of the gradients that a backward is given the caller may keep references, and then
    they are not free once they are read: of the two best orders, that which needs less in both cases together. What
    follows the step that forms the peak is ordered by itself, too: of a result, too, a reference may be kept."""
    given = [b for b in mine if b.startswith("tangents_")]
    first = Lifetimes(program, mine)
    ways = [first, first.keeping(given)] if given else [first]
    best, m = min(((_best(w).sequence, w) for w in ways), key=lambda order: sum(w.peak(order[0]) for w in ways))
    out, at = _in(program, best), m.highest(best)[1] + 1
    return _in(out, (*range(at), *(at + i for i in _best(m.rest(best, at)).sequence)))


def _in(program: Program, sequence: Sequence[int]) -> Program:
    if list(sequence) == sorted(sequence):
        return program
    return replace(program, nodes=tuple(program.nodes[i] for i in sequence))


def owned(s: Any) -> Owned:
    """Inputs that live no longer than the program reads them: what the forward computed and saved for the backward.
    Given are those that AOTAutograd donates, which are in no storage of a result or an argument, nor here of another
    saved one. (None to a CUDA graph, which has them at fixed places, or to an arena; C++ cannot ask who holds one.)"""
    if s.graph is None or s.graph.name != "backward":
        return {}
    values = {n.name: n.meta.get("val") for n in s.graph.nodes if n.op == "placeholder"}
    storages = {name: v.untyped_storage() for name, v in values.items() if isinstance(v, torch.Tensor)}
    callers = {storages[n.name]._cdata for n in s.graph.nodes if n.name in storages and is_callers(n)}
    symbols = Symbols(s.graph.ranges)

    def size(n: Any) -> int:
        return symbols.expr(n).hint() if symbols.expressible(n) else n.node.hint or 0

    o, views = s.options, Counter(x._cdata for x in storages.values())
    takes = o.inplace_buffers and o.wrapper == "python" and not (o.arena or o.cuda_graphs or o.check_nan)
    donated = {n.name for n in s.graph.nodes if takes and "donated" in n.meta}
    return {
        name: Own(x._cdata, size(x.nbytes()), name in donated and views[x._cdata] == 1)
        for name, x in storages.items() if x._cdata not in callers
    }  # fmt: skip


def search(program: Program, owned: Owned = MappingProxyType({})) -> Order:
    """The best order that was found."""
    return _best(Lifetimes(program, owned))


def _best(m: "Lifetimes") -> Order:
    given = tuple(range(m.n))
    before = peak = m.peak(given)
    least, orders, whole = m.least, [(peak, given)], False  # each needs less than the one before it
    if peak > least:
        for make in (m.late, lambda: m.hills(True), m.hills):
            if peak > least and (now := m.peak(other := make())) < peak:
                orders.append((peak := now, other))
        looks = _LOOKS[0] + _LOOKS[1] * len(given)
        while peak > least and not whole:
            found, looks = m.below(peak, looks)
            whole = found is None and looks > 0
            if found is None:
                break
            orders.append((peak := m.peak(found), found))
    worth = (o for o in reversed(orders) if before - o[0] > WORTH * before)
    best = next((o for o in worth if m.far(o[1]) - m.far(given) <= before - o[0]), orders[0])
    return Order(best[1], best[0], before, least, whole and best is orders[-1])


class Lifetimes:
    """What is alive, while nodes run in any legal order. Buffers and nodes are numbers. ``score[i]``: bytes more after
    node i than before it, if it ran now."""

    def __init__(self, program: Program, owned: Owned):
        self.program, self.nodes, self.pinned = program, program.nodes, escaping(program)
        self.free = {b.name for b in program.buffers.values() if b.kind == "temp"}
        self.free |= {b for b, own in owned.items() if own.given}
        self.random = Random(0)
        self.n = len(program.nodes)
        storage: dict[str, Any] = {name: name for name, b in program.buffers.items() if b.kind == "temp"}
        storage |= {name: owned[name].storage for name in program.buffers if name in owned}
        first = {storage[name]: program.buffers[name] for name in reversed(storage)}  # views of one storage count once
        kept = list(reversed(first.values()))
        place = {key: k for k, key in enumerate(reversed(first))}
        self.number = number = {name: place[key] for name, key in storage.items()}
        self.size = [owned[b.name].bytes if b.name in owned else b.nbytes.hint() for b in kept]
        reads, writes = [n.reads() for n in program.nodes], [n.writes() for n in program.nodes]
        touched = ((*r, *w, *_aliases(n)) for r, w, n in zip(reads, writes, program.nodes))
        self.touch = [list(dict.fromkeys(number[b] for b in t if b in number)) for t in touched]
        self.work = [_workspace(n, program) for n in program.nodes]
        self.names = [b.name for b in kept]
        self.outputs = {number[o] for o in program.output_buffers() if o in number}
        self.born = [0] * (self.n + 1)
        used = {b: i for i in reversed(range(self.n)) for b in self.touch[i]}  # by which node first
        self.start = sum(self.size[b] for b in used if kept[b].name in owned)
        for b, at in used.items():
            self.born[at] += 0 if kept[b].name in owned else self.size[b]
        self.storage = [(b.device, b.dtype, b.extent) for b in kept]
        self.over = [self._over(n, number, r, w) for n, r, w in zip(program.nodes, reads, writes)]
        self.before = _before(program)
        self.after: list[list[int]] = [[] for _ in range(self.n)]
        for i, earlier in enumerate(self.before):
            for j in earlier:
                self.after[j].append(i)
        self.begin([b in self.outputs for b in range(len(kept))])

    def _over(self, node: Node, number: dict[str, int], reads: list[str], writes: list[str]) -> list[int]:
        """Buffers whose storage ``node`` takes over if it is the last to read them."""
        taken: list[str] = []
        if not is_kernel(node):
            return []
        free = [b for b in reads if b in number and b not in self.pinned and b in self.free]
        for new in writes:
            for old in free if new in number else ():
                same = old != new and self.storage[number[old]] == self.storage[number[new]]
                if same and old not in taken and can_overwrite(node, old, new):
                    taken.append(old)
                    break
        return [number[a] for a in taken]

    @property
    def least(self) -> int:
        """Bytes that no order can have less than."""
        size = self.size.__getitem__
        alone = (sum(map(size, t)) + w - sum(map(size, o)) for t, w, o in zip(self.touch, self.work, self.over))
        return max(self.start, sum(map(size, self.outputs)), *alone)

    @cached_property
    def moved(self) -> list[list[int]]:
        """Bytes of each in ``touch``."""
        pairs = ((mine, _parts(n, self.program)) for mine, n in zip(self.touch, self.nodes))
        return [[min(self.size[b], part.get(self.names[b], self.size[b])) for b in mine] for mine, part in pairs]

    def rest(self, sequence: Sequence[int], at: int) -> "Lifetimes":
        """What is left of ``sequence`` when ``at`` nodes have run, numbered as they follow one another."""
        self.reset()
        for i in sequence[:at]:
            self.run(i)
        other, todo = copy(self), sequence[at:]
        place = {i: k for k, i in enumerate(todo)}
        vars(other).pop("moved", None)
        other.n, other.start = len(todo), self.bytes
        other.nodes = tuple(self.nodes[i] for i in todo)
        other.touch, other.over = ([xs[i] for i in todo] for xs in (self.touch, self.over))
        other.work = [self.work[i] for i in todo]
        other.born = [*(self.born[i] for i in todo), 0]
        for name in ("before", "after"):
            setattr(other, name, [[place[j] for j in getattr(self, name)[i] if j in place] for i in todo])
        never = list(self.users)
        for b in (b for mine in other.touch for b in mine):
            never[b] -= 1
        other.begin(never)
        return other

    def keeping(self, names: Sequence[str]) -> "Lifetimes":
        """The same, but ``names`` are never free."""
        other = copy(self)
        more = {self.number[name] for name in names if name in self.number}
        other.begin([c + (b in more) for b, c in enumerate(self.never)])
        return other

    def begin(self, never: Sequence[int]) -> None:
        """Nothing has run yet. ``never``: of each buffer, users that never run."""
        self.never, self.count = never, list(never)
        self.left = [c * self.n for c in never]  # of one user that is left, its number
        for i, mine in enumerate(self.touch):
            for b in mine:
                self.count[b] += 1
                self.left[b] += i
        self.reset()

    def reset(self) -> None:
        self.users, self.last = list(self.count), list(self.left)
        self.score = list(self.born)
        for b, users in enumerate(self.users):
            if users == 1:
                self.score[self.last[b]] -= self.size[b]
        self.waiting = [len(b) for b in self.before]
        self.bytes = self.start

    def during(self, i: int) -> int:
        """Bytes while i runs, if it ran now."""
        over = sum(self.size[a] for a in self.over[i] if self.users[a] == 1)
        return self.bytes + self.born[i] + self.work[i] - over

    def run(self, i: int) -> None:
        self.bytes += self.score[i]
        for b in self.touch[i]:
            self.users[b] -= 1
            self.last[b] -= i
            if self.users[b] == 1:
                self.score[self.last[b]] -= self.size[b]
        for j in self.after[i]:
            self.waiting[j] -= 1

    def undo(self, i: int) -> None:
        for j in self.after[i]:
            self.waiting[j] += 1
        for b in reversed(self.touch[i]):
            if self.users[b] == 1:
                self.score[self.last[b]] += self.size[b]
            self.users[b] += 1
            self.last[b] += i
        self.bytes -= self.score[i]

    def peak(self, sequence: Sequence[int]) -> int:
        return self.highest(sequence)[0]

    def highest(self, sequence: Sequence[int]) -> tuple[int, int]:
        """The most bytes, and the first place in ``sequence`` where it is so many."""
        self.reset()
        most, at = self.bytes, 0
        for place, i in enumerate(sequence):
            if (now := self.during(i)) > most:
                most, at = now, place
            self.run(i)
        return most, at

    def late(self) -> tuple[int, ...]:
        """As given, but what makes more than it frees waits until something else needs it."""
        self.reset()
        wait = set()
        for i in range(self.n):
            if self.score[i] > 0:
                wait.add(i)
            self.run(i)
        out: dict[int, None] = {}
        for i in (*(i for i in range(self.n) if i not in wait), *sorted(wait)):
            stack = [i]
            while stack:
                earlier = [j for j in self.before[stack[-1]] if j not in out]
                if not earlier:
                    out[stack.pop()] = None
                stack += sorted(earlier, reverse=True)
        return tuple(out)

    def hills(self, given: bool = False) -> tuple[int, ...]:
        """Of all that may run, with what follows from it alone: what ends no higher than it began, the lowest first;
        else what needs most beyond what it leaves, since last it would stand on what all others have left. ``given``:
        else the next one as given."""
        self.reset()
        known: dict[int, tuple[Rank, list[int]]] = {}
        through: dict[int, set[int]] = {}  # buffer -> those whose hills touch it
        stops: dict[int, set[int]] = {}  # node -> those whose hills end before it, since it waits for others too
        heap: list[tuple[Rank, int]] = []
        out: dict[int, None] = {}
        new = {i for i in range(self.n) if not self.waiting[i]}
        while new or known:
            for i in new:
                known[i] = self._hill(i, stops, given)
                heapq.heappush(heap, (known[i][0], i))
                for j in known[i][1]:
                    for b in self.touch[j]:
                        through.setdefault(b, set()).add(i)
            new = set()
            rank, i = heapq.heappop(heap)
            if i not in known or known[i][0] != rank:
                continue  # of before its hill changed
            for j in known[i][1][: -rank[2]]:
                self.run(j)
                out[j] = None
                known.pop(j, None)
                for k in self.after[j]:
                    if self.waiting[k] <= 1:  # (a hill may go on)
                        new |= stops.pop(k, set()) | (set() if self.waiting[k] else {k})
                for b in self.touch[j]:
                    if self.users[b] <= 2:  # (a hill may free it now)
                        new |= through.pop(b, set())
            new = {k for k in new if k not in out}
        return tuple(out)

    def _hill(self, i: int, stops: dict[int, set[int]], given: bool) -> tuple[Rank, list[int]]:
        """The rank of i, and what then may run, or then frees what i reads. The last of the rank's numbers, negative:
        where it is best to stop."""
        path: list[int] = []
        high, base, best = 0, self.bytes, (2, 0, 0)
        ready = [i]
        while ready and len(path) < _DEEP and best[0] > 0:
            j = min(ready, key=lambda j: (self.score[j], j))
            ready.remove(j)
            high = max(high, self.during(j) - base)
            self.run(j)
            path.append(j)
            net = self.bytes - base
            up = (1, i, -1) if given else (1, net - high, -len(path))
            best = min(best, (0, high, -len(path)) if net <= 0 else up)
            for k in self.after[j]:
                if self.waiting[k]:
                    stops.setdefault(k, set()).add(i)
                else:
                    ready.append(k)
            left = (self.last[b] for b in self.touch[j] if self.users[b] == 1)
            ready += {k for k in left if k < self.n and not self.waiting[k]}.difference(ready, path)
        for j in reversed(path):
            self.undo(j)
        return best, path

    def below(self, limit: int, looks: int) -> tuple[tuple[int, ...] | None, int]:
        """An order whose peak is below ``limit``, or None; and how many looks are left, 0 if it ended for that."""
        self.reset()
        key = [self.random.getrandbits(64) for _ in range(self.n)]
        done, seen = 0, set()  # sets of finished nodes, each as the exclusive or of their keys
        path: list[int] = []
        ready = [i for i in range(self.n) if not self.waiting[i]]
        stack = [(self._moves(ready, limit), ready)]
        while stack:
            moves, ready = stack[-1]
            if not moves:
                stack.pop()
                if path:
                    done ^= key[path[-1]]
                    self.undo(path.pop())
                continue
            i = moves.pop()
            if done ^ key[i] in seen:
                continue
            self.run(i)
            path.append(i)
            done ^= key[i]
            seen.add(done)
            if len(path) == self.n:
                return tuple(path), looks
            ready = [j for j in ready if j != i] + [j for j in self.after[i] if not self.waiting[j]]
            looks -= len(ready)
            if looks <= 0:
                return None, 0
            stack.append((self._moves(ready, limit), ready))
        return None, looks

    def _moves(self, ready: list[int], limit: int) -> list[int]:
        """What may run next, the best last."""
        fits = [i for i in ready if self.during(i) < limit]
        fits.sort(key=lambda i: (-self.score[i], -i))
        return fits[-1:] if fits and self.score[fits[-1]] <= 0 else fits

    def far(self, sequence: Sequence[int]) -> int:
        """Bytes read again after so many others that a cache does not hold them any more."""
        touched, far = 0, 0
        at: dict[int, int] = {}
        for i in sequence:
            for b, moved in zip(self.touch[i], self.moved[i]):
                if b in at and touched - at[b] > _CACHE:
                    far += moved
            touched += sum(self.moved[i])
            at |= dict.fromkeys(self.touch[i], touched)
        return far


def _parts(node: Node, program: Program) -> dict[str, int]:
    """Bytes of each buffer that it reads or writes, at most."""
    out: dict[str, int] = {}
    views = iter_views((node.args, node.kwargs, node.outputs)) if isinstance(node, Extern) else ()
    found: list[tuple[str, Any, int]] = [(v.buffer, (v.buffer, v), math.prod(e.hint() for e in v.shape)) for v in views]
    for p in node.variants[-1].kernel.parts if is_kernel(node) else ():
        if not isinstance(p, LoopNest):
            return {}
        points = (p.numel * p.rnumel).hint()
        found += [(s.buffer, (s.buffer, s.index), points) for s in p.body if isinstance(s, (Load, Store))]
    for name, count in {key: (name, count) for name, key, count in found}.values():
        out[name] = out.get(name, 0) + count * program.buffers[name].dtype.itemsize
    return out


def _aliases(node: Node) -> list[str]:
    return [v.buffer for v in iter_views(node.outputs)] if isinstance(node, Extern) else []


def _workspace(node: Node, program: Program) -> int:
    """What it holds beside its results while it runs, as its own steps have it."""
    if is_kernel(node):
        return sum(b.nbytes.hint() for b in node.variants[0].kernel.workspace if b.kind != "zeros")
    if not isinstance(node, Variants) or any(isinstance(n, (Choice, LoopNest, Template)) for n in walk([node])):
        return 0  # (what has no steps yet, before ``schedule``)
    own = STEPS.get(type(node).__name__)
    steps = steps_of(node) if own is None else own(node, program, Options())
    results = {b: program.buffers[b].nbytes.hint() for b in node.outputs}
    loop = getattr(node, "repeats", False)  # (whose results are there before)
    blocks = (made(s, program.buffers, results if loop else {}) for s in steps if isinstance(s, Branch))
    held = max((sum(block.values()) for block in blocks), default=0)
    return max(0, held - (0 if loop else sum(results.values())))


def _before(program: Program) -> list[set[int]]:
    """What each node must follow: by data, and nothing passes a node that the host or another device waits for."""
    before = [set(b) for b in dependencies(program).before]
    wall: int | None = None
    since: list[int] = []
    for i, node in enumerate(program.nodes):
        if wall is not None:
            before[i].add(wall)
        if _waited_for(program, node):
            before[i].update(since)
            wall, since = i, []
        else:
            since.append(i)
    return before


def _waited_for(program: Program, node: Node) -> bool:
    if not isinstance(node, Extern):
        return has_effect(node)
    devices = {program.buffers[b].device for b in (*node.reads(), *node.writes())}
    moves = len(devices) > 1 and "attention" not in str(node.target)  # (whose seeds are numbers of the host's)
    return node.effect or bool(node.symbols) or moves or communicates(node)


def communicates(x: Extern) -> bool:
    """Does it start a collective, or wait for one?"""
    arguments = getattr(getattr(x.target, "_schema", None), "arguments", ())
    names = ("_c10d_functional", "reflib.wait")
    return str(x.target).startswith(names) or any(a.name == "group_name" for a in arguments)
