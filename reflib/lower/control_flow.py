"""``cond``, ``while_loop``, ``scan``, ``map`` and ``associative_scan``: one Region each (``ir.regions``).

A branch is a graph whose placeholders are the op's operands. It is lowered by the rules that its ops have anywhere
else, with the operands' own views in their place, into a list of nodes over the program's buffers, and stores what it
returns where the op's results are. What cannot be done so is Unsupported: the op is then a call of PyTorch's, as
every op without a rule is, and its branches run op by op (results whose sizes depend on what a branch computes; the
stacked values of a ``while_loop`` under gradients, of which there are as many as iterations).
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from reflib.errors import LoweringError
from reflib.ir.expr import Expr, Sym, expr
from reflib.ir.program import Assume, Buffer, Extern, Variant, View, full_view, walk
from reflib.ir.regions import Region
from reflib.logs import get as logger

from .body import nest, where
from .context import LoweringContext
from .extern import used_results
from .lower import Lowering, remove_unused
from .rules import RULES, Unsupported
from .subgraph import Refused, _constant, _inside, _written, assumptions, put_instead
from .symbols import Symbols

aten = torch.ops.aten
Values = Sequence[Any]


# -- the rules ------------------------------------------------------------------------------------------
def cond(cx: LoweringContext, pred: Any, true_fn: Any, false_fn: Any, operands: Values = ()) -> Any:
    """One of two graphs, by a bool, a condition on sizes, or a tensor with one element."""
    flat, spec = pytree.tree_flatten(cx.fake)
    named: list[tuple[str, Any]] = [("true", true_fn), ("false", false_fn)]
    facts: tuple[Assume, ...] = ()
    if isinstance(pred, (bool, int)):
        named = [named[not pred]]
    else:
        facts = _facts(cx, pred, cx.node.args[0].meta["val"], "cond")  # type: ignore[union-attr]
    holds = facts[0].what.atom if isinstance(pred, View) else None
    variants: list[Variant] = []
    used = [f if i in used_results(cx, flat) else None for i, f in enumerate(flat)]
    with _sizes_bound(cx, used, dict(named), holds):
        outputs = [None if f is None else _result(cx, i, f) for i, f in enumerate(used)]
        for name, graph in named:
            b = _Block(cx, name)
            here = [_of_sizes(o, {holds: int(name == "true")}) if o and holds else o for o in outputs]
            variants.append(b.leave(facts if len(variants) + 1 < len(named) else (), b.run(graph, operands), here))
    made = tuple(o.buffer for o in outputs if o is not None)
    cx.low.nodes.append(Region(cx.low.next_node(), made, tuple(variants), (cx.origin,)))
    return pytree.tree_unflatten(outputs, spec)


def while_loop(cx: LoweringContext, cond_fn: Any, body_fn: Any, carried: Values, more: Values = ()) -> Any:
    """``body_fn`` as long as ``cond_fn``, both of the carried values and the others."""
    flat, spec = pytree.tree_flatten(cx.fake)
    loop = _Loop(cx, carried, flat, [])
    test = _Block(cx, "condition")
    numbers = [n.meta["val"] for n in cond_fn.graph.nodes if n.op == "placeholder"][: len(carried)]
    values = [test.read(v, fake) if isinstance(fake, torch.SymInt) else v for v, fake in zip(loop.now, numbers)]
    (holds,) = test.run(cond_fn, [*values, *more])
    returned = next(n for n in cond_fn.graph.nodes if n.op == "output").args[0]
    while isinstance(returned, (tuple, list)):
        (returned,) = returned
    fake = returned.meta["val"] if isinstance(returned, torch.fx.Node) else returned
    facts = _facts(test.cx, holds, fake, "the condition of while_loop")
    condition = test.leave(facts, [], [])
    body = _Block(cx, "body")
    loop.finish(condition, body, body.run(body_fn, [*values, *more]))
    return pytree.tree_unflatten([loop.result(v, f) for v, f in zip(loop.now, flat)], spec)


def scan(cx: LoweringContext, combine_fn: Any, init: Values, xs: Values, more: Values = ()) -> Any:
    """``combine_fn`` of the carried values and the i-th slices of ``xs``, for each i; its other results stacked."""
    flat, spec = pytree.tree_flatten(cx.fake)
    loop = _Loop(cx, init, flat[: len(init)], [_result(cx, i, f) for i, f in enumerate(flat) if i >= len(init)])
    i, condition = _counter(cx, xs)
    body = _Block(cx, "body")
    results = body.run(combine_fn, [*loop.now, *(_slice(x, i) for x in xs), *more])
    loop.finish(condition, body, results, i)
    return pytree.tree_unflatten([*loop.now, *loop.stacked], spec)


def map_impl(cx: LoweringContext, f: Any, xs: Values, more: Values = ()) -> Any:
    """``f`` of the i-th slice of each of ``xs``, for each i, stacked: all at once where loop nests can do that, which
    store little but the results; else a scan that carries nothing."""
    count = len(xs)

    def at_once(*args: Any) -> Any:
        return torch.vmap(f, (0,) * count + (None,) * len(more))(*args)

    return _traced(cx, f, at_once, [*xs, *more]) or scan(cx, f, (), xs, more)


def associative_scan(cx: LoweringContext, combine_fn: Any, xs: Values, more: Values = ()) -> Any:
    """Where the length is known, in the order in which eager combines pairs; else one by one.

    NB: ``combine_mode="generic"`` is no op when it arrives: PyTorch captures its pairs for the length that it sees, so
    Dynamo compiles each length anew, and torch.export refuses a dynamic one. ``"pointwise"``, which needs tensors on a
    GPU, stays an op, of any length. Of other dimensions torch.export (2.11 to 2.13) takes sizes for constants."""
    from torch._higher_order_ops.associative_scan import generic_associative_scan

    count = len(xs)

    def in_pairs(*args: Any) -> Any:
        combine = torch.vmap(combine_fn, (0,) * (2 * count) + (None,) * len(more))
        return generic_associative_scan(combine, list(args[:count]), additional_inputs=args[count:])

    return _traced(cx, combine_fn, in_pairs, [*xs, *more]) or _one_by_one(cx, combine_fn, xs, more)


def _one_by_one(cx: LoweringContext, combine_fn: Any, xs: Values, more: Values) -> Any:
    """The first is what it is: that iteration's combination is not used."""
    flat, spec = pytree.tree_flatten(cx.fake)
    first = [_slice(x, 0) for x in xs]
    loop = _Loop(cx, first, [None] * len(xs), [_result(cx, i, f) for i, f in enumerate(flat)])
    i, condition = _counter(cx, xs)
    body = _Block(cx, "body")
    now = [_slice(x, i) for x in xs]
    results = []
    for x, r in zip(now, body.run(combine_fn, [*loop.now, *now, *more])):
        to = body.cx.temp("sum", x.shape, x.dtype, cx.low.buffers[x.buffer].device)
        first_or = lambda k, x=x, r=r: where(k.index(expr(i)).op("eq", 0), k.load(x), k.load(r))  # noqa: E731
        results.append(nest(body.cx, first_or, to))
    loop.finish(condition, body, results * 2, i)
    return pytree.tree_unflatten(loop.stacked, spec)


