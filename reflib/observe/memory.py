"""``explain(...).memory``: the bytes alive at each step, whose they are, eager's beside, and how to have fewer.

A step is a kernel or a call. Counted is what the program itself allocates, its results included; in a backward also
what the forward saved for it, until it is read for the last time. Inputs and weights are the caller's, with or without
a compiler. Sizes are those at the traced hints.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Any

import torch

from ..fuse.dependencies import inside
from ..ir.printer import dtype_name
from ..ir.program import Buffer, Node, Program, View
from ..pipeline import Stages
from ..plan.memory import Memory, memory
from ..plan.order import Order, owned, search
from ..plan.steps import Free
from .decisions import html_table
from .eager_memory import Eager
from .ways import Again, Way, cheapest

_NO_EAGER = Eager((), "eager's memory is not known: a program that was exported has no function to run")
_MOST_ROWS = 40


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer in memory. ``kind``: ``returned``, ``saved`` (for the backward), ``temporary`` or ``workspace``.
    ``kernel``: what makes it ("the forward" in a backward).   ``next``: what reads it next, at this step or after; ""
    for nothing.   ``module``: path of the module that it comes from.   ``source``: the user's line."""

    buffer: str
    bytes: int
    kind: str
    what: str  # float32[4096, 1000]
    kernel: str
    next: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class Step:
    """``eager``: eager's bytes at the last op of the same line, None where that is not known."""

    number: int
    kernel: str
    bytes: int
    eager: int | None
    module: str
    source: str
    held: tuple[Held, ...]


@dataclass(frozen=True)
class MemoryReport(Memory):
    """The plan of one graph (``steps``, ``moments``, ``peak_bytes``, ``allocations``, ``reuses``), and:

    ``table``: a Step per kernel and call.   ``peak``: the one with most bytes, None where nothing runs.
    ``eager``: eager's moments (``eager_memory.Eager``).   ``eager_peak_bytes``: of the same direction; None: not known.
    ``ways``: the three cheapest ways to lower the peak, results unchanged, each a Way (fewer if there are no three);
    ways with other options or fewer rows are compiled (not run) when this is first asked for.
    ``order``: whether another order of the steps could need less (``plan.order.Order``).
    """

    stages: Stages = field(kw_only=True)
    graphs: tuple[Stages, ...] = ()
    updates: tuple[Any, ...] = ()
    run_eager: Callable[[], Eager] = field(kw_only=True)
    again: Again = field(kw_only=True, repr=False)
    counted: Program = field(kw_only=True, repr=False)
    owned: set[str] = field(kw_only=True, repr=False)

    @cached_property
    def eager(self) -> Eager:
        return self.run_eager()

    @property
    def eager_peak_bytes(self) -> int | None:
        return self.eager.peak_bytes(self.stages.graph.name == "backward")

    @cached_property
    def order(self) -> Order:
        mine = owned(self.stages)
        return search(
            self.counted,
            {b: mine[b]._replace(storage=b, bytes=self.counted.buffers[b].nbytes.hint()) for b in self.owned},
        )

    @cached_property
    def table(self) -> tuple[Step, ...]:
        named = _Names(self)
        backward = self.stages.graph.name == "backward"
        eager = {m.source: m.bytes for m in self.eager.moments if m.source and not backward}
        out = []
        for i, m in enumerate(self.moments):
            held = tuple(named.held(b, n, i) for b, n in m.live)
            source = named.source(m.label)
            out.append(Step(i + 1, m.label, m.bytes, eager.get(source), named.module_of(m.label), source, held))
        return tuple(out)

    @property
    def peak(self) -> Step | None:
        return max(self.table, key=lambda s: s.bytes, default=None)

    @property
    def index(self) -> int:
        return next(i for i, s in enumerate(self.graphs) if s is self.stages)

    def peak_among(self, graphs: Sequence[Stages]) -> int | None:
        """The peak of the same graph among those of another compilation; None if there is none."""
        if [s.graph.name for s in graphs] != [s.graph.name for s in self.graphs]:
            return None
        return report(graphs[self.index], graphs, ()).peak_bytes

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        return cheapest(self, _Names(self), self.again)

    def __repr__(self) -> str:
        peak, eager = self.peak, self.eager_peak_bytes
        if peak is None:
            return "nothing runs, nothing is allocated"
        beside = f"eager {eager:,}" if eager is not None else self.eager.how
        lines = [f"peak {peak.bytes:,} bytes at step {peak.number} of {len(self.table)}, {peak.kernel} ({beside})"]
        for h in sorted(peak.held, key=lambda h: -h.bytes)[:_MOST_ROWS]:
            where = f" ({', '.join(filter(None, (h.module, h.source)))})" if h.module or h.source else ""
            by = f", by {h.kernel}" if h.kernel else ""  # (no kernel makes an arena)
            lines.append(f"  {h.bytes:>13,}  {h.buffer} {h.what}, {h.kind}{by}{where}")
        return "\n".join([*lines, *(f"lower: {w}" for w in self.ways), f"order: {self.order}"])

    def _repr_html_(self) -> str:
        def mark(s: Step) -> str:
            return f"{s.bytes:,}" + (" (peak)" if s.number == (self.peak or s).number else "")

        rows = [
            (str(s.number), s.kernel, mark(s), "" if s.eager is None else f"{s.eager:,}", s.module, s.source)
            for s in self.table[:_MOST_ROWS]
        ]
        table = html_table(("step", "kernel or call", "bytes alive", "eager, same line", "module", "line"), rows)
        more = f"<p>{len(self.table) - _MOST_ROWS} more steps</p>" if len(self.table) > _MOST_ROWS else ""
        return f"{table}{more}<pre>{escape(repr(self))}</pre>"


