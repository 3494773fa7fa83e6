"""What figures that are moved share: native controls, a sentence that follows them, and the numbers behind a figure.

    slider(...), pick(...)     parameters of Vega-Lite, bound to HTML inputs: a keyboard works them as a mouse does
    moving(views, ...)         the specification of a figure, the same in Lab and in the book
    numbers(spec)              its data as tables, folded

What a figure says after each move is the parameter ``says``: the picture has it as its title, and the book gives it to
screen readers as well (assets/reflib-vega.js).
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from reflib.errors import LabError
from reflib.lab.rows import html_table, show_plain, text_table

SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
WIDTH = 430  # pixels; the book narrows it for a phone
FAINT = 0.3  # opacity of what has not happened yet

Spec = dict[str, Any]


def slider(name: str, label: str, low: float, high: float, step: float, value: float) -> Spec:
    """A parameter that a range input moves: arrow keys by one `step`."""
    return {
        "name": name, "value": value,
        "bind": {"input": "range", "min": low, "max": high, "step": step, "name": f"{label} "},
    }  # fmt: skip


def pick(name: str, label: str, options: Sequence[Any], value: Any = None) -> Spec:
    """A parameter picked from a list; the first one where no `value` is given."""
    chosen = options[0] if value is None else value
    return {"name": name, "value": chosen, "bind": {"input": "select", "options": list(options), "name": f"{label} "}}


def text(value: Any) -> str:
    """`value` as a literal of a Vega expression."""
    return json.dumps(value, ensure_ascii=False)


def by_step(signal: str, words: Sequence[str]) -> str:
    """The expression for words[signal], whose signal is a whole number; past the end, the last."""
    return f"{text(list(words))}[min({signal}, {len(words) - 1})]"


def moving(
    views: Sequence[Spec],
    *,
    params: Sequence[Spec],
    says: Sequence[str],
    data: Mapping[str, Sequence[Mapping[str, Any]]],
    alt: str,
    caption: str,
) -> Spec:
    """A figure of ``views``, one below the other. ``says``: a Vega expression a line. Raises LabError without caption
    or words."""
    if not caption.strip() or not alt.strip():
        raise LabError("a figure needs a caption and an alt text")
    first, *rest = views
    title = {"text": {"expr": "says"}, "anchor": "start", "fontSize": 12, "fontWeight": "normal", "lineHeight": 16}
    return {
        "$schema": SCHEMA,
        "description": alt,
        "usermeta": {"caption": caption, "fit": True, "embedOptions": {"renderer": "svg"}},  # its words can be found
        "params": [*params, {"name": "says", "expr": f"[{', '.join(says)}]"}],
        "datasets": {name: [dict(line) for line in lines] for name, lines in data.items()},
        "vconcat": [{"width": WIDTH, "title": title, **first}, *({"width": WIDTH, **view} for view in rest)],
        "config": {"concat": {"spacing": 10}, "axis": {"gridOpacity": 0.4}},
    }


def values(lines: Sequence[Mapping[str, Any]], *, digits: int = 4) -> list[dict[str, Any]]:
    """Lines for a figure: numbers to so many digits, which keeps it small."""
    return [
        {k: float(f"{v:.{digits}g}") if isinstance(v, float) else v for k, v in line.items() if v is not None}
        for line in lines
    ]


class Numbers:
    """The datasets of a figure as tables, folded: who cannot see it, or wants a number out of it, opens them."""

    def __init__(self, spec: Spec) -> None:
        self.tables = {name: lines for name, lines in spec.get("datasets", {}).items() if lines}

    def __repr__(self) -> str:
        return "\n\n".join(f"{name}\n{text_table(*_cells(lines))}" for name, lines in self.tables.items())

    def _repr_html_(self) -> str:
        parts = "".join(
            f"<p><em>{html.escape(name)}</em></p>{html_table(*_cells(lines))}" for name, lines in self.tables.items()
        )
        return f"<details><summary>The numbers behind the figure</summary>{parts}</details>"


def _cells(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    heads = list(dict.fromkeys(key for line in lines for key in line))
    return heads, [[show_plain(line.get(head, "")) for head in heads] for line in lines]