_ALL = (cond, while_loop, scan, map_impl, associative_scan)
RULES.update({fn.__name__: fn for fn in _ALL})  # by name: torch defines some of these only when they are first used


# -- blocks ---------------------------------------------------------------------------------------------
class _Block:
    """A branch, or the condition or body of a loop. ``cx``: the op's, with a Lowering over the same buffers."""

    def __init__(self, cx: LoweringContext, name: str):
        self.outer, self.name = cx.low, name
        prefix = cx.low.unique(f"{cx.name}_{name}")
        cx.low.reserved.add(prefix)
        self.low = _inside(cx.low, "", prefix, dict(cx.low.symbols.opaque), cx.low.choices)
        self.cx = replace(cx, low=self.low)

    def run(self, graph: Any, values: Values) -> list[Any]:
        """The graph's nodes, lowered; its results."""
        if not isinstance(graph, torch.fx.GraphModule):
            raise Unsupported(f"the branch {self.name} is no graph")
        given = iter(values)
        low = self.low
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                low.values[node] = self._argument(next(given, None), node.meta.get("val"))
            elif node.op == "get_attr":
                low.values[node] = _constant(low, node, operator.attrgetter(str(node.target))(graph))
            elif node.op == "call_function":
                low.values[node] = low.call(node)
            else:
                return list(low.arguments(pytree.tree_leaves(node.args, is_leaf=lambda x: x is None)))
        raise Unsupported(f"the branch {self.name} returns nothing")

    def _argument(self, value: Any, fake: Any) -> Any:
        """An operand as the branch was captured for it. (Slices of a scan's input, for contiguous ones.)"""
        symbols = self.low.symbols
        if isinstance(value, View) and isinstance(fake, torch.Tensor):
            if symbols.exprs(fake.shape) != value.shape:
                raise Unsupported(f"the branch {self.name} has other sizes than its operands")
            strides = symbols.exprs(fake.stride())
            if any(n != 1 and s != t for n, s, t in zip(value.shape, value.strides, strides)):
                made = full_view(self.low.new_buffer(self.low.unique(f"{self.cx.name}_operand"), fake))
                return nest(self.cx, lambda k: k.load(value), made)  # (views of it are of these strides)
        elif isinstance(fake, torch.SymInt) and symbols.expr(fake) != value:
            raise Unsupported(f"the branch {self.name} has a size of its own")
        return value

    def read(self, v: View, number: Any) -> Expr:
        """The carried int in ``v``, as the symbol ``number`` that the branches know it by."""
        s = self.low.symbols.expr(number)
        assert isinstance(s.atom, Sym)
        _read(self.cx, v, s.atom)
        return s

    def leave(self, facts: tuple[Assume, ...], values: Values, outputs: Sequence[View | None]) -> Variant:
        """The block, which stores ``values`` in ``outputs``. Its constants and temporaries become the program's."""
        low, outer = self.low, self.outer
        pairs = [(v, o) for v, o in zip(values, outputs, strict=True) if o is not None]
        for i, (v, o) in enumerate(pairs):
            if not isinstance(v, View) or (v.shape, v.dtype) != (o.shape, o.dtype):
                made = _described(v)
                raise LoweringError(
                    f"{_place(self.cx, self.cx.origin.op)}: result {i} of the {self.name} branch is {made}, "
                    f"{_described(o)} was expected: all branches, and all iterations, return the same sizes and dtypes"
                )
        low.buffers.update({o.buffer: outer.buffers[o.buffer] for _, o in pairs})
        nodes = _written(self.cx, low, [v for v, _ in pairs], [o for _, o in pairs], set(outer.buffers))
        nodes, buffers = remove_unused(nodes, low.buffers, tuple(o for _, o in pairs))  # type: ignore[assignment]
        mine = {n: b for n, b in buffers.items() if n not in outer.buffers}
        written = {b for n in walk(nodes) for b in n.writes()} - mine.keys() - {o.buffer for _, o in pairs}
        if written:
            raise Unsupported(f"the branch {self.name} writes to a tensor of its caller's: {', '.join(written)}")
        outer.buffers.update(mine)
        outer.constants.update({n: low.constants[n] for n, b in mine.items() if b.kind == "const"})
        return Variant(self.name, tuple(nodes), facts)


