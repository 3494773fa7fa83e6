"""The composition table on the CPU: every feature under every wrapper (tests/composition.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.composition import FEATURES, WRAPPERS, run


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", FEATURES)
def test_composition(name: str, wrapper: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(name, "cpu", wrapper, monkeypatch, tmp_path)