def report(
    s: Stages, graphs: Iterable[Stages], updates: Iterable[Any], run_eager: Callable[[], Eager] | None = None,
    again: Again | None = None,
) -> MemoryReport:  # fmt: skip
    """Of a compilation that reached the plan. ``run_eager`` is called when eager's memory is first asked for, ``again``
    when ways to lower the peak are."""
    assert s.scheduled is not None and s.plan is not None
    program, mine = _saved(s, graphs)
    base = memory(program, s.plan, mine)
    how = run_eager or (lambda: _NO_EAGER)
    more: dict[str, Any] = {"counted": program, "owned": mine, "updates": tuple(updates), "run_eager": how}
    more["again"] = again or (lambda options, rows: ())
    return MemoryReport(base.steps, base.changes, stages=s, graphs=tuple(graphs), **more)


def _saved(s: Stages, graphs: Iterable[Stages]) -> tuple[Program, set[str]]:
    """The program, and those of its inputs that hold memory of the forward's until they are freed. Of several views of
    one tensor that is the one freed last, with the size of all that the forward keeps for it."""
    assert s.scheduled is not None and s.plan is not None
    buffers = dict(s.scheduled.buffers)
    mine = set(owned(s)) & buffers.keys()
    freed = {step.buffer: i for i, step in enumerate(s.plan.steps) if isinstance(step, Free)}
    for forward in (g for g in graphs if mine and g.graph.name == "forward"):
        assert forward.scheduled is not None
        views: dict[str, list[str]] = {}
        for name, b in _named_outputs(forward):
            views.setdefault(b, []).extend([name] if name in mine else [])
        for b, names in views.items():
            made = forward.scheduled.buffers[b]
            mine.difference_update(names)
            if made.kind == "temp" and names:  # (else views of the caller's tensors)
                last = max(names, key=lambda name: freed.get(name, len(s.plan.steps)))  # type: ignore[union-attr]
                mine.add(last)
                buffers[last] = replace(made, name=last, kind="input")
    return replace(s.scheduled, buffers=buffers), mine


class _Names:
    """What a report says of buffers: which nodes make and read them, where they come from."""

    def __init__(self, r: MemoryReport):
        self.program = r.stages.scheduled
        assert self.program is not None
        self.nodes: dict[str, Node] = {n.name: n for n in self.program.nodes}  # type: ignore[union-attr]
        self.at = {m.label: m.node for m in r.moments}
        self.maker: dict[str, str] = {}
        self.readers: dict[str, list[tuple[int, str]]] = {}
        for name, outer in self.nodes.items():
            for node in inside(outer):  # (what a loop or a branch makes is the node's as a whole)
                for b in node.writes():
                    self.maker.setdefault(b, name)
            for b in outer.reads():
                self.readers.setdefault(b, []).append((self.at.get(name, 0), name))
        self.modules = {n.name: _module(n) for n in r.stages.graph.nodes}
        self.saved, self.returned = _outputs(r)

    def held(self, b: str, size: int, now: int) -> Held:
        assert self.program is not None
        buffer = self.program.buffers.get(b)
        maker = self.maker.get(b, "")
        kind = "saved" if b in self.saved else "returned" if b in self.returned else "temporary"
        if buffer is None:
            kind = "workspace"
        elif buffer.kind == "input":
            kind, maker = "saved", "the forward"
        later = next((name for at, name in self.readers.get(b, ()) if at >= now), "")
        what = "" if buffer is None else _what(buffer)
        return Held(b, size, kind, what, maker, later, self.modules.get(b) or self.module_of(maker), self.source(maker))

    def module_of(self, name: str) -> str:
        node = self.nodes.get(name)
        found = dict.fromkeys(m for b in (node.writes() if node is not None else ()) if (m := self.modules.get(b)))
        return ", ".join(found)

    def source(self, name: str) -> str:
        origins = getattr(self.nodes.get(name), "origins", ())
        return next((o.source for o in reversed(origins) if o.source), "")


def _what(b: Buffer) -> str:
    return f"{dtype_name(b.dtype)}[{', '.join(map(str, b.shape))}]"


def _module(node: torch.fx.Node) -> str:
    """The path of the innermost module ("layers.0.norm") that the op was called in."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next((p for p, _ in reversed(list(stack.values()))), "")
    return re.sub(r"^L\['\w+'\]\.?", "", path).replace("._modules", "")


def _outputs(r: MemoryReport) -> tuple[set[str], set[str]]:
    """Buffers that the forward saves for the backward, and those that it returns to the user."""
    wanted = {n.name for s in r.graphs if s.graph.name == "backward" for n in s.graph.nodes if n.op == "placeholder"}
    found = _named_outputs(r.stages)
    saved = {b for name, b in found if r.stages.graph.name == "forward" and name in wanted}
    return saved, {b for _, b in found} - saved


def _named_outputs(s: Stages) -> list[tuple[str, str]]:
    """(name in the graph, buffer) of each result that is a tensor."""
    assert s.scheduled is not None
    *_, output = s.graph.nodes
    names = [getattr(n, "name", "") for n in torch.utils._pytree.tree_leaves(output.args[0])]
    return [(name, v.buffer) for name, v in zip(names, s.scheduled.outputs) if isinstance(v, View)]
