"""Weight-only products (8 and 4 bits), row-wise scaled 8-bit floats, and grouped products, on one GPU in one run:

    python -m tests.bench.products --out products.json [--seconds 1500] [--only int4] [--who reflib,eager] [--list]

beside eager and TorchInductor's ``max-autotune``. ``reflib`` takes the static choice, ``reflib tuned`` measures. Each
contender's calls, on several copies of the weights so that these come from memory, are a CUDA graph; what cannot be
captured is timed by events. Rows: microseconds per call, the median of rounds that alternate between contenders, and
the spread of the middle half. Written after every case; cases that are there already are not run again, so a run that
was ended (``--seconds``: no case begins later) is continued by the same command.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from reflib.lab.rivals import own_copy
from reflib.lab.timing import Sampler, make_sampler
from reflib.options import Options
from reflib.pipeline import Backend, Stages
from reflib.timing import interleave, turning

Call = Callable[..., torch.Tensor]
ROWS = (16, 1, 64, 256, 8)
LAYERS = ((8192, 1280), (1024, 8192), (8192, 7168), (3584, 8192))  # K, N of Llama-2-70B on 8 GPUs
SCALED = ((4096, 7168, 8192), (256, 8192, 3584), (16, 1280, 8192))  # M, N, K
GROUP = 128  # weights of 4 bits per scale
FROM_MEMORY = 2**28  # bytes of weights in all copies: five times an H200's L2
ROUNDS = 9
WHO = ("eager", "inductor", "reflib", "reflib tuned")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def int8(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w.to(x.dtype) * s[:, None])


def int4(x: torch.Tensor, p: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Two weights per byte, one scale per GROUP of a row."""
    n = p.shape[0]
    w = torch.stack([p & 15, p >> 4], -1).view(n, s.shape[1], -1)
    return F.linear(x, ((w.to(x.dtype) - 8) * s[:, :, None]).view(n, -1))


