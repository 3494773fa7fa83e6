"""Memory-bound functions for the sweep: pointwise, broadcasts, transposes, norms, softmax, reductions, gathers, scans.

    reflib sweep --models tests/bench/functions.py --dtype bfloat16 --out runs/functions
    python -m tests.bench.functions runs/functions/results.jsonl      TorchInductor's time over ours; share of a copy

Sizes are drawn at random with a fixed seed, odd ones too: a class is tuned, not a case. Each function is a module whose
tensors are parameters, so that training asks for their gradients.
"""

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reflib.lab.ratio_chart import geometric_mean
from reflib.sweep import Model

COPY_GBPS = 4282.0  # of an H200, read and written (PEERS)
BIG, SMALL = 2**26, 2**12  # elements of the main tensor on a GPU (at most), on a CPU


class Function(nn.Module):
    """``fn`` of parameters (float tensors) and constants (others)."""

    def __init__(self, fn: Callable[..., Any], *tensors: Tensor):
        super().__init__()
        self.fn, self.names = fn, []
        for i, t in enumerate(tensors):
            name = f"t{i}"
            if t.is_floating_point():
                self.register_parameter(name, nn.Parameter(t))
            else:
                self.register_buffer(name, t)
            self.names.append(name)

    def forward(self) -> Any:
        return self.fn(*(getattr(self, name) for name in self.names))


# -- functions; each with the shapes of its tensors, given (rows, columns) ------------------------------
def bn(training: bool) -> Callable[..., Tensor]:
    def batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        mean, var = (None, None) if training else (b.detach() * 0, w.detach().abs() * 0 + 1)
        return F.relu(F.batch_norm(x, mean, var, w, b, training))

    return batch_norm


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    return (x + mask).softmax(-1)


def ids(n: int, most: int) -> Tensor:
    return torch.randint(0, most, (n,))


