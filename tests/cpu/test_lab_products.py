"""Pictures and tables of the chapter about matrix products, and its loops in C++."""

import pytest
import torch

from reflib import lab
from reflib.lab.rows import Row, Rows


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
