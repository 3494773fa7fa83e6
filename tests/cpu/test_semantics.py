"""tests/semantics.py and stages.py on the CPU, and what only the CPU has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.semantics import *  # noqa: F403
from tests.semantics import Compiled, randn
from tests.stages import *  # noqa: F403


@pytest.fixture
def device() -> str:
    return "cpu"


def test_a_second_compilation_reads_the_cache(fresh_cache: Path) -> None:
    x = randn(6, 6, device="cpu")
    expected = (x.sin() * 3).sum(-1)
    for _ in range(2):
        torch._dynamo.reset()
        torch.testing.assert_close(Compiled(lambda x: (x.sin() * 3).sum(-1))(x), expected)
        built = {p for p in fresh_cache.rglob("*.so") if "kernels" in str(p)}
        assert len(built) == 1, built
    # damaged: built again
    for path in built:
        data = path.read_bytes()
        path.unlink()  # this process has the old file mapped
        path.write_bytes(data[:100])
    torch._dynamo.reset()
    torch.testing.assert_close(Compiled(lambda x: (x.sin() * 3).sum(-1))(x), expected)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements() -> None:
    n = 2**31 + 5
    x = torch.zeros(n, dtype=torch.int8)
    x[-1] = 3
    y = Compiled(lambda x: x + 1)(x)
    assert int(y[-1]) == 4 and int(y[0]) == 1 and int(y[n // 2]) == 1
