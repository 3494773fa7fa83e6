"""Builds the book with Jupyter Book: the published one from the committed notebooks, or the book of one run.

No notebook is executed. `book_checks` checks the result: no network access, no broken links, alt text for all figures.
"""

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
    """https://github.com/OWNER/NAME, the target of "Open in Colab" and "Source" on the pages.

    `named` if given, else the origin of the checkout at `root`; "" if that is not on GitHub. LabError if `named` has
    another form."""
    try:
        if not named and Path(machine.git(root, "rev-parse", "--show-toplevel")) != root.resolve():
            return ""  # a folder inside the checkout of another project
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
    repository that the pages link to."""
    if importlib.util.find_spec("jupyter_book") is None:
        raise LabError("jupyter-book is not installed here: pip install 'reflib[book]', or make book")
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(source)]
    command += ["--toc", str(source / "book" / "_toc.yml"), "--config", str(config)]
    command += ["--path-output", str(out)]
    if strict:
        command += ["-n", "-W", "--keep-going"]
    log = out / "_build" / "book.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    for stale in ("html", ".doctrees"):  # may hold pages whose source is gone
        shutil.rmtree(log.parent / stale, ignore_errors=True)
    # the copied sources have no git history, so the commit for the footer is passed in
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
    """Build the published book; returns its first page. With `strict`, warnings and the findings of
    `book_checks.problems` raise LabError. `named`: see `repository`."""
    out, home = out or root, repository(root, named)
    with tempfile.TemporaryDirectory(prefix="reflib-book-") as folder:
        source = copy_sources(root, Path(folder) / "source")
        pages = jupyter_book(source, source / "book" / "_config.yml", out, strict, home)
    if strict and (found := book_checks.problems(pages)):
        raise LabError("the built pages have problems:\n" + "\n".join(found[:20]))
    return pages / "index.html"


def copy_sources(root: Path, source: Path) -> Path:
    """Copy the pages' sources to a separate folder: Sphinx would also read unrelated files such as those of `.venv`."""
    for name in ("book", "notebooks"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return source


def put_executed(executed: Path, notebooks: Path, device: str) -> None:
    """Replace a committed notebook by one of a run, stamped with this machine."""
    notebook = nb.read(executed)
    nb.stamp(notebook, device, machine.versions(), machine.commit())
    nb.write(notebook, notebooks / executed.name)
    noted = notebooks / "recorded" / durations.FILE
    if noted.exists():
        lines = noted.read_text(encoding="utf-8").splitlines(keepends=True)
        atomic.write(noted, "".join(s for s in lines if s.split("\t")[0] != executed.stem))


def build_run(root: Path, run: Path, heading: str) -> Path:
    """Build the book of one run, with its executed notebooks instead of the committed ones; returns its first page."""
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
