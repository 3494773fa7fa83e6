"""The structures of arguments and results, as torch's JSON of a pytree spec.

A namedtuple is written as "module:class". Loading needs the module to be imported; the class is registered then."""

import json
import sys
from collections import namedtuple
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch.utils import _pytree as pytree

from ..errors import PackageError
from ..wrap.structure import children

DEPTH = 50  # Python reads no deeper nest of brackets from the text that is printed for a call


def text(spec: Any, what: str) -> str:
    """A pytree spec as JSON; a user's class needs a registered ``serialized_type_name``. Raises PackageError."""
    try:
        for node in _nodes(spec):
            _check(node)
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError) as e:
        raise PackageError(f"the {what}: the structure cannot be written: {e}; use tuples, lists and dicts") from e


def _nodes(spec: Any) -> Iterator[Any]:
    yield spec
    for child in children(spec):
        yield from _nodes(child)


def _check(spec: Any) -> None:
    """Registers a namedtuple's class. Raises ValueError for a class that a loader would not find."""
    cls = spec.context if spec.type is namedtuple else None
    if cls is not None and cls not in pytree.SUPPORTED_SERIALIZED_TYPES:
        module, path = cls.__module__, cls.__qualname__
        if _found(module, path) is not cls:
            raise ValueError(f"the namedtuple {path} is not what {module} has by that name, which a loader looks up")
        pytree._register_namedtuple(cls, serialized_type_name=f"{module}:{path}")
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(spec.type)
    if known is not None and known.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        raise ValueError(f"{spec.type.__module__}.{spec.type.__qualname__} was registered without a name to write")


def _found(module: str, path: str) -> Any:
    """An attribute of an imported module, or None."""
    try:
        return attrgetter(path)(sys.modules[module])
    except (AttributeError, KeyError):
        return None


def tree(text: str, leaves: int | None = None) -> Any:
    """The spec, of so many leaves. Raises PackageError for an unknown class, and for what is no such spec."""
    try:
        _register(json.loads(text)[1], DEPTH)
        spec = pytree.treespec_loads(text)
        if leaves is not None and spec.num_leaves != leaves:
            raise ValueError(f"{spec.num_leaves} leaves for {leaves} values")
        return spec
    except PackageError:
        raise
    except Exception as e:  # what the file holds instead may fail in any way
        what = f"the structure of its arguments or results cannot be read ({type(e).__name__}: {e})"
        raise PackageError(f"{what}; build the package again") from e


def _register(node: Any, depth: int) -> None:
    """Registers the namedtuples of the structure."""
    if not depth:
        raise PackageError(f"its arguments or results are nested {DEPTH} deep; build the package again")
    for child in node["children_spec"]:
        _register(child, depth - 1)
    kind, known = node["type"], pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    if kind == "collections.namedtuple" and (name := node["context"]) not in known:
        module, _, path = name.partition(":")
        if (cls := _found(module, path)) is None:
            where = f"import {module}" if path else "import the module that registers it"
            raise PackageError(f"its arguments or results have the namedtuple {name!r}: first {where}")
        pytree._register_namedtuple(cls, serialized_type_name=name)
    elif kind is not None and kind not in known:
        raise PackageError(f"its arguments or results have the class {kind!r}, which torch.utils._pytree does not know "
                           f"here: import the module that registers it")  # fmt: skip
