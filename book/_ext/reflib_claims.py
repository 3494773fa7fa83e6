"""Claims as boxes: what ``lab.claim`` and ``lab.check`` printed is text in an output, whose lines a page cuts.

A recorded output stays as it is; on the page each claim's lines become a box of wrapped text, green where it holds.
A code cell that was changed or added after the recording has no execution count, and says so in place of an output.
A listing or a text of more than `LONG` lines in an output is folded.
"""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

# The mark at the beginning of a line -> the box's class. Indented lines behind it belong to it.
KINDS = {"✓": "holds", "✗": "fails", "?": "unmeasured"}
UNRECORDED = (
    "this cell is newer than the recording of this page. Run it to see what it prints; the text around it says what to "
    "look for."
)
LONG = 45  # lines of a listing that is not folded
LONG_WORD = re.compile(r"[^\s<>]{32,}(?=[^<>]*<)")  # a kernel's name, in a table: it would push numbers out of sight
BREAK = re.compile(r"[_/.,:=(\[-]|[^\W_]{24}(?=[^\W_]{8})")  # behind which it may be broken
FRAME = '<table class="dataframe"'
MANY = 8  # columns of a table that is set smaller
CLAIM = re.compile(r"^(✓|✗|\?) ([^:\n]+): (.*)\n?((?:  .*\n?)*)", re.M)


class Boxes(SphinxPostTransform):
    """After MyST-NB has chosen among outputs: a stream's text is cut where claims begin and end, long listings are
    folded, long words in tables may be broken, and below each code cell that the recording did not execute is a
    sentence that says so."""

    default_priority = 20

    def run(self, **kwargs: Any) -> None:
        if not self.env.docname.startswith("notebooks/"):
            return
        for block in list(self.document.findall(nodes.literal_block)):
            text = block.astext()
            if "output" in block["classes"] and CLAIM.search(text) and block.parent is not None:
                block.parent.replace(block, pieces(block, text))
            elif in_output(block) and (lines := text.count("\n") + 1) > LONG:
                block.parent.replace(block, folded(block, lines))
        for table in list(self.document.findall(nodes.raw)):
            if FRAME in (text := table.astext()):
                table.parent.replace(table, nodes.raw("", readable(text), **table.attributes))
        for cell in list(self.document.findall(nodes.container)):
            if cell.get("nb_element") == "cell_code" and cell.get("exec_count") is None:
                cell += nodes.raw("", box("?", "Not recorded yet", UNRECORDED, ""), format="html")


def readable(table: str) -> str:
    """Long words may be broken, a number and its spread may not, and many columns are set smaller."""
    table = LONG_WORD.sub(lambda word: BREAK.sub(r"\g<0><wbr>", word[0]), table).replace(" ±", "&nbsp;±")
    first, *others = table.split(FRAME)
    wide = [other.partition("</tr>")[0].count("<th") >= MANY for other in others]
    return first + "".join(FRAME[:-1] + (' reflib-wide"' if w else '"') + o for w, o in zip(wide, others, strict=True))


def in_output(block: nodes.Node) -> bool:
    parent = block.parent
    while parent is not None and parent.get("nb_element") != "cell_code_output":
        parent = parent.parent
    return parent is not None


def folded(block: nodes.Node, lines: int) -> list[nodes.Node]:
    """The block behind a line that unfolds it."""
    begin = f'<details class="reflib-long"><summary>{lines:,} lines</summary>'
    return [nodes.raw("", begin, format="html"), block, nodes.raw("", "</details>", format="html")]


def pieces(block: nodes.literal_block, text: str) -> list[nodes.Node]:
    """The block's text between claims in blocks like it, and the claims."""
    out: list[nodes.Node] = []
    at = 0
    for found in [*CLAIM.finditer(text), None]:
        between = text[at : found.start() if found else len(text)]
        if between.strip():
            out.append(nodes.literal_block(between, between, **block.attributes))
        if found:
            at = found.end()
            out.append(nodes.raw("", box(*found.groups()), format="html"))
    return out


def box(mark: str, verdict: str, claim: str, more: str) -> str:
    lines = "".join(f"<p>{html.escape(line.strip())}</p>" for line in more.splitlines() if line.strip())
    said = f"<p><strong>{mark} {html.escape(verdict)}:</strong> {html.escape(claim)}</p>"
    return f'<div class="reflib-claim {KINDS[mark]}">{said}{lines}</div>'


def setup(app: Sphinx) -> None:
    app.add_post_transform(Boxes)
