"""Flattening arguments and building results, as a pytree spec says, by printed Python.

``torch.utils._pytree`` looks up the kind of every node in every call: 15 µs for four leaves. The nodes are known when a
program is compiled, so the code for them is printed once::

    def apart(args, kwargs):
        try:
            if len(args) == 2 and len(kwargs) == 0 and type(args[1]) is dict and len(args[1]) == 2:
                return (args[0], args[1]['x'], args[1]['y'],)
        except KeyError:
            pass

Tuples, lists, dicts, OrderedDicts and named tuples are printed; a spec that holds another class is left to pytree.
"""

import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_APART = """
def apart(args, kwargs):
    try:
        if {checks}:
            return {leaves}
    except KeyError:
        pass
"""
Take = Callable[[tuple, dict], "tuple[Any, ...] | None"]


def takes_apart(spec: Any) -> Take:
    """``apart(args, kwargs)``: the leaves of a call, in the order of ``spec``; None if it has another structure. Items
    of a dict may be in any order."""
    positional, named = children(spec)
    names: dict[str, Any] = {}
    checks = [f"len(args) == {len(children(positional))}", f"len(kwargs) == {len(children(named))}"]
    try:
        leaves = _items("args", positional, checks, names) + _items("kwargs", named, checks, names)
    except _Unprintable:
        return _apart_by_pytree(spec)
    result = f"({''.join(f'{leaf}, ' for leaf in leaves)})"
    text = _APART.format(checks=" and ".join(checks), leaves=result)
    exec(compile(text, "<reflib arguments>", "exec"), names)
    return names["apart"]


def _leaves(at: str, spec: Any, checks: list[str], names: dict[str, Any]) -> list[str]:
    """Expressions for the leaves of ``at``, an expression. ``checks``: gets what must hold of its inner nodes,
    outermost first; ``names``: the objects that these refer to."""
    if is_leaf(spec):
        return [at]
    if not _is_printable(spec):
        raise _Unprintable
    cls = spec.context if _is_named_tuple(spec) else spec.type
    checks.append(f"type({at}) is {cls.__name__ if cls in (tuple, list, dict) else bound(cls, names)}")
    checks.append(f"len({at}) == {len(children(spec))}")
    return _items(at, spec, checks, names)


def _items(at: str, spec: Any, checks: list[str], names: dict[str, Any]) -> list[str]:
    keys = spec.context if spec.type in (dict, OrderedDict) else range(len(children(spec)))
    items = [f"{at}[{bound(key, names)}]" for key in keys]
    return [leaf for item, child in zip(items, children(spec)) for leaf in _leaves(item, child, checks, names)]


def signature(spec: Any, names: Sequence[str] = ()) -> inspect.Signature:
    """The signature of a call. ``names``: of the positional arguments."""
    by_position, by_keyword = children(spec)
    count = len(children(by_position))
    names = names if len(names) == count else [f"args_{i}" for i in range(count)]
    kinds = inspect.Parameter
    try:
        given = [kinds(n, kinds.POSITIONAL_ONLY) for n in names]
        return inspect.Signature([*given, *(kinds(n, kinds.KEYWORD_ONLY) for n in by_keyword.context)])
    except (ValueError, TypeError):  # a key of **kwargs that is no identifier; a malformed package
        return inspect.signature(lambda *args, **kwargs: None)


def difference(spec: Any, called: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> str:
    """Why a call does not have the structure ``spec``: its signature says, or both structures do."""
    try:
        called.bind(*args, **kwargs)
    except TypeError as e:
        return str(e)
    return " ".join(f"{pytree.tree_structure((args, kwargs))}, not {spec}".split())


def built(spec: Any, leaves: Sequence[str], names: dict[str, Any]) -> str:
    """The expression that builds a structure of ``leaves`` (expressions). ``names``: gets the objects it refers to."""
    try:
        return _built(spec, iter(leaves), names)
    except _Unprintable:
        names |= {"tree_unflatten": pytree.tree_unflatten, "out_spec": spec}
        return f"tree_unflatten(({', '.join(leaves)},), out_spec)"


class _Unprintable(Exception):
    """A class that is registered with pytree."""


def children(spec: Any) -> list[Any]:
    """Of a node. (An attribute before torch 2.12, a method since.)"""
    return list(spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs)


def is_leaf(spec: Any) -> bool:
    return bool(spec.is_leaf())


def _built(spec: Any, leaves: Any, names: dict[str, Any]) -> str:
    if is_leaf(spec):
        return next(leaves)
    if not _is_printable(spec):
        raise _Unprintable
    parts = [_built(child, leaves, names) for child in children(spec)]
    if spec.type is tuple:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if spec.type is list:
        return f"[{', '.join(parts)}]"
    if spec.type in (dict, OrderedDict):
        items = "{" + ", ".join(f"{bound(k, names)}: {p}" for k, p in zip(spec.context, parts)) + "}"
        return items if spec.type is dict else f"{bound(OrderedDict, names)}({items})"
    return f"{bound(spec.context, names)}({', '.join(parts)})"


def _is_printable(spec: Any) -> bool:
    return spec.type in (tuple, list, dict, OrderedDict) or _is_named_tuple(spec)


def _is_named_tuple(spec: Any) -> bool:
    return spec.type is namedtuple  # (pytree's type for all of them; the context is the class)


def bound(x: Any, names: dict[str, Any]) -> str:
    """``x`` in the text: a literal, or a name that refers to it."""
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


def has_memory(t: torch.Tensor) -> bool:
    """Are its numbers in memory? Not those of a fake tensor, of a subclass that holds others, of one that a transform
    (torch.vmap, torch.func) carries along, or of one that is known to be zero."""
    if is_fake(t) or is_traceable_wrapper_subclass(t):
        return False
    transformed = torch._C._functorch.is_functorch_wrapped_tensor(t) or torch._is_functional_tensor(t)
    return not transformed and not t._is_zerotensor()


def allocated(t: torch.Tensor) -> bool:
    """Does its storage hold all of its numbers? (It may have been resized; a call that reads it could end the
    process.)"""
    if t.layout is not torch.strided or t.numel() == 0:
        return True
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return (t.storage_offset() + last + 1) * t.element_size() <= t.untyped_storage().nbytes()


def why_not_allocated(t: torch.Tensor) -> str:
    held = t.untyped_storage().nbytes()
    what = f"whose storage has {held} bytes, too few for it" if held else "without memory"
    return f"a tensor of sizes {list(t.shape)} {what}: its storage was resized to {held}"


def extent(t: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and of the one after its last."""
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else -1
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def folded(t: torch.Tensor) -> bool:
    """May two of its elements have one place? Some stride is within what the dimensions of smaller ones reach."""
    reach = 0
    for stride, n in sorted((s, n) for s, n in zip(t.stride(), t.shape) if n > 1):
        if stride <= reach:
            return t.numel() > 0
        reach += (n - 1) * stride
    return False
