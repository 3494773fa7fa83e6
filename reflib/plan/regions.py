"""The steps of a Region (``ir.regions``): each block is planned as a program by itself."""

from dataclasses import dataclass

from ..ir.expr import Sym
from ..ir.program import Program, Variant
from ..ir.regions import Region, block
from ..options import Options
from .plan import _Planner
from .steps import Alloc, Branch, Free, Step


@dataclass(frozen=True, slots=True)
class Repeat(Branch):
    """The steps ``otherwise``, and while all of ``predicate`` hold after them, ``then``. ``counter``: counts from 0."""

    counter: Sym | None = None


def region_steps(node: Region, program: Program, options: Options) -> tuple[Step, ...]:
    """A Branch, or the stacked outputs' storage and a Repeat."""
    if not node.repeats:
        *others, last = node.variants
        steps = _block(node, last, program, options)
        for v in reversed(others):
            steps = (Branch(v.predicate, _block(node, v, program, options), steps),)
        return steps
    condition, body = node.variants
    pairs = [(old, new) for old, new in node.carried if old != new]
    renamed = [s for old, new in pairs for s in (Alloc(old, new), Free(new))]
    then = (*_block(node, body, program, options, tuple(old for old, _ in pairs)), *renamed)
    repeat = Repeat(condition.predicate, then, _block(node, condition, program, options), node.counter)
    return (*map(Alloc, node.stacked()), repeat)


def _block(
    node: Region, variant: Variant, program: Program, options: Options, own: tuple[str, ...] = ()
) -> tuple[Step, ...]:
    """``own``: carried tensors, which are the block's from their last use on."""
    planner = _Planner(block(node, variant, program.buffers, own), options)
    for b in own:
        planner._begin(b)
    return planner.run().steps[:-1]  # (the last one returns)
