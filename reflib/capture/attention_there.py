"""Attention on a GPU that this machine may not have: which kernel ``scaled_dot_product_attention`` takes PyTorch would
ask it, and of ``flex_attention`` on a CPU it refuses the gradient."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import flex_attention

from ..target import Target

aten = torch.ops.aten
CUDNN = (90, 100, 103)  # capabilities that prefer it (pytorch#162073)


@contextmanager
def attention_of_gpu(target: Target | None = None) -> Iterator[None]:
    """``scaled_dot_product_attention`` of fakes on a GPU: a call of the kernel that ``target`` is likely to take.
    Without a target it stays one in the graph, and its result is laid out as fused kernels do it."""
    op, key = aten.scaled_dot_product_attention.default, torch._C.DispatchKey.CompositeImplicitAutograd

    def attention(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        if target is None and q.device.type != "cuda":
            return op._op_dk(key, q, k, v, *args, **kwargs)
        if target is None:
            return _attended(q, k, v, kwargs.get("enable_gqa", False))
        found = _likely_kernel(target, q, k, v, *args, **kwargs)
        return op._op_dk(key, q, k, v, *args, **kwargs) if found is None else found

    before, check = dict(op.py_kernels), flex_attention._validate_device
    flex_attention._validate_device = lambda *tensors: None
    op.py_kernels[key] = attention
    op._dispatch_cache.clear()
    try:
        # results may have been cached by another rule; and ours must not be cached
        with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
            yield
    finally:
        flex_attention._validate_device = check
        op.py_kernels.clear()
        op.py_kernels.update(before)
        op._dispatch_cache.clear()


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> torch.Tensor:
    """What the fused kernels return: batch, heads, length, width; but the heads lie inside the length."""
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(f"attention: query, key and value are {q.dtype}, {k.dtype} and {v.dtype}, not of one dtype")
    if q.ndim == 4:
        heads = q.shape[1] if grouped else torch.broadcast_shapes(q.shape[1:2], k.shape[1:2], v.shape[1:2])[0]
        (batch,) = torch.broadcast_shapes(q.shape[:1], k.shape[:1], v.shape[:1])
        return q.new_empty((batch, q.shape[2], heads, v.shape[3])).transpose(1, 2)
    batches = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    return q.new_empty((*batches, q.shape[-2], v.shape[-1]))


def _likely_kernel(
    target: Target, q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, *,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """What current GPUs take with the cuDNN that torch 2.11 brings (after 9.15): for halves without a mask cuDNN's
    attention on Hopper and Blackwell's servers, else flash attention; the memory-efficient kernel for the rest; None:
    the op taken apart."""
    widths, few = {q.shape[-1], v.shape[-1]}, enable_gqa and q.shape[1] != k.shape[1]
    if q.ndim != 4 or len(widths) > 1 or not all(w % 8 == 0 and w <= 256 for w in widths):
        return None
    halves = mask is None and q.dtype in (torch.float16, torch.bfloat16)
    if halves and target.capability in CUDNN and q.shape[-1] <= 128:
        kept = q.requires_grad or k.requires_grad or v.requires_grad
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, kept, dropout, is_causal, False, scale=scale)[0]
    if halves:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout, is_causal, scale=scale)[0]
    if few or (mask is not None and mask.dtype != q.dtype):
        return None
    if mask is not None:
        if more := -mask.shape[-1] % 16:  # the kernel reads aligned rows
            mask = aten.constant_pad_nd(mask, [0, more])[..., : mask.shape[-1]]
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, False, dropout, is_causal, scale=scale)[0]
