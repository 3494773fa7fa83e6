"""Finds notebooks and their parameters, for `reflib.batch`, which executes them."""

import ast
import contextlib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reflib.errors import LabError
from reflib.lab import machine
from reflib.lab import notebook as nb
from reflib.lab.executing import NotebookResult
from reflib.lab.params import Parameter, check_value, parse_parameters
from reflib.lab.rows import text_table

ROOT = machine.ROOT

# ---- which notebooks, with which parameters


def notebooks(root: Path = ROOT) -> list[Path]:
    """The chapters in the book's order, then notebooks that are not in the book."""
    import yaml

    listed: list[str] = []
    toc = root / "book" / "_toc.yml"
    if toc.exists():
        listed = re.findall(r"notebooks/([\w-]+)", json.dumps(yaml.safe_load(toc.read_text())))
    there = {p.stem: p for p in sorted((root / "notebooks").glob("*.ipynb"))}
    return [there[s] for s in listed if s in there] + [p for s, p in there.items() if s not in listed]


def parameters_of(notebook: nb.Notebook) -> dict[str, Parameter]:
    """The parameters of a notebook: those of the cell tagged `parameters`, by the grammar of params.py.

    From a cell that does not follow it (`n = 4` in a user's notebook), names of type "any". LabError on bad syntax.
    """
    for cell in notebook.cells:
        if cell.cell_type != "code" or "parameters" not in cell.metadata.get("tags", []):
            continue
        try:
            lines = ast.parse(cell.source).body
        except SyntaxError as error:
            raise LabError(f"its parameters cell is no Python: line {error.lineno}: {error.msg}") from None
        try:
            return {p.name: p for p in parse_parameters(cell.source)}
        except (LabError, ValueError):
            targets = [target for line in lines for target in getattr(line, "targets", [getattr(line, "target", None)])]
            return {t.id: Parameter(t.id, "any", None, "") for t in targets if isinstance(t, ast.Name)}
    return {}


def fit(parameter: Parameter, value: Any) -> Any:
    """A value from a command line or a sweep file, converted to the declared type. LabError outside the domain."""
    name, declared = parameter.name, parameter.type
    given = value
    if isinstance(value, str) and declared != "str":
        with contextlib.suppress(ValueError):
            value = float(value) if declared == "float" else yaml_scalar(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {"int": isinstance(value, int) and number, "float": number, "bool": isinstance(value, bool)}
    if not fits.get(declared, True):
        raise LabError(f"parameter {name}={given}: the notebook declares it {declared}")
    if declared == "any":
        return value
    return check_value(parameter, float(value) if declared == "float" else value)


def yaml_scalar(text: str) -> Any:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float) else text


# ---- what commands share


def new_folder(parent: Path, name: str) -> Path:
    """Create parent/name, or name-2, name-3 etc. if it exists; safe against concurrent runs."""
    parent.mkdir(parents=True, exist_ok=True)
    for again in itertools.count(1):
        folder = parent / (name if again == 1 else f"{name}-{again}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder.resolve()
    raise AssertionError


def table(results: Sequence[NotebookResult]) -> str:
    """The closing table: notebook, device, seconds, status."""
    body = [[r.notebook, r.device, f"{r.seconds:.1f}", r.status] for r in results]
    return text_table(["notebook", "device", "seconds", "status"], body)


def shown(path: Path) -> str:
    """A path for messages: relative to the working folder if possible."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)
