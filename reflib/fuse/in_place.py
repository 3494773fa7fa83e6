"""Updates are stored in place where the old value is not needed any more: functionalization undone.

``updates`` finds the updates: ``new`` is ``old`` but for some elements. If ``new`` may live where ``old`` does, the
copy between them is not made, and only the elements that differ are stored::

    new[e] = cache[e]                       (dropped)
    new[position] = row                     cache[position] = row
    attention(q, new)                       attention(q, cache)
    cache[e] = new[e]                       (dropped)

All buffers that live in one, its ``root``, are a group; each has a place there, a View (mostly all of it; of
``cache[layer]`` a part). Decided update by update, in the order in which they begin to store. One is refused where

* what it stores over is read later: by a node, as the update's own operand at another element than it stores to (a
  kernel's iterations have no order), as a result (in training: saved for backward), or through a tensor that a call
  returned and that may share its memory. A later read that is provably of other elements does no harm;
* the root is an input and the values are not copied onto it in the end. If they are (``copy_``: how AOTAutograd ends a
  graph that mutates an input), that copy is dropped as well: reads of the input as it was come before the update;
* the root is a constant, or was made by a call whose result may be in another tensor's memory;
* a node that uses ``new`` cannot be told where it is: a matrix product's template of a part, a result that would be a
  part of a larger storage.

Reads of ``old`` before the update stay before it, as dependencies see to. Inputs in memory that overlaps an input that
is written to never get here (``wrap.unusual``). Sizes may be symbols: what cannot be proved is refused.

Short chains of slices of a temporary (that no loop carries) are left to ``slice_stores``: one kernel with selects moves
fewer bytes. So are elementwise updates, which fuse with the copy onto an input, and for which ``plan`` reuses storage;
only between other updates of an input they are made in place here. What happened is in ``Fused.updates``; a refusal is
also a Refusal, and a line under ``REFLIB_LOGS=fallback``.

NB: TorchInductor does this on the FX graph, by a list of ops and one for views (``fx_passes/reinplace.py``): of inputs,
if a ``copy_`` follows and nothing reads them in between; a part of a tensor is a chain of views in one "generalized
scatter". XLA is told by the caller which inputs it may overwrite (donated), inserts copies everywhere and removes those
that liveness shows to be unneeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import logs
from ..ir.expr import Expr, nonneg, product
from ..ir.loops import Load, LoopNest, Store
from ..ir.program import Extern, Node, Program, View, full_view, iter_views
from ..ir.regions import carried_buffers
from ..ir.rename import renamed
from ..ir.user_kernel import Launched
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, inside, used_buffers
from .places import LAUNCH, apart, folded, moved, only_in_slice, plain, points, rehomed, slice_points, within
from .result import Fused, Reason, Refusal
from .slice_stores import Stores
from .slices import same_layout, whole_copy
from .updates import Update, find_updates, in_place_form, puts_back, region


def in_place(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. Assumes a legal order."""
    program = fused.program
    d = dependencies(program)
    updates = find_updates(program, d)
    if not updates:
        return fused
    work = _decided(program, d, updates, target)
    told = [u for u in updates if u.kind != "same"]
    report = tuple(_report(program, u, work) for u in told if u in work.accepted or work.refused.get(u))
    refusals = tuple(_refusal(program, u, why) for u, why in work.refused.items() if why)
    if work.accepted:
        program = _Rewriting(work, options).run()
    return replace(fused, program=program, updates=(*fused.updates, *report), refusals=(*fused.refusals, *refusals))


# -- deciding -----------------------------------------------------------------------------------------------
@dataclass
class _Group:
    """Buffers that live in ``root``. ``alive``: those that are used later than where we are. ``ends``: where what it
    shall hold in the end is copied onto it, if it is an input; else None."""

    root: str
    ends: int | None
    alive: list[str]
    updates: list[Update] = field(default_factory=list)
    read_later: bool = False  # elements of older values, that are stored over by none


