"""The published book builds with warnings as errors, and its pages need no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from reflib.lab import book


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout = Path(__file__).resolve().parents[2]
    return book.build(checkout, tmp_path_factory.mktemp("book")).parent


def test_it_builds(pages: Path) -> None:
    assert (pages / "index.html").exists()
    for page in ("index", "how-to-read", "architecture", "status"):
        assert (pages / "book" / f"{page}.html").exists()


def test_nothing_is_fetched_from_outside(pages: Path) -> None:
    assert book.outside_references(pages) == []


def test_local_scripts_are_where_pages_look(pages: Path) -> None:
    assert (pages / "vendor" / "mathjax" / "tex-svg.js").exists()
    assert (pages / "vendor" / "reflib.css").exists()
    assert "../vendor/reflib.css" in (pages / "book" / "index.html").read_text()


def test_the_pipeline_is_drawn_with_words_for_it(pages: Path) -> None:
    text = (pages / "book" / "architecture.html").read_text()
    assert 'role="img" aria-label="The pipeline, top to bottom: capture takes' in text


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/f.css">',
        '<img src="http://example/x.png">',
        "<style>@import 'https://example/x.css';</style>",
        '<p style="background: url(https://example/x.png)">',
    ],
)
def test_the_check_finds_what_it_looks_for(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.html").write_text(f"<html>{text}</html>")
    assert len(book.outside_references(tmp_path)) == 1


def test_links_are_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<a href="https://example.com">a</a><script src="_static/x.js"></script>'
    )
    assert book.outside_references(tmp_path) == []
