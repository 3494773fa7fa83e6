"""The pins agree, the set-up script reads the project as it is, importing reflib is nearly free."""

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.processes import python


def canonical(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match.group(0)).lower()


@pytest.fixture
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


@pytest.fixture
def pins(root: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", (root / "constraints.txt").read_text(), re.M))


@pytest.fixture
def setup_script(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", root / "tools" / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def requirements(project: dict[str, Any]) -> list[str]:
    return project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]


def test_conda_has_every_package_and_the_same_pins(root: Path, pins: dict[str, str], project: dict[str, Any]) -> None:
    listed = yaml.safe_load((root / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    conda = {canonical(p): p.split(";")[0].split("==")[1].strip() for p in pip}
    assert conda == {name: pins.get(name) for name in map(canonical, requirements(project))}


def test_pins_meet_the_requirements(pins: dict[str, str], project: dict[str, Any], setup_script: ModuleType) -> None:
    for requirement in requirements(project):
        name = canonical(requirement)
        assert name in pins, f"constraints.txt does not pin {name}"
        assert setup_script.enough(requirement, pins[name]), (requirement, pins[name])
    assert pins["torch"] == setup_script.TORCH


def test_setup_reads_pyproject_without_tomllib(project: dict[str, Any], setup_script: ModuleType) -> None:
    base, extras = setup_script.project()
    assert base == project["dependencies"]
    assert extras == project["optional-dependencies"]
    assert {e for use in setup_script.USES.values() for e in use} <= set(extras)


@pytest.mark.parametrize(
    "requirement, version, expected",
    [
        ("torch>=2.11", "2.9.1", False),
        ("torch>=2.11", "2.11.0+cu130", True),
        ("torch>=2.11", "2.13.0", True),
        ("jupyter-book>=1.0.4,<2", "1.0.4.post1", True),
        ("jupyter-book>=1.0.4,<2", "2.0.1", False),
        ("numpy", "2.0", True),
        ("pyyaml>=6", "6.0.3", True),
    ],
)
def test_versions_are_compared_as_numbers(
    setup_script: ModuleType, requirement: str, version: str, expected: bool
) -> None:
    assert setup_script.enough(requirement, version) is expected


def facts_with(**versions: str) -> dict[str, Any]:
    return {"have": dict(versions), "triton": "triton" in versions, "platform": "linux"}


def test_what_is_missing_is_what_is_asked_for(setup_script: ModuleType) -> None:
    lacking = {canonical(r) for r in setup_script.missing("run", facts_with(torch="2.13.0", numpy="2.1"))}
    assert {"click", "papermill", "jupyter-book", "triton"} <= lacking
    assert not {"torch", "numpy", "pytest"} & lacking


def test_triton_is_not_asked_for_on_a_mac(setup_script: ModuleType) -> None:
    facts = facts_with(torch="2.13.0") | {"platform": "darwin"}
    assert "triton" not in {canonical(r) for r in setup_script.missing("test", facts)}


def test_no_compiler_is_one_clear_line(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_script.shutil, "which", lambda name: None)
    with pytest.raises(setup_script.SetUpError, match="no C\\+\\+ compiler") as caught:
        setup_script.need_compiler("run")
    assert "\n" not in str(caught.value)
    setup_script.need_compiler("book")


def test_an_old_python_is_one_clear_line(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_script, "probe", lambda python: {"version": (3, 9, 2)})
    with pytest.raises(setup_script.SetUpError, match="Python too old") as caught:
        setup_script.new_enough_python()
    assert "\n" not in str(caught.value)


def test_an_environment_that_is_not_ours_keeps_its_versions(setup_script: ModuleType, tmp_path: Path) -> None:
    facts = facts_with(torch="2.11.0+cu130", numpy="2.3.1", click="8.1.7")
    text = Path(setup_script.keep_what_is_there(facts, str(tmp_path / "c.txt"))).read_text().splitlines()
    assert "numpy==2.3.1" in text and "click==8.1.7" in text
    assert not [line for line in text if line.startswith("torch==")]
    assert [line for line in text if line.startswith("papermill==")]


def test_importing_reflib_is_nearly_free() -> None:
    """Under 0.2 s on top of torch where torch takes 2 s; slower machines get in proportion."""
    program = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import reflib; "
        "c = time.perf_counter(); print(b - a, c - b)"
    )
    pairs = [[float(x) for x in python(program).split()] for _ in range(2)]
    torch_seconds, reflib_seconds = map(min, zip(*pairs))
    assert reflib_seconds < max(0.2, 0.1 * torch_seconds), pairs


# -- `make wheels`: the lists in tools/wheels.py, against what is installed -------------------------
# The host: its Python, and (with what they need) the packages it has by itself.
HOST = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "platform_system": "Linux"}
ITS_OWN = ["torch", "pytest", "matplotlib"]


def needed(requirements: list[str]) -> set[str]:
    """Names of the requirements and of all that they require, by the metadata of what is installed."""
    waiting = [Requirement(text) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                listed = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # of another Python than this, such as papermill's aiohttp
            for text in listed:
                further = Requirement(text)
                if further.marker is None or further.marker.evaluate({**HOST, "extra": extra}):
                    waiting.append(further)
    return {name for name, _ in seen}


@pytest.mark.parametrize("use, lists", [("gpu", ["NEEDED"]), ("run", ["NEEDED", "BOOK"])])
def test_what_a_use_needs_is_packed(root: Path, monkeypatch: pytest.MonkeyPatch, use: str, lists: list[str]) -> None:
    monkeypatch.syspath_prepend(root / "tools")
    import setup
    import wheels

    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [r for extra in setup.USES[use] if extra != "triton" for r in extras[extra]]  # torch's own brings triton
    packed = {name for listed in lists for name in getattr(wheels, listed)}
    assert sorted(needed(["click", *wanted]) - needed(ITS_OWN) - packed) == []