def _decided(program: Program, d: Dependencies, updates: list[Update], target: Target) -> _Deciding:
    """Once more where a choice turned out to be wrong, which is rare."""
    final = _final_values(program, d)
    failed: dict[Update, str] = {}
    while True:
        work = _Deciding(program, d, final, failed, LAUNCH[target.is_gpu])
        for u in updates:
            work.try_to_make(u, updates)
        again = work.in_retrospect()
        if not again:
            return work
        failed |= again


def _final_values(program: Program, d: Dependencies) -> dict[str, tuple[str, list[int]]]:
    """Per input that one node writes to, by copying a buffer: that buffer, and the nodes that copy, the last one first
    (it may go through temporaries)."""
    out: dict[str, tuple[str, list[int]]] = {}
    for name, b in program.buffers.items():
        back: list[int] = []
        at = name
        while b.kind == "input" and len(writers := d.writers.get(at, [])) == 1:
            found = whole_copy(program, program.nodes[writers[0]])
            if found is None or back and (at in d.needed or d.readers[at] != back[-1:]):
                break
            at, there = found[1].buffer, found[2]
            back.append(writers[0])
            out[name] = at, list(back)
            if found[1].index != there.index or not same_layout(program.buffers[at], b):
                break
    return out


class _Deciding:
    """``places``: of buffers that live in another. ``given_back``: slice updates that find everything in its place.
    ``failed``: updates that were refused before, with the reason ("": none to tell)."""

    def __init__(
        self,
        program: Program,
        d: Dependencies,
        final: dict[str, tuple[str, list[int]]],
        failed: dict[Update, str],
        launch: int,
    ):
        self.program, self.depends, self.final, self.failed, self.launch = program, d, final, failed, launch
        self.places: dict[str, View] = {}
        self.accepted: dict[Update, None] = {}
        self.given_back: set[Update] = set()
        self.refused: dict[Update, str] = {}
        self.groups: dict[str, _Group] = {}
        self.slices: dict[int, Update] = {}
        self.made: dict[str, Update] = {}
        self.masked: dict[Update, list[Update]] = {}  # by the slice update that must be made in place for these to be
        temps = {b for b in d.needed if program.buffers[b].kind == "temp"}
        self.lasting, self.results = temps | _shared(program), program.output_buffers()
        self.carried = carried_buffers(program)

    def try_to_make(self, u: Update, updates: list[Update]) -> None:
        self.made = self.made or {x.new: x for x in updates}
        self.slices = self.slices or {x.position: x for x in updates if x.write is not None}
        why = self.failed.get(u)
        if why is None:
            why = self._accept(u)
        if why is not None:
            self.refused[u] = why

    def _accept(self, u: Update) -> str | None:
        """Accept ``u`` and return None; else why not, "" if that is nothing to tell."""
        buffers = self.program.buffers
        where, root = self.place(u.old), self.place(u.old).buffer
        place = within(u.view, buffers[u.old], where)
        if u.kind == "each" and (buffers[root].kind != "input" or u.new in self.results):
            return ""
        if u.kind == "same" and any(u.position in copies for _, copies in self.final.values()):
            return ""  # on its way to an input
        if place is None:
            return f"it is not known where in {root} the elements of {u.old} are"
        if u.kind != "same" and not plain(place, buffers[root]) and folded(place):
            return f"elements of {u.old} may share their places in {root}"
        given_back = puts_back(self.program, u, self.places, place)
        if u.kind == "slice" and buffers[root].kind != "input" and not given_back and root not in self.carried:
            return ""
        ends = self.final[root][1][0] if root in self.final else None
        group = self.groups.get(root) or _Group(root, ends, [root])
        why = self._root_cannot(u, group)
        if why is None:
            why = self._unusable(u, place) or ("" if given_back else self._conflict(u, group, region(u, place))) or None
        if why is None:
            self.groups[root], self.places[u.new], self.accepted[u] = group, place, None
            self.given_back |= {u} if given_back else set()
            group.updates.append(u)
            group.alive.append(u.new)
        looks = u.kind == "each" and u.new not in self._becomes(root)  # (like an update, and is none)
        return why and ("" if u.kind == "same" or looks else why)

    def _becomes(self, root: str) -> Iterator[str]:
        """The buffers that what ``root`` holds in the end is updated from, one after the other."""
        b = self.final.get(root, ("",))[0]
        while b in self.made:
            yield b
            b = self.made[b].old

    def place(self, b: str) -> View:
        return self.places.get(b) or full_view(self.program.buffers[b])

    def _root_cannot(self, u: Update, group: _Group) -> str | None:
        root, kind = group.root, self.program.buffers[group.root].kind
        if kind == "const":
            return f"{root} is a constant"
        if kind == "input" and group.ends is None:
            return f"{root} is written to in another way" if root in self.depends.writers else ""
        if group.ends is not None and u.at > group.ends:
            return f"it is updated after it was copied onto {root}"
        makers = [self.program.nodes[i] for i in self.depends.writers.get(root, ())]
        if kind == "temp" and (not makers or any(isinstance(n, Extern) and may_alias(n.target) for n in makers)):
            return f"{root} was made by a call, and may be in another tensor's memory"
        if kind == "temp" and u.kind == "same" and isinstance(makers[0], LoopNest):
            return ""  # (the copy is computed in the same kernel)
        for other in group.updates:
            if other.at > u.position:
                return f"{root} is being updated by {other.node.name}"
        return None

    def _unusable(self, u: Update, place: View) -> str:
        """Why nodes could not use ``u.new`` at ``place``."""
        buffers = self.program.buffers
        if place.buffer in self.final and u.new in self.results:
            return f"{place.buffer} and its update are both results"
        if plain(place, buffers[place.buffer]) and plain(place, buffers[u.new]):
            return ""
        if u.new in self.lasting:
            return f"{u.new} is a result, and would be a part of {place.buffer}"
        for i in (*self.depends.readers.get(u.new, ()), *self.depends.writers[u.new]):
            node, w = self.program.nodes[i], self.slices.get(i)
            at: list[Any] = list(_uses(node, u.new))
            new = w.write.new if w is not None and w.write is not None else None
            if w is not None and isinstance(new, Load) and new.buffer == u.new and at == [new.index]:
                at = [new.index.subs(slice_points(w.write))]  # type: ignore[arg-type]
                self.masked.setdefault(w, []).append(u)
            if not isinstance(node, (LoopNest, Extern)) or any(self._there(x, u.new, place) is None for x in at):
                return f"{node.name} uses a part of {place.buffer} in a way that is not understood"
        return ""

    def _there(self, x: Expr | View, b: str, place: View) -> Expr | None:
        """The index into the root of an element of ``b``, or of a view of it (over any loops)."""
        buffer = self.program.buffers[b]
        if isinstance(x, View):
            there = within(x, buffer, place)
            forward = there is not None and all(map(nonneg, there.strides))  # a tensor's strides are not negative
            return points(there) if there is not None and forward else None
        return moved(x, buffer, place)

    def _conflict(self, u: Update, group: _Group, where: View) -> str:
        """What is still needed of that which ``u`` stores over, at ``where``."""
        group.alive = [b for b in group.alive if self._last(b) >= u.at]
        for b in group.alive:
            if b in self.lasting:
                return f"{b} is needed afterwards"
            for i in sorted({*self.depends.readers.get(b, ()), *self.depends.writers.get(b, ())}):
                after = b == group.root and group.ends is not None and i >= group.ends
                if i >= u.at and not after and not self._harmless(i, b, u, where):
                    return self._told(i, b, u)
                group.read_later |= i > u.at and not after and i not in self.slices and u.kind != "same"
        return ""

    def _told(self, i: int, b: str, u: Update) -> str:
        name = self.program.nodes[i].name
        if self.program.buffers[b].kind == "input":
            return f"{name} reads {b} as it was before"
        if i == u.at:
            return f"{name} reads other elements of {b} than it stores"
        return f"{b} is read afterwards, by {name}"

    def _last(self, b: str) -> int:
        used = (*self.depends.readers.get(b, ()), *self.depends.writers.get(b, ()))
        return len(self.program.nodes) if b in self.lasting else max(used, default=-1)

    def _harmless(self, i: int, b: str, u: Update, where: View) -> bool:
        """Does node ``i``, not before ``u.at``, use nothing of ``b`` that ``u`` stores over?"""
        node, w = self.program.nodes[i], self.slices.get(i)
        if i in self.depends.writers.get(b, ()) or not isinstance(node, (LoopNest, Extern)):
            return False
        if u.kind == "same" or isinstance(node, Extern) and u.kind == "call" and i == u.position and b == u.old:
            return True  # (nothing is stored); its first argument, and no other one
        root, stored = self.program.buffers[where.buffer], points(where)
        own = self._stored_by(u) if i == u.at else []
        uses: list[Any] = list(_uses(node, b))
        if w is not None and w.write is not None:
            env = slice_points(w.write)
            inside = only_in_slice(w.write, stored, self._whole(w), root)
            new, old = w.write.new, w.write.old
            uses = [old.index] if w.old == b and w is not u and not inside and isinstance(old, Load) else []
            uses += [new.index.subs(env)] if isinstance(new, Load) and new.buffer == b else []
        for x in uses:
            there = self._there(x, b, self.place(b))
            if there is None or not (own and all(there == s for s in own)) and not apart(root, there, stored):
                return False
        return True

    def _whole(self, w: Update) -> View:
        """Where the buffer of which ``w`` updates a slice is."""
        return within(w.view, self.program.buffers[w.old], self.place(w.old)) or self.place(w.old)

    def _stored_by(self, u: Update) -> list[Expr | None]:
        """The elements that the first node of ``u`` stores, each at the point of its loops."""
        node = self.program.nodes[u.at]
        if u.kind not in ("copy", "each", "same") or not isinstance(node, LoopNest):
            return []
        place = within(u.view, self.program.buffers[u.old], self.place(u.old))
        assert place is not None
        return [self._there(s.index, u.new, place) for s in node.stores() if s.buffer == u.new]

    def in_retrospect(self) -> dict[Update, str]:
        """Updates that must be refused for what was decided after them."""
        out: dict[Update, str] = {}
        for w, needed in self.masked.items():
            if w not in self.accepted:
                out |= {u: f"{w.node.name} puts it back into a copy" for u in needed if u in self.accepted}
        back = self._parts_put_back()
        parts = [u for u in self.accepted if not self.whole(u.new) and u.new not in back]
        out |= dict.fromkeys((u for u in parts if self.program.buffers[self.places[u.new].buffer].kind == "temp"), "")
        for g in self.groups.values():
            kinds = {u.kind for u in g.updates} - {"same"}
            if "each" in kinds and kinds <= {"each", "slice"}:
                each = [u for u in g.updates if u.kind == "each"]
                parts_only = not any(self.whole(u.new) for u in each)  # (a slice of each is stored in place instead)
                out |= dict.fromkeys(each if parts_only else g.updates, "")
            elif kinds == {"slice"} and self._chained(g):
                out |= dict.fromkeys(g.updates, "")
            elif kinds == {"slice"} and self._recurs(g):
                why = f"older slices of {g.root} are read in between: each would be a kernel"
                out |= dict.fromkeys(g.updates, "") | {g.updates[0]: why}  # (one copy, and slices in place in it)
            if g.ends is not None and g.root not in self.in_input():
                late = [u for u in g.updates if self._last(u.new) >= g.ends]  # (copied from other elements, if there)
                out |= dict.fromkeys(late, f"{g.root} is written to before its last use")
        return out

    def _recurs(self, g: _Group) -> bool:
        """Is much of the input written slice by slice, and older elements of it read in between? Such reads and stores
        are one kernel only if they are of different buffers (``slice_stores``). That costs a copy, which is written,
        read, and read again at the end."""
        sizes = [region(u, self.places[u.new]).shape for u in self._storing(g)]
        stored, root = sum(product(shape).hint() for shape in sizes), self.program.buffers[g.root]
        kernels = len(sizes) * self.launch
        return g.read_later and 4 * stored > root.numel.hint() and kernels > 3 * root.nbytes.hint()

    def _chained(self, g: _Group) -> bool:
        """Do slices that lie over each other follow one another, and nothing else reads what is between? A loop over
        the whole stores each element once."""
        stored = sum(product(region(u, self.places[u.new]).shape).hint() for u in self._storing(g))
        if stored <= self.program.buffers[g.root].numel.hint():
            return False
        seen, todo = {u.position for u in g.updates}, [u.new for u in g.updates[:-1]]
        others = {u.position for u in self.accepted} - seen
        while todo:
            if (b := todo.pop()) in self.lasting or self.program.buffers[b].kind != "temp":
                return False
            for i in self.depends.readers.get(b, ()):
                node = self.program.nodes[i]
                if not isinstance(node, LoopNest) or node.reduced or i in others:
                    return False
                todo += () if i in seen else node.writes()
                seen.add(i)
        return True

    def _storing(self, g: _Group) -> list[Update]:
        return [u for u in g.updates if u not in self.given_back and u.kind != "same"]

    def _parts_put_back(self) -> set[str]:
        """Buffers in parts of others, to which they are put back in the end: else one would keep all of the storage."""
        made = {u.new: u for u in self.accepted}
        out: set[str] = set()
        for w in self.given_back:
            b = w.write.new.buffer  # type: ignore[union-attr]
            while b in made and b not in out and not self.whole(b):
                out.add(b)
                b = made[b].old
        return out

    def whole(self, b: str) -> bool:
        """Does ``b`` live in all of its root, laid out like it?"""
        place = self.place(b)
        return plain(place, self.program.buffers[b]) and plain(place, self.program.buffers[place.buffer])

    def in_input(self) -> dict[str, list[int]]:
        """Inputs whose final values are there anyway, and the nodes that copy them."""
        out = {}
        for g in self.groups.values():
            if g.ends is not None:
                b, copies = self.final[g.root]
                place, found = self.places.get(b), whole_copy(self.program, self.program.nodes[copies[-1]])
                if place is None or place.buffer != g.root or found is None:
                    continue
                if moved(found[1].index, self.program.buffers[b], place) == found[2].index:
                    out[g.root] = copies
        return out


