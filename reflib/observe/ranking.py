"""Kernels ranked by what they take above their floor: the least time for their bytes, or for their operations.

A long kernel is not yet a slow one: a large product takes long because it has much to do. What a kernel takes above
its floor is the most that can be gained there. Each element is counted once per kernel, however often it is read,
and twice where it is read and then overwritten; operations are those of products, reductions and the arithmetic in
loops. A kernel whose data is still in a cache can be faster than the floor, which is of memory.

NB: TorchInductor has ``TORCHINDUCTOR_PROFILE=1`` for the bandwidth of its Triton kernels, and estimates in traces of
``torch.profiler`` (``torch/_inductor/analysis/profile_analysis.py``).
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from ..autotune.roofline import flops_per_second, rates
from ..generate.compile_triton import alike
from ..ir.expr import Expr, Ref
from ..ir.loops import Load, LoopNest, Op, Reduce, Store
from ..ir.program import Extern, KernelNode, Program, Template, View, fallback_kernels, iter_views
from ..pipeline import Stages
from ..plan import Branch, Call, Launch
from ..target import Target
from ..timeline import Timed
from .trace import came_from, modules_of

Node = KernelNode | Extern


class Roof(Protocol):
    """A device's limits: ``lab.Roofline``, which is measured, or a ``DataSheet``."""

    def time(self, bytes: float, flops: float = 0.0) -> float:
        """The least time for this work, in µs."""


@dataclass(frozen=True)
class DataSheet:
    """Limits of a GPU that need not be here, as its maker gives them."""

    target: Target
    dtype: torch.dtype = torch.float32

    def time(self, bytes: float, flops: float = 0.0) -> float:
        return max(bytes / rates(self.target).memory / 1e3, flops / flops_per_second(self.dtype, self.target) * 1e6)


@dataclass(frozen=True)
class Ranked:
    """A kernel or a call of PyTorch. ``us``: the median of what all its ``runs`` in one call take: on a GPU there, on a
    CPU by the clock; None where it was not seen to run. ``floor_us``: the least for its ``bytes`` and ``flops``; None
    where no limits are known. ``graph``: the number of its graph."""

    name: str
    graph: int
    is_kernel: bool
    us: float | None
    runs: int
    floor_us: float | None
    bytes: int
    flops: int
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def above(self) -> float | None:
        """µs above the floor."""
        return None if self.us is None or self.floor_us is None else self.us - self.floor_us

    @property
    def ratio(self) -> float | None:
        """How many times its floor it takes."""
        return self.us / self.floor_us if self.us is not None and self.floor_us else None


class Ranking(list[Ranked]):
    """Those most above their floor first; without floors or times, by what is known of them."""

    def __str__(self) -> str:
        lines = [f"{'µs':>10} {'floor':>10} {'ratio':>6}  kernel or call: your line"]
        for r in self:
            numbers = (_number(r.us, 10), _number(r.floor_us, 10), _number(r.ratio, 6))
            lines.append(f"{' '.join(numbers)}  {r.name}: {r.lines[-1] if r.lines else ', '.join(r.ops)}")
        return "\n".join(lines)


def _number(x: float | None, width: int) -> str:
    return f"{'' if x is None else f'{x:,.1f}':>{width}}"


def ranking(graphs: Sequence[Stages], calls: Sequence[Sequence[Timed]] = (), roof: Roof | None = None) -> Ranking:
    """A row per kernel and call of PyTorch. calls: the events of each call of the program (``trace.recorded_calls``).
    Kernels that did not run are left out where others did: fallbacks, other ranges of a size."""
    rows = []
    on_gpu = any(b.device.type == "cuda" for s in graphs if s.scheduled for b in s.scheduled.buffers.values())
    steps = [(i, n) for i, s in enumerate(graphs) if s.plan is not None for n in _nodes(s.plan.steps)]
    first = [alike((s.kernels or {}).values()) for s in graphs]
    shared = {(i, k.name): one.name for i, found in enumerate(first) for k, one in found.items()}
    taken = [times(steps, events, on_gpu, shared) for events in calls]
    modules = [modules_of(s) for s in graphs]
    for at, (i, node) in enumerate(steps):
        program = graphs[i].scheduled
        assert program is not None
        found = [t[at] for t in taken if at in t]
        if taken and any(taken) and not found or not taken and node.name in fallback_kernels(program.nodes):
            continue
        runs = max(1, round(median(len(f) for f in found))) if found else 1
        nbytes, flops = work(program, node)
        least = None if roof is None else runs * roof.time(nbytes, flops)
        linked = came_from(node.origins, modules[i], node.writes())
        of = (tuple(linked[what]) for what in ("ops", "modules", "lines"))
        us = median(1e6 * sum(f) for f in found) if found else None
        rows.append(Ranked(names_of(node)[0], i, isinstance(node, KernelNode), us, runs, least, nbytes, flops, *of))
    return Ranking(sorted(rows, key=_first))


