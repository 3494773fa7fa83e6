"""Elementwise work on what a Triton kernel of the user's stores is done where it stores: a result is neither written
nor read again (2 * n bytes per element less, and a launch).

**Which.** The kernel has one store to the argument, for every element exactly once (``launch_stores`` finds it,
``launch_cover`` proves it), and does nothing else with it: its results do not depend on what was there, nor on what is
stored instead. (Of an element that is not stored, what follows may make something that is: 0, say.) What follows is a
pointwise kernel whose points are these elements, in the order of memory, and that stores to nothing that the launch
is given: other programs may still read it. Reads at other elements (a bias) are written in terms of the element's
number, ``x // 64 % 16``. If others need the plain result, it is stored as well.

**How.** The kernel's text is changed (``generate.launch_epilogue``), not its syntax tree or its IR: a package and a
reader get the same Triton. ``tl.store(out + i, v, mask=m)`` becomes a call of a function that we print,
``epilogue(.., out + i, v, mask=m)``, and for ``out`` the kernel is given the number 0: all that it does with its
pointer is to add, so what it adds up is the element's number, whatever its way there is (a row's pointer, one that was
advanced before; not one that a loop advances). Triton inlines the function. A function that is an argument of the
kernel would need a parameter in the user's text as well, and the pointers that it uses.

* The value is rounded to the argument's type first (``tl.cast``, as ``tl.store`` does), then continues in float32, as
  if it had been stored and read: half precision is the same to the bit. In float32 a product at the end of the kernel
  may be contracted with a sum behind it, as in our own kernels; under ``numerics="eager"`` and ``batch_invariant``
  nothing is appended.
* Constants of its module, helper functions, closures: they are in the text already (``lower.kernel_text``), in which
  new names are chosen. A call to a helper that is given the pointer is refused.
* A kernel's binary is found by its text, so by what is appended. With ``@triton.autotune``, each configuration is a
  text of its own: what follows is appended to each as it is measured, and to the winner.
* Triton's front end is asked whether it takes the new text (``TAKES``); if not, that launch stays as it was.
* A prologue (work on what the kernel loads) would have to know that each element is loaded once, or be repeated: not
  done.

Why nothing was appended is a Refusal between the launch and the kernel that follows, with the kernel's name.

NB: TorchInductor appends one pointwise node (``epilogue_fusion_user_defined_triton_kernel``, off unless it is set) to
a kernel with a single store, to a tensor that it does not read; that every element is stored is the user's word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from .. import logs
from ..ir.expr import ONE, Var, expr, product
from ..ir.loops import Acc, Axis, Indirect, Load, LoopNest, Stmt, Store
from ..ir.program import Buffer, Extern, Program, View, full_view
from ..ir.transforms import substitute
from ..ir.user_kernel import Appended, UserKernel
from ..options import Options
from ..target import Target
from .dependencies import dependencies, remove_dead
from .driver import TAKES
from .emit import kind_of, order
from .launch_cover import NotSimple, covers, digits
from .launch_stores import the_store
from .result import Fused, Group, Reason, Refusal

X = "x"
MAX_VIEWS = 8  # tensors that what is appended reads and writes: a kernel's registers are its own
_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool)
_DTYPES += (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def launch_epilogues(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. Assumes a legal order."""
    launches = [i for i, n in enumerate(fused.program.nodes) if _launch(n)]
    if not launches:
        return fused
    bad: dict[int, str] = {}
    work = _appended(fused.program, launches, options, bad)
    while found := work.not_taken(target):
        bad |= found
        work = _appended(fused.program, launches, options, bad)
    return work.result(fused)


def _appended(program: Program, launches: list[int], options: Options, bad: Mapping[int, str]) -> _Appending:
    work = _Appending(program)
    for i in launches:
        for at, buffer in work.followers(i):
            try:
                if i in bad:
                    raise NotSimple(bad[i])
                if options.numerics == "eager" or options.batch_invariant:
                    raise NotSimple('under numerics="eager" and batch_invariant its text is not changed')
                work.append(i, at, buffer)
            except NotSimple as e:
                work.refuse(i, at, str(e))
    return work


def _launch(n: object) -> bool:
    return isinstance(n, Extern) and isinstance(n.target, UserKernel)


