"""Executes the cells that only show recorded rows again after a recording has changed, without a GPU.

Such cells have the tag `recorded-rows`. They may use the parameters, the results of the set-up cell, and other tagged
cells. All other outputs stay as recorded.
"""

import tempfile
from pathlib import Path

import nbformat

from reflib.errors import LabError
from reflib.lab import executing
from reflib.lab import notebook as nb

TAG = "recorded-rows"


def refill(path: Path) -> int:
    """Execute the tagged cells of the notebook on the CPU and write their outputs into it; returns their number. The
    stamp, a hash of the code cells, is unchanged."""
    notebook = nb.read(path)
    tagged = {cell.id for cell in notebook.cells if TAG in cell.metadata.get("tags", [])}
    if not tagged:
        return 0
    with tempfile.TemporaryDirectory(prefix="rl-", dir=executing.short_folder()) as folder:
        part = Path(folder) / path.name
        nbformat.write(nbformat.from_dict({**notebook, "cells": needed(notebook, tagged)}), part)
        result = executing.execute(part, Path(folder) / "out", {}, "cpu", False, {"CUDA_VISIBLE_DEVICES": ""})
        if result.status != "ok":
            raise LabError(f"{path.name}: {result.error}")
        filled = nb.read(Path(folder) / "out" / "notebooks" / path.name)
    outputs = {cell.id: cell.get("outputs", []) for cell in filled.cells}
    for cell in notebook.cells:
        if cell.id in tagged:
            cell.outputs = outputs[cell.id]
    nb.write(notebook, path)
    return len(tagged)


def needed(notebook: nb.Notebook, tagged: set[str]) -> list[nbformat.NotebookNode]:
    """Code cells up to the one with `lab.setup`, and the tagged ones."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    last = next((i for i, cell in enumerate(code) if "lab.setup(" in cell.source), -1)
    return [cell for i, cell in enumerate(code) if i <= last or cell.id in tagged]
