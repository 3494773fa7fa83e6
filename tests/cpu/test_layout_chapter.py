"""What the chapter on layouts launches on a GPU only: its texts compile for GPUs, and the code is what it says."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from reflib.lab import notebook as nb
from reflib.lab import runner
from reflib.lab.triton_text import load

triton = pytest.importorskip("triton")


@cache
def text(name: str) -> str:
    """The kernels' text of that name in the chapter."""
    cells = nb.read(runner.ROOT / "notebooks" / "a-gpu-for-compiler-readers.ipynb").cells
    (found,) = (m[1] for c in cells if (m := re.search(rf'^{name} = """(.*?)"""', c.source, re.S | re.M)))
    return found


def by_gluon(phases: int, capability: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    fn = load(text("TILE").format(n=256, high=32, wide=32, phases=phases), "by_gluon")
    source = GluonASTSource(fn, {"x": "*fp32", "out": "*fp32"}, {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("phases", [1, 32])
def test_a_tile_in_gluon_goes_through_shared_memory(phases: int, capability: int) -> None:
    made = by_gluon(phases, capability)
    assert made.metadata.shared == 32 * 32 * 4
    assert f"maxPhase = {phases}, order" in made.asm["ttgir"]
    assert "ld.shared" in made.asm["ptx"] and "bar.sync" in made.asm["ptx"]
