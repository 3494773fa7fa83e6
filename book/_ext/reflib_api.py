"""The API's pages: autodoc, over docstrings in this project's plain form.

    model: what it takes, and what that means;
        an indented line goes on.
    args, kwargs: two of a kind.  options: a gap begins the next one on the same line.

becomes a definition list; `names` in single backticks become code; everything else is reStructuredText already.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENTRY = re.compile(r"^((?:\*{0,2}[a-z_]\w*, )*\*{0,2}[a-z_]\w*): (\S.*)$")
CODE = re.compile(r"(``[^`]+``|:\w+:`[^`]+`)")


def api(_: Path, names: str) -> str:
    """A block for autodoc for each of 'reflib.compile,reflib.load'."""
    return "\n\n".join(map(block, names.split(",")))


def block(name: str) -> str:
    home, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(home), last)
    kind = "class" if inspect.isclass(thing) else "function"
    if kind == "class" and issubclass(thing, Exception):
        kind = "exception"
    options = {"class": "   :members:\n", "exception": "   :show-inheritance:\n"}.get(kind, "")
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n{options}```"


def api_lab(_: Path) -> str:
    """Everything that `reflib.lab` exports, under a heading for each of its modules."""
    from reflib import lab

    homes = sorted((module, name) for name, module in lab._HOME.items())
    text = []
    for module, group in itertools.groupby(homes, key=lambda x: x[0]):
        told = ast.get_docstring(ast.parse((Path(lab.__file__).parent / f"{module}.py").read_text())) or ""
        text.append(f"## {module.replace('_', ' ').capitalize()}\n\n{told.split(chr(10) * 2)[0]}")
        text += [block(f"reflib.lab.{name}") for _, name in group]
    return "\n\n".join(text)


def process_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """autodoc's hook: rewrites the lines in place."""
    lines[:] = to_rst(lines)


def to_rst(lines: list[str]) -> list[str]:
    """The docstring's lines as reStructuredText."""
    out: list[str] = []
    literal = False
    for paragraph in paragraphs(lines):
        indented = paragraph[0].startswith(" ")
        if paragraph[0].startswith(">>>") or (literal and indented):
            out += [*paragraph, ""]
            continue
        literal = paragraph[-1].rstrip().endswith("::")
        out += [line for part in entries(paragraph) for line in (*part, "")]
    return out


def paragraphs(lines: list[str]) -> Iterator[list[str]]:
    for empty, group in itertools.groupby(lines, key=lambda line: not line.strip()):
        if not empty:
            yield list(group)


def entries(paragraph: list[str]) -> Iterator[list[str]]:
    """The pieces of a paragraph: text, and definitions of what stands before a colon."""
    text: list[str] = []
    defined = False
    for line in itertools.chain.from_iterable(re.split(r"(?<=\S) {2,}(?=[a-z_]\w*: )", full) for full in paragraph):
        found = ENTRY.match(line)
        if found:
            if text:
                yield text
            names = ", ".join(f"``{n}``" for n in found.group(1).split(", "))
            text, defined = [names, f"    {inline(found.group(2))}"], True
        elif defined and line.startswith(" "):
            text.append(f"    {inline(line.strip())}")
        else:
            if defined:
                yield text
                text, defined = [], False
            text.append(inline(line))
    if text:
        yield text


def inline(line: str) -> str:
    """Code in single backticks as code; stars and underscores that mean themselves, escaped."""
    pieces = CODE.split(line)
    for i in range(0, len(pieces), 2):
        spans = re.split(r"(?<!`)`([^`]+)`(?!`)", pieces[i])
        for j in range(0, len(spans), 2):
            text = re.sub(r"(?<!\*)\*(?!\*)", r"\\*", spans[j])
            spans[j] = re.sub(r"(\w)_(?!\w)", r"\1\\_", text)
        pieces[i] = "".join(f"``{s}``" if j % 2 else s for j, s in enumerate(spans))
    return "".join(pieces)


PAGES = {"api": api, "api-lab": api_lab}
