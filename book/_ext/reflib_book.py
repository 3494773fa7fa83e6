"""The book's Sphinx extension: what is computed from the tree, local scripts, figures of Vega-Lite.

Directives: `reflib-pipeline` (the stages as a picture), `reflib-recordings` (what was recorded where).
"""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

BOOK = Path(__file__).resolve().parent.parent

# stage: what it takes, what it returns. Sizes and "not yet written" are read from the code.
PIPELINE = (
    ("capture", "a model and its arguments", "a graph of ATen calls"),
    ("lower", "graph", "a program of loops, in the language of ir/"),
    ("fuse", "program", "groups that become one kernel each"),
    ("choose", "groups with alternatives", "the fastest one, as measured"),
    ("plan", "groups in order", "a schedule, with storage reused"),
    ("generate", "groups", "Triton or C++ source"),
    ("wrap", "kernels and schedule", "a callable"),
    ("package", "kernels for many GPUs", "a file that loads anywhere"),
)


def package_folder() -> Path:
    import reflib

    return Path(reflib.__file__).parent


def code_lines(folder: Path) -> int:
    """Lines that are neither blank nor a comment."""
    files = folder.rglob("*.py") if folder.is_dir() else []
    text = (line.strip() for f in files for line in f.read_text(encoding="utf-8").splitlines())
    return sum(1 for line in text if line and not line.startswith("#"))


def pipeline_svg() -> tuple[str, str]:
    """(the picture, its description in words). Colours are the page's, dark mode's too."""
    width, height, gap = 640, 54, 16
    sizes = {stage: code_lines(package_folder() / stage) for stage, _, _ in PIPELINE}
    parts = []
    for index, (stage, takes, returns) in enumerate(PIPELINE):
        y = index * (height + gap) + 4
        there = sizes[stage] > 5
        size = f"{sizes[stage]} lines" if there else "not yet written"
        dashes = "" if there else ' stroke-dasharray="5 4"'
        parts.append(
            f'<rect x="4" y="{y}" width="{width - 8}" height="{height}" rx="7" class="box"{dashes}/>'
            f'<text x="20" y="{y + 33}" class="stage">{stage}</text>'
            f'<text x="150" y="{y + 23}" class="what">{html.escape(takes)}</text>'
            f'<text x="150" y="{y + 43}" class="what">→ {html.escape(returns)}</text>'
            f'<text x="{width - 20}" y="{y + 23}" class="size">{size}</text>'
        )
        if index + 1 < len(PIPELINE):
            bottom = y + height
            parts.append(f'<path d="M 60 {bottom + 1} v {gap - 4} m -4 -5 l 4 5 l 4 -5" class="arrow"/>')
    words = "; ".join(f"{stage} takes {takes} and returns {returns}" for stage, takes, returns in PIPELINE)
    description = f"The pipeline, top to bottom: {words}."
    total = len(PIPELINE) * (height + gap)
    svg = (
        f'<svg viewBox="0 0 {width} {total}" role="img" aria-label="{html.escape(description)}" '
        f'class="reflib-pipeline" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
    return svg, description


class Pipeline(SphinxDirective):
    """A figure: the stages in order, each with what it takes and returns, and its length."""

    def run(self) -> list[nodes.Node]:
        total = sum(code_lines(package_folder() / part) for part in [s for s, _, _ in PIPELINE] + ["ir"])
        caption = (
            f"The pipeline is the architecture: one folder a stage, {total} lines of code in all with the "
            "language they share (ir/). Imports point only upwards. Drawn from the code itself."
        )
        svg, _ = pipeline_svg()
        figure = f'<figure class="reflib-figure">{svg}<figcaption>{caption}</figcaption></figure>'
        return [nodes.raw("", figure, format="html")]


class Recordings(SphinxDirective):
    """A table: each chapter, the device and versions of its outputs, and whether its code matches."""

    def run(self) -> list[nodes.Node]:
        from reflib.lab import notebook as nb
        from reflib.lab import runner

        rows = []
        for path in runner.notebooks(Path(self.env.srcdir)):
            book = nb.read(path)
            stamp = book.metadata.get("reflib") or {}
            versions = stamp.get("versions", {})
            state = "not recorded yet"
            if stamp:
                state = "code changed since" if nb.stamp_problem(book) else "matches the code cells"
            made_with = ", ".join(f"{k} {versions[k]}" for k in ("torch", "triton") if k in versions)
            link = f'<a href="../notebooks/{path.stem}.html">{path.stem}</a>'
            rows.append([link, stamp.get("device", ""), made_with, stamp.get("commit", ""), state])
        head = ["Chapter", "Recorded on", "With", "At commit", "Its outputs"]
        cells = "".join(f"<th>{h}</th>" for h in head)
        body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
        table = f'<table class="table"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
        return [nodes.raw("", f'<div class="reflib-scroll">{table}</div>', format="html")]


def page_scripts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Vega's scripts, on the pages that have a figure of it."""
    if doctree is not None and any("reflib-vega" in n.astext() for n in doctree.findall(nodes.raw)):
        for name in ("vega", "vega-lite", "vega-embed"):
            app.add_js_file(f"../vendor/vega/{name}.min.js")
        app.add_js_file("../vendor/reflib-vega.js")


def copy_assets(app: Sphinx, error: Exception | None) -> None:
    """vendor/ and our style sheet into the pages' folder."""
    if error is not None or app.builder.format != "html":
        return
    out = Path(app.outdir) / "vendor"
    shutil.copytree(BOOK / "vendor", out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("README.md"))
    for asset in (BOOK / "assets").iterdir():
        shutil.copy(asset, out / asset.name)


def vega_html(figure: Any) -> str:
    """A Vega-Lite figure as HTML: its JSON, for assets/reflib-vega.js, and its description in words."""
    spec = figure if isinstance(figure, dict) else json.loads(figure)
    described = html.escape(str(spec.get("description", "a figure with no description")))
    # "</" would end the script element in the middle of a string
    text = re.sub("</", r"<\\/", json.dumps(spec, sort_keys=True))
    role = "group" if spec.get("params") else "img"  # what has lists to pick from is more than a picture
    drawn = (
        f'<div class="reflib-vega" role="{role}" aria-label="{described}">'
        f'<script type="application/json">{text}</script></div>'
    )
    caption = (spec.get("usermeta") or {}).get("caption")
    if not caption:
        return drawn
    return f'<figure class="reflib-figure">{drawn}<figcaption>{html.escape(caption)}</figcaption></figure>'


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("reflib-pipeline", Pipeline)
    app.add_directive("reflib-recordings", Recordings)
    app.add_css_file("../vendor/reflib.css")
    app.connect("html-page-context", page_scripts)
    app.connect("build-finished", copy_assets)
    register_vega()
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


class VegaLite:
    """MyST-NB asks every renderer about every output; this one answers for Vega-Lite."""

    mime_priority_overrides = ()
    MIME = "application/vnd.vegalite.v5+json"

    @classmethod
    def handle_mime(cls, renderer: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        if inline or data.mime_type != cls.MIME:
            return None
        return [nodes.raw("", vega_html(data.content), format="html")]


def register_vega() -> None:
    """MyST-NB finds renderers among installed packages; ours is this file, so it is added by hand."""
    from myst_nb.core import render

    known = list(render.load_mime_renders())
    if VegaLite not in known:
        render.load_mime_renders.cache_clear()
        render.load_mime_renders = lambda: [*known, VegaLite]
