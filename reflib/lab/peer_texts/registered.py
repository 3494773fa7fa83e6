"""inline-fusion: the chapter's function, its op registered with TorchInductor, in the first form that is accepted.

A form is the function with the op's implementations. torch 2.11 traces implementations of arguments without numbers
but outside of their mode, where `arange` makes a tensor with numbers, and the two do not mix: so indices are made of
the argument as well. Writes to the file `facts` which forms were refused, which one ran, whether it calls the op, and
its program.
"""

import itertools
import json
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
from torch._inductor.utils import run_and_get_code

from reflib import lab


def make(device, dtype, side, name, text, programs, facts):
    like = torch.empty(side, side, device=device, dtype=dtype)
    kernel = lab.load_kernel("keep_lower", text, name, programs, result=like)

    @torch.library.custom_op("reader::causal", mutates_args=())
    def causal(scores: torch.Tensor) -> torch.Tensor:
        return kernel(scores)

    @causal.register_fake
    def _(scores):
        return torch.empty_like(scores)

    def by_table(scores):  # makes its table: a tensor from outside is refused
        table = torch.ones_like(scores, dtype=torch.float32).tril()
        return (scores * table).to(scores.dtype)

    def by_index(scores):
        row = torch.arange(scores.shape[0], device=scores.device)[:, None]
        column = torch.arange(scores.shape[1], device=scores.device)
        return torch.where(column <= row, scores, 0.0)

    def by_counting(scores):  # by a table; its indices are counted, in a tensor that is computed from the argument
        at = (scores[:, 0].isnan() >= 0).to(torch.int32).cumsum(0)
        return scores * (at[None, :] <= at[:, None]).to(scores.dtype)

    implementations = {"": [by_index, by_table], ", by_counting": [by_counting]}
    functions = {
        "as it is": lambda s: torch.relu(causal(s * 0.125)).square(),
        "multiplied after the op": lambda s: torch.relu(causal(s) * 0.125).square(),
    }
    scores = torch.randn(side, side, device=device, dtype=dtype)
    want = torch.relu(torch.tril(scores * 0.125)).square()
    found: dict[str, Any] = {"refused": {}}
    for (form, function), (which, ways) in itertools.product(functions.items(), implementations.items()):
        torch._dynamo.reset()
        register_custom_op_autotuning(causal, configs=[CustomOpConfig(way) for way in ways])
        f = torch.compile(function, dynamic=False, mode="max-autotune-no-cudagraphs")
        try:
            with config.patch(fx_graph_cache=False):
                got, texts = run_and_get_code(f, scores)
        except Exception as error:
            found["refused"][form + which] = str(error).strip().splitlines()[0]
            continue
        assert torch.allclose(got, want, rtol=1e-2, atol=1e-2)
        call = texts[-1][texts[-1].rfind("def call"):]
        calls = "reader.causal.default(" in call
        found |= {"form": form, "calls the op": calls, "code": texts[-1]}
        break
    with open(facts, "w") as file:
        json.dump(found, file)
    if "form" not in found:
        raise NotImplementedError("; ".join(found["refused"].values()))
    return lambda: f(scores)
