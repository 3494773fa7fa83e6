"""The structures of arguments and results: torch's own JSON of a pytree spec, read without importing or running
anything that it names. (``treespec_loads`` imports the modules of enums and of a defaultdict's factory.)"""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import Any

from torch.utils import _pytree as pytree

from ..errors import PackageError

_FACTORIES = ("list", "dict", "set", "tuple", "int", "float", "str", "bool")
_CALL = "builtins.tuple", ["builtins.tuple", "builtins.dict"]
_NO_CONTEXT = ("builtins.tuple", "builtins.list")
_KEYS = ("builtins.dict", "collections.OrderedDict")


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
    elif pytree.SUPPORTED_SERIALIZED_TYPES[known].from_dumpable_context is None:
        found = json.loads(context, object_hook=_enum)
        if kind in _NO_CONTEXT and found is not None:
            raise ValueError(f"{kind} of {found!r:.80}")
        if kind in _KEYS:
            _keys(found, children)


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
    found: Any = sys.modules[module]
    for name in path.split("."):
        found = vars(found)[name]
    if not (isinstance(found, type) and issubclass(found, Enum)):
        raise ValueError(f"{path!r:.80} is no enum")
    return found.__members__[x["name"]]
