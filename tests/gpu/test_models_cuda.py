"""tests/models.py on the GPU."""

import pytest

from tests.models import *  # noqa: F403


@pytest.fixture
def device() -> str:
    return "cuda"
