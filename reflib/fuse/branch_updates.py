"""An operand that all branches of a ``cond`` update, or return as it is, is updated in place inside of the branches.

A branch may not write to its operands: it clones one, and returns the clone. So the result of each branch is all of it,
stored again even by one that changes nothing. As a loop does with what it carries, the operand is copied to the result
before, and the branches store what changes::

    cond = where(e is row, v, x) in one branch         cond[e] = x[e]
    cond = x in the other                              cond[row] = v in one branch, nothing in the other

``in_place`` drops that copy where ``x`` is not needed afterwards (``x.copy_(torch.cond(...))``), or says why not. Done
only if each branch can: an elementwise branch computes all of it anyway.
"""

from dataclasses import replace

from ..ir.expr import expr
from ..ir.loops import Axis, BodyBuilder, LoopNest
from ..ir.ops import value_dtype
from ..ir.program import Buffer, Node, Program, Variant
from ..ir.regions import Region, block, carried_in
from ..ir.rename import renamed
from ..options import Options
from ..target import Target
from .dependencies import dependencies
from .in_place import Updated
from .mapping import fresh
from .places import plain
from .regions import fused_block
from .result import Fused
from .slices import same_layout
from .updates import find_updates


def branch_updates(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. Assumes a legal order."""
    nodes: list[Node] = []
    for n in fused.program.nodes:
        found = None
        if isinstance(n, Region) and not n.repeats and not n.carried:
            fused, found = _in_place(fused, n, _operands(fused.program, n), options, target)
        nodes += found or [n]
    return replace(fused, program=replace(fused.program, nodes=tuple(nodes)))


def _before(b: str) -> str:
    return f"{b}_before"


def _operands(program: Program, region: Region) -> dict[str, str]:
    """The results that every branch makes of one operand by updates alone, each with that."""
    out: dict[str, str] = {}
    for b in region.outputs:
        result = program.buffers[b]
        read = [x for x in region.reads() if x not in region.outputs and x not in out.values()]
        like = (x for x in read if _alike(program.buffers[x], result))
        if result.kind == "temp" and _before(b) not in program.buffers:
            found = (x for x in like if all(_updates(program, region, v, b, x) for v in region.variants))
            if (x := next(found, None)) is not None:
                out[b] = x
    return out


def _alike(a: Buffer, b: Buffer) -> bool:
    return same_layout(a, b) and (a.dtype, a.device) == (b.dtype, b.device)


def _carrying(program: Program, region: Region, operands: dict[str, str]) -> tuple[Region, dict[str, Buffer]]:
    """``region``, whose blocks hold the operands from the start."""
    names = {x: _before(b) for b, x in operands.items()}
    buffers = program.buffers | {_before(b): replace(program.buffers[b], name=_before(b)) for b in operands}
    variants = tuple(replace(v, nodes=tuple(renamed(list(v.nodes), [], names)[0])) for v in region.variants)
    return replace(region, variants=variants, carried=tuple((_before(b), b) for b in operands)), buffers


def _updates(program: Program, region: Region, v: Variant, b: str, x: str) -> bool:
    """Is ``b`` made of ``x`` in a branch by updates of some of its elements?"""
    inside, buffers = _carrying(program, replace(region, variants=(v,)), {b: x})
    whole = block(inside, inside.variants[0], buffers, (_before(b),))
    whole = replace(whole, nodes=(carried_in(inside, (_before(b),)), *whole.nodes))
    made = {u.new: u for u in find_updates(whole, dependencies(whole))}
    while b in made and made[b].kind != "each" and plain(made[b].view, whole.buffers[made[b].old]):
        b = made[b].old
    return b == inside.carried[0][0]


def _in_place(
    fused: Fused, region: Region, operands: dict[str, str], options: Options, target: Target
) -> tuple[Fused, list[Node] | None]:
    """The copies and the region; None where a branch cannot."""
    inside, buffers = _carrying(fused.program, region, operands)
    if not operands:
        return fused, None
    told, variants, kept = fused, list[Variant](), set(inside.carried)
    names = {_before(b): x for b, x in operands.items()}
    for v in inside.variants:
        v, told, pairs = fused_block(told, inside, v, buffers, options, target)
        variants.append(v)
        kept &= {(old, result) for (old, new), (_, result) in zip(pairs, inside.carried) if old == new}
    more = [u for u in told.updates[len(fused.updates) :] if isinstance(u, Updated)]
    more = [replace(u, buffer=names.get(u.buffer, u.buffer)) for u in more]
    if len(kept) < len(operands):
        left = {b: x for b, x in operands.items() if (_before(b), b) in kept}
        fused, found = _in_place(fused, region, left, options, target)
        refused = [u for u in more if u.why and u.buffer in operands.values()]
        return replace(fused, updates=(*fused.updates, *refused)), found
    names = {_before(b): b for b in operands}
    done = [replace(v, nodes=tuple(renamed(list(v.nodes), [], names)[0])) for v in variants]
    now = replace(region, variants=tuple(done), carried=tuple((b, b) for b in operands))
    program = replace(fused.program, buffers={n: b for n, b in buffers.items() if n not in names})
    copies: list[Node] = [_copy(program, region, x, b) for b, x in operands.items()]
    return replace(told, program=program, updates=(*fused.updates, *more)), [*copies, now]


def _copy(program: Program, region: Region, x: str, b: str) -> LoopNest:
    buffer, index = program.buffers[b], expr(0)
    axes: list[Axis] = []
    for size, stride in zip(buffer.shape, buffer.strides):
        if size != 1:
            axes.append(Axis(fresh(size), "p"))
            index = index + expr(axes[-1].var) * stride
    body = BodyBuilder()
    body.store(b, index, body.load(x, index, value_dtype(buffer.dtype)))
    return LoopNest(f"{region.name}_{b}", tuple(axes), tuple(body.body), region.origins)
