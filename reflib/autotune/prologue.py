"""Operands that a matmul computes as it reads them: dequantised weights, a mask, a scaling, an activation, a cast.

``x @ (w8.to(bfloat16) * scale)`` is a kernel that reads each weight's byte and writes two, and a product that reads the
two: five bytes per weight, where one has to be read. Where a matmul has few rows, time is bytes. So a Choice of a
matmul whose operand elementwise loop nests compute gets one more variant, a Template with these in its load
(``Template.prologues``).

**What may go in.** Following a chain of producers upwards from the operand: each is elementwise, without gathers, and
the only one to write its buffer, and nothing overwrites what it reads before the product runs. It is worth trying if
fewer bytes are read than the operand has; or as many, or more where the product is the only reader, so that a kernel is
saved. Not so where a kernel of ours makes what is read: that one computes the rest at no cost.

The operand's own index need not be that of the producer: a transposed or reshaped weight is read through ``//`` and
``%``, most of which cancel; those that are left over (two numbers of 4 bits per byte, one scale per group of 128) are
printed with wide loads where neighbours share an element (``generate.matmul_prologue``).

**What it costs.** An operand is computed again in each tile that reads it: ceil(M / tile) times for b. So it is a
candidate, measured beside the producers' own kernel followed by the library's product, and by the Template: the
producers are in the region that is measured (``subprogram``, rule 4). Unmeasured it is taken only where it cannot lose:
one tile of rows (then nothing is computed twice), at most STATIC_ROWS of them in any call (then time is the weights'
bytes), and fewer bytes than the operand has.

**Numerics.** As unfused: the operand is rounded to its dtype before it is multiplied. What the producers' one fused
kernel would keep in float32 stays float32 here.

**Where it fits.** ``lower`` makes the Choice; ``with_prologues`` adds to it when all readers are known, before
``decide``. The nest is a ``LoopNest``, as an epilogue is: verifier, interpreter and JSON need nothing else.

NB: TorchInductor fuses prologues while it schedules (``prologue_fusion``, first proposed in PR 121211), into the
template that has won, by a rule on the bytes that are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..fuse.decided import without_selects
from ..fuse.dependencies import Dependencies, dependencies
from ..fuse.inline_loads import MAX_TEXT
from ..fuse.producers import Producer, make_producer, makes_all, replace_loads
from ..ir.expr import Expr, Var, expr, in_range, max_value
from ..ir.loops import Axis, BodyBuilder, Indirect, Load, LoopNest, Op, Origin, Reduce, Scan, Stmt, map_stmt, stmt_exprs
from ..ir.ops import value_dtype
from ..ir.program import Buffer, Choice, Extern, Program, Template, Variant, View
from ..ir.transforms import eliminate_dead
from .roofline import FP8, HALVES

NAME = "triton, operands computed"
MAX_STATEMENTS = 64  # of an operand's nest
STATIC_ROWS = 64
COMPUTED = {"a": "computed_a", "b": "computed_b"}  # what the operands' buffers are called, which are nowhere


def with_prologues(program: Program, measured: bool = True) -> Program:
    """Every matmul with the variant that computes its operands, where that may be done, and may be chosen: unmeasured,
    only operands that few rows or columns of the other are multiplied with (``cannot_lose``). Assumes a legal order,
    and that nothing is fused."""
    depends: Dependencies | None = None
    nodes = list(program.nodes)
    for i, node in enumerate(nodes):
        if not isinstance(node, Choice) or (t := _template(node)) is None:
            continue
        _, m, n, _ = t.sizes
        if operands := [name for name, again in (("a", n), ("b", m)) if measured or _few(again)]:
            depends = depends or dependencies(program)
            if (computing := _computing(program, depends, i, t, operands)) is not None:
                at = next(j for j, v in enumerate(node.variants) if t in v.nodes)
                made = replace(node.variants[at], name=NAME, nodes=(computing,))
                nodes[i] = replace(node, variants=(*node.variants[: at + 1], made, *node.variants[at + 1 :]))
    return replace(program, nodes=tuple(nodes))


def _template(choice: Choice) -> Template | None:
    found = (v.nodes[0] for v in choice.variants if len(v.nodes) == 1 and not v.predicate)
    return next((n for n in found if isinstance(n, Template) and n.tiling is None and not n.closed), None)


def _computing(
    program: Program, depends: Dependencies, position: int, t: Template, operands: Sequence[str]
) -> Template | None:
    """``t`` with those of the operands computed that may be; None if none may."""
    made, origins = t, list[Origin]()
    for name in operands:
        v: View = getattr(t, name)
        found = _Chain(program, depends, position, v).nest(COMPUTED[name])
        if found is None or set(found.reads()) & set(t.writes()) or t.a.buffer == t.b.buffer:
            continue
        strides = (v.shape[1] * v.shape[2], v.shape[2], expr(1))
        view = View(COMPUTED[name], v.shape, strides, expr(0), program.buffers[v.buffer].dtype)
        made = replace(made, prologues=(*made.prologues, found))
        made = replace(made, a=view) if name == "a" else replace(made, b=view)
        origins += found.origins
    if not made.prologues:
        return None
    return replace(made, epilogue=replace(t.epilogue, origins=tuple(dict.fromkeys((*origins, *t.epilogue.origins)))))


@dataclass
class _Chain:
    """The producers of the operand ``v`` of the node at ``position``."""

    program: Program
    depends: Dependencies
    position: int
    v: View

    def nest(self, name: str) -> LoopNest | None:
        """The operand's nest, with the chain in it, storing to ``name``; None if nothing can be computed."""
        v, buffer = self.v, self.program.buffers[self.v.buffer]
        if v.dtype != buffer.dtype or not v.dtype.is_floating_point or v.dtype in FP8:
            return None
        first = 1 if v.shape[0] == 1 else 0
        axes = tuple(Axis(Var(f"p{d}", v.shape[d]), "p") for d in range(first, 3))
        at = [expr(0)] * first + [expr(a.var) for a in axes]
        read = sum((i * s for i, s in zip(at, v.strides)), v.offset)
        b = BodyBuilder()
        value = b.load(v.buffer, read, value_dtype(v.dtype))
        into = at[0] * (v.shape[1] * v.shape[2]) + at[1] * v.shape[2] + at[2]
        b.store(name, into, value)
        loops = LoopNest(name, axes, tuple(b.body))
        taken, inside = set[int](), {self.position}
        while (found := next(self._producers(loops, taken), None)) is not None:
            taken.add(found.position)
            if (inlined := self._inlined(loops, found)) is not None:
                loops = inlined
                inside.add(found.position)
        return loops if v.buffer not in loops.reads() and loops.reads() and self._worth(loops, inside) else None

    def _worth(self, loops: LoopNest, inside: set[int]) -> bool:
        """Are fewer bytes read than the operand has, or is a kernel saved? (``inside``: the product and producers.)"""
        read, size = bytes_read(loops, self.program.buffers), self.v.dtype.itemsize
        made = {b for i in inside - {self.position} for b in self.program.nodes[i].writes()}
        alone = all(set(self.depends.readers.get(b, ())) <= inside and b not in self.depends.needed for b in made)
        ours = any(
            isinstance(self.program.nodes[at], (LoopNest, Template, Choice))
            for s in loops.loads()
            if len(s.index.variables()) > 1 and (at := self.depends.last_writer(s.buffer, self.position)) is not None
        )
        return read < size or not ours and (alone or read == size)

    def _producers(self, loops: LoopNest, taken: set[int]):  # type: ignore[no-untyped-def]
        """Producers of what ``loops`` reads, not tried yet."""
        for name in loops.reads():
            at = self.depends.last_writer(name, self.position)
            node = None if at is None or at in taken else self.program.nodes[at]
            node = self._widening(node, name) if isinstance(node, Extern) else node
            if isinstance(node, LoopNest) and at is not None and (p := self._producer(at, node, name)) is not None:
                yield p

    def _widening(self, node: Extern, name: str) -> LoopNest | None:
        """A cast of 8-bit floats, which loop nests do not read otherwise, and so is a call."""
        source, made = node.args[0] if node.args else None, self.program.buffers[name]
        if node.target is not torch.ops.aten._to_copy.default or not isinstance(source, View):
            return None
        if source.dtype not in FP8 or self.program.buffers[source.buffer].dtype != source.dtype:
            return None
        if made.dtype not in (*HALVES, torch.float32) or node.outputs != (name,):
            return None
        axes = tuple(Axis(Var(f"p{d}", n), "p") for d, n in enumerate(made.shape))
        b = BodyBuilder()
        read = sum((expr(a.var) * s for a, s in zip(axes, source.strides)), source.offset)
        value = b.cast(b.load(source.buffer, read, source.dtype), torch.float32)  # exact in both half dtypes
        b.store(name, sum((expr(a.var) * s for a, s in zip(axes, made.strides)), expr(0)), value)
        return LoopNest(node.name, axes, tuple(b.body), node.origins)

    def _producer(self, at: int, node: LoopNest, name: str) -> Producer | None:
        if node.reduced or any(isinstance(s, (Reduce, Scan, Indirect)) for s in node.body):
            return None
        store = next(s for s in node.stores() if s.buffer == name)
        whole = self.program.buffers[name].kind == "temp" and makes_all(self.program, node, store)
        if not whole or store.reduce or len(self.depends.writers[name]) != 1 or set(node.reads()) & set(node.writes()):
            return None
        if any(self.depends.written_between(b, at, self.position + 1) for b in node.reads()):
            return None
        return make_producer(at, node, store)

    def _inlined(self, loops: LoopNest, p: Producer) -> LoopNest | None:
        out = replace_loads(loops, p)
        out = replace(out, body=eliminate_dead(without_selects(_in_range(out.body, self.program.buffers))))
        longest = max((len(str(e)) for s in out.body for e in stmt_exprs(s)), default=0)
        return out if len(out.body) <= MAX_STATEMENTS and longest <= MAX_TEXT // 4 else None


