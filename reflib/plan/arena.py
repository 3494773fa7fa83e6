"""``Options(arena=True)``: what only kernels touch lies in one allocation per device, at addresses known ahead.

A call then allocates once, of a size that is a formula of the dynamic sizes, and gives its kernels sums of an address
and an offset: no tensor is made for a buffer in the arena. Outside it stay, as tensors: results and what is saved for
the backward, what a call of PyTorch reads or returns, what loops and branches allocate, and kernels' own workspace.
The arena lives from the first buffer in it to the last, so the peak may be higher than with an allocation for each.

Offsets are assigned before any call as an allocator would: step by step, each buffer in the smallest free span that it
fits in at all sizes (proved with sizes from 0 on), else behind all others; what is freed is joined with free
neighbours. With time running backward as well, and what needs fewer bytes is taken. Two buffers share bytes only if
they never live at once. Offsets are multiples of ALIGN bytes.

NB: in TorchInductor (``memory_planning``, ``memory_pool="combined"``) buffers in a pool are tensors made by views.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..ir.bounds import nonneg
from ..ir.division import maximum
from ..ir.expr import Expr, Sym, expr
from ..ir.program import Buffer, Extern, Program, iter_views, symbols_in, walk
from .order import owned
from .regions import Repeat
from .steps import Alloc, Branch, Call, Free, Launch, Plan, Return, Step
from .taken import taking

ALIGN = 256  # bytes


@dataclass(frozen=True, slots=True)
class Arena(Alloc):
    """Allocate ``buffer``, of bytes. ``places``: buffers in it, and where they begin, in bytes."""

    places: tuple[tuple[str, Expr], ...] = ()


@dataclass
class Storage:
    """Buffers that take over one another's storage. first, last: positions of steps. at: bytes from the start."""

    buffers: list[str]
    first: int
    last: int
    size: Expr
    at: Expr = field(default_factory=lambda: expr(0))

    @property
    def end(self) -> Expr:
        return self.at + self.size

    def meets(self, other: Storage) -> bool:
        return self.first <= other.last and other.first <= self.last


def in_arena(s: Any) -> tuple[Program, Plan]:
    """Of Stages, the program and its plan, with an arena if the options say so (none with check_nan)."""
    plan = taking(s.scheduled, s.options, {b for b, own in owned(s).items() if own.given})
    return arena(s.scheduled, plan) if s.options.arena and not s.options.check_nan else (s.scheduled, plan)


def arena(program: Program, plan: Plan) -> tuple[Program, Plan]:
    """``plan`` with an Arena per device that has at least two buffers for one, and ``program`` with its buffer."""
    by_device: dict[torch.device, list[Storage]] = {}
    for storage in storages(program, plan, lambda chain, tensors: not tensors.intersection(chain)):
        by_device.setdefault(program.buffers[storage.buffers[0]].device, []).append(storage)
    buffers, steps = dict(program.buffers), list(plan.steps)
    before: dict[int, list[Step]] = {}
    after: dict[int, list[Step]] = {}
    placed: set[str] = set()
    for device, found in by_device.items():
        if len(found) < 2:
            continue
        name = "arena"
        while name in buffers:
            name += "_"
        buffers[name] = Buffer(name, torch.uint8, device, (assign(found),), (expr(1),))
        places = tuple((b, s.at) for s in found for b in s.buffers)
        placed.update(b for b, _ in places)
        before.setdefault(min(s.first for s in found), []).append(Arena(name, places=places))
        after.setdefault(max(s.last for s in found), []).append(Free(name))
    out: list[Step] = []
    for i, step in enumerate(steps):
        gone = isinstance(step, Alloc | Free) and step.buffer in placed
        out += [*before.get(i, ()), *(() if gone else (step,)), *after.get(i, ())]
    return replace(program, buffers=buffers), Plan(tuple(out))


def sizes_of_arenas(program: Program, plan: Plan) -> dict[str, str]:
    """Device -> the bytes of its arena, as a formula of the sizes."""
    found = (program.buffers[s.buffer] for s in plan.steps if isinstance(s, Arena))
    return {str(b.device): str(b.shape[0]) for b in found}


def assign(given: list[Storage]) -> Expr:
    """Set every ``at``; the bytes of the arena."""
    total, places = min((_Heap().packed(given, forward) for forward in (True, False)), key=lambda way: way[0].hint())
    for s, at in zip(given, places):
        s.at = at
    return total


@dataclass(eq=False, slots=True)
class _Span:
    """Bytes between two other spans (None: the arena's start, or what lies in nothing). ``key``: among the free ones;
    None: something lies in it."""

    at: Expr
    size: Expr
    before: _Span | None = None
    after: _Span | None = None
    key: tuple[int, int] | None = None


