"""The weekend core: its files in reading order, and what to look for in each.

These files compile a function to Triton kernels and a Python wrapper by themselves: ``copy`` puts them into an empty
folder, and a test compiles a transformer there. They import nothing else of reflib; what else there is plugs in through
the seams (``seams.py``). The tests, ``reflib weekend`` and the book's page read this one list.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LIMIT = 8500  # lines, comments and docstrings included
SECONDS_PER_LINE = 3  # as for the chapters' reading times (CONTRIBUTING.md)
PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class File:
    """``path``: under ``reflib/``. ``look``: what to look for."""

    path: str
    look: str

    @cached_property
    def lines(self) -> int:
        return len((PACKAGE / self.path).read_text(encoding="utf-8").splitlines())

    @property
    def minutes(self) -> int:
        return minutes(self.lines)


@dataclass(frozen=True)
class Part:
    """Files that are read together."""

    title: str
    files: tuple[File, ...]


def _part(title: str, *files: tuple[str, str]) -> Part:
    return Part(title, tuple(File(path, look) for path, look in files))


CORE = (
    _part(
        "The whole, and what every stage uses",
        ("pipeline.py", "`run`: the stages in order. `Backend`: what `torch.compile` calls."),
        ("errors.py", "One base class; each message says what was wrong, where, and what to do."),
        ("logs.py", "`REFLIB_LOGS=fallback` prints what became a call of ATen."),
        ("options.py", "One frozen dataclass; every field with its meaning."),
        ("target.py", "What a GPU is to the compiler: shared memory, multiprocessors, warp size."),
        ("seams.py", "Where the rest of reflib plugs in. `git grep 'Seam('` lists all places."),
    ),
    _part(
        "The language: `ir/`",
        ("ir/__init__.py", ""),
        ("ir/expr.py", "Sums of products with `//` and `%` in normal form, so that equal indices compare equal."),
        ("ir/division.py", "`floordiv` and `mod`: every simplification of an index."),
        ("ir/bounds.py", "`nonneg`: what can be proved about an index from the sizes of its variables."),
        ("ir/ops.py", "The table of operations: one line per op, with its meaning in torch."),
        ("ir/loops.py", "The grammar of a loop nest; `BodyBuilder`."),
        ("ir/transforms.py", "What may be computed once per row; bodies joined; axes merged."),
        ("ir/program.py", "The grammar of a program: buffers, views, nodes, variants."),
        ("ir/assume.py", "Which facts about sizes need a check at run time."),
        ("ir/traffic.py", "How many sectors of memory an order of loops or a block touches."),
        ("ir/printer.py", "The text form of both. Read a printed program beside it."),
        ("ir/decision.py", "What was chosen and why, as data for `explain`."),
    ),
    _part(
        "Stage 1: `capture/`",
        ("capture/__init__.py", ""),
        ("capture/repeats.py", "What a joint graph computes twice is merged."),
        ("capture/graph.py", "The only thing the compiler knows of the model."),
        ("capture/capture.py", "One call of AOTAutograd: forward and backward come as two graphs."),
    ),
    _part(
        "Stage 2: `lower/`",
        ("lower/__init__.py", ""),
        ("lower/rules.py", "`RULES`, and `Unsupported`: a rule may decline, and the op becomes a call."),
        ("lower/symbols.py", "PyTorch's symbolic sizes as index expressions."),
        ("lower/context.py", "What a rule sees."),
        ("lower/body.py", "`Value`: a rule reads like its formula. `NestBuilder`: the loop nest around it."),
        ("lower/pointwise.py", "A formula per op; in which dtype it is computed."),
        ("lower/reductions.py", "The same with reduced axes. How a mean or a variance is written."),
        ("lower/views.py", "One rule for all views, and no node."),
        ("lower/extern.py", "The fallback: a call of ATen, with what it writes and returns."),
        ("lower/decompositions.py", "Which composite ops are taken apart before any rule sees them."),
        ("lower/lower.py", "`lower` walks the graph; `_one` tries the rule and falls back."),
    ),
    _part(
        "Stage 3: `fuse/`",
        ("fuse/__init__.py", "The plan of the stage."),
        ("fuse/result.py", "Groups, and the reason for each pair that was not fused."),
        ("fuse/dependencies.py", "Who reads and writes which storage."),
        ("fuse/mapping.py", "`match`: two loop nests over one common space, without division."),
        ("fuse/legality.py", "`can_fuse`: every rule, with its reason."),
        ("fuse/emit.py", "A cluster as one loop nest; groups in a legal order."),
        ("fuse/driver.py", "Greedy, most bytes saved first. Why some nodes wait for a reduction."),
    ),
    _part(
        "Stage 5: `schedule/`",
        ("schedule/__init__.py", ""),
        ("schedule/axes.py", "Axes become x, y and r: three shapes of kernel."),
        ("schedule/heuristics.py", "Block sizes from bytes in flight; the facts that fast code assumes."),
        ("schedule/schedule.py", "Every loop nest becomes a kernel with its variants."),
    ),
    _part(
        "Stage 6: `plan/`",
        ("plan/__init__.py", ""),
        ("plan/steps.py", "The wrapper program: nine kinds of steps."),
        ("plan/plan.py", "Lifetimes; storage taken over or written in place."),
    ),
    _part(
        "Stage 7: `generate/`",
        ("generate/__init__.py", "One printer per kind of device."),
        ("generate/kernel.py", "Source text, and how it is called."),
        ("generate/triton_ops.py", "Each op in Triton, with eager's result to the last bit where it shows."),
        ("generate/triton_facts.py", "What the printer decides before it prints."),
        ("generate/triton_statements.py", "A statement as a line; the shape of each value."),
        ("generate/triton_body.py", "Pointwise, one block per row, or a loop over the row."),
        ("generate/triton.py", "The function around the bodies."),
    ),
    _part(
        "Stage 8: `wrap/`",
        ("wrap/__init__.py", ""),
        ("wrap/runtime.py", "What the printed wrapper calls."),
        ("wrap/python.py", "The steps as the text of one function."),
        ("wrap/launch.py", "A kernel launched by Triton itself, or run by its interpreter."),
        ("wrap/wrap.py", "Names bound to kernels; the callable."),
    ),
)  # fmt: skip


def files() -> Iterator[File]:
    """In reading order."""
    for part in CORE:
        yield from part.files


def lines() -> int:
    return sum(f.lines for f in files())


def minutes(lines: int) -> int:
    """To read so many lines: at least one."""
    return max(1, round(lines * SECONDS_PER_LINE / 60))


def hours() -> int:
    return round(lines() * SECONDS_PER_LINE / 3600)


def table() -> str:
    """What ``reflib weekend`` prints."""
    rows = []
    for part in CORE:
        rows.append(f"\n{part.title.replace('`', '')}")
        for f in part.files:
            rows.append(f"  {f.path:27}{f.lines:5} lines {f.minutes:3} min   {f.look.replace('`', '')}".rstrip())
    total = f"\n{len(list(files()))} files, {lines():,} of at most {LIMIT:,} lines: about {hours()} hours at "
    return "\n".join(rows).lstrip("\n") + "\n" + total + f"{SECONDS_PER_LINE} seconds per line"


def copy(folder: Path) -> Path:
    """The core alone, as a package ``reflib`` in ``folder``; returns the package's folder."""
    package = folder / "reflib"
    for f in files():
        target = package / f.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / f.path, target)
    (package / "__init__.py").write_text("", encoding="utf-8")
    return package
