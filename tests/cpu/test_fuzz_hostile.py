"""Random damage to caches and random calls (tests/hostile_fuzz.py); REFLIB_FUZZ and REFLIB_FUZZ_SEED say how many, and
from which seed on."""

import os
from pathlib import Path

import pytest

from tests.forking import printed

FIRST = os.environ.get("REFLIB_FUZZ_SEED") or "0"


@pytest.mark.parametrize("what, usually", [("caches", "2"), ("calls", "3")])
def test_fuzz(what: str, usually: str, tmp_path: Path) -> None:
    count = os.environ.get("REFLIB_FUZZ") or usually
    out = printed("tests.hostile_fuzz", what, str(tmp_path), FIRST, count, OMP_NUM_THREADS="1")
    assert len(out.splitlines()) >= int(count)