def _first(r: Ranked) -> tuple[bool, float]:
    by = next((x for x in (r.above, r.us, r.floor_us) if x is not None), r.bytes)
    return r.above is None, -by


def _nodes(steps: Any) -> Iterator[Node]:
    """What is launched or called, in order."""
    for s in steps:
        if isinstance(s, Launch):
            yield s.kernel
        elif isinstance(s, Call):
            yield s.extern
        elif isinstance(s, Branch):
            yield from _nodes(s.then)
            yield from _nodes(s.otherwise)


def names_of(node: Node) -> list[str]:
    """What a launch of this node is called in a trace."""
    if isinstance(node, KernelNode):
        return [node.name]
    schema = getattr(node.target, "_schema", None)  # as the profiler has it: aten::mm
    return [str(node.target), *([str(node.out[0])] if node.out else []), *([schema.name] if schema else [])]


# -- what it takes ----------------------------------------------------------------------------------
def times(
    steps: Sequence[tuple[int, Node]], events: Sequence[Timed], on_gpu: bool,
    shared: Mapping[tuple[int, str], str] = MappingProxyType({}),
) -> dict[int, list[float]]:  # fmt: skip
    """Of one call: number of a step -> seconds of each of its runs.

    A step's launches have its name. Of steps with one name, which run in order, each launch is the next one's. shared:
    (graph, kernel) -> whose machine code it has, and so its name on the device.
    """
    kind = "launch" if any(e.kind == "launch" for e in events) else "profiler"  # a C++ wrapper's
    named: dict[str, list[int]] = {}
    for at, (_, node) in enumerate(steps):
        for name in dict.fromkeys(names_of(node)):
            named.setdefault(name, []).append(at)
    started = _Started(events)
    out: dict[int, list[float]] = {}
    end, count = 0.0, dict[tuple[str, Any], int]()
    for e in sorted((e for e in events if e.kind == kind and e.name in named), key=lambda e: e.start):
        if e.start < end:  # what an op calls is part of it
            continue
        end = e.start + e.seconds
        graph = e.about.get("graph") if kind == "launch" else None
        those = [at for at in named[e.name] if graph is None or str(steps[at][0]) == graph] or named[e.name]
        key = e.name, graph
        at = those[count.get(key, 0) % len(those)]
        count[key] = count.get(key, 0) + 1
        out.setdefault(at, []).append(started.seconds(e) if on_gpu else e.seconds)
    quiet: dict[str, list[int]] = {}  # in a replayed CUDA graph: by what the device says
    for at, (graph, node) in enumerate(steps):
        if not any(out.get(at, ())):
            quiet.setdefault(shared.get((graph, node.name), node.name), []).append(at)
    for name, those in quiet.items():
        runs = sorted((e for e in events if e.kind == "device" and e.name == name), key=lambda e: e.start)
        for k, at in enumerate(those):
            if found := [e.seconds for e in runs[k :: len(those)]]:
                out[at] = found
    return {at: found for at, found in out.items() if not on_gpu or any(found)}


class _Started:
    """What the launches of one call started on a GPU."""

    def __init__(self, events: Sequence[Timed]):
        self.calls = sorted((e.start, e.flow) for e in events if e.kind == "profiler" and e.flow)
        self.device: dict[int, float] = {}
        for e in events:
            if e.kind == "device":
                self.device[e.flow] = self.device.get(e.flow, 0.0) + e.seconds

    def seconds(self, launch: Timed) -> float:
        """On the device, of what began while ``launch`` ran on the host."""
        first = bisect.bisect_left(self.calls, (launch.start, -1))
        last = bisect.bisect_right(self.calls, (launch.start + launch.seconds, 1 << 62))
        return sum(self.device.get(flow, 0.0) for flow in {flow for _, flow in self.calls[first:last]})


