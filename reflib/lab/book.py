"""Builds the book with Jupyter Book: the published one from the committed notebooks, or one of a run.

Nothing is executed here. The pages must work with no network: `outside_references` finds what would not.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

from reflib.errors import LabError


def jupyter_book(source: Path, config: Path, out: Path, strict: bool) -> Path:
    """Run Jupyter Book on `source`; returns the folder of pages. With `strict`, warnings are errors."""
    if importlib.util.find_spec("jupyter_book") is None:
        raise LabError("jupyter-book is not installed here: pip install 'reflib[book]', or make book")
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(source)]
    command += ["--toc", str(source / "book" / "_toc.yml"), "--config", str(config)]
    command += ["--path-output", str(out)]
    if strict:
        command += ["-n", "-W", "--keep-going"]
    log = out / "_build" / "book.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    for stale in ("html", ".doctrees"):  # pages that no source makes any more
        shutil.rmtree(log.parent / stale, ignore_errors=True)
    environ = dict(os.environ, PYDEVD_DISABLE_FILE_VALIDATION="1")
    with open(log, "w") as f:
        done = subprocess.run(command, stdout=f, stderr=subprocess.STDOUT, env=environ, cwd=source)
    if done.returncode:
        text = re.sub(r"\x1b\[[\d;]*m", "", log.read_text())
        every = text.splitlines()
        telling = [s for s in every if re.search(r"WARNING|ERROR|Error|Exception", s)] or every
        raise LabError(f"the book did not build ({log}):\n" + "\n".join(telling[-20:]))
    return out / "_build" / "html"


def build(root: Path, out: Path | None = None, strict: bool = True) -> Path:
    """The published book; returns its first page. Raises LabError with the warnings when it is not clean."""
    out = out or root
    with tempfile.TemporaryDirectory(prefix="reflib-book-") as folder:
        source = copy_sources(root, Path(folder) / "source")
        pages = jupyter_book(source, source / "book" / "_config.yml", out, strict)
    found = outside_references(pages)
    if found:
        raise LabError("pages that would reach for the network:\n" + "\n".join(found[:20]))
    return pages / "index.html"


def copy_sources(root: Path, source: Path) -> Path:
    """The pages' sources in a folder of their own: Sphinx looks at every file there is, in a `.venv` as well."""
    for name in ("book", "notebooks"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return source


def build_run(root: Path, run: Path, heading: str) -> Path:
    """The book of one run, executed notebooks in place of the committed ones; returns its first page."""
    import yaml

    with tempfile.TemporaryDirectory(prefix="reflib-book-") as folder:
        source = copy_sources(root, Path(folder) / "source")
        for executed in (run / "notebooks").glob("*.ipynb"):
            shutil.copy(executed, source / "notebooks" / executed.name)
        config = source / "book" / "_config.yml"
        settings = yaml.safe_load(config.read_text())
        settings["title"] = heading
        config.write_text(yaml.safe_dump(settings, sort_keys=False))
        pages = jupyter_book(source, config, Path(folder), strict=False)
        target = run / "book"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(pages, target)
    return target / "index.html"


class _References(HTMLParser):
    """Collects what a browser would fetch by itself; links that a reader clicks are not among them."""

    FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
    LINKED = {"stylesheet", "preload", "icon", "shortcut icon", "modulepreload", "preconnect", "dns-prefetch"}

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.style = tag == "style"
        wanted = values.get(self.FETCHED.get(tag, ""), "")
        if tag == "link" and values.get("rel", "").lower() in self.LINKED:
            wanted = values.get("href", "")
        for text in (wanted, *re.findall(r"url\(([^)]*)\)", values.get("style", ""))):
            if is_outside(text):
                self.found.append(f"<{tag}> {text}")

    def handle_data(self, data: str) -> None:
        if self.style:
            self.found += [f"<style> {text}" for text in outside_of_css(data)]


def is_outside(reference: str) -> bool:
    return bool(re.match(r"(https?:)?//", reference.strip().strip("'\"")))


def outside_of_css(text: str) -> list[str]:
    named = re.findall(r"url\(([^)]*)\)", text) + re.findall(r"@import\s+['\"]([^'\"]+)", text)
    return [reference for reference in named if is_outside(reference)]


def outside_references(pages: Path) -> list[str]:
    """'page: what it would fetch from the network', for every HTML page and style sheet under `pages`."""
    found = []
    for page in sorted(pages.rglob("*.html")):
        if "_static" in page.relative_to(pages).parts:
            continue  # a theme's unused example pages
        parser = _References()
        parser.feed(page.read_text(encoding="utf-8", errors="replace"))
        found += [f"{page.relative_to(pages)}: {text}" for text in parser.found]
    for sheet in sorted(pages.rglob("*.css")):
        text = sheet.read_text(encoding="utf-8", errors="replace")
        found += [f"{sheet.relative_to(pages)}: {reference}" for reference in outside_of_css(text)]
    return found
