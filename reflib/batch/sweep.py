"""Sweep files: notebooks and values of their parameters. Errors contain the line and the key.

    file  := sweep | list of sweep
    sweep := { notebooks: NAME | [NAME, ...],  PARAMETER: VALUE | [VALUE, ...],  ... }

A notebook is executed once per combination of the values (the product of the lists) of its parameters. NAME is a
chapter's slug or the path of a notebook; without `notebooks`, all chapters are executed:

    notebooks: [measuring, fusion]
    device: cpu
    dtype: [float32, bfloat16]
    megabytes: [16, 64]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from reflib.errors import LabError

NOTEBOOKS = "notebooks"


@dataclass(frozen=True)
class Sweep:
    """Values to combine. `lines`: the line of each value in the file, if there is one."""

    notebooks: tuple[str, ...] = ()
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    file: str = ""
    lines: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def where(self, name: str, index: int = 0) -> str:
        """'sweep.yaml, line 4, key 'dtype': ' as the prefix of a message; '' without a file."""
        return f"{self.file}, line {self.lines[name][index]}, key {name!r}: " if name in self.lines else ""

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Sweep:
        """The inverse of `dataclasses.asdict` and JSON."""
        values = {name: tuple(found) for name, found in data["values"].items()}
        lines = {name: tuple(found) for name, found in data["lines"].items()}
        return Sweep(tuple(data["notebooks"]), values, data["file"], lines)


def read(path: Path) -> list[Sweep]:
    """The sweeps of a file. LabError if it is invalid."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LabError(f"no sweep file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LabError(f"{path} is not a text file in UTF-8") from None
    return parse(text, path.name)


def parse(text: str, name: str) -> list[Sweep]:
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise LabError(f"{name}, {f'line {mark.line + 1}: ' if mark else ''}not YAML: {error.problem}") from None
    except yaml.YAMLError as error:  # such as a control character
        raise LabError(f"{name}: not YAML: {error}") from None
    if document is None:
        raise LabError(f"{name} is empty: it needs lines such as `dtype: [float32, bfloat16]`")
    listed = document.value if isinstance(document, yaml.SequenceNode) else [document]
    return [one(node, name) for node in listed]


def one(node: yaml.Node, name: str) -> Sweep:
    if not isinstance(node, yaml.MappingNode):
        raise LabError(f"{name}, line {line_of(node)}: expected `parameter: values`, not {kind_of(node)}")
    notebooks: tuple[str, ...] = ()
    values: dict[str, tuple[Any, ...]] = {}
    lines: dict[str, tuple[int, ...]] = {}
    for key, value in node.value:
        called = key.value if isinstance(key, yaml.ScalarNode) else "?"
        here = f"{name}, line {line_of(key)}, key {called!r}: "
        if called in lines:
            raise LabError(f"{here}already given at line {lines[called][0]}")
        nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not nodes:
            raise LabError(f"{here}an empty list: nothing would be executed")
        lines[called] = tuple(line_of(n) for n in nodes)
        found = tuple(scalars(nodes, name, called))
        if called == NOTEBOOKS:
            notebooks = tuple(map(str, found))
        else:
            values[called] = found
    return Sweep(notebooks, values, name, lines)


def scalars(nodes: list[yaml.Node], name: str, key: str) -> Iterator[Any]:
    """The values. LabError unless each is one word or number."""
    loader = yaml.SafeLoader("")
    for node in nodes:
        here = f"{name}, line {line_of(node)}, key {key!r}: "
        if not isinstance(node, yaml.ScalarNode):
            raise LabError(f"{here}{kind_of(node)} is not a value; give a value, or a list of values")
        try:
            value = loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:  # an unknown tag, an invalid date
            raise LabError(f"{here}{node.value!r} is not a value: {getattr(error, 'problem', error)}") from None
        if not isinstance(value, str | bool | int | float):
            raise LabError(f"{here}{node.value!r} is not text, a number or a bool")
        yield value


def line_of(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def kind_of(node: yaml.Node) -> str:
    kinds = {yaml.MappingNode: "a mapping", yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value"}
    return kinds[type(node)]
