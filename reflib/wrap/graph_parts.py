"""A program cut into parts: those that a CUDA graph can record, and what runs between them.

What cannot be recorded: what is on another device or copies from or to it, waits for the GPU (``nonzero``, ``item``:
sizes known only afterwards), communicates, or is an op tagged ``cudagraph_unsafe``. A part is a program of its own,
planned, printed and built as any other. It is given the buffers and sizes that it uses and returns those that later
parts, or the caller, use; a tensor between two parts dies with its last reader, as in one program. Sizes are numbers
among a part's inputs, those that an earlier part found out too, so each has recordings of its own.

* *Order.* Of the steps that may run next, those of the same kind as the last one come first: fewer parts. Not in a
  program that communicates (its order overlaps), nor where it needs more than ``MORE`` of the memory.
* *Short parts.* A replay costs the host what some ``LEAST`` launches do: shorter runs are not recorded.

NB: TorchInductor cuts its list of kernels in the same places (``Scheduler.should_partition``, pull requests 147038 and
147648), and its wrapper calls a function per part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from ..fuse.dependencies import dependencies, inside, sizes_needed
from ..fuse.emit import order
from ..generate import generate
from ..ir.expr import Sym, expr
from ..ir.program import Buffer, Extern, Node, Program, full_view, iter_views, symbols_in
from ..ir.regions import Region
from ..ir.verify import verify
from ..options import Options
from ..plan import plan
from ..plan.arena import arena
from ..plan.order import Lifetimes, communicates, owned
from ..plan.plan import allocated_by, bind_symbols
from .python import passed_on
from .runtime import expect
from .wrap import Wrapped, wrap

LEAST = 4
MORE = 1.1
UNSAFE = {torch.Tag.cudagraph_unsafe, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
Call = Callable[[list], Sequence[Any]]


# -- what can be recorded -------------------------------------------------------------------------------
def why_not(node: Node, program: Program, kind: str) -> str:
    """Why a graph of a device of this kind cannot have ``node`` in it; "" if nothing is known against it."""
    for n in inside(node):
        for b in (*n.reads(), *n.writes()):
            if b in program.buffers and (device := program.buffers[b].device).type != kind:
                return f"{_name(n)} has tensors on {device}"
        if isinstance(n, Extern):
            if found := UNSAFE.intersection(getattr(n.target, "tags", ())):
                return f"{_name(n)} is tagged {found.pop()}"
            if n.symbols:
                return f"{_name(n)} returns sizes that are not known before"
            if communicates(n):
                return f"{_name(n)} communicates"
    return ""


def _name(n: Node) -> str:
    where = next((f" ({o.source.split(' in ')[0]})" for o in getattr(n, "origins", ()) if o.source), "")
    return f"{n.target if isinstance(n, Extern) else n.name}{where}"


# -- cutting --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Part:
    """``takes``: buffers and symbols, as the program's inputs. ``gives``: the same, as its outputs; of the last part,
    which has no nodes, nothing: its outputs are the whole program's. ``recorded``: to be; else ``why``: why not."""

    program: Program
    takes: tuple[Any, ...]
    gives: tuple[Any, ...]
    recorded: bool
    why: tuple[str, ...]


def cut(program: Program, kind: str, stages: Any = None) -> list[Part]:
    """The parts, in order; one where all can be recorded. ``stages``: what the program is of, if known."""
    whys = [why_not(n, program, kind) for n in program.nodes]
    if not any(whys) and all(b.device.type == kind for b in program.buffers.values()):
        return [Part(program, (), (), True, ())]
    runs: list[tuple[bool, list[int]]] = []
    for recorded, run in groupby(_order(program, whys, stages), key=lambda i: not whys[i]):
        nodes = list(run)
        recorded = recorded and len(nodes) >= LEAST
        if runs and not recorded and not runs[-1][0]:
            runs[-1][1].extend(nodes)
        else:
            runs.append((recorded, nodes))
    return _parts(program, runs, whys)


def _order(program: Program, whys: Sequence[str], stages: Any) -> list[int]:
    """Positions of nodes: a topological order by kind, each kind's in the order in which they were."""
    given = list(range(len(whys)))
    if any(isinstance(n, Extern) and communicates(n) for node in program.nodes for n in inside(node)):
        return given

    def pick(ready: dict[bool, list[int]], out: list[int]) -> bool:
        last = not out or bool(whys[out[-1]])
        return last if ready[last] else not last

    out = order(dependencies(program).before, lambda i: bool(whys[i]), pick)
    lives = Lifetimes(program, {} if stages is None else owned(stages))
    return out if lives.peak(tuple(out)) <= MORE * lives.peak(tuple(given)) else given


def _parts(program: Program, runs: list[tuple[bool, list[int]]], whys: Sequence[str]) -> list[Part]:
    nodes = [tuple(program.nodes[i] for i in at) for _, at in runs]
    needs = [_needed(program, mine) for mine in nodes]
    needs[0] |= symbols_in(([f.what for facts, _ in program.checks for f in facts], [t[0] for t in program.tuned]))
    ends = {v.buffer for v in iter_views(program.outputs)}
    needs.append({*ends, *symbols_in([program.outputs, *(full_view(program.buffers[b]) for b in ends)])})
    have = {*program.inputs, *(let.sym for let in bind_symbols(program))}
    parts = []
    for k, (recorded, at) in enumerate(runs):
        takes, made = _sorted(needs[k] & have), _made(nodes[k])
        gives = _sorted(made.intersection(set().union(*needs[k + 1 :])).difference(takes))
        have |= made
        outputs = tuple(expr(x) if isinstance(x, Sym) else full_view(program.buffers[x]) for x in gives)
        part = _program(program, nodes[k], takes, outputs)
        if k == 0:
            part = replace(part, checks=program.checks, tuned=program.tuned)
        parts.append(Part(part, takes, gives, recorded, tuple(dict.fromkeys(whys[i] for i in at if whys[i]))))
    takes = _sorted(needs[-1] & have)
    return [*parts, Part(_program(program, (), takes, program.outputs), takes, (), False, ())]