def bytes_read(loops: LoopNest, buffers: dict[str, Buffer]) -> float:
    """Per element, by hint."""
    points = max(1, loops.numel.hint())
    return sum(min(buffers[b].nbytes.hint() / points, buffers[b].dtype.itemsize) for b in loops.reads())


def _in_range(body: tuple[Stmt, ...], buffers: dict[str, Buffer]) -> tuple[Stmt, ...]:
    """Without masks of loads that are in range wherever they are made: those for several masks are then one. Without
    tests that have failed before; and an integer of 8 bits is exact in both half dtypes."""
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(body):
        new = map_stmt(s, ids)
        if isinstance(new, Load) and new.mask is not None and in_range(new.index, buffers[new.buffer].extent):
            read = b.add(replace(new, mask=None, other=0))
            ids[i] = b.op("where", new.mask, read, b.const(new.other, new.dtype))
        elif isinstance(new, Op) and new.op in ("to_f16", "to_bf16") and _is_byte(b.body, new.args[0]):
            ids[i] = new.args[0]
        elif isinstance(new, Op) and new.op == "where" and (other := _otherwise(b.body, new)) is not None:
            ids[i] = b.op("where", *new.args[:2], other)
        else:
            ids[i] = b.add(new)
    return tuple(b.body)


def _otherwise(body: list[Stmt], s: Op) -> int | None:
    """z of ``where(i < j, y, where(i >= j, z, w))``, as the parts of a concatenation are chosen."""
    test, _, last = (body[a] for a in s.args)
    again = body[last.args[0]] if isinstance(last, Op) and last.op == "where" else None
    if not isinstance(test, Op) or not isinstance(again, Op) or (test.op, again.op) != ("lt", "ge"):
        return None
    whole = test.args == again.args and not body[test.args[0]].dtype.is_floating_point  # type: ignore[union-attr]
    return last.args[1] if whole and isinstance(last, Op) else None


def _is_byte(body: list[Stmt], i: int) -> bool:
    s = body[i]
    return isinstance(s, Op) and s.op == "cast" and body[s.args[0]].dtype in (torch.int8, torch.uint8)  # type: ignore[union-attr]


# -- without measuring ------------------------------------------------------------------------------
def cannot_lose(program: Program, a: Variant) -> bool:
    """Is the variant surely faster than its operands' producers and a product of what they make? (See the module.)"""
    (t,) = (n for n in a.nodes if isinstance(n, Template))
    _, m, n, _ = t.sizes
    fewer = False
    for p in t.prologues:
        v, again = (t.a, n) if t.prologue(t.a) is p else (t.b, m)
        read = bytes_read(p, program.buffers)
        if any(s.mask is not None for s in p.loads()) or read > v.dtype.itemsize:
            return False
        fewer |= _few(again) and read < v.dtype.itemsize
    return fewer


def _few(n: Expr) -> bool:
    return (most := max_value(n)) is not None and most <= STATIC_ROWS