@dataclass
class _Loop:
    """What a loop carries. ``now``: tensors of its own that hold the carried values, which are ``carried`` before the
    first iteration and like ``fakes`` (None: like the initial value). ``stacked``: the outputs of which each iteration
    writes a slice."""

    cx: LoweringContext
    carried: Values
    fakes: Sequence[Any]
    stacked: list[View]

    def __post_init__(self) -> None:
        self.now = [self._start(i, v, f) for i, (v, f) in enumerate(zip(self.carried, self.fakes, strict=True))]

    def _start(self, i: int, value: Any, fake: Any) -> View:
        cx = self.cx
        v = _result(cx, i, fake) if fake is not None else cx.temp(
            "sum", value.shape, value.dtype, cx.low.buffers[value.buffer].device
        )
        _store(cx, v, value)
        return v

    def finish(self, condition: Variant, body: _Block, results: Values, counter: Sym | None = None) -> None:
        """Append the loop, whose body returns ``results``."""
        low = self.cx.low
        results = [_as_tensor(body, v, r) for v, r in zip(self.now, results)] + list(results[len(self.now) :])
        places: list[View | None] = []
        carried = []
        for v, r in zip(self.now, results):
            b = low.buffers[v.buffer]
            new = b if r == v else replace(b, name=body.low.unique(f"{b.name}_next"))
            low.buffers[new.name] = new
            carried.append((b.name, new.name))
            places.append(None if r == v else full_view(new))
        places += [_slice(v, counter) for v in self.stacked]
        made = body.leave((), results, places)
        outputs = tuple(v.buffer for v in (*self.now, *self.stacked))
        variants, origins = (condition, made), (self.cx.origin,)
        low.nodes.append(Region(low.next_node(), outputs, variants, origins, True, tuple(carried), counter))

    def result(self, v: View, fake: Any) -> Any:
        """A carried value after the loop."""
        if not isinstance(fake, torch.SymInt):
            return v
        s = self.cx.low.symbols.expr(fake)
        assert isinstance(s.atom, Sym)
        _read(self.cx, v, s.atom)
        return s


