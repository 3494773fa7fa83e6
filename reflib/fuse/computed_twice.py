"""Long rows: what takes much arithmetic is stored for the second pass over a row, not computed again in it.

A reduction over rows that no program holds (longer than ``persistent_limit``) is a loop over the row, and elementwise
work behind it, in the same kernel, is a second one. What both need is computed again in the second. If it is read and
cast, that is free: the row is mostly in L2 still. If much arithmetic made it, it is not::

    y = grid_sample(x, grid)                      about 600 instructions per element (reflected borders)
    where(hole, y.mean((2, 3)), y)                over rows of 192 x 192

In one kernel that takes 424 us on an H200 (96 x 3 images, with a cast to uint8). TorchInductor takes 209: it computes
each sample once, stores it and reads it back, which moves 8 bytes per element more.

**The rule** compares the two, in bytes, by the model of ``ir.instructions``: a byte takes as long as ``PER_BYTE``
instructions, a kernel as long as the longer of its bytes and its work, starting one as long as ``LAUNCH`` bytes::

    fused   max(bytes of both, (work of both + what is repeated) / PER_BYTE)
    apart   max(bytes of a, work of a / PER_BYTE) + max(bytes of b, work of b / PER_BYTE) + LAUNCH

What ``a`` makes for ``b`` alone is among the bytes of each, and not of both. Work is per element; a row's own numbers
are made once for thousands of these. A load is no work (its bytes are counted; in the second pass they come from L2),
but one at a computed place is. The two stay apart if that takes less than ``MARGIN`` times as long. For the images
above it is 83 bytes per element, of 150.

It does not matter which of the two reduces, nor in what order clusters form: their bodies are joined, and statements
counted once per pass that needs them. If the reduction and its consumer are one kernel already, the producer stays out
of that; what ``a`` repeats by itself is no reason against ``b``. A second reduction that waits for the first (of
squared distances from the mean) is a pass too. A sum behind a maximum is not: a softmax's is found along with it
(``generate.triton_one_pass``). Two passes count at most, as three in the IR are often two in the kernel.

Cheap producers stay: a gelu of bfloat16 and a sum, before a layer norm over 65,536 columns, are 31 instructions. Again
they are 5 bytes' worth, and a stored row takes 4 or, in float32, 8.

``recompute`` runs afterwards and replaces loads by what they load; it would undo this where few, slow operations make
the value (``stays_stored``).

NB: TorchInductor decides while lowering, before it knows its kernels: what several others read is stored
(``realize``) if many loads or operations made it.
"""

from ..ir.expr import Ref, Var, product
from ..ir.instructions import LAUNCH, PER_BYTE, weight
from ..ir.loops import Load, LoopNest, Reduce, Stmt, Store
from ..ir.program import Node, Program
from ..ir.transforms import Body, join, needed, phases, varying
from ..options import Options
from .legality import Cluster, FusionContext, common_space, compose, newly_interior
from .mapping import Env
from .result import Reason

MARGIN = 0.9
Parts = list[tuple[int, LoopNest, Env]]


def twice_rule(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    """Would their kernel compute again, in a pass over long rows, what is better stored?"""
    if not (a.reduces or b.reduces) or not c.target.is_gpu or a.template is not None or b.template is not None:
        return None
    rows = a if a.reduces else b
    length = product(x.size for x in rows.axes if x.kind == "r").hint()
    if length <= c.options.persistent_limit:
        return None
    points = product(x.size for x in rows.axes).hint()
    both = (a.outside | b.outside) - newly_interior(a, b, c)
    moved = _bytes(both, points, c)
    most = sum(_weight(s) for x in (a, b) for _, loops, _ in x.parts for s in loops.body)
    if 2 * most * points <= PER_BYTE * (moved + LAUNCH):
        return None
    m = common_space(a, b, c.program)
    if isinstance(m, Reason):
        return None  # ... which is the better reason
    along = {x.var for x in m.axes if x.kind == "r"}
    of_a: Parts = [(p, n, compose(old, n, m.env_a)) for p, n, old in a.parts]
    of_b: Parts = [(p, n, compose(old, n, m.env_b)) for p, n, old in b.parts]
    fused = max(moved, _work(of_a + of_b, along) * points / PER_BYTE)
    sides = ((a, of_a), (b, of_b))
    apart = LAUNCH + sum(max(_bytes(x.outside, points, c), _work(p, along) * points / PER_BYTE) for x, p in sides)
    if apart >= MARGIN * fused:
        return None
    between = a.writes.keys() & b.reads.keys() | b.writes.keys() & a.reads.keys()
    names = ", ".join(sorted(n for n in between if c.program.buffers[n].numel.hint() * length > points))
    return Reason("rows", f"rows of {length}, in two passes: {names} would be computed twice")


def stays_stored(writer: Node, name: str, program: Program, options: Options) -> bool:
    """Is ``name`` computed for a reduction of long rows in any case, and storing it cheaper than to do so again?"""
    if not isinstance(writer, LoopNest) or not writer.reduced or writer.rnumel.hint() <= options.persistent_limit:
        return False
    values = [s.value for s in writer.stores() if s.buffer == name]
    level = varying(writer.body, writer.reduced_vars)
    makes = needed(writer.body, values, level.__getitem__)
    reduced = needed(writer.body, (i for i, s in enumerate(writer.body) if isinstance(s, Reduce)))
    if not set(values) <= set(reduced):
        return False
    return sum(_weight(writer.body[i]) for i in makes if level[i]) > PER_BYTE * program.buffers[name].dtype.itemsize


def _bytes(buffers: set[str], points: int, c: FusionContext) -> int:
    """Read or written, each element once at most."""
    found = (c.program.buffers[b] for b in buffers)
    return sum(min(b.nbytes.hint(), points * b.dtype.itemsize) for b in found)


def _work(parts: Parts, along: set[Var]) -> int:
    """Instructions per element of a row, in all passes that need them."""
    body = join([(loops, env) for _, loops, env in sorted(parts, key=lambda p: p[0])])
    level, passes = varying(body, along), _passes(body)
    ends: dict[int, list[int]] = {}
    for i, s in enumerate(body):
        if isinstance(s, Reduce) or isinstance(s, Store) and level[i]:
            ends.setdefault(passes[i], []).append(i)
    count = [0] * len(body)
    for wanted in ends.values():
        for i in needed(body, wanted, level.__getitem__):
            count[i] += 1
    return sum(min(n, 2) * _weight(s) for n, s in zip(count, body, strict=True))


def _passes(body: Body) -> list[int]:
    """For each statement, its pass over the row. A sum behind a maximum is in the maximum's."""
    passes = phases(body)
    for i, s in enumerate(body):
        if isinstance(s, Reduce) and s.kind == "sum":
            before = (body[j] for j in needed(body, [i]) if passes[j] == passes[i] - 1)
            passes[i] -= any(isinstance(t, Reduce) and t.kind == "max" for t in before)
    return passes


def _weight(s: Stmt) -> int:
    plain = isinstance(s, Load) and not any(isinstance(x, Ref) for x in s.index.atoms())
    return 0 if plain else weight(s)
