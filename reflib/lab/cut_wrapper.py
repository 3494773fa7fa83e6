"""Truncated wrappers, which execute the first statements of a call and return.

The time difference between two of them is the cost of the statements between, with no clock inside the wrapper.
"""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

from reflib import pipeline
from reflib.errors import LabError
from reflib.wrap.cpp import CppPrinter
from reflib.wrap.python import PythonPrinter

PRINTERS: dict[str, Any] = {"python": PythonPrinter, "cpp": CppPrinter}
HEADS = {"python": "def call(", "cpp": 'extern "C" int32_t reflib_call('}
NOT_ALONE = re.compile(r"\s*(//.*|run\.step\(.*\);)?")  # a comment or a step number: joined to the next line
DECLARED = re.compile(r"\s*(Run|Tensor) ")


def statements(text: str, language: str) -> list[str]:
    """The statements of a wrapper's function in order, each with its block (except `with`)."""
    lines = _body(text, language)[1]
    return _cpp(lines) if language == "cpp" else _python(lines)


def cut(text: str, language: str, keep: int) -> str:
    """The wrapper truncated after `keep` statements; it returns nothing. LabError if `keep` is out of range."""
    before, _, after = _body(text, language)
    every = statements(text, language)
    if not 0 <= keep <= len(every):
        raise LabError(f"keep is {keep}; the wrapper has {len(every)} statements")
    kept = every[:keep]
    if language == "cpp":
        return "\n".join([*before, *kept, *after]) + "\n"
    if keep < len(every):
        nearest = every[keep]
        kept = [*kept, nearest[: len(nearest) - len(nearest.lstrip())] + "return ()"]
    return "\n".join([*before, *kept]) + "\n"


def cut_graphs(e: Any, language: str) -> list[tuple[str, Callable[[list], Any]]]:
    """(statement, compiled graph that returns after it) per statement; the first entry ("") executes none."""
    options = e.stages.options.but(wrapper=language)
    text = _rebuilt(e, options, language, None)[0]
    labels = ["", *statements(text, language)]
    return [(label, _rebuilt(e, options, language, keep)[1]) for keep, label in enumerate(labels)]


def _rebuilt(e: Any, options: Any, language: str, keep: int | None) -> tuple[str, Callable[[list], Any]]:
    """Run all stages again and truncate the printed wrapper: (its text, the callable)."""
    printer = PRINTERS[language]
    whole = printer.print

    def shortened(self: Any) -> str:
        text = whole(self)
        return text if keep is None else cut(text, language, keep)

    with mock.patch.object(printer, "print", shortened):
        stages = pipeline.run(e.graph, options)
    assert stages.wrapper is not None and stages.call is not None
    return stages.wrapper, stages.call


def _body(text: str, language: str) -> tuple[list[str], list[str], list[str]]:
    """The lines before the function's statements, of the statements, and after them."""
    lines = text.rstrip().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(HEADS[language])) + 1
    if language == "python":
        return lines[:begin], lines[begin:], []
    while DECLARED.match(lines[begin]):
        begin += 1
    end = lines.index("  return 0;", begin)
    return lines[:begin], lines[begin:end], lines[end:]


def _cpp(lines: list[str]) -> list[str]:
    found: list[str] = []
    depth, waiting = 0, ""
    for line in lines:
        if depth:
            found[-1] += "\n" + line
        elif NOT_ALONE.fullmatch(line):
            waiting += line + "\n"
            continue
        else:
            found.append(waiting + line)
            waiting = ""
        depth += line.count("{") - line.count("}")
    return found


def _python(lines: list[str]) -> list[str]:
    found: list[str] = []
    at = None  # indentation of the current statements (deeper after each `with`)
    for line in lines:
        if not line.strip():
            continue
        place = len(line) - len(line.lstrip())
        opened = bool(found) and found[-1].lstrip().startswith("with ")
        if found and not opened and (place > (at or 0) or line.lstrip().startswith("else:")):
            found[-1] += "\n" + line
            continue
        found.append(line)
        at = place
    return found