class _Appending:
    """``into``: position of a kernel -> that of the launch it is appended to; ``now``: launches as they become."""

    def __init__(self, program: Program):
        self.program, self.depends = program, dependencies(program)
        self.into: dict[int, int] = {}
        self.now: dict[int, Extern] = {}
        self.refused: dict[tuple[int, int], str] = {}

    def followers(self, i: int) -> Iterator[tuple[int, str]]:
        """Kernels that read what the launch at ``i`` wrote."""
        d = self.depends
        for buffer in self.program.nodes[i].writes():
            for at in d.readers.get(buffer, ()):
                if at > i and d.last_writer(buffer, at) == i and isinstance(self.program.nodes[at], LoopNest):
                    yield at, buffer

    def refuse(self, i: int, at: int, why: str) -> None:
        x = self.program.nodes[i]
        assert isinstance(x, Extern)
        text = f"the Triton kernel {x.target}: {why}"
        self.refused.setdefault((i, at), text)
        logs.get("fallback").info("%s is not computed where it stores: %s", self.program.nodes[at].name, text)

    def append(self, i: int, at: int, buffer: str) -> None:
        """``at``, which reads ``buffer``, to the launch ``i``. Raises NotSimple."""
        x, loops, b = self.now.get(i, self.program.nodes[i]), self.program.nodes[at], self.program.buffers[buffer]
        assert isinstance(x, Extern) and isinstance(loops, LoopNest)
        if at in self.into:
            raise NotSimple(f"{loops.name} is computed where another launch stores")
        if x is not self.program.nodes[i] and all(v.buffer != buffer for v in x.args if isinstance(v, View)):
            raise NotSimple(f"other work is done where it stores {buffer}")
        _may_follow(x, loops, b)
        name = _argument(x, buffer)
        stored = the_store(x, name)
        covers(stored, b.numel)
        body = _over_elements(loops, b, self.program)
        if self._path(i, at):
            raise NotSimple(f"{loops.name} needs something else that needs its result")
        loops = replace(loops, axes=(Axis(Var(X, b.numel), "p"),), body=body)
        made = _with(x, name, b, loops, self._kept(i, at, b), self.program)
        if sum(map(len, dict(made.kwargs)["appended"])) > MAX_VIEWS:
            raise NotSimple(f"{loops.name} reads and writes too many tensors for the registers of another kernel")
        self.now[i], self.into[at] = made, i

    def not_taken(self, target: Target) -> dict[int, str]:
        """Launches that Triton would not take as they are now, and why: one warning for each."""
        bad: dict[int, str] = {}
        for i, x in self.now.items():
            why = next(filter(None, (ask(x, self.program.buffers, target) for ask in TAKES.values())), "")
            if why:
                bad[i] = "Triton refuses it with what follows"
                ops = ", ".join(dict.fromkeys(o.op for a in x.target.appended for o in a.loops.origins))
                logs.get("compile").warning(
                    "the Triton kernel %s with %s at its store is refused by Triton; these are kernels of their own. "
                    "This is a bug of reflib: %s", x.target, ops, why,
                )  # fmt: skip
        return bad

    def _kept(self, i: int, at: int, b: Buffer) -> bool:
        d = self.depends
        return b.name in d.needed or any(r > i and r != at for r in d.readers[b.name])

    def _unit(self, p: int) -> set[int]:
        head = self.into.get(p, p)
        return {head, *(at for at, i in self.into.items() if i == head)}

    def _path(self, i: int, at: int) -> bool:
        """Does a part of the launch ``i`` with ``at`` need another part by way of something else?"""
        mine = self._unit(i) | {at}
        todo = set().union(*(self.depends.before[p] for p in mine)) - mine
        seen: set[int] = set()
        while todo:
            unit = self._unit(todo.pop())
            if unit <= seen:  # (one that lies before ``i`` may have taken what comes later)
                continue
            seen |= unit
            needs = set().union(*(self.depends.before[p] for p in unit)) - unit
            if needs & mine:
                return True
            todo |= needs
        return False

    def result(self, fused: Fused) -> Fused:
        nodes, groups = self.program.nodes, {g.name: g for g in fused.groups}
        members = {n.name: groups[n.name].members if n.name in groups else (n.name,) for n in nodes}
        told = {(nodes[i].name, m) for i, at in (*self.refused, *((i, at) for at, i in self.into.items()))
                for m in (nodes[at].name, *members[nodes[at].name])}  # fmt: skip
        new = (Refusal(nodes[i].name, nodes[at].name, Reason("call", why)) for (i, at), why in self.refused.items())
        rest = (r for r in fused.refusals if (r.producer, r.consumer) not in told)
        fused = replace(fused, refusals=(*rest, *new))
        if not self.now:
            return fused
        units = [sorted(self._unit(i)) for i in range(len(nodes)) if i not in self.into]
        units.sort(key=lambda u: u[-1])
        unit_of = {p: k for k, u in enumerate(units) for p in u}
        before = [{unit_of[q] for p in u for q in self.depends.before[p]} - {k} for k, u in enumerate(units)]
        done, made = [], []
        for k in order(before):
            i = next(p for p in units[k] if p not in self.into)
            done.append(self.now.get(i, nodes[i]))
            name, kind = nodes[i].name, kind_of(nodes[i])
            made.append(Group(name, tuple(m for p in units[k] for m in members[nodes[p].name]), kind))
        fused = replace(fused, groups=tuple(made))
        return fused.regrouped(remove_dead(replace(self.program, nodes=tuple(done))))


