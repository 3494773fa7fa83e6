"""Extern calls: everything that has no rule, or whose rule did not cover the case."""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from reflib.ir.expr import Sym, expr
from reflib.ir.program import Extern, View, full_view, iter_views
from reflib.seams import Seam

from .context import LoweringContext, contiguous_strides
from .rules import Unsupported

aten = torch.ops.aten

# Ops whose out= variant writes into a preallocated contiguous tensor without copying or resizing.
OUT_VARIANTS = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.addmm.default: aten.addmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
    aten.cumsum.default: aten.cumsum.out,
    aten.cumprod.default: aten.cumprod.out,
    aten.sort.stable: aten.sort.values_stable,
    aten.topk.default: aten.topk.values,
    aten.bmm.dtype: aten.bmm.dtype_out,  # half operands, a float32 product: CUDA only
}

# (cx, target, fake results) -> further ones: the overload and its arguments for the results, or None. One at most.
OUT = Seam("lower.OUT")

# Ops that are meant to be calls: libraries do them better than loops would, or only eager's code gives eager's numbers.
LIBRARY = (
    *("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "convolution", "convolution_backward", "_int_mm"),
    *("cumsum", "cumprod", "sort", "topk", "nonzero", "_local_scalar_dense", "_cdist_forward", "_fft_c2c"),
    *("scatter", "scatter_add", "scatter_reduce", "index_put", "embedding_dense_backward", "_embedding_bag"),
)


def extern(
    cx: LoweringContext, target: Any, args: Any, kwargs: dict[str, Any], reason: str, effect: bool = False
) -> Any:
    """Emit a call of ``target``; returns its value, nested as eager returns it."""
    flat, spec = pytree.tree_flatten(cx.fake)
    schema = getattr(target, "_schema", None)
    written = written_arguments(schema, args, kwargs)
    values: list[Any] = []
    outputs: list[Any] = []
    symbols: list[tuple[Sym, int, int | None]] = []
    out, used = _out_variant(cx, target, flat), used_results(cx, flat)
    for i, fake in enumerate(flat):
        if out is None and i not in used:
            values.append(None)
            outputs.append(None)
            continue
        returned = written[i] if i < len(written) and _returns_argument(schema, i) else None
        name = cx.name if len(flat) == 1 else f"{cx.name}_{i}"
        value, output = _output(cx, fake, i, returned, name, symbols)
        values.append(value)
        outputs.append(output)
    cx.low.symbols.bind(*(expr(s) for s, _, _ in symbols))
    mutates = tuple(dict.fromkeys(v.buffer for v in iter_views(written)))
    cx.low.nodes.append(
        Extern(
            cx.low.next_node(), target, tuple(args), tuple(kwargs.items()), tuple(outputs), mutates,
            effect or has_effect(target, args, kwargs), out, tuple(symbols), reason, (cx.origin,),
        )
    )  # fmt: skip
    return pytree.tree_unflatten(values, spec)


def used_results(cx: LoweringContext, flat: list[Any]) -> set[int]:
    """The returned values that the graph uses. The others may differ from what meta functions promise."""
    users = list(cx.node.users)
    val = cx.node.meta.get("val")
    plain = isinstance(val, (tuple, list)) and val is cx.fake and len(val) == len(flat)
    if not plain or any(u.target is not operator.getitem for u in users):
        return set(range(len(flat)))
    sizes = {i for i, f in enumerate(flat) if not isinstance(f, torch.Tensor) or _numbers(f)}
    return sizes | {u.args[1] for u in users}  # type: ignore[misc]


def _numbers(fake: Any) -> list[tuple[int, torch.SymInt]]:
    """A tensor's symbolic sizes, each with its dimension d, then strides, with ``~d``. Or a number itself."""
    if not isinstance(fake, torch.Tensor):
        return [(0, fake)] if isinstance(fake, torch.SymInt) else []
    strides = fake.stride() if fake.layout == torch.strided else ()
    both = [*enumerate(fake.shape), *((~d, n) for d, n in enumerate(strides))]
    return [(d, n) for d, n in both if isinstance(n, torch.SymInt)]


def with_effects(cx: LoweringContext, token: Any, target: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """An op whose order AOTAutograd keeps with tokens threaded through the graph: an Extern's ``effect`` does that, so
    it is a plain call of the op, and the tokens are None."""
    _, *fakes = cx.fake
    inner = replace(cx, fake=fakes[0] if len(fakes) == 1 else tuple(fakes) if fakes else None)
    value = extern(inner, target, args, kwargs, "its order matters", effect=True)
    return (None, *value) if len(fakes) > 1 else (None, value)


def _output(cx: LoweringContext, fake: Any, i: int, returned: Any, name: str, symbols: list) -> tuple[Any, Any]:
    """(value, entry of Extern.outputs) for one returned value; new run-time sizes are appended to ``symbols``."""
    if isinstance(fake, torch.Tensor):
        if isinstance(returned, View):
            return returned, returned
        known = cx.low.symbols
        for d, size in _numbers(fake):
            if _is_new_symbol(cx, size):
                if (sym := known.symbol(size.node.expr, size.node.shape_env)) not in [s for s, _, _ in symbols]:
                    symbols.append((sym, i, d))
            elif not known.expressible(size):
                symbols.append((known.define(cx.low.unique(f"{name}_size{d}"), size), i, d))
        buffer = cx.low.new_buffer(name, fake)
        return full_view(buffer), buffer.name
    if isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if getattr(fake.node.expr, "is_Symbol", False):
            sym = cx.low.symbols.symbol(fake.node.expr, fake.node.shape_env)
        else:
            sym = cx.low.symbols.define(cx.low.unique(name), fake)
        symbols.append((sym, i, None))
        return expr(sym), None
    return fake, None


def _is_new_symbol(cx: LoweringContext, size: torch.SymInt) -> bool:
    e = size.node.expr
    return bool(getattr(e, "is_Symbol", False)) and str(e).startswith("u") and str(e) not in cx.low.symbols.bound


def written_arguments(schema: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments the schema says are written to, in order."""
    known = enumerate(schema.arguments if schema is not None else ())
    written = [(i, a.name) for i, a in known if a.alias_info is not None and a.alias_info.is_write]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written]


def _returns_argument(schema: Any, i: int) -> bool:
    info = schema.returns[i].alias_info if schema is not None and i < len(schema.returns) else None
    return info is not None and info.is_write


def has_effect(target: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Must this call keep its place? Random state, printing, and ops without a schema. Not attention that draws no
    numbers: without dropout, and its backward, which is given them."""
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    random, known = torch.Tag.nondeterministic_seeded in target.tags, enumerate(target._schema.arguments)
    given = {a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in known}
    drawn = "attention" not in target.name() or "philox_seed" not in given and given.get("dropout_p") != 0
    return random and drawn or not target._schema.returns


def _out_variant(cx: LoweringContext, target: Any, flat: list[Any]) -> tuple[Any, tuple[str, ...]] | None:
    out = OUT_VARIANTS.get(target)
    if out is None or not all(isinstance(f, torch.Tensor) for f in flat):
        return next((find(cx, target, flat) for find in OUT.values()), None)
    names = tuple(a.name for a in out._schema.arguments if a.is_out)
    s = cx.low.symbols
    plain = all(s.exprs(f.stride()) == contiguous_strides(s.exprs(f.shape)) for f in flat)
    return (out, names) if plain and len(names) == len(flat) else None


def reason_for(target: Any) -> str:
    """Why an op without a rule is a call."""
    if not isinstance(target, torch._ops.OpOverload):
        return "not an ATen op"
    name = target._schema.name.partition("::")[2]
    if name in LIBRARY or "attention" in name:
        return "library call"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "random: eager's own numbers"
    return "no rule" if target.namespace in ("aten", "prims") else "custom op"


def scalar_call(cx: LoweringContext, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A Python function of sizes (``operator.truediv``, ``math.floor`` ...) whose value no Expr can be."""
    if any(True for _ in iter_views((args, kwargs))):
        raise Unsupported("a number computed from tensors")
    sym = cx.low.symbols.define(cx.low.unique(cx.name), cx.fake)
    cx.low.symbols.bind(expr(sym))
    cx.low.nodes.append(
        Extern(
            cx.low.next_node(), {torch.sym_not: operator.not_}.get(target, target), tuple(args), tuple(kwargs.items()),
            (None,), symbols=((sym, 0, None),), reason="arithmetic on sizes", origins=(cx.origin,),
        )
    )  # fmt: skip
    return expr(sym)
