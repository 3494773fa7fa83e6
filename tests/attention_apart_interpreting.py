"""Runs attention under ``batch_invariant``, as a GPU has it, in Triton's interpreter (see ``flex_interpreting``).

TRITON_INTERPRET=1 python tests/attention_apart_interpreting.py

Prints one JSON object: for each case, what is wrong with it, or nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from interpreter import answer, told

from reflib.plugins import PLUGS

del PLUGS["generate.PRINTERS"]["cpu"]
PLUGS["wrap.BINDERS"].clear()

from reflib.capture import attention_apart  # noqa: E402
from reflib.ir.program import kernel_variants  # noqa: E402
from reflib.lower.context import LoweringContext  # noqa: E402
from reflib.options import Options  # noqa: E402
from reflib.pipeline import Backend  # noqa: E402

# Queries, keys, heads of queries and of keys, and how they are masked.
CASES: dict[str, tuple[int, int, int, int, str]] = {
    "plain": (20, 70, 2, 2, ""),
    "causal": (300, 300, 1, 1, "causal"),
    "causal, more keys": (150, 290, 1, 1, "causal"),
    "causal, more queries": (290, 150, 2, 1, "causal"),
    "mask": (20, 70, 4, 2, "bool"),
    "bias": (20, 70, 2, 2, "bias"),
    "queries of one head": (20, 30, 1, 4, "apart"),
    "keys of one head, values of more": (20, 30, 4, 4, "apart"),
}


def problem(name: str) -> str:
    m, n, heads, shared, how = CASES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    batch = 1 if how == "causal" else 2  # (those have many blocks, and the interpreter takes its time for each)
    q, k, v = (torch.randn(batch, h, s, 16) for h, s in ((heads, m), (shared, n), (shared, n)))
    k = k[:, :1] if how == "apart" and heads > 1 else k
    mask = {"bool": torch.rand(2, 1, m, n) > 0.3, "bias": torch.randn(m, n)}.get(how)
    if how == "bool":
        mask[0, 0, 3] = False  # a row without keys
    weights, stages = torch.randn(batch, max(heads, shared), m, 16), list[Any]()

    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=how == "causal", enable_gqa=heads > shared)

    def results(run: Any, *given: Any) -> list[Any]:
        own = [t.detach().requires_grad_() for t in given]
        out = run(*own)
        return [out.detach(), *torch.autograd.grad(out, own, weights.to(out.dtype))]

    backend = Backend(Options(verify=True, batch_invariant=True), stages.append)
    got = results(torch.compile(fn, backend=backend), q, k, v)
    launched = [v.variants[0].kernel.name for s in stages for v in kernel_variants(s.scheduled.nodes)]
    if sum("flex_attention" in k for k in launched) != 3 * (how != "apart"):
        return f"other kernels: {launched}"
    if mask is not None and how == "bias":
        mask = mask.double()
    want = results(fn, q.double(), k.double(), v.double())
    off = [(a - b).abs().max().item() for a, b in zip(got, want)]
    return "" if max(off) < 1e-4 else f"off by {off}"


def problems() -> dict[str, str]:
    LoweringContext.on_gpu = property(lambda self: True)
    attention_apart._on_gpu = lambda *a: True
    return {name: told(problem, name) for name in CASES}


if __name__ == "__main__":
    answer(problems)
