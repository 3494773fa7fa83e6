"""Checks of a built book: no network access, no broken links, alt text and captions for all figures.

Each check takes the folder of pages and returns one line per problem. A *page* is an HTML file outside `_static`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PAGE_LIMIT, LANDING_LIMIT = 4_000_000, 1_000_000  # bytes per page with its images, without shared scripts
LANDING = "book/index.html"

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
LINKED = {"stylesheet", "preload", "icon", "shortcut icon", "modulepreload", "preconnect", "dns-prefetch"}


@dataclass
class PageFigure:
    """A `figure` element, or an image or drawing outside one."""

    tag: str
    alt: str = ""
    caption: str = ""
    drawings: int = 0  # images, drawings, interactive figures in it


@dataclass
class Page:
    """The parts of one page that the checks use."""

    fetched: list[tuple[str, str]] = field(default_factory=list)  # (tag, address): loaded by the browser automatically
    links: list[str] = field(default_factory=list)  # followed only on a click
    ids: set[str] = field(default_factory=set)
    figures: list[PageFigure] = field(default_factory=list)
    images: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self.style = self.caption = False
        self.open: list[PageFigure] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.page.ids |= {values[k] for k in ("id", "name") if values.get(k)}
        self.style = tag == "style"
        wanted = values.get(FETCHED.get(tag, ""), "")
        if tag == "link" and values.get("rel", "").lower() in LINKED:
            wanted = values.get("href", "")
        named = re.findall(r"url\(([^)]*)\)", values.get("style", ""))
        self.page.fetched += [(tag, text) for text in (wanted, *named) if text]
        if tag == "img":
            self.page.images.append(values.get("src", ""))
        if tag == "a" and values.get("href"):
            self.page.links.append(values["href"])
        self._figure(tag, values)

    def _figure(self, tag: str, values: dict[str, str]) -> None:
        if tag == "figure":
            self.open.append(PageFigure(tag))
            self.page.figures.append(self.open[-1])
        elif tag == "figcaption":
            self.caption = True
        elif tag == "img" or values.get("role") == "img" or "reflib-vega" in values.get("class", "").split():
            said = values.get("alt", "") or values.get("aria-label", "")
            if self.open:
                self.open[-1].drawings += 1
                self.open[-1].alt += said
            elif values.get("aria-hidden") != "true":
                self.page.figures.append(PageFigure(tag, alt=said, drawings=1))

    def handle_endtag(self, tag: str) -> None:
        if tag == "figure" and self.open:
            self.open.pop()
        elif tag == "figcaption":
            self.caption = False

    def handle_data(self, data: str) -> None:
        if self.style:
            self.page.fetched += [("style", text) for text in named_in_css(data)]
        if self.caption and self.open:
            self.open[-1].caption += data.strip()


def named_in_css(text: str) -> list[str]:
    return re.findall(r"url\(([^)]*)\)", text) + re.findall(r"@import\s+['\"]([^'\"]+)", text)


@cache
def _read(path: Path, _changed: int) -> Page:
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8", errors="replace"))
    return reader.page


def read(path: Path) -> Page:
    return _read(path, path.stat().st_mtime_ns)


def pages_of(pages: Path) -> Iterator[tuple[str, Path]]:
    """(name, file) of every page, without a theme's unused examples."""
    for path in sorted(pages.rglob("*.html")):
        name = path.relative_to(pages).as_posix()
        if "_static" not in path.relative_to(pages).parts:
            yield name, path


def is_outside(reference: str) -> bool:
    return bool(re.match(r"(https?:)?//", reference.strip().strip("'\"")))


def outside_references(pages: Path) -> list[str]:
    """Everything that a page or style sheet loads from the network without a click."""
    found = [f"{name}: <{tag}> {text}" for name, path in pages_of(pages) for tag, text in read(path).fetched
             if is_outside(text)]  # fmt: skip
    for sheet in sorted(pages.rglob("*.css")):
        text = sheet.read_text(encoding="utf-8", errors="replace")
        found += [f"{sheet.relative_to(pages)}: {r}" for r in named_in_css(text) if is_outside(r)]
    return found


def broken_links(pages: Path) -> list[str]:
    """Links and loaded files inside the book that do not exist, and anchors missing from their page."""
    found = []
    for name, path in pages_of(pages):
        page = read(path)
        for reference in dict.fromkeys([*page.links, *(text for _, text in page.fetched)]):
            parts = urlsplit(reference.strip("'\""))
            if parts.scheme or parts.netloc:
                continue  # network, mail, or inline data
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{name}: {reference} is not there")
            elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read(target).ids:
                found.append(f"{name}: {reference} has no such anchor")
    return found


def wordless_figures(pages: Path) -> list[str]:
    """Figures without alternative text or caption, and images outside a figure without alternative text."""
    found = []
    for name, path in pages_of(pages):
        for number, figure in enumerate(read(path).figures, 1):
            which = f"{name}: figure {number} (<{figure.tag}>)"
            if figure.drawings and not figure.alt.strip():
                found.append(f"{which} has no alt text")
            if figure.drawings and not figure.caption:
                found.append(f"{which} has no caption")
    return found


def weight(path: Path) -> int:
    """Bytes of a page and its images."""
    files = [unquote(urlsplit(i).path) for i in read(path).images if not i.startswith("data:")]
    images = {(path.parent / name).resolve() for name in files}
    return path.stat().st_size + sum(i.stat().st_size for i in images if i.is_file())


def heavy_pages(pages: Path) -> list[str]:
    """Pages above the limits."""
    sizes = ((name, weight(path), LANDING_LIMIT if name == LANDING else PAGE_LIMIT) for name, path in pages_of(pages))
    return [f"{name}: {size:,} bytes, of {limit:,} at most" for name, size, limit in sizes if size > limit]


def problems(pages: Path) -> list[str]:
    """The findings of all checks."""
    checks = (outside_references, broken_links, wordless_figures, heavy_pages)
    return [line for check in checks for line in check(pages)]
