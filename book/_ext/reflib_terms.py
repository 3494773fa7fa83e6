"""Links from chapters to the glossary: the first time that a chapter's prose uses a term, the word becomes a link. Its
title, which a browser shows on hover and a screen reader can read, is the definition.

Chapters stay plain Markdown, which reads well in JupyterLab too; what they would otherwise say with a role is added
here. Headings, code, links and captions are left alone.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

CLOSED = (
    nodes.literal, nodes.reference, nodes.title, nodes.caption, nodes.math, nodes.table, addnodes.pending_xref,
)  # fmt: skip


class FirstUses(SphinxPostTransform):
    """Before references are resolved: text nodes of a notebook, in order."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        if not self.env.docname.startswith("notebooks/"):
            return
        terms = {name.lower(): target for name, target in glossary(self.env).items()}
        self.told = definitions(self.env.get_doctree("book/glossary"))
        wanted = dict(terms)
        for text in list(self.document.findall(nodes.Text)):
            if not wanted:
                return
            if not inside(text, nodes.paragraph) or any(inside(text, kind) for kind in CLOSED) or in_strip(text):
                continue
            self.link(text, wanted, terms)

    def link(self, text: nodes.Text, wanted: dict[str, str], terms: dict[str, str]) -> None:
        """Split the text at terms not linked yet; every spelling of one counts as that one."""
        lowered = text.lower()
        here = [name for name in wanted if name in lowered]  # few: a pattern of all terms takes long to compile
        if not here:
            return
        longest = "|".join(map(re.escape, sorted(here, key=len, reverse=True)))
        # a whole word, no part of a file's name; after "is" it is a verb's form (a loop is spread over programs)
        pattern = re.compile(rf"(?i)(?<!\bis )(?<!\bare )(?<![\w./-])({longest})(s?)(?![\w/-]|\.\w)")
        pieces: list[nodes.Node] = []
        at = 0
        for found in pattern.finditer(text):
            name = found.group(1).lower()
            if name not in wanted:
                continue  # linked by an earlier match of this same text
            for same in [n for n, target in terms.items() if target == terms[name]]:
                wanted.pop(same, None)
            pieces += [nodes.Text(text[at : found.start()]), self.reference(found.group(0), terms[name])]
            at = found.end()
        if pieces and text.parent is not None:
            text.parent.replace(text, [*pieces, nodes.Text(text[at:])])

    def reference(self, text: str, anchor: str) -> nodes.reference:
        place = f"{self.app.builder.get_relative_uri(self.env.docname, 'book/glossary')}#{anchor}"
        told = self.told.get(anchor, "")
        return nodes.reference("", text, internal=True, refuri=place, reftitle=told, classes=["reflib-term"])


def in_strip(text: nodes.Text) -> bool:
    """Is it in the row of stages under a chapter's title?"""
    paragraph = text.parent
    while not isinstance(paragraph, nodes.paragraph):
        paragraph = paragraph.parent
    return paragraph.astext().count("→") >= 5


def glossary(env: Any) -> dict[str, str]:
    """{term: its anchor} of the glossary's page."""
    objects = env.get_domain("std").objects
    return {name: anchor for (kind, name), (_, anchor) in objects.items() if kind == "term"}


def definitions(page: nodes.document) -> dict[str, str]:
    """{a term's anchor: its definition as one line} of the glossary."""
    found: dict[str, str] = {}
    for item in page.findall(nodes.definition_list_item):
        told = " ".join(" ".join(d.astext() for d in item.findall(nodes.definition)).split())
        found |= {anchor: told for term in item.findall(nodes.term) for anchor in term["ids"]}
    return found


def inside(node: nodes.Node, kind: type[nodes.Node]) -> bool:
    parent = node.parent
    while parent is not None and not isinstance(parent, kind):
        parent = parent.parent
    return parent is not None


def setup(app: Sphinx) -> None:
    app.add_post_transform(FirstUses)
