"""The composition table on CUDA: every feature under every wrapper (tests/composition), and what only CUDA has."""

from pathlib import Path

import pytest

from tests.composition import CUDA_FEATURES, FEATURES, WRAPPERS, run

CELLS = [(name, wrapper) for name in (*FEATURES, *CUDA_FEATURES) for wrapper in WRAPPERS if wrapper != "exported"]
EXPORTED = [pytest.param(name, "exported", marks=pytest.mark.slow) for name in (*FEATURES, *CUDA_FEATURES)]


@pytest.mark.parametrize(("name", "wrapper"), [*CELLS, *EXPORTED])
def test_composition(name: str, wrapper: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(name, "cuda", wrapper, monkeypatch, tmp_path)
