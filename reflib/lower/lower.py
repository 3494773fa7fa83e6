"""lower: Graph -> Program. Every op becomes loop nests (mostly one), an Extern call, or a View.

Nothing is fused here, and nothing is reordered: ``nodes`` come out in the graph's order.
"""

import itertools
import operator
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from reflib import logs
from reflib.capture.graph import Graph
from reflib.errors import LoweringError, ReflibError
from reflib.ir.expr import Sym
from reflib.ir.loops import Origin
from reflib.ir.program import Buffer, Extern, Node, Program, full_view, iter_views, node_symbols, symbols_in, walk
from reflib.options import Options

from . import pointwise, reductions  # noqa: F401  (they register their rules)
from .context import LoweringContext
from .extern import _numbers, extern, reason_for, scalar_call, with_effects
from .rules import CALLS, LIKE_EAGER, OUTPUTS, RULES, Unsupported, rule_of
from .symbols import Symbols
from .views import REINTERPRET, copying, is_view_op, view

_DROPPED = {  # statements for the tracer alone: what they state is already in the sizes' ranges
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten._assert_tensor_metadata.default,
}
_DEVICES = ("cpu", "cuda")
_NODE = re.compile(r"(^|_)op\d+$")  # what ``next_node`` makes
RESERVED = frozenset(  # names in the printed wrapper (wrap/runtime.py, wrap/python.py), which no buffer may take
    "args call torch alloc alloc_cpu alloc_cuda as_view as_promised expect expect_own expect_sizes expect_count flat "
    "check_nan threads outside zeros int_max int_min device_guard current_stream stream given_back references UNSHARED "
    "owned".split()
)
EFFECTS = torch.ops.higher_order.with_effects
RULES[EFFECTS] = with_effects


def lower(graph: Graph, options: Options) -> Program:
    """Apply a rule to each node of the graph. Assumes ``meta["val"]`` on every node that makes a value."""
    low = Lowering(options)
    low.symbols = Symbols(graph.ranges)
    tokens = {n.args[0] for n in graph.nodes if n.target is EFFECTS}
    outputs: tuple[Any, ...] = ()
    for node in graph.nodes:
        if node in tokens and node.op == "placeholder":
            low.values[node] = None
            low.inputs.append(None)
        elif node.op == "placeholder":
            low.placeholder(node)
        elif node.op == "get_attr":
            low.values[node] = low.attribute(node, graph.module)
        elif node.op == "call_function":
            low.values[node] = low.call(node)
        elif node.op == "output":
            outputs = tuple(low.arguments(pytree.tree_leaves(node.args, is_leaf=lambda x: x is None)))
            for again in OUTPUTS.values():
                outputs = again(low, graph, outputs)
        else:
            raise LoweringError(f"{node.op} {node.target} is not part of a functional ATen graph")
    nodes, buffers = remove_unused(low.nodes, low.buffers, outputs)
    weights = tuple(i for i in low.inputs if isinstance(i, str) and i in graph.weights)
    return Program(tuple(low.inputs), buffers, nodes, outputs, low.constants, weights, saved=graph.saved)


