"""What may join a Template's kernel behind its product: ``template_rule``, with the Reason code ``template``; and how
such a group becomes a Template again, ``emit_template``.

A matmul holds a tile of its result in registers when it is done. Elementwise work on the result costs nothing there,
and the result need not be written and read again: one store and one load of M*N elements less per node that joins. But
that kernel already uses most of a program's registers and runs few programs, so:

* two matmuls never share a kernel, and no reduction joins one: a row's elements are spread over several programs;
* a consumer joins: a node that reads an element which the kernel stores, or another consumer in it. A node that only
  reads the same operands, bias or residual does not: it would save a load, and take registers;
* a producer of something the epilogue reads joins if all of its readers are in the kernel, so that it is never stored.
  A smaller one (a bias computed per column) does not: it would be computed again in every row. Like all others, it must
  run over the product's own space ([b,] m, n), perhaps reshaped or permuted, never broadcast;
* nothing is written to an operand: other programs still read it. (Overwriting what the epilogue reads at the same
  element is allowed, by the rule ``index``.)
* a store at an index that is itself a value (a scatter) stays out;
* not more matrices of the result's size than an epilogue has registers for (MAX_STREAMS, Reason ``limit``);
* nothing joins a ``closed`` product: ``autotune`` measures this where it is not certain that an epilogue pays.

NB: TorchInductor's scheduler has much the same conditions for the epilogue of a Triton template, and forms prologues
that compute as well; here these are variants of the choice (``autotune.prologue``).
"""

from collections.abc import Iterable
from dataclasses import replace

from ..ir.expr import ONE, Expr, Ref, Var, expr
from ..ir.loops import Axis, LoopNest, Stmt
from ..ir.program import Template
from ..ir.transforms import rename_axes, substitute
from .legality import Cluster, FusionContext, newly_interior
from .result import Reason

MAX_STREAMS = 7  # buffers of a product's size that its epilogue reads or writes: the result, and six more


def template_rule(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    """May ``a`` and ``b`` share a kernel, as far as a Template among them is concerned? None: yes."""
    if a.template is None and b.template is None:
        return None
    if a.template is not None and b.template is not None:
        return Reason("template", "two matrix products never share a kernel")
    t, other = (a, b) if a.template is not None else (b, a)
    assert t.template is not None
    if t.template.closed:
        return Reason("template", "this product is to be a kernel of its own, its epilogue apart")
    operands = set(t.template.operands())
    if made := sorted(operands & set(other.writes)):
        if other.first < t.first:
            return Reason("template", f"{', '.join(made)}, which the product multiplies, must be complete before it")
        return Reason("template", f"{', '.join(made)} is an operand of the product: other programs still read it")
    if other.reduces:
        return Reason("template", "a reduction cannot join a matrix product: its rows are spread over programs")
    if any(isinstance(x, Ref) for table in other.writes.values() for i in table for x in i.atoms()):
        return Reason("template", "a scatter cannot join a matrix product")
    outside = (a.outside | b.outside) - newly_interior(a, b, c)
    if not _few_streams(t.template, outside, c):
        return Reason("limit", "a matrix product's kernel has no registers for more operands of its full size")
    return _follows(t, other, c)


def _few_streams(t: Template, outside: set[str], c: FusionContext) -> bool:
    """``outside``: buffers that the kernel reads or writes in memory."""
    batch, m, n, _ = t.sizes
    points = (batch * m * n).hint()
    whole = (b for b in outside - set(t.operands()) if c.program.buffers[b].numel.hint() >= points)
    return len(list(whole)) <= MAX_STREAMS


def _follows(t: Cluster, other: Cluster, c: FusionContext) -> Reason | None:
    """Does each of ``other``'s members use the product, or only make what is used here?"""
    made = {name: min(table.values()) for name, table in t.writes.items()}  # by the product, since when
    for position, loops, _ in sorted(other.parts, key=lambda part: part[0]):
        if any(made.get(name, position) < position for name in loops.reads()):
            for name in loops.writes():
                made.setdefault(name, position)
        elif not _private(loops.writes(), t.members | other.members, c):
            return Reason("template", f"{loops.name} does not use the product, and not only this kernel needs it")
    return None


def _private(names: Iterable[str], members: set[int], c: FusionContext) -> bool:
    """Is everything that touches these buffers in the kernel?"""
    d = c.depends
    return all(
        name not in d.needed and members.issuperset([*d.readers.get(name, ()), *d.writers[name]]) for name in names
    )


def emit_template(cluster: Cluster, loops: LoopNest) -> Template:
    """A group around a Template is one: its epilogue is the joined body ``loops``, over the product's own axes in
    their own order. The cluster's axes are pieces of these, and become ``//`` and ``%`` of them again, most of which
    cancel."""
    t = cluster.template
    assert t is not None
    env = next(env for _, part, env in cluster.parts if part is t.epilogue)
    body = loops.body
    for axis in t.epilogue.axes:
        value = env.get(axis.var, expr(axis.var))
        if isinstance(value, Expr) and value.variables() - {axis.var}:
            body = _rejoin(body, axis, value)
    return replace(t, name=loops.name, epilogue=rename_axes(replace(loops, axes=t.epilogue.axes, body=body)))


def _rejoin(body: tuple[Stmt, ...], axis: Axis, value: Expr) -> tuple[Stmt, ...]:
    """``body`` with the pieces of ``axis``, whose sum (each times its stride) is ``value``, replaced by parts of
    ``axis``. Two pieces per step, the highest first: a step's ``//`` and ``%`` cancel before the next step's are
    made."""
    pieces: list[Var] = []
    step = ONE
    while len(pieces) < len(value.variables()):  # the lowest has stride 1, the next that one's size, ...
        low = next(v for v in value.variables() if v not in pieces and value.coefficient(v) == step)
        pieces.append(low)
        step = step * low.size
    high = pieces.pop()
    while pieces:
        low = pieces.pop()
        both = expr(Var(f"{low.name}_{high.name}", low.size * high.size) if pieces else axis.var)
        body = substitute(body, {high: both // low.size, low: both % low.size})
        high = next(iter(both.variables()))
    return substitute(body, {high: expr(axis.var)})
