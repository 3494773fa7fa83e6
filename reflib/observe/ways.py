"""Ways to lower a program's peak of memory, results unchanged: ``explain(...).memory.ways``.

Most are tried before they are offered: the function is compiled again, up to its plan, with another option or for fewer
rows, and the plan says how many bytes the peak has then. Nothing is computed for that. What depends on one buffer alone
(an update that is not made in place, a result, a value that could be computed again) is read off the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from ..ir.program import Buffer, Variants, fallback_kernels
from ..pipeline import Stages
from ..plan.order import WORTH
from .ranking import _nodes, work

if TYPE_CHECKING:
    from .memory import MemoryReport, Step, _Names

# The graphs of the same function compiled again, nothing measured: with another value of an option, or for so many rows
# of those arguments that have so many: ((name, value), (rows, of)) -> graphs. Empty where that cannot be compiled.
Again = Callable[["tuple[str, Any] | None", "tuple[int, int] | None"], "Sequence[Stages]"]


@dataclass(frozen=True, slots=True)
class Way:
    """How to lower the peak. ``saves``: bytes of it.   ``moves``: bytes read and written more than now, per call."""

    text: str
    saves: int
    moves: int

    def __str__(self) -> str:
        cost = f"moves {self.moves:,} bytes more" if self.moves > 0 else "costs nothing"
        return f"{self.text}: saves {self.saves:,} bytes of the peak, {cost}"


def cheapest(r: MemoryReport, named: _Names, again: Again) -> tuple[Way, ...]:
    """Three, or fewer if there are no three: the fewest bytes moved per byte saved first."""
    peak = r.peak
    if peak is None:
        return ()
    now = r.graphs if r.stages.options.autotune == "off" else again(None, None)  # as those are that it is compared with
    if (least := r.peak_among(now)) is None:
        now, least = r.graphs, r.peak_bytes
    ways = [w for w in _of_buffers(r, peak, named) if w.saves > WORTH * peak.bytes]
    for more in (False, True):  # (each trial is a compilation)
        tried = [*_by_options(r, again, more), *_by_rows(r, peak, again, more)] if len(ways) < 3 or not more else []
        found = (replace(w, saves=w.saves + least, moves=w.moves - moved(now)) for w in tried)
        ways += [w for w in found if w.saves > WORTH * peak.bytes]
    return tuple(sorted(ways, key=lambda w: (max(w.moves, 0) / w.saves, -w.saves))[:3])


def first_rows(call: Any, rows: int, of: int) -> Any:
    """``call``, a nest of arguments, with the first ``rows`` of each tensor that has ``of``."""

    def first(t: torch.Tensor) -> torch.Tensor:
        return t.detach()[:rows].requires_grad_(t.requires_grad) if t.dim() and len(t) == of else t

    return tree_map_only(torch.Tensor, first, call)


def _of_buffers(r: MemoryReport, peak: Step, named: _Names) -> Iterable[Way]:
    """Some may save nothing."""
    assert r.stages.scheduled is not None
    table = r.stages.scheduled.buffers
    at = peak.number - 1
    for u in r.updates:
        if u.why and any(h.buffer == u.buffer or h.source == u.source for h in peak.held):
            yield Way(f"let {u.op} ({u.source}) write in place: {u.why}", _without(r, u.copied, at, at), 0)
    for h in peak.held:
        reads = named.readers.get(h.buffer, [])
        after = [i for i, _ in reads if i > at]
        before = [i for i, _ in reads if i < at] + [named.at.get(h.kernel, 0)]
        maker = named.nodes.get(h.kernel)
        if isinstance(maker, Variants) and all(i != at for i, _ in reads) and after and h.kind == "temporary":
            again = sum(table[b].nbytes.hint() for b in maker.reads()) + h.bytes
            if all(_there(r, table, b, min(after)) for b in maker.reads()) and named.at.get(h.kernel) != at:
                saves = _without(r, h.bytes, max(before) + 1, min(after) - 1)
                yield Way(f"compute {h.buffer} ({h.source}) again for {h.next} instead of keeping it", saves, again)
        if h.kind == "returned" and not after and r.stages.graph.name != "backward" and h.kernel != peak.kernel:
            saves = _without(r, h.bytes, max(before) + 1, len(r.moments))
            yield Way(f"return {h.buffer} ({h.source}) only if it is needed", saves, 0)


def _by_options(r: MemoryReport, again: Again, more: bool) -> Iterable[Way]:
    """(``saves`` and ``moves``: not yet compared with what is now.) ``more``: further in a known way."""
    options = r.stages.options
    helpful = "reorder_for_peak_memory", "inplace_buffers", "reuse_buffers"
    changes: list[tuple[str, Any]] = [(name, True) for name in helpful if not (more or getattr(options, name))]
    changes += [("arena", False)] if options.arena and not more else []
    now = 1.0 if options.activation_memory_budget is None else options.activation_memory_budget
    if now and any(s.graph.name == "backward" for s in r.graphs):
        changes += [("activation_memory_budget", 0.0 if more else now / 2)]
    for name, value in changes:
        graphs = again((name, value), None)
        if (peak := r.peak_among(graphs)) is not None:
            yield Way(f"Options({name}={value if isinstance(value, bool) else f'{value:g}'})", -peak, moved(graphs))


def _by_rows(r: MemoryReport, peak: Step, again: Again, more: bool) -> Iterable[Way]:
    """Several calls with some of the rows each, where what is large at the peak has the rows of an input. What the
    earlier calls returned is there in the later ones: their results, or the gradients that are added up. (``saves`` and
    ``moves``: not yet compared with what is now.)"""
    program, name = r.stages.scheduled, r.stages.graph.name
    assert program is not None
    weights = r.stages.graph.weights
    firsts = [program.buffers[b].shape[0].hint() for b in program.inputs if _has_rows(program.buffers, b, weights)]
    held: dict[int, int] = dict.fromkeys(firsts, 0)
    for h in peak.held:
        b = program.buffers.get(h.buffer)
        if b is not None and b.shape and b.shape[0].hint() in held:
            held[b.shape[0].hint()] += h.bytes
    rows = max(held, key=lambda n: held[n], default=0)
    if any(n.hint() == rows for b in program.inputs if b in program.buffers for n in program.buffers[b].shape[1:]):
        return  # (of which tensors are these the rows?)
    parts = 4 if more else 2
    graphs = again(None, (rows // parts, rows)) if rows and held[rows] and rows % parts == 0 else ()
    if (least := r.peak_among(graphs)) is not None:
        own = next((s for s in graphs if s.graph.name == "backward"), graphs[r.index])
        earlier = _returned(own) * (parts - 1 if name == "inference" else 1)
        add = "" if name == "inference" else ", add up the gradients"
        text = f"call it for {rows // parts} of {rows} rows at a time{add}, if no row needs another"
        yield Way(text, -least - earlier, parts * moved(graphs))


def _has_rows(buffers: Mapping[str, Buffer], b: Any, weights: Any) -> bool:
    return isinstance(b, str) and b in buffers and b not in weights and bool(buffers[b].shape)


def _returned(s: Stages) -> int:
    assert s.scheduled is not None
    table = s.scheduled.buffers
    return sum(table[b].nbytes.hint() for b in s.scheduled.output_buffers() if table[b].kind == "temp")


def moved(graphs: Iterable[Stages]) -> int:
    """Bytes that kernels and calls read and write."""
    total = 0
    for s in graphs:
        assert s.scheduled is not None and s.plan is not None
        other = fallback_kernels(s.scheduled.nodes)
        total += sum(work(s.scheduled, n)[0] for n in _nodes(s.plan.steps) if n.name not in other)
    return total


def _there(r: MemoryReport, table: Mapping[str, Buffer], b: str, at: int) -> bool:
    """Is the buffer in memory at that step anyway?"""
    return table[b].kind != "temp" or any(name == b for name, _ in r.moments[at].live)


def _without(r: MemoryReport, size: int, first: int, last: int) -> int:
    """How much lower the peak is with ``size`` bytes less at the steps from ``first`` to ``last``."""
    return r.peak_bytes - max(m.bytes - size * (first <= m.node <= last) for m in r.moments)
