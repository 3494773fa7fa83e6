"""Pictures of lanes, banks and tiles: what is drawn is what was counted. CPU twins and loops compute what they say."""

import shutil
import sys
from types import ModuleType

import pytest
import torch

from reflib import lab
from reflib.lab import layout_twins, triton_text
from reflib.lab.lane_chart import touched, used_of
from reflib.lab.rows import Row, Rows


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


# -- matrix products, and loops in C++ ----------------------------------------------------------------
def test_a_picture_of_a_tile_says_where_its_data_is() -> None:
    alt = lab.tile_picture((256, 512, 1024), (128, 64, 32), stages=3, itemsize=2, caption="c").alt
    assert "256 x 512, depth 1,024, with one tile of 128 x 64" in alt
    assert "one tile of C, 32 KiB" in alt and "3 blocks of A and of B, 36 KiB" in alt
    assert "memory: A, B and C, 1.75 MiB" in alt


def test_a_picture_of_orders_counts_the_bands() -> None:
    by_rows = [(i, j) for i in range(4) for j in range(6)]
    columns = sorted(by_rows, key=lambda tile: tile[1])
    alt = lab.order_picture({"by rows": by_rows, "by columns": columns}, 8, caption="c").alt
    assert "4 x 6 tiles, 8 programs" in alt
    assert "by rows: they read 2 bands of A, 6 of B" in alt and "by columns: they read 4 bands of A, 2 of B" in alt


def test_a_picture_of_a_split_sum() -> None:
    picture = lab.split_picture(3, caption="c")
    assert "into 3 parts" in picture.alt and picture.svg.count("<path") > 12


def test_common_pieces_of_axes() -> None:
    from reflib.lab.axes_chart import cuts, pieces

    assert cuts((4, 3, 12)) == [12, 36, 144]
    assert pieces((12, 12), (4, 3, 12)) == [4, 3, 12] and pieces((12, 12), (18, 8)) is None
    assert pieces((24,), (2, 3, 4)) == [2, 3, 4] and pieces((6, 4), (4, 6)) is None
    picture = lab.axes_picture({"y": ((12, 12), (4, 3, 12)), "z": ((12, 12), (18, 8))}, caption="c")
    assert "12 x 12 and 4 x 3 x 12, common pieces: 4 x 3 x 12." in picture.alt
    assert "12 x 12 and 18 x 8, no common pieces." in picture.alt


def test_a_picture_of_copies_and_of_steps() -> None:
    assert "4 lanes" in lab.copies_picture(4, caption="c").alt
    steps = lab.steps_picture([("a", "one thing"), ("b", "another")], caption="c", about="Two steps.")
    assert steps.alt == "Two steps. a: one thing. b: another."


def row(case: str, shape: str, us: float | None, status: str = "ok") -> Row:
    return Row("n", case, "time", us, "µs", at={"shape": shape}, status=status)


ROWS = Rows([row("eager", "a", 4.0), row("reflib", "a", 2.0), row("peer", "a", None, "crashed"),
             row("eager", "b", 1.0), row("reflib", "b", 2.0)])  # fmt: skip


def test_cases_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    lab.side_by_side(ROWS, "shape", ("eager", "peer", "reflib"), columns={"floor": {"a": "1.5"}})
    heads, a, b = (line.split() for line in capsys.readouterr().out.strip().splitlines())
    assert heads == ["shape", "floor", "eager,", "µs", "peer,", "µs", "reflib,", "µs"]
    assert a == ["a", "1.5", "4.00", "crashed", "2.00"] and b == ["b", "-", "1.00", "-", "2.00"]
    lab.side_by_side(Rows(), "shape", ("eager",))
    assert "Nothing was measured" in capsys.readouterr().out


def test_a_loss_is_a_claim_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    lab.no_slower(ROWS, "shape", "reflib", ("eager", "peer"))
    said = capsys.readouterr().out
    assert "✓ Holds here: a: reflib takes 0.50 of the time of eager" in said
    assert "✗ Does not hold here: b: reflib takes 2.00 of the time of eager" in said and "peer" not in said


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_loops_over_weights(bits: int) -> None:
    x, scale = torch.randn(1, 48), torch.rand(20) + 0.5
    limit = 1 << bits - 1
    q = torch.randn(48, 20) if bits == 32 else torch.randint(-limit, limit, (48, 20), dtype=torch.int8)
    upper, lower = q.chunk(2)
    w = ((lower << 4) | (upper & 15)).to(torch.int8) if bits == 4 else q
    torch.testing.assert_close(lab.weight_product(bits, x, w, scale)(), x @ (q.float() * scale), rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="a multiple of 8"):
        lab.weight_product(bits, x, w[:5], scale)
