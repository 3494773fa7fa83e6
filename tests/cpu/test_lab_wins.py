"""Where reflib is much faster, what both compilers generated is shown; and the limit in a figure of bars."""

from types import SimpleNamespace

import pytest

from reflib import lab
from reflib.lab.rows import Row, Rows
from reflib.lab.wins import counted, wins

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
    lab.show_wins(Rows(), lambda at: (THEIRS, [OURS]))
    assert "Nowhere" in capsys.readouterr().out


def test_bars_show_the_limit_of_this_device_alone() -> None:
    here = Rows([timed("reflib", 10.0, 1)])
    there = Rows([Row(name="t", case="reflib", metric="time", value=5.0, unit="µs", at={}, device="another")])
    picture = lab.bars(here, recorded=there, caption="c", floor=20.0)
    assert picture is not None and "A line at 20.0: the limit." in picture.alt
    alone = lab.bars(Rows(), recorded=there, caption="c", floor=20.0)
    assert alone is not None and "limit" not in alone.alt
