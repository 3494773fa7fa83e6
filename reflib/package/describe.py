"""What a package's program takes and gives, beyond the table of its inputs, for people: ``inspect`` shows it, and the
README of an export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch

from ..ir.data import decode
from ..wrap.convention import Argument, Expected, Source, sources
from . import trees
from .manifest import Program


def guards(p: Program) -> list[str]:
    """What holds of the sizes beyond their ranges: ``s77 > s17 (x.shape[0] > y.shape[0])``."""
    places = {s.symbol.name: _place(s, p) for s in sources(_arguments(p))}
    out = []
    for g in p.guards:
        names = sorted(s.name for s in decode(g.what).symbols())
        if not names or not places.keys() >= set(names):
            out.append(g.text)
            continue
        said = re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", lambda m: places[m[1]], g.text)
        out.append(f"{g.text} ({said})" if said != g.text else g.text)
    return out


def _arguments(p: Program) -> tuple[Argument, ...]:
    """As ``sources`` wants them, which looks at no dtype and no device."""
    made = []
    for a in p.arguments:
        expected = None
        if a.tensor is not None:
            shape, strides = decode(a.tensor.shape), decode(a.tensor.strides)
            expected = Expected(torch.float32, torch.device("cpu"), shape, strides)
        made.append(Argument(a.name, expected, decode(a.value)))
    return tuple(made)


def _place(s: Source, p: Program) -> str:
    """Where the symbol's value is found: ``x.shape[0]``, ``(x.shape[0] - 1)//2``."""
    name = p.arguments[s.argument].name
    said = {"value": name, "size": f"{name}.shape[{s.dim}]", "stride": f"{name}.stride({s.dim})"}[s.what]
    if s.plus:
        said = f"({said} {'-' if s.plus > 0 else '+'} {abs(s.plus)})"
    return said if s.times == 1 else f"({said}//{s.times})"


def results(p: Program) -> list[str]:
    """Where the caller's results lie in what the model returns, in order: ``result["h"]``, ``result["c"][0]``. (Read
    off the text: a class among them need not be known here.)"""
    return [f"result{path}" for path in _paths(json.loads(p.result_tree)[1])]


def _paths(node: Any) -> Iterator[str]:
    if node["type"] is None:
        yield ""
        return
    for step, child in zip(_steps(node), node["children_spec"], strict=True):
        for path in _paths(child):
            yield step + path


def _steps(node: Any) -> list[str]:
    """To each of the node's children: by key, by a field's name, else by number."""
    kind, context, n = node["type"], node["context"], len(node["children_spec"])
    by_number = [f"[{i}]" for i in range(n)]
    if kind == trees._NAMEDTUPLE or kind in trees._NO_CONTEXT:
        return by_number
    found = context["dict_context"] if kind == "collections.defaultdict" else json.loads(context)
    if not isinstance(found, list):
        return by_number
    if _names(found, n):
        return [f"[{json.dumps(key)}]" for key in found]
    fields = found[0] if found else ()  # a dataclass: (fields, those that are None)
    return [f".{name}" for name in fields] if isinstance(fields, list) and _names(fields, n) else by_number


def _names(found: list[Any], n: int) -> bool:
    return len(found) == n and all(type(x) in (str, int) for x in found)
