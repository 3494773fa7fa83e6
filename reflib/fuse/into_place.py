"""A call writes its result straight into the part of a larger tensor that it is copied to: ``cat`` without a copy.

``torch.cat([x @ w, y + 1], 1)`` is a loop nest that chooses per element what to read. Of the product, a call, every
element is written, read and written again. If the call takes memory for its results (``Extern.out``), it is given its
part of the whole, and the other parts are stored by loop nests of their own, which fuse with what makes them::

    op0: mm = x @ w                                  op0: x @ w, out = cat[:, :4]
    cat[i, j] = mm[i, j] if j < 4 else add[i, j-4]   cat[i, j+4] = add[i, j]

So for ``pad`` and ``stack``, and for a whole copy (onto an argument that is written to). A result of a Template, which
other kernels' loops cannot join, is stored to its part by its epilogue in the same way. What a kernel makes of a
reduction (a softmax) is stored to its part by that kernel, since the copy would have to read it, or its inputs, again;
and so are a tensor that is several parts, one that others read too, where computing it again would read no less
(``a * b`` padded for a product, and read without the padding), and parts that are computed from the same elements
(``shared_parts``).

What else reads the result reads it there. This is done where the whole is stored anyway: it is a result, or read by
what computes no elements of it again (a call, a product), or all of it is made so. Some ops write to a part
only if its rows follow one another (``any_strides``). On a GPU the part must begin, and its rows lie, at multiples of
16 bytes, which the kernels of cuBLAS move at a time; and what is saved must be worth the kernels that there are more
of.

NB: TorchInductor makes the parts views of the whole while it lowers (``ConcatKernel``), on a GPU and for what it prints
itself; of calls, for those with an ``out=`` that it lists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..ir.expr import Atom, Expr, IntLike, Var, expr, mod, nonneg
from ..ir.loops import Axis, BodyBuilder, Const, Indirect, Load, LoopNest, Op, Store, map_stmt
from ..ir.program import Extern, Node, Program, Template, View, iter_views
from ..lower.context import contiguous_strides
from ..lower.extern import OUT_VARIANTS
from ..lower.out_variants import any_strides
from ..options import Options
from ..target import Target
from .dependencies import dependencies, remove_dead
from .in_place import may_alias
from .mapping import fresh
from .places import LAUNCH, moved, moved_load, rehomed, within
from .result import Fused
from .shared_parts import RUN, STORES, Parted, Shared, Sources, beside_a_reduction, shared, sources, together, turned
from .slices import coordinates, region_of, whole_dimensions

MOVED = 16  # bytes


@dataclass(frozen=True)
class Part:
    """Of a buffer: ``value`` where the variable of the divided dimension is in ``range(low, high)``. ``view``: the part
    in the shape of the tensor that it is all of; None if it is not that. ``turned``: where along the other dimensions
    ``value`` is stored, if that is not where they stand."""

    value: Load | Const
    low: Expr
    high: Expr
    view: View | None = None
    turned: tuple[tuple[Var, Expr], ...] = ()


def into_place(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. Assumes a legal order."""
    program = fused.program
    work = _Placing(program, target)
    for position in reversed(range(len(program.nodes))):  # a whole before those that are parts of it
        work.visit(position)
    if not work.changed:
        return fused
    changed = ((*work.first.get(i, ()), *work.changed.get(i, [old])) for i, old in enumerate(program.nodes))
    nodes = tuple(rehomed(n, work.places, program.buffers) for found in changed for n in found)
    return replace(fused, program=remove_dead(replace(program, nodes=nodes)))


