"""The structures of arguments and results: torch's own JSON of a pytree spec, read without importing or running
anything that it names. (``treespec_loads`` imports the modules of enums and of a defaultdict's factory.)

A namedtuple goes by "module:class". Whoever loads has the module imported, and need not register the class."""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from enum import Enum
from typing import Any

from torch.utils import _pytree as pytree

from ..errors import PackageError

_FACTORIES = ("list", "dict", "set", "tuple", "int", "float", "str", "bool")
_CALL = "builtins.tuple", ["builtins.tuple", "builtins.dict"]
_NO_CONTEXT = ("builtins.tuple", "builtins.list")
_KEYS = ("builtins.dict", "collections.OrderedDict")
_NAMEDTUPLE = "collections.namedtuple"


def text(spec: Any, what: str) -> str:
    """A pytree spec as JSON. (A class of the user's needs a ``serialized_type_name``, given when it is registered.)
    Raises PackageError."""
    try:
        _name_namedtuples(spec)
        return json.dumps(json.loads(pytree.treespec_dumps(spec)), sort_keys=True)
    except (NotImplementedError, TypeError, ValueError) as e:
        raise PackageError(f"the {what}: the structure cannot be written down: {e}; use tuples, lists and dicts") from e


def _name_namedtuples(spec: Any) -> None:
    cls = spec.context if spec.type is namedtuple else None
    if cls is not None and cls not in pytree.SUPPORTED_SERIALIZED_TYPES:
        module, path = cls.__module__, cls.__qualname__
        try:
            found = _found(module, path)
        except KeyError:
            found = None
        if found is not cls:
            raise ValueError(f"the namedtuple {path} is not what {module} has by that name, where a loader would look")
        pytree._register_namedtuple(cls, serialized_type_name=f"{module}:{path}")
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(spec.type)
    if known is not None and known.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        raise ValueError(f"{spec.type.__module__}.{spec.type.__qualname__} was registered without a name to write")
    for i in range(spec.num_children):
        _name_namedtuples(_child(spec, i))


def _child(spec: Any, i: int) -> Any:
    return spec.child(i) if hasattr(spec, "child") else spec.children_specs[i]


def _found(module: str, path: str) -> Any:
    """What a module that is loaded has; nothing of it runs. Raises KeyError."""
    found: Any = sys.modules[module]
    for name in path.split("."):
        found = vars(found)[name]
    return found


def arguments(text: str, leaves: int) -> Any:
    """The spec of a call: a tuple, and a dict by keyword. Raises PackageError."""
    spec = tree(text, leaves, "arguments")
    call = json.loads(text)[1]
    if call["type"] != _CALL[0] or [c["type"] for c in call["children_spec"]] != _CALL[1]:
        raise PackageError("the structure of its arguments is no call's: build it again")
    return spec


def tree(text: str, leaves: int, what: str) -> Any:
    """The spec, of so many leaves. Raises PackageError."""
    try:
        _, root = json.loads(text)
        _check(root)
        spec = pytree.treespec_loads(text)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError, RecursionError) as e:
        said = f"{type(e).__name__}: {e}"
        raise PackageError(f"the structure of its {what} makes no sense ({said:.200}): build it again") from e
    if spec.num_leaves != leaves:
        raise PackageError(f"the structure of its {what} has {spec.num_leaves} leaves, not {leaves}: build it again")
    return spec


def _check(node: Any) -> None:
    kind, context, children = node["type"], node["context"], node["children_spec"]
    for child in children:
        _check(child)
    if kind is None:
        if context is not None or children:
            raise ValueError("a leaf with something in it")
        return
    known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(kind)
    if known is None or kind == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        raise PackageError(f"its arguments or results have the class {kind!r:.80}, which torch.utils._pytree does not "
                           f"know here: import the module that registers it")  # fmt: skip
    if kind == "collections.defaultdict":
        if context["default_factory_module"] != "builtins" or context["default_factory_name"] not in _FACTORIES:
            factory = context["default_factory_name"]
            raise ValueError(f"a defaultdict of {factory!r:.80}; one of {', '.join(_FACTORIES)}")
        _keys(context["dict_context"], children)
    elif kind == _NAMEDTUPLE:
        _check_namedtuple(context, children)
    elif pytree.SUPPORTED_SERIALIZED_TYPES[known].from_dumpable_context is None:
        found = json.loads(context, object_hook=_enum)
        if kind in _NO_CONTEXT and found is not None:
            raise ValueError(f"{kind} of {found!r:.80}")
        if kind in _KEYS:
            _keys(found, children)


def _check_namedtuple(name: Any, children: Any) -> None:
    cls = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    if cls is None:
        module, _, path = name.partition(":")
        if module not in sys.modules or not path:
            where = f"import {module}" if path else "import the module that registers it"
            raise PackageError(f"its arguments or results have the namedtuple {name!r:.80}: first {where}")
        cls = _found(module, path)
        if not (isinstance(cls, type) and issubclass(cls, tuple) and isinstance(vars(cls).get("_fields"), tuple)):
            raise ValueError(f"{name!r:.80} is no namedtuple")
        pytree._register_namedtuple(cls, serialized_type_name=name)
    if len(getattr(cls, "_fields", ())) != len(children):
        raise ValueError(f"a namedtuple {name!r:.80} of {len(children)} values")


def _keys(keys: Any, children: Any) -> None:
    if not isinstance(keys, list) or len(keys) != len(children) or len(set(keys)) != len(keys):
        raise ValueError(f"a dict of {len(children)} values and the keys {keys!r:.80}")


def _enum(x: dict[str, Any]) -> Any:
    """As ``pytree.enum_object_hook``, for what is loaded already and is an enum."""
    if "__enum__" not in x:
        return x
    module, _, path = x["fqn"].partition(":")
    if module not in sys.modules:
        raise PackageError(f"its arguments or results have the enum {path!r:.80} of {module!r:.80}: import that first")
    found = _found(module, path)
    if not (isinstance(found, type) and issubclass(found, Enum)):
        raise ValueError(f"{path!r:.80} is no enum")
    return found.__members__[x["name"]]
