"""Contenders side by side: losses first, nothing left out; where reflib is much faster, both compilers' code."""

from types import SimpleNamespace
from typing import Any

import pytest

from reflib import lab
from reflib.lab.ranking import ALL_CASES
from reflib.lab.rows import Row, Rows
from reflib.lab.wins import counted, wins

PEERS = ("eager", "peer")


def row(case: str, k: int, us: float | None, note: str = "", **at: Any) -> Row:
    return Row("set", case, "time", us, "µs", 0.02, {"M": 1, "N": 2, "K": k, "dtype": "fp16", **at}, note=note,
               status="ok" if us else "crashed", device="GPU")  # fmt: skip


ROWS = Rows(
    [
        *(row(who, 8, us) for who, us in zip((*PEERS, "static", "ours"), (8.0, 4.0, 4.0, 2.0), strict=True)),
        *(row(who, 16, us, note) for who, us, note in (
            ("ours", 10.0, "triton tiled 16x64x128 w4; disturbed: much"), ("eager", 9.0, "disturbed: much"),
            ("peer", None, "SIGSEGV"), ("static", 9.0, ""))),
        *(row(who, 32, us) for who, us in (("eager", 5.0), ("ours", None), ("peer", 6.0))),
        *(row(who, 64, us) for who, us in (("eager", 5.0), ("ours", 1.0))),
        Row("set", ALL_CASES, "count", 12, ""),
    ]
)  # fmt: skip


def test_losses_come_first_and_nothing_is_left_out() -> None:
    board = lab.standings(ROWS, ours="ours", against=PEERS)
    assert [line.place for line in board.lines] == ["1 x 2 x 32", "1 x 2 x 16", "1 x 2 x 8", "1 x 2 x 64"]
    assert [line.ratio("ours", PEERS) for line in board.lines] == [0.0, 0.9, 2.0, None]
    heads, body = board.cells()
    assert heads == ["case", "eager", "peer", "static", "ours", "gain"]
    assert body[0] == ["1 x 2 x 32", "5.00", "6.00", "-", "crashed", "0.00"]
    assert body[1] == ["1 x 2 x 16 (disturbed)", "9.00", "crashed", "9.00", "10.0 tiled", "0.90"]
    assert body[3] == ["1 x 2 x 64", "5.00", "-", "-", "1.00", "-"]
    assert "<th" in board._repr_html_() and "10.0 tiled" in repr(board)


def test_cases_without_a_peer_are_in_order_too() -> None:
    rows = Rows(row("eager", k, us) for k, us in ((1, 9.0), (2, 2.0), (3, 1.0)))
    rows += [row("peer", 1, 9.0), *(row("ours", k, 1.0) for k in (1, 2, 3))]
    board = lab.standings(rows, ours="ours", against=PEERS)
    assert [line.at["K"] for line in board.lines] == [1, 3, 2]


def test_what_was_chosen_is_said_shortly() -> None:
    told = {8: ("decompose_k_mm_128_split_7", "aten"), 9: ("triton_mm_30", "disturbed: a")}
    rows = Rows(row("eager", k, 2.0) for k in told)
    rows += [row("peer", k, 2.0, peers) for k, (peers, _) in told.items()]
    rows += [row("ours", k, 1.0, ours) for k, (_, ours) in told.items()]
    found = lab.standings(rows, ours="ours", against=PEERS).cells()[1]
    assert [line[2:4] for line in found] == [["2.00 decompose-K / 128", "1.00 ATen"], ["2.00 triton_mm", "1.00"]]


def test_means_say_of_how_many() -> None:
    lines = lab.standings(ROWS, ours="ours", against=PEERS).summary().splitlines()
    assert lines[0] == "4 of 12 cases were measured." and lines[1].startswith("ours: ") and max(map(len, lines)) < 70
    told = " ".join(lines)
    assert told.endswith("µs per call: medians (middle half within ±1.0%), GPU, fp16, commit .")
    assert "times as fast as eager (slower in 1 of 3)" in told
    assert "2.00 times as fast as peer (slower in 0 of 1)" in told
    assert "1.34 times as fast as the better of them" in told
    assert "slower than the better of them in 1 of 2." in told and "ours has no time for: 1 x 2 x 32." in told
    assert "Disturbed by others on the device: 1 x 2 x 16." in told


def test_several_dtypes_are_told_apart_and_columns_added() -> None:
    rows = Rows([*ROWS, row("eager", 8, 3.0, dtype="bf16"), row("ours", 8, 1.0, dtype="bf16")])
    board = lab.standings(rows, ours="ours", against=["eager"], columns={"K": lambda line: str(line.at["K"])})
    assert {"1 x 2 x 8, bf16", "1 x 2 x 8, fp16"} <= {line.place for line in board.lines}
    assert [c[5] for c in board.cells()[1]] == [str(line.at["K"]) for line in board.lines]
    assert "fp16, bf16" in board.origin() and "GPU" in board.origin()
    alt = lab.ratios(board.rows, keys=("case",), caption="c").alt
    assert "1 x 2 x 64, fp16: 5.00" in alt and "1 x 2 x 8, bf16: 3.00" in alt