class _Placing:
    """``changed``: by position, what replaces a node; ``first``: what comes before. ``places``: of parts of others."""

    def __init__(self, program: Program, target: Target):
        self.program, self.target, self.depends = program, target, dependencies(program)
        self.calls = list(accumulate(not isinstance(n, LoopNest) for n in program.nodes))
        self.changed: dict[int, list[Node]] = {}
        self.first: dict[int, list[Node]] = {}
        self.places: dict[str, View] = {}

    def visit(self, position: int) -> None:
        """Place the parts that the node puts together, if that pays."""
        found = self._assembled(position)
        if found is None:
            return
        store, var, parts = found
        whole = store.buffer
        makers = [self._maker(position, p, parts) for p in parts]
        common = Shared() if var is None else self._shared(position, store, var, parts, makers)
        moved_parts = [self._turned(position, var, p) for p in parts]
        if var is not None and moved_parts != parts:
            others = [self._maker(position, p, moved_parts) for p in moved_parts]
            if (more := self._shared(position, store, var, moved_parts, others)).saved > common.saved:
                parts, makers, common = moved_parts, others, more
        divided = common.kernels and whole not in self.places and not any(p.turned for p in parts)
        cut = self._divided(position, store, var, parts, makers) if divided else {}
        if whole not in self.places and not self._pays(whole, var, parts, makers, common, cut):
            return
        self.changed |= cut
        rest: list[tuple[int, int, Part]] = []
        start = position
        for n, (part, made) in enumerate(zip(parts, makers)):
            node = None if made is None else self.program.nodes[made]
            there = None if part.view is None else self._there(part.view)
            # (What a few parts share is computed for all their stores together; of many, one kernel would touch too
            # many tensors with these and their copies.)
            unread = common.place(n) < 0 or len(parts) > STORES // 2
            if node is None and there is not None and self._read_there(position, part, parts, there, unread):
                made_at = self.depends.writers[part.value.buffer][0]  # type: ignore[union-attr]
                node, start = self.program.nodes[made_at], min(start, made_at)
            if there is not None and isinstance(node, (Extern, LoopNest)) and isinstance(part.value, Load):
                self.places[part.value.buffer] = there
                if made is not None and isinstance(node, Extern):
                    self.changed[made] = [self._into(made, part.value.buffer, there)]
            else:
                b = self._stores(position, var, part, parts)
                rest.append((self.depends.writers[b][0] if b else position, common.place(n), part))
        # stores to one tensor keep their order: those of one kernel follow each other, in the kernels' order
        rest.sort(key=lambda r: r[:2])
        self.changed[position] = []
        for n, (*_, part) in enumerate(rest):
            # (zeros first: what reads the other elements in their place need not wait, and fuses with what makes them)
            early = start < position and isinstance(part.value, Const)
            nodes = self.first.setdefault(start, []) if early else self.changed[position]
            nodes.append(self._stored(position, store, var, part, n))

    def _turned(self, position: int, var: Var | None, part: Part) -> Part:
        """A part that only turns its source around (``roll``), as its source, stored elsewhere."""
        found = turned(self.program, self.depends, position, part.value) if isinstance(part.value, Load) else None
        if found is None or any(v == var for v, _ in found[1]):
            return part
        return Part(found[0], part.low, part.high, turned=found[1])

    def _read_there(self, position: int, part: Part, parts: list[Part], there: View, unread: bool) -> bool:
        """Does one loop nest make the part, and can all that read it use it where it is copied to? (As the steps of a
        recurrence, of which a ``stack`` is made.) ``unread``: also where nothing else reads it. Not across a call, for
        which the whole would have to be in memory."""
        b, d = part.value.buffer if isinstance(part.value, Load) else "", self.depends
        writers, readers = d.writers.get(b, []), [i for i in d.readers.get(b, ()) if i != position]
        alone = sum(isinstance(p.value, Load) and p.value.buffer == b for p in parts) == 1
        if not b or b in d.needed or len(writers) != 1 or not (unread or readers) or not alone:
            return False
        if self.calls[writers[0]] != self.calls[position]:
            return False
        maker, whole = self.program.nodes[writers[0]], there.buffer
        if b in self.places or not isinstance(maker, LoopNest) or writers[0] in self.changed or maker.reduced:
            return False
        if not maker.reads():  # (what is a number need not be read, and waited for)
            return False
        if d.writers[whole] != [position] or any(i < position for i in d.readers.get(whole, ())):
            return False
        nodes = [maker, *(n for i in readers for n in self.changed.get(i, [self.program.nodes[i]]))]
        stores = [s for s in maker.stores() if s.buffer == b]
        plain = len(maker.stores()) == 1 and not stores[0].reduce
        plain = plain and (self._aligned(there) or all(isinstance(n, LoopNest) for n in nodes))
        return plain and all(self._readable(n, b, there) for n in nodes)

    def _pays(
        self, whole: str, var: Var | None, parts: list[Part], makers: list[int | None], common: Shared,
        cut: Mapping[int, Sequence[Node]],
    ) -> bool:  # fmt: skip
        d = self.depends
        (position,) = d.writers[whole]
        direct = sum(m is not None or isinstance(p.value, Const) for m, p in zip(makers, parts))
        others = any(not isinstance(self.program.nodes[i], LoopNest) for i in d.readers.get(whole, ()))
        if whole not in d.needed and (var is None or not others and direct < len(parts)):
            return False
        size = lambda b: self.program.buffers[b].nbytes.hint()  # noqa: E731
        placed = [p.value.buffer for p, m in zip(parts, makers) if m is not None and isinstance(p.value, Load)]
        several = zip(parts, makers) if var is not None else ()  # (one part: a whole copy, which fuses as it is)
        apart = [(p, b) for p, m in several if m is None and (b := self._stores(position, var, p, parts))]
        left = (i for i in d.readers.get(whole, ()) if i not in cut)
        again = sum(together(self.program.nodes, d, position, i) for i in left)
        less, more = common.saved - again * size(whole), again  # (these would be fused with one over the whole)
        more += len(cut) * sum(m is not None for m in makers)
        if less <= 0:
            less, more = 0, common.fewer
        if not placed and not ((apart or less) and (whole in d.needed or others)):
            return False
        saved = sum(2 * size(b) for b in placed) + sum(size(b) for _, b in apart) + less
        saved -= 0 if all(self._alone(position, var, p, parts) for p, _ in apart) else again * size(whole)
        kernels = makers.count(None) - len(apart) - common.fewer + more
        return saved >= LAUNCH[self.target.is_gpu] * (kernels - 1)

    def _divided(
        self, position: int, store: Store, var: Var | None, parts: list[Part], makers: list[int | None]
    ) -> dict[int, list[Node]]:
        """By position, the reductions of the whole along its other dimensions (a bias's gradient), each as several: one
        per part. They read the part, and fuse with what makes it; of a part that is made in its place, the whole."""
        node, d, program = self.program.nodes[position], self.depends, self.program
        assert isinstance(node, LoopNest)
        whole, out = program.buffers[store.buffer], dict[int, list[Node]]()
        axes = whole_dimensions(whole, node, store)
        if axes is None or var is None:
            return out
        read = [p.value.buffer for p in parts if isinstance(p.value, Load)]
        for i in d.readers.get(whole.name, ()):
            n = program.nodes[i]
            if not isinstance(n, LoopNest) or not n.reduced or i in self.changed:
                continue
            if any(isinstance(s, Indirect) or isinstance(s, Load) and s.buffer in self.places for s in n.body):
                continue
            at = {s: coordinates(s.index, whole) for s in n.loads() if s.buffer == whole.name}
            along = {None if c is None else c[axes.index(var)].atom for c in at.values()}
            own = [a for a in n.axes if a.kind == "p" and {a.var} == along and a.size == var.size]
            if own and not any(d.written_between(b, position, i + 1) for b in read):
                out[i] = [
                    _divided(n, own[0], at if made is None else {}, axes, p, f"{n.name}_part{k}")
                    for k, (p, made) in enumerate(zip(parts, makers))
                ]
        return out

    def _shared(self, position: int, store: Store, var: Var, parts: list[Part], makers: list[int | None]) -> Shared:
        """Parts that a call or a kernel of its own does not store, and that share what they read or compute."""
        node, whole = self.program.nodes[position], self.program.buffers[store.buffer]
        assert isinstance(node, LoopNest)
        step = store.index.coefficient(var)
        found = []
        for n, (p, made) in enumerate(zip(parts, makers)):
            own = made is None and isinstance(p.value, Load) and not self._stores(position, var, p, parts)
            if own and step is not None:
                sizes = [p.high - p.low if a.var == var else a.size for a in node.axes]
                run, row = ((e * step).hint() * whole.dtype.itemsize for e in (p.high - p.low, var.size))
                wasted = whole.nbytes.hint() // max(1, row) * (min(row, RUN) - run)
                found.append(Parted(n, sizes, max(0, wasted), *self._read(position, var, p)))
        return shared(found, self.target.is_gpu)

    def _read(self, position: int, var: Var | None, part: Part) -> tuple[Sources, Sources]:
        """What is read to compute a part that the node stores, and what is computed."""
        node = self.program.nodes[position]
        assert isinstance(node, LoopNest) and isinstance(part.value, Load)
        sizes = [part.high - part.low if a.var == var else a.size for a in node.axes]
        own = [Var(f"part{k}", size) for k, size in enumerate(sizes)]
        env: dict[Atom, IntLike] = {
            a.var: (expr(0) if v.size == 1 else expr(v)) + (part.low if a.var == var else 0)
            for a, v in zip(node.axes, own)
        }
        return sources(self.program, self.depends, part.value, env, [v for v in own if v.size != 1])

    def _stores(self, position: int, var: Var | None, part: Part, parts: list[Part]) -> str:
        """The tensor that a part is all of, if the loop nest that makes it will be a kernel without the copy, and can
        store the part as well: what it reads is reduced, it is copied more than once, or it is read elsewhere too and
        computing it again would read no less. Else ""."""
        if part.view is None or not isinstance(part.value, Load):
            return ""
        b = part.value.buffer
        writers = self.depends.writers.get(b, [])
        loops = len(writers) == 1 and isinstance(self.program.nodes[writers[0]], LoopNest)
        loops = loops and self._assembled(writers[0]) is None
        found = loops and (self._alone(position, var, part, parts) or self._read_elsewhere(position, var, part))
        return b if found else ""

    def _alone(self, position: int, var: Var | None, part: Part, parts: list[Part]) -> bool:
        """Is a loop nest's part, or what it is computed from, reduced, or is it copied more than once?"""
        assert isinstance(part.value, Load)
        b = part.value.buffer
        copies = sum(isinstance(p.value, Load) and p.value.buffer == b for p in parts)
        if copies > 1 or beside_a_reduction(self.program, self.depends, b):
            return True
        names = {name for found in self._read(position, var, part) for name, _ in found}
        return any(n.reduced and not names.isdisjoint(n.reads()) for r in names for n in self._writers(r))

    def _writers(self, b: str) -> list[LoopNest]:
        return [n for i in self.depends.writers.get(b, ()) if isinstance(n := self.program.nodes[i], LoopNest)]

    def _read_elsewhere(self, position: int, var: Var | None, part: Part) -> bool:
        """Is the part needed by others too, who would read no less to compute it again?"""
        assert isinstance(part.value, Load)
        b = part.value.buffer
        if b not in self.depends.needed and all(i == position for i in self.depends.readers[b]):
            return False
        return sum(self._read(position, var, part)[0].values()) >= self.program.buffers[b].nbytes.hint()

    def _assembled(self, position: int) -> tuple[Store, Var | None, list[Part]] | None:
        node = self.program.nodes[position]
        found = _assembled(self.program, node) if isinstance(node, LoopNest) else None
        return found if found is not None and self.depends.writers[found[0].buffer] == [position] else None

    def _maker(self, position: int, part: Part, parts: list[Part]) -> int | None:
        """The position of what makes a part and can store it there, if all that reads it can read it there."""
        if part.view is None or not isinstance(part.value, Load):
            return None
        b, d = part.value.buffer, self.depends
        writers = d.writers.get(b, [])
        same = [p for p in parts if isinstance(p.value, Load) and p.value.buffer == b]
        there = self._there(part.view)
        lasts = b in d.needed or b in self.places
        if same[0] is not part or len(writers) != 1 or there is None or lasts:
            return None
        readers = (n for i in d.readers[b] if i != position for n in self.changed.get(i, [self.program.nodes[i]]))
        if not all(self._readable(n, b, there) for n in readers):
            return None
        maker = self.program.nodes[writers[0]]
        if isinstance(maker, LoopNest) and len(same) == 1:  # a whole of its own, of which a call makes a part
            inner = self._assembled(writers[0])
            parts = inner[2] if inner is not None else []
            self.places[b] = there
            found = any(self._calls(writers[0], p, parts) for p in parts)
            del self.places[b]
            return writers[0] if found else None
        if isinstance(maker, Extern) and maker.out is not None and b in maker.outputs:
            return writers[0] if self._may_place(writers[0], there) else None
        return writers[0] if isinstance(maker, Template) else None

    def _readable(self, node: Node, b: str, there: View) -> bool:
        """Can ``node`` read ``b`` where it will be? (A call gets the strides that it was captured with, unless it takes
        any; a Template was chosen for them.)"""
        buffer = self.program.buffers[b]
        if isinstance(node, Extern) and not may_alias(node.target):
            views = [v for v in iter_views((node.args, node.kwargs)) if v.buffer == b]
            moves = [(v, within(v, buffer, there)) for v in views]
            products = node.target in OUT_VARIANTS
            return all(now is not None and (products or now.strides == v.strides) for v, now in moves)
        if not isinstance(node, LoopNest):
            return False
        loads = all(moved_load(node, s, buffer, there) is not None for s in node.loads() if s.buffer == b)
        return loads and all(moved(s.index, buffer, there) is not None for s in node.stores() if s.buffer == b)

    def _calls(self, position: int, part: Part, parts: list[Part]) -> bool:
        made = self._maker(position, part, parts)
        return made is not None and isinstance(self.program.nodes[made], Extern)

    def _there(self, v: View) -> View | None:
        """A view of a whole, which may be a part itself; None: not known."""
        return within(v, self.program.buffers[v.buffer], self.places[v.buffer]) if v.buffer in self.places else v

    def _may_place(self, made: int, there: View) -> bool:
        """Does nothing use the whole from the call on, and may the kernels of the call write to such a part?"""
        whole, d = there.buffer, self.depends
        used = (*d.readers.get(whole, ()), *d.writers[whole])
        if self.program.buffers[whole].kind == "const" or any(made <= i < d.writers[whole][0] for i in used):
            return False
        call = self.program.nodes[made]
        assert isinstance(call, Extern) and call.out is not None
        if not (any_strides(call.target, call.out[0]) or there.strides == contiguous_strides(there.shape)):
            return False
        return self._aligned(there)

    def _aligned(self, there: View) -> bool:
        at = [there.offset, *(s for s in there.strides if s != 1)]
        return not self.target.is_gpu or all(mod(e * there.dtype.itemsize, expr(MOVED)) == 0 for e in at)

    def _into(self, made: int, b: str, view: View) -> Extern:
        (call,) = self.changed.get(made, [self.program.nodes[made]])
        assert isinstance(call, Extern) and call.out is not None
        outputs = tuple(None if o == b else o for o in call.outputs)
        kwargs = (*call.kwargs, (call.out[1][call.outputs.index(b)], view))
        mutates = tuple(dict.fromkeys((*call.mutates, view.buffer)))
        return replace(call, kwargs=kwargs, outputs=outputs, mutates=mutates)

    def _stored(self, position: int, store: Store, var: Var | None, part: Part, n: int) -> LoopNest:
        """A loop nest that stores one part."""
        node, whole = self.program.nodes[position], self.program.buffers[store.buffer]
        assert isinstance(node, LoopNest)
        axes: list[Axis] = []
        env: dict[Atom, IntLike] = {}
        for a in node.axes:
            size = part.high - part.low if a.var == var else a.var.size
            inner = fresh(size)
            env[a.var] = (expr(0) if size == 1 else expr(inner)) + (part.low if a.var == var else 0)
            axes += [] if size == 1 else [Axis(inner, "p")]
        value, index = part.value, store.index.subs(dict(part.turned)).subs(env)
        if isinstance(value, Load):
            value = replace(value, mask=None, other=0, index=value.index.subs(env))
        if store.buffer in self.places:
            place = self.places[store.buffer]
            there = moved(index, whole, place)
            assert there is not None
            store, index = replace(store, buffer=place.buffer), there
        b = BodyBuilder()
        b.store(store.buffer, index, b.add(value))
        return LoopNest(f"{node.name}_part{n}", tuple(axes), tuple(b.body), node.origins)