def _needed(program: Program, nodes: Iterable[Node]) -> set[Any]:
    """Buffers and symbols that the nodes use, or make."""
    out: set[Any] = set()
    for node in nodes:
        out |= {*node.reads(), *node.writes(), *sizes_needed(program, node)}
        out |= {v.buffer for v in iter_views(getattr(node, "outputs", ()))}
        own = [n for n in inside(node) if n is not node]
        out -= {s for n in own if isinstance(n, Extern) for s, _, _ in n.symbols}
        out -= {n.counter for n in inside(node) if isinstance(n, Region)}
    return out


def _made(nodes: Iterable[Node]) -> set[Any]:
    symbols = {s for n in nodes if isinstance(n, Extern) for s, _, _ in n.symbols}
    return symbols.union(*(n.writes() for n in nodes))


def _sorted(names: Iterable[Any]) -> tuple[Any, ...]:
    """Buffers, then symbols."""
    return tuple(sorted(names, key=lambda x: (isinstance(x, Sym), str(x))))


def _program(program: Program, nodes: tuple[Node, ...], takes: tuple[Any, ...], outputs: tuple[Any, ...]) -> Program:
    used = {v.buffer for v in iter_views(outputs)}.union(takes)
    for n in (n for node in nodes for n in inside(node)):
        used.update((*n.reads(), *n.writes(), *(v.buffer for v in iter_views(getattr(n, "outputs", ())))))
    buffers = {b: replace(x, kind="input") if b in takes else x for b, x in program.buffers.items() if b in used}
    weights = tuple(w for w in program.weights if w in takes)
    return replace(
        program, inputs=takes, buffers=buffers, nodes=nodes, outputs=outputs, weights=weights, tuned=(), checks=()
    )


def with_results(program: Program) -> tuple[Program, list[Buffer]] | None:
    """``program``, given memory for its results as further inputs; None where a call or a block returns its own."""
    first = {b: node for node in reversed(program.nodes) for b in node.writes()}
    results = [b for b in program.buffers.values() if b.name in program.output_buffers() and b.kind == "temp"]
    if any(b.name not in allocated_by(first[b.name]) for b in results):
        return None
    given = {b.name: replace(b, kind="input") for b in results}
    return replace(program, inputs=(*program.inputs, *given), buffers=program.buffers | given), results


# -- building and running -------------------------------------------------------------------------------
def build(program: Program, options: Options, stages: Any) -> Wrapped:
    """A part as a callable. ``stages``: of the whole program."""
    if options.verify:
        verify(program)
    steps = plan(program, options)
    if options.arena:
        program, steps = arena(program, steps)
    return wrap(program, steps, generate(program, stages.target_of), options, built=stages.built)[1]


class Chain:
    """``parts`` run one after another, by ``calls``: a list of the program's inputs, emptied, to its outputs."""

    def __init__(self, program: Program, parts: Sequence[Part], calls: Sequence[Call]):
        lets = bind_symbols(program)
        names = [*program.inputs, *(let.sym for let in lets), *(x for p in parts for x in p.gives)]
        at = {x: i for i, x in enumerate(names) if x is not None}
        self._symbols = {x: i for x, i in at.items() if isinstance(x, Sym)}
        self._lets = [(at[let.buffer], let.what, let.dim, let.times, let.plus) for let in lets]
        self._later = [None] * (len(names) - len(program.inputs) - len(lets))
        last = {x: k for k, p in enumerate(parts) for x in p.takes}
        dead: list[list[int]] = [[] for _ in parts]
        for x, i in at.items():
            dead[last.get(x, 0)].append(i)  # (no part takes it: at once)
        # What calls return is held against what was promised of it in their own part only if that has a kernel for it.
        returned = {o for n in program.nodes if isinstance(n, Extern) for o in n.outputs} - passed_on(program)
        self._steps = [
            (call, [at[x] for x in p.takes], [at[x] for x in p.gives], dead[k],
             [(at[x], program.buffers[x]) for x in p.gives if x in returned])
            for k, (p, call) in enumerate(zip(parts, calls, strict=True))
        ]  # fmt: skip

    def __call__(self, args: list) -> Sequence[Any]:
        values = list(args)
        args.clear()
        values += [(getattr(values[i], what)(dim) - plus) // times for i, what, dim, times, plus in self._lets]
        values += self._later
        results: Sequence[Any] = ()
        for call, takes, gives, dead, returned in self._steps:
            given = [values[i] for i in takes]
            for i in dead:
                values[i] = None
            results = call(given)
            for i, x in zip(gives, results):
                values[i] = int(x) if x.__class__ is bool else x  # (a condition on sizes is a number)
            for i, b in returned:
                values[i] = expect(values[i], *self._layout(b, values))
        return results

    def _layout(self, b: Buffer, values: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        known = {x: values[i] for x, i in self._symbols.items()}
        return tuple(int(e.evaluate(known)) for e in b.shape), tuple(int(e.evaluate(known)) for e in b.strides)
