"""tests/models.py on the CPU."""

import pytest

from tests.models import *  # noqa: F403


@pytest.fixture
def device() -> str:
    return "cpu"
