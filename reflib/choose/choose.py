"""Choosing: what computes each region, and how each kernel is generated and launched.

``choose`` takes a program whose choices are decided (``decide``) and fused again: every Loops and every Template
becomes a Region, a kernel with the arms that can compute it. How a Loops is launched a heuristic says
(``heuristics``), how a Template is, its tiling (``matmul``); why is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from ..fuse import Fused
from ..ir.loops import Loops
from ..ir.program import Dispatch, DispatchArm, Node, Program, Region, Template
from ..options import Options
from ..target import Target
from .decision import Candidate, Decision
from .heuristics import choose_configs
from .matmul import template_arms

Names = Mapping[tuple[str, ...], str]


def choose(
    fused: Fused, options: Options, target_of: Callable[[torch.device], Target], names: Names | None = None
) -> tuple[Program, tuple[Decision, ...]]:
    """Returns the program with a Region for every kernel (one for each combined set), and the decisions.

    ``names``: what a kernel that writes these buffers is called (it was built already, under this name)."""
    kernels = _Kernels(fused.program, options, target_of, names or {})
    nodes = kernels.all(fused.program.nodes, fused.combined)
    return replace(fused.program, nodes=tuple(nodes)), tuple(kernels.decisions)


class _Kernels:
    """Makes Regions; numbers them as it goes."""

    def __init__(self, program: Program, options: Options, target_of: Callable[[torch.device], Target], names: Names):
        self.program, self.options, self.target_of, self.names = program, options, target_of, names
        self.number = len(names)
        self.decisions: list[Decision] = []

    def all(self, nodes: Iterable[Node], combined: Iterable[tuple[str, ...]] = ()) -> list[Node]:
        last_of = {names[-1]: names for names in combined}
        earlier = {n for names in combined for n in names[:-1]}
        loops = {n.name: n for n in nodes if isinstance(n, Loops)}
        out: list[Node] = []
        for node in nodes:
            if isinstance(node, Template):
                out.append(self._template(node))
            elif isinstance(node, Dispatch):
                out.append(replace(node, arms=tuple(map(self._arm, node.arms))))
            elif not isinstance(node, Loops):
                out.append(node)
            elif node.name not in earlier:
                out.append(self._loops(tuple(loops[n] for n in last_of.get(node.name, (node.name,)))))
        return out

    def _arm(self, arm: DispatchArm) -> DispatchArm:
        """Its kernels are launched as they were when it was measured."""
        options = self.options
        self.options = options.but(**dict(arm.patches))
        nodes = tuple(self.all(arm.nodes))
        self.options = options
        return replace(arm, nodes=nodes)

    def _loops(self, parts: tuple[Loops, ...]) -> Region:
        target = self.target_of(self.program.buffers[parts[0].writes()[0]].device)
        arms = choose_configs(parts, self.program.buffers, target, self.options)
        region = Region(self._name(parts), arms)
        self.decisions.append(_decision(region, parts[0]))
        return region

    def _name(self, parts: tuple[Loops | Template, ...]) -> str:
        name = self.names.get(writes_of(parts))
        if name is None:
            name = f"k{self.number}_{short_name(parts)}"
            self.number += 1
        return name

    def _template(self, t: Template) -> Region:
        target = self.target_of(self.program.buffers[t.writes()[0]].device)
        name = self._name((t,))
        region = Region(name, template_arms(name, t, self.program.buffers, target, self.options))
        row = Candidate(str(t.tiling), "heuristic")
        reason = f"tiling {t.tiling}, decided with its choice"
        self.decisions.append(Decision(name, str(t.tiling), (row,), reason, config=region.arms[0].config))
        return region


def writes_of(parts: Iterable[Loops | Template]) -> tuple[str, ...]:
    """The buffers that a kernel of these parts writes."""
    return tuple(b for p in parts for b in p.writes())


def _decision(region: Region, part: Loops) -> Decision:
    config = region.arms[0].config
    size = f"{part.numel} x {part.rnumel}" if part.reduced else f"{part.numel}"
    how = {"none": "a loop for each pass"}.get(config.reduction, config.reduction) if part.reduced else "pointwise"
    reason = f"heuristic for {size} elements: {how}"
    return Decision(region.name, config, (Candidate("heuristic", "heuristic"),), reason, config=config)


def short_name(parts: tuple[Loops | Template, ...], most: int = 4) -> str:
    """A readable kernel name from the ops in it: ``add_gelu``; ``mul_add_and_9_more``; ``12_parts_mul_add``."""
    ops = list(dict.fromkeys(_op_name(o.op) for p in parts for o in p.origins))
    text = "_".join(ops[:most]) + (f"_and_{len(ops) - most}_more" if len(ops) > most else "")
    text = text or parts[0].name
    prefix = f"{len(parts)}_parts_" if len(parts) > 1 else ""
    return prefix + "".join(c if c.isalnum() or c == "_" else "_" for c in text)


def _op_name(op: str) -> str:
    pieces = op.removeprefix("aten.").split(".")
    return pieces[0].strip("_") or op
