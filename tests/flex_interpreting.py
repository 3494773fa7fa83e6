"""Runs ``flex_attention``'s fused kernels in Triton's interpreter, on a CPU's tensors: a program of its own, because
the interpreter must be chosen before Triton is imported.

    TRITON_INTERPRET=1 python tests/flex_interpreting.py case ...

Prints one JSON object: for each case, what is wrong with it, or nothing. As the core alone does it
(``pipeline.targets``): nothing prints code for CPUs, so what is interpreted is an sm_90's.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from flex_cases import CASES, GQA, Case, flex
from flex_decode_cases import DECODE, at_end
from interpreter import answer, told

from reflib.plugins import PLUGS

del PLUGS["generate.PRINTERS"]["cpu"]
PLUGS["wrap.BINDERS"].clear()

from reflib.ir.program import kernel_variants  # noqa: E402
from reflib.lower.context import LoweringContext  # noqa: E402
from reflib.options import Options  # noqa: E402
from reflib.pipeline import Backend  # noqa: E402


def problem(case: Case, kernel: str = "") -> str:
    """What is wrong with it. ``kernel``: what the forward's is to be named."""
    torch._dynamo.reset()
    stages: list[Any] = []
    fn, backend = case.function(case.block_mask()), Backend(Options(verify=True), stages.append)
    wrong = case.wrong(torch.compile(fn, backend=backend, dynamic=case.dynamic))
    kernels = {v.variants[0].kernel.name for s in stages for v in kernel_variants(s.scheduled.nodes)}
    fused = [n for n in kernels if "flex_attention" in n or "flex_decoding" in n]
    if len(fused) != 1 + 2 * case.trains or not any(kernel in n for n in fused):
        return f"the kernels are {kernels}; {[s.decisions for s in stages]}"
    return wrong


def lengths(*keys: int) -> str:
    """One compiled function for several numbers of keys, grouped heads and a mask among what it is given."""
    stages: list[Any] = []

    def fn(q: Any, k: Any, v: Any, table: Any, mask: Any) -> Any:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + table[h, j]

        return flex.flex_attention(q, k, v, score, mask, enable_gqa=True)

    compiled = torch.compile(fn, backend=Backend(Options(verify=True), stages.append))
    for n in keys:
        case = Case(
            (2, 6, 3, 16), (2, 2, n), mask=at_end(n, 3), score=lambda s, b, h, i, j, t: s + t[h, j], options=GQA
        )
        case = replace(case, trains=False)
        offset, mask = torch.tensor(n - 3), case.block_mask()
        mask.mask_mod = lambda b, h, i, j, offset=offset: i + offset >= j

        def run(q: Any, k: Any, v: Any, table: Any, mask: Any = mask) -> Any:
            for x, d in ((k, 2), (v, 2), (table, 1), (mask.kv_indices, 3), (mask.full_kv_indices, 3)):
                torch._dynamo.maybe_mark_dynamic(x, d)
            return compiled(q, k, v, table, mask)

        if wrong := case.wrong(run):
            return f"{n} keys: {wrong}"
    kernels = {v.variants[0].kernel.name for s in stages for v in kernel_variants(s.scheduled.nodes)}
    return "" if len(stages) < len(keys) and any("flex_decoding" in k for k in kernels) else f"{len(stages)}: {kernels}"


_options = flex._apply_kernel_options


def options(q: Any, k: Any, v: Any, lse: Any, kernel_options: Any, aux: Any = None) -> Any:
    """As for a GPU's tensors: the maximum of the scores may be returned."""
    asked = None if aux is None else flex.AuxRequest(lse=aux.lse)
    return {**_options(q, k, v, lse, kernel_options, asked), "OUTPUT_MAX": aux is not None and aux.max_scores}


def problems(*names: str) -> dict[str, str]:
    flex._validate_device = lambda *a: None  # PyTorch has the backward for GPUs only
    flex._apply_kernel_options = options
    LoweringContext.on_gpu = property(lambda self: True)
    found = {name: told(problem, *of(name)) for name in names if name not in MORE}
    return found | {name: told(lengths, *MORE[name]) for name in names if name in MORE}


MORE = {"decoding several lengths": (300, 457, 20, 1024)}


def of(name: str) -> tuple[Case, str]:
    decoding = name.removeprefix("decoding ")
    return (CASES[name], "") if decoding == name else (DECODE[decoding], "flex_decoding")


if __name__ == "__main__":
    answer(problems, *sys.argv[1:])
