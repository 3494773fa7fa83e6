"""A program as plain JSON data, and back: ``from_data(to_data(p)) == p``.

A dataclass becomes ``{"_": "Load", field: value, ...}``; a tuple becomes a list; other values that JSON lacks become
``{"_": kind, "value": ...}``. An OpOverload is written as its name, which must be registered when it is read back.
Constants (tensors, captured modules) are kept by reference: their names are in the data, ``from_data`` takes the
objects.

Reading runs and imports nothing: a name is an attribute of torch, an operator, or a function of ``math`` or
``operator``.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ..errors import ReflibError
from . import flex as _flex
from . import loops as _loops
from . import program as _program
from . import regions as _regions
from . import user_kernel as _user_kernel
from .expr import Atom, BinOp, Expr, Ref, Sym, Var
from .program import Program

VERSION = 3
_CLASSES = {
    name: c
    for module in (_loops, _program, _regions, _user_kernel, _flex)
    for name, c in vars(module).items()
    if isinstance(c, type) and is_dataclass(c) and c.__module__ == module.__name__
}
_MODULES = {"operator": operator, "_operator": operator, "math": math}
_TORCH = (torch.dtype, torch.memory_format, torch.layout)


def to_data(program: Program) -> dict[str, Any]:
    """``program`` as data that ``json.dumps`` accepts. Raises ReflibError for a callable that has no name."""
    out = {f.name: encode(getattr(program, f.name)) for f in fields(Program) if f.name != "constants"}
    return {"version": VERSION, **out, "constants": sorted(program.constants)}


def from_data(data: Mapping[str, Any], constants: Mapping[str, Any] | None = None) -> Program:
    """The inverse of :func:`to_data`. ``constants``: the objects named in the data; a missing one is an error."""
    if data.get("version") != VERSION:
        raise ReflibError(f"this program was written in version {data.get('version')} of the format, not {VERSION}")
    missing = [c for c in data["constants"] if c not in (constants or {})]
    if missing:
        raise ReflibError(f"the program needs the constants {', '.join(missing)}")
    parts = {f.name: decode(data[f.name]) for f in fields(Program) if f.name != "constants"}
    return Program(**parts, constants={c: constants[c] for c in data["constants"]} if constants else {})


def encode(x: Any) -> Any:
    """One value as JSON data. Raises ReflibError for a callable that has no name."""
    if x is None or isinstance(x, (bool, str)) or type(x) is int or isinstance(x, float) and math.isfinite(x):
        return x
    if isinstance(x, tuple):
        return [encode(v) for v in x]
    if type(x).__name__ in _CLASSES:
        return {"_": type(x).__name__, **{f.name: encode(getattr(x, f.name)) for f in fields(x)}}
    for kind, (is_one, to, _) in _KINDS.items():
        if is_one(x):
            return {"_": kind, "value": to(x)}
    what = f"callable {x}" if callable(x) else f"{type(x).__name__} {x!r}"
    if isinstance(x, torch.nn.Module):  # a graph of its own: a branch of torch.cond, the body of a loop
        what = f"captured module {type(x).__name__}"
    raise ReflibError(f"a program with the {what} cannot be written as data; only ATen and registered custom ops can")


def decode(x: Any) -> Any:
    """The inverse of :func:`encode`. Raises ReflibError for an operator that is not registered."""
    if isinstance(x, list):
        return tuple(decode(v) for v in x)
    if not isinstance(x, dict):
        return x
    kind = x["_"]
    if kind in _CLASSES:
        return _CLASSES[kind](**{k: decode(v) for k, v in x.items() if k != "_"})
    if kind not in _KINDS:
        raise ReflibError(f"unknown kind of data {kind!r:.80}")
    return _KINDS[kind][2](x["value"])


def _encode_atom(a: Any) -> list[Any]:
    if isinstance(a, Sym):
        return ["sym", a.name, a.lo, a.hi, a.hint]
    if isinstance(a, Var):
        return ["var", a.name, encode(a.size)]
    if isinstance(a, Ref):
        return ["ref", a.id, encode(a.size)]
    return [a.fn, encode(a.a), encode(a.b)]


def _decode_atom(data: list[Any]) -> Any:
    kind, *rest = data
    if kind in ("sym", "var") and not (isinstance(rest[0], str) and rest[0].isidentifier()):
        raise ReflibError(f"{rest[0]!r:.80} is no name of a size or an axis")
    if kind == "sym":
        name, lo, hi, hint = rest
        return Sym(name, _whole(lo), *(None if n is None else _whole(n) for n in (hi, hint)))
    first, second = rest
    if kind in ("var", "ref"):
        return (Var if kind == "var" else Ref)(first, _size(second))
    if kind not in ("//", "%", "max", "min"):
        raise ReflibError(f"unknown operation {kind!r:.80} of sizes")
    return BinOp(kind, _size(first), _size(second))


def _size(data: Any) -> Expr:
    found = decode(data)
    if not isinstance(found, Expr):
        raise ReflibError(f"the size {found!r:.80} is no expression")
    return found


def _whole(data: Any) -> int:
    if type(data) is not int:
        raise ReflibError(f"the number {data!r:.80} in a size is not a whole one")
    return data


def _is_function(x: Any) -> bool:
    module = _MODULES.get(str(getattr(x, "__module__", "")))
    return module is not None and getattr(module, getattr(x, "__name__", ""), None) is x


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as e:
        raise ReflibError(f"the operator {name:.99} is not registered; import the module that defines it") from e


def _function(name: str) -> Any:
    module, function = name.split(".")
    return getattr(_MODULES[module], function)


# kind: (is it one of these?, its value as data, the inverse)
_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "expr": (lambda x: isinstance(x, Expr), lambda x: [[c, *map(_encode_atom, m)] for m, c in x.terms],
             lambda v: Expr(tuple((tuple(map(_decode_atom, atoms)), _whole(c)) for c, *atoms in v))),
    "atom": (lambda x: isinstance(x, Atom), _encode_atom, _decode_atom),
    "list": (lambda x: isinstance(x, list), lambda x: [encode(v) for v in x], lambda v: [decode(e) for e in v]),
    "dict": (lambda x: isinstance(x, dict), lambda x: [[encode(k), encode(v)] for k, v in x.items()],
             lambda v: {decode(k): decode(e) for k, e in v}),
    "float": (lambda x: isinstance(x, float), repr, float),
    "complex": (lambda x: isinstance(x, complex), lambda x: [x.real, x.imag], lambda v: complex(*v)),
    "torch": (lambda x: isinstance(x, _TORCH), lambda x: str(x).removeprefix("torch."), lambda v: getattr(torch, v)),
    "device": (lambda x: isinstance(x, torch.device), str, torch.device),
    "op": (lambda x: isinstance(x, torch._ops.OpOverload), str, _operator),
    "higher_order": (lambda x: isinstance(x, torch._ops.HigherOrderOperator), lambda x: x.name(),
                     lambda v: getattr(torch.ops.higher_order, v)),
    "function": (_is_function, lambda x: f"{x.__module__}.{x.__name__}", _function),
}  # fmt: skip
