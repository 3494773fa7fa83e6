"""Plan: order, lifetimes and storage.

Nodes arrive in a legal order and keep it. A buffer lives from the node that makes it to the last node that reads it
(an output: for ever). Storage is reused in two ways:

* *in place*: an elementwise kernel may store over an input that dies in it, if it reads that input only at the very
  index it stores at, and never again after (``can_overwrite``).
* *taken over*: a buffer of the same dtype, device and extent that died at most ``WINDOW`` nodes earlier gives its
  storage. (Holding it longer would raise the peak: PyTorch's caching allocator can use it for something else.)

A buffer that an Extern has seen may have a view that outlives it if the op's schema says its outputs alias (or there
is no schema); such a buffer is freed, never reused. Inputs are the caller's: never reused, dropped early.

NB: TorchInductor can also pack everything into one pool (``memory_planning``) and reorders nodes to lower the peak.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ..ir.expr import Sym, expr
from ..ir.loops import Load, Loops, Stmt, phases
from ..ir.program import Buffer, Dispatch, Extern, Node, Program, Region, iter_views, walk
from ..options import Options
from .steps import Alloc, Branch, Call, Check, Free, Launch, Let, Moment, Note, Plan, Return, Step

WINDOW = 3


def plan(program: Program, options: Options) -> Plan:
    """Steps for a program of Regions and Externs. Assumes its nodes are in a legal order."""
    return _Planner(program, options).run()


class _Planner:
    def __init__(self, program: Program, options: Options):
        self.program = program
        self.options = options
        self.steps: list[Step | None] = []  # None: a Free that a later Alloc took back
        self.moments: list[Moment] = []
        self.live: dict[str, int] = {}
        self.pool: dict[tuple, list[tuple[str, int, int]]] = defaultdict(list)  # (buffer, died at, its Free step)
        self.overwritten: set[str] = set()  # read for the last time by the kernel that stores over them
        self.last = last_uses(program)
        self.pinned = escaping(program) | program.output_buffers()

    def run(self) -> Plan:
        self.steps += bind_symbols(self.program)
        self.steps += [Check(*c) for c in self.program.checks]
        self.steps += [Note(*t) for t in self.program.tuned]
        dying: dict[int, list[str]] = defaultdict(list)
        for b, i in self.last.items():
            dying[i].append(b)
        for b in dying[-1]:  # inputs nobody reads
            self.steps.append(Free(b))
        for i, node in enumerate(self.program.nodes):
            self._allocate(i, node)
            self._execute(node)
            for b in dying[i]:
                self._release(i, b)
        self.steps.append(Return(self.program.outputs))
        return Plan(tuple(s for s in self.steps if s is not None), tuple(self.moments))

    def _allocate(self, i: int, node: Node) -> None:
        for b in allocated_by(node):
            buffer = self.program.buffers[b]
            if buffer.kind != "temp" or b in self.live:
                continue
            reuse = self._find_reuse(i, node, buffer)
            self.steps.append(Alloc(b, reuse))
            if reuse is not None and reuse not in self.overwritten:
                self.steps.append(Free(reuse))  # the name goes, the storage stays
            self.live[b] = buffer.nbytes.hint()

    def _find_reuse(self, i: int, node: Node, buffer: Buffer) -> str | None:
        if self.options.inplace_buffers and isinstance(node, Region):
            for a in node.reads():
                dies = self.last.get(a) == i and a in self.live and a not in self.pinned
                if dies and _key(self.program.buffers[a]) == _key(buffer) and can_overwrite(node, a, buffer.name):
                    self.overwritten.add(a)
                    del self.live[a]
                    return a
        free = self.pool[_key(buffer)]
        while self.options.reuse_buffers and free:
            name, died, step = free.pop()
            if i - died <= WINDOW:
                self.steps[step] = None
                return name
        return None

    def _execute(self, node: Node) -> None:
        if isinstance(node, Extern):
            self.steps.append(Call(node))
            for o in node.outputs:
                if isinstance(o, str):
                    self.live.setdefault(o, self.program.buffers[o].nbytes.hint())
        elif isinstance(node, Dispatch):
            self.steps += self._dispatch(node)
            for o in node.outputs:
                self.live.setdefault(o, self.program.buffers[o].nbytes.hint())
        else:
            assert isinstance(node, Region)
            self.steps.append(launch(node))
        space = [b for b in node.arms[0].workspace if b.kind != "zeros"] if isinstance(node, Region) else []
        live = [*self.live.items(), *((b.name, b.nbytes.hint()) for b in space)]
        self.moments.append(Moment(len(self.moments), node.name, tuple(live)))

    def _dispatch(self, node: Dispatch) -> list[Step]:
        """Each arm by itself: it allocates what it makes, and frees what is nobody else's."""
        lists = [self._arm(node, arm.nodes) for arm in node.arms]
        steps = lists.pop()
        for arm, then in zip(reversed(node.arms[:-1]), reversed(lists)):
            steps = (Branch(arm.predicate, then, steps),)
        return list(steps)

    def _arm(self, node: Dispatch, nodes: tuple[Node, ...]) -> tuple[Step, ...]:
        inside = node.inside()
        last = {b: i for i, n in enumerate(nodes) for b in (*n.reads(), *n.writes()) if b in inside}
        steps: list[Step] = []
        have: set[str] = set()
        for i, n in enumerate(nodes):
            steps += [Alloc(b) for b in allocated_by(n) if b not in have]
            have |= set(n.writes())
            if isinstance(n, Extern):
                steps.append(Call(n))
            elif isinstance(n, Dispatch):
                steps += self._dispatch(n)
            else:
                assert isinstance(n, Region)
                steps.append(launch(n))
            steps += [Free(b) for b, at in last.items() if at == i]
        return tuple(steps)

    def _release(self, i: int, b: str) -> None:
        buffer = self.program.buffers[b]
        if buffer.kind == "const":
            return
        if buffer.kind == "temp":
            self.live.pop(b, None)
            if b not in self.pinned | self.overwritten:
                self.pool[_key(buffer)].append((b, i, len(self.steps)))
        self.steps.append(Free(b))


