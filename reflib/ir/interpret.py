"""The slow, right way to run a program at any stage: torch, one statement at a time, over whole index grids.

``interpret(program, args)`` is what every other way of running a program is compared with. It needs no compiler and
works on any device. Each buffer is one flat tensor that covers its extent; a LoopNest' index expression is evaluated as
an integer tensor over the grid of its axes, one tensor dimension per axis; a reduction keeps its dimensions, at size 1.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import IndexOutOfRange, ReflibError
from . import float8, random  # noqa: F401  (their ops)
from .expr import Expr, IntLike, Sym, expr, product
from .loops import Acc, Const, Index, Indirect, Load, LoopNest, Reduce, Scan, Stmt, Store
from .ops import OPS, REDUCTIONS, value_dtype
from .out_lists import out_arguments
from .program import (
    Choice,
    Extern,
    KernelNode,
    Node,
    Program,
    Template,
    Variant,
    Variants,
    View,
    full_view,
    holds,
    map_tree,
)
from .regions import Region
from .scans import SCANS

NOWHERE = -(2**40)  # the position of what an Indirect skips; times a stride it stays below zero
Env = dict[str, Any]  # symbol, loop variable or %i -> int or integer tensor


@torch.no_grad()
def interpret(program: Program, args: Sequence[Any]) -> list[Any]:
    """Run ``program`` on ``args`` (tensors and ints, as ``program.inputs`` lists them); returns the outputs.

    Inputs that the program mutates are mutated. Assumes a verified program.
    """
    sizes = bind_symbols(program, args)
    memory: dict[str, torch.Tensor] = {}
    for name, arg in zip(program.inputs, args):
        if isinstance(name, str):
            memory[name] = flat(arg)
    for name, b in program.buffers.items():
        if b.kind == "const":
            memory[name] = flat(program.constants[name])
    for node in program.nodes:
        _run_node(program, node, memory, sizes)
    return [map_tree(o, lambda leaf: _leaf(leaf, memory, sizes)) for o in program.outputs]


def bind_symbols(program: Program, args: Sequence[Any]) -> Env:
    """Values of the size symbols, from integer arguments and from sizes and strides that are a bare symbol."""
    sizes: Env = {}
    facts: list[tuple[Expr, int, str]] = []
    for what, arg in zip(program.inputs, args, strict=True):
        if isinstance(what, (Sym, Expr)):
            facts.append((expr(what), arg, str(what)))
        elif isinstance(what, str):
            b = program.buffers[what]
            facts += [(e, n, f"size {d} of {what}") for d, (e, n) in enumerate(zip(b.shape, arg.shape))]
            if 0 not in arg.shape:
                pairs = enumerate(zip(b.strides, arg.stride()))
                facts += [(e, n, f"stride {d} of {what}") for d, (e, n) in pairs if arg.shape[d] != 1]
    for e, n, _ in facts:
        if isinstance(e.atom, Sym):
            sizes.setdefault(e.atom.name, n)
    for e, n, where in facts:
        if all(s.name in sizes for s in e.symbols()) and int(e.evaluate(sizes)) != n:
            raise ReflibError(f"{where} is {n}, the program was made for {e} = {int(e.evaluate(sizes))}")
    return sizes


def flat(t: torch.Tensor) -> torch.Tensor:
    """A one-dimensional view of everything from ``t``'s first element to its last in memory."""
    if t.numel() == 0:
        return t.new_empty(0)
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return t.detach().as_strided((extent,), (1,))


def _run_node(program: Program, node: Node, memory: dict[str, torch.Tensor], sizes: Env) -> None:
    if isinstance(node, Extern):
        _run_extern(program, node, memory, sizes)
        return
    if isinstance(node, Region) and node.repeats:
        _run_loop(program, node, memory, sizes)
        return
    if isinstance(node, (Choice, Variants)):
        v = node.variants[0] if isinstance(node, Choice) else _variant(node, sizes)
        if v.buffers:
            program = replace(program, buffers={**program.buffers, **{b.name: b for b in v.buffers}})
        for n in v.nodes:
            _run_node(program, n, memory, sizes)
        return
    for part in node.parts if isinstance(node, KernelNode) else (node,):
        _allocate(program, (b for b in part.writes() if b not in memory), memory, sizes)
        if isinstance(part, Extern):
            _run_extern(program, part, memory, sizes)
        elif isinstance(part, Template):
            run_template(part, memory, sizes)
        else:
            run_loops(part, memory, sizes)


