"""How long a chapter takes: what it says, and what its words, code and outputs come to."""

from pathlib import Path
from typing import Any

import pytest
from test_book import claims, data

from reflib.lab import notebook as nb
from reflib.lab import runner

FOLDED = {"hide-input", "hide-cell", "solution"}  # tags of cells whose code the book folds


def minutes_to_read(path: Path) -> float:
    """Prose at 200 words a minute, 5 seconds for a line of code that is not folded, 1 for a line of output; not set-up
    and exercises."""
    words = lines = shown = 0
    exercises = False
    for number, cell in enumerate(nb.read(path).cells):
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                exercises = line.startswith("## Exercises") if line.startswith("## ") else exercises
                words += 0 if exercises else len(line.split())
        elif not exercises and number > 3:
            shown += sum(lines_of(output) for output in cell.outputs)
            if not FOLDED & set(cell.metadata.get("tags", [])):
                lines += sum(1 for line in cell.source.splitlines() if line.strip())
    return words / 200 + lines * 5 / 60 + shown / 60


def lines_of(output: Any) -> int:
    """Of an output: its lines or rows, of a listing no more than the page unfolds; a figure counts as ten."""
    if output.output_type == "stream":
        return min(len(output.text.splitlines()), claims.LONG)
    data = output.get("data", {})
    if "text/html" in data:
        return data["text/html"].count("<tr>") or 10
    if any("vega" in mime for mime in data):
        return 10
    text = data.get("text/markdown") or data.get("text/plain", "")
    return min(len(text.splitlines()), claims.LONG)


@pytest.mark.parametrize("path", runner.notebooks(), ids=lambda p: p.stem)
def test_a_chapter_says_how_long_it_takes_and_it_is_so(path: Path) -> None:
    """To a quarter. It is an hour at most, or little more, but for the chapter that puts a compiler together."""
    said, counted = data.chapter(path).minutes, minutes_to_read(path)
    assert abs(counted - said) <= said / 4, f"{counted:.0f} minutes are counted"
    assert said <= (75 if path.stem == "mini-compiler" else 65)


def test_times_are_read(tmp_path: Path) -> None:
    assert data.minutes_in("About 40 minutes to read, an hour with the exercises; about a minute to run.") == 40
    assert data.minutes_in("Ten minutes to read and do; under a minute to run.") == 10
    with pytest.raises(ValueError, match="no number of minutes"):
        data.minutes_in("About an hour.")
