"""Random ops.

``reflib::random`` is a loop nest: arithmetic on the words of ``ir/random``. ``capture/random`` says where it comes
from, and which numbers these are.

Those in what ``torch.utils.checkpoint`` wraps are called again in the backward, with the random state of the forward.
The partitioner writes these higher-order calls when forward and backward are apart, without the fake tensors that other
nodes have. They are calls of Python functions, for their order (``Extern.effect``) as well.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._prims.rng_prims  # (defines the calls)
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from reflib.capture.random import drawn
from reflib.ir.program import View

from .body import NestBuilder, Value, element
from .context import LoweringContext
from .extern import extern
from .rules import RULES, Unsupported

_STATE_BYTES = {"cpu": torch.get_rng_state().numel(), "cuda": 16}  # (a seed and an offset)


@element("reflib::random")
def random(k: NestBuilder, seed: View, stream: int, kind: str, size: Any, order: Sequence[int], dtype: Any) -> Value:
    key, number = k.load(seed, [0]), k.value(stream, torch.int64)

    def word(at: Any) -> Value:
        return Value(k, k.b.op("philox", key.id, number.id, k.index(at).id, dtype=torch.int32))

    return drawn(kind, dtype, word, k.linear(range(len(k.shape))), lambda value, bits: value.op("shl", bits))


# -- in a checkpoint ---------------------------------------------------------------------------------------
def run_and_save_rng_state(cx: LoweringContext, op: Any, *args: Any, **kwargs: Any) -> Any:
    """(the random state before, what ``op`` returns)."""
    result, mode = _results(cx, op, cx.node.args[1:])
    device = next(t.device for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
    with mode:
        state = torch.empty(_STATE_BYTES[device.type], dtype=torch.uint8, device="cpu")
    cx.node.meta["val"] = state, result  # (the capture leaves both calls without; views of a result ask for it)
    return extern(replace(cx, fake=(state, result)), cx.node.target, (op, *args), kwargs, "random: eager's own numbers")


def run_with_rng_state(cx: LoweringContext, state: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``op`` returns under that state."""
    result, _ = _results(cx, op, cx.node.args[2:])
    cx.node.meta["val"] = result
    return extern(replace(cx, fake=result), cx.node.target, (state, op, *args), kwargs, "random: eager's own numbers")


def _results(cx: LoweringContext, op: Any, args: Any) -> tuple[Any, Any]:
    """What ``op`` returns, as fake tensors, and the mode that these belong to."""
    args, kwargs = torch.fx.map_arg((args, cx.node.kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode([n.meta.get("val") for n in cx.node.graph.nodes])
    if mode is None:
        raise Unsupported("a graph without fake tensors")
    with mode:
        return op(*args, **kwargs), mode


for fn in (run_and_save_rng_state, run_with_rng_state):
    RULES[getattr(torch.ops.higher_order, fn.__name__)] = fn
