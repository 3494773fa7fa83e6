"""The built pages in a real browser with no network: formulas set, figures drawn, nothing asked for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from reflib import lab
from reflib.choose import Candidate, Decision
from reflib.lab import book
from reflib.lab import notebook as nb
from reflib.lab.explorer import MIME
from reflib.lab.rows import Rows

CHROMIUM = next((c for c in ("chromium", "chromium-browser", "google-chrome") if shutil.which(c)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")

FIGURE = {
    "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
    "description": "Two bars, the second taller </script>",
    "usermeta": {"caption": "Two bars."},
    "data": {"values": [{"name": "a", "value": 1}, {"name": "b", "value": 2}]},
    "mark": "bar",
    "encoding": {"x": {"field": "name", "type": "nominal"}, "y": {"field": "value", "type": "quantitative"}},
}


def explored() -> dict[str, object]:
    """A figure of two shapes, with four candidates and three."""
    lab.setup(device="cpu", quiet=True)
    rows: list[object] = []
    for k, names in {4096: ("aten", "decompose_k(k_splits=2)", "x", "y"), 64: ("aten", "y", "z")}.items():
        found = tuple(Candidate(n, "ok", 2.0 + i, spread=0.1) for i, n in enumerate(names))
        rows += lab.candidate_rows(Decision("op0", "aten", found, "because"), {"M": 32, "N": 32, "K": k})
    figure = lab.explore(Rows(rows), caption="Pick one.")  # type: ignore[arg-type]
    assert figure is not None
    return figure.spec


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A book of this project's prose and one small chapter with a formula and a figure."""
    source = tmp_path_factory.mktemp("checkout")
    shutil.copytree(Path(__file__).resolve().parents[2] / "book", source / "book")
    toc = source / "book" / "_toc.yml"
    slugs = re.findall(r"notebooks/([\w-]+)", toc.read_text())
    figure = new_output(
        "display_data", data={"application/vnd.vegalite.v5+json": FIGURE, "text/plain": "fig"}
    )
    for slug in slugs:
        cells = [
            new_markdown_cell(f"# {slug}\n\n**A claim.**\n\n**Time.** About 5 minutes.\n\n$\\frac{{a}}{{b}}$"),
            new_code_cell("draw()", outputs=[figure]),
        ]
        if slug == "decompose-k":
            cells.append(new_code_cell("explore()", outputs=[new_output("display_data", data={MIME: explored()})]))
        nb.write(new_notebook(cells=cells), source / "notebooks" / f"{slug}.ipynb")
    return book.build(source).parent


def dom(page: Path, *flags: str) -> str:
    """The page as it is after its scripts ran, with every host name made unreachable."""
    assert CHROMIUM
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_formulas_and_figures_are_drawn(pages: Path) -> None:
    text = dom(pages / "notebooks" / "fusion.html")
    assert "<mjx-container" in text, "MathJax did not run"
    drawn = text.split('class="reflib-vega-canvas', 1)[1]
    assert "<svg" in drawn and drawn.count('aria-roledescription="bar"') == 2
    assert "could not be drawn" not in text


def test_a_figure_has_words_for_it(pages: Path) -> None:
    text = (pages / "notebooks" / "fusion.html").read_text()
    assert 'aria-label="Two bars, the second taller &lt;/script&gt;"' in text
    inside = re.search(r'class="reflib-vega".*?<script type="application/json">(.*?)</script>', text, re.S)
    assert inside and json.loads(inside.group(1)) == FIGURE


BARS = "document.querySelectorAll('[aria-roledescription=bar]').length - 2"  # two are the other figure's
PICK = """(() => {
    const list = [...document.querySelectorAll('.vega-bind select')].find(s => s.options.length == 2);
    const before = %s;
    list.value = '32 x 32 x 64';
    list.dispatchEvent(new Event('input'));
    list.dispatchEvent(new Event('change'));
    setTimeout(() => { document.title = before + ' ' + (%s) }, 500);
    return 'waiting';
})()"""


def test_a_shape_can_be_picked_and_its_candidates_are_drawn(pages: Path) -> None:
    page = pages / "notebooks" / "decompose-k.html"
    assert "<figcaption>Pick one.</figcaption>" in page.read_text()
    assert title_after(page, PICK % (BARS, BARS)) == "4 3"


def test_only_pages_with_a_figure_load_its_scripts(pages: Path) -> None:
    assert "vega-embed" in (pages / "notebooks" / "decompose-k.html").read_text()
    assert "vega" not in (pages / "book" / "index.html").read_text()


def title_after(page: Path, script: str, *flags: str) -> str:
    """What `script`, an expression, is worth in the page a second after it loaded."""
    probe = f"<script>onload = () => setTimeout(() => {{ document.title = {script} }}, 1000)</script></body>"
    copy = page.with_name(f"probe-{page.name}")
    copy.write_text(page.read_text().replace("</body>", probe))
    found = re.search(r"<title>(.*?)</title>", dom(copy, *flags), re.S)
    copy.unlink()
    assert found
    return found.group(1)


OUTSIDE = "performance.getEntriesByType('resource').map(e => e.name).filter(n => n.startsWith('http')).join()"


PAGES = ["book/index", "book/architecture", "book/status", "notebooks/fusion", "notebooks/decompose-k"]


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_asked_of_the_network(pages: Path, name: str) -> None:
    assert title_after(pages / f"{name}.html", OUTSIDE) == ""


def test_the_browser_would_tell(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<html><head><title>x</title></head><body><img src='http://nowhere.test/a.png'></body></html>"
    )
    assert title_after(page, OUTSIDE) == "http://nowhere.test/a.png"


def test_the_page_fits_a_phone(pages: Path) -> None:
    sizes = "document.documentElement.scrollWidth + ' ' + innerWidth"
    for page in ("book/architecture", "book/index", "notebooks/fusion", "notebooks/decompose-k"):
        wide, screen = title_after(pages / f"{page}.html", sizes, "--window-size=500,900").split()
        assert int(wide) <= int(screen), page
