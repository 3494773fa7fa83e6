"""Backwards of norms and the like, whose kernels reduce rows and sum columns, as a GPU would run them: the wrapper runs
here, its kernels in Triton's interpreter. A program of its own, because the interpreter must be chosen before Triton is
imported.

    TRITON_INTERPRET=1 python tests/mixed_programs.py

The GPU has two multiprocessors, so that a kernel is two programs (the interpreter takes about a millisecond for each).
Prints one JSON object: for each case, what is wrong with it, or nothing.
"""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from interpreter import answer, told
from triton_programs import Interpreted

from reflib import target

UNITS = 2
target.CUDA["sm_90"] = (227, UNITS, "Hopper")
LEAST = 16 * 512 * UNITS  # elements of a tensor for which such a kernel is made

Fn = Callable[..., Any]
FUNCTIONS: dict[str, tuple[Fn, int]] = {  # with the number of vectors that it takes besides the tensor
    "layer_norm": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 2),
    "layer_norm without bias": (lambda x, w: F.layer_norm(x, x.shape[-1:], w), 1),
    "rms_norm": (lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6), 1),
    "softmax of a sum": (lambda x, b: torch.softmax(x + b, -1), 1),
    "norm of a gelu": (lambda x, b, w: F.layer_norm(F.gelu(x + b), x.shape[-1:], w), 2),
    "residual": (lambda x, w, b: x + F.layer_norm(torch.sin(x), x.shape[-1:], w, b) * 0.5, 2),
}
GROUPED: dict[str, tuple[Fn, int]] = {  # with the number of matrices of a row per image
    "modulated norm": (lambda x, s, t: F.layer_norm(x, x.shape[-1:]) * (1 + s[:, None]) + t[:, None], 2),
    "gated norm": (lambda x, w, g: x + g[:, None] * F.rms_norm(x.sin(), x.shape[-1:]) * w.mean(0), 2),
}


def cases() -> Iterator[tuple[str, Fn, tuple[int, ...], int, torch.dtype, bool]]:
    """(name, function, shape, vectors, dtype, dynamic rows), sizes at random."""
    rng = random.Random(11)
    for number, (name, (fn, vectors)) in enumerate(FUNCTIONS.items()):
        for dynamic in (False, True):
            columns = rng.choice([rng.randint(17, 70), rng.randint(100, 400), 64, 1024])
            lead = [rng.randint(LEAST // columns + 1, LEAST // columns * 2 + 40)]
            if not dynamic:
                lead = [[], [3], [2, 2]][number % 3] + lead
            dtype = torch.bfloat16 if number % 3 == 1 and not dynamic else torch.float32
            yield f"{name}, {'dynamic' if dynamic else 'static'}", fn, (*lead, columns), vectors, dtype, dynamic
    for name, (fn, vectors) in GROUPED.items():
        for images in (2, rng.choice([3, 5])):
            columns = rng.choice([rng.randint(17, 70), 64, 256])
            rows = max(48, LEAST // columns // images + rng.randint(1, 40))
            yield f"{name}, {images} images", fn, (images, rows, columns), vectors, torch.float32, False


class Watched(Interpreted):
    mixed = 0

    def _kernel(self, kernel: Any) -> Any:
        launch = super()._kernel(kernel)

        def counted(*args: int) -> None:
            self.mixed += "sum0 = sum0 +" in kernel.source
            launch(*args)

        return counted


def problem(fn: Fn, shape: tuple[int, ...], vectors: int, dtype: torch.dtype, dynamic: bool, fallback: bool) -> str:
    torch._dynamo.reset()
    backend = Watched(fallback)
    compiled = torch.compile(fn, backend=backend, dynamic=None)
    for rows in (shape[0], shape[0] * 2 + 1, 3, 1) if dynamic else shape[:1]:
        torch.manual_seed(rows)
        own = (rows, shape[-1]) if fn in (f for f, _ in GROUPED.values()) else shape[-1:]
        args = [torch.randn(rows, *shape[1:]).to(dtype), *(torch.randn(own).to(dtype) for _ in range(vectors))]
        if dynamic and rows > 1:
            torch._dynamo.mark_dynamic(args[0], 0)
        before = backend.mixed
        wrong = difference(fn, compiled, args)
        if wrong or (backend.mixed == before and rows > 1):
            return wrong or f"rows are not reduced where columns are summed, with {rows} rows"
    return ""


def difference(fn: Fn, compiled: Fn, args: list[torch.Tensor]) -> str:
    """Errors relative to the largest value of each result: sums of columns cancel."""
    results = []
    for f, dtype in ((fn, torch.float64), (compiled, args[0].dtype)):
        mine = [a.detach().to(dtype).requires_grad_() for a in args]
        if f is compiled and torch._dynamo.is_dynamo_supported():
            for a, b in zip(mine, args, strict=True):
                a.__dict__.update({k: v for k, v in b.__dict__.items() if k.startswith("_dynamo")})
        out = f(*mine)
        torch.manual_seed(1)
        grads = torch.autograd.grad(out, mine, torch.randn(out.shape, dtype=torch.float64).to(args[0].dtype).to(dtype))
        results.append([out.detach(), *grads])
    bound = 2e-2 if args[0].dtype == torch.bfloat16 else 2e-5
    for i, (want, got) in enumerate(zip(*results, strict=True)):
        error = (got.double() - want).abs().max() / want.abs().max().clamp_min(1)
        if not error <= bound or got.stride() != want.stride():
            return f"result {i} of shape {tuple(got.shape)}: error {float(error)}"
    return ""


def main(wanted: list[str]) -> dict[str, str]:
    return {
        f"{name}{', misaligned' if fallback else ''}, {tuple(case[1])}": told(problem, *case, fallback)
        for name, *case in cases()
        if not wanted or name.partition(",")[0] in wanted
        for fallback in (False, True)
    }


if __name__ == "__main__":
    answer(main, sys.argv[1:])