# -- values ---------------------------------------------------------------------------------------------
@contextmanager
def _sizes_bound(cx: LoweringContext, results: Values, branches: dict[str, Any], holds: Any) -> Iterator[None]:
    """A size of a result that the branches do not agree on has a symbol of its own, which PyTorch knows after the call.
    Where each branch's size is known before, so is this: ``false + holds * (true - false)``. holds: a symbol, 1 where
    the first branch is taken; None: there is none. (If the op is PyTorch's call after all, that says it.)"""
    symbols = cx.low.symbols
    before, bound = dict(symbols.opaque), {*symbols.bound}
    try:
        for i, (fake, *fakes) in enumerate(zip(results, *map(_returned, branches.values()))):
            if all(isinstance(f, torch.Tensor) and f.ndim == fake.ndim for f in (fake, *fakes)):
                sizes = [(*f.shape, *f.stride()) for f in (fake, *fakes)]
                _bind_sizes(symbols, f"the size of result {i}", list(branches), zip(*sizes), holds)
        yield
    except Unsupported:
        symbols.opaque = before
        symbols.bound &= bound
        symbols._converted.clear()
        raise


def _bind_sizes(symbols: Symbols, what: str, names: list[str], sizes: Iterable[Values], holds: Any) -> None:
    for n, *of in sizes:
        size = n.node.expr if isinstance(n, torch.SymInt) else None
        if size is None or not size.is_Symbol or str(size) in symbols.bound:
            continue
        made = symbols.exprs(of)
        if unknown := [name for name, e in zip(names, made) if not symbols.all_bound(e)]:
            raise Unsupported(f"{what} is known only when the {unknown[0]} branch has run")
        if made[0] != made[-1] and holds is None:
            raise Unsupported(f"{what} depends on the branch, and the predicate is no tensor")
        symbols.opaque[size] = made[-1] + (made[0] - made[-1]) * expr(holds or 0)
        symbols.bound.add(str(size))
        symbols._converted.clear()


def _returned(graph: Any) -> list[Any]:
    """What a branch returns, as it was captured."""
    out = [n.args for n in graph.graph.nodes if n.op == "output"] if isinstance(graph, torch.fx.GraphModule) else []
    return [x.meta.get("val") if isinstance(x, torch.fx.Node) else x for x in pytree.tree_leaves(out)]


def _of_sizes(v: View, known: dict[Any, int]) -> View:
    shape, strides = (tuple(e.subs(known) for e in es) for es in (v.shape, v.strides))
    return replace(v, shape=shape, strides=strides, offset=v.offset.subs(known))


def _result(cx: LoweringContext, i: int, fake: Any) -> View:
    """A new tensor for result ``i``; for an int, one that holds it."""
    if isinstance(fake, (int, torch.SymInt)) and not isinstance(fake, bool):
        b = Buffer(cx.low.unique(f"{cx.name}_{i}"), torch.int64, torch.device("cpu"), (), ())
        cx.low.buffers[b.name] = b
        return full_view(b)
    if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
        raise Unsupported(f"a result that is a {type(fake).__name__}")
    b = cx.low.new_buffer(f"{cx.name}_{i}", fake)
    unknown = {s.name for e in (*b.shape, *b.strides) for s in e.symbols()} - cx.low.symbols.bound
    if unknown:
        raise Unsupported("a result whose size depends on the branch, or on the number of iterations")
    return full_view(b)


def _as_tensor(block: _Block, v: View, value: Any) -> Any:
    """A carried int as a tensor like ``v``."""
    if not isinstance(value, (int, Expr)):
        return value
    b = block.cx.temp("int", v.shape, v.dtype, block.low.buffers[v.buffer].device)
    _store(block.cx, b, value)
    return b