# -- what it has to do ------------------------------------------------------------------------------
def work(program: Program, node: Node) -> tuple[int, int]:
    """The bytes that it has to read and write, and the floating-point operations: at least."""
    if isinstance(node, Extern):
        return _bytes(program, _operands(node, program)), _called_flops(node, program)
    read, written = dict[str, int](), dict[str, int]()
    flops = 0
    for part in node.parts:
        if isinstance(part, Extern):  # a Triton kernel of the user's, alone
            return work(program, part)
        loops = part if isinstance(part, LoopNest) else part.epilogue
        for s in loops.body:
            if isinstance(s, Store):
                written[s.buffer] = written.get(s.buffer, 0) + _points(loops, s)
            elif isinstance(s, Load) and s.buffer not in written:  # what it wrote itself may still be in a cache
                read[s.buffer] = read.get(s.buffer, 0) + _points(loops, s)
        if isinstance(part, Template):
            b, m, n, k = (e.hint() for e in part.sizes)
            flops += 2 * b * m * n * k
            for v in (part.a, part.b):
                if part.prologue(v) is None:
                    read[v.buffer] = read.get(v.buffer, 0) + _elements(v)
            for nest, s in ((p, s) for p in part.prologues for s in p.loads()):
                read[s.buffer] = read.get(s.buffer, 0) + _points(nest, s)
        flops += _loop_flops(loops)
    return _bytes(program, read) + _bytes(program, written), flops


def _operands(node: Extern, program: Program) -> dict[str, int]:
    """Buffer -> elements, of what a call is given and what it returns."""
    out: dict[str, int] = {}
    for v in iter_views((node.args, node.kwargs)):
        out[v.buffer] = max(out.get(v.buffer, 0), _elements(v))
    for b in node.writes():
        if b in program.buffers:
            out.setdefault(b, program.buffers[b].numel.hint())
    return out


def _bytes(program: Program, elements: dict[str, int]) -> int:
    """Of each buffer no more than it has."""
    buffers = ((program.buffers[b], n) for b, n in elements.items() if b in program.buffers)
    return sum(min(b.nbytes.hint(), n * b.dtype.itemsize) for b, n in buffers)


def _elements(v: View) -> int:
    """Different ones: of an expanded dimension one."""
    out = 1
    for size, stride in zip(v.shape, v.strides):
        out *= 1 if stride == 0 else size.hint()
    return out


def _points(loops: LoopNest, s: Load | Store) -> int:
    """How many elements it touches at most: one for each point of the axes that its index varies with."""
    indirect = any(isinstance(a, Ref) for a in s.index.atoms())
    out = 1
    for axis in loops.axes:
        if indirect or s.index.has(axis.var):
            out *= axis.size.hint()
    return out


def _loop_flops(loops: LoopNest) -> int:
    """One for an operation at each point of the parallel axes; of a reduction, two at each point if its argument is
    computed (a product), else one."""
    body, points = loops.body, loops.numel.hint()
    done = 0
    for s in body:
        if isinstance(s, Op) and s.dtype.is_floating_point:
            done += points
        elif isinstance(s, Reduce) and s.dtype.is_floating_point:
            done += points * loops.rnumel.hint() * (2 if isinstance(body[s.args[0]], Op) else 1)
    return done


_AS = {  # ops that PyTorch has no formula for -> one with the same arguments in front, and the same products
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


def _called_flops(node: Extern, program: Program) -> int:
    """As ``torch.utils.flop_counter`` counts them; of what it does not know, none."""
    op = getattr(node.target, "overloadpacket", node.target)
    formula = flop_registry.get(_AS.get(op, op))
    if formula is None:
        return 0

    def shown(x: Any) -> Any:
        return torch.Size(s.hint() for s in x.shape) if isinstance(x, View) else x.hint() if isinstance(x, Expr) else x

    made = [torch.Size(s.hint() for s in program.buffers[b].shape) for b in node.outputs if isinstance(b, str)]
    try:
        leaf = lambda x: isinstance(x, View)  # noqa: E731
        args, kwargs = tree_map(shown, (node.args, dict(node.kwargs)), is_leaf=leaf)
        return int(formula(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))
    except Exception:  # a formula for other arguments
        return 0


def data_sheet(graphs: Sequence[Stages]) -> DataSheet | None:
    """Of the GPU that the graphs are for; None for a CPU."""
    for s in graphs:
        for b in s.scheduled.buffers.values() if s.scheduled is not None else ():
            if (target := s.target_of(b.device)).is_gpu:
                return DataSheet(target, product_dtype(graphs))
    return None


def product_dtype(graphs: Sequence[Stages]) -> torch.dtype:
    """Of the first matrix product's operands, else float32: that whose rate is a limit."""
    for s in graphs:
        if s.plan is None or s.scheduled is None:
            continue
        for node in _nodes(s.plan.steps):
            for part in node.parts if isinstance(node, KernelNode) else (node,):
                if isinstance(part, Template):
                    return part.dtype
                if isinstance(part, Extern) and _called_flops(part, s.scheduled):
                    return next(iter_views(part.args)).dtype
    return torch.float32
