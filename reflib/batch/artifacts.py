"""What a failed CI job leaves behind: for each failure why, what it said when it ran again alone, its traces, its
repros and their compile reports, and a page that links them (relative links: the folder may be moved, or uploaded).

``REFLIB_ARTIFACTS=1`` turns it on, for the tests, for ``reflib run`` and, where something is slower or broken, for
``reflib compare``; without it nothing is written. What failed runs once more in a child process, with ``REFLIB_TRACE``
and ``REFLIB_REPRO``: so what did not fail pays nothing. A file that would be empty is a problem, and problems make the
exit status 1.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from reflib import atomic

SWITCH = "REFLIB_ARTIFACTS"
MOST, SECONDS, ALL_SECONDS = 20, 600.0, 1800.0  # failures that run again; time of one, and of all
REPORTS = 4  # per failure, of the repros written last
FILE_BYTES, ALL_BYTES, TEXT = 20_000_000, 200_000_000, 1_000_000  # limits of a file, of all, of what a child says
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em }} td, th {{ text-align: left; vertical-align: top; padding: .3em }}
pre {{ white-space: pre-wrap; margin: 0 }}</style>
<h1>{title}</h1><p>{head}</p>
<table><tr><th>what</th><th>why</th><th>again, alone</th><th>files</th></tr>{rows}</table>{notes}</html>
"""


@dataclass(frozen=True)
class Failed:
    """A failure, or (not ``fails``) what became slower. ``again``: its folder -> the command that repeats it."""

    name: str
    why: str
    again: Callable[[Path], list[str]]
    fails: bool = True


@dataclass
class Artifacts:
    """What was gathered. ``problems``: what should be there and is not."""

    folder: Path
    rows: list[tuple[str, str, str, Path]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def wanted() -> bool:
    return os.environ.get(SWITCH, "0") not in ("", "0")


def gather(
    folder: Path, failed: Sequence[Failed], links: Mapping[str, Path] | None = None, word: str = "failed"
) -> list[str]:
    """Fill ``folder``; the problems, as lines for people. links: other reports, by title. word: what happened to them.
    Nothing is raised."""
    a = Artifacts(folder)
    end = time.monotonic() + ALL_SECONDS
    try:
        for i, f in enumerate(failed[:MOST]):
            where = folder / f"{i:02}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', f.name)[-80:].strip('-.')}"
            where.mkdir(parents=True, exist_ok=True)
            (where / "why.txt").write_text(f.why[-TEXT:], encoding="utf-8")
            said = _again(f, where, end - time.monotonic())
            a.rows.append((f.name, f.why, said, where))
            a.notes += _reports(f, where, end - time.monotonic())
        if len(failed) > MOST:
            a.notes.append(f"{len(failed) - MOST} more {word}; the first {MOST} are here")
        _limit(a)
        _check(a, len(failed), word)
        _page(a, f"{len(failed)} {word}", links or {})
    except Exception as e:
        a.problems.append(f"the artifacts in {folder} are not complete: {type(e).__name__}: {e}")
    return a.problems


def _again(f: Failed, where: Path, seconds: float) -> str:
    """Run it again; how that ended."""
    if seconds <= 0:
        return "not run: no time was left"
    observed = {"REFLIB_TRACE": str(where / "traces"), "REFLIB_REPRO": str(where / "repros"), SWITCH: "0"}
    try:
        with (where / "again.txt").open("wb") as out:
            status = subprocess.run(
                f.again(where), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, **observed}, timeout=min(seconds, SECONDS),
            ).returncode  # fmt: skip
        done = "passed: it does not fail alone" if f.fails else "ran"
        return done if status == 0 else f"failed (exit {status})"
    except subprocess.TimeoutExpired:
        return f"stopped after {min(seconds, SECONDS):.0f} s"
    finally:
        if (where / "again.txt").exists():
            text = (where / "again.txt").read_bytes()
            (where / "again.txt").write_bytes(text[-TEXT:])
        for path in _files(where / "run"):  # a run's lock, and the rows of a notebook that measures nothing
            if not path.stat().st_size:
                path.unlink()


