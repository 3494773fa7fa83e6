"""Seams: the named places where the core is extended without being changed.

A seam is a table that a core file declares beside the code that reads it, with a comment that says what plugs in there
and what happens where nothing does::

    BEFORE = Seam("fuse.BEFORE")      # (Fused, Options, Target) -> Fused, before grouping; none: grouped as they are

The core may put entries of its own in it. The compiler ring plugs in by name: ``reflib/plugins.py`` is one table of
"module:attribute" for every seam, registered by ``plug`` when ``reflib`` is imported. That costs nothing: a module is
imported when its entry is first used. In the core alone there is no such table, and every seam holds what the core put
there.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

_plugged: dict[str, Mapping[str, str]] = {}


def plug(table: Mapping[str, Mapping[str, str]]) -> None:
    """``{seam: {key: "module:attribute"}}``, modules relative to this package; without ``:attribute``, the module."""
    _plugged.update(table)


class Seam(Mapping[str, Any]):
    """What is plugged in, by key, in the order of the tables: the core's own entries, then others. An entry with the
    key of one of the core's replaces it."""

    def __init__(self, name: str, own: Mapping[str, Any] | None = None):
        self.name, self.own = name, dict(own or {})
        self._found: dict[str, Any] = {}

    def _keys(self) -> dict[str, str]:
        return dict.fromkeys(self.own, "") | dict(_plugged.get(self.name, {}))

    def __getitem__(self, key: str) -> Any:
        path = self._keys()[key]
        if not path:
            return self.own[key]
        if path not in self._found:
            self._found[path] = load(path)
        return self._found[path]

    def __contains__(self, key: object) -> bool:
        return key in self._keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())


def load(path: str) -> Any:
    """The object at "module:attribute"."""
    module, _, attribute = path.partition(":")
    found = import_module("." + module, __package__)
    return getattr(found, attribute) if attribute else found
