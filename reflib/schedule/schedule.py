"""Scheduling: how each kernel is generated and launched.

``schedule`` takes a program whose choices are decided (stage 4, ``autotune``) and fused again: every LoopNest and every
Template becomes a Variants of kernels, a fast one and, if that assumes anything, a fallback. A LoopNest is launched as
a heuristic says (``heuristics``), a Template by its tiling (``SCHEDULERS``); the decisions are recorded.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..fuse import Fused
from ..ir.decision import Candidate, Decision, Key
from ..ir.loops import LoopNest
from ..ir.program import Config, KernelNode, Node, Program, Template, Variant, Variants
from ..options import Options
from ..seams import Seam
from ..target import Target
from .heuristics import choose_configs

Names = Mapping[tuple[str, ...], str]
# (name, node, buffers, target) -> the kernel's variants, by the class of a node that is no LoopNest, or of its target.
SCHEDULERS = Seam("schedule.SCHEDULERS")


def schedule(
    fused: Fused, options: Options, target_of: Callable[[torch.device], Target], names: Names | None = None
) -> tuple[Program, tuple[Decision, ...]]:
    """Returns the program with a Variants for every kernel (one per combined set), and the decisions.

    ``names``: of kernels that were built already, by the buffers that they write."""
    kernels = _Kernels(fused.program, options, target_of, names or {})
    nodes = kernels.all(fused.program.nodes, fused.combined)
    return replace(fused.program, nodes=tuple(nodes)), tuple(kernels.decisions)


class _Kernels:
    """Makes Variants of kernels and numbers them."""

    def __init__(self, program: Program, options: Options, target_of: Callable[[torch.device], Target], names: Names):
        self.program, self.options, self.target_of, self.names = program, options, target_of, names
        self.number = len(names)
        self.decisions: list[Decision] = []

    def all(self, nodes: Iterable[Node], combined: Iterable[tuple[str, ...]] = ()) -> list[Node]:
        last_of = {names[-1]: names for names in combined}
        earlier = {n for names in combined for n in names[:-1]}
        loops = {n.name: n for n in nodes if isinstance(n, LoopNest)}
        out: list[Node] = []
        for node in nodes:
            if (kind := type(getattr(node, "target", node)).__name__) in SCHEDULERS:
                out.append(self._other(node, kind))
            elif isinstance(node, Variants):
                out.append(replace(node, variants=tuple(map(self._variant, node.variants))))
            elif not isinstance(node, LoopNest):
                out.append(node)
            elif node.name not in earlier:
                out.append(self._loops(tuple(loops[n] for n in last_of.get(node.name, (node.name,)))))
        return out

    def _variant(self, v: Variant) -> Variant:
        """Its kernels are launched as they were when it was measured."""
        options = self.options
        self.options = options.but(**dict(v.patches))
        nodes = tuple(self.all(v.nodes))
        self.options = options
        return replace(v, nodes=nodes)

    def _loops(self, parts: tuple[LoopNest, ...]) -> Variants:
        target = self.target_of(self.program.buffers[parts[0].writes()[0]].device)
        name = self._name(parts)
        variants = choose_configs(parts, self.program.buffers, target, self.options, name)
        if self.options.numerics == "eager" or self.options.batch_invariant:
            variants = tuple(replace(v, nodes=(_exact(v.kernel, self.options),)) for v in variants)
        self.decisions.append(_decision(name, variants[0].kernel.config, parts[0]))
        return Variants(name, writes_of(parts), variants, variants[0].kernel.origins)

    def _name(self, parts: tuple[LoopNest | Template, ...]) -> str:
        name = self.names.get(writes_of(parts))
        if name is None:
            name = f"k{self.number}_{short_name(parts)}"
            self.number += 1
        return name

    def _other(self, t: Any, kind: str) -> Variants:
        target = self.target_of(self.program.buffers[t.writes()[0]].device)
        name = self._name((t,))
        made = SCHEDULERS[kind](name, t, self.program.buffers, target)
        key = Key("", t.tiling) if isinstance(t, Template) else Key(str(made[0].kernel.parts[0].target))
        why = f"tiling {t.tiling or 'fixed'}, decided with its choice" if isinstance(t, Template) else t.target.how
        self.decisions.append(Decision(name, (key,), (Candidate(key, "heuristic"),), why, config=made[0].kernel.config))
        return Variants(name, writes_of((t,)), made, t.origins)


def _exact(kernel: KernelNode, options: Options) -> KernelNode:
    extras = tuple(sorted((*kernel.config.extras, ("exact", True), ("one_order", options.batch_invariant))))
    return replace(kernel, config=replace(kernel.config, extras=extras))


def writes_of(parts: Iterable[LoopNest | Template]) -> tuple[str, ...]:
    """The buffers that a kernel of these parts writes."""
    return tuple(dict.fromkeys(b for p in parts for b in p.writes()))


def _decision(name: str, config: Config, part: LoopNest) -> Decision:
    size = f"{part.numel} x {part.rnumel}" if part.reduced else f"{part.numel}"
    how = {"none": "a loop for each pass"}.get(config.reduction, config.reduction) if part.reduced else "pointwise"
    reason = f"heuristic for {size} elements: {how}"
    return Decision(name, (), (Candidate(Key("heuristic"), "heuristic"),), reason, config=config)


def short_name(parts: tuple[LoopNest | Template, ...], most: int = 4) -> str:
    """A readable kernel name from the ops in it: ``add_gelu``; ``mul_add_and_9_more``; ``12_parts_mul_add``."""
    ops = list(dict.fromkeys(_op_name(o.op) for p in parts for o in p.origins))
    text = "_".join(ops[:most]) + (f"_and_{len(ops) - most}_more" if len(ops) > most else "")
    text = text or parts[0].name
    prefix = f"{len(parts)}_parts_" if len(parts) > 1 else ""
    return prefix + "".join(c if c.isalnum() or c == "_" else "_" for c in text)


def _op_name(op: str) -> str:
    pieces = op.removeprefix("aten.").removeprefix("reflib.").split(".")
    return pieces[0].strip("_") or op
