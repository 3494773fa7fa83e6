"""Ops that communicate, with the candidates that reflib has for them. With ``autotune="blocking"`` they are measured on
all ranks at once (``tune``); else the first runs, which is the process group's own collective.

========================  =======================  ============================================================
op                        eager                    candidates
========================  =======================  ============================================================
all_reduce                the group's all-reduce   one-shot and two-shot over symmetric storage (``reduce``), of what
                                                   fits there: in pieces they lose to the group's, in place
all_gather_matmul         gather, then multiply    in ``chunks``: one is multiplied while the next is gathered;
                                                   over storage: a rank's rows while the next rank's are copied
matmul_reduce_scatter     multiply, then scatter   in ``chunks``: one is scattered while the next is multiplied;
                                                   over storage: the product, then its sum; or a rank's rows while
                                                   another's are copied there (``products``)
========================  =======================  ============================================================

The chunks are plain functional collectives: that one's communication runs while another is multiplied follows from the
order in which compiled programs start and wait (``collectives.overlapped``). Results of a chunked product may be summed
in another order than the whole one's, as with any other candidate for a product.

Gradients are those of the sum of all ranks' losses, as of torch's functional collectives; each op's is made of the
others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..lower.candidates import TAKEN_APART
from ..lower.custom_ops import CustomOpConfig, register_custom_op_autotuning
from ..lower.rules import RULES
from .collectives import all_reduced
from .products import GATHER_PRODUCT, PRODUCT_SCATTER
from .reduce import REDUCE, SCATTER
from .symmetric import BYTES, DTYPES, HOW

CHUNKS = (2, 4)
c = torch.ops._c10d_functional
_library = torch.library.Library("reflib", "FRAGMENT")


def _op(
    name: str, schema: str, eager: Callable[..., Any], fake: Callable[..., Any], backward: Callable[..., Any],
    configs: list[Any] | None, generator: Callable[..., Any] | None = None, least: float = 1.0,
) -> Any:  # fmt: skip
    """``backward``: (context, gradient); the context has the op's ``args``. ``least``: how many times as fast as the
    eager op another candidate must be."""
    _library.define(f"{name}{schema}")
    _library.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"reflib::{name}", fake, lib=_library)
    torch.library.register_autograd(f"reflib::{name}", backward, setup_context=_keep, lib=_library)
    op = getattr(torch.ops.reflib, name).default
    register_custom_op_autotuning(op, configs, generator, min_speedup_threshold=least)
    return op


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group_name = inputs[-1]
    ctx.save_for_backward(*inputs[:-1])


def size_of(group_name: str) -> int:
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_group_size_by_name(group_name)  # (which Dynamo knows)


# -- the sum over ranks of x --------------------------------------------------------------------------------
def by_the_group(x: Any, group_name: str) -> Any:
    return c.wait_tensor(c.all_reduce(x.contiguous(), "sum", group_name))


def in_storage(x: Any, group_name: str, how: str) -> Any:
    return REDUCE(x, how, group_name)


def _ways(given: dict[str, Any]) -> list[Any]:
    x = given["x"]
    fits = x.nbytes <= BYTES.get(x.device.type, 0) // 2
    return [CustomOpConfig(in_storage, how=how) for how in HOW] if fits and x.dtype in DTYPES else []


def _all_reduce_backward(ctx: Any, grad: Any) -> Any:
    return all_reduce(grad, ctx.group_name), None


all_reduce = _op(
    "all_reduce",
    "(Tensor x, str group_name) -> Tensor",
    by_the_group,
    lambda x, group_name: torch.empty_like(x, memory_format=torch.contiguous_format),
    _all_reduce_backward,
    None,
    _ways,
    1.15,  # what is measured alone keeps its argument, so the group's has a copy in, which in a program mostly goes
)
RULES[str(all_reduce)] = all_reduced
TAKEN_APART.add(str(all_reduce))


# -- all ranks' rows of x, multiplied with w ----------------------------------------------------------------
def gathered(x: Any, group_name: str) -> Any:
    return c.wait_tensor(c.all_gather_into_tensor(x.contiguous(), size_of(group_name), group_name))


def gather_then_multiply(x: Any, w: Any, group_name: str) -> Any:
    return gathered(x, group_name) @ w


def gather_in_chunks(x: Any, w: Any, group_name: str, chunks: int) -> Any:
    size = size_of(group_name)
    started = [c.all_gather_into_tensor(part.contiguous(), size, group_name) for part in x.tensor_split(chunks)]
    products = [(c.wait_tensor(rows) @ w).unflatten(0, (size, -1)) for rows in started]
    return torch.cat(products, 1).flatten(0, 1)


def gather_through_storage(x: Any, w: Any, group_name: str) -> Any:
    return GATHER_PRODUCT(x, w, group_name)


def _gather_backward(ctx: Any, grad: Any) -> Any:
    x, w = ctx.saved_tensors
    of_x, of_w, _ = ctx.needs_input_grad
    dx = matmul_reduce_scatter(grad, w.t(), ctx.group_name) if of_x else None
    return dx, _of_weights(gathered(x, ctx.group_name), grad) if of_w else None, None


def _of_weights(x: Any, grad: Any) -> Any:
    return x.flatten(0, -2).t() @ grad.flatten(0, -2)


all_gather_matmul = _op(
    "all_gather_matmul",
    "(Tensor x, Tensor w, str group_name) -> Tensor",
    gather_then_multiply,
    lambda x, w, group_name: x.new_empty(size_of(group_name) * x.shape[0], *x.shape[1:-1], w.shape[1]),
    _gather_backward,
    [*(CustomOpConfig(gather_in_chunks, chunks=n) for n in CHUNKS), gather_through_storage],
)


# -- the sum over ranks of x @ w, of which each rank keeps its share of rows ----------------------------------
def multiply_then_scatter(x: Any, w: Any, group_name: str) -> Any:
    return c.wait_tensor(c.reduce_scatter_tensor(x @ w, "sum", size_of(group_name), group_name))


def scatter_in_chunks(x: Any, w: Any, group_name: str, chunks: int) -> Any:
    size = size_of(group_name)
    rows = x.unflatten(0, (size, -1)).tensor_split(chunks, 1)
    started = [c.reduce_scatter_tensor(part.flatten(0, 1) @ w, "sum", size, group_name) for part in rows]
    return torch.cat([c.wait_tensor(s) for s in started])


def scatter_in_storage(x: Any, w: Any, group_name: str) -> Any:
    return SCATTER(x @ w, group_name)


def scatter_through_storage(x: Any, w: Any, group_name: str) -> Any:
    return PRODUCT_SCATTER(x, w, group_name)


def _scatter_backward(ctx: Any, grad: Any) -> Any:
    x, w = ctx.saved_tensors
    of_x, of_w, _ = ctx.needs_input_grad
    dx = all_gather_matmul(grad, w.t(), ctx.group_name) if of_x else None
    return dx, _of_weights(x, gathered(grad, ctx.group_name)) if of_w else None, None


matmul_reduce_scatter = _op(
    "matmul_reduce_scatter",
    "(Tensor x, Tensor w, str group_name) -> Tensor",
    multiply_then_scatter,
    lambda x, w, group_name: x.new_empty(x.shape[0] // size_of(group_name), *x.shape[1:-1], w.shape[1]),
    _scatter_backward,
    [*(CustomOpConfig(scatter_in_chunks, chunks=n) for n in CHUNKS), scatter_in_storage, scatter_through_storage],
)

for op, backward in ((GATHER_PRODUCT, _gather_backward), (PRODUCT_SCATTER, _scatter_backward)):
    torch.library.register_autograd(op, backward, setup_context=_keep, lib=_library)