def _allocate(program: Program, names: Iterable[str], memory: dict[str, torch.Tensor], sizes: Env) -> None:
    for b in map(program.buffers.__getitem__, names):
        memory[b.name] = torch.empty(int(b.extent.evaluate(sizes)), dtype=b.dtype, device=b.device)


def _run_loop(program: Program, node: Region, memory: dict[str, torch.Tensor], sizes: Env) -> None:
    condition, body = node.variants
    _allocate(program, node.stacked(), memory, sizes)
    for i in itertools.count():
        if node.counter is not None:
            sizes[node.counter.name] = i
        for n in condition.nodes:
            _run_node(program, n, memory, sizes)
        if not all(holds(p, sizes) for p in condition.predicate):
            return
        for n in body.nodes:
            _run_node(program, n, memory, sizes)
        memory.update({old: memory[new].clone() for old, new in node.carried})


def _variant(node: Variants, sizes: Env) -> Variant:
    """The first whose predicate holds of the sizes; one that assumes alignment is passed over."""
    return next(v for v in node.variants if all(p.kind != "aligned" and holds(p, sizes) for p in v.predicate))


def run_template(t: Template, memory: dict[str, torch.Tensor], sizes: Env) -> None:
    """The operands that are computed, the product in ``acc_dtype``, then the epilogue."""
    for p in t.prologues:
        (v,) = (v for v in (t.a, t.b) if t.prologue(v) is p)
        numel = int(product(v.shape).evaluate(sizes))
        memory = memory | {v.buffer: torch.empty(numel, dtype=v.dtype, device=memory[p.reads()[0]].device)}
        run_loops(p, memory, sizes)
    both = t.dtype.is_floating_point and t.dtype.itemsize == 1  # 8-bit floats are multiplied as they are
    given = (view_tensor(v, memory[v.buffer], sizes) for v in (t.a, t.b))
    a, b = ((x if both else x.to(t.dtype)).to(t.acc_dtype) for x in given)
    acc = torch.matmul(a, b)
    run_loops(t.epilogue, memory, sizes, acc if len(t.epilogue.axes) == 3 else acc[0])


def _run_extern(program: Program, e: Extern, memory: dict[str, torch.Tensor], sizes: Env) -> None:
    _allocate(program, (b for b in e.writes() if e.out is not None and b not in memory), memory, sizes)
    args, kwargs = map_tree((e.args, dict(e.kwargs)), lambda leaf: _leaf(leaf, memory, sizes))
    if e.out is not None:
        op, names = e.out
        buffers = (program.buffers[o] if isinstance(o, str) else None for o in e.outputs)
        views = (None if b is None else view_tensor(full_view(b), memory[b.name], sizes) for b in buffers)
        given = [kwargs.pop(k) if v is None else v for k, v in zip(names, views)]  # (None: it is among kwargs)
        op(*args, **kwargs, **out_arguments(names, given))
        return
    result = e.target(*args, **kwargs)
    values = torch.utils._pytree.tree_leaves(result) if isinstance(result, (tuple, list, dict)) else [result]
    for sym, position, dim in e.symbols:
        value = values[position]
        read = value if dim is None else value.shape[dim] if dim >= 0 else value.stride(~dim)
        sizes[sym.name] = read  # perhaps a float or a bool
    for what, value in zip(e.outputs, values):
        if isinstance(what, str):
            b = program.buffers[what]
            if value.layout != torch.strided:  # sparse and the like pass from call to call, whole
                memory[what] = value
                continue
            strides = [int(s.evaluate(sizes)) for s in b.strides]
            if list(value.stride()) != strides and value.numel() > 1:
                value = torch.empty_strided(value.shape, strides, dtype=b.dtype, device=b.device).copy_(value)
            memory[what] = flat(value)


