"""Another implementation of an op, as nodes over the buffers of the program that the op stands in.

The implementation is a Python function. It is traced with fake tensors in a ShapeEnv of its own, with the program's
size symbols and their ranges, so that every condition on them (``if x.shape[0] % 4 == 0``, an ``assert``, a reshape
that needs a divisor) becomes the predicate of this one variant (``Variant.predicate``), never of the user's graph.
Then the traced graph is lowered like any other, reading the op's arguments where they are and writing its outputs.

NB: TorchInductor traces implementations in the graph's own ShapeEnv, and gives one up that adds a guard
(``error_on_new_guards`` in its kernel/custom_op.py).
"""

import operator
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from typing import Any

import sympy
import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from reflib.capture.triton_there import triton_of_gpu
from reflib.errors import ReflibError
from reflib.ir.expr import BinOp, Expr, Sym, expr, max_value, mod, nonneg
from reflib.ir.loops import LoopNest
from reflib.ir.printer import dtype_name
from reflib.ir.program import Assume, Buffer, Extern, Node, Variant, View, full_view, holds
from reflib.ir.rename import renamed

from .body import nest
from .context import LoweringContext
from .decompositions import decompositions
from .extern import has_effect
from .lower import Lowering, remove_unused
from .rules import Unsupported

aten = torch.ops.aten
_ALONE = RLock()
_READS = "it uses a tensor's value, known only at run time (.item(), float(t), if t > 0),"


class Refused(Exception):
    """This implementation cannot be a variant. ``status``: ``raised``, ``wrong shape``, ``wrong dtype``,
    ``wrong device``, ``alias`` or ``unsupported``."""

    def __init__(self, status: str, why: str):
        super().__init__(f"{status}: {why}")
        self.status, self.why = status, why


def variant(
    cx: LoweringContext,
    op: str,
    name: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outputs: Sequence[View | None],
    choices: bool = True,
    sizes: Mapping[str, int] | None = None,
) -> Variant:
    """``fn(*args, **kwargs)`` instead of ``op``. ``args``, ``kwargs``: nests of View, Expr and plain data. ``outputs``:
    where the op's results go, in order (None: it is not used). ``choices``: may ops inside become Choices?
    ``sizes``: values to trace with, by symbol, instead of the program's.

    Raises Refused. The program itself gets nothing but the constants that ``fn`` holds.
    """
    given = [x for x in pytree.tree_leaves((args, kwargs), is_leaf=_is_leaf) if _is_dynamic(x)]
    if any(isinstance(x, Expr) and cx.low.symbols.is_float(x) for x in given):
        raise Refused("unsupported", "an argument is a float known only at run time")
    with unset_fake_temporarily():  # AOTAutograd's mode
        copy = SizesCopy(sizes or {})
        graph = _traced(cx, copy, fn, args, kwargs)
        _check_outputs(cx, copy, graph)
    prefix = cx.low.unique(f"{cx.name}_" + re.sub(r"\W+", "_", name).strip("_"))
    cx.low.reserved.add(prefix)
    low = _inside(cx.low, op, prefix, copy.ours(), choices)
    try:
        values = _lower(cx, low, graph, given)
        guards = copy.guards(low)
        _check_memory(cx, low, values)
        nodes = _written(cx, low, values, outputs)
    except (Unsupported, ReflibError) as e:
        raise Refused("unsupported", _first_line(e)) from e
    kept, buffers = remove_unused(nodes, low.buffers, tuple(o for o in outputs if o is not None))
    if any(isinstance(n, Extern) and n.symbols for n in kept):
        raise Refused("unsupported", f"{_READS} or makes tensors whose sizes are known only then")
    new = {k: b for k, b in buffers.items() if k not in cx.low.buffers}
    constants = {k: b for k, b in new.items() if b.kind == "const"}
    cx.low.buffers.update(constants)
    cx.low.constants.update({k: low.constants[k] for k in constants})
    own = tuple(b for b in new.values() if b.kind == "temp")
    cx.low.reserved.update(b.name for b in own)
    return Variant(name, kept, guards, own)