def _reports(f: Failed, where: Path, seconds: float) -> list[str]:
    """A compile report of each graph that was compiled again, with times of what became slower; what is missing."""
    end, missing = time.monotonic() + min(seconds, SECONDS), []
    repros = sorted((where / "repros").glob("*.py"), key=lambda p: p.stat().st_mtime)[-REPORTS:]
    for repro in repros:
        out = where / "reports" / f"{repro.stem}.html"
        out.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "reflib.cli", "report", str(repro), "--out", str(out)]
        command += ["--no-measure"] * f.fails
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=max(0.1, end - time.monotonic()),
            )  # fmt: skip
            said = next((line for line in done.stderr.splitlines() if line.startswith("reflib: ")), "")
        except subprocess.TimeoutExpired:
            said = "no time was left"
        if not out.exists():
            missing.append(f"{f.name}: no report of {repro.name}: {said or f'exit {done.returncode}'}")
    return missing


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def _limit(a: Artifacts) -> None:
    """Remove what is too large: large files first, then the largest until the rest fits."""
    sizes = sorted(((p.stat().st_size, p) for p in _files(a.folder)), reverse=True)
    total = sum(size for size, _ in sizes)
    for size, path in sizes:
        if size > FILE_BYTES or total > ALL_BYTES:
            path.unlink()
            total -= size
            a.notes.append(f"{path.relative_to(a.folder)} ({size / 1e6:.1f} MB) is over the limits and was left out")


def _check(a: Artifacts, failed: int, word: str) -> None:
    for path in _files(a.folder):
        if not path.stat().st_size:
            a.problems.append(f"artifact {path.relative_to(a.folder)} is empty")
    if failed and not a.rows:
        a.problems.append(f"{failed} {word}, and nothing was gathered")
    for name, _, said, where in a.rows:
        if not any(_files(where / part) for part in ("traces", "repros")):
            a.notes.append(f"{name}: no graph was compiled when it ran again ({said}): there is no trace and no repro")


def _page(a: Artifacts, title: str, links: Mapping[str, Path]) -> None:
    rows = []
    for name, why, said, where in a.rows:
        lines = [line for line in why.strip().splitlines() if line.strip()]
        parts = "".join(f"<li>{_link(p, a.folder)}</li>" for p in _files(where))
        cells = [f"<td>{escape(name)}</td>", f"<td><pre>{escape(lines[-1] if lines else '')}</pre></td>"]
        rows.append(f"<tr>{''.join(cells)}<td>{escape(said)}</td><td><ul>{parts}</ul></td></tr>")
    others = "".join(f" <a href='{escape(os.path.relpath(p, a.folder))}'>{escape(t)}</a>" for t, p in links.items())
    notes = "".join(f"<p>{escape(n)}</p>" for n in (*a.problems, *a.notes))
    head = f"Traces: open at ui.perfetto.dev. Repros: python FILE, reflib minify FILE, reflib report FILE.{others}"
    a.folder.mkdir(parents=True, exist_ok=True)
    text = PAGE.format(title=title, head=head, rows="".join(rows), notes=notes)
    atomic.write(a.folder / "index.html", text)


def _link(path: Path, folder: Path) -> str:
    name = path.relative_to(folder).as_posix()
    return f'<a href="{escape(name)}">{escape(name.partition("/")[2] or name)}</a>'


def of_run(jobs: Sequence[tuple[Any, Any]], command: Sequence[str]) -> list[Failed]:
    """The failures of a run's (NotebookJob, JobOutcome); command: ``reflib``."""

    def failed(job: Any, outcome: Any) -> Failed:
        def again(where: Path) -> list[str]:
            notebook = where / f"{job.notebook}.ipynb"
            notebook.write_text(job.text, encoding="utf-8")
            given = [word for k, v in job.parameters.items() for word in ("-p", f"{k}={v}")]
            shutil.rmtree(where / "run", ignore_errors=True)
            how = ["--only", str(notebook), "--device", job.device, "--no-book", "--out", str(where / "run")]
            return [*command, "run", *how, *given]

        return Failed(job.label or job.notebook, outcome.error or outcome.status, again)

    return [failed(job, o) for job, o in jobs if o.status == "failed" and not job.problem]
