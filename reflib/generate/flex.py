"""Fused attention in Triton: forward, with the softmax of each row kept up to date block by block (Milakov and
Gimelshein, arXiv:1805.02867; Dao, "FlashAttention-2", arXiv:2307.08691).

A program has a block of queries, and walks along the keys that the mask leaves it: first blocks that the mask cuts,
with the mask function, then those that it leaves whole, without. It keeps per row ``top``, the largest score so far,
``total``, the sum of powers of two of scores less that, and the sum of values weighed by these: what is kept is
scaled whenever ``top`` rises. A row that is masked altogether has total 0: its result is 0, and its log-sum-exp
-inf, as eagerly.

**How it fits in.** The slot for the user's functions is within the product of two products (``ir.flex``), so the node
is an Extern, which ``fuse`` leaves alone; it is scheduled (``schedule.flex``: tiling, what it assumes) and printed by
the class of its target, and from there on a kernel like any other. With autotuning the tilings are a Choice.

For few queries (``decode``) the same text is printed with other programs (``flex_decode``).

NB: TorchInductor's template also reads through TMA descriptors, and its kernel for few queries is another template.
"""

from collections.abc import Collection

from ..ir.program import Buffer, KernelNode
from ..target import Target
from .flex_backward import print_dkv, print_dq
from .flex_decode import DecodePrinter
from .flex_printer import FlexPrinter
from .kernel import Kernel


def print_flex(node: KernelNode, buffers: dict[str, Buffer], target: Target, aligned: Collection[str]) -> Kernel:
    """The kernel ``node.name``, whose tiling is chosen."""
    (x,) = node.parts
    if backward := {"dq": print_dq, "dkv": print_dkv}.get(x.target.kind):  # type: ignore[union-attr]
        return backward(node, buffers, target, aligned)
    printer = DecodePrinter if x.target.kind == "decode" else FlexPrinter  # type: ignore[union-attr]
    return print_forward(printer(node, buffers, target, aligned))


def print_forward(p: FlexPrinter) -> Kernel:
    programs = p.queries()
    p.put('top = tl.full([MBLOCK], float("-inf"), tl.float32)')
    p.put("total = tl.zeros([MBLOCK], tl.float32)")
    p.put("acc = tl.zeros([MBLOCK, EBLOCK], tl.float32)")
    p.over("n", ("modified", "mask"), lambda masked: _step(p, masked))
    if "out" in p.given:
        p.put("some = tl.where(total == 0.0, 1.0, total)")
        p.put("acc = acc / some[:, None]")
    for role, value in (
        ("out", "acc"), ("acc", "acc"), ("total", "total"), ("lse", "(top + tl.log2(total))"), ("top", "top"),
    ):  # fmt: skip
        if role in p.given:
            p.write_rows(role, value)
    return p.finish(programs)


def _step(p: FlexPrinter, masked: bool) -> None:
    """One block of keys."""
    p.put(f"k = {p.read('k_at', 'k', [(3, 'd', '[:, None]'), (2, 'n', '[None, :]')])}")
    p.put(f"score = {p.dot('q', 'k')}")
    p.modified(masked)
    factor = p.constant("FACTOR", p.factor)
    p.put(f"new = tl.maximum(top, tl.max(weight, 1) * {factor})")
    p.put('base = tl.where(new == float("-inf"), 0.0, new)')
    p.put(f"power = tl.exp2(weight * {factor} - base[:, None])")
    p.put("shrink = tl.exp2(top - base)")
    p.put("total = total * shrink + tl.sum(power, 1)")
    p.put(f"v = {p.read('v_at', 'v', [(2, 'n', '[:, None]'), (3, 'e', '[None, :]')])}")
    p.put(f"acc = {p.dot(p.narrow('power'), 'v', 'acc * shrink[:, None]')}")
    p.put("top = new")
