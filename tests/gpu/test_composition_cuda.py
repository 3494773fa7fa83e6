"""The composition table on CUDA: every feature under every wrapper (tests/composition), and what only CUDA has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.composition import CUDA_FEATURES, FEATURES, WRAPPERS, run


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", [*FEATURES, *CUDA_FEATURES])
def test_composition(name: str, wrapper: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(name, "cuda", wrapper, monkeypatch, tmp_path)
