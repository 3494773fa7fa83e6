"""Interprets the divisions and roots without branches: ``TRITON_INTERPRET=1 python exact_divisions.py``."""

import importlib.util
import tempfile
from pathlib import Path

import torch

from reflib.generate.triton_half import HELPERS
from reflib.generate.triton_ops import Needs, print_op
from reflib.lab.triton_child import complete_the_interpreter

NAMES = "divide", "divide_row", "divide_row_half", "root", "logistic"
INVERSE_ROOT = print_op(Needs(), "rsqrt", torch.float32, torch.float32, ["x"], True)
TEXT = """import triton
import triton.language as tl
from triton.language.extra import libdevice

{helpers}

@triton.jit
def every(x_ptr, y_ptr, q_ptr, r_ptr, s_ptr, i_ptr, l_ptr, h_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(q_ptr + at, divide(x, y))
    tl.store(r_ptr + at, divide_row(x, y))
    tl.store(s_ptr + at, root(x))
    tl.store(i_ptr + at, {inverse_root})
    tl.store(l_ptr + at, logistic(x))
    tl.store(h_ptr + at, divide_row_half(x, y))
"""


def main() -> str:
    complete_the_interpreter()
    folder = Path(tempfile.mkdtemp())
    text = TEXT.format(helpers="\n".join("@triton.jit" + HELPERS[n] for n in NAMES), inverse_root=INVERSE_ROOT)
    (folder / "every.py").write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("every", folder / "every.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gen, n = torch.Generator().manual_seed(3), 2**15
    hard = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1.0, 3e38, 1e-38, 2.0**-120])
    sized = torch.randn(2, n, generator=gen) * torch.exp2(torch.randint(-60, 60, (2, n), generator=gen).float())
    x, y = sized.clone()
    x[:100], y[:100] = hard.repeat(10), hard.repeat_interleave(10)
    q, r, s, i, e, h = (torch.empty(n) for _ in range(6))
    module.every[(1,)](x, y, q, r, s, i, e, h, N=n)
    roots = (s, x.double().sqrt().float()), (i, x.double().rsqrt().float())
    for got, want in ((q, x / y), (r, x / y), (h, x / y), *roots):
        torch.testing.assert_close(got, want, rtol=2.5e-7, atol=1e-44, equal_nan=True)
        assert torch.equal(got.isnan(), want.isnan())
    for got in (q, r):
        assert torch.equal(got.signbit()[~got.isnan()], (x / y).signbit()[~got.isnan()])
    assert torch.equal(r[100:], (x / y)[100:])
    assert (q == x / y).float().mean() > 0.99 and (s == x.double().sqrt().float())[x > 0].float().mean() > 0.99
    whole = 1.0 / (1.0 + (-x.double()).exp().float())  # infinity where float32 has no such number
    torch.testing.assert_close(e, whole, rtol=5e-7, atol=1e-44, equal_nan=True)
    return "ok"


if __name__ == "__main__":
    print(main())
