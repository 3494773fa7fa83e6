"""The book's Sphinx extension: pages that are data, local scripts, figures of Vega-Lite, the footer.

The directive `reflib-pipeline` draws the stages. A comment `<!-- generated: NAME -->` in a page of book/ becomes what
the function NAME of one of the other modules here makes.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the other modules of this folder

import reflib_api
import reflib_claims
import reflib_figure
import reflib_notices
import reflib_pages
import reflib_standing
import reflib_terms

BOOK = Path(__file__).resolve().parent.parent
MODULES = (reflib_pages, reflib_api, reflib_figure, reflib_notices, reflib_standing)

# What the theme brings along and no page uses: launch buttons, translations, maps for debugging its own scripts.
UNUSED = (
    "locales", "images", "sphinx-thebe.*", "play-solid.svg", "*webpack-macros.html", "scripts/*.map", "styles/*.map",
)  # fmt: skip

# stage (a folder): what it takes, what it returns. Sizes are read from the code.
PIPELINE = (
    ("capture", "a model and its arguments", "a graph of ATen calls"),
    ("lower", "graph", "a program of loops, in the language of ir/"),
    ("fuse", "program", "groups that become one kernel each"),
    ("autotune", "alternatives", "the fastest one, as measured"),
    ("schedule", "groups", "kernels, cut into blocks and launched"),
    ("plan", "kernels in order", "the same, with storage reused"),
    ("generate", "kernels", "Triton or C++ source"),
    ("wrap", "kernels and plan", "a callable"),
    ("package", "kernels for many GPUs", "a file that loads anywhere"),
)


def package_folder() -> Path:
    import reflib

    return Path(reflib.__file__).parent


def code_lines(folder: Path) -> int:
    """Lines that are neither blank nor a comment."""
    files = list(folder.rglob("*.py"))
    assert files, f"{folder}: no stage of this name"
    text = (line.strip() for f in files for line in f.read_text(encoding="utf-8").splitlines())
    return sum(1 for line in text if line and not line.startswith("#"))


def pipeline_svg() -> tuple[str, str]:
    """(the picture, its description in words). Colours are the page's, dark mode's too."""
    width, height, gap = 400, 82, 16  # narrow, so that a phone need not shrink it
    sizes = {stage: code_lines(package_folder() / stage) for stage, _, _ in PIPELINE}
    parts = []
    for index, (stage, takes, returns) in enumerate(PIPELINE):
        y = index * (height + gap) + 4
        parts.append(
            f'<rect x="4" y="{y}" width="{width - 8}" height="{height}" rx="7" class="box"/>'
            f'<text x="20" y="{y + 26}" class="stage">{stage}</text>'
            f'<text x="20" y="{y + 49}" class="what">{html.escape(takes)}</text>'
            f'<text x="20" y="{y + 69}" class="what">→ {html.escape(returns)}</text>'
            f'<text x="{width - 20}" y="{y + 26}" class="size">{sizes[stage]:,} lines</text>'
        )
        if index + 1 < len(PIPELINE):
            bottom = y + height
            parts.append(f'<path d="M {width // 2} {bottom + 1} v {gap - 4} m -4 -5 l 4 5 l 4 -5" class="arrow"/>')
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
            f"The pipeline is the architecture: one folder per stage, {total:,} lines of code in all with the "
            "language they share (ir/). Imports point only upwards. Drawn from the code itself."
        )
        svg, _ = pipeline_svg()
        figure = f'<figure class="reflib-figure">{svg}<figcaption>{caption}</figcaption></figure>'
        return [nodes.raw("", figure, format="html")]


def fill_page(app: Sphinx, name: str, source: list[str]) -> None:
    """The generated parts of a page of book/, before it is parsed."""
    if name.startswith("book/"):
        pages = {k: v for module in MODULES for k, v in module.PAGES.items()}
        source[0] = reflib_pages.fill(source[0], Path(app.srcdir), pages)


def page_scripts(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Vega's scripts, on the pages that have a figure of it."""
    if doctree is not None and any("reflib-vega" in n.astext() for n in doctree.findall(nodes.raw)):
        for name in ("vega", "vega-lite", "vega-embed"):
            app.add_js_file(f"../vendor/vega/{name}.min.js")
        app.add_js_file("../vendor/reflib-vega.js")


