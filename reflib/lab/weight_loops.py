"""`lab.weight_product`: on a CPU, a product of one row with weights in 32, 8 or 4 bits, as a loop in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reflib.lab.kernels import load_kernel

if TYPE_CHECKING:
    import torch

# Eight rows at a time: a sum is loaded and stored once for all of them.
SOURCE = """
extern "C" void product(const float* x, const TYPE* w, const float* scale, float* y) {
  constexpr int columns = COLUMNS, rows = ROWS;
  for (int n = 0; n < columns; ++n) y[n] = 0;
  for (int k0 = 0; k0 < rows; k0 += 8)
    for (int n = 0; n < columns; ++n) {
      float sum = y[n];
#pragma GCC unroll 8
      for (int k = k0; k < k0 + 8; ++k) {
        TYPE q = w[(long)k * columns + n];
        sum += FORMULA;
      }
      y[n] = sum;
    }
  for (int n = 0; n < columns; ++n) y[n] *= scale[n];
}"""
PLAIN = "x[k] * q"
FOUR = "x[k] * ((signed char)(q << 4) >> 4) + x[k + rows] * (q >> 4)"


def weight_product(bits: int, x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> Callable[[], Any]:
    """A function of no arguments that computes ``x @ (w * scale)`` in one thread; ``x`` is one row in float32.

    ``w``: float32, int8, or (4 bits) int8 of which each holds row k of the upper half in its low four bits and row k of
    the lower half in the others. Its number of rows is a multiple of 8."""
    rows, columns = w.shape
    if rows % 8 or len(x) != 1:
        raise ValueError(f"x has {len(x)} rows, w has {rows}: it takes one, and a multiple of 8")
    text = SOURCE.replace("FORMULA", FOUR if bits == 4 else PLAIN).replace("COLUMNS", str(columns))
    text = text.replace("ROWS", str(rows)).replace("TYPE", "float" if bits == 32 else "signed char")
    kernel = load_kernel("product", text, "cpp", result=x.new_empty(1, columns))
    return lambda: kernel(x, w, scale)
