"""What the epilogue of a product will be, as far as it can be said before ``fuse`` forms it.

The static rule asks: a product of its own kernel pays for what is fused behind it, and a tile large enough to multiply
well has few threads to load and store a long epilogue with (1024 x 512, depth 8, four results: 38 us in 16 blocks of
128 x 256 on an H200, where the product alone takes 3).
"""

from typing import NamedTuple, TypeGuard

from ..ir.instructions import weight
from ..ir.loops import LoopNest, Op
from ..ir.program import Choice, Node, Program, Variant

CASTS = ("cast", "to_f16", "to_bf16")


class Epilogue(NamedTuple):
    """Per element of the result: bytes that the kernels behind it load and store beside it, whether others read the
    result itself, so that it is stored, and instructions that compute."""

    moved: int
    kept: bool = True
    work: int = 0


def epilogue_of(program: Program, choice: Choice, a: Variant) -> Epilogue | None:
    """What the kernels behind a product do, if they become its epilogue; None where none does: a reader reduces, or
    reads other than one element per point, or all wait for a later call; and where they only cast, or reductions, with
    what reads these, are all that reads what they make, and the result is stored as well: the next kernel can do that,
    and reads less. (Distances and two masks of them, for the extremes of rows: 14 us behind 512 x 512 of depth 128 in
    float32 on an H200, 6 without, and the kernel of the rows is no faster.)"""
    own = [n for n in a.nodes[1:] if isinstance(n, LoopNest)]
    points = max(program.buffers[b].numel.hint() for b in choice.outputs)
    result, inside, late, others = set(choice.outputs), set(choice.outputs), set[str](), program.output_buffers()
    loaded, wanted, of_rows = set[str](), program.output_buffers(), set[str]()
    taken: list[LoopNest] = []
    for n in program.nodes[program.nodes.index(choice) + 1 :]:
        reads = set(n.reads())
        if reads & result and not _at_each_point(n, inside, points):
            return None
        if reads & inside and not reads & late and _at_each_point(n, inside, points):
            taken.append(n)
            inside |= set(n.writes())
            loaded |= {b for b in reads - inside if program.buffers[b].numel.hint() >= points}
        else:
            others |= reads
            in_rows = isinstance(n, LoopNest) and (bool(reads & of_rows) or n.reduced and bool(reads & inside))
            of_rows |= set(n.writes()) if in_rows else set()
            wanted |= set() if in_rows else reads
            late |= set(n.writes()) if reads & (late | inside) or not isinstance(n, LoopNest) else set()
    size = {b: program.buffers[b].dtype.itemsize for b in inside | loaded}
    if not result & others:  # something else is stored in its place
        wanted |= inside
    found = any(not n.reduced for n in own)
    for n in reversed(taken):
        if wanted.intersection(n.writes()):
            wanted |= set(n.reads())
            found |= any(isinstance(s, Op) and s.op not in CASTS for s in n.body)
    moved = (loaded | inside & others) - result
    work = sum(weight(s) for n in taken for s in n.body if isinstance(s, Op))
    return Epilogue(sum(size[b] for b in moved), bool(result & others), work) if found else None


def _at_each_point(n: Node, inside: set[str], points: int) -> TypeGuard[LoopNest]:
    if not isinstance(n, LoopNest) or n.reduced or n.numel.hint() != points:
        return False
    return len({s.index for s in n.loads() if s.buffer in inside}) == 1
