"""Cutting a choice out of a program together with its neighbours, and putting a winner in its place.

Candidates are measured as they will run: with the kernels they would be fused with. Which those are differs from
candidate to candidate (a matrix product by the library leaves bias and GELU to a kernel of their own, a template takes
them in), and all candidates must be timed over the *same* work. So the region is the smallest set of nodes, the choice
among them, that is closed under "in one group", whichever variant is in place:

1. a window: LoopNest that depend on the choice through LoopNest alone, and elementwise LoopNest that only it reads;
2. the window is fused once with each kind of variant in place of the choice;
3. nodes that some fusion puts into one group belong together; the region is the choice's class;
4. so do the choice and nodes that a variant does not need, because it computes their results itself (``prologue``).

Nodes that only a path through the outside connects to the choice are left out, so that a region can run at one point
of the order. Its inputs are what it reads from outside; its outputs what the outside reads of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ReflibError
from ..fuse import fuse
from ..fuse.dependencies import Dependencies, dependencies
from ..ir.loops import LoopNest
from ..ir.program import (
    Buffer,
    Choice,
    Extern,
    Node,
    Program,
    Template,
    Variant,
    Variants,
    full_view,
    node_symbols,
    symbols_in,
)
from ..options import Options
from ..target import Target

WINDOW = 24  # nodes after the choice that are looked at, and before it


@dataclass(frozen=True)
class Subprogram:
    """``choice`` and the nodes (by name) that are measured and replaced with it. ``program``: they alone, the choice
    still in it; its inputs are ``inputs`` then size symbols, its outputs ``outputs``, whole. ``constants``: the tensors
    of those inputs that are the program's constants; a candidate is right for these, not for any."""

    choice: Choice
    members: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    program: Program
    constants: dict[str, Any] = field(default_factory=dict, compare=False)


def cut(program: Program, choice: Choice, options: Options, target: Target) -> Subprogram:
    """The region of ``choice`` in ``program``. Assumes a legal order."""
    depends = dependencies(program)
    window = _window(program, depends, choice)
    members = _together(program, choice, window, options, target)
    positions = _convex(program, depends, choice, members)
    return _region(program, depends, choice, positions)


def splice(program: Program, choice: Choice, winner: Variant) -> Program:
    """``program`` with the winner's nodes where the choice was."""
    nodes: list[Node] = []
    for n in program.nodes:
        nodes += winner.nodes if n.name == choice.name else [n]
    buffers = {**program.buffers, **{b.name: b for b in winner.buffers}}
    return replace(program, nodes=tuple(nodes), buffers=buffers)


def replace_region(program: Program, region: Subprogram, node: Variants, buffers: Iterable[Buffer]) -> Program:
    """``program`` with one opaque node in place of the whole region."""
    gone = {*region.members, region.choice.name}
    last = max(i for i, n in enumerate(program.nodes) if n.name in gone)
    first = min(i for i, n in enumerate(program.nodes) if n.name in gone)
    needs = set(node.reads())
    before: list[Node] = list(program.nodes[:first])
    after: list[Node] = []
    late = set(node.outputs)
    for n in program.nodes[first : last + 1]:  # what stands between them and does not wait for them goes first
        if n.name in gone:
            continue
        if late & {*n.reads(), *n.writes()}:
            after.append(n)
            late |= set(n.writes())
        else:
            before.append(n)
    if needs & {b for n in after for b in n.writes()}:
        raise ReflibError(f"{region.choice.name}: its region is not convex; this is a bug in autotune/subprogram.py")
    table = {**program.buffers, **{b.name: b for b in buffers}}
    return replace(program, nodes=(*before, node, *after, *program.nodes[last + 1 :]), buffers=table)


# -- the window ------------------------------------------------------------------------------------
def _window(program: Program, depends: Dependencies, choice: Choice) -> set[int]:
    """Positions of the choice and of the LoopNest around it that could be fused with it."""
    at = next(i for i, n in enumerate(program.nodes) if n.name == choice.name)
    window = {at}
    made = set(choice.outputs)
    for i in range(at + 1, len(program.nodes)):
        node = program.nodes[i]
        if len(window) > WINDOW:
            break
        if made & set(node.reads()) and _plain(program, depends, node):
            window.add(i)
            made |= set(node.writes())
    wanted, before = set(choice.reads()), 0
    for i in reversed(range(at)):
        node = program.nodes[i]
        if before == WINDOW or not wanted & set(node.writes()):
            continue
        alone = all(set(depends.readers.get(b, ())) <= window and b not in depends.needed for b in node.writes())
        if alone and _plain(program, depends, node) and not node.reduced:  # type: ignore[union-attr]
            window.add(i)
            before += 1
            wanted |= set(node.reads())
    return window


def _plain(program: Program, depends: Dependencies, node: Node) -> bool:
    """A LoopNest that writes only temporaries, each the only one to write it."""
    return isinstance(node, LoopNest) and all(
        program.buffers[b].kind == "temp" and len(depends.writers[b]) == 1 for b in node.writes()
    )


