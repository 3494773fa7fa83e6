"""The weekend core stands alone, stays small, and is what the documents say."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import reflib
from reflib import seams, weekend
from reflib.lab import weekend as page
from reflib.plugins import PLUGS
from tests import weekend_alone
from tests.forking import printed
from tests.interpreter import interpreted


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the core's files and nothing else."""
    folder = tmp_path_factory.mktemp("core")
    package = weekend.copy(folder)
    assert {str(f.relative_to(package)) for f in package.rglob("*.py")} == {f.path for f in weekend.files()} | {
        "__init__.py"
    }
    return folder


def there(said: str) -> dict[str, Any]:
    found = json.loads(said)
    assert not found.pop("imported from elsewhere")
    return found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton: the generated code is compared")
def test_it_compiles_and_runs_alone(alone: Path) -> None:
    found = there(interpreted("weekend_alone.py", str(alone), PYTHONPATH=""))
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def test_it_generates_alone_what_the_whole_package_does(alone: Path) -> None:
    """Where the other passes have nothing to improve, and no kernel loops (those take fewer passes there)."""
    found = there(printed(weekend_alone.__file__, str(alone), "sources", PYTHONPATH=""))
    assert len(found) == 3
    for name, sources in found.items():
        mine, whole = ([s for s in x if "for r0" not in s] for x in (sources, weekend_alone.sources(name)))
        assert mine and mine == whole, name


def test_the_line_budget() -> None:
    assert weekend.lines() <= weekend.LIMIT, f"{weekend.lines()} lines: see `reflib weekend`"


def test_every_file_is_there_once_and_says_what_to_look_for() -> None:
    paths = [f.path for f in weekend.files()]
    assert len(paths) == len(set(paths))
    for f in weekend.files():
        assert (weekend.PACKAGE / f.path).is_file(), f.path
        assert f.look or f.path.endswith("__init__.py"), f.path
        folder = weekend.PACKAGE / f.path
        assert folder.parent == weekend.PACKAGE or str(Path(f.path).parent / "__init__.py") in paths


def test_the_command_prints_the_list() -> None:
    from reflib.cli import cli

    out = CliRunner().invoke(cli, ["weekend"]).output
    assert all(f.path in out for f in weekend.files())
    assert f"{weekend.lines():,} of at most {weekend.LIMIT:,} lines" in out


def test_the_command_copies_the_core(tmp_path: Path) -> None:
    from reflib.cli import cli

    assert CliRunner().invoke(cli, ["weekend", "--copy", str(tmp_path / "core")]).exit_code == 0
    assert (tmp_path / "core" / "reflib" / "pipeline.py").is_file()


def test_the_readme_says_the_numbers(root: Path) -> None:
    text = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    assert page.size() in text and f"about {weekend.hours()} hours" in text, "python -m reflib.lab.weekend"


def test_the_page_is_what_the_build_generates(root: Path) -> None:
    assert (root / "book" / "weekend.md").read_text(encoding="utf-8") == page.text(), "python -m reflib.lab.weekend"


# -- seams ------------------------------------------------------------------------------------------------
def declared() -> dict[str, seams.Seam]:
    """Every seam of the core, by its name."""
    import importlib

    found = {}
    for f in weekend.files():
        name = "reflib." + f.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, seams.Seam):
                found[value.name] = value
    return found


def test_every_seam_is_declared_in_the_core_and_every_plug_fits() -> None:
    found = declared()
    assert set(PLUGS) <= set(found), "plugs without a seam"
    for name, seam in found.items():
        for key in seam:
            assert seam[key] is not None, f"{name}: {key}"


def test_a_seam_holds_the_cores_own_entries_and_what_is_plugged_in() -> None:
    seam = seams.Seam("test.SEAM", {"own": 1, "replaced": 2})
    assert dict(seam) == {"own": 1, "replaced": 2} and "more" not in seam
    seams.plug({"test.SEAM": {"replaced": "errors:ReflibError", "more": "errors"}})
    assert list(seam) == ["own", "replaced", "more"] and len(seam) == 3
    assert seam["replaced"] is reflib.ReflibError and seam["more"].ReflibError is reflib.ReflibError


def test_importing_reflib_imports_no_stage() -> None:
    code = "import sys, reflib; print([m for m in sys.modules if m.split('.')[0] in ('reflib', 'torch', 'triton')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(eval(done.stdout)) == ["reflib", "reflib.plugins", "reflib.seams"]
