"""THIRD_PARTY_NOTICES: whose scripts, styles, fonts and icons are in the built pages, and under which licences."""

from __future__ import annotations

import fnmatch
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "THIRD_PARTY_NOTICES.txt"
OWN = ("vendor/reflib*", "_static/vendor/reflib*")  # this project's own


@dataclass(frozen=True)
class Notice:
    name: str
    licence: str
    what: str
    text: str
    files: tuple[str, ...]
    version: str = ""  # of a copy in vendor/; a Python package knows its own

    def full_text(self, book: Path) -> str:
        """The licence. Raises FileNotFoundError where its package brings none."""
        kind, _, dist = self.text.partition(":")
        if kind != "dist":
            return (book / self.text).read_text(encoding="utf-8").strip()
        for file in importlib.metadata.files(dist) or []:
            if file.name.lower().startswith(("license", "licence")) and ".dist-info" in str(file):
                return file.read_text(encoding="utf-8").strip()
        raise FileNotFoundError(f"the package {dist} brings no licence text")

    def number(self) -> str:
        kind, _, dist = self.text.partition(":")
        return importlib.metadata.version(dist) if kind == "dist" else self.version


def notices(book: Path) -> list[Notice]:
    import yaml

    listed: list[dict[str, Any]] = yaml.safe_load((book / "notices.yml").read_text(encoding="utf-8"))
    return [Notice(**{**entry, "files": tuple(entry["files"])}) for entry in listed]


def unnamed(pages: Path, book: Path) -> list[str]:
    """Files of the built pages that come from elsewhere and are in no notice."""
    patterns = [p for n in notices(book) for p in n.files] + list(OWN)
    files = [f for folder in ("_static", "vendor") for f in (pages / folder).rglob("*") if f.is_file()]
    there = (f.relative_to(pages).as_posix() for f in files)
    return sorted(f for f in there if not any(fnmatch.fnmatch(f, p) for p in patterns))


def whole(book: Path) -> str:
    """The text file: who, under what, and every licence in full."""
    text = ["Of other projects, these are in this book's pages. Their licences follow, in full.", ""]
    rule = "=" * 78
    for n in notices(book):
        head = f"{n.name} {n.number()}".strip()
        files = "\n".join(f"  {f}" for f in n.files)
        text += [rule, f"{head}: {n.what}. {n.licence}", files, rule, "", n.full_text(book), "", ""]
    return "\n".join(text)


def page(root: Path) -> str:
    """A table, and each licence folded under it."""
    book = root / "book"
    lines = ["| Project | Version | What it is here | Licence |", "|---|---|---|---|"]
    lines += [f"| {n.name} | {n.number()} | {n.what} | {n.licence} |" for n in notices(book)]
    for n in notices(book):
        lines += ["", f"## {n.name}", "", f"````text\n{n.full_text(book)}\n````"]
    return "\n".join(lines)


PAGES = {"notices": page}
