"""Fused attention beside TorchInductor's and PyTorch's own, forward and backward, on one GPU in one run.

    python -m tests.bench.flex --out DIR [--all] [--only causal] [--shape 4,16,16,4096,64] [--sweep]

Writes DIR/flex.json and prints a table. Times are of the GPU, by events around many calls, in rounds of all
contenders: the median, and the spread of the middle half. ``--sweep``: reflib alone, each tiling
instead of the default.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from reflib.lab.rivals import own_copy
from reflib.pipeline import dynamo_backend
from reflib.timing import event_sampler, interleave

# B, H, heads of keys, S, D
SHAPES = [(4, 16, 16, 4096, 64), (4, 16, 16, 4096, 128), (1, 32, 32, 8192, 128), (8, 32, 8, 2048, 128)]
WINDOW = 1024
BACKENDS: dict[str, Any] = {"reflib": dynamo_backend, "inductor": "inductor"}
ROUNDS = 7


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def window(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j < WINDOW)


def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + torch.exp2(-0.5 * (h + 1)) * (j - i)


KINDS: dict[str, tuple[Any, Any]] = {
    "noop": (None, None), "causal": (None, causal), "window": (None, window), "alibi": (alibi, causal),
}  # fmt: skip


@dataclass
class Row:
    kind: str
    shape: tuple[int, ...]
    phase: str
    who: str
    us: float
    spread: float
    tflops: float
    error: float  # against float32 attention on a slice of the heads, relative to the largest value
    note: str = ""


class Problem:
    def __init__(self, kind: str, shape: tuple[int, ...]):
        self.kind, self.shape = kind, shape
        b, h, hk, s, d = shape
        self.score, mask = KINDS[kind]
        self.mask = None if mask is None else create_block_mask(mask, None, None, s, s, device="cuda")
        torch.manual_seed(0)
        make = lambda heads: torch.randn(b, heads, s, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)  # noqa: E731
        self.args = make(h), make(hk), make(hk)
        self.grad = torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16)
        reach = {"noop": s, "window": WINDOW}.get(kind, s / 2)
        self.flops = {"forward": 4 * b * h * s * reach * d, "backward": 10 * b * h * s * reach * d}
        self.gqa = h != hk

    def flex(self, q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, self.score, self.mask, enable_gqa=self.gqa)

    def sdpa(self, q: Any, k: Any, v: Any) -> Any:
        causal = self.kind == "causal"
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=self.gqa)

    def contenders(self, sweep: bool) -> Iterator[tuple[str, Callable[..., Any]]]:
        def fresh(backend: str) -> Callable[..., Any]:
            """Compiled by itself."""

            def call(q: Any, k: Any, v: Any) -> Any:
                return self.flex(q, k, v)

            return torch.compile(own_copy(call), backend=BACKENDS[backend], dynamic=False)

        if sweep:
            yield from self.swept(fresh)
            return
        yield "reflib", fresh("reflib")
        yield "inductor", fresh("inductor")
        if self.kind in ("noop", "causal"):
            yield "sdpa", self.sdpa

    def swept(self, fresh: Callable[[str], Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
        from reflib.schedule import flex

        default = flex.tilings
        yield "default", fresh("reflib")
        for kind in ("forward", "dq", "dkv"):
            seen: list[Any] = []

            def chosen(kernel: Any, heads: Any, target: Any, kind: str = kind, seen: list[Any] = seen) -> Any:
                """The default of the other kinds; of this one, one after another that was not seen yet."""
                found = default(kernel, heads, target)
                if kernel.kind != kind:
                    return found
                new = [t for t in found if t not in seen][:1]
                seen += new or [None]
                return new or found

            while True:
                flex.tilings = chosen
                f = fresh("reflib")
                torch.autograd.grad(f(*self.args), self.args, self.grad)  # compiled while this is chosen
                flex.tilings = default
                if seen[-1] is None:
                    break
                yield f"{kind} {seen[-1]}", f

    def expected(self) -> tuple[torch.Tensor, ...]:
        """The first head of the first batch, in float32 by the formula: out, and the gradient of q."""
        q, k, v = (x[:1, :1].detach().float() for x in self.args)
        s, g = q.shape[2], self.grad[:1, :1].float()
        q.requires_grad_()
        at = torch.arange(s, device="cuda")
        scores = q @ k.mT / q.shape[3] ** 0.5
        if self.score is not None:
            scores = self.score(scores, 0, torch.tensor(0, device="cuda"), at[:, None], at[None, :])
        if self.mask is not None:
            scores = scores.masked_fill(~KINDS[self.kind][1](0, 0, at[:, None], at[None, :]), float("-inf"))
        out = torch.softmax(scores, -1) @ v
        return out.detach(), torch.autograd.grad(out, q, g)[0]


def measure(p: Problem, sweep: bool) -> list[Row]:
    forward, backward, errors = {}, {}, {}
    notes: dict[str, str] = {}
    want = p.expected()
    for name, f in p.contenders(sweep):
        try:
            out = f(*p.args)
            of_q = torch.autograd.grad(out, p.args, p.grad, retain_graph=True)[0]
            got = out[:1, :1].float(), of_q[:1, :1].float()
            errors[name] = [((g - w).abs().max() / w.abs().max()).item() for g, w in zip(got, want)]
            plain = [x.detach() for x in p.args]
            forward[name] = lambda f=f, plain=plain: f(*plain)
            backward[name] = lambda out=out: torch.autograd.grad(out, p.args, p.grad, retain_graph=True)
            forward[name]()
        except Exception as e:
            notes[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:100]}"
    rows = []
    for i, (phase, runs) in enumerate({"forward": forward, "backward": backward}.items()):
        samplers = {name: event_sampler(run) for name, run in runs.items()}
        for name, seconds in interleave(samplers, ROUNDS, math.inf).items():
            low, us, high = (s * 1e6 for s in statistics.quantiles(seconds, n=4))
            flops = p.flops[phase] / us * 1e-6
            rows.append(Row(p.kind, p.shape, phase, name, us, (high - low) / us, flops, errors[name][i]))
    return rows + [Row(p.kind, p.shape, "", n, 0, 0, 0, 0, why) for n, why in notes.items()]


def table(rows: list[Row]) -> None:
    base = {(r.kind, r.shape, r.phase): r.us for r in rows if r.who in ("inductor", "default")}
    for r in rows:
        ratio = r.us / base.get((r.kind, r.shape, r.phase), r.us or 1)
        shape = ",".join(map(str, r.shape))
        text = f"{r.us:9.1f} us ±{r.spread:5.1%} {r.tflops:6.0f} TFLOP/s  {ratio:5.2f}x  error {r.error:.1e}"
        print(f"{r.kind:7} {shape:20} {r.phase:8} {r.who:22} {r.note or text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--all", action="store_true", help="every kind at every shape; takes minutes")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--shape", help="B,H,Hk,S,D")
    parser.add_argument("--sweep", action="store_true")
    a = parser.parse_args()
    torch._functorch.config.donated_buffer = False  # the backward runs again and again
    torch.set_float32_matmul_precision("highest")
    shapes = [tuple(map(int, a.shape.split(",")))] if a.shape else SHAPES
    every = a.all or a.only or a.shape
    kinds = {s: [a.only] if a.only else [*KINDS] if every or s == SHAPES[0] else ["causal"] for s in shapes}
    pairs = [(kind, s) for s in shapes for kind in kinds[s]]
    rows: list[Row] = []
    a.out.mkdir(parents=True, exist_ok=True)
    for kind, shape in pairs:
        found = measure(Problem(kind, shape), a.sweep)
        table(found)
        rows += found
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        (a.out / "flex.json").write_text(json.dumps({**about, "rows": [asdict(r) for r in rows]}, indent=1))


if __name__ == "__main__":
    main()
