"""The text of an FX graph, read back: the same nodes, with the same names.

``torch.fx`` prints a graph as a ``forward`` of one plain statement per node. Running that text under a tracer
loses what takes no tensor (``torch.arange(5)``, entering autocast) and every name; here each statement becomes the node
that printed it. Comments above a statement say which line of the user's code it comes from.
"""

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}  # fmt: skip
_IN_PLACE: dict[type, Any] = {
    kind: getattr(operator, "i" + f.__name__.strip("_")) for kind, f in _OPERATORS.items()
    if hasattr(operator, "i" + f.__name__.strip("_"))
}  # fmt: skip
_LINE = re.compile(r"\s*#(?: .*)? File: (?P<file>.+):(?P<line>\d+) in (?P<function>[^,]+), code: (?P<code>.*)")


def read_graph(instance: torch.nn.Module, text: str, scope: Mapping[str, Any]) -> torch.fx.GraphModule:
    """The GraphModule of ``instance``, whose class is printed in ``text``. Submodules whose classes are printed there
    become GraphModules too. ``scope``: what the text's names mean."""
    classes = {c.name: c for c in ast.parse(text).body if isinstance(c, ast.ClassDef)}
    for name, child in list(instance.named_children()):
        if type(child).__name__ in classes:
            setattr(instance, name, read_graph(child, text, scope))
    body = classes[type(instance).__name__].body
    forward = next(f for f in body if isinstance(f, ast.FunctionDef) and f.name == "forward")
    graph = _Reader(scope, text.splitlines()).read(forward)
    return torch.fx.GraphModule(instance, graph, type(instance).__name__)


class _Reader:
    def __init__(self, scope: Mapping[str, Any], lines: list[str]):
        self.graph = torch.fx.Graph()
        self.scope, self.lines = scope, lines
        self.env: dict[str, Any] = {}
        self.trace = ""
        self.update: tuple[Any, ...] = ()

    def read(self, forward: ast.FunctionDef) -> torch.fx.Graph:
        params = [a.arg for a in forward.args.args[1:]]
        named: dict[str, str] = {}  # fx prints a placeholder's name where it is not its target
        for before, s in zip([forward, *forward.body], forward.body):
            alias = isinstance(s, ast.Assign) and isinstance(s.value, ast.Name) and s.value.id in params
            if alias and not isinstance(before, ast.AugAssign):  # after `b += c`, `a = b` names that node
                named[s.value.id] = s.targets[0].id  # type: ignore[attr-defined]
        for p in params:
            node = self.graph.create_node("placeholder", p, name=named.get(p, p))
            self.env[p] = self.env[named.get(p, p)] = node
        last = forward.lineno
        for statement in forward.body:
            self._comments(last, statement.lineno)
            last = statement.lineno
            self._statement(statement, set(named.values()))
        return self.graph

    def _comments(self, start: int, end: int) -> None:
        for line in self.lines[start : end - 1]:
            if found := _LINE.match(line):
                self.trace = '  File "{file}", line {line}, in {function}\n    {code}\n'.format(**found.groupdict())
            elif line.strip() == "# No stacktrace found for following nodes":
                self.trace = ""

    def _statement(self, s: ast.stmt, placeholders: set[str]) -> None:
        if isinstance(s, ast.Return):
            self.graph.output(self._value(s.value) if s.value else None)
        elif isinstance(s, ast.AugAssign):
            assert isinstance(s.target, ast.Name)
            self.update = _IN_PLACE[type(s.op)], (self.env[s.target.id], self._value(s.value))
        elif isinstance(s, (ast.Assign, ast.AnnAssign)):
            target = s.target if isinstance(s, ast.AnnAssign) else s.targets[0]
            if isinstance(target, ast.Subscript) and s.value is not None:  # x[i] = v; setitem = x
                self.update = operator.setitem, tuple(map(self._value, (target.value, target.slice, s.value)))
                return
            empty = s.value is None or isinstance(s.value, ast.Constant) and s.value.value is None
            if empty or not isinstance(target, ast.Name) or target.id in placeholders:
                return
            assert s.value is not None
            if isinstance(s.value, ast.Name) and s.value.id in self.env:
                self._put(target.id, "call_function", *self.update)
            else:
                self._put(target.id, *self._node(s.value))

    def _put(self, name: str, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        node = self.graph.create_node(op, target, args, kwargs or {}, name=name)
        node.meta["stack_trace"] = self.trace
        self.env[name] = node

    def _node(self, e: ast.expr) -> tuple[Any, ...]:
        """(op, target, args, kwargs) of the node that prints as ``e``."""
        if (path := _path(e)) is not None:
            return "get_attr", path
        if isinstance(e, ast.BinOp):
            return "call_function", _OPERATORS[type(e.op)], (self._value(e.left), self._value(e.right))
        if isinstance(e, ast.UnaryOp):
            return "call_function", _OPERATORS[type(e.op)], (self._value(e.operand),)
        if isinstance(e, ast.Compare):
            return "call_function", _OPERATORS[type(e.ops[0])], (self._value(e.left), self._value(e.comparators[0]))
        if isinstance(e, ast.Subscript):
            return "call_function", operator.getitem, (self._value(e.value), self._value(e.slice))
        if isinstance(e, ast.Attribute):
            return "call_function", getattr, (self._value(e.value), e.attr)
        if not isinstance(e, ast.Call):
            raise ValueError(f"a graph has no statement like {ast.unparse(e)}")
        args = tuple(self._value(a) for a in e.args)
        kwargs = {k.arg: self._value(k.value) for k in e.keywords}
        if (path := _path(e.func)) is not None:
            return "call_module", path, args, kwargs
        if isinstance(e.func, ast.Attribute) and self._has_nodes(e.func.value):
            return "call_method", e.func.attr, (self._value(e.func.value), *args), kwargs
        return "call_function", self._constant(e.func), args, kwargs

    def _value(self, e: ast.expr) -> Any:
        if not self._has_nodes(e):
            return self._constant(e)
        if isinstance(e, ast.Name):
            return self.env[e.id]
        if isinstance(e, ast.Tuple):
            return tuple(self._value(x) for x in e.elts)
        if isinstance(e, ast.List):
            return [self._value(x) for x in e.elts]
        if isinstance(e, ast.Dict):
            return {self._constant(k): self._value(v) for k, v in zip(e.keys, e.values) if k is not None}
        if isinstance(e, ast.Call):
            return self._constant(e.func)(*(self._value(a) for a in e.args))
        raise ValueError(f"a graph has no argument like {ast.unparse(e)}")

    def _has_nodes(self, e: ast.expr) -> bool:
        return any(isinstance(n, ast.Name) and n.id in self.env for n in ast.walk(e))

    def _constant(self, e: ast.expr) -> Any:
        return eval(compile(ast.Expression(e), "<graph>", "eval"), dict(self.scope))


def _path(e: ast.expr) -> str | None:
    """ "layers.0" of ``getattr(self.layers, "0")``; None if it does not begin with ``self``."""
    if isinstance(e, ast.Attribute):
        inner, name = e.value, e.attr
    elif isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id == "getattr":
        inner, name = e.args[0], ast.literal_eval(e.args[1])
    else:
        return None
    if isinstance(inner, ast.Name):
        return name if inner.id == "self" else None
    outer = _path(inner)
    return None if outer is None else f"{outer}.{name}"
