"""The parameters cell: its grammar, and the validation shared by Lab, papermill and batch.

    parameter := NAME ":" TYPE "=" VALUE "#" HELP [ "(" DOMAIN ")" ]
    TYPE      := "str" | "int" | "float" | "bool"
    DOMAIN    := ITEM { "|" ITEM }             the value must match one item
    ITEM      := WORD | NUMBER ".." NUMBER     a range includes both ends

for example:

    device: str = "auto"     # where to run (auto | cpu | cuda)
    megabytes: str = "auto"  # size of the largest tensor, MiB (auto | 1 .. 2048)

A `str` whose domain has a range also accepts a number, or text of one ("64" from a command line), and becomes that
number. (One type per line, because papermill does not parse unions.)
"""

import ast
import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass

from reflib.errors import LabError, did_you_mean

TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell."""

    name: str
    type: str
    default: object
    help: str
    domain: tuple[str | tuple[float, float], ...] = ()

    def describe(self) -> str:
        """The allowed values, as text."""
        items = [i if isinstance(i, str) else f"{i[0]:g} to {i[1]:g}" for i in self.domain]
        return ", ".join(items) if items else self.type


def parse_parameters(source: str) -> tuple[Parameter, ...]:
    """Read a parameters cell. Every line must follow the grammar above."""
    comments = _comments(source)
    found = []
    for node in ast.parse(source).body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            raise LabError(
                f"parameters cell, line {node.lineno}: expected `name: type = value  # help`, "
                f"got `{ast.unparse(node)}`"
            )
        found.append(_parameter(node, comments.get(node.end_lineno or node.lineno, "")))
    return tuple(found)


def _parameter(node: ast.AnnAssign, comment: str) -> Parameter:
    assert isinstance(node.target, ast.Name)
    name = node.target.id
    kind = ast.unparse(node.annotation)
    if kind not in TYPES:
        raise LabError(f"parameter {name!r}: type {kind!r} is not one of {', '.join(TYPES)}")
    if node.value is None:
        raise LabError(f"parameter {name!r} needs a default value")
    text, domain = _split_help(name, comment)
    parameter = Parameter(name, kind, ast.literal_eval(node.value), text, domain)
    check_value(parameter, parameter.default)
    return parameter


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def _split_help(name: str, comment: str) -> tuple[str, tuple[str | tuple[float, float], ...]]:
    match = re.fullmatch(r"(.*?)\s*\(([^()]*)\)\s*", comment)
    if not match:
        return comment.strip(), ()
    items: list[str | tuple[float, float]] = []
    for item in (part.strip() for part in match[2].split("|")):
        if ".." not in item:
            items.append(item)
            continue
        low, _, high = item.partition("..")
        try:
            items.append((float(low), float(high)))
        except ValueError:
            raise LabError(f"parameter {name!r}: {item!r} is not a range `low .. high`") from None
    return match[1], tuple(items)


def check_value(parameter: Parameter, value: object) -> object:
    """The value, converted to a number where the domain has a range. LabError if it is not allowed."""
    ranges = [i for i in parameter.domain if isinstance(i, tuple)]
    if parameter.type == "str" and ranges:
        value = _number(value)
    elif not _has_type(value, parameter.type):
        raise LabError(
            f"parameter {parameter.name!r} is {value!r}, a {type(value).__name__}; "
            f"it must be {parameter.type} ({parameter.help or 'no help given'})"
        )
    if parameter.domain and not any(_matches(value, item) for item in parameter.domain):
        raise LabError(
            f"parameter {parameter.name!r} is {value!r}; it must be {parameter.describe()}"
            f"{_nearest(str(value), [i for i in parameter.domain if isinstance(i, str)])}"
        )
    return value


def _number(value: object) -> object:
    """Numeric text as a number; other values unchanged."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _has_type(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "bool"
    if name == "float":
        return isinstance(value, int | float)
    return isinstance(value, TYPES[name])


def _matches(value: object, item: str | tuple[float, float]) -> bool:
    if isinstance(item, str):
        return str(value) == item
    return isinstance(value, int | float) and not isinstance(value, bool) and item[0] <= value <= item[1]


def validate(parameters: tuple[Parameter, ...], values: Mapping[str, object]) -> dict[str, object]:
    """All parameter values: defaults overridden by `values`, each validated.

    LabError for an unknown name, with the most similar known one.
    """
    known = {p.name: p for p in parameters}
    for name in values:
        if name not in known:
            raise LabError(
                f"no parameter is called {name!r}; there are {', '.join(known) or 'none'}"
                f"{_nearest(name, list(known))}"
            )
    return {p.name: check_value(p, values.get(p.name, p.default)) for p in parameters}


def _nearest(word: str, choices: list[str]) -> str:
    hint = did_you_mean(word, choices)
    return hint and f". D{hint[1:]}"