class _Heap:
    """Spans in the order of their addresses, from 0 to the end of the last one, which is not free."""

    def __init__(self) -> None:
        self.last: _Span | None = None
        self.free: dict[tuple[int, int], _Span] = {}
        self.keys: list[tuple[int, int]] = []  # of ``free``: (size at the hints, number), in order
        self.total, self.made = expr(0), 0

    def packed(self, given: list[Storage], forward: bool) -> tuple[Expr, list[Expr]]:
        """The bytes, and where each begins, with time as it runs or in reverse."""
        times = [(s.first, s.last) if forward else (-s.last, -s.first) for s in given]
        alive: list[tuple[int, int, _Span]] = []
        places = [expr(0)] * len(given)
        for i in sorted(range(len(given)), key=lambda i: (times[i][0], -given[i].size.hint())):
            while alive and alive[0][0] < times[i][0]:
                self._release(heapq.heappop(alive)[2])
            span = self._taken(given[i].size)
            heapq.heappush(alive, (times[i][1], i, span))
            places[i] = span.at
        return self.total, places

    def _taken(self, size: Expr) -> _Span:
        """Of the free span that is smallest, among those in which ``size`` fits at all sizes; else after the last."""
        for key in self.keys[bisect_left(self.keys, (size.hint(), 0)) :]:
            span = self.free[key]
            if nonneg(span.size - size):
                self._remove(span)
                if span.size != size:
                    rest = self._insert(_Span(span.at + size, span.size - size, span, span.after))
                    self._add(rest)
                    span.size = size
                return span
        last = self.last
        span = self._insert(_Span(expr(0) if last is None else last.at + last.size, size, last))
        self.total = maximum(self.total, span.at + size)
        return span

    def _release(self, span: _Span) -> None:
        """Nothing lies in it any more: it is joined with free neighbours."""
        for other in (span.before, span.after):
            if other is not None and other.key is not None:
                self._remove(other)
                span.at = other.at if other is span.before else span.at
                span.size = span.size + other.size
                self._unlink(other)
        if span is self.last:
            self._unlink(span)
        else:
            self._add(span)

    def _add(self, span: _Span) -> None:
        self.made += 1
        span.key = span.size.hint(), self.made
        self.free[span.key] = span
        insort(self.keys, span.key)

    def _remove(self, span: _Span) -> None:
        assert span.key is not None
        del self.free[span.key], self.keys[bisect_left(self.keys, span.key)]
        span.key = None

    def _insert(self, span: _Span) -> _Span:
        if span.before is not None:
            span.before.after = span
        if span.after is not None:
            span.after.before = span
        else:
            self.last = span
        return span

    def _unlink(self, span: _Span) -> None:
        if span.before is not None:
            span.before.after = span.after
        if span.after is not None:
            span.after.before = span.before
        else:
            self.last = span.before


def storages(program: Program, plan: Plan, allowed: Callable[[list[str], set[str]], bool]) -> Iterator[Storage]:
    """Storages whose buffers are ``allowed``, which is also given all buffers that must be tensors."""
    chains: dict[str, list[str]] = {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    tensors: set[str] = set()  # that must be
    for i, step in enumerate(plan.steps):
        if isinstance(step, Alloc):
            if step.reuse is not None and step.reuse not in chains:
                tensors.add(step.buffer)  # storage that a call returned
            chain = chains[step.buffer] = chains.get(step.reuse or "", [])
            chain.append(step.buffer)
            first[step.buffer] = i
        last.update(dict.fromkeys(_named(step), i))
        tensors |= _as_tensors(step)
    late = {s for n in walk(program.nodes) if isinstance(n, Extern) for s, _, _ in n.symbols}  # sizes known too late
    for chain in {id(c): c for c in chains.values()}.values():
        sizes = [_rounded(program.buffers[b]) for b in chain]
        if allowed(chain, tensors) and not symbols_in(sizes) & late:
            size = sizes[0]
            for other in sizes[1:]:
                size = maximum(size, other)
            yield Storage(chain, first[chain[0]], max(last[b] for b in chain), size)


def _rounded(b: Buffer) -> Expr:
    """Its bytes, up to a multiple of ALIGN. Sizes are from 0 on: code made for sizes from 2 on runs those as well."""
    nbytes = b.nbytes.subs({s: expr(Sym(s.name, 0, s.hi, s.hint)) for s in b.nbytes.symbols()})
    return (nbytes + (ALIGN - 1)) // ALIGN * ALIGN


def _named(step: Step) -> set[str]:
    """Buffers that it is about."""
    if isinstance(step, Alloc | Free):
        return {step.buffer}
    if isinstance(step, Launch):
        return {*step.kernel.reads(), *step.kernel.writes()}
    if isinstance(step, Call):
        x = step.extern
        return {*x.reads(), *x.writes(), *(v.buffer for v in iter_views((x.args, x.kwargs, x.outputs)))}
    if isinstance(step, Return):
        return {v.buffer for v in iter_views(step.outputs)}
    inner = (*step.then, *step.otherwise) if isinstance(step, Branch) else ()
    return set().union(*map(_named, inner))


def _as_tensors(step: Step, inside: bool = False) -> set[str]:
    """Buffers that the step needs as tensors. ``inside``: it is in a branch."""
    if isinstance(step, Launch) or isinstance(step, Alloc | Free) and not inside:
        return set()
    if isinstance(step, Branch) and not isinstance(step, Repeat):
        return set().union(*(_as_tensors(x, True) for x in (*step.then, *step.otherwise)))
    return _named(step) | ({step.reuse} if isinstance(step, Alloc) and step.reuse else set())