def _divided(
    n: LoopNest, axis: Axis, at: Mapping[Load, list[Expr] | None], axes: tuple[Var | None, ...], part: Part, name: str
) -> LoopNest:
    """``n`` where ``axis`` is in the part. ``at``: the coordinates, along ``axes``, of loads that become its value."""
    inner = Axis(fresh(part.high - part.low), "p")
    env: dict[Atom, IntLike] = {axis.var: part.low + (0 if inner.size == 1 else expr(inner.var))}
    b, ids = BodyBuilder(), dict[int, int]()
    for i, s in enumerate(n.body):
        coords = at.get(s) if isinstance(s, Load) else None
        if coords is None or not isinstance(s, Load):
            ids[i] = b.add(map_stmt(s, ids, env))
            continue
        value, mask = part.value, None if s.mask is None else ids[s.mask]
        if isinstance(value, Load):
            there: dict[Atom, IntLike] = {v: c.subs(env) for v, c in zip(axes, coords, strict=True) if v is not None}
            ids[i] = b.add(replace(value, index=value.index.subs(there), mask=mask, other=s.other))
        else:
            ids[i] = b.add(value)
            ids[i] = ids[i] if mask is None else b.op("where", mask, ids[i], b.const(s.other, s.dtype))
    return LoopNest(name, tuple(inner if a is axis else a for a in n.axes), tuple(b.body), n.origins)


