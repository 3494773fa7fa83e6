"""The published book in a real browser: it loads, is found through, turns dark, is moved, and is read by everyone.

axe looks at every page for all but contrast, with listings as plain text (each coloured word is an element, and axe
takes a minute a chapter for them). Contrast, listings included, is looked at on one page of each kind, in both modes.
"""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.browsing import PHONE, Watched, changes, dark, drawn, html_pages, idle_controls, violations

pytest.importorskip("axe_playwright_python")

PLAIN = "document.querySelectorAll('.highlight pre').forEach(p => { p.textContent = p.textContent })"
FEW = "document.querySelectorAll('.highlight').forEach((listing, i) => { if (i > 3) listing.remove() })"
LOUDNESS = """() => { let e = document.querySelector('main'), c;
    do { c = getComputedStyle(e).backgroundColor; e = e.parentElement } while (e && /, 0\\)$|transparent/.test(c));
    return c.match(/[\\d.]+/g).slice(0, 3).map(Number).reduce((a, b) => a + b) }"""


@pytest.mark.sample(6)
@pytest.mark.parametrize("sixth", range(6))
def test_every_page_loads_asks_for_nothing_and_is_for_everyone(site: Path, watched: Watched, sixth: int) -> None:
    """No console error, no request outside, formulas set, figures drawn, nothing that axe calls serious."""
    pages = html_pages(site)
    assert len(pages) > 10
    found = {}
    for file in pages[sixth::6]:
        page = watched.open(file)
        drawn(page)
        if "tex-svg.js" in file.read_text():
            page.wait_for_selector("mjx-container", state="attached")
        page.evaluate(PLAIN)
        if problems := watched.problems + violations(page, contrast=False):
            found[str(file.relative_to(site))] = problems
        watched.problems.clear()
    assert found == {}


def test_the_browser_would_tell(tmp_path: Path, watched: Watched) -> None:
    scripts = "<script src='http://nowhere.invalid/a.js'></script><script>throw 'no'</script>"
    (tmp_path / "page.html").write_text(scripts)
    watched.open(tmp_path / "page.html")
    assert [p.split(":")[0] for p in watched.problems if "Failed" not in p] == ["asks for http", "error"]


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The same pages from a server on this machine, as on the web."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_search_finds_a_term(site: Path, served: str, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{served}/search.html?q=roofline", wait_until="load")
    page.wait_for_selector("#search-results li a")
    titles = page.locator("#search-results li a").all_inner_texts()
    assert any("Measuring" in title for title in titles), titles
    page.goto(f"{served}/search.html?q=zzyzxfoobar", wait_until="load")
    page.wait_for_function("() => /did not match/.test(document.querySelector('#search-results').innerText)")
    assert watched.problems == []


def test_search_finds_a_term_in_files_without_a_server(site: Path, watched: Watched) -> None:
    page = watched.open(html_pages(site)[0])
    page.locator("button.search-button__button").locator("visible=true").first.click()
    page.keyboard.type("roofline")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    assert any("Measuring" in title for title in page.locator("#search-results li a").all_inner_texts())


def test_dark_mode_changes_the_ground(site: Path, watched: Watched) -> None:
    page = watched.open(next(p for p in html_pages(site) if "reflib-vega" in p.read_text()))
    assert page.evaluate(LOUDNESS) > 600
    dark(page)
    assert page.evaluate(LOUDNESS) < 200
    page.reload()
    assert page.evaluate(LOUDNESS) < 200, "the choice is kept"
    drawn(page)
    ink = page.evaluate("getComputedStyle(document.querySelector('.reflib-vega svg text')).fill")
    assert sum(map(int, ink[4:-1].split(","))) > 450, f"words of a figure are {ink} on a dark ground"
    assert watched.problems == []


# -- figures ----------------------------------------------------------------------------------------
def figures_to_move(site: Path) -> list[Path]:
    found = [p for p in html_pages(site) if '"bind": {' in p.read_text()]
    assert found, "no chapter has a figure to move"
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("third", range(3))
def test_every_control_of_every_figure_works_by_keyboard(site: Path, watched: Watched, third: int) -> None:
    for file in figures_to_move(site)[third::3]:
        page = watched.open(file)
        drawn(page)
        assert idle_controls(page) == [], file.name
    assert watched.problems == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("slug", ["decompose-k", "input-ranges"])
def test_a_figure_answers_the_mouse(site: Path, watched: Watched, slug: str) -> None:
    """A click on another mark of a map picks it, as its list would."""
    page = watched.open(site / "notebooks" / f"{slug}.html")
    drawn(page)
    owner = page.locator(".reflib-vega:has(svg path[aria-roledescription=point])").last
    marks = owner.locator("svg path[aria-roledescription=point]")
    assert marks.count() > 1 and changes(owner, lambda: marks.nth(1).click(force=True))


# -- for everyone -----------------------------------------------------------------------------------
def kinds(site: Path) -> list[Path]:
    """One page of each kind: prose, search, the smallest chapter with a figure to move."""
    pages = html_pages(site)
    prose = next(p for p in pages if p.parent.name == "book" and p.stem == "index")
    chapter = min(figures_to_move(site), key=lambda p: p.stat().st_size)
    return [prose, site / "search.html", chapter]


def test_axe_finds_contrast_enough(site: Path, watched: Watched) -> None:
    """By day, and in the dark."""
    found = {}
    for file in kinds(site):
        page = watched.open(file)
        drawn(page)
        assert page.evaluate(LOUDNESS) > 600
        page.evaluate(FEW)
        found[file.name] = violations(page, contrast=True)
        dark(page)
        page.wait_for_timeout(1000)  # its colours fade
        found[file.name] += violations(page, contrast=True)
        page.evaluate("localStorage.clear()")  # the next page begins by day
    assert not any(found.values()), found


def test_pages_fit_a_phone_and_axe_finds_nothing_serious_there(site: Path, phone: Watched) -> None:
    found = {}
    for file in {*kinds(site), site / "book" / "architecture.html", site / "notebooks" / "fusion.html"}:
        page = phone.open(file)
        drawn(page)
        page.evaluate(PLAIN)
        if bad := violations(page, contrast=False):
            found[file.name] = bad
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= PHONE["width"], f"{file.name} is {wide} wide"
    assert found == {}
    assert phone.problems == []


def test_axe_would_tell(tmp_path: Path, watched: Watched) -> None:
    page = tmp_path / "page.html"
    faint = "<input><p style='color:#eee'>faint</p>"
    page.write_text(f"<html lang='en'><title>t</title><main><h1>h</h1>{faint}</main></html>")
    found = violations(watched.open(page), contrast=True)
    assert {f.split(":")[0] for f in found} == {"label", "color-contrast"}
