"""A producer's computation, put where its result is read. (Where that is worth it, others decide: ``inline_loads``.)

The load of ``buf[e]`` becomes the producer's body, with its axes recovered from the offset ``e`` (``axis = e // stride
% size``, which usually simplifies to the consumer's own variables). A masked load makes the producer's loads masked, by
both masks, and the positions that it reads at, where they may be out of range then, 0.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch

from ..ir.expr import Atom, BinOp, Expr, Var, expr, nonneg
from ..ir.loops import Axis, BodyBuilder, Indirect, Load, LoopNest, Stmt, Store, map_stmt, stmt_args, stmt_exprs
from ..ir.program import Program
from .decided import Exprs, decided, narrowed, shared_loads, without_selects
from .dependencies import Dependencies
from .mapping import strides_of
from .slices import one_each


class TooLong(Exception):
    """Of sizes that are not known, what is divided again and again does not simplify: each time it is there twice."""


@dataclass(frozen=True)
class Producer:
    """A pointwise loop nest that writes a buffer, and how its axes are computed from an offset into that buffer."""

    position: int
    loops: LoopNest
    store: Store
    strides: tuple[tuple[Atom, Expr, Expr], ...]  # (variable, stride, size), greatest stride first
    start: Expr


def makes_all(program: Program, loops: LoopNest, store: Store) -> bool:
    """Is what is read from the buffer behind ``loops`` what ``store`` stored? (Not where that is a slice.)"""
    buffer = program.buffers[store.buffer]
    alone = sum(s.buffer == store.buffer for s in loops.stores()) == 1
    return alone and (buffer.kind == "temp" or loops.numel == buffer.numel)


def makers(
    program: Program, depends: Dependencies, position: int, through: Callable[[LoopNest], bool]
) -> Iterator[LoopNest]:
    """The loop nests that make what a node reads, and what those read that are to be looked ``through``."""
    todo, seen = [position], {position}
    while todo:
        at = todo.pop()
        for name in program.nodes[at].reads():
            writer = depends.last_writer(name, at)
            maker = None if writer is None else program.nodes[writer]
            if writer is not None and writer not in seen and isinstance(maker, LoopNest):
                seen.add(writer)
                yield maker
                todo += [writer] if through(maker) else []


def make_producer(position: int, loops: LoopNest, store: Store) -> Producer | None:
    """How to find an element's axes from its offset; None if the store's strides do not determine them (where there is
    no element, several may be one stride)."""
    found = strides_of(store.index, loops.axes)
    if found is None or any(a.size == 0 for a in loops.axes):
        return None
    axes = [(a.var, s, a.size) for a, s in zip(loops.axes, found[0], strict=True) if a.size != 1]
    axes.sort(key=lambda t: -t[1].hint())
    below = expr(1)  # elements that the axes below reach
    for _, stride, size in reversed(axes):
        if not nonneg(stride - below):
            return None
        below = below + (size - 1) * stride
    return Producer(position, loops, store, tuple(axes), found[1])


def gathers(loops: LoopNest) -> bool:
    return any(isinstance(s, Indirect) for s in loops.body)


def replace_loads(loops: LoopNest, *producers: Producer, longest: float = inf) -> LoopNest:
    """``loops`` with every load of the producers' buffers, also those in the producers, replaced by its computation.
    Raises TooLong where a quotient has more than ``longest`` characters."""
    b = BodyBuilder()
    ids: dict[int, int] = {}
    made, known = {p.store.buffer: p for p in producers}, dict[Load, int]()
    for i, s in enumerate(loops.body):
        ids[i] = _add(b, map_stmt(s, ids), made, known, longest)
    origins = tuple(dict.fromkeys(o for x in (*(p.loops for p in producers), loops) for o in x.origins))
    return replace(loops, body=decided(tuple(b.body)), origins=origins)


def replaced(loops: LoopNest, *producers: Producer, gpu: bool, longest: float = inf) -> LoopNest:
    """``replace_loads``, and what two masks select from is computed once."""
    out = replace_loads(loops, *producers, longest=longest)
    if gpu:
        return replace(out, body=without_selects(shared_loads(out.body)))
    return replace(out, body=without_selects(out.body)) if any(gathers(p.loops) for p in producers) else out


def _add(b: BodyBuilder, s: Stmt, made: Mapping[str, Producer], known: dict[Load, int], longest: float) -> int:
    """The position of the value of ``s``. ``known``: the loads that were replaced."""
    if not isinstance(s, Load) or s.buffer not in made:
        return b.add(s)
    if s not in known:
        known[s] = _insert(b, made[s.buffer], s, partial(_add, made=made, known=known, longest=longest), longest)
    return known[s]


def _insert(
    b: BodyBuilder, p: Producer, load: Load, add: Callable[[BodyBuilder, Stmt], int], longest: float
) -> int:  # fmt: skip
    """The producer's body at the element that ``load`` reads; returns the position of the value."""
    env = _axes_at(load.index, p, *narrowed(b.body, load.mask))
    if any(isinstance(a, BinOp) and len(a.key) > longest for e in env.values() for a in e.atoms()):
        raise TooLong
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
        ids[i] = add(b, new)
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
    """Is it an element of a vector (a norm's weights) that can be read under any mask? Several loads are then one."""
    walked = load.index.variables()
    if load.mask is not None or len(walked) > 1 or load.index.atoms() - set(walked):
        return False
    return all(_in_range(v, env) for v in walked)


def places(index: Expr, p: Producer) -> Exprs:
    """The producer's variables as functions of those of a load's ``index``."""
    return _axes_at(index, p, {}, {})


def _axes_at(index: Expr, p: Producer, narrow: Exprs, widen: Exprs) -> Exprs:
    """The producer's variables as functions of the consumer's, for the element at ``index``."""
    env: Exprs = {a.var: expr(0) for a in p.loops.axes if a.size == 1}
    rest = index.subs(narrow) - p.start
    if (plain := one_each(rest, {stride: (var, size) for var, stride, size in p.strides})) is not None:
        return env | {var: e.subs(widen) for var, e in plain.items()}
    for n, (var, stride, size) in enumerate(p.strides):
        quotient = rest // stride
        env[var] = (quotient if n == 0 else quotient % size).subs(widen)
        rest = rest % stride
    return env


def steps_apart(program: Program, loops: LoopNest, results: int, most: int) -> Axis | None:
    """The axis, of ``most`` steps, that another reduction, of ``results``, keeps, and it alone: with its steps
    as pieces of ``loops``, both may be one kernel (an instance norm's, and the gradient of its weight)."""
    for n in (n for n in program.nodes if isinstance(n, LoopNest) and n.reduced):
        differ = [a for a, b in zip(loops.axes, n.axes) if a.kind != b.kind]
        alike = [a.size for a in n.axes] == [a.size for a in loops.axes] and n.numel.hint() >= results
        if alike and [a.kind for a in differ] == ["r"] and 1 < (differ[0].size.constant or 0) <= most:
            return differ[0]
    return None