# -- what is put together ---------------------------------------------------------------------------------------
def _assembled(program: Program, node: LoopNest) -> tuple[Store, Var | None, list[Part]] | None:
    """The store, the variable of the divided dimension (None: there is one part) and the parts, of a node that only
    chooses, by one dimension, which of several tensors an element comes from."""
    store = node.body[-1] if node.body else None
    if not isinstance(store, Store) or node.reduced or sum(isinstance(s, (Store, Indirect)) for s in node.body) != 1:
        return None
    whole = program.buffers[store.buffer]
    axes = whole_dimensions(whole, node, store)
    leaves = None if axes is None else _leaves(node, store.value)
    if axes is None or leaves is None:
        return None
    var, ranges = leaves
    parts = [_part(program, node, store, var, *r) for r in ranges]
    if any(p is None for p in parts) or var is not None and var not in axes:
        return None
    return store, var, [p for p in parts if p is not None]


def _leaves(node: LoopNest, at: int) -> tuple[Var | None, list[tuple[Load | Const, Expr, Expr]]] | None:
    """The variable that decides, and what is stored in which range of it."""
    found: list[tuple[int, Expr, Expr | None]] = []
    var: Var | None = None
    low = expr(0)
    s = node.body[at]
    while isinstance(s, Op) and s.op == "where":  # cat: each condition is that the part's end is not reached
        region = region_of(node.body, s.args[0])
        if region is None or region[3] != 1 or var not in (None, region[0]):
            return None
        var, start, high, _ = region
        if start != low and not (start == 0 and nonneg(low)):  # a slice that is written: what was there is around it
            if found:
                return None
            found.append((s.args[2], expr(0), start))
            low = start
        found.append((s.args[1], low, high))
        low, at = high, s.args[2]
        s = node.body[at]
    found.append((at, low, None if var is None else var.size))
    first = s.mask if isinstance(s, Load) else None
    if var is None and first is not None and isinstance(s, Load):  # pad: one tensor, zeros around it
        region = region_of(node.body, first)
        if region is None or region[3] != 1:
            return None
        var, start, end, _ = region
        zero = Const(s.other, s.dtype)
        outside = [(zero, expr(0), start), (zero, end, var.size)]
        return var, [(s, start, end), *((z, a, b) for z, a, b in outside if a != b)]
    out = []
    for i, start, stop in found:
        value = node.body[i]
        if not isinstance(value, (Load, Const)) or isinstance(value, Load) and not _covers(node, value, start, stop):
            return None
        if start != stop:
            out.append((value, start, expr(0) if stop is None else stop))
    return var, out