def _store(cx: LoweringContext, to: View, value: Any) -> None:
    load = lambda k: k.load(value) if isinstance(value, View) else k.index(value)  # noqa: E731
    nest(cx, load if isinstance(value, (View, Expr)) else lambda k: value, to)


def _slice(x: Any, i: Sym | int | None) -> Any:
    """``x[i]``"""
    if not isinstance(x, View):
        return x
    assert i is not None
    return View(x.buffer, x.shape[1:], x.strides[1:], x.offset + x.strides[0] * expr(i), x.dtype)


def _counter(cx: LoweringContext, xs: Values) -> tuple[Sym, Variant]:
    """A symbol that counts the slices of ``xs``, and the condition that there is one more."""
    count = next(x.shape[0] for x in xs if isinstance(x, View))
    i = _new_symbol(cx.low, f"{cx.name}_i")
    return i, Variant("condition", (), (Assume("at_most", expr(i) - count, -1),))


def _traced(cx: LoweringContext, graph: Any, fn: Callable[..., Any], args: list[Any]) -> Any:
    """``fn(*args)`` in place of the op, as loop nests of the program itself; None if it takes more than these."""
    if any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in graph.graph.nodes):
        return None
    flat, spec = pytree.tree_flatten(cx.fake)
    before = dict(cx.low.buffers)
    outputs = [_result(cx, i, f) for i, f in enumerate(flat)]
    try:
        put_instead(cx, "at_once", fn, args, outputs)
    except Refused as e:
        logger("fallback").info("%s is a loop: %s", cx.origin.op, e)
        cx.low.buffers.clear()
        cx.low.buffers.update(before)
        return None
    return pytree.tree_unflatten(outputs, spec)


def _facts(cx: LoweringContext, value: Any, fake: Any, what: str) -> tuple[Assume, ...]:
    """What holds where a predicate is true: of sizes, or of a number read from a tensor."""
    if isinstance(value, View):
        return (Assume("differs", expr(_truth(cx, value, what)), 0),)
    if isinstance(fake, torch.SymBool):
        node = fake.node
        try:
            return tuple(assumptions(node.expr, lambda e: cx.low.symbols.from_sympy(e, node.shape_env)))
        except Unsupported:
            if not isinstance(value, Expr):
                raise
    if isinstance(value, Expr):
        return (Assume("differs", value, 0),)
    raise LoweringError(f"{_place(cx, what)}: the predicate is {value!r:.200}, not a bool or a tensor of one element")


def _truth(cx: LoweringContext, v: View, what: str) -> Sym:
    """A symbol that is 1 where the tensor is true, else 0. It is copied to the host here, once."""
    if any(n != 1 for n in v.shape):
        raise LoweringError(f"{_place(cx, what)}: the predicate is {_described(v)}, not one element")
    v = View(v.buffer, (), (), v.offset, v.dtype)
    if v.dtype != torch.bool:
        number, true = v, cx.temp("true", (), torch.bool, cx.low.buffers[v.buffer].device)
        v = nest(cx, lambda k: k.load(number).op("ne", 0), true)
    if cx.low.buffers[v.buffer].device.type != "cpu":
        cpu = torch.device("cpu")
        v = cx.extern_to(aten._to_copy.default, (v,), {"device": cpu}, v, cpu)
    return _read(cx, v, _new_symbol(cx.low, f"{cx.name}_holds", 1))


def _read(cx: LoweringContext, v: View, s: Sym) -> Sym:
    """``s`` is the number in ``v``, a tensor of one element on the host."""
    target = aten._local_scalar_dense.default
    name, symbols = cx.low.next_node(), ((s, 0, None),)
    cx.low.symbols.bind(expr(s))
    cx.low.nodes.append(Extern(name, target, (v,), (), (None,), symbols=symbols, origins=(cx.origin,)))
    return s


def _new_symbol(low: Lowering, name: str, most: int | None = None) -> Sym:
    name = low.unique(name)
    low.symbols.known[name] = s = Sym(name, 0, most, 0)
    low.symbols.bind(expr(s))
    return s


def _place(cx: LoweringContext, what: str) -> str:
    return f"{what} at {cx.origin.source}" if cx.origin.source else what


def _described(v: Any) -> str:
    if not isinstance(v, View):
        return f"{v!r}"
    return f"{str(v.dtype).removeprefix('torch.')} [{', '.join(map(str, v.shape))}]"