def _leaf(leaf: Any, memory: dict[str, torch.Tensor], sizes: Env) -> Any:
    """A View as a tensor, a symbolic int as an int, anything else as it is."""
    if isinstance(leaf, View):
        return view_tensor(leaf, memory[leaf.buffer], sizes)
    if isinstance(leaf, Expr):
        return sizes[leaf.atom.name] if isinstance(leaf.atom, Sym) else int(leaf.evaluate(sizes))
    return leaf


def view_tensor(view: View, storage: torch.Tensor, sizes: Env) -> torch.Tensor:
    if storage.layout != torch.strided:
        return storage
    shape, strides = ([int(e.evaluate(sizes)) for e in es] for es in (view.shape, view.strides))
    if storage.dtype != view.dtype:
        storage = storage.view(view.dtype)
    offset = storage.storage_offset() + int(view.offset.evaluate(sizes))
    if 0 in shape:
        return storage.new_empty_strided(shape, strides)
    return storage.as_strided(shape, strides, offset)


# -- LoopNest ------------------------------------------------------------------------------------------
def run_loops(loops: LoopNest, memory: dict[str, torch.Tensor], sizes: Env, acc: torch.Tensor | None = None) -> None:
    """Execute one LoopNest on flat storages. ``acc``: for an epilogue, the product."""
    buffers = [*loops.writes(), *loops.reads()]
    device = memory[buffers[0]].device if buffers else torch.device("cpu")
    env = dict(sizes)
    extents = [int(a.size.evaluate(sizes)) for a in loops.axes]
    for d, axis in enumerate(loops.axes):
        shape = [1] * len(extents)
        shape[d] = extents[d]
        env[axis.var.name] = torch.arange(extents[d], device=device).reshape(shape)
    rdims = [d for d, a in enumerate(loops.axes) if a.kind == "r"]
    values: list[Any] = []
    for buffer in {s.buffer for s in loops.stores() if s.reduce == "sum"}:  # column sums: all in the first row
        memory[buffer].zero_()
    for i, s in enumerate(loops.body):
        value = acc if isinstance(s, Acc) else _run_stmt(s, values, memory, env, (extents, rdims, device))
        if isinstance(s, Indirect):
            env[f"%{i}"] = value
        values.append(value)


def _run_stmt(s: Stmt, values: list[Any], memory: dict[str, torch.Tensor], env: Env, grid: Any) -> Any:
    extents, rdims, device = grid
    if isinstance(s, Load):
        return _load(s, values, memory[s.buffer], _tensor(s.index, env, device))
    if isinstance(s, Store):
        value, index = values[s.value], _tensor(s.index, env, device)
        if s.reduce:  # over every point, also along axes that neither mentions; an atomic one: once per row
            every = [1 if s.reduce == "atomic" and d in rdims else n for d, n in enumerate(extents)]
            value, index = value.expand(every), index.expand(every)
        _store(s, value, memory[s.buffer], index)
        return None
    if isinstance(s, Const):
        return torch.tensor(s.value, dtype=s.dtype, device=device)
    if isinstance(s, Index):
        return _tensor(s.expr, env, device).to(s.dtype)
    if isinstance(s, Indirect):
        size = int(s.size.evaluate(env))
        value = values[s.arg]
        if s.wraps:
            value = torch.where(value < 0, value + size, value)
        inside = (value >= 0) & (value < size)
        if s.skips:
            value = torch.where(inside, value.to(torch.int64), NOWHERE)
        elif not bool(inside.all()):
            raise IndexOutOfRange(f"an index is outside 0 <= index < {size}")
        return value.to(torch.int64)
    if isinstance(s, Reduce):
        return _reduce(s, [values[a] for a in s.args], extents, rdims)
    if isinstance(s, Scan):
        return _scan(s, [values[a] for a in s.args], extents, rdims[0])
    assert not isinstance(s, Acc)
    if s.op == "cast":
        return values[s.args[0]].to(s.dtype)
    return OPS[s.op].meaning(*[values[a] for a in s.args])


