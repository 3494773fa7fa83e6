"""Sweep files: notebooks and values of their parameters.

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

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from reflib.errors import LabError

NOTEBOOKS = "notebooks"


@dataclass(frozen=True)
class Sweep:
    """Values to combine."""

    notebooks: tuple[str, ...] = ()
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    file: str = ""

    def where(self, name: str) -> str:
        """'sweep.yaml, key 'dtype': ' as the prefix of a message; '' without a file."""
        return f"{self.file}, key {name!r}: " if name in self.values else ""

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Sweep:
        """The inverse of `dataclasses.asdict` and JSON."""
        values = {name: tuple(found) for name, found in data["values"].items()}
        return Sweep(tuple(data["notebooks"]), values, data["file"])


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
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise LabError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    if document is None:
        raise LabError(f"{name} is empty: it needs lines such as `dtype: [float32, bfloat16]`")
    return [one(found, name) for found in (document if isinstance(document, list) else [document])]


def one(found: Any, name: str) -> Sweep:
    if not isinstance(found, dict):
        raise LabError(f"{name}: expected `parameter: values`, not {found!r:.80}")
    values = {str(key): tuple(v) if isinstance(v, list) else (v,) for key, v in found.items()}
    for key, listed in values.items():
        if not listed:
            raise LabError(f"{name}, key {key!r}: an empty list: nothing would be executed")
        for value in listed:
            if not isinstance(value, str | bool | int | float):
                raise LabError(f"{name}, key {key!r}: {value!r:.80} is not text, a number or a bool")
    return Sweep(tuple(map(str, values.pop(NOTEBOOKS, ()))), values, name)
