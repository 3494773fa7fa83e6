"""`lab.show`: displays source code of the library, generated kernels and tables."""

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reflib.errors import LabError
from reflib.lab.machine import ROOT
from reflib.lab.rows import html_table, show_plain, text_table

FENCES = {"triton": "python", "python": "python", "cpp": "cpp", "c++": "cpp", "json": "json"}


class Listing:
    """Source text with a heading, as Markdown, which every front end highlights."""

    def __init__(self, title: str, source: str, language: str = "python") -> None:
        self.title, self.source, self.language = title, source.rstrip(), language

    def __repr__(self) -> str:
        return f"{self.title}\n\n{self.source}" if self.title else self.source

    def _repr_markdown_(self) -> str:
        fence = FENCES.get(self.language, self.language)
        ticks = "````" if "```" in self.source else "```"
        head = f"*{self.title}*\n\n" if self.title else ""
        return f"{head}{ticks}{fence}\n{self.source}\n{ticks}"


class HtmlTable:
    """A table, displayed as HTML."""

    def __init__(self, heads: Sequence[str], body: Sequence[Sequence[Any]]) -> None:
        self.heads = list(heads)
        self.body = [[show_plain(cell) for cell in line] for line in body]

    def __repr__(self) -> str:
        return text_table(self.heads, self.body)

    def _repr_html_(self) -> str:
        return html_table(self.heads, self.body)


def show(*things: Any) -> None:
    """Display each thing. Functions, classes and modules are shown as source.

    Anything with `.source` and `.language`, such as `e.kernels[0]`, is shown as a listing, a list of these as several.
    Other things are displayed as by the notebook.
    """
    for thing in things:
        for part in _parts(thing):
            display_thing(part)


def table(lines: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]], *heads: str) -> None:
    """Display a table: a list of dicts, or a list of rows and the headings."""
    if lines and isinstance(lines[0], Mapping):
        dicts = [dict(line) for line in lines if isinstance(line, Mapping)]
        keys = list(heads) or list(dict.fromkeys(k for d in dicts for k in d))
        display_thing(HtmlTable(keys, [[d.get(k, "") for k in keys] for d in dicts]))
    else:
        display_thing(HtmlTable(heads, [list(line) for line in lines]))


def listing(thing: Any) -> Listing | None:
    """The thing's source with its origin; None if it has no source."""
    if isinstance(thing, Listing):
        return thing
    if isinstance(getattr(thing, "source", None), str) and hasattr(thing, "language"):
        return Listing(str(getattr(thing, "name", "")), thing.source, str(thing.language))
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if not (inspect.isroutine(thing) or inspect.isclass(thing) or inspect.ismodule(thing)):
        return None
    try:
        source = textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        raise LabError(f"{thing!r} has no Python source to show") from None
    return Listing(_where(thing), source)


def _where(thing: Any) -> str:
    """`reflib/lab/timing.py: interleave`, without paths of this machine."""
    module = inspect.getmodule(thing)
    file = getattr(module, "__file__", None)
    name = "" if inspect.ismodule(thing) else getattr(thing, "__qualname__", "")
    if file is None:
        return name
    path = Path(file).resolve()
    if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
        place = path.relative_to(ROOT).as_posix()
    else:
        place = getattr(module, "__name__", "").replace(".", "/") + path.suffix
    return f"{place}: {name}" if name else place


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, list | tuple) and type(thing) in (list, tuple):
        return [part for item in thing for part in _parts(item)]
    return [listing(thing) or thing]


def display_thing(thing: Any) -> None:
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import display
    except ImportError:
        print(repr(thing))
        return
    if get_ipython() is None:
        print(repr(thing))
    else:
        display(thing)