def put_instead(
    cx: LoweringContext, name: str, fn: Callable[..., Any], args: Sequence[Any], outputs: Sequence[View | None]
) -> None:
    """``fn(*args)``, which has to be loop nests alone, in place of the op, without a choice. Raises Refused, as well
    where it is for some of the sizes only."""
    v = variant(cx, "", name, fn, args, {}, outputs)
    if v.predicate:
        raise Refused("unsupported", "it holds for some of the sizes only")
    if not all(isinstance(n, LoopNest) for n in v.nodes):
        raise Refused("unsupported", "it calls something")
    cx.low.nodes += v.nodes
    cx.low.buffers.update({b.name: b for b in v.buffers})


def _inside(low: Lowering, op: str, prefix: str, symbols: Mapping[Any, Sym | Expr], choices: bool) -> Lowering:
    """A lowering of an implementation of ``op``: over the buffers of ``low``, with names that ``low`` does not use.
    ``symbols``: the program's, by the sympy symbols of the ShapeEnv that the implementation was traced in."""
    new = Lowering(low.options)
    new.symbols = low.symbols.inside(symbols)
    new.buffers, new.uniform, new.moved = dict(low.buffers), dict(low.uniform), dict(low.moved)
    new.reserved, new.kernels = low.reserved, low.kernels
    new.within, new.prefix, new.choices = low.within | {op}, prefix + "_", choices
    return new


# -- tracing ----------------------------------------------------------------------------------------
class SizesCopy:
    """A ShapeEnv with the program's size symbols: same traced values (but ``values``) and ranges, nothing shared."""

    def __init__(self, values: Mapping[str, int]) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.env)
        self.values = values
        self._symbols: dict[Sym, torch.SymInt] = {}

    def ours(self) -> dict[Any, Sym]:
        """The program's symbols by this ShapeEnv's."""
        return {value.node._expr: sym for sym, value in self._symbols.items()}

    def size(self, e: Expr) -> int | torch.SymInt:
        """An Expr as a size here."""
        total: Any = 0
        for monomial, factor in e.terms:
            term: Any = factor
            for atom in monomial:
                term = term * self._atom(atom)
            total = total + term
        return total

    def _atom(self, a: Any) -> Any:
        if isinstance(a, BinOp):
            fn: Any = {"//": operator.floordiv, "%": operator.mod, "max": torch.sym_max, "min": torch.sym_min}[a.fn]
            return fn(self.size(a.a), self.size(a.b))
        if a not in self._symbols:
            self._symbols[a] = self._new_symbol(a)
        return self._symbols[a]

    def _new_symbol(self, s: Sym) -> torch.SymInt:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges

        hint = self.values.get(s.name, s.hint)
        if hint is None:
            raise Refused("unsupported", f"the size {s.name} is known only at run time")
        source = ConstantSource(s.name)
        positive = True if s.lo > 0 else None
        symbol = self.env.create_symbol(
            hint, source, DimDynamic.DYNAMIC, positive=positive, do_not_specialize_zero_one=True
        )
        self.env.var_to_range[symbol] = ValueRanges(s.lo, int_oo if s.hi is None else s.hi)
        return self.env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[return-value]

    def tensor(self, v: View, device: torch.device) -> torch.Tensor:
        """A fake tensor like ``v``."""
        shape, strides = [self.size(e) for e in v.shape], [self.size(e) for e in v.strides]
        with self.mode, torch.no_grad():
            return torch.empty_strided(shape, strides, dtype=v.dtype, device=device)  # type: ignore[arg-type]

    def guards(self, low: Any) -> tuple[Assume, ...]:
        """The conditions on sizes that the trace met. Raises Refused for one that has no expression here."""
        if any(self.env.deferred_runtime_asserts.values()):
            raise Refused("unsupported", "it asserts something of a size known only at run time")
        out: dict[Assume, None] = {}
        for g in self.env.guards:
            out.update(dict.fromkeys(assumptions(g.expr, lambda e: low.symbols.from_sympy(e, self.env))))
        return without_implied(out)


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, (View, Expr))


def _is_dynamic(x: Any) -> bool:
    return isinstance(x, (View, Expr))


