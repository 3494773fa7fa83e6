"""Whole programs for a GPU give eager's results: the wrapper runs here, its kernels in Triton's interpreter."""

import importlib.util

import pytest
from interpreter import chosen, results
from triton_programs import ONE_PASS, PROGRAMS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


@pytest.fixture
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    """What is wrong with each program among the tests to run, which share a process."""
    return results("triton_programs.py", *chosen(request))


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, found: dict[str, str]) -> None:
    mine = {k: v for k, v in found.items() if k.rpartition(", ")[0].rpartition(", ")[0] == name}
    assert len(mine) == (2 if name in ONE_PASS else 4)  # fast kernels and fallbacks, static and dynamic
    assert not any(mine.values()), "\n".join(f"{k}: {v}" for k, v in mine.items() if v)
