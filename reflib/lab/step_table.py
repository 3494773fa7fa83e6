"""The steps of a wrapper program with both texts printed from them: Python on the left, C++ on the right.

The printers run step by step, so that each row shows the same step in both languages.
"""

import html
from collections.abc import Callable
from functools import partial
from typing import Any

from reflib.ir.printer import format_node
from reflib.plan import Branch, Call, Launch
from reflib.wrap.cpp import CppPrinter
from reflib.wrap.python import PythonPrinter

HEADS = ("Python", "C++")


class StepTable:
    """One row per step: a description, and its text in both languages."""

    def __init__(self, title: str, steps: list[tuple[str, str, str]]) -> None:
        self.title, self.steps = title, steps

    def __repr__(self) -> str:
        lines = [self.title]
        for what, *texts in self.steps:
            lines.append(f"-- {what}")
            for head, text in zip(HEADS, texts, strict=True):
                lines += [f"   {head:6} | {line}" for line in text.splitlines() or ["(nothing)"]]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """One full-width row per step with its two texts below, which wrap on a narrow screen."""
        cell = 'style="text-align:left;vertical-align:top;width:50%;padding:2px 6px"'
        pre = 'style="white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font-size:0.85em"'
        head = "".join(f'<th scope="col" {cell}>{h}</th>' for h in HEADS)
        body = ""
        for what, *texts in self.steps:
            shown = "".join(f"<td {cell}><pre {pre}>{html.escape(t) or '(nothing)'}</pre></td>" for t in texts)
            body += (
                f'<tr><th scope="rowgroup" colspan="2" style="text-align:left;padding:2px 6px">'
                f"<code>{html.escape(what)}</code></th></tr><tr>{shown}</tr>"
            )
        caption = f'<caption style="text-align:left">{html.escape(self.title)}</caption>'
        style = 'class="dataframe" style="width:100%;table-layout:fixed"'
        return f"<table {style}>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def step_table(e: Any, title: str = "One program of steps, printed twice") -> StepTable:
    """The steps of an Explanation whose kernels were generated. Nothing is built, so any target is possible."""
    program, plan, kernels = e.scheduled, e.stages.plan, e.stages.kernels
    printers: tuple[Any, Any] = (PythonPrinter(program, plan, kernels), CppPrinter(program, plan, kernels))
    python, cpp = (_said(p, p._entry) for p in printers)
    steps = [("entry", python, cpp)]
    for step in plan.steps:
        python, cpp = (_said(p, partial(p._step, step)) for p in printers)
        steps.append((_what(step), python, cpp))
    return StepTable(title, steps)


def _said(printer: Any, put: Callable[[], None]) -> str:
    """The lines that the printer adds, without the IR comments, which are in the step's heading."""
    before = len(printer.lines)
    put()
    lines = [line for line in printer.lines[before:] if not line.strip().startswith("//")]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    return "\n".join(line[indent:] for line in lines)


def _what(step: Any) -> str:
    """The step in one line; for a kernel or a call, its IR."""
    name = type(step).__name__
    if isinstance(step, Launch):
        return f"{name}: {_node(step.kernel.parts[0])}"
    if isinstance(step, Call):
        return f"{name}: {_node(step.extern)}"
    if isinstance(step, Branch):
        return f"{name}: {'; '.join(map(_what, step.then))}"
    buffer = getattr(step, "buffer", None)
    if buffer is not None:
        reuse = getattr(step, "reuse", None)
        return f"{name} {buffer}" + (f" from {reuse}" if reuse else "")
    return name


def _node(node: Any) -> str:
    return format_node(node).splitlines()[0].split("  #")[0].rstrip(" {")