def _traced(
    cx: LoweringContext, copy: SizesCopy, fn: Callable[..., Any], args: Any, kwargs: Any
) -> torch.fx.GraphModule:
    """``fn`` as a functional graph: placeholders are the Views and Exprs among the arguments, the result is one list
    of tensors. What ``fn`` raises is Refused."""
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs), is_leaf=_is_leaf)
    where = [i for i, x in enumerate(leaves) if _is_dynamic(x)]
    fakes = [
        copy.tensor(x, cx.low.buffers[x.buffer].device) if isinstance(x, View) else copy.size(x)
        for x in (leaves[i] for i in where)
    ]

    def flat(*values: Any) -> list[Any]:
        full = list(leaves)
        for i, v in zip(where, values):
            full[i] = v
        own_args, own_kwargs = pytree.tree_unflatten(full, spec)
        return pytree.tree_leaves(fn(*own_args, **own_kwargs), is_leaf=lambda x: x is None)

    with triton_of_gpu(recorded=True):  # launches become nodes, whatever is there: lowering says where they cannot run
        graph = _make_fx(copy, flat, fakes)
        if _mutating(graph):  # (decompositions write in place too)
            graph = _make_fx(copy, torch.func.functionalize(graph, remove="mutations"), fakes)
    if op := _mutating(graph):
        raise Refused("unsupported", f"it writes to one of its arguments, or to a tensor that it keeps ({op})")
    graph.graph.eliminate_dead_code()
    for n in graph.graph.nodes:
        if n.target is aten._to_copy.default and isinstance(n.args[0], (bool, int, float)):  # vmap's, of ``x * 2``
            n.target, n.kwargs = aten.scalar_tensor.default, {k: getattr(n.meta["val"], k) for k in ("dtype", "device")}
        if isinstance(n.target, torch._ops.OpOverload) and has_effect(n.target, n.args, n.kwargs):
            raise Refused("unsupported", f"{n.target} is random or has effects: it cannot be run to be measured")
    return graph


