"""Groups become Regions: how each kernel is generated and launched is decided here, and why is written down.

With ``autotune="off"`` a heuristic decides from sizes, dtypes and the target (``heuristics``). Measuring comes with
issue-by-issue growth of this stage; it will only replace how an arm's Config is found, not what a Region is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from ..fuse import Fused
from ..ir.loops import Loops
from ..ir.program import Config, Node, Program, Region
from ..logs import get as logger
from ..options import Options
from ..target import Target
from .heuristics import choose_configs


@dataclass(frozen=True)
class Decision:
    """What was chosen for one region, and why. ``candidates``: (name, Config); the heuristic has one."""

    region: str
    winner: Config
    candidates: tuple[tuple[str, Config], ...]
    reason: str


def choose(
    fused: Fused, options: Options, target_of: Callable[[torch.device], Target]
) -> tuple[Program, tuple[Decision, ...]]:
    """Returns the program with a Region for every Loops (one for each combined set), and the decisions."""
    program = fused.program
    if options.autotune != "off":
        _say_once(f"autotune={options.autotune!r} is not in this version of reflib: heuristics choose")
    last_of = {names[-1]: names for names in fused.combined}
    earlier = {n for names in fused.combined for n in names[:-1]}
    loops = {n.name: n for n in program.nodes if isinstance(n, Loops)}
    nodes: list[Node] = []
    decisions: list[Decision] = []
    for node in program.nodes:
        if not isinstance(node, Loops):
            nodes.append(node)
            continue
        if node.name in earlier:
            continue
        parts = tuple(loops[n] for n in last_of.get(node.name, (node.name,)))
        target = target_of(program.buffers[parts[0].writes()[0]].device)
        arms = choose_configs(parts, program.buffers, target, options)
        region = Region(f"k{len(decisions)}_{short_name(parts)}", arms)
        nodes.append(region)
        decisions.append(_decision(region))
    return replace(program, nodes=tuple(nodes)), tuple(decisions)


@cache
def _say_once(message: str) -> None:
    logger("choose").warning(message)


def _decision(region: Region) -> Decision:
    config = region.arms[0].config
    part = region.arms[0].parts[0]
    size = f"{part.numel} x {part.rnumel}" if part.reduced else f"{part.numel}"
    how = {"none": "a loop for each pass"}.get(config.reduction, config.reduction) if part.reduced else "pointwise"
    reason = f"heuristic for {size} elements: {how}"
    return Decision(region.name, config, (("heuristic", config),), reason)


def short_name(parts: tuple[Loops, ...], most: int = 4) -> str:
    """A readable kernel name from the ops in it: ``add_gelu``; ``mul_add_and_9_more``; ``12_parts_mul_add``."""
    ops = list(dict.fromkeys(_op_name(o.op) for p in parts for o in p.origins))
    text = "_".join(ops[:most]) + (f"_and_{len(ops) - most}_more" if len(ops) > most else "")
    text = text or parts[0].name
    prefix = f"{len(parts)}_parts_" if len(parts) > 1 else ""
    return prefix + "".join(c if c.isalnum() or c == "_" else "_" for c in text)


def _op_name(op: str) -> str:
    pieces = op.removeprefix("aten.").split(".")
    return pieces[0].strip("_") or op