def _covers(node: LoopNest, load: Load, low: Expr, high: Expr | None) -> bool:
    """Is the load's mask true in all of the range?"""
    if load.mask is None:
        return True
    region = region_of(node.body, load.mask)
    return region is not None and high is not None and region[3] == 1 and nonneg(low - region[1]) and nonneg(
        region[2] - high
    )


def _part(
    program: Program, node: LoopNest, store: Store, var: Var | None, value: Load | Const, low: Expr, high: Expr
) -> Part | None:
    """None: it is rounded, or nothing is known of it."""
    if isinstance(value, Const):
        return Part(value, low, high)
    whole, b = program.buffers[store.buffer], program.buffers[value.buffer]
    if (b.dtype, b.device) != (whole.dtype, whole.device):
        return None
    sizes = {a.var: high - low if a.var == var else a.var.size for a in node.axes}
    env: dict[Atom, IntLike] = {}
    inner = fresh(high - low)  # over the part: what an index can be is known of its own loops
    if var is not None:
        env[var] = low if high - low == 1 else expr(inner) + low
    at = coordinates(value.index.subs(env), b)
    strides = []
    if at is None:
        return Part(value, low, high)
    for size, stride, c in zip(b.shape, b.strides, at):
        v = var if c.atom == inner else c.atom
        if size == 1 and c == 0:
            strides.append(stride)
        elif isinstance(v, Var) and sizes.pop(v, None) == size and (step := store.index.coefficient(v)) is not None:
            strides.append(step)
        else:
            return Part(value, low, high)
    if any(size != 1 for size in sizes.values()):
        return Part(value, low, high)  # broadcast
    offset = store.index.subs({a.var: low if a.var == var else 0 for a in node.axes})
    return Part(value, low, high, View(whole.name, b.shape, tuple(strides), offset, whole.dtype))
