"""Numbers in a chapter's prose that neither its outputs nor its code nor its rows have: those of an older recording, or
computed by hand. `make record` lists them, to be looked at."""

import re
from collections.abc import Iterable
from typing import Any

NUMBER = re.compile(r"(?<![\w.#/-])(\d[\d,]*(?:\.\d+)?)( ?(?:%|µs|ms|s\b|times|GB/s|TFLOP|MB|GB))?")
NO_PROSE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|\[?\w*#\d+|issue \d+|\$[^$]*\$", re.S)  # code, links, formulas
YEAR = re.compile(r"(19|20)\d\d")
LONG = 3  # digits of a number without a unit that is looked at
AROUND = 60  # characters of prose shown on either side


def unseen(notebook: Any, rows: Iterable[Any]) -> list[str]:
    """Each with the words around it. ``rows``: of the recording, as data."""
    values = [v for row in rows if isinstance(v := row.get("value"), int | float)]
    printed = {n for cell in notebook.cells if cell.cell_type == "code" for n in _numbers(_text(cell))}
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        prose = NO_PROSE.sub(" ", cell.source)
        for match in NUMBER.finditer(prose):
            number = match[1].replace(",", "").rstrip(".")
            digits = len(number.partition(".")[2])
            told = match[2] or len(number.replace(".", "")) >= LONG and not YEAR.fullmatch(number)
            if told and number not in printed and not any(round(v, digits) == float(number) for v in values):
                found.append(" ".join(prose[max(0, match.start() - AROUND) : match.end() + AROUND].split()))
    return found


def _text(cell: Any) -> str:
    """Source and outputs of a cell."""
    shown = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return "\n".join([cell.source, *shown])


def _numbers(text: str) -> set[str]:
    return {match[1].replace(",", "").rstrip(".") for match in NUMBER.finditer(text)}
