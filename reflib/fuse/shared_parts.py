"""Parts of one tensor that are computed from the same elements: one kernel reads these once and stores every part.

The backward of an LSTM's cell ends with ``cat([di, df, dg, do], 1)``: the gradients of four gates, each computed from
``c``, ``tanh(c)``, ``dh`` and the gates at one place, stored at four. As a loop over the whole, an element of ``cat``
chooses its part, whose producers are inlined under a mask: every part computes and reads all that it needs by itself
(27 loads where 7 elements differ). Over the elements of one part instead, with as many stores as there are parts, what
is common is read and computed once::

    for i, j < 4n: cat[i, j] = di(i, j) if j < n else df(i, j-n) if ...     for i, j < n: cat[i, j] = di(i, j)
                                                                                          cat[i, n+j] = df(i, j) ...

``into_place`` stores parts by loop nests of their own anyway, and the grouping puts those together that share what they
read: their slices lie apart (``places.apart``). What is new is when it pays, which this file says:

* What a part reads: the tensors that its producers read, as far as these are elementwise over the part, each with its
  index in terms of the part's elements. ``x[:, n:]`` and ``x[:, :n]`` are not the same.
* Parts of equal sizes with a source in common are one kernel. Saved is what the parts read minus what the kernels
  read. Others are kernels of their own; each costs a launch (``places.LAUNCH``).
* There are at most ``STORES`` such parts: that their slices lie apart is proved for each pair.
* Of rows shorter than ``RUN`` bytes, as of ``stack([x, y], -1)``, each store writes a fraction of what it touches,
  while a loop over the whole reads its parts' sources from a cache. What counts there is what is computed once (the
  gradient of ``[x, y, w, h]`` of a box is 4 numbers from the same 200 operations), less what the stores touch.
* Reductions of the whole along its other dimensions, such as a bias's gradient, are cut as the whole is: those of a
  part fuse with what makes it. Other loop nests that read the whole are fused with a loop over it, and would read it
  again.

* A part that only turns its source around is its source, stored elsewhere (``turned``): ``f(x).roll(1)`` and
  ``g(x).roll(-1)`` would read ``x`` at different elements, and compute what they have in common for each of them. (A
  step of a lattice Boltzmann method, nine rolls of what five tensors give: in one kernel, nine planes are read and nine
  stored.)

The bytes are then at the lower bound: each element that is read, once per kernel; each that is stored, once.

NB: TorchInductor 2.13 makes few pointwise parts one kernel of selects (``pointwise_cat``): for the cell above, two
kernels for sm_90, one that loads 7 elements and stores 2, one of 15 masked loads. Of many, or where a part is a
reduction or a call, it makes slices of the result (``ConcatKernel``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.expr import Atom, BinOp, Expr, IntLike, Var, expr, mod
from ..ir.instructions import PER_BYTE, work_of
from ..ir.loops import Indirect, Load, LoopNest, Op, Store
from ..ir.program import Node, Program
from .dependencies import Dependencies
from .legality import common_space, single
from .result import Reason
from .slices import copied_from

RUN = 128  # bytes
STORES = 16  # into one tensor, by one kernel: ``legality`` compares as many
NODES = 64  # producers of a part that are looked at: a recurrence may go back through the whole program

Sources = dict[tuple[str, Expr], int]  # a buffer and an index into it, with the bytes that are read there


@dataclass(frozen=True)
class Shared:
    """``kernels``: parts, by number, that one kernel stores. ``saved``: bytes that these read less than their parts do
    by themselves."""

    kernels: tuple[tuple[int, ...], ...] = ()
    saved: int = 0

    @property
    def fewer(self) -> int:
        """Kernels than parts."""
        return sum(len(k) - 1 for k in self.kernels)

    def place(self, part: int) -> int:
        """Of the part's kernel among them."""
        return next((n for n, k in enumerate(self.kernels) if part in k), -1)


@dataclass(frozen=True)
class Parted:
    """A part, by number: its sizes, the bytes that its store touches beside those of its rows, if these are short, and
    what is read and computed for it."""

    number: int
    sizes: list[Expr]
    wasted: int
    read: Sources
    computed: Sources


def shared(parts: Sequence[Parted], gpu: bool) -> Shared:
    found = _shared([(p, p.read) for p in parts if not p.wasted])
    if found.kernels or not gpu:  # (a CPU stores neighbours)
        return found
    found = _shared([(p, p.computed) for p in parts if p.wasted])
    saved = found.saved - sum(p.wasted for p in parts)
    return replace(found, saved=saved) if saved > 0 else Shared()


def _shared(parts: Sequence[tuple[Parted, Sources]]) -> Shared:
    saved = 0
    kernels: list[tuple[tuple[int, ...], object, Sources]] = []
    for part, mine in parts if len(parts) <= STORES else ():
        members: tuple[int, ...] = (part.number,)
        for k in [k for k in kernels if k[1] == part.sizes and not mine.keys().isdisjoint(k[2])]:
            kernels.remove(k)
            saved += sum(mine[s] for s in mine.keys() & k[2].keys())
            members, mine = (*k[0], *members), mine | k[2]
        kernels.append((members, part.sizes, mine))
    return Shared(tuple(members for members, _, _ in kernels), saved) if saved else Shared()