# -- what belongs together -------------------------------------------------------------------------
def _together(program: Program, choice: Choice, window: set[int], options: Options, target: Target) -> set[str]:
    """Names of the window's nodes in the choice's class."""
    if len(window) == 1:
        return set()
    names = {program.nodes[i].name for i in window} - {choice.name}
    depends = dependencies(program)
    nodes = [program.nodes[i] for i in sorted(window)]
    small = sub_program(program, nodes, needed_outside(depends, nodes, window))
    parent = {n: n for n in [*names, choice.name]}

    def root(n: str) -> str:
        while parent[n] != n:
            n = parent[n]
        return n

    for variant in _kinds(choice):
        own = {n.name for n in variant.nodes}
        fused = fuse(splice(small, choice, variant), options, target)
        if _computes(variant):
            for n in names.difference(*(group.members for group in fused.groups)):
                parent[root(n)] = root(choice.name)
        for group in fused.groups:
            members = {_original(m, names, own, choice.name) for m in group.members} - {""}
            for m in members:
                parent[root(m)] = root(next(iter(members)))
    here = root(choice.name)
    return {n for n in names if root(n) == here}


def _original(member: str, names: set[str], own: set[str], choice: str) -> str:
    """Which node of the window a fused group's member was (a split reduction's first half is ``x_part``)."""
    for name in (member, member.removesuffix("_part")):
        if name in own:
            return choice
        if name in names:
            return name
    return ""


def _kinds(choice: Choice) -> list[Variant]:
    """One variant of each structure: those that differ in numbers alone fuse alike."""
    kinds: dict[tuple, Variant] = {}
    for a in choice.variants:
        shape = (*((type(n).__name__, str(n.target) if isinstance(n, Extern) else "") for n in a.nodes), _computes(a))
        kinds.setdefault(shape, a)
    return list(kinds.values())


def _computes(a: Variant) -> bool:
    """Does a product in it compute operands?"""
    return any(isinstance(n, Template) and n.prologues for n in a.nodes)


def _convex(program: Program, depends: Dependencies, choice: Choice, members: set[str]) -> list[int]:
    """Positions of the region's nodes, without those that depend on it through a node outside."""
    inside: list[int] = []
    tainted: set[int] = set()  # outside, after something inside
    for i, node in enumerate(program.nodes):
        before = depends.before[i]
        if (node.name in members or node.name == choice.name) and not before & tainted:
            inside.append(i)
        elif before & (tainted | set(inside)):
            tainted.add(i)
    at = next(i for i, n in enumerate(program.nodes) if n.name == choice.name)
    if at in inside:
        return inside
    after = {n for i, n in enumerate(node.name for node in program.nodes) if i > at}
    return _convex(program, depends, choice, members & after)  # a producer stood in the way: leave producers out


def _region(program: Program, depends: Dependencies, choice: Choice, positions: list[int]) -> Subprogram:
    nodes = [program.nodes[i] for i in positions]
    members = tuple(n.name for n in nodes if n.name != choice.name)
    inside = set(positions)
    outputs = needed_outside(depends, nodes, inside)
    small = sub_program(program, nodes, outputs)
    inputs = tuple(i for i in small.inputs if isinstance(i, str))
    constants = {i: program.constants[i] for i in inputs if program.buffers[i].kind == "const"}
    return Subprogram(choice, members, inputs, outputs, small, constants)


def needed_outside(depends: Dependencies, nodes: list[Node], positions: set[int]) -> tuple[str, ...]:
    """What ``nodes``, at these positions, write and others read."""
    written = dict.fromkeys(b for n in nodes for b in n.writes())
    return tuple(b for b in written if b in depends.needed or not set(depends.readers.get(b, ())) <= positions)


def sub_program(program: Program, nodes: list[Node], outputs: tuple[str, ...]) -> Program:
    """``nodes`` as a program: all that they read from outside is an input, size symbols last. ``outputs``: buffers."""
    written = list(dict.fromkeys(b for n in nodes for b in n.writes()))
    reads = list(dict.fromkeys(b for n in nodes for b in n.reads() if b not in written))
    mine = {b.name for n in nodes if isinstance(n, Choice) for a in n.variants for b in a.buffers}
    buffers = {b: replace(program.buffers[b], kind="input") for b in reads}
    inner = [b for n in nodes if isinstance(n, Variants) for b in sorted(n.inside())]
    buffers |= {b: program.buffers[b] for b in [*written, *inner] if b not in mine}
    views = tuple(full_view(program.buffers[b]) for b in outputs)
    symbols = sorted(symbols_in([full_view(b) for b in buffers.values()]).union(*map(node_symbols, nodes)))
    weights = tuple(b for b in reads if program.buffers[b].kind == "const" or b in program.weights)
    return Program((*reads, *symbols), buffers, tuple(nodes), views, {}, weights)