def _make_fx(copy: SizesCopy, fn: Callable[..., Any], fakes: list[Any]) -> torch.fx.GraphModule:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import TracingContext, tracing
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    tracer = make_fx(fn, decomposition_table=decompositions(), tracing_mode="real")
    no_autocast = torch._C._DisableAutocast()
    known = tracing(TracingContext(copy.mode))
    with _uncompiled(), known, no_autocast, copy.mode, torch.no_grad(), enable_python_dispatcher():
        try:
            return tracer(*fakes)
        except GuardOnDataDependentSymNode as e:
            raise Refused("unsupported", f"{_READS} as a Python number; keep it a tensor ({_first_line(e)})") from e
        except Exception as e:  # whatever an implementation may raise
            raise Refused("raised", f"{type(e).__name__}: {_first_line(e)}") from e


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Another backend's code would run, with tensors that have no memory; PyTorch 2.11 refuses such a call while
    something is traced, unless it may run the function itself. (A stance is the whole process's: one thread at a time.)
    """
    inline = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    with _ALONE, inline, torch.compiler.set_stance("default", force_backend="eager"):
        yield


def _first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines() or [type(e).__name__]
    return lines[0][:300]


def _mutating(graph: torch.fx.GraphModule) -> str:
    """The first op that writes to an argument, or the first launch of a Triton kernel of the user's, which may."""
    for n in graph.graph.nodes:
        mutable = isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
        if mutable or getattr(n.target, "__name__", "") == "triton_kernel_wrapper_mutation":
            writers = (a.args[0] for a in n.all_input_nodes if a.target is operator.getitem)
            for idx in (w.kwargs.get("kernel_idx") for w in writers if isinstance(w, torch.fx.Node)):
                if isinstance(idx, int):
                    return f"the Triton kernel {kernel_side_table.get_kernel(idx).fn.__name__} writes to it"
            return str(n.target)
    return ""


def _results(graph: torch.fx.GraphModule) -> list[Any]:
    """What the graph returns."""
    return list(next(n for n in graph.graph.nodes if n.op == "output").args[0])


# -- is it the same thing? --------------------------------------------------------------------------
def _check_outputs(cx: LoweringContext, copy: SizesCopy, graph: torch.fx.GraphModule) -> None:
    """Number, dtype, device and sizes of the results are the op's; sizes equal only as traced become a guard."""
    results, wanted = _results(graph), cx.fakes
    values = [r.meta["val"] if isinstance(r, torch.fx.Node) else r for r in results]
    if len(values) != len(wanted) or not all(isinstance(v, torch.Tensor) for v in values):
        kinds = ", ".join("a tensor" if isinstance(v, torch.Tensor) else f"{v!r:.40}" for v in values) or "nothing"
        raise Refused("wrong shape", f"it returns {kinds}; the op returns {len(wanted)} tensor(s)")
    for i, (v, w) in enumerate(zip(values, wanted)):
        which = f"result {i} is" if len(wanted) > 1 else "the result is"
        if v.dtype != w.dtype:
            raise Refused("wrong dtype", f"{which} {dtype_name(v.dtype)}, the op's is {dtype_name(w.dtype)}")
        if v.device.type != w.device.type or (v.device.index or 0) != (w.device.index or 0):
            raise Refused("wrong device", f"{which} on {v.device}, the op's on {w.device}")
        shape = tuple(copy.size(e) for e in cx.low.symbols.exprs(w.shape))
        try:
            same = len(shape) == v.dim() and all(bool(a == b) for a, b in zip(v.shape, shape))
        except Exception as e:  # unknown before run time
            raise Refused("unsupported", f"{which} of a size known only at run time: {_first_line(e)}") from e
        if not same:
            raise Refused("wrong shape", f"{which} of shape {_shape(v.shape)}, the op's of {_shape(shape)}")


def _shape(sizes: Sequence[Any]) -> str:
    """Sizes as they were when traced."""
    numbers = [s.node.hint if isinstance(s, torch.SymInt) else s for s in sizes]
    return "[" + ", ".join(map(str, numbers)) + "]"


def _check_memory(cx: LoweringContext, low: Lowering, values: Sequence[Any]) -> None:
    """Results are new tensors, each with storage of its own."""
    for v in values:
        if not isinstance(v, View):
            raise Refused("unsupported", f"a result that lowering made no tensor of: {v}")
        if v.buffer in cx.low.buffers or low.buffers[v.buffer].kind != "temp":
            raise Refused("alias", "a result is an argument, a view of one, or a tensor that the implementation keeps")
    if len({v.buffer for v in values}) < len(values):
        raise Refused("alias", "two results share memory")


# -- lowering ---------------------------------------------------------------------------------------
def _lower(cx: LoweringContext, low: Lowering, graph: torch.fx.GraphModule, given: list[Any]) -> list[Any]:
    """The graph's nodes, lowered into ``low``; returns its results."""
    inputs = iter(given)
    for node in graph.graph.nodes:
        node._rename(low.prefix + node.name)
        node.meta["stack_trace"] = cx.node.meta.get("stack_trace")  # the user's line is the op's call
        if node.op == "placeholder":
            low.values[node] = next(inputs)
        elif node.op == "get_attr":
            low.values[node] = _constant(low, node, operator.attrgetter(str(node.target))(graph))
        elif node.op == "call_function":
            low.values[node] = low.call(node)
    return [low.values[r] for r in _results(graph)]


def _constant(low: Lowering, node: torch.fx.Node, value: Any) -> Any:
    """A tensor that the implementation holds; a submodule stays what it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FakeTensor):
        raise Unsupported("it holds a tensor without data")
    name = low.new_buffer(node.name, node.meta["val"], "const").name
    low.constants[name] = value
    return full_view(low.buffers[name])


def _written(
    cx: LoweringContext, low: Lowering, values: list[View], outputs: Sequence[View | None], outside: Container[str] = ()
) -> list[Node]:
    """The nodes, with each result where the op's goes: made there if it lies in memory in the same way, else copied.
    ``outside``: buffers that are not the implementation's own."""
    names: dict[str, str] = {}
    for v, o in zip(values, outputs):
        if o is None:
            continue
        own = v.buffer not in outside and v.buffer not in names and low.buffers[v.buffer].kind == "temp"
        if own and _lies_like(low, v, o):
            names[v.buffer] = o.buffer
        else:
            nest(replace(cx, low=low), lambda k, v=v: k.load(v), o)  # type: ignore[misc]
    return renamed(low.nodes, [], names)[0]


def _lies_like(low: Lowering, v: View, o: View) -> bool:
    """Can the buffer of ``v`` be the buffer ``o``? What a call returns must be that tensor; kernels write anywhere."""
    made, out = low.buffers[v.buffer], low.buffers[o.buffer]
    if v.dtype != made.dtype or v.offset != 0 or not _same_layout(v, o):
        return False
    if _same_layout(made, out):
        return True
    writers = [n for n in low.nodes if v.buffer in n.writes()]
    return made.extent == out.extent and all(isinstance(n, LoopNest) for n in writers)


def _same_layout(a: View | Buffer, b: View | Buffer) -> bool:
    """Strides of dimensions of size 1 do not count."""
    return a.shape == b.shape and all(s == t for n, s, t in zip(a.shape, a.strides, b.strides) if n != 1)


# -- guards -----------------------------------------------------------------------------------------
def assumptions(condition: Any, convert: Callable[[Any], Expr]) -> list[Assume]:
    """A sympy condition as facts about Exprs, those that always hold left out. Raises Unsupported if it is made of
    something else than comparisons."""
    if condition is True or condition == sympy.true:
        return []
    if isinstance(condition, sympy.And):
        return [a for c in condition.args for a in assumptions(c, convert)]
    if type(condition) not in _COMPARISONS:
        raise Unsupported(f"the condition {condition} on sizes")
    kind, shift = _COMPARISONS[type(condition)]
    left = convert(condition.args[0]) - convert(condition.args[1])
    constant = next((c for m, c in left.terms if not m), 0)
    what, value = left - constant, shift - constant
    if what.terms and all(c < 0 for _, c in what.terms):
        what, value = -what, -value
        kind = {"at_most": "at_least", "at_least": "at_most"}.get(kind, kind)
    fact = Assume(kind, what, value)
    if what.constant is not None:
        if not holds(fact, {}):
            raise Unsupported(f"the condition {condition} on sizes, which never holds")
        return []
    atom, no_rest = what.atom, (kind, value) == ("equal", 0)
    if no_rest and isinstance(atom, BinOp) and atom.fn == "%" and atom.b.constant is not None:
        return [Assume("divisible", atom.a, atom.b.constant)]
    return [] if _always(fact) else [fact]


def _always(fact: Assume) -> bool:
    """Does it hold at all sizes that the symbols may have?"""
    what, value = fact.what, fact.value
    if fact.kind == "divisible":
        return bool(mod(what, expr(value)) == 0)
    if fact.kind == "differs":
        return nonneg(what - value - 1) or _at_most(what, value - 1)
    least = fact.kind == "at_most" or nonneg(what - value)
    most = fact.kind == "at_least" or _at_most(what, value)
    return least and most


def _at_most(what: Expr, value: int) -> bool:
    top = max_value(what)
    return nonneg(value - what) or top is not None and top <= value


def without_implied(facts: Iterable[Assume]) -> tuple[Assume, ...]:
    """Drop what follows from the sizes' divisibility: torch states a reshape's condition in several ways."""
    facts = tuple(dict.fromkeys(facts))
    env: dict[Any, Any] = {}
    for f in facts:
        s = f.what.atom
        if f.kind == "divisible" and isinstance(s, Sym):
            quotient = Sym(f"{s.name}/{f.value}", -(-s.lo // f.value), None if s.hi is None else s.hi // f.value, None)
            env.setdefault(s, expr(quotient) * f.value)
    return tuple(f for f in facts if f.kind == "divisible" or not _always(replace(f, what=f.what.subs(env))))


_COMPARISONS: dict[Any, tuple[str, int]] = {
    sympy.Eq: ("equal", 0), sympy.Ne: ("differs", 0), sympy.Le: ("at_most", 0), sympy.Lt: ("at_most", -1),
    sympy.Ge: ("at_least", 0), sympy.Gt: ("at_least", 1),
}  # fmt: skip
