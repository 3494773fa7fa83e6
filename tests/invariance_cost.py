"""What ``batch_invariant`` costs: times with it over times without, as a table.

    python -m tests.invariance_cost [--device cuda] [--dtype bfloat16]

Asked for: 1.3 at most. Each time is the least of several; on a CPU one thread computes.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import reflib
from tests.invariance_cases import Block

Made = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def programs(device: str, dtype: torch.dtype, width: int) -> dict[str, Made]:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    gelu: Callable[..., Any] = lambda x, w: F.gelu(F.linear(x, w))  # noqa: E731
    out: dict[str, Made] = {}
    for rows in (1, 8, 64, 512):
        out[f"linear, {rows} rows"] = F.linear, (some(rows, width), some(width, width))
        out[f"linear and GELU, {rows} rows"] = gelu, (some(rows, width), some(width, width))
    norm: Callable[..., Any] = lambda x: F.layer_norm(x, x.shape[-1:])  # noqa: E731
    out["layer norm"], out["softmax"] = (norm, (some(512, width),)), (lambda x: x.softmax(-1), (some(512, width),))
    out["log-softmax, long rows"] = lambda x: x.log_softmax(-1), (some(16, 32 * width),)
    q = [some(2, 8, 256, 64) for _ in range(3)]
    out["attention, 256 keys"] = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), tuple(q)
    block = Block(width // 2, 8, 4).to(device, dtype).eval()
    out["block, 4 x 64"] = block, (torch.randint(101, (4, 64), device=device),)
    return out


def best(run: Callable[..., Any], args: tuple[torch.Tensor, ...], times: int = 15) -> float:
    run(*args)
    seconds = []
    for _ in range(times):
        if args[0].is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run(*args)
        if args[0].is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    print(f"{'program':28} {'plain, us':>10} {'with, us':>10} {'ratio':>6}")
    with torch.no_grad():
        for name, (fn, args) in programs(given.device, getattr(torch, given.dtype), 1024).items():
            torch._dynamo.reset()
            plain, same = (best(reflib.compile(fn, batch_invariant=on), args) for on in (False, True))
            print(f"{name:28} {plain * 1e6:10.1f} {same * 1e6:10.1f} {same / plain:6.2f}", flush=True)


if __name__ == "__main__":
    main()
