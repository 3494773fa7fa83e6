"""The composition table on the CPU: every feature under every wrapper (tests/composition)."""

from pathlib import Path

import pytest

from tests.composition import CUDA_FEATURES, FEATURES, NOT_EXPORTED, WRAPPERS, run


@pytest.mark.sample(6)
@pytest.mark.parametrize("wrapper", [*WRAPPERS[:-1], pytest.param("exported", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FEATURES)
def test_composition(name: str, wrapper: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(name, "cpu", wrapper, monkeypatch, tmp_path)


def test_a_row_is_in_packages_or_has_a_reason() -> None:
    """(That it really is in one, ``run`` looks at.)"""
    assert NOT_EXPORTED.keys() <= {*FEATURES, *CUDA_FEATURES} and not FEATURES.keys() & CUDA_FEATURES.keys()
    assert all(reason and instead for reason, instead in NOT_EXPORTED.values())
