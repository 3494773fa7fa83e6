"""Runs ``flex_attention``'s fused kernels in Triton's interpreter, on a CPU's tensors: a program of its own, because
the interpreter must be chosen before Triton is imported.

    TRITON_INTERPRET=1 python tests/flex_interpreting.py [case ...]

Prints one JSON object: for each case, what is wrong with it, or nothing. As the core alone does it
(``pipeline.targets``): nothing prints code for CPUs, so what is interpreted is an sm_90's.
"""

import sys
from typing import Any

import torch
from flex_cases import CASES, Case, flex
from flex_decode_cases import DECODE
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
    if len([n for n in kernels if "flex_" in n]) != 1 + 2 * case.trains or not any(kernel in n for n in kernels):
        return f"the kernels are {kernels}; {[s.decisions for s in stages]}"
    return wrong


_options = flex._apply_kernel_options


def options(q: Any, k: Any, v: Any, lse: Any, kernel_options: Any, aux: Any = None) -> Any:
    """As for a GPU's tensors: the maximum of the scores may be returned."""
    asked = None if aux is None else flex.AuxRequest(lse=aux.lse)
    return {**_options(q, k, v, lse, kernel_options, asked), "OUTPUT_MAX": aux is not None and aux.max_scores}


def problems(*names: str) -> dict[str, str]:
    flex._validate_device = lambda *a: None  # PyTorch has the backward for GPUs only
    flex._apply_kernel_options = options
    LoweringContext.on_gpu = property(lambda self: True)
    return {name: told(problem, *of(name)) for name in names or CASES}


def of(name: str) -> tuple[Case, str]:
    decoding = name.removeprefix("decoding ")
    return (CASES[name], "") if decoding == name else (DECODE[decoding], "flex_decoding")


if __name__ == "__main__":
    answer(problems, *sys.argv[1:])
