"""Imports point backwards along the pipeline."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from reflib import weekend

# Each module or folder directly under reflib/ may import those to its left, and itself.
STAGES = ["capture", "lower", "fuse", "autotune", "schedule", "plan", "generate", "wrap", "package"]
# What the stages share, wherever they stand; it knows no stage.
SHARED = {
    *("atomic", "c_shims", "cache", "errors", "failures", "inductor_options", "ir", "logs", "models", "options"),
    *("seams", "tables", "target", "timeline", "timing", "toolchain", "tracing", "worker"),
}
AROUND = ["pipeline", "observed", "background", "tuning", "ranks"]
AROUND += ["fast_path", "api", "aot", "jobs", "observe", "weekend"]
AROUND += ["lab", "batch", "sweep", "cli"]
ORDER = [*sorted(SHARED), *STAGES, *AROUND]


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
    parts = {part_of(f, root / "reflib") for f in files(root)} - {"__init__", "plugins"}  # they name modules, as text
    assert parts <= set(ORDER), f"give these a place in ORDER: {parts - set(ORDER)}"


def test_imports_point_backwards(root: Path) -> None:
    package = root / "reflib"
    wrong = []
    for file in files(root):
        part = part_of(file, package)
        if part == "__init__":
            continue  # the public names; imported when first used
        for line, other in imported_parts(ast.parse(file.read_text()), file, package):
            if part in ORDER and other in ORDER and other not in SHARED and ORDER.index(other) > ORDER.index(part):
                wrong.append(f"{file.relative_to(root)}:{line}: {part} imports {other}, a later stage")
    assert not wrong, "\n".join(wrong)


def test_the_shared_language_imports_no_stage(root: Path) -> None:
    package = root / "reflib"
    for file in files(root):
        part = part_of(file, package)
        if part in SHARED:
            others = {other for _, other in imported_parts(ast.parse(file.read_text()), file, package)}
            assert others & set(ORDER) <= SHARED, f"{file.relative_to(root)} imports {others - SHARED}"


# -- rings: the weekend core inside, the compiler around it, tools around that ---------------------------
TOOLS = {"lab", "batch", "sweep", "observe", "cli", "weekend"}


def ring(path: str) -> int:
    """Of a file or folder under reflib/: 0 for the core, 1 for the rest of the compiler, 2 for tools."""
    if path in {f.path for f in weekend.files()}:
        return 0
    return 2 if Path(path).parts[0].removesuffix(".py") in TOOLS else 1


def imported_files(tree: ast.AST, path: Path, package: Path) -> list[tuple[int, str]]:
    """(line, file under reflib/) for every import in the file, those inside functions and for type checkers too."""
    folder = list(path.relative_to(package.parent).parent.parts)
    found = []
    for node in ast.walk(tree):
        names: list[list[str]] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            names = [[*base, *(node.module or "").split("."), alias.name] for alias in node.names]
        for name in names:
            words = [w for w in name if w]
            if words[0] == "reflib" and len(words) > 1:
                found.append((node.lineno, file_of(package.joinpath(*words[1:]), package)))
    return found


def file_of(name: Path, package: Path) -> str:
    """The module of that name, or the one that holds it."""
    while not name.with_suffix(".py").is_file() and not (name / "__init__.py").is_file():
        name = name.parent
    file = name.with_suffix(".py") if name.with_suffix(".py").is_file() else name / "__init__.py"
    return str(file.relative_to(package))


def test_an_inner_ring_never_imports_an_outer_one(root: Path) -> None:
    package = root / "reflib"
    wrong = []
    for file in files(root):
        path = str(file.relative_to(package))
        if path == "__init__.py":
            continue  # the public names; imported when first used
        for line, other in imported_files(ast.parse(file.read_text()), file, package):
            if other != "__init__.py" and ring(other) > ring(path):
                wrong.append(f"{file.relative_to(root)}:{line}: imports {other}, which is in a ring further out")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source, expected",
    [
        ("from reflib.fuse import fuse", ["fuse/__init__.py"]),
        ("def f():\n    from ..generate import kernel", ["generate/kernel.py"]),
        ("from .. import wrap, logs", ["wrap/__init__.py", "logs.py"]),
        ("if TYPE_CHECKING:\n    from ..plan.steps import Let", ["plan/steps.py"]),
        ("import reflib.plan.steps", ["plan/steps.py"]),
        ("from .rules import RULES", ["lower/rules.py"]),
        ("import torch", []),
    ],
)
def test_the_files_that_are_imported(root: Path, source: str, expected: list[str]) -> None:
    package = root / "reflib"
    found = imported_files(ast.parse(source), package / "lower" / "rules.py", package)
    assert [file for _, file in found] == expected


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
