"""C functions that a user declared for ops (``Options.c_shims``): declarations are parsed and checked against the op's
schema. ``wrap.aten`` finds and calls the functions.

>>> parse("int32_t scale_shim(AtenTensorHandle x, double by, AtenTensorHandle* out);")
Shim(symbol='scale_shim', parameters=(('AtenTensorHandle', 'x'), ('double', 'by'), ('AtenTensorHandle*', 'out')))
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .errors import OptionError

_PROTOTYPE = re.compile(r'(?:extern\s+"C"\s+)?(\w+)\s+(\w+)\s*\(([^()]*)\)\s*;?')
_PARAMETER = re.compile(r"((?:const\s+)?\w+(?:\s*\*)?)\s*(\w*)")
# the C type of an argument; an optional one is a pointer, which may be null
_PLAIN = {
    "TensorType": "AtenTensorHandle", "IntType": "int64_t", "SymIntType": "int64_t", "FloatType": "double",
    "BoolType": "int32_t", "ScalarTypeType": "int32_t", "StringType": "const char*",
}  # fmt: skip
_OPTIONAL = ("TensorType", "IntType", "SymIntType", "FloatType", "BoolType", "ScalarTypeType")
_LISTS = ("TensorType", "IntType", "SymIntType")


@dataclass(frozen=True)
class Shim:
    """A prototype. ``parameters``: (type, name or "")."""

    symbol: str
    parameters: tuple[tuple[str, str], ...]


def normalize(value: Any) -> tuple[tuple[str, str], ...]:
    """The option as sorted pairs of an op's name and a prototype (which is itself a valid value). Declarations for ops
    that are registered already are checked. Raises OptionError."""
    try:
        pairs = value.items() if isinstance(value, Mapping) else value or ()
        given = [(_name(op), text) for op, text in pairs]
    except (TypeError, ValueError, RuntimeError):  # (the last: of a tensor, which is not true or false)
        raise OptionError(f"option c_shims={value!r:.100}: must be {{op: a C prototype}}") from None
    for name, text in given:
        if not isinstance(text, str):
            raise OptionError(f"option c_shims: the value of {name!r} must be a C prototype; it is {text!r:.80}")
        shim, op = parse(text, name), op_of(name)
        if op is not None:
            check(name, op, shim)
    return tuple(sorted(dict(given).items()))


def parse(text: str, op: str = "") -> Shim:
    m = _PROTOTYPE.fullmatch(" ".join(text.split()))
    example = "int32_t my_op_shim(AtenTensorHandle x, double eps, AtenTensorHandle* out)"
    if m is None:
        raise OptionError(f"option c_shims[{op!r}]: {text!r:.120} is no prototype of a C function; like: {example}")
    if m[1] not in ("int32_t", "AOTITorchError"):
        raise OptionError(f"option c_shims[{op!r}]: {m[2]} returns {m[1]}; it must return int32_t, 0 when it succeeds")
    parameters = []
    for part in m[3].split(",") if m[3].strip() not in ("", "void") else ():
        p = _PARAMETER.fullmatch(part.strip())
        if p is None:
            raise OptionError(f"option c_shims[{op!r}]: {part.strip()!r:.200} is no known parameter; like: {example}")
        parameters.append((re.sub(r"\s*\*", "*", p[1]), p[2]))
    return Shim(m[2], tuple(parameters))


def check(name: str, op: torch._ops.OpOverload, shim: Shim) -> None:
    """Raises OptionError unless the parameters are the op's arguments, in order, followed by its results."""
    head = f"option c_shims[{name!r}]"
    wanted: list[tuple[str, str]] = []  # (type, what for)
    for i, a in enumerate(op._schema.arguments):
        types = c_types(a.real_type)
        if types is None:
            raise OptionError(f"{head}: argument {i} ({a.name}) is {a.real_type}, which a C shim cannot be given")
        wanted += [(t, f"argument {i} ({a.name}) is {a.real_type}") for t in types]
    for i, r in enumerate(op._schema.returns):
        if r.type.kind() != "TensorType" or r.alias_info is not None:
            raise OptionError(f"{head}: result {i} is {r.type}; results must be new tensors")
        wanted.append(("AtenTensorHandle*", f"result {i} is a Tensor"))
    for i, (type_, why) in enumerate(wanted):
        have = shim.parameters[i] if i < len(shim.parameters) else None
        if have is None:
            raise OptionError(f"{head}: {why}, so parameter {i} of {shim.symbol} must be {type_}; there is none")
        if have[0] != type_:
            said = " ".join(have).strip()
            raise OptionError(f"{head}: {why}, so parameter {i} of {shim.symbol} must be {type_}; it is {said!r:.200}")
    if len(shim.parameters) > len(wanted):
        extra = " ".join(shim.parameters[len(wanted)]).strip()
        raise OptionError(f"{head}: {shim.symbol} has more parameters than {op._schema} needs: {extra!r:.200}")


def c_types(kind: Any) -> list[str] | None:
    """The C parameters of an argument; None if it cannot be passed."""
    name = kind.kind()
    if name == "OptionalType":
        inner = kind.getElementType().kind()
        return [f"{_PLAIN[inner]}*"] if inner in _OPTIONAL else None
    if name == "ListType":
        inner = kind.getElementType().kind()
        return [f"const {_PLAIN[inner]}*", "int64_t"] if inner in _LISTS else None
    return [_PLAIN[name]] if name in _PLAIN else None


def _name(op: Any) -> str:
    if isinstance(op, torch._ops.OpOverload):
        s = op._schema
        return f"{s.name}.{s.overload_name}" if s.overload_name else s.name
    if isinstance(op, str) and re.fullmatch(r"\w+::\w+(\.\w+)?", op):
        return op.removesuffix(".default")
    raise OptionError(f"option c_shims: {op!r:.80} must be an op: 'namespace::name', or 'namespace::name.overload'")


def op_of(name: str) -> torch._ops.OpOverload | None:
    """The op, if it is registered."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except (AttributeError, RuntimeError):
        return None