def finish_page(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The footer; and no page loads what it does not use: scripts for a launch button, and for formulas where the
    page has none (Sphinx counts those of the pages below it in the table of contents)."""
    formulas = doctree is not None and any(True for _ in doctree.findall(is_formula))
    unused = ("thebe",) if formulas else ("thebe", "mathjax", "MathJax")
    for kind in ("script_files", "css_files"):
        context[kind][:] = [f for f in context[kind] if not any(word in told(f) for word in unused)]
    context["default_mode"] = "auto"  # the theme's script complains of none
    context["metatags"] = context.get("metatags", "") + '<link rel="icon" href="data:," />'  # else browsers ask for one
    context["theme_extra_footer"] = footer(context["pathto"])
    if page.startswith("notebooks/") and (home := os.environ.get("REFLIB_REPOSITORY", "")):
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{launch(home, page)}", 1)


def launch(home: str, page: str) -> str:
    """A chapter elsewhere: in Colab, and its source. ``home``: https://github.com/OWNER/NAME. Words, not the usual
    badges: a page fetches no picture from outside. The branch is the one that is published from."""
    at = f"{home.removeprefix('https://github.com/')}/blob/main/{page}.ipynb"
    return (
        f'<p class="reflib-launch"><a href="https://colab.research.google.com/github/{at}">Open in Colab</a> '
        f'<a href="https://github.com/{at}">Source</a></p>'
    )


def is_formula(node: nodes.Node) -> bool:
    return isinstance(node, (nodes.math, nodes.math_block))


def told(file: Any) -> str:
    """A script's or style sheet's address, and its text where that stands in the page."""
    return f"{getattr(file, 'filename', file)} {getattr(file, 'attributes', {}).get('body', '')}"


def footer(pathto: Any) -> str:
    """Edition, commit, and where to report an error."""
    import reflib
    from reflib.lab import machine

    commit = machine.commit() or "unknown"
    return (
        f'<p class="reflib-footer">Edition {reflib.__version__}, commit <code>{html.escape(commit)}</code>. '
        f'<a href="{pathto("book/report")}">Report an error</a>. '
        f'<a href="{pathto("book/notices")}">Third-party notices</a>.</p>'
    )


def per_page(app: Sphinx) -> None:
    """Scripts only where they are used: Jupyter Book asks for all of them everywhere."""
    app.set_html_assets_policy("per_page")


def copy_assets(app: Sphinx, error: Exception | None) -> None:
    """vendor/, our style sheet and the notices into the pages' folder; what nothing uses, out of it."""
    if error is not None or app.builder.format != "html":
        return
    pages = Path(app.outdir)
    out = pages / "vendor"
    shutil.copytree(BOOK / "vendor", out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("README.md"))
    for asset in (BOOK / "assets").iterdir():
        shutil.copy(asset, out / asset.name)
    (pages / reflib_notices.FILE).write_text(reflib_notices.whole(BOOK), encoding="utf-8")
    for unused in (found for pattern in UNUSED for found in (pages / "_static").glob(pattern)):
        shutil.rmtree(unused) if unused.is_dir() else unused.unlink()


def vega_html(figure: Any) -> str:
    """A Vega-Lite figure as HTML: its JSON, for assets/reflib-vega.js, and its description in words."""
    spec = dict(figure) if isinstance(figure, dict) else json.loads(figure)
    caption = (spec.get("usermeta") or {}).get("caption") or below(spec)
    described = html.escape(str(spec.get("description", "a figure with no description")))
    # "</" would end the script element in the middle of a string
    text = re.sub("</", r"<\\/", json.dumps(spec, sort_keys=True))
    role = "group" if '"bind": {' in json.dumps(spec) else "img"  # what has lists to pick from is more than a picture
    drawn = (
        f'<div class="reflib-vega" role="{role}" aria-label="{described}">'
        f'<script type="application/json">{text}</script></div>'
    )
    if not caption:
        return drawn
    return f'<figure class="reflib-figure">{drawn}<figcaption>{html.escape(caption)}</figcaption></figure>'


def below(spec: dict[str, Any]) -> str:
    """A title at the bottom is the figure's caption: taken out of the drawing, to be text like all others."""
    title = spec.get("title")
    if not isinstance(title, dict) or title.get("orient") != "bottom":
        return ""
    text = spec.pop("title")["text"]
    return text if isinstance(text, str) else " ".join(text)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("reflib-pipeline", Pipeline)
    app.add_css_file("../vendor/reflib.css")
    app.add_js_file("../vendor/reflib-page.js", loading_method="defer")
    app.connect("builder-inited", per_page, priority=900)
    app.connect("source-read", fill_page)
    app.connect("autodoc-process-docstring", reflib_api.process_docstring)
    app.connect("html-page-context", page_scripts)
    app.connect("html-page-context", finish_page, priority=900)
    app.connect("build-finished", copy_assets)
    reflib_terms.setup(app)
    reflib_claims.setup(app)
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
