"""The arguments that an out variant (``Extern.out``) is given for its results.

There is a name per result. Those of a list of tensors are ``out[0]``, ``out[1]`` ...: each may be, or be a part of, a
buffer of its own, and the call gets them as one list.
"""

from collections.abc import Iterable
from typing import Any


def item(name: str, i: int) -> str:
    """The name of result ``i`` of a list."""
    return f"{name}[{i}]"


def has_lists(names: Iterable[str]) -> bool:
    return any(n.endswith("]") for n in names)


def out_arguments(names: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
    """Each argument, with its value: of a list, with a list."""
    out: dict[str, Any] = {}
    for name, v in zip(names, values, strict=True):
        base, is_item, _ = name.partition("[")
        if is_item:
            out.setdefault(base, []).append(v)
        else:
            out[name] = v
    return out
