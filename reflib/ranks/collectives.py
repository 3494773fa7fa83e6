"""Functional collectives: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, and waiting for them.

In a captured graph a collective returns at once; ``wait_tensor`` of its result waits until that holds the values. So a
program has two calls, and what stands between them runs while data moves. Three things must hold:

* **Storage.** Until the wait, the collective may read its arguments and write its results. The wait is therefore a
  call that *writes* the result, in place, and *reads* the arguments (``reflib::wait``; its schema says so). All that
  orders nodes or reuses storage goes by these, and so leaves both alone: fusion, updates in place, the plan. An
  all-reduce or a broadcast copies its argument first, which is free then; where that is not needed any more,
  ``fuse.in_place`` drops the copy, and the same memory holds the result.
* **Order.** All ranks must start the same collectives in the same order. Each start is an effect, as a random op is:
  effects keep the order of the graph, whatever is fused, chosen or moved around them.
* **Overlap.** A list scheduler (``overlapped``) starts each collective as soon as its arguments are there, and takes a
  wait, with what follows from it, only when nothing else is ready. At most ``PENDING`` bytes of results wait at a time:
  else the gathers of a model whose weights are sharded would all start at once, and hold the whole model.

A result without a wait in the graph (its wait is in another, such as the backward) is waited for where it is
started: what it reads is then as safe as any other call's arguments.

NB: TorchInductor moves starts and waits over a scheduled list of kernels, by estimated times and memory
(``reorder_compute_for_overlap``); and keeps a buffer that a collective reads alive by dependencies of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..fuse.dependencies import dependencies, inside
from ..fuse.emit import order
from ..fuse.result import Fused
from ..fuse.updates import in_place_form
from ..ir.program import Extern, Node, Program, View, full_view, iter_views
from ..ir.regions import Region
from ..lower.context import LoweringContext, contiguous_strides
from ..lower.extern import extern
from ..lower.rules import RULES
from ..options import Options
from ..target import Target
from .meeting import RanksError

PENDING = 1 << 29  # bytes of results
SPACE = "_c10d_functional"
STARTS = tuple(
    f"{SPACE}.{name}.default"
    for name in (
        *("all_reduce", "all_reduce_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast"),
    )
)
WAITS = f"{SPACE}.wait_tensor.default"

_library = torch.library.Library("reflib", "FRAGMENT")
_library.define("wait(Tensor(a!) result, Tensor[] held) -> ()")


@torch.library.impl(_library, "wait", "CompositeExplicitAutograd")
def _wait(result: torch.Tensor, held: list[torch.Tensor]) -> None:
    torch.ops._c10d_functional.wait_tensor(result)


WAIT = torch.ops.reflib.wait.default


# -- lowering ---------------------------------------------------------------------------------------------
def start(cx: LoweringContext, *args: Any, **kwargs: Any) -> Any:
    """A collective: it returns at once."""
    fakes, spec = pytree.tree_flatten(cx.fake)
    plain = pytree.tree_unflatten([_contiguous(cx, f) for f in fakes], spec)
    value = extern(replace(cx, fake=plain), cx.node.target, args, kwargs, "communicates", effect=True)
    if _waited(cx.node):
        return value
    call, results = cx.low.nodes[-1], list(iter_views(value))
    cx.low.nodes += [_wait_for(cx, v, call, i) for i, v in enumerate(results)]
    return pytree.tree_unflatten([_laid_out(cx, v, f) for v, f in zip(results, fakes)], spec)


def _contiguous(cx: LoweringContext, fake: torch.Tensor) -> torch.Tensor:
    """The result as it will be: contiguous. (Meta functions say so of most, but not of all: and what is copied into the
    layout that they state must not be a result that is not complete yet.)"""
    s = cx.low.symbols
    return fake if s.exprs(fake.stride()) == contiguous_strides(s.exprs(fake.shape)) else fake.contiguous()


def _laid_out(cx: LoweringContext, result: View, fake: torch.Tensor) -> View:
    """What has arrived, as the graph has it."""
    if result.strides == cx.low.symbols.exprs(fake.stride()):
        return result
    return extern(replace(cx, fake=fake), torch.ops.aten.clone.default, (result,), {}, "another layout")


def wait(cx: LoweringContext, result: View) -> View:
    """The wait for a result: the same memory, which holds the values after it. If an argument of the collective is
    written to meanwhile, it comes before that."""
    nodes = cx.low.nodes
    made = next((i for i, n in enumerate(nodes) if is_start(n) and result.buffer in n.writes()), None)
    if made is None:
        nodes.append(_wait_for(cx, result, None))
    else:
        w = _wait_for(cx, result, nodes[made])
        held = {v.buffer for v in iter_views(w.args[1])}.difference(nodes[made].writes())
        writes = (i for i, n in enumerate(nodes) if i > made and held.intersection(n.writes()))
        nodes.insert(next(writes, len(nodes)), w)
    return _laid_out(cx, result, cx.fake)


def all_reduced(cx: LoweringContext, x: View, group_name: str) -> View:
    """The sum over ranks of ``x``, contiguous: a collective, and its wait."""
    args = (x, "sum", group_name)
    value = extern(cx, torch.ops._c10d_functional.all_reduce.default, args, {}, "communicates", effect=True)
    cx.low.nodes.append(_wait_for(cx, value, cx.low.nodes[-1]))
    return value


def _wait_for(cx: LoweringContext, result: View, call: Any, more: int = 0) -> Extern:
    """(A library may write all results of a call again, when one is waited for: gloo does.)"""
    copies = call is None or in_place_form(call.target) is not None
    others = [b for b in call.writes() if b != result.buffer] if call is not None else []
    held = [full_view(cx.low.buffers[b]) for b in others]
    if not copies:
        held += iter_views((call.args, call.kwargs))
    name = cx.low.next_node() + (f"_{more}" if more else "")
    return Extern(name, WAIT, (result, held), (), (), (result.buffer,), reason="waits", origins=(cx.origin,))


def _waited(node: torch.fx.Node) -> bool:
    """Is every result waited for, in this graph?"""
    many = isinstance(node.meta.get("val"), (tuple, list))
    results = list(node.users) if many else [node]
    complete = not many or len(results) == len(node.meta["val"])
    return complete and all(any(str(u.target) == WAITS for u in r.users) for r in results)


RULES.update(dict.fromkeys(STARTS, start))
RULES[WAITS] = wait


def is_start(node: Node) -> bool:
    """Is it a call that communicates? Those of torch's functional collectives, and ops that take a group's name."""
    if not isinstance(node, Extern) or not isinstance(node.target, torch._ops.OpOverload) or node.target is WAIT:
        return False
    return str(node.target) in STARTS or any(a.name == "group_name" for a in node.target._schema.arguments)


def starts(nodes: Any) -> Iterator[Extern]:
    """Every call that communicates, in order, those in variants and blocks too."""
    for n in nodes:
        yield from (x for x in inside(n) if isinstance(x, Extern) and is_start(x))


# -- order ------------------------------------------------------------------------------------------------
def overlapped(fused: Fused, options: Options, target: Target) -> Fused:
    """The nodes of a program that waits, in an order that overlaps (see the module); others are as they were.

    Raises RanksError for a collective whose execution depends on data (inside ``torch.cond`` or a loop).
    """
    program = fused.program
    for n in program.nodes:
        if isinstance(n, Region) and (found := next(starts([n]), None)) is not None:
            what = found.origins[0] if found.origins else None
            raise RanksError(
                f"{found.target} runs inside torch.cond or a loop"
                f"{f' at {what.source}' if what and what.source else ''}: ranks whose data differ would take different "
                "branches and wait for each other for ever. Communicate outside of it, or decide by a Python bool"
            )
    if not any(_is_wait(n) for n in program.nodes):
        return fused
    return fused.regrouped(replace(program, nodes=tuple(program.nodes[i] for i in _Schedule(program).run())))


def _is_wait(node: Node) -> bool:
    return isinstance(node, Extern) and node.target is WAIT


class _Schedule:
    """What is ready is taken by its kind, then by its old position."""

    def __init__(self, program: Program):
        self.program = program
        self.pending: dict[str, int] = {}  # bytes of results that were started

    def run(self) -> list[int]:
        """Positions in the new order."""
        return order(dependencies(self.program).before, self._kind, self._next)

    def _kind(self, i: int) -> str:
        node = self.program.nodes[i]
        return "start" if is_start(node) else "wait" if _is_wait(node) else "compute"

    def _next(self, ready: dict[str, list[int]], out: list[int]) -> str:
        last = self.program.nodes[out[-1]] if out else None
        if last is not None and is_start(last):
            self.pending |= self._results(out[-1])
        elif last is not None and _is_wait(last):
            self.pending.pop(last.writes()[0], None)
        if ready["start"]:
            bytes = sum((self.pending | self._results(ready["start"][0])).values())
            if not self.pending or bytes <= PENDING or not (ready["compute"] or ready["wait"]):
                return "start"
        return next(kind for kind in ("compute", "wait", "start") if ready[kind])

    def _results(self, i: int) -> dict[str, int]:
        return {b: self.program.buffers[b].nbytes.hint() or 0 for b in self.program.nodes[i].writes()}