def _uses(node: Node, name: str) -> Iterator[Expr | View]:
    """Indices of the loads and stores of a buffer in a loop nest; views of it that a call is given."""
    if isinstance(node, LoopNest):
        accesses: list[Load | Store] = [*node.loads(), *node.stores()]
        yield from dict.fromkeys(s.index for s in accesses if s.buffer == name)
    elif isinstance(node, Extern):
        yield from (v for v in iter_views((node.args, node.kwargs)) if v.buffer == name)


def may_alias(target: object) -> bool:
    """May a result share storage with an argument that is not written to, or is one's storage counted in (as_strided)?
    (A higher-order op's may not; a kernel has none.)"""
    if isinstance(s := getattr(target, "_schema", None), torch._C.FunctionSchema):
        return "storage_offset" in str(s) or any((a := r.alias_info) and not a.is_write for r in s.returns)
    return not isinstance(target, (torch._ops.HigherOrderOperator, Launched))


def _shared(program: Program) -> set[str]:
    """Buffers whose memory the result of a call may share."""
    calls = (n for node in program.nodes for n in inside(node) if isinstance(n, Extern) and may_alias(n.target))
    return {b for n in calls for b in (*n.reads(), *n.writes())}


# -- rewriting ----------------------------------------------------------------------------------------------
class _Rewriting:
    """The program with what was decided."""

    def __init__(self, work: _Deciding, options: Options):
        self.program, self.places, self.work = work.program, work.places, work
        self.out = Stores(options.max_fused_buffers // 2)
        self.dropped = {u.position for u in work.accepted if u.kind in ("copy", "same") or u in work.given_back}
        self.dropped |= {i for copies in work.in_input().values() for i in copies}
        whole = {b: v.buffer for b, v in self.places.items() if work.whole(b)}
        self.names = whole | {b: r for r, (_, copies) in work.final.items() for b in self._between(copies)}

    def _between(self, copies: list[int]) -> Iterator[str]:
        """The temporaries through which values go to an input."""
        for i in copies[1:]:
            if i in self.dropped:
                yield from self.program.nodes[i].writes()

    def run(self) -> Program:
        made = {u.position: u for u in self.work.accepted if u.kind in ("slice", "call")}
        for i, node in enumerate(self.program.nodes):
            u = made.get(i)
            if i in self.dropped:
                continue
            if u is not None and u.write is not None:
                root = self.places[u.new].buffer
                self.out.add_slice(u.write, root, self._at, alone=not self.work.whole(u.new))
            else:
                self.out.add(self._rewritten(self._called(u, node) if u is not None else node))
        outputs = tuple(self._renamed(v) if isinstance(v, View) else v for v in self.program.outputs)
        program = replace(self.program, nodes=tuple(self.out.finish()), outputs=outputs)
        return replace(program, buffers=used_buffers(program, program.nodes))

    def _renamed(self, v: View) -> View:
        return replace(v, buffer=self.names.get(v.buffer, v.buffer))

    def _at(self, b: str, index: Expr) -> tuple[str, Expr]:
        if b not in self.places:
            return b, index
        there = moved(index, self.program.buffers[b], self.places[b])
        assert there is not None
        return self.places[b].buffer, there

    def _called(self, u: Update, node: Node) -> Node:
        """The call in place. (Its result is its argument.)"""
        assert isinstance(node, Extern)
        op = in_place_form(node.target)
        new = full_view(self.program.buffers[u.new])
        return replace(node, target=op, args=(new, *node.args[1:]), outputs=(None,), mutates=(u.new,), out=None)

    def _rewritten(self, node: Node) -> Node:
        used = {b for b in (*node.reads(), *node.writes()) if b in self.places}
        if used <= self.names.keys():
            return renamed([node], (), self.names)[0][0] if used else node
        return rehomed(node, self.places, self.program.buffers)


# -- reporting ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Updated:
    """One update. ``buffer``: what was, or was not, updated in place. ``copied``: bytes that are copied for it (at the
    sizes' hints). ``why``: it was refused; "" if it was not. ``source``: the user's line."""

    op: str
    buffer: str
    copied: int
    why: str
    source: str

    def __str__(self) -> str:
        how = "in place" if not self.why else f"in a copy of {self.copied:,} bytes: {self.why}"
        return f"{self.op} updates {self.buffer} {how}" + (f" ({self.source})" if self.source else "")


def _report(program: Program, u: Update, work: _Deciding) -> Updated:
    why = work.refused.get(u, "")
    op = u.node.origins[0] if u.node.origins else None
    copied = program.buffers[u.new].nbytes.hint() if why else 0
    return Updated(op.op if op else u.node.name, work.place(u.old).buffer, copied, why, op.source if op else "")


def _refusal(program: Program, u: Update, why: str) -> Refusal:
    op = u.node.origins[0] if u.node.origins else None
    where = f" ({op.source})" if op is not None and op.source else ""
    logs.get("fallback").info("%s updates a copy: %s%s", op.op if op is not None else u.node.name, why, where)
    return Refusal(program.nodes[u.position].name, u.node.name, Reason("in-place", why))