def launch(region: Region) -> Step:
    """The first arm whose predicate holds."""
    step: Step = Launch(region, region.arms[-1])
    for arm in reversed(region.arms[:-1]):
        step = Branch(arm.predicate, (Launch(region, arm),), (step,))
    return step


def _key(b: Buffer) -> tuple:
    return b.device, b.dtype, b.extent


def allocated_by(node: Node) -> list[str]:
    """Buffers that must exist before ``node`` runs: what kernels and out variants write into."""
    if isinstance(node, Extern):
        return [o for o in node.outputs if isinstance(o, str)] if node.out else []
    return [] if isinstance(node, Dispatch) else node.writes()  # a Dispatch's arms allocate


def last_uses(program: Program) -> dict[str, int]:
    """The node that uses each buffer last: its position; -1 for an input that nothing uses. Outputs are left out."""
    outputs = program.output_buffers()
    last: dict[str, int] = {b: -1 for b in program.buffers if program.buffers[b].kind == "input"}
    for i, node in enumerate(program.nodes):
        for b in [*node.reads(), *node.writes()]:
            last[b] = i
        if isinstance(node, Extern):  # an alias of an argument uses the argument
            for v in iter_views(node.outputs):
                last[v.buffer] = i
    return {b: i for b, i in last.items() if b not in outputs}


def escaping(program: Program) -> set[str]:
    """Buffers whose storage something may still see after their last use: passed to, or returned by, a call whose
    results may alias its arguments."""
    out: set[str] = set()
    for node in walk(program.nodes):
        if isinstance(node, Extern) and may_alias(node.target):
            out |= {*node.reads(), *node.writes()}
    return out


def may_alias(target: object) -> bool:
    """May a result of ``target`` share storage with an argument? Its schema says; without one, yes."""
    schema = getattr(target, "_schema", None)
    if schema is None or isinstance(target, torch._ops.HigherOrderOperator):
        return True
    return any(r.alias_info is not None for r in schema.returns)


def can_overwrite(region: Region, dead: str, new: str) -> bool:
    """May ``new`` be stored over ``dead``, which is read here for the last time? Only if one Loops does both, every
    load of ``dead`` is before the store to ``new``, at its index, and no pass after the storing one reads it."""
    parts = [p for p in region.arms[-1].parts if isinstance(p, Loops)]
    touching = [p for p in parts if dead in p.reads() or new in p.writes()]
    if len(touching) != 1 or len(parts) != len(region.arms[-1].parts):
        return False
    loops = touching[0]
    stores = [s for s in loops.stores() if s.buffer == new]
    loads = [s for s in loops.loads() if s.buffer == dead]
    if len(stores) != 1 or any(s.index != stores[0].index or s.dtype.itemsize == 0 for s in loads):
        return False
    if any(s.buffer == dead for s in loops.body[_position(loops, stores[0]) :] if isinstance(s, Load)):
        return False
    when = phases(loops)
    return next(p for p, s in zip(when, loops.body) if s is stores[0]) == max(when)


def _position(loops: Loops, stmt: Stmt) -> int:
    return next(i for i, s in enumerate(loops.body) if s is stmt)


def bind_symbols(program: Program) -> list[Let]:
    """Where each size symbol that is no input of its own is read from: an input whose size or stride it is."""
    known = {s for s in program.inputs if isinstance(s, Sym)}
    known |= {s for n in program.nodes if isinstance(n, Extern) for s, _, _ in n.symbols}
    out: list[Let] = []
    given = [
        (name, what, dim, e)
        for name in program.inputs if isinstance(name, str) and (b := program.buffers.get(name)) is not None
        for what, exprs in (("size", b.shape), ("stride", b.strides)) for dim, e in enumerate(exprs)
    ]  # fmt: skip
    for direct in (True, False):  # a symbol that no size is may still be known from one: half of it, say
        for name, what, dim, e in given:
            linear = e.linear()
            if linear is not None and linear[0] not in known and (not direct or e == expr(linear[0])):
                known.add(linear[0])
                out.append(Let(linear[0], name, what, dim, *linear[1:]))
    return out
