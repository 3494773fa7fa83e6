"""Kernels under every launch that is measured, and some that a table may name, in Triton's interpreter beside the IR's.
A program of its own, because the interpreter must be chosen before Triton is imported.

    TRITON_INTERPRET=1 python tests/launch_programs.py

Each kernel is cut out of its program as it is for measuring. The GPU has two multiprocessors: few programs, of about a
millisecond each. Prints one JSON object: for each function, [names of the launches that ran, what is wrong].
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent / "cpu"))
from fuse_cases import lowered
from interpreter import answer

from reflib import target
from reflib.autotune.launches import Offer, question_about
from reflib.autotune.subprogram import splice
from reflib.capture import Graph
from reflib.ir.interpret import interpret
from reflib.ir.program import Program, kernel_variants
from reflib.options import Options
from reflib.pipeline import run
from reflib.tuning import generated, offered
from reflib.wrap.launch import launcher

target.CUDA["sm_90"] = (227, 2, "Hopper")
GPU = target.parse_target("sm_90")
MORE = 1  # launches that only a table may name, of each kernel
Tensor = torch.Tensor


def layer_norm_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    mean, rstd = x.mean(-1, keepdim=True), torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-5)
    xhat = (x - mean) * rstd
    gw = g * w
    inner = gw - gw.mean(-1, keepdim=True) - xhat * (gw * xhat).mean(-1, keepdim=True)
    return inner * rstd, (g * xhat).sum(0), g.sum(0)


def patches(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Rows of 2 x 2 pixels of all channels, normalized; their gradient, put back, and that of a weight."""
    n, c, h, v = x.shape
    y = x.view(n, c, h // 2, 2, v // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4 * c)
    rstd = torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
    inner = (g * w - y * ((g * w * y).mean(-1, keepdim=True) * rstd)) * rstd
    back = inner.view(n, h // 2, v // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4).reshape(x.shape)
    return y * rstd, back, (g * y * rstd).sum(0)


def functions() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    rng = random.Random(7)

    def of(low: int, high: int) -> int:
        return rng.randint(low, high)

    odd, columns, rows = of(40, 120) | 1, of(100, 300), of(130, 170)
    return {
        "rows": (lambda x: (torch.softmax(x, -1),), (torch.randn(of(40, 90), of(70, 900)),)),
        "long rows": (lambda x: torch.var_mean(x, -1), (torch.randn(2, of(17000, 20000)),)),
        "columns": (lambda x: ((x * x).sum(0), x.amax(0)), (torch.randn(of(40, 400), columns),)),
        "flat": (lambda x, y: (torch.relu(x + y), x * y), (torch.randn(odd, 333), torch.randn(odd, 333))),
        "transposed": (lambda x, y: (x.t() + y,), (torch.randn(columns, odd), torch.randn(odd, columns))),
        "patches": (patches, tuple(torch.randn(s) for s in ((1, 24, 16, 128), (512, 96), (96,)))),
        "scan": (lambda x: (x.cumsum(-1),), (torch.randn(of(4, 9), of(90, 200)),)),
        "in place": (lambda x, y: (y[2:].copy_(x[2:] * 2), x.sum(-1))[1:], (torch.randn(50, 60), torch.randn(50, 60))),
        "rows and columns": (
            layer_norm_backward, tuple(torch.randn(s) for s in ((rows, 128), (rows, 128), (128,))),
        ),
    }  # fmt: skip


def ran(program: Program, inputs: list[Any]) -> dict[str, Tensor]:
    """What is in the buffers after the program's kernels have run, each as its fast variant."""
    scheduled, kernels = generated(program, Options(), lambda device: GPU)
    have = dict(zip(program.inputs, inputs))
    for node in kernel_variants(scheduled.nodes):
        kernel = kernels[node.variants[0].kernel.name]
        for b, dtype in kernel.buffers:
            if b not in have:
                size, stride = ([int(e) for e in es] for es in (program.buffers[b].shape, program.buffers[b].strides))
                have[b] = torch.empty_strided(size, stride, dtype=dtype).fill_(77)
        with np.errstate(all="ignore"):
            launcher(kernel)(None, int(kernel.grid), *(have[b].data_ptr() for b, _ in kernel.buffers))
    return have


def wrong_with(program: Program, offer: Offer, rng: random.Random) -> tuple[list[str], str]:
    q = question_about(program, offer, Options(), kept=True)
    alone = q.region.program
    inputs = [torch.randn([int(e) for e in alone.buffers[b].shape]) for b in alone.inputs]
    assert q.text and len(set(alone.inputs)) == len(inputs)
    copies = [t.clone() for t in inputs]
    expected = [*interpret(alone, copies), *copies]
    keys = list(q.candidates)
    chosen = keys[: offer.few] + rng.sample(keys[offer.few :], min(MORE, len(keys) - offer.few))
    for key in chosen:
        copies = [t.clone() for t in inputs]
        have = ran(splice(alone, q.choice, q.candidates[key]), copies)
        got = [*(have[v.buffer] for v in alone.outputs), *copies]
        for n, (a, b) in enumerate(zip(got, expected, strict=True)):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
                return [*map(str, chosen)], f"{key}: result {n} is off by {float((a - b).abs().max()):.3g}"
    return [*map(str, chosen)], ""


def main() -> dict[str, tuple[list[str], str]]:
    rng = random.Random(3)
    out: dict[str, tuple[list[str], str]] = {}
    for name, (fn, args) in functions().items():
        torch.manual_seed(0)
        graph = Graph(torch.fx.GraphModule({}, torch.fx.Graph()))
        s = run(graph, Options(), "schedule", lowered(fn, args), lambda device: GPU)
        found = [wrong_with(s.scheduled, o, rng) for o in offered(s, s.scheduled)]
        out[name] = [n for names, _ in found for n in names], "; ".join(text for _, text in found if text)
    return out


if __name__ == "__main__":
    answer(main)