def _tensor(e: IntLike, env: Env, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(expr(e).evaluate(env), device=device)


def _check_bounds(index: torch.Tensor, storage: torch.Tensor, s: Load | Store) -> None:
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= storage.numel()):
        low, high = int(index.min()), int(index.max())
        raise ReflibError(f"{s.buffer}[{s.index}] runs from {low} to {high} in a buffer of {storage.numel()}")


def _load(s: Load, values: list[Any], storage: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    there = index > NOWHERE // 2
    if s.mask is None and bool(there.all()):
        _check_bounds(index, storage, s)
        return storage[index].to(value_dtype(storage.dtype))
    mask, index = torch.broadcast_tensors(there if s.mask is None else values[s.mask] & there, index)
    out = torch.full(mask.shape, s.other, dtype=s.dtype, device=mask.device)
    _check_bounds(index[mask], storage, s)
    out[mask] = storage[index[mask]].to(s.dtype)
    return out


def _store(s: Store, value: torch.Tensor, storage: torch.Tensor, index: torch.Tensor) -> None:
    value, index = torch.broadcast_tensors(value.to(storage.dtype), index)
    there = index > NOWHERE // 2
    value, index = value[there], index[there]
    _check_bounds(index, storage, s)
    if s.reduce:
        storage.index_add_(0, index, value)
        return
    storage[index] = value


def _reduce(s: Reduce, args: list[torch.Tensor], extents: list[int], rdims: list[int]) -> torch.Tensor:
    """Bring the r axes to the end, as one; reduce it; leave size 1 in their place."""
    rank = len(extents)
    rows = []
    for v in args:
        v = v.reshape((1,) * (rank - v.dim()) + v.shape)
        v = v.expand([extents[d] if d in rdims else v.shape[d] for d in range(rank)])
        rows.append(v.permute([d for d in range(rank) if d not in rdims] + rdims))
    lead = torch.broadcast_shapes(*[v.shape[: rank - len(rdims)] for v in rows])
    count = math.prod(extents[d] for d in rdims)
    rows = [v.expand((*lead, *v.shape[len(lead) :])).reshape((*lead, count)) for v in rows]
    if count == 0 and REDUCTIONS[s.kind] is None and 0 not in lead:
        raise ReflibError(f"{s.kind} of nothing has no value")
    out = _REDUCE[s.kind](*rows) if count or REDUCTIONS[s.kind] is not None else rows[0].new_empty(lead)
    keep = iter(lead)
    return out.to(s.dtype).reshape([1 if d in rdims else next(keep) for d in range(rank)])


def _scan(s: Scan, args: list[torch.Tensor], extents: list[int], d: int) -> torch.Tensor:
    """Each dimension of the grid at its own place; along ``d`` at its full size."""
    rank = len(extents)
    args = [v.reshape((1,) * (rank - v.dim()) + v.shape) for v in args]
    shape = list(torch.broadcast_shapes(*(v.shape for v in args)))
    shape[d] = extents[d]
    return SCANS[s.kind].meaning(d, *(v.expand(shape) for v in args)).to(s.dtype)


def _extreme_index(largest: bool) -> Any:
    def call(value: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        best = (value.amax if largest else value.amin)(-1, keepdim=True)
        hit = (value == best) | ((value != value) & (best != best))
        return torch.where(hit, index, torch.iinfo(torch.int64).max).amin(-1)

    return call


def _m2(value: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    weight = torch.ones_like(value) if weight is None else weight
    mean = (weight * value).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1)
    return (weight * (value - mean).square()).sum(-1)


_REDUCE = {
    "sum": lambda v: v.sum(-1, dtype=v.dtype),
    "prod": lambda v: v.prod(-1, dtype=v.dtype),
    "max": lambda v: v.amax(-1),
    "min": lambda v: v.amin(-1),
    "any": lambda v: v.any(-1),
    "all": lambda v: v.all(-1),
    "argmax": _extreme_index(True),
    "argmin": _extreme_index(False),
    "m2": _m2,
}
