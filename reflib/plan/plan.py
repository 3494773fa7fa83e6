"""Plan: order, lifetimes and storage.

Nodes arrive in the order in which they run (``plan.order`` looks for one that needs less memory). A buffer is live from
the node that makes it to the last node that reads it (an output: to the end). Storage is reused in two ways:

* *in place*: an elementwise kernel may store over an input that is dead after it, if it reads that input only at the
  index it stores at, before the store (``can_overwrite``).
* *taken over*: the storage of a buffer of the same dtype, device and extent that died at most ``WINDOW`` nodes earlier.
  (Held for longer, PyTorch's caching allocator cannot use it for something else. Never if that raises the peak.)

A buffer passed to an Extern may have a view that outlives it if the op's schema says its outputs alias (or there is no
schema); such a buffer is freed, never reused. Inputs belong to the caller: never reused, released early.

NB: TorchInductor can also pack everything into one pool (``memory_planning``).
"""

from collections import defaultdict
from typing import TypeGuard

import torch

from ..ir.expr import Sym, expr
from ..ir.loops import LoopNest, Reduce, Store
from ..ir.program import Buffer, Extern, KernelNode, Node, Program, Variants, iter_views, walk
from ..ir.transforms import TWICE, needed, phases, varying
from ..options import Options
from ..seams import Seam
from .steps import Alloc, Branch, Call, Check, Free, Launch, Let, Note, Plan, Return, Step

WINDOW = 3
# What runs a node of a class that the core does not have, by its name: (node, Program, Options) -> steps.
STEPS = Seam("plan.STEPS")


def plan(program: Program, options: Options) -> Plan:
    """Steps for a program of Variants and Externs. Assumes its nodes are in a legal order."""
    return _Planner(program, options).run()


class _Planner:
    def __init__(self, program: Program, options: Options):
        self.program = program
        self.options = options
        self.steps: list[Step | None] = []  # None: a Free that a later Alloc took back
        self.live: set[str] = set()  # with storage of their own
        self.bytes, self.peak = 0, 0  # now, and the most so far
        self.totals: list[int] = []  # per node
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
        self.steps += map(Free, dying[-1])  # inputs that nothing reads
        for i, node in enumerate(self.program.nodes):
            self._allocate(i, node)
            self._execute(node)
            for b in dying[i]:
                self._release(i, b)
        self.steps.append(Return(self.program.outputs))
        return Plan(tuple(s for s in self.steps if s is not None))

    def _allocate(self, i: int, node: Node) -> None:
        for b in allocated_by(node):
            buffer = self.program.buffers[b]
            if buffer.kind != "temp" or b in self.live:
                continue
            reuse = self._find_reuse(i, node, buffer)
            self.steps.append(Alloc(b, reuse))
            if reuse is not None and reuse not in self.overwritten:
                self.steps.append(Free(reuse))  # frees the name only, not the storage
            self._begin(b)

    def _find_reuse(self, i: int, node: Node, buffer: Buffer) -> str | None:
        if self.options.inplace_buffers and not self.options.check_nan and is_kernel(node):
            for a in node.reads():
                dies = self.last.get(a) == i and a in self.live and a not in self.pinned
                if dies and _key(self.program.buffers[a]) == _key(buffer) and can_overwrite(node, a, buffer.name):
                    self.overwritten.add(a)
                    self._end(a)
                    return a
        free = self.pool[_key(buffer)]
        while self.options.reuse_buffers and free:
            name, died, step = free.pop()
            held = [t + buffer.nbytes.hint() for t in self.totals[died + 1 : i]]
            if i - died <= WINDOW and max(held, default=0) <= self.peak:
                self.totals[died + 1 : i] = held
                self.steps[step] = None
                return name
        return None

    def _execute(self, node: Node) -> None:
        own = STEPS.get(type(node).__name__)
        self.steps += steps_of(node) if own is None else own(node, self.program, self.options)
        if not is_kernel(node):
            for o in node.outputs:  # type: ignore[union-attr]
                if isinstance(o, str) and self.program.buffers[o].kind == "temp":
                    self._begin(o)
        self.totals.append(self.bytes)
        self.peak = max(self.peak, self.bytes)

    def _begin(self, b: str) -> None:
        self.bytes += 0 if b in self.live else self.program.buffers[b].nbytes.hint()
        self.live.add(b)

    def _end(self, b: str) -> None:
        self.bytes -= self.program.buffers[b].nbytes.hint() if b in self.live else 0
        self.live.discard(b)

    def _release(self, i: int, b: str) -> None:
        buffer = self.program.buffers[b]
        if buffer.kind == "const":
            return
        if buffer.kind == "temp":
            self._end(b)
            if b not in self.pinned and b not in self.overwritten:
                self.pool[_key(buffer)].append((b, i, len(self.steps)))
        self.steps.append(Free(b))


def is_kernel(node: Node) -> TypeGuard[Variants]:
    """Is it one kernel, in whichever variant? Such a node writes into buffers that exist before it runs."""
    return isinstance(node, Variants) and node.of_kernels


