"""tests/models.py on the GPU."""

from __future__ import annotations

import pytest

from tests.models import *  # noqa: F403


@pytest.fixture
def device() -> str:
    return "cuda"
