"""`make wheels` packs all that an offline host needs: the lists in tools/wheels.py, against what is installed here."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
