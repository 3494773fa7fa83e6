"""May two groups be one kernel? ``can_fuse(a, b, context) -> Merged | Reason``.

The rules, each with its Reason's code:

* ``device``: both run on one device.
* ``order``: no path leads from one to the other through a node in neither (it would have to run in between).
* ``space``: their axes have a common refinement (``mapping``).
* ``broadcast``: an axis that only one of them has must be a reduced one: then the other's statements run once per row.
  (Otherwise they would be computed, and their result stored, again for every point of that axis.)
* ``axes``: a group with a reduction keeps its p and r axes: the other may not reduce over its p axes, nor add r axes.
  One with a scan keeps its r axis whole, so that the row is walked in order.
* ``index``: a buffer that one writes and the other touches is touched at exactly the element written, in every access.
  A part of a buffer may be written and another part of it touched, if they never meet (``APART``).
* ``in-place``: a kernel with a reduction may go over its rows several times, so data that it reads per element of a
  row may be overwritten in the last round only. Data per row (running statistics) is read and written once: no rule.
* ``rows``: few, long rows are not kept in one kernel with what follows them: too little would run in parallel.
* ``limit``: not more statements or buffers than the options allow.
* ``template``: only elementwise work on its result joins a matmul (``templates``).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import torch

from ..ir.expr import Expr, Ref, Var
from ..ir.loops import Axis, LoopNest, Op, Reduce, Scan, Store
from ..ir.program import Program, Template
from ..ir.transforms import join, phases, varying
from ..options import Options
from ..seams import Seam
from ..target import Target
from .dependencies import Dependencies
from .mapping import Env, Mapping, match
from .result import Reason

# Further rules, (Cluster, Cluster, FusionContext) -> Reason or None. The core has none.
RULES = Seam("fuse.RULES")
# Do two indices into a buffer, over different loops, never meet? (Buffer, Expr, Expr) -> bool, under "apart".
APART = Seam("fuse.APART")
Indices = dict[str, dict[Expr, int]]  # buffer -> index -> position of the first member that uses it


@dataclass
class Cluster:
    """A group while it grows. ``env`` replaces its members' variables by ``axes``; ``reads`` and ``writes`` are in
    terms of ``axes`` already, so that a merge needs summaries only and no bodies."""

    parts: list[tuple[int, LoopNest, Env]]
    axes: tuple[Axis, ...]
    reads: Indices
    writes: Indices
    reduces: bool
    ops: int
    members: set[int]
    before: set[int]  # positions outside that must come first
    in_place: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)  # buffers that others need or make
    template: Template | None = None  # a part is its epilogue; its operands are in ``outside``, not in ``reads``
    scans: bool = False

    @property
    def first(self) -> int:
        return min(self.members)

    @property
    def last(self) -> int:
        return max(self.members)


@dataclass(frozen=True)
class FusionContext:
    """What RULES and ``rules`` are decided by. ``cluster_at``: the cluster (None: not a loop nest) of a position."""

    program: Program
    depends: Dependencies
    options: Options
    target: Target
    cluster_at: Callable[[int], Cluster | None]
    rules: tuple[Callable[..., Reason | None], ...] = ()
    rank: list[int] = field(default_factory=list)  # of each position in a legal order that keeps clusters together

    def __post_init__(self) -> None:
        self.rank.extend(range(len(self.program.nodes)))


@dataclass(frozen=True)
class Merged:
    mapping: Mapping
    saved: int  # bytes, by hint
    between: set[int]  # positions in neither that must come after the earlier begins and before the later


def single(position: int, node: LoopNest | Template, depends: Dependencies) -> Cluster:
    """The cluster of one node. Axes of size 1 vanish."""
    loops = node.epilogue if isinstance(node, Template) else node
    env: Env = {a.var: 0 for a in loops.axes if a.size == 1}
    axes = tuple(a for a in loops.axes if a.size != 1)
    reads: Indices = {}
    writes: Indices = {}
    for s in loops.loads():
        reads.setdefault(s.buffer, {}).setdefault(s.index.subs(env), position)
    for w in loops.stores():
        writes.setdefault(w.buffer, {}).setdefault(w.index.subs(env), position)
    scans = any(isinstance(s, Scan) for s in loops.body)
    reduces = scans or any(isinstance(s, Reduce) for s in loops.body)  # if over size 1 alone, then over no axis
    work = sum(isinstance(s, (Op, Reduce, Scan)) for s in loops.body)  # loads and stores go as the group grows
    outside, template = {*node.reads(), *node.writes()}, node if isinstance(node, Template) else None
    return Cluster(
        [(position, loops, env)], axes, reads, writes, reduces, work, {position}, set(depends.before[position]),
        set(reads) & set(writes), outside, template, scans,
    )  # fmt: skip


def can_fuse(a: Cluster, b: Cluster, c: FusionContext) -> Merged | Reason:
    """May ``a`` and ``b`` be one kernel? Changes neither. ``a``'s variables are kept where possible; a template, if
    there is one, must be ``a``."""
    if _device(a, c) != _device(b, c):
        return Reason("device", f"one runs on {_device(a, c)}, the other on {_device(b, c)}")
    if a.ops + b.ops > c.options.max_fused_ops:
        return Reason("limit", f"together they have more than max_fused_ops={c.options.max_fused_ops} statements")
    for rule in (*RULES.values(), *c.rules):
        refused = rule(a, b, c)
        if refused is not None:
            return refused
    mapping = common_space(a, b, c.program)
    if isinstance(mapping, Reason):
        return mapping
    between = _few_rows(a, b, mapping, c) or _limit(a, b, c) or _order(a, b, c)
    return between if isinstance(between, Reason) else Merged(mapping, saved_bytes(a, b, c), between)


def common_space(a: Cluster, b: Cluster, program: Program | None = None) -> Mapping | Reason:
    """The first mapping, over the elements that both touch, under which every rule about axes and indices holds."""
    worst: Reason | None = None
    for ia, ib in _shared_indices(a, b):
        mapping = match(a.axes, ia, b.axes, ib, _shared_indices(a, b))
        if not isinstance(mapping, Reason):
            broken = _axes_rule(a, b, mapping) or _index_rule(a, b, mapping, program) or _in_place_rule(a, b, mapping)
            if broken is None:
                return mapping
            worst = broken
        worst = worst or mapping  # type: ignore[assignment]
    return worst or Reason("space", "they touch no buffer in common")


def _in_both(a: Indices, b: Indices) -> Iterator[str]:
    """Buffers, found in the time that the smaller table takes."""
    small, large = (a, b) if len(a) <= len(b) else (b, a)
    return (name for name in small if name in large)


def _shared_indices(a: Cluster, b: Cluster) -> Iterator[tuple[Expr, Expr]]:
    """Pairs of indices into one buffer, a few of each; first of buffers that one writes and the other touches."""
    rounds = ((a.writes, b.reads), (a.writes, b.writes), (a.reads, b.writes), (a.reads, b.reads))
    for left, right in rounds:
        for name in _in_both(left, right):
            some, others = ((*x[:2], *x[2:][-2:]) for x in (list(left[name]), list(right[name])))
            yield from product(some, others)


def _device(a: Cluster, c: FusionContext) -> torch.device:
    return c.program.buffers[next(iter(a.writes))].device


def _axes_rule(a: Cluster, b: Cluster, m: Mapping) -> Reason | None:
    if (a.scans or b.scans) and sum(x.kind == "r" for x in m.axes) != 1:
        return Reason("axes", "one scans along an axis that the other has in parts")
    for mine, others, only in ((a, b, m.only_a), (b, a, m.only_b)):
        if any(x.kind == "p" for x in only):
            return Reason("broadcast", f"the other would be repeated over {_show(only)}")
        if only and others.reduces:
            return Reason("axes", f"one reduces over {_show(only)}, which the other does not have")
        if only and not mine.reduces:
            return Reason("axes", f"nothing reduces over {_show(only)}")
        shared = [(pa, pb) if mine is a else (pb, pa) for _, pa, pb in m.pairs]
        if only and any(x is not None and y is not None and x.kind == "r" for x, y in shared):
            return Reason("broadcast", f"the other has a part of the row: it would be repeated over {_show(only)}")
    for _, pa, pb in m.pairs:
        for kept, other, group in ((pa, pb, a), (pb, pa, b)):
            if kept is not None and other is not None and group.reduces and (kept.kind, other.kind) == ("p", "r"):
                return Reason("axes", f"one reduces over an axis of size {kept.size} that the other keeps")
    return None


def _show(axes: tuple[Axis, ...]) -> str:
    return "axes of size " + ", ".join(str(a.size) for a in axes)


def _index_rule(a: Cluster, b: Cluster, m: Mapping, program: Program | None) -> Reason | None:
    for written, touched in ((a.writes, b.reads), (a.writes, b.writes), (a.reads, b.writes)):
        for name in _in_both(written, touched):
            stores = (s for x in (a, b) for _, n, _ in x.parts for s in n.stores())
            sums = [s.reduce == "atomic" for s in stores if s.buffer == name]
            if written is a.writes and touched is b.writes and all(sums):
                continue  # in any order
            here = {i: i.subs(m.env_a) for i in written[name]}
            there = {j: j.subs(m.env_b) for j in touched[name]}
            known = {x for x in (*here.values(), *there.values()) if not any(isinstance(a, Ref) for a in x.atoms())}
            apart = APART.get("apart") if len(here) * len(there) <= 16 else None
            pairs = ((i, j, x == y and x in known and not any(sums)) for i, x in here.items() for j, y in there.items())
            if not all(same or apart and program and apart(program.buffers[name], i, j) for i, j, same in pairs):
                return Reason("index", f"{name} is written at one element and used at another")
    return None


def _in_place_rule(a: Cluster, b: Cluster, m: Mapping) -> Reason | None:
    """A reduction's loop may run again over its row. Data that is overwritten must then be overwritten in the last."""
    if not (a.reduces or b.reduces):
        return None
    rows = {x.var for x in m.axes if x.kind == "r"}
    names = set(read_before_write(a, b)) | a.in_place | b.in_place
    for side, env in ((a, m.env_a), (b, m.env_b)):
        for name in names:
            for index in (*side.reads.get(name, ()), *side.writes.get(name, ())):
                if rows & index.subs(env).variables() and not _written_last(a, b, m, names):
                    return Reason("in-place", f"{name} is written over while rows of it are still needed")
    for name in names:  # under a mask, data per row may be read again for every element of the row
        if rows and (_masked(a, name) or _masked(b, name)):
            return Reason("in-place", f"{name} is written over while it is still needed, under a mask")
    return None