# -- what may follow ----------------------------------------------------------------------------------------
def _may_follow(x: Extern, loops: LoopNest, b: Buffer) -> None:
    """Raises NotSimple unless ``loops`` is elementwise and touches nothing that other programs of ``x`` may touch."""
    if loops.reduced:
        raise NotSimple(f"{loops.name} reduces")
    if any(isinstance(s, Indirect) for s in loops.body):
        raise NotSimple(f"{loops.name} is not elementwise")
    if b.dtype not in _DTYPES:
        raise NotSimple(f"it stores {str(b.dtype).removeprefix('torch.')}")
    if any(s.reduce for s in loops.stores()):
        raise NotSimple(f"{loops.name} adds to what is there")
    if also := sorted((set(loops.reads()) - {b.name}) & set(x.writes())):
        raise NotSimple(f"{loops.name} reads {also[0]} as well, which it also writes")
    if given := sorted(set(loops.writes()) & {*x.reads(), *x.writes()}):
        raise NotSimple(f"{loops.name} stores to {given[0]}, which it is given")


def _argument(x: Extern, buffer: str) -> str:
    """The kernel's name for the argument that is all of ``buffer``, given once. Raises NotSimple."""
    places = [i for i, v in enumerate(x.args) if isinstance(v, View) and v.buffer == buffer]
    if len(places) != 1:
        raise NotSimple(f"it is given {buffer} more than once")
    name = next((str(c[0])[:-1] for c in x.target.call if c[1:] == (places[0],)), None)
    if name is None:
        raise NotSimple(f"it is given {buffer} in a tuple or a descriptor")
    return name


def _over_elements(loops: LoopNest, b: Buffer, program: Program) -> tuple[Stmt, ...]:
    """The body over the elements of ``b`` in the order of memory. Raises NotSimple where its points are no elements."""
    x = Var(X, b.numel)
    indices = {s.index for s in loops.loads() if s.buffer == b.name}
    if len(indices) != 1 or any(s.mask is not None for s in loops.loads() if s.buffer == b.name):
        raise NotSimple(f"{loops.name} reads {b.name} at more than one place, or under a condition")
    (index,) = indices
    env: dict = {a.var: 0 for a in loops.axes if a.size == 1}
    found = digits(index.subs(env), (a.var for a in loops.axes if a.size != 1))
    if found is None or product(v.size for v in found) != b.numel or b.extent != b.numel:
        raise NotSimple(f"{loops.name} runs over other elements than those of {b.name}")
    step = ONE
    for v in found:
        env[v] = expr(x) // step % v.size if v is not found[-1] else expr(x) // step
        step = step * v.size
    body = substitute(loops.body, env)
    for s in body:
        if isinstance(s, (Load, Store)):
            _in_order(loops, s, x, program.buffers[s.buffer])
    return tuple(Acc(s.dtype) if isinstance(s, Load) and s.buffer == b.name else s for s in body)


def _in_order(loops: LoopNest, s: Load | Store, x: Var, b: Buffer) -> None:
    """Neighbours in memory are neighbours in ``b``; what is read may be small instead (a bias)."""
    alike = s.index == expr(x) if isinstance(s, Store) else s.index.coefficient(x) == 1
    small = isinstance(s, Load) and 2 * b.numel.hint() <= x.size.hint()
    if not alike and not small:
        raise NotSimple(f"{loops.name} has {b.name} in another order in memory")


def _with(x: Extern, name: str, b: Buffer, loops: LoopNest, kept: bool, program: Program) -> Extern:
    """The launch with ``loops`` computed where it stores to ``name``; ``kept``: ``b`` is stored as well."""
    kernel, kwargs = x.target, dict(x.kwargs)
    body = [*loops.body]
    if kept:
        acc = next(i for i, s in enumerate(body) if isinstance(s, Acc))
        body.append(Store(b.name, expr(loops.axes[0].var), acc))
    names = list(dict.fromkeys(s.buffer for s in body if isinstance(s, (Load, Store))))
    numbered = tuple(replace(s, buffer=str(names.index(s.buffer))) if isinstance(s, (Load, Store)) else s for s in body)
    at = next(i for i, v in enumerate(x.args) if isinstance(v, View) and v.buffer == b.name)
    call = tuple((c[0], "tl.full((), 0, tl.int64)") if c[1:] == (at,) else tuple(
        p - 1 if isinstance(p, int) and p > at else p for p in c) for c in kernel.call)  # fmt: skip
    appended = (*kernel.appended, Appended(name, b.dtype, replace(loops, name="epilogue", body=numbered)))
    sizes = tuple(expr(s) for s in sorted({s for a in appended for s in a.loops.symbols()}))
    views = (*kwargs.get("appended", ()), tuple(full_view(program.buffers[n]) for n in names))
    written = (*(m for m in x.mutates if kept or m != b.name), *loops.writes())
    return replace(
        x, target=replace(kernel, call=call, appended=appended), args=x.args[:at] + x.args[at + 1 :],
        kwargs=(("grid", kwargs["grid"]), ("appended", views), ("sizes", sizes)),
        mutates=tuple(dict.fromkeys(written)), origins=tuple(dict.fromkeys((*x.origins, *loops.origins))),
    )  # fmt: skip
