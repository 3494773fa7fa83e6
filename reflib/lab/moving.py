"""Shared parts of interactive figures: native controls, a text that follows them, and the data as tables.

    slider(...), pick(...)     parameters of Vega-Lite, bound to HTML inputs, which also work by keyboard
    stacked(views, ...)        the specification of a figure, the same in Lab and in the book
    moving(views, ...)         one with such a text
    emit(spec)                 displays it, and its data as tables, folded

The parameter ``says`` is the text after each move: it is the title of the figure, and the book also announces it to
screen readers (assets/reflib-vega.js).
"""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from reflib.errors import LabError
from reflib.lab.rows import html_table, show_plain, text_table
from reflib.lab.showing import display_thing

MIME = "application/vnd.vegalite.v5+json"
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
WIDTH = 430  # pixels; the book narrows it for a phone
FAINT = 0.3  # opacity of future segments

Spec = dict[str, Any]


def slider(name: str, label: str, low: float, high: float, step: float, value: float) -> Spec:
    """A parameter bound to a range input; arrow keys move it by one `step`."""
    return {
        "name": name, "value": value,
        "bind": {"input": "range", "min": low, "max": high, "step": step, "name": f"{label} "},
    }  # fmt: skip


def pick(name: str, label: str, options: Sequence[Any], value: Any = None) -> Spec:
    """A parameter bound to a select list; initially `value`, or the first option."""
    chosen = options[0] if value is None else value
    return {"name": name, "value": chosen, "bind": {"input": "select", "options": list(options), "name": f"{label} "}}


def text(value: Any) -> str:
    """`value` as a literal of a Vega expression."""
    return json.dumps(value, ensure_ascii=False)


def by_step(signal: str, words: Sequence[str]) -> str:
    """The expression for words[signal], for an integer signal; beyond the end, the last one."""
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
    """The spec of a figure with a text that follows its controls. ``says``: one Vega expression per line of it. The
    rest: as ``stacked``."""
    first, *rest = views
    title = {"text": {"expr": "says"}, "anchor": "start", "fontSize": 12, "fontWeight": "normal", "lineHeight": 16}
    shown = [*params, {"name": "says", "expr": f"[{', '.join(says)}]"}]
    return stacked([{"title": title, **first}, *rest], data=data, alt=alt, caption=caption, params=shown)


def stacked(
    views: Sequence[Spec],
    *,
    data: Mapping[str, Sequence[Mapping[str, Any]]],
    alt: str,
    caption: str,
    spacing: int = 10,
    **more: Any,
) -> Spec:
    """The spec of a figure with ``views`` below each other. ``more``: of the whole figure. Raises LabError without
    caption or alt text."""
    if not caption.strip() or not alt.strip():
        raise LabError("a figure needs a caption and an alt text")
    return {
        "$schema": SCHEMA,
        "description": alt,
        "usermeta": {"caption": caption, "fit": True, "embedOptions": {"renderer": "svg"}},  # SVG text is searchable
        "datasets": {name: [dict(line) for line in lines] for name, lines in data.items()},
        "vconcat": [{"width": WIDTH, **view} for view in views],
        "config": {"concat": {"spacing": spacing}, "axis": {"gridOpacity": 0.4}},
        **more,
    }


def values(lines: Sequence[Mapping[str, Any]], *, digits: int = 4) -> list[dict[str, Any]]:
    """Data for a figure, with floats rounded to ``digits`` significant digits."""
    return [
        {k: float(f"{v:.{digits}g}") if isinstance(v, float) else v for k, v in line.items() if v is not None}
        for line in lines
    ]


class Numbers:
    """The datasets of a figure as folded tables, for screen readers and for exact numbers."""

    def __init__(self, spec: Spec) -> None:
        self.tables = {name: lines for name, lines in spec.get("datasets", {}).items() if lines}

    def __repr__(self) -> str:
        return "\n\n".join(f"{name}\n{text_table(*_cells(lines))}" for name, lines in self.tables.items())

    def _repr_html_(self) -> str:
        parts = "".join(
            f"<p><em>{html.escape(name)}</em></p>{html_table(*_cells(lines))}" for name, lines in self.tables.items()
        )
        return f"<details><summary>The numbers behind the figure</summary>{parts}</details>"


class Drawn:
    """A Vega-Lite figure, drawn by Lab and by the book; elsewhere its alt text is shown."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.alt = spec, spec["description"]
        self.caption = spec.get("usermeta", {}).get("caption", "")

    def __repr__(self) -> str:
        return f"[figure: {self.alt}]\n{self.caption}".rstrip()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        # without text/html, which Lab would prefer to the interactive figure
        return {MIME: self.spec, "text/plain": repr(self)}


class Explorer(Drawn):
    """A figure whose data follow as folded tables, in a notebook."""

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self._repr_mimebundle_(), raw=True)
        display(Numbers(self.spec))


def emit(spec: Spec) -> Explorer:
    """Display the figure with this specification, which has its alt text and its caption."""
    found = Explorer(spec)
    display_thing(found)
    return found


def _cells(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    heads = list(dict.fromkeys(key for line in lines for key in line))
    return heads, [[show_plain(line.get(head, "")) for head in heads] for line in lines]