def scaled(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(a, b.t(), r, c, out_dtype=BF16)


def scaled_gelu(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return F.gelu(scaled(a, b, r, c))


def grouped(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, w, offs=ends)


def grouped_gradient(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x.t(), y, offs=ends)


@dataclass
class Case:
    """``make``: device -> arguments. ``moved``: bytes that have to be, with weights read once. ``weights``: of those,
    what further copies are made of."""

    section: str
    name: str
    fn: Call
    make: Callable[[str], tuple[torch.Tensor, ...]]
    flops: float
    moved: float
    weights: float


def cases(small: bool = False) -> list[Case]:
    """``small``: sizes that a CPU multiplies at once."""
    out: list[Case] = []
    for m, (k, n) in itertools.product(ROWS, LAYERS):
        k, n = (256, 128) if small else (k, n)
        io = 2.0 * (m * k + m * n)
        name, flops = f"{m} x {n} x {k}", 2.0 * m * n * k
        out.append(Case("int8", name, int8, _int8(m, n, k), flops, io + n * k, n * k))
        out.append(Case("int4", name, int4, _int4(m, n, k), flops, io + n * k / 2, n * k / 2))
    for fn, (m, n, k) in itertools.product((scaled, scaled_gelu), SCALED):
        m, n, k = (32, 64, 64) if small else (m, n, k)
        moved = m * k + n * k + 2.0 * m * n
        out.append(Case("fp8", f"{fn.__name__} {m} x {n} x {k}", fn, _fp8(m, n, k), 2.0 * m * n * k, moved, n * k))
    for fn, t in ((grouped, 128), (grouped, 1024), (grouped, 8192), (grouped_gradient, 8192)):
        t, k, n = (64, 32, 48) if small else (t, 4096, 7168)
        moved = 2.0 * (t * k + t * n + 8 * k * n)
        make = _grouped(t, n, k, fn is grouped_gradient)
        out.append(Case("grouped", f"{fn.__name__} {t} rows, 8 of {k} x {n}", fn, make, 2.0 * t * k * n, moved, moved))
    first = {c.section: 0 for c in out}
    order: list[tuple[int, int, Case]] = []  # one of each section in turn: a run that ends early has seen all of them
    for c in out:
        order.append((first[c.section], len(order), c))
        first[c.section] += 1
    return [c for _, _, c in sorted(order, key=lambda o: o[:2])]


def _randn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device)


def _int8(m: int, n: int, k: int) -> Callable[[str], tuple[torch.Tensor, ...]]:
    def make(device: str) -> tuple[torch.Tensor, ...]:
        w = torch.randint(-127, 128, (n, k), device=device).to(torch.int8)
        return _randn(m, k, device=device).to(BF16), w, (torch.rand(n, device=device) / 99).to(BF16)

    return make


def _int4(m: int, n: int, k: int) -> Callable[[str], tuple[torch.Tensor, ...]]:
    def make(device: str) -> tuple[torch.Tensor, ...]:
        p = torch.randint(0, 256, (n, k // 2), device=device).to(torch.uint8)
        return _randn(m, k, device=device).to(BF16), p, (torch.rand(n, k // GROUP, device=device) / 9).to(BF16)

    return make


def _fp8(m: int, n: int, k: int) -> Callable[[str], tuple[torch.Tensor, ...]]:
    def make(device: str) -> tuple[torch.Tensor, ...]:
        a, b = (_randn(rows, k, device=device).to(FP8) for rows in (m, n))
        return a, b, torch.rand(m, 1, device=device), torch.rand(1, n, device=device)

    return make


def _grouped(t: int, n: int, k: int, gradient: bool) -> Callable[[str], tuple[torch.Tensor, ...]]:
    def make(device: str) -> tuple[torch.Tensor, ...]:
        share = torch.tensor([0.05, 0.2, 0.1, 0.15, 0.02, 0.18, 0.2, 0.1]).cumsum(0)
        ends = (share * t / 8).round().mul(8).to(torch.int32).clamp(max=t).to(device)
        x = _randn(t, k, device=device).to(BF16)
        return x, _randn(*((t, n) if gradient else (8, k, n)), device=device).to(BF16) / k**0.5, ends

    return make


# -- contenders -------------------------------------------------------------------------------------
def contender(who: str, fn: Call, seen: list[Stages]) -> Call:
    """Compiled by itself. ``seen``: what reflib compiles goes there."""
    if who == "eager":
        return fn
    own = own_copy(fn)
    if who == "inductor":
        return torch.compile(own, dynamic=False, mode="max-autotune-no-cudagraphs")
    options = Options(autotune="blocking" if who == "reflib tuned" else "off")
    return torch.compile(own, dynamic=False, backend=Backend(options, seen.append))


@dataclass
class Row:
    """``us``: per call; ``error``: against float32 operands, relative to the largest value; ``how``: the clock."""

    section: str
    case: str
    who: str
    us: float = 0.0
    spread: float = 0.0
    gb_s: float = 0.0
    tflops: float = 0.0
    error: float = 0.0
    compile_s: float = 0.0
    how: str = ""
    chosen: list[str] = field(default_factory=list)
    note: str = ""


def measure(c: Case, who: list[str], device: str) -> Iterator[Row]:
    torch.manual_seed(0)
    count = min(24, max(1, int(FROM_MEMORY // c.weights))) if device == "cuda" else 1
    sets = [c.make(device) for _ in range(count)]
    want = reference(c, sets[0])
    rows: dict[str, Row] = {}
    samplers: dict[str, Sampler] = {}
    for name in who:
        row = rows[name] = Row(c.section, c.name, name)
        try:
            begun = time.perf_counter()
            f = contender(name, c.fn, seen := list[Stages]())
            got = f(*sets[0])
            row.compile_s = time.perf_counter() - begun
            row.error = float((got.float() - want).abs().max() / want.abs().max())
            calls = turning(lambda args, f=f: f(*args), sets)  # type: ignore[misc]
            samplers[name], row.how, _ = make_sampler(calls, "auto", "warm", torch.device(device))
            row.chosen = [str(d.winner) for s in seen for d in s.decisions if d.op]
        except Exception as e:
            row.note = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:160]}"
    for name, seconds in interleave(samplers, ROUNDS, math.inf).items():
        low, median, high = (s * 1e6 for s in statistics.quantiles(seconds, n=4))
        row, row.us = rows[name], median
        row.spread, row.gb_s, row.tflops = (high - low) / row.us, c.moved / row.us * 1e-3, c.flops / row.us * 1e-6
    yield from rows.values()


def reference(c: Case, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Of float32 operands; grouped ones group by group."""
    if c.section == "fp8":
        a, b, r, s = args
        out = (a.float() @ b.float().t()) * r * s
        return F.gelu(out) if c.fn is scaled_gelu else out
    if c.section == "grouped":
        x, w, ends = args
        at = [0, *ends.tolist()]
        parts = [slice(i, j) for i, j in itertools.pairwise(at)]
        if c.fn is grouped_gradient:
            return torch.stack([x[p].float().t() @ w[p].float() for p in parts])
        return torch.cat([x[p].float() @ w[g].float() for g, p in enumerate(parts)])
    return c.fn(*(a.float() if a.is_floating_point() else a for a in args))


# -- the run ----------------------------------------------------------------------------------------
def show(rows: list[Row]) -> None:
    base = next((r.us for r in rows if r.who == "inductor" and r.us), 0.0)
    for r in rows:
        ratio = f"{base / r.us:5.2f}x" if base and r.us else ""
        rates = f"{r.gb_s:6.0f} GB/s {r.tflops:6.0f} TFLOP/s"
        text = f"{r.us:9.1f} us ±{r.spread:5.1%} {rates} {ratio} error {r.error:.1e} {r.how} {' '.join(r.chosen)}"
        print(f"{r.section:8} {r.case:42} {r.who:13} {r.note or text}", flush=True)


def run(found: list[Case], who: list[str], out: Path, seconds: float, device: str) -> list[str]:
    """Returns the cases that were left out for time."""
    ends = time.monotonic() + seconds
    data: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": []}
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    data |= {"device": where, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    left = []
    for c in found:
        there = {r["who"] for r in data["rows"] if (r["section"], r["case"]) == (c.section, c.name)}
        if not (missing := [w for w in who if w not in there]):
            continue
        if time.monotonic() > ends:
            left.append(f"{c.section} {c.name}")
            continue
        rows = list(measure(c, missing, device))
        show(rows)
        data["rows"] += [asdict(r) for r in rows]
        out.write_text(json.dumps(data, indent=1))
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1500, help="no case begins later")
    parser.add_argument("--only", help="a part of 'SECTION NAME'")
    parser.add_argument("--who", default=",".join(WHO))
    parser.add_argument("--list", action="store_true")
    a = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = [c for c in cases(small=device == "cpu") if not a.only or a.only in f"{c.section} {c.name}"]
    if a.list:
        print("\n".join(f"{c.section} {c.name}" for c in found))
        return
    if left := run(found, a.who.split(","), a.out, a.seconds, device):
        print(f"left out for time: {', '.join(left)}; the same command continues")


if __name__ == "__main__":
    main()
