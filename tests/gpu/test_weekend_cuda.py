"""The weekend core alone on a GPU: Triton compiles and launches its kernels."""

from __future__ import annotations

from pathlib import Path

from reflib import weekend
from tests.cpu.test_weekend import compiled_there


def test_the_core_alone_runs_on_a_gpu(tmp_path: Path) -> None:
    weekend.copy(tmp_path)
    wrong = {name: text for name, text in compiled_there(tmp_path, "cuda").items() if text}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
