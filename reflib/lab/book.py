"""Builds the book with Jupyter Book: the published one from the committed notebooks, or one of a run.

Nothing is executed here. What a built book must be like, `book_checks` says: it works with no network, its links go
somewhere, its figures have words.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from reflib import atomic
from reflib.errors import LabError
from reflib.lab import book_checks, durations, machine
from reflib.lab import notebook as nb

GITHUB = re.compile(r"(?:https://github\.com/|(?:ssh://)?git@github\.com[:/])([\w.-]+/[\w.-]+?)(?:\.git)?/?")


def repository(root: Path, named: str = "") -> str:
    """https://github.com/OWNER/NAME: what the pages' "Open in Colab" and "Source" lead to. `named`, or where the
    checkout at `root` came from; "" when that is nowhere that a reader could go to. LabError for another `named`."""
    try:
        if not named and Path(machine.git(root, "rev-parse", "--show-toplevel")) != root.resolve():
            return ""  # a folder in a checkout of something else
        origin = named or machine.git(root, "remote", "get-url", "origin")
    except (OSError, subprocess.SubprocessError):
        return ""
    if found := GITHUB.fullmatch(origin):
        return f"https://github.com/{found[1]}"
    if named:
        raise LabError(f"repository {named!r}: Colab opens notebooks from https://github.com/OWNER/NAME")
    return ""


def jupyter_book(source: Path, config: Path, out: Path, strict: bool, home: str = "") -> Path:
    """Run Jupyter Book on `source`; returns the folder of pages. With `strict`, warnings are errors. `home`: the
    repository that the pages lead to."""
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
    # the sources are a copy without their history: the commit in the footer has to be told
    environ = dict(os.environ, PYDEVD_DISABLE_FILE_VALIDATION="1", REFLIB_COMMIT=machine.commit())
    environ["REFLIB_REPOSITORY"] = home
    with open(log, "w") as f:
        done = subprocess.run(command, stdout=f, stderr=subprocess.STDOUT, env=environ, cwd=source)
    if done.returncode:
        text = re.sub(r"\x1b\[[\d;]*m", "", log.read_text())
        every = text.splitlines()
        telling = [s for s in every if re.search(r"WARNING|ERROR|Error|Exception", s)] or every
        raise LabError(f"the book did not build ({log}):\n" + "\n".join(telling[-20:]))
    return out / "_build" / "html"


def build(root: Path, out: Path | None = None, strict: bool = True, named: str = "") -> Path:
    """The published book; returns its first page. With `strict`, raises LabError with the warnings when it is not
    clean, and with what `book_checks.problems` found. `named`: see `repository`."""
    out, home = out or root, repository(root, named)
    with tempfile.TemporaryDirectory(prefix="reflib-book-") as folder:
        source = copy_sources(root, Path(folder) / "source")
        pages = jupyter_book(source, source / "book" / "_config.yml", out, strict, home)
    if strict and (found := book_checks.problems(pages)):
        raise LabError("pages that are not as they must be:\n" + "\n".join(found[:20]))
    return pages / "index.html"


def copy_sources(root: Path, source: Path) -> Path:
    """The pages' sources in a folder of their own: Sphinx looks at every file there is, in a `.venv` as well."""
    for name in ("book", "notebooks"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return source


def put_executed(executed: Path, notebooks: Path, device: str) -> None:
    """A notebook of a run in place of the committed one: stamped with this machine, whose time nobody has noted."""
    notebook = nb.read(executed)
    nb.stamp(notebook, device, machine.versions(), machine.commit())
    nb.write(notebook, notebooks / executed.name)
    noted = notebooks / "recorded" / durations.FILE
    if noted.exists():
        lines = noted.read_text(encoding="utf-8").splitlines(keepends=True)
        atomic.write(noted, "".join(s for s in lines if s.split("\t")[0] != executed.stem))


def build_run(root: Path, run: Path, heading: str) -> Path:
    """The book of one run, executed notebooks in place of the committed ones; returns its first page."""
    import yaml

    with tempfile.TemporaryDirectory(prefix="reflib-book-") as folder:
        source = copy_sources(root, Path(folder) / "source")
        for executed in (run / "notebooks").glob("*.ipynb"):
            put_executed(executed, source / "notebooks", heading.partition(": ")[2] or heading)
        config = source / "book" / "_config.yml"
        settings = yaml.safe_load(config.read_text())
        settings["title"] = heading
        config.write_text(yaml.safe_dump(settings, sort_keys=False))
        pages = jupyter_book(source, config, Path(folder), strict=False)
        target = run / "book"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(pages, target)
    return target / "index.html"
