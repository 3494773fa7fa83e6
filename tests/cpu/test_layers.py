"""Imports point backwards along the pipeline."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

# Each module or folder directly under reflib/ may import those to its left, and itself.
STAGES = ["capture", "lower", "fuse", "choose", "plan", "generate", "wrap", "package"]
# What the stages share, wherever they stand; it knows no stage.
SHARED = {"atomic", "errors", "options", "target", "logs", "cache", "toolchain", "timeline", "tables", "c_shims", "ir"}
ORDER = [*sorted(SHARED), *STAGES, "background", "pipeline", "aot", "jobs", "observe", "lab", "batch", "cli"]


def part_of(path: Path, package: Path) -> str:
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py")


def imported_parts(tree: ast.AST, path: Path, package: Path) -> list[tuple[int, str]]:
    """(line, part of reflib) for every import in the file, those inside functions too."""
    folder = list(path.relative_to(package.parent).parent.parts)
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        for name in names:
            words = name.split(".")
            if words[0] == "reflib" and len(words) > 1:
                found.append((node.lineno, words[1]))
    return found


def files(root: Path) -> list[Path]:
    return sorted((root / "reflib").rglob("*.py"))


def test_every_part_has_a_place(root: Path) -> None:
    parts = {part_of(f, root / "reflib") for f in files(root)} - {"__init__"}
    assert parts <= set(ORDER), f"give these a place in ORDER: {parts - set(ORDER)}"


def test_imports_point_backwards(root: Path) -> None:
    package = root / "reflib"
    wrong = []
    for file in files(root):
        part = part_of(file, package)
        if part == "__init__":
            continue  # the public names; imported when first used
        for line, other in imported_parts(ast.parse(file.read_text()), file, package):
            if (
                part in ORDER
                and other in ORDER
                and other not in SHARED
                and ORDER.index(other) > ORDER.index(part)
            ):
                wrong.append(f"{file.relative_to(root)}:{line}: {part} imports {other}, a later stage")
    assert not wrong, "\n".join(wrong)


def test_the_shared_language_imports_no_stage(root: Path) -> None:
    package = root / "reflib"
    for file in files(root):
        part = part_of(file, package)
        if part in SHARED:
            others = {other for _, other in imported_parts(ast.parse(file.read_text()), file, package)}
            assert others & set(ORDER) <= SHARED, f"{file.relative_to(root)} imports {others - SHARED}"


@pytest.mark.parametrize(
    "source, expected",
    [
        ("from reflib.fuse import fuse", ["fuse"]),
        ("def f():\n    from ..generate import kernel", ["generate"]),
        ("from .. import wrap", ["wrap"]),
        ("import reflib.plan.steps", ["plan"]),
        ("from .other import x", ["lower"]),
        ("import torch", []),
    ],
)
def test_the_reader_of_imports_reads_them(tmp_path: Path, source: str, expected: list[str]) -> None:
    package = tmp_path / "reflib"
    found = imported_parts(ast.parse(source), package / "lower" / "rules.py", package)
    assert [part for _, part in found] == expected