def _masked(c: Cluster, name: str) -> bool:
    return any(s.buffer == name and s.mask is not None for _, loops, _ in c.parts for s in loops.loads())


def _written_last(a: Cluster, b: Cluster, m: Mapping, names: set[str]) -> bool:
    """Are ``names`` stored in the last round over the row? Joins the bodies, but is needed rarely."""
    sides = ((a, m.env_a), (b, m.env_b))
    parts = [(p, loops, compose(old, loops, env)) for x, env in sides for p, loops, old in x.parts]
    body = join([(loops, env) for _, loops, env in sorted(parts, key=lambda t: t[0])])
    rounds, level = phases(body, most=True), varying(body, {x.var for x in m.axes if x.kind == "r"})
    last = max(n for n, inside in zip(rounds, level, strict=True) if inside)
    stores = [i for i, s in enumerate(body) if isinstance(s, Store) and s.buffer in names]
    return all(rounds[i] == last for i in stores)


def read_before_write(a: Cluster, b: Cluster) -> Iterator[str]:
    for left, right in ((a, b), (b, a)):
        for name in _in_both(left.reads, right.writes):
            if min(left.reads[name].values()) < min(right.writes[name].values()):
                yield name


def _few_rows(a: Cluster, b: Cluster, m: Mapping, c: FusionContext) -> Reason | None:
    """A few programs (threads) each walking a long row would leave the rest of the machine idle."""
    if a.reduces == b.reduces or not any(x.kind == "r" for x in m.axes):
        return None
    other = b if a.reduces else a
    only = m.only_a if a.reduces else m.only_b
    if only or other.first < (a if a.reduces else b).first:
        return None  # row-level work, and work before the reduction, cost it nothing
    rows = row_length = 1
    for x in m.axes:
        rows, row_length = (rows * x.size.hint(), row_length) if x.kind == "p" else (rows, row_length * x.size.hint())
    units = c.target.units if c.target.is_gpu else torch.get_num_threads()
    if rows < units and row_length >= 16384:
        return Reason("rows", f"only {rows} rows of {row_length}: the work after the reduction runs better on its own")
    return None


