"""Imports point backwards along the pipeline."""

import ast
from pathlib import Path

import pytest

from reflib import weekend

# Each module or folder directly under reflib/ may import those to its left, and itself.
STAGES = ["capture", "lower", "fuse", "autotune", "schedule", "plan", "generate", "wrap", "package"]
# What the stages share, wherever they stand; it knows no stage.
SHARED = {
    *("atomic", "c_shims", "cache", "errors", "failures", "inductor_options", "ir", "logs", "models", "options"),
    *("seams", "tables", "target", "timeline", "timing", "toolchain", "tracing", "worker", "zygote"),
}
AROUND = ["pipeline", "observed", "background", "tuning", "ranks"]
AROUND += ["fast_path", "api", "aot", "jobs", "observe", "weekend"]
AROUND += ["lab", "batch", "sweep", "cli"]
ORDER = [*sorted(SHARED), *STAGES, *AROUND]


def part_of(path: str) -> str:
    """The module or folder directly under reflib/ that a file under it belongs to."""
    return Path(path).parts[0].removesuffix(".py")


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


@pytest.fixture(scope="module")
def imports() -> list[tuple[str, int, str]]:
    """(importing file, line, imported file), all of them; of the public names, imported when first used, none."""
    package = weekend.PACKAGE
    return [
        (str(file.relative_to(package)), line, other)
        for file in sorted(package.rglob("*.py"))
        if file != package / "__init__.py"
        for line, other in imported_files(ast.parse(file.read_text()), file, package)
        if other != "__init__.py"
    ]


def test_every_part_has_a_place() -> None:
    parts = {part_of(str(f.relative_to(weekend.PACKAGE))) for f in weekend.PACKAGE.rglob("*.py")}
    parts -= {"__init__", "plugins"}  # they name modules, as text
    assert parts <= set(ORDER), f"give these a place in ORDER: {parts - set(ORDER)}"


def test_imports_point_backwards(imports: list[tuple[str, int, str]]) -> None:
    wrong = []
    for path, line, file in imports:
        part, other = part_of(path), part_of(file)
        if part in ORDER and other in ORDER and other not in SHARED and ORDER.index(other) > ORDER.index(part):
            wrong.append(f"{path}:{line}: {part} imports {other}, a later stage")
    assert not wrong, "\n".join(wrong)


# -- rings: the weekend core inside, the compiler around it, tools around that ---------------------------
TOOLS = {"lab", "batch", "sweep", "observe", "cli", "weekend"}


def ring(path: str) -> int:
    """Of a file or folder under reflib/: 0 for the core, 1 for the rest of the compiler, 2 for tools."""
    if path in {f.path for f in weekend.files()}:
        return 0
    return 2 if part_of(path) in TOOLS else 1


def test_an_inner_ring_never_imports_an_outer_one(imports: list[tuple[str, int, str]]) -> None:
    wrong = [f"{path}:{line}: imports {other}" for path, line, other in imports if ring(other) > ring(path)]
    assert not wrong, "of a ring further out:\n" + "\n".join(wrong)


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
