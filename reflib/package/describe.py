"""A program's guards and results as text, for ``inspect`` and the README of an export."""

import re
from typing import Any

from torch.utils import _pytree as pytree

from ..wrap.convention import Argument, Convention, Source, sources


def guards(c: Convention) -> tuple[str, ...]:
    """Conditions on sizes beyond their ranges: ``s77 > s17 (x.shape[0] > y.shape[0])``."""
    places = {s.symbol.name: _place(s, c.arguments) for s in sources(c.arguments)}
    names = "|".join(map(re.escape, places)) or "(?!)"
    said = [(g.text, re.sub(rf"\b({names})\b", lambda m: places[m[1]], g.text)) for g in c.guards]
    return tuple(f"{text} ({placed})" if placed != text else text for text, placed in said)


def _place(s: Source, arguments: tuple[Argument, ...]) -> str:
    """The symbol's value in terms of arguments: ``x.shape[0]``, ``(x.shape[0] - 1)//2``."""
    said = s.place(arguments)
    if s.plus:
        said = f"({said} {'-' if s.plus > 0 else '+'} {abs(s.plus)})"
    return said if s.times == 1 else f"({said}//{s.times})"


def results(spec: Any) -> tuple[str, ...]:
    """The leaves of what the model returns, in order: ``result['h']``, ``result['c'][0]``; by number where a class of
    the caller's was registered without names."""
    n = spec.num_leaves
    try:
        leaves = pytree.tree_leaves_with_path(pytree.tree_unflatten(range(n), spec))
    except Exception:  # it runs code of the caller's classes
        return tuple(f"result[{i}]" for i in range(n))
    return tuple(f"result{pytree.keystr(path)}" for path, _ in leaves)