def _limit(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    limit = c.options.max_fused_buffers
    if len(a.outside) + len(b.outside) <= limit or len((a.outside | b.outside) - newly_interior(a, b, c)) <= limit:
        return None
    return Reason("limit", f"together they touch more than max_fused_buffers={limit} buffers")


def newly_interior(a: Cluster, b: Cluster, c: FusionContext) -> set[str]:
    """Buffers that become private to the merged group: written in it, and all their readers are in it."""
    out = set()
    for left, right in ((a, b), (b, a)):
        for name in _in_both(left.writes, right.reads):
            if name not in c.depends.needed:
                users = c.depends.readers[name] + c.depends.writers[name]
                if all(r in a.members or r in b.members for r in users):
                    out.add(name)
    return out


def _order(a: Cluster, b: Cluster, c: FusionContext) -> Reason | set[int]:
    """What must run between the two: positions after the earlier that the later needs. A Reason if one of these needs
    the earlier itself. (No path leads from the later to the earlier.)"""
    early, late = sorted((a, b), key=lambda x: c.rank[x.first])
    start = c.rank[early.first]
    todo = [p for p in late.before if c.rank[p] > start and p not in early.members]
    between: set[int] = set()
    while todo:
        p = todo.pop()
        if p in between:
            continue
        cluster = c.cluster_at(p)
        between |= {p} if cluster is None else cluster.members
        for q in c.depends.before[p] if cluster is None else cluster.before:
            if q in early.members:
                return Reason("order", f"{c.program.nodes[p].name} needs the one and is needed by the other")
            if c.rank[q] > start:
                todo.append(q)
    return between


def saved_bytes(a: Cluster, b: Cluster, c: FusionContext) -> int:
    """Bytes that one kernel moves less than two: it does not read what it wrote, and common reads happen once."""
    total = 0
    for left, right, factor in ((a.writes, b.reads, 2), (b.writes, a.reads, 2), (a.reads, b.reads, 1)):
        total += sum(factor * c.program.buffers[name].nbytes.hint() for name in _in_both(left, right))
    return total


def merge(a: Cluster, b: Cluster, found: Merged, c: FusionContext) -> Cluster:
    """The two as one. The larger one's tables are reused, so that a long chain takes linear time."""
    m = found.mapping
    interior = newly_interior(a, b, c)
    overwritten = set(read_before_write(a, b))
    for side, env in ((a, m.env_a), (b, m.env_b)):
        if env:
            side.parts = [(p, loops, compose(old, loops, env)) for p, loops, old in side.parts]
            side.reads = {n: {i.subs(env): p for i, p in t.items()} for n, t in side.reads.items()}
            side.writes = {n: {i.subs(env): p for i, p in t.items()} for n, t in side.writes.items()}
    big, small = (a, b) if a.ops >= b.ops else (b, a)
    big.template, big.scans = a.template or b.template, a.scans or b.scans
    big.parts += small.parts
    for mine, new in ((big.reads, small.reads), (big.writes, small.writes)):
        for name, table in new.items():
            have = mine.setdefault(name, {})
            for index, position in table.items():
                have[index] = min(position, have.get(index, position))
    big.axes, big.reduces, big.ops = m.axes, a.reduces or b.reduces, a.ops + b.ops
    big.members |= small.members
    big.before = (big.before | small.before) - big.members
    big.in_place |= small.in_place | overwritten
    big.outside = (big.outside | small.outside) - interior
    return big


def compose(old: Env, loops: LoopNest, env: Env) -> Env:
    """First ``old``, then ``env``."""
    out: Env = {}
    for axis in loops.axes:
        value = old.get(axis.var, axis.var)
        new = Expr((((value,), 1),)) if isinstance(value, Var) else value
        new = new.subs(env) if isinstance(new, Expr) else new
        if isinstance(new, int) or new != Expr((((axis.var,), 1),)):
            out[axis.var] = new
    return out