def test_without_a_recording_there_is_nothing_to_say() -> None:
    board = lab.standings(Rows(), ours="ours", against=PEERS)
    assert board.summary() == "Nothing is recorded." and "no rows" in repr(board)


def test_of_many_cases_the_losses_are_shown_and_the_others_fold() -> None:
    rows = Rows(row(who, 8 * k, us) for k in range(1, 51) for who, us in (("eager", 2.0), ("ours", 1.0 + 1 / k)))
    board = lab.standings(rows, ours="ours", against=["eager"])
    shown, _, folded = board._repr_html_().partition("<details>")
    assert shown.count("<tr>") == 1 + 12 and folded.count("<tr>") == 1 + 38 and "The other 38 cases" in folded
    assert "1 x 2 x 8<" in shown and "1 x 2 x 400<" in folded
    picture = lab.ratios(board.rows, keys=("case",), caption="c")
    assert "50 cases, in order" in picture.svg and "1 x 2 x 400: 1.96" in picture.alt


# -- where reflib is much faster, what both compilers generated; the limit in a figure of bars --------
THEIRS = """async_compile.triton('red', '''
@triton.jit
def triton_red_fused_0(in_ptr0, out_ptr0):
    for r in tl.range(0, 8):
        a = tl.load(in_ptr0)
    for r in tl.range(0, 8):
        b = tl.load(in_ptr0)
        tl.store(out_ptr0, b)
''', device_str='cuda')

def call(args):
    extern_kernels.mm(args[0], args[1])
"""
OURS = SimpleNamespace(name="k0", language="triton", source="@triton.jit\ndef k0(x):\n    tl.store(x, tl.load(x))\n")


def timed(case: str, us: float | None, n: int) -> Row:
    fields = {"status": "ok"} if us else {"status": "crashed"}
    return Row(name="t", case=case, metric="time", value=us, unit="µs", at={"n": n}, device="a GPU", **fields)


def test_wins_are_sorted_and_what_failed_is_none() -> None:
    rows = Rows([
        timed("TorchInductor", 16.0, 1), timed("reflib", 10.0, 1), timed("TorchInductor", 30.0, 2),
        timed("reflib", 10.0, 2), timed("TorchInductor", 12.0, 3), timed("reflib", 10.0, 3),
        timed("TorchInductor", None, 4), timed("reflib", 10.0, 4),
    ])  # fmt: skip
    assert wins(rows) == [({"n": 2}, 3.0), ({"n": 1}, 1.6)]
    assert wins(rows.where(case="reflib")) == []


def test_both_kernels_are_counted_and_the_largest_win_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("c", "a call: extern_kernels.mm", "-", "-", "-")
    assert counted("c", THEIRS) == [("c", "triton_red_fused_0", 2, 2, 1), call]
    helper = "@triton.jit\ndef maximum_nan(a, b):\n    return tl.maximum(a, b)\n\n\n"
    assert counted("c", helper + THEIRS) == counted("c", THEIRS)
    cpp = 'extern "C" int k(int n) { for (int i = 0; i < n; ++i) {} }\nextern "C" int k_packed(long* p) {}'
    assert counted("c", cpp) == [("c", "k", 1, "-", "-")]
    rows = Rows([timed("TorchInductor", 30.0 * n, n) for n in (1, 2)] + [timed("reflib", 10.0, n) for n in (1, 2)])
    lab.show_wins(rows, lambda at: (THEIRS, [OURS]))
    said = capsys.readouterr().out
    assert said.count("times as fast") == 2 and said.index("n: 2: 6.00") < said.index("n: 1: 3.00")
    assert said.count("def triton_red_fused_0") == 1, "one listing"
    assert said.count("extern_kernels.mm") == 2, "and one table, as both places have the same kernels"
    lab.show_wins(rows, lambda at: (THEIRS + "#" * at["n"], [OURS]))
    assert capsys.readouterr().out.count("extern_kernels.mm") == 3, "other kernels, another table"
    lab.show_wins(Rows(), lambda at: (THEIRS, [OURS]))
    assert "Nowhere" in capsys.readouterr().out


def test_bars_show_the_limit_of_this_device_alone() -> None:
    here = Rows([timed("reflib", 10.0, 1)])
    there = Rows([Row(name="t", case="reflib", metric="time", value=5.0, unit="µs", at={}, device="another")])
    picture = lab.bars(here, recorded=there, caption="c", floor=20.0)
    assert picture is not None and "A line at 20.0: the limit." in picture.alt
    alone = lab.bars(Rows(), recorded=there, caption="c", floor=20.0)
    assert alone is not None and "limit" not in alone.alt