def steps_of(node: Node) -> tuple[Step, ...]:
    """What runs ``node``: of Variants, the first whose predicate holds."""
    if isinstance(node, Extern):
        return (Call(node),)
    if isinstance(node, KernelNode):
        return (Launch(node),)
    assert isinstance(node, Variants)
    *others, last = node.variants
    steps = _variant_steps(node, last.nodes)
    for v in reversed(others):
        steps = (Branch(v.predicate, _variant_steps(node, v.nodes), steps),)
    return steps


def _variant_steps(node: Variants, nodes: tuple[Node, ...]) -> tuple[Step, ...]:
    """A variant allocates what its nodes make, and frees what is used nowhere else."""
    inside = () if node.of_kernels else node.inside()
    last = {b: i for i, n in enumerate(nodes) for b in (*n.reads(), *n.writes()) if b in inside} if inside else {}
    steps: list[Step] = []
    have: set[str] = set()
    for i, n in enumerate(nodes):
        steps += [Alloc(b) for b in allocated_by(n) if b not in have]
        have |= set(n.writes())
        steps += [*steps_of(n), *(Free(b) for b, at in last.items() if at == i)]
    return tuple(steps)


def _key(b: Buffer) -> tuple:
    return b.device, b.dtype, b.extent


def allocated_by(node: Node) -> list[str]:
    """Buffers that must exist before ``node`` runs: what kernels and out variants write into."""
    if isinstance(node, Extern):
        return node.writes() if node.out else []  # (results, and buffers that they are parts of)
    return node.writes() if is_kernel(node) else []  # what other Variants write, their variants allocate


def last_uses(program: Program) -> dict[str, int]:
    """Per buffer, the position of the last node that uses it; -1 for an unused input. Outputs are left out."""
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
    """Buffers that may be seen after their last use: in calls whose results may alias their arguments."""
    calls = (n for n in walk(program.nodes) if isinstance(n, Extern) and may_alias(n.target, n.outputs))
    return {b for n in calls for b in (*n.reads(), *n.writes())}


def may_alias(target: object, outputs: tuple[object, ...] = ()) -> bool:
    """May a result of ``target`` share storage with an argument? Its schema says; without one, yes. (None: dropped.)"""
    schema = getattr(target, "_schema", None)
    if schema is None or isinstance(target, torch._ops.HigherOrderOperator):
        return True
    return set(outputs) != {None} and any(r.alias_info is not None for r in schema.returns)


def can_overwrite(node: Variants, dead: str, new: str) -> bool:
    """May ``new`` be stored over ``dead``, which is read here for the last time? Only if one LoopNest does both, every
    load of ``dead`` is before the store to ``new``, at the same index, no pass after the storing one reads it, and none
    reads for each point what is stored per row."""
    kernel = node.variants[-1].kernel
    parts = [p for p in kernel.parts if isinstance(p, LoopNest)]
    touching = [p for p in parts if dead in p.reads() or new in p.writes()]
    if len(touching) != 1 or len(parts) != len(kernel.parts):
        return False
    loops = touching[0]
    stores = [s for s in loops.stores() if s.buffer == new]
    loads = [s for s in loops.loads() if s.buffer == dead]
    if len(stores) != 1 or any(s.index != stores[0].index or s.dtype.itemsize == 0 for s in loads):
        return False
    body, at = loops.body, next(i for i, s in enumerate(loops.body) if s is stores[0])
    inside = varying(body, loops.reduced_vars)
    if any(s in loads and (i > at or inside[i] > inside[at]) for i, s in enumerate(body)):
        return False
    for when in (phases(body, most) for most in (False, True) if loops.reduced):
        ends = ((i, when[i] + (getattr(s, "kind", "") in TWICE)) for i, s in enumerate(body))
        late = [i for i, last in ends if last > when[at] and isinstance(body[i], (Reduce, Store))]
        if any(body[j] in loads for j in needed(body, late, lambda k: not isinstance(body[k], Reduce))):
            return False
    return True


def bind_symbols(program: Program) -> list[Let]:
    """Per size symbol that is not an input itself: the input whose size or stride it is read from."""
    known = {s for s in program.inputs if isinstance(s, Sym)}
    known |= {s for n in program.nodes if isinstance(n, Extern) for s, _, _ in n.symbols}
    out: list[Let] = []
    given = [
        (name, what, dim, e)
        for name in program.inputs if isinstance(name, str) and (b := program.buffers.get(name)) is not None
        for what, exprs in (("size", b.shape), ("stride", b.strides)) for dim, e in enumerate(exprs)
    ]  # fmt: skip
    for direct in (True, False):  # a symbol that is no size by itself may follow from one, such as half of it
        for name, what, dim, e in given:
            linear = e.linear()
            if linear is not None and linear[0] not in known and (not direct or e == expr(linear[0])):
                known.add(linear[0])
                out.append(Let(linear[0], name, what, dim, *linear[1:]))
    return out
