"""Arguments taken apart and results put together, as a pytree spec says, by printed Python.

``torch.utils._pytree`` asks at every node of every call what kind of node it is: 15 µs for four leaves. What the nodes
are is known when a program is compiled, so it is printed once, as people would write it::

    def apart(args, kwargs):
        try:
            a0, a1 = args
            if type(a1) is not dict or len(a1) != 2 or len(kwargs) != 0: return None
            return (a0, a1['x'], a1['y'])
        except (KeyError, ValueError):
            return None

Printed are tuples, lists, dicts, OrderedDicts and named tuples; a spec that holds another class is left to pytree.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree as pytree

Take = Callable[[tuple, dict], "tuple[Any, ...] | None"]


def takes_apart(spec: Any) -> Take:
    """``apart(args, kwargs)``: the leaves of a call, in the order of ``spec``; None if it has another structure. Items
    of a dict may be in any order."""
    printer = _Apart()
    try:
        text = printer.print(spec)
    except _Unprintable:
        return _apart_by_pytree(spec)
    exec(compile(text, "<reflib arguments>", "exec"), printer.names)
    return printer.names["apart"]


def signature(spec: Any, names: Sequence[str] = ()) -> inspect.Signature:
    """How a call is to be written. ``names``: of the arguments by position."""
    by_position, by_keyword = children(spec)
    count = len(children(by_position))
    names = names if len(names) == count else [f"args_{i}" for i in range(count)]
    kinds = inspect.Parameter
    try:
        given = [kinds(n, kinds.POSITIONAL_ONLY) for n in names]
        return inspect.Signature([*given, *(kinds(n, kinds.KEYWORD_ONLY) for n in by_keyword.context)])
    except (ValueError, TypeError):  # a key of **kwargs that is no name; a package that makes no sense
        return inspect.signature(lambda *args, **kwargs: None)


def difference(spec: Any, called: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> str:
    """Why a call is not of the structure ``spec``: how it is written, or the first place that differs."""
    try:
        called.bind(*args, **kwargs)
    except TypeError as e:
        return str(e)
    by_position, by_keyword = children(spec)
    names = [p.name for p in called.parameters.values() if p.kind is p.POSITIONAL_ONLY]
    names = names or [f"args[{i}]" for i in range(len(args))]
    if len(args) != len(children(by_position)):
        return f"{len(args)} arguments by position, not {len(children(by_position))}"
    if why := _other_keys(by_keyword.context, kwargs):
        return f"keyword arguments with {why}"
    pairs = [*zip(names, children(by_position), args)]
    pairs += [(k, child, kwargs[k]) for k, child in zip(by_keyword.context, children(by_keyword))]
    found = next(filter(None, (_differs(*p) for p in pairs)), None)
    return found or f"{pytree.tree_structure((args, kwargs))}, not {spec}"


def _differs(at: str, spec: Any, x: Any) -> str:
    """Of ``x``, which ``at`` names; "" if it is of the structure."""
    if is_leaf(spec):
        return "" if is_leaf(pytree.tree_structure(x)) else f"{at} is a {type(x).__name__}, which was none"
    cls = spec.context if _is_named_tuple(spec) else spec.type
    if type(x) is not cls:
        return f"{at} is a {type(x).__name__}, not a {cls.__name__}"
    if spec.type in (dict, OrderedDict):
        if why := _other_keys(spec.context, x):
            return f"{at} is a {cls.__name__} with {why}"
        inner = [(f"{at}[{k!r}]", x[k]) for k in spec.context]
    else:
        parts = list(pytree.SUPPORTED_NODES[spec.type].flatten_fn(x)[0])
        inner = [(f"{at}[{i}]", part) for i, part in enumerate(parts)]
        if len(parts) != len(children(spec)):
            return f"{at} is a {cls.__name__} of {len(parts)}, not of {len(children(spec))}"
    return next(filter(None, (_differs(a, s, y) for (a, y), s in zip(inner, children(spec)))), "")


def _other_keys(want: Sequence[Any], have: Any) -> str:
    missing, more = [k for k in want if k not in have], [k for k in have if k not in want]
    return f"no {missing[0]!r}" if missing else f"{more[0]!r}, which was not there" if more else ""


def built(spec: Any, leaves: Sequence[str], names: dict[str, Any]) -> str:
    """The expression that puts ``leaves`` (expressions) together. ``names``: gets what it refers to."""
    try:
        return _built(spec, iter(leaves), names)
    except _Unprintable:
        names |= {"tree_unflatten": pytree.tree_unflatten, "out_spec": spec}
        return f"tree_unflatten(({', '.join(leaves)},), out_spec)"


class _Unprintable(Exception):
    """A class that only pytree knows."""


def children(spec: Any) -> list[Any]:
    """Of a node. (Two names for it: before torch 2.12, and since.)"""
    return list(spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs)


def is_leaf(spec: Any) -> bool:
    return bool(spec.is_leaf())


class _Apart:
    def __init__(self) -> None:
        self.names: dict[str, Any] = {"OrderedDict": OrderedDict}
        self.lines: list[str] = []
        self.count = 0

    def print(self, spec: Any) -> str:
        positional, named = children(spec)
        leaves = self._unpacked("args", children(positional))
        self._demand(f"len(kwargs) != {len(children(named))}")
        leaves += self._items("kwargs", named)
        self.lines.append(f"return ({', '.join(leaves)}{',' if len(leaves) == 1 else ''})")
        body = ["try:", *("    " + line for line in self.lines), "except (KeyError, ValueError):", "    return None"]
        return "\n".join(["def apart(args, kwargs):", *("    " + line for line in body)]) + "\n"

    def _node(self, at: str, spec: Any) -> list[str]:
        """The leaves of what ``at`` names."""
        if is_leaf(spec):
            return [at]
        if spec.type in (dict, OrderedDict):
            self._demand(f"type({at}) is not {spec.type.__name__} or len({at}) != {len(children(spec))}")
            return self._items(at, spec)
        if spec.type in (tuple, list):
            self._demand(f"type({at}) is not {spec.type.__name__}")
        elif _is_named_tuple(spec):
            self._demand(f"type({at}) is not {bound(spec.context, self.names)}")
        else:
            raise _Unprintable
        return self._unpacked(at, children(spec))

    def _unpacked(self, at: str, inner: Sequence[Any]) -> list[str]:
        names = [self._name() for _ in inner]
        if names:
            self.lines.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {at}")
        else:
            self._demand(f"len({at}) != 0")
        return [leaf for name, child in zip(names, inner) for leaf in self._node(name, child)]

    def _items(self, at: str, spec: Any) -> list[str]:
        leaves = []
        for key, child in zip(spec.context, children(spec)):
            item = f"{at}[{bound(key, self.names)}]"
            if not is_leaf(child):
                name = self._name()
                self.lines.append(f"{name} = {item}")
                item = name
            leaves += self._node(item, child)
        return leaves

    def _demand(self, wrong: str) -> None:
        self.lines.append(f"if {wrong}: return None")

    def _name(self) -> str:
        self.count += 1
        return f"a{self.count - 1}"


def _built(spec: Any, leaves: Any, names: dict[str, Any]) -> str:
    if is_leaf(spec):
        return next(leaves)
    parts = [_built(child, leaves, names) for child in children(spec)]
    if spec.type is tuple:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if spec.type is list:
        return f"[{', '.join(parts)}]"
    if spec.type in (dict, OrderedDict):
        items = "{" + ", ".join(f"{bound(k, names)}: {p}" for k, p in zip(spec.context, parts)) + "}"
        return items if spec.type is dict else f"{bound(OrderedDict, names)}({items})"
    if _is_named_tuple(spec):
        return f"{bound(spec.context, names)}({', '.join(parts)})"
    raise _Unprintable


def _is_named_tuple(spec: Any) -> bool:
    return spec.type is namedtuple  # (which is what pytree calls them all; the context is the class)


def bound(x: Any, names: dict[str, Any]) -> str:
    """``x`` in the text: as it is written, or a name that stands for it."""
    if x is None or type(x) in (str, int, bool):
        return repr(x)
    name = next((n for n, have in names.items() if have is x), f"object_{len(names)}")
    names[name] = x
    return name


def _apart_by_pytree(spec: Any) -> Take:
    named = list(children(spec)[1].context)

    def apart(args: tuple, kwargs: dict) -> tuple[Any, ...] | None:
        if list(kwargs) != named and set(kwargs) == set(named):
            kwargs = {k: kwargs[k] for k in named}
        leaves, found = pytree.tree_flatten((args, kwargs))
        return tuple(leaves) if found == spec else None

    return apart