class Lowering:
    """The program so far. ``values``: each FX node's value, a View, an Expr, plain data or a nest of these.
    ``uniform``: buffers known to hold one number everywhere, which loads of them use instead.
    ``moved``: what several ops read, copied once. ``reserved``: names that other lowerings of the same graph use.
    ``prefix``: of node names. ``within``: ops whose implementation is being lowered. ``choices``: may ops become
    choices?"""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.symbols = Symbols()
        self.inputs: list[Any] = []
        self.buffers: dict[str, Buffer] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, Any] = {}
        self.values: dict[torch.fx.Node, Any] = {}
        self.uniform: dict[str, Any] = {}
        self.moved: dict[Any, Any] = {}
        self.reserved: set[str] = set()
        self.within: frozenset[str] = frozenset()
        self.prefix = ""
        self.choices = True
        self.kernels = itertools.count()

    # -- names and buffers ----------------------------------------------------------------------
    def next_kernel(self) -> int:
        return next(self.kernels)

    def next_node(self) -> str:
        return f"{self.prefix}op{len(self.nodes)}"

    def unique(self, name: str) -> str:
        """``name``, or ``name_1`` ... if a buffer or symbol has it, the printed wrapper uses it, or a node may have it
        (``renamed`` takes buffers and nodes by name)."""
        taken, n, out = (self.buffers, self.symbols.known, self.reserved, RESERVED), 0, name
        while any(out in t for t in taken) or _NODE.search(out):
            n += 1
            out = f"{name}_{n}"
        return out

    def new_buffer(self, name: str, fake: torch.Tensor, kind: str = "temp") -> Buffer:
        sizes = (fake.shape, fake.stride()) if fake.layout == torch.strided else ((), ())
        shape, strides = (self.symbols.exprs(s) for s in sizes)
        buffer = Buffer(self.unique(name), fake.dtype, fake.device, shape, strides, kind)
        self.buffers[buffer.name] = buffer
        return buffer

    # -- graph nodes ----------------------------------------------------------------------------
    def placeholder(self, node: torch.fx.Node) -> None:
        fake = node.meta.get("val")
        for d, size in _numbers(fake):
            if not self.symbols.expressible(size):
                self.symbols.define(self.unique(f"{node.name}_size{d}"), size)
        if isinstance(fake, torch.Tensor):
            buffer = self.new_buffer(node.name, fake, "input")
            self.values[node] = full_view(buffer)
            self.inputs.append(buffer.name)
            self.symbols.bind(*buffer.shape, *buffer.strides)
        elif isinstance(fake, (torch.SymInt, torch.SymFloat)):
            self.values[node] = value = self.symbols.from_sympy(fake.node.expr, fake.node.shape_env)
            self.inputs.append(value.atom if isinstance(value.atom, Sym) else value)
            self.symbols.bind(value)
        else:
            self.values[node] = fake
            self.inputs.append(None)

    def attribute(self, node: torch.fx.Node, module: torch.fx.GraphModule) -> Any:
        """A tensor the graph holds is a ``const`` buffer; a submodule (a branch of ``cond``) stays what it is."""
        value = operator.attrgetter(str(node.target))(module)
        if not isinstance(value, torch.Tensor):
            return value
        name = str(node.target).replace(".", "_")
        if name not in self.constants:
            fake = node.meta.get("val")
            name = self.new_buffer(name, value if fake is None else fake, "const").name
            self.constants[name] = value
        return full_view(self.buffers[name])

    def call(self, node: torch.fx.Node) -> Any:
        """One op: by its rule; else as an Extern call. A rule that fails in any other way is a LoweringError."""
        fake, target = node.meta.get("val"), node.target
        if target in _DROPPED:
            return None
        if target is operator.getitem and not isinstance(fake, (torch.SymInt, torch.SymFloat)):
            return self.values[node.args[0]][node.args[1]]  # type: ignore[index]
        if isinstance(fake, (int, float, bool)) and not isinstance(target, torch._ops.HigherOrderOperator):
            return fake
        args, kwargs = self.arguments(node.args), self.arguments(node.kwargs)
        cx = LoweringContext(self, node, fake, origin(node), node.name)
        try:
            return self._call(cx, target, args, kwargs)
        except ReflibError:
            raise
        except Exception as e:
            where = f" at {cx.origin.source}" if cx.origin.source else ""
            raise LoweringError(
                f"lowering {cx.origin.op}{where} failed: {type(e).__name__}: {e}. This is a bug in reflib's rule for it"
            ) from e

    def _call(self, cx: LoweringContext, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(cx.fake, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._scalar(cx, target, args, kwargs)

        def usual() -> Any:
            return self._one(cx, target, args, kwargs)

        for call in CALLS.values():
            return call(cx, target, args, kwargs, usual)
        return usual()

    def _one(self, cx: LoweringContext, target: Any, args: Any, kwargs: Any) -> Any:
        """The op by its rule; where the rule does not cover the case, a call."""
        target = REINTERPRET.get(target, target)
        fn = rule_of(target) or (view if is_view_op(target) else None)
        if self.options.numerics == "eager":
            fn = LIKE_EAGER["rule"](cx, target, fn)
        reason = reason_for(target)
        if fn is not None:
            nodes = len(self.nodes)
            tables: tuple[dict[Any, Any], ...] = (self.buffers, self.moved, self.uniform)
            sizes = [len(t) for t in tables]
            try:
                supported(cx, args, kwargs)
                return fn(cx, *args, **kwargs)
            except Unsupported as e:
                reason = str(e)
                del self.nodes[nodes:]
                for table, size in zip(tables, sizes):
                    for key in list(table)[size:]:
                        del table[key]
                target = copying(target)
        logs.get("fallback").info(
            "%s -> ATen: %s%s", target, reason, f" ({cx.origin.source})" if cx.origin.source else ""
        )
        return extern(cx, target, args, kwargs, reason)

    def _scalar(self, cx: LoweringContext, target: Any, args: Any, kwargs: Any) -> Any:
        """A node whose value is a number: an Expr if it can be one, else a call that computes it."""
        known = isinstance(cx.fake, torch.SymInt) and not any(
            str(s).startswith("u") and str(s) not in self.symbols.bound for s in cx.fake.node.expr.free_symbols
        )
        if known and self.symbols.expressible(cx.fake):
            return self.symbols.expr(cx.fake)
        if isinstance(target, torch._ops.OpOverload) or any(True for _ in iter_views((args, kwargs))):
            return extern(cx, target, args, kwargs, "a number read from a tensor")
        return scalar_call(cx, target, args, kwargs)

    def arguments(self, tree: Any) -> Any:
        """An FX argument (a nest) with nodes replaced by their values."""
        if isinstance(tree, torch.fx.Node):
            return self.values[tree]
        if isinstance(tree, (tuple, list)):
            items = [self.arguments(t) for t in tree]
            return tuple(items) if isinstance(tree, tuple) else items
        if isinstance(tree, dict):
            return {k: self.arguments(v) for k, v in tree.items()}
        if isinstance(tree, (torch.SymInt, torch.SymFloat)):
            return self.symbols.from_sympy(tree.node.expr, tree.node.shape_env)
        return tree


def supported(cx: LoweringContext, args: Any, kwargs: Any) -> None:
    """Raises Unsupported for tensors that no rule is written for."""
    for f in cx.fakes:
        if f.layout != torch.strided:
            raise Unsupported(f"layout {f.layout}")
        if f.device.type not in _DEVICES:
            raise Unsupported(f"device {f.device.type}")
    for v in iter_views((args, kwargs)):
        if cx.low.buffers[v.buffer].device.type not in _DEVICES:
            raise Unsupported("an input on another device")


FRAME = re.compile(r'File "(?!<eval_with_key|[^"]*/observe/explain.py)([^"]+)", line (\d+), in (\S+)\s*\n?\s*(.*)')


def origin(node: torch.fx.Node) -> Origin:
    """The op, and the innermost line of the user's code that led to it (file name without its folder)."""
    target = node.target
    op = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return Origin(op)
    path, line, function, code = frames[-1]
    file = "cell" if "ipykernel_" in path else os.path.basename(path)  # a notebook's cells are files with a number
    return Origin(op, f"{file}:{line} in {function}: {code.strip()}".rstrip(": "))


def remove_unused(
    nodes: Sequence[Node], buffers: dict[str, Buffer], outputs: tuple[Any, ...]
) -> tuple[tuple[Node, ...], dict[str, Buffer]]:
    """The nodes that ``outputs`` need, and the buffers that these name: rules make more results than are used. Kept as
    well: what writes into an input or has an effect, and calls for numbers or sizes held in tensors' data."""
    live: set[Any] = {v.buffer for v in iter_views(outputs)} | symbols_in(outputs)
    for name in live | {b for b in buffers if buffers[b].kind != "temp"}:
        live |= _buffer_symbols(buffers.get(name))
    kept: list[Node] = []
    for n in reversed(nodes):
        makes = n.writes() + [s for s, _, _ in n.symbols] if isinstance(n, Extern) else n.writes()
        needed = any(m in live or isinstance(m, str) and buffers[m].kind != "temp" for m in makes)
        if needed or isinstance(n, Extern) and (n.effect or n.mutates or n.symbols and n.reads() or not makes):
            kept.append(n)
            live.update(n.reads())
            live |= node_symbols(n)
            for b in [*n.reads(), *n.writes()]:
                live |= _buffer_symbols(buffers[b])
    named = live | {b for n in walk(kept) for b in n.writes()}
    return tuple(reversed(kept)), {k: b for k, b in buffers.items() if k in named or b.kind != "temp"}


def _buffer_symbols(b: Buffer | None) -> set[Any]:
    return set() if b is None else {s for e in (*b.shape, *b.strides) for s in e.symbols()}