def sources(
    program: Program, depends: Dependencies, load: Load, env: dict[Atom, IntLike], sizes: list[Var]
) -> tuple[Sources, Sources]:
    """What is read to compute a part: ``load``'s buffer at ``env``, which has its variables in terms of ``sizes``, the
    part's own; or what that is computed from, elementwise. And what is computed, with bytes that take as long."""
    found, made = Sources(), Sources()
    todo = [(load.buffer, load.index.subs(env))]
    seen = set(todo)
    while todo:
        name, index = todo.pop()
        points = 1
        for v in index.variables():
            points *= v.size.hint()
        maker = _maker(program, depends, name) if len(seen) < NODES else None
        same = None if maker is None else _same(maker, name, index, sizes)
        if maker is None or same is None:
            found[name, index] = points * program.buffers[name].dtype.itemsize
            continue
        operations = replace(maker, body=tuple(s for s in maker.body if isinstance(s, Op)))
        made[name, index] = points * work_of(operations) // PER_BYTE
        for s in maker.loads():
            read = s.buffer, s.index.subs(same)
            if read not in seen:
                seen.add(read)
                todo.append(read)
    return found, made


def together(nodes: Sequence[Node], depends: Dependencies, first: int, second: int) -> bool:
    """Can two nodes be one kernel, but for what lies between them?"""
    a, b = nodes[first], nodes[second]
    if not isinstance(a, LoopNest) or not isinstance(b, LoopNest):
        return False
    return not isinstance(common_space(single(first, a, depends), single(second, b, depends)), Reason)


def _maker(program: Program, depends: Dependencies, name: str) -> LoopNest | None:
    writers = depends.writers.get(name, [])
    node = program.nodes[writers[0]] if len(writers) == 1 else None
    if not isinstance(node, LoopNest) or node.reduced or any(isinstance(s, Indirect) for s in node.body):
        return None
    return node


def _same(maker: LoopNest, name: str, index: Expr, sizes: list[Var]) -> dict[Atom, IntLike] | None:
    """``maker``'s variables in terms of ``sizes``, if it makes at these what is at ``index``."""
    axes = [a for a in maker.axes if a.size != 1]
    if [a.size for a in axes] != [v.size for v in sizes]:
        return None
    env: dict[Atom, IntLike] = {a.var: 0 for a in maker.axes if a.size == 1}
    env |= {a.var: expr(v) for a, v in zip(axes, sizes)}
    stores = [s for s in maker.body if isinstance(s, Store) and s.buffer == name]
    return env if len(stores) == 1 and not stores[0].reduce and stores[0].index.subs(env) == index else None


def turned(
    program: Program, depends: Dependencies, position: int, load: Load
) -> tuple[Load, tuple[tuple[Var, Expr], ...]] | None:
    """What a copy that nothing else reads turned around, in the order in which it was made elementwise, and where the
    axes of the node at ``position`` must store it: ``(v - c) % n`` where ``(v + c) % n`` was read."""
    writers, name = depends.writers.get(load.buffer, []), load.buffer
    if len(writers) != 1 or name in depends.needed or depends.readers[name] != [position]:
        return None
    source = copied_from(program, program.nodes[writers[0]], load)
    if source is None or depends.written_between(source.buffer, writers[0], position + 1):
        return None
    if _maker(program, depends, source.buffer) is None or program.buffers[source.buffer].kind != "temp":
        return None
    there: dict[Atom, IntLike] = {}
    turns: list[tuple[Var, Expr]] = []
    for a in source.index.atoms():
        if isinstance(a, BinOp):
            v = next(iter(a.a.variables()), None)
            if a.fn != "%" or v is None or a.b != v.size or (a.a - expr(v)).variables():
                return None
            there[a] = expr(v)
            turns.append((v, mod(expr(v) + mod(expr(v) - a.a, v.size), v.size)))
    index = source.index.subs(there)
    zero: dict[Atom, IntLike] = dict.fromkeys(there, 0)
    if not turns or any(source.index.subs(zero).has(v) for v, _ in turns) or index.coefficient(turns[0][0]) is None:
        return None
    return replace(source, index=index), tuple(turns)


def beside_a_reduction(program: Program, d: Dependencies, b: str) -> bool:
    """Does a reduction make ``b``, or, of as many elements, something that it is computed from?"""
    seen, todo, points = {b}, [b], program.buffers[b].numel.hint()
    while todo:
        name = todo.pop()
        makers = (program.nodes[i] for i in d.writers.get(name, ()))
        for m in (n for n in makers if isinstance(n, LoopNest)):
            if m.reduced and (name == b or (m.numel * m.rnumel).hint() == points):
                return True
            todo += [r for r in m.reads() if r not in seen and not m.reduced and m.numel.hint() <= points]
            seen.update(todo)
    return False