def image(rng: random.Random, n: int, least: int = 4) -> tuple[int, int, int, int]:
    """(batch, channels, height, width) of about n elements."""
    c = rng.choice([24, 32, 64, 100, 128, 256, 320, 512])
    h = rng.choice([7, 14, 28, 31, 56, 112]) if n > SMALL else 4
    c = c if n > SMALL else 8
    return max(least, n // (c * h * h)), c, h, h


Made = tuple[Callable[..., Any], list[Tensor]]
MAKERS: dict[str, Callable[[random.Random, int, int], Made]] = {
    # name: (rng, rows, columns) -> (function, tensors)
    "chain": lambda g, m, n: (lambda x, y: torch.relu((x * 1.5 + y).sigmoid() * x - y), [rand(m, n), rand(m, n)]),
    "gelu_bias": lambda g, m, n: (lambda x, b: F.gelu(x + b), [rand(m, n), rand(n)]),
    "swiglu": lambda g, m, n: (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], [rand(m, 2 * n)]),
    "residual_scale": lambda g, m, n: (lambda x, y, s: x + y * s, [rand(m, n), rand(m, n), rand(n)]),
    "row_scale": lambda g, m, n: (lambda x, s: x * s.sigmoid()[:, None], [rand(m, n), rand(m)]),
    "transpose_add": lambda g, m, n: (lambda x, y: x.t() + y, [rand(m, n), rand(n, m)]),
    "heads": lambda g, m, n: (
        lambda x: x.view(m, -1, 8).transpose(0, 1).contiguous() * 2, [rand(m, 8 * max(1, n // 8))]),
    "rope": lambda g, m, n: (rope, [rand(max(1, m // 128), 128, 64), rand(128, 64), rand(128, 64)]),
    "cat": lambda g, m, n: (lambda x, y: torch.cat([x.relu(), y * 2], -1), [rand(m, n), rand(m, n)]),
    "pad": lambda g, m, n: (lambda x: F.pad(x, (3, 5)).tanh(), [rand(m, n)]),
    "layer_norm": lambda g, m, n: (lambda x, w, b: F.layer_norm(x, (n,), w, b), [rand(m, n), rand(n), rand(n)]),
    "rms_norm": lambda g, m, n: (lambda x, w: F.rms_norm(x, (n,), w), [rand(m, n), rand(n)]),
    "add_rms_norm": lambda g, m, n: (lambda x, y, w: F.rms_norm(x + y, (n,), w), [rand(m, n), rand(m, n), rand(n)]),
    "layer_norm_gelu": lambda g, m, n: (lambda x, w: F.gelu(F.layer_norm(x, (n,), w)), [rand(m, n), rand(n)]),
    "softmax": lambda g, m, n: (lambda x: x.softmax(-1), [rand(m, n)]),
    "log_softmax": lambda g, m, n: (lambda x: x.log_softmax(-1), [rand(m, n)]),
    "softmax_columns": lambda g, m, n: (lambda x: x.softmax(0), [rand(m, n)]),
    "masked_softmax": lambda g, m, n: (masked_softmax, [rand(max(1, m // 64), 64, n), rand(64, n)]),
    "logsumexp": lambda g, m, n: (lambda x: x.logsumexp(-1), [rand(m, n)]),
    "cross_entropy": lambda g, m, n: (lambda x, t: F.cross_entropy(x, t), [rand(m, n), ids(m, n)]),
    "sum_rows": lambda g, m, n: (lambda x: x.sum(-1), [rand(m, n)]),
    "sum_columns": lambda g, m, n: (lambda x: (x * x).sum(0), [rand(m, n)]),
    "sum_all": lambda g, m, n: (lambda x: x.square().mean(), [rand(m, n)]),
    "var_mean": lambda g, m, n: (lambda x: torch.var_mean(x, -1), [rand(m, n)]),
    "amax_argmax": lambda g, m, n: (lambda x: (x.amax(-1), x.argmax(-1)), [rand(m, n)]),
    "normalize": lambda g, m, n: (lambda x: F.normalize(x, dim=-1), [rand(m, n)]),
    "quantize": lambda g, m, n: (quantized, [rand(m, n)]),
    "mse": lambda g, m, n: (lambda x, y: F.mse_loss(x.sigmoid(), y), [rand(m, n), rand(m, n)]),
    "embedding": lambda g, m, n: (
        lambda w, i: F.embedding(i, w) * 2, [rand(max(8, m // 4), n), ids(m, max(8, m // 4))]),
    "gather_rows": lambda g, m, n: (lambda x, i: x.gather(1, i[:, None]).relu(), [rand(m, n), ids(m, n)]),
    "cumsum": lambda g, m, n: (lambda x: x.cumsum(-1), [rand(m, n)]),
    "batch_norm_eval": lambda g, m, n: (bn(False), norm_tensors(image(g, m * n))),
    "batch_norm_train": lambda g, m, n: (bn(True), norm_tensors(image(g, m * n))),
    "batch_norm_last": lambda g, m, n: (bn(True), norm_tensors(image(g, m * n), last=True)),
    "group_norm": lambda g, m, n: (lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)), norm_tensors(image(g, m * n))),
    "channel_bias": lambda g, m, n: (lambda x, w, b: F.gelu(x + b[:, None, None]), norm_tensors(image(g, m * n))),
    "squeeze": lambda g, m, n: (lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), [rand(*image(g, m * n))]),
    "avg_pool": lambda g, m, n: (lambda x: F.avg_pool2d(x.relu(), 3, 2, 1), [rand(*image(g, m * n))]),
    "max_pool": lambda g, m, n: (lambda x: F.max_pool2d(x, 2), [rand(*image(g, m * n))]),
    "global_pool": lambda g, m, n: (lambda x: F.adaptive_avg_pool2d(x.relu(), 1), [rand(*image(g, m * n))]),
    "upsample": lambda g, m, n: (lambda x: F.interpolate(x, scale_factor=2).relu(), [rand(*image(g, m * n // 4))]),
    "to_last": lambda g, m, n: (
        lambda x: (x * 2).contiguous(memory_format=torch.channels_last), [rand(*image(g, m * n))]),
    "pixel_shuffle": lambda g, m, n: (lambda x: F.pixel_shuffle(x, 2) + 1, [rand(*image(g, m * n))]),
}  # fmt: skip


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def norm_tensors(shape: tuple[int, int, int, int], last: bool = False) -> list[Tensor]:
    x = rand(*shape)
    x = x.to(memory_format=torch.channels_last) if last else x
    return [x, rand(shape[1]), rand(shape[1])]


# -- sizes ----------------------------------------------------------------------------------------------
COLUMNS = {  # what a class is called with, where not anything between 64 and 16384
    "cross_entropy": (1000, 130000), "log_softmax": (128, 65536), "logsumexp": (128, 130000), "softmax": (32, 65536),
    "sum_all": (64, 4096), "gather_rows": (64, 4096), "softmax_columns": (256, 4096),
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """``make``: see MAKERS; between how many columns; does it have gradients?"""

    make: Callable[[random.Random, int, int], Made]
    columns: tuple[int, int] = (64, 16384)
    train: bool = True


def sizes(least: int, most: int, rng: random.Random) -> tuple[int, int]:
    """(rows, columns) for a GPU: log-uniform, one in three a power of two, one in three a multiple of 8, one odd."""
    columns = int(math.exp(rng.uniform(math.log(least), math.log(most))))
    kind = rng.choice(["power", "even", "any"])
    columns = {"power": 1 << (columns.bit_length() - 1), "even": max(8, columns // 8 * 8), "any": columns | 1}[kind]
    elements = int(math.exp(rng.uniform(math.log(2**21), math.log(BIG))))
    return max(4, elements // columns), columns


def model(name: str, seed: int, entry: Entry) -> Model:
    rng = random.Random(f"{name} {seed}")
    rows, columns = sizes(*entry.columns, rng)
    state = rng.getstate()

    def build(real: bool) -> tuple[nn.Module, tuple[()]]:
        again = random.Random()
        again.setstate(state)
        fn, tensors = entry.make(again, *((rows, columns) if real else (64, SMALL // 64)))
        return Function(fn, *tensors), ()

    modes = ("inference", "training") if entry.train else ("inference",)
    return Model(f"{name} {rows}x{columns}", build, modes=modes, cost=0.2)


ENTRIES = {
    name: Entry(make, COLUMNS.get(name, (64, 16384)), name not in ("quantize", "amax_argmax"))
    for name, make in MAKERS.items()
}
MODELS = [model(name, seed, entry) for name, entry in ENTRIES.items() for seed in range(3)]


# -- results --------------------------------------------------------------------------------------------
def moved(named: Model, itemsize: int) -> dict[str, float]:
    """Bytes that must move, by mode: each tensor read once, results written once; the gradients likewise."""
    module, _ = named.build(True)
    with torch.no_grad():
        results = torch.utils._pytree.tree_leaves(module())
    read = sum(t.numel() * (itemsize if t.is_floating_point() else t.itemsize) for t in module.state_dict().values())
    written = sum(t.numel() * (itemsize if t.is_floating_point() else t.itemsize) for t in results)
    return {"inference": read + written, "training": 2 * (read + written) + read}


def main(path: str) -> None:
    times: dict[tuple[str, str], dict[str, float]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        found: dict[str, Any] = json.loads(line)
        job = found["job"]
        for row in found["rows"]:
            if row["metric"] == "time" and row.get("clock") == "graph" and row.get("status", "ok") == "ok":
                times.setdefault((job["mode"], job["model"]), {})[job["backend"]] = row["value"]
    from tests.bench import unseen

    known = {m.name: m for m in (*MODELS, *unseen.MODELS)}
    for mode in ("inference", "training"):
        rows = []
        for (its, name), by in times.items():
            if its == mode and {"reflib", "TorchInductor"} <= set(by) and name in known:
                share = moved(known[name], 2)[mode] / by["reflib"] / 1e3 / COPY_GBPS
                rows.append((by["TorchInductor"] / by["reflib"], share, name, by))
        for ratio, share, name, by in sorted(rows, key=lambda r: r[0]):
            print(f"{mode:10} {name:32} {ratio:5.2f} {share:5.0%}  {by}")
        print(f"{mode}: {len(rows)} functions, TorchInductor/reflib {geometric_mean([r[0] for r in rows]):.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
