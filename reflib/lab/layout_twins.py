"""C++ twins of the GPU kernels in the chapter on layouts: the same experiments with cache lines, sets and SIMD."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from reflib.lab.kernels import load_kernel

if TYPE_CHECKING:
    import torch

LINE = 64  # bytes

COPIES = {
    "uncoalesced": """
  for (long j = 0; j < STRIDE; j++)
    #pragma omp parallel for
    for (long k = 0; k < N / STRIDE; k++) out[k * STRIDE + j] = x[k * STRIDE + j];""",
    "coalesced": """
  #pragma omp parallel for
  for (long k = 0; k < N; k++) { out[k] = x[k]; asm volatile(""); }  // one at a time""",
    "vectorised": """
  #pragma omp parallel for simd
  for (long k = 0; k < N; k++) out[k] = x[k];""",
    "grid-stride": """
  #pragma omp parallel for schedule(static, 1)
  for (long b = 0; b < N; b += 2048)
    #pragma omp simd
    for (long k = b; k < b + 2048; k++) out[k] = x[k];""",
}

CHASE = """
extern "C" void chase(const long* next, long* at) {{
  long place[{k}];
  for (int c = 0; c < {k}; c++) place[c] = at[c];
  for (int step = 0; step < {steps}; step++)
    for (int c = 0; c < {k}; c++) place[c] = next[place[c]];
  for (int c = 0; c < {k}; c++) at[c] = place[c];
}}"""

TURN = """
extern "C" void turn(const float* __restrict__ x, float* __restrict__ out) {{
  const long N = {n}, ROW = {row}, HIGH = {high}, WIDE = {wide};
  #pragma omp parallel for
  for (long i = 0; i < N; i += HIGH)
    for (long j = 0; j < N; j += WIDE)
      for (long a = i; a < i + HIGH; a++)
        for (long b = j; b < j + WIDE; b++) out[b * ROW + a] = x[a * ROW + b];
}}"""

PRODUCT = """
extern "C" void product(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ out) {{
  const long N = {n};
  #pragma omp parallel for
  for (long i = 0; i < N; i++) {{
    for (long j = 0; j < N; j++) out[i * N + j] = 0;
    for (long k = 0; k < N; k++)
      for (long j = 0; j < N; j++) {{ out[i * N + j] += a[i * N + k] * b[k * N + j]; {after} }}
  }}
}}"""


def copier(way: str, x: torch.Tensor, out: torch.Tensor, stride: int = 32) -> Callable[[], None]:
    """Copies elements of 2 bytes in one of the ways of COPIES; their number is a multiple of 2048 and of `stride`."""
    head = 'extern "C" void copy(const short* __restrict__ x, short* __restrict__ out)'
    sizes = f"const long N = {x.numel()}, STRIDE = {stride};"
    return partial(load_kernel("copy", f"{head} {{\n  {sizes}{COPIES[way]}\n}}", "cpp"), x, out)


def chaser(chains: int, steps: int, lines: int) -> Callable[[], None]:
    """Follows so many chains in turn, `steps` loads in all, through a random cycle of `lines` cache lines."""
    import torch

    words = LINE // 8
    order = torch.randperm(lines)
    following = torch.zeros(lines * words, dtype=torch.int64)
    following[order * words] = order.roll(-1) * words
    at = order[torch.arange(chains) * (lines // chains)] * words
    return partial(load_kernel("chase", CHASE.format(k=chains, steps=steps // chains), "cpp"), following, at)


def turner(x: torch.Tensor, out: torch.Tensor, high: int, wide: int) -> Callable[[], None]:
    """Transposes a square float32 matrix in tiles; both may be views whose rows are further apart than their length."""
    text = TURN.format(n=x.shape[0], row=x.stride(0), high=high, wide=wide)
    return partial(load_kernel("turn", text, "cpp"), x, out)


def multiplier(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, simd: bool) -> Callable[[], None]:
    """Multiplies square float32 matrices, one multiply-add per instruction or by SIMD."""
    text = PRODUCT.format(n=a.shape[0], after="" if simd else 'asm volatile("");')
    return partial(load_kernel("product", text, "cpp"), a, b, out)
