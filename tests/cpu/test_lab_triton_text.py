"""Pictures of blocks, and a reader's Triton text on tensors."""

import pytest
import torch

from reflib import lab
from reflib.errors import LabError
from reflib.ir.program import Config
from reflib.lab.block_chart import blocks, masked

PERSISTENT, LOOPED = Config("persistent", 2, 32), Config("looped", 2, 8)
TILE, FLAT = Config("none", 8, extras=(("yblock", 4),)), Config("none", 10)


@pytest.mark.parametrize("config,programs,count,beyond", [
    (PERSISTENT, 3, 3, 72), (LOOPED, 3, 9, 24), (TILE, 6, 6, 72), (FLAT, 12, 12, 0),
])  # fmt: skip
def test_blocks_cover_the_matrix_once(config: Config, programs: int, count: int, beyond: int) -> None:
    found = blocks(6, 20, config)
    assert (len({b.program for b in found}), len(found), masked(6, 20, found)) == (programs, count, beyond)
    lanes = [(i, j) for b in found for i in range(*b.rows) for j in range(*b.columns)]
    assert len(set(lanes)) == len(lanes) and {(i, j) for i in range(6) for j in range(20)} <= set(lanes)


def test_a_picture_of_blocks_says_in_words_what_it_shows() -> None:
    picture = lab.blocks_picture({"looped": (6, 20, LOOPED)}, caption="c")
    assert "3 programs, blocks of 2 by 8, 3 steps each; 24 lanes are masked" in picture.alt
    with pytest.raises(ValueError, match="whole number"):
        blocks(6, 20, Config("none", 8))


TEXT = """import triton
import triton.language as tl


@triton.jit
def rotate(x_ptr, out_ptr, BLOCK: tl.constexpr = 16):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + (i + 1) % BLOCK) + tl.program_id(0))
"""


def test_triton_text_runs_without_a_gpu() -> None:
    x, out = torch.arange(20.0)[2:18], torch.zeros(32)
    lab.run_triton([lab.Launch("rotate", TEXT, 1, (x, out[16:])), lab.Launch("rotate", TEXT, 1, (out[16:], out))])
    assert out[16:].tolist() == [*range(3, 18), 2] and out[:16].tolist() == [*range(4, 18), 2, 3]
    with pytest.raises(LabError, match="stopped"):
        lab.run_triton([lab.Launch("rotate", TEXT.replace("x_ptr +", "y_ptr +"), 1, (x, out))])
    with pytest.raises(LabError, match="bfloat16"):
        lab.run_triton([lab.Launch("rotate", TEXT, 1, (x.bfloat16(), out))])
