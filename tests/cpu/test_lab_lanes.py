"""Pictures of lanes and banks: what is drawn is what was counted."""

import shutil
import sys
from types import ModuleType

import pytest
import torch

from reflib import lab
from reflib.lab import layout_twins, triton_text
from reflib.lab.lane_chart import touched, used_of


@pytest.mark.parametrize("addresses,size,sectors,used", [
    ([0, 32, 64], 2, 3, 6), ([0, 2, 4], 2, 1, 6), ([0, 16, 32], 16, 2, 48), ([31], 2, 2, 2), ([0, 0], 4, 1, 4),
])  # fmt: skip
def test_sectors_of_lanes(addresses: list[int], size: int, sectors: int, used: int) -> None:
    assert len(touched(addresses, size)) == sectors
    assert f" {used} of {32 * sectors} bytes used" in used_of(addresses, size)


def test_a_picture_of_lanes_says_in_words_what_it_shows() -> None:
    picture = lab.lanes_picture({"apart": ([0, 32], 2), "wide": ([0, 16], 16)}, caption="c")
    assert "apart: 2 lanes, 2 sectors, 4 of 64 bytes used. wide: 2 lanes, 1 sector, 32 of 32" in picture.alt
    assert picture.svg == lab.lanes_picture({"apart": ([0, 32], 2), "wide": ([0, 16], 16)}, caption="c").svg


def test_a_picture_of_banks_says_how_often_a_column_is_asked_for() -> None:
    layouts = {"plain": lambda i, j: 8 * i + j, "padded": lambda i, j: 9 * i + j, "half": lambda i, j: 12 * i + j}
    assert "plain: 8 passes. padded: 1 pass. half: 4 passes." in lab.banks_picture(layouts, caption="c").alt


@pytest.mark.parametrize("text,asks", [("tl.make_tensor_descriptor(x)", True), ("tl.load(x)", False)])
def test_a_launch_has_scratch_memory_where_descriptors_need_it(
    text: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in for Triton, whose interpreter asks for none."""
    allocators, launched = [], []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *tensors, num_warps: launched.append((grid, len(tensors), num_warps))

    triton = ModuleType("triton")
    triton.set_allocator = allocators.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(triton_text, "load", lambda source, name: Kernel())
    x = torch.zeros(4)
    run = lab.gpu_call(lab.Launch("k", text, 3, (x, x), 2))
    assert launched == []
    run()
    assert launched == [((3,), 2, 2)]
    assert [a(256, 128, None).nbytes for a in allocators] == ([256] if asks else [])


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_cpu_twins_compute_what_they_say() -> None:
    x = torch.randn(2**14).half()
    for way in layout_twins.COPIES:
        out = torch.zeros_like(x)
        layout_twins.copier(way, x, out, 8)()
        assert torch.equal(out, x), way
    square, padded, turned = torch.randn(64, 64), torch.zeros(64, 80)[:, :64], torch.zeros(64, 80)[:, :64]
    padded.copy_(square)
    layout_twins.turner(padded, turned, 16, 32)()
    assert torch.equal(turned, square.t())
    for simd in (True, False):
        layout_twins.multiplier(square, square, turned := torch.zeros(64, 64), simd)()
        torch.testing.assert_close(turned, square @ square, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_chains_go_once_around() -> None:
    """After as many steps as there are lines, each chain is where the next one began."""
    run = layout_twins.chaser(chains=4, steps=64, lines=64)
    _, at = run.args
    before = at.tolist()
    assert len(set(before)) == 4
    run()
    assert at.tolist() == before[1:] + before[:1]
