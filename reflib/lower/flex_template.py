"""``flex_attention`` as fused kernels (``ir.flex``), where these can be: forward one, backward two and a sum.

Scores are computed block by block and never stored; blocks that the mask empties are skipped, and the mask function is
left out of those that it leaves whole ("Flex Attention", arXiv:2412.05496). What the kernels do not support is Refused,
with the reason; ``flex_attention`` then lowers the dense formula.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import expr
from reflib.ir.flex import FlexKernel
from reflib.ir.loops import LoopNest
from reflib.ir.program import Choice, Extern, Node, Variant, View
from reflib.target import Target, device_target, parse_target

from .context import LoweringContext
from .flex_decode import decode, few_queries
from .flex_makers import inputs_from
from .flex_options import KernelOptions
from .flex_slot import Slot, symbols_of, without_sums
from .flex_tilings import LARGEST_HEAD, LEAST_BLOCK, tilings
from .matmul import float32_precision
from .subgraph import Refused, put_instead

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
WHOLE = 1 << 30  # torch's size of a block where there is no mask


class Attention:
    """One call of the op. Raises Refused where fused kernels do not support it."""

    def __init__(
        self, cx: LoweringContext, q: View, k: View, v: View, block_mask: Sequence[Any], scale: Any,
        captured: tuple[Sequence[Any], Sequence[Any]], asked: KernelOptions,
    ):  # fmt: skip
        self.asked, self.target = asked, target_of(cx)
        self.cx, self.scale, self.mask = cx, scale, block_mask
        self.mask_node: Any = next(a for a in cx.node.args if isinstance(a, tuple) and len(a) == len(block_mask))
        self.of_score, self.of_mask = captured
        self.q, self.k, self.v = (cx.readable(x) for x in (q, k, v))
        self.batch, self.heads, self.rows, self.depth = self.q.shape
        self.columns, self.width = self.k.shape[2], self.v.shape[3]
        self._check()
        self.slot = Slot(cx, (self.batch, self.heads, self.rows, self.columns))

    def _check(self) -> None:
        low, views = self.cx.low, (self.q, self.k, self.v)
        if not self.cx.on_gpu:
            raise Refused("unsupported", "there is no fused kernel for a CPU")
        target = self.target
        if target is not None and target.kind == "cuda" and target.capability < 80:
            raise Refused("unsupported", f"{target.arch} has no tensor cores that Triton uses")
        if self.q.dtype not in FLOATS or any(x.dtype != self.q.dtype for x in views):
            raise Refused("unsupported", f"operands of {', '.join(dict.fromkeys(str(x.dtype)[6:] for x in views))}")
        if any(low.buffers[x.buffer].device != self.cx.device for x in views):
            raise Refused("unsupported", "operands on several devices")
        if any(n == 0 for x in views for n in x.shape):
            raise Refused("unsupported", "an empty operand")
        for n in (self.depth, self.width):
            if n.constant is None or n.constant > LARGEST_HEAD:
                raise Refused("unsupported", f"heads of {n} elements; at most {LARGEST_HEAD}, known when compiled")
        if not isinstance(self.scale, (int, float)) or not math.isfinite(self.scale):
            raise Refused("unsupported", "a scale known only at run time")
        groups = self.heads.constant, self.k.shape[1].constant
        if self.heads != self.k.shape[1] and (None in groups or groups[0] % groups[1]):  # type: ignore[operator]
            raise Refused("unsupported", "numbers of heads known only at run time")
        self.groups = 1 if self.heads == self.k.shape[1] else groups[0] // groups[1]  # type: ignore[operator]
        if self.k.shape[0] not in (self.batch, expr(1)):
            raise Refused("unsupported", "batches of other sizes for queries and keys")

    # -- the mask's blocks ------------------------------------------------------------------------------
    def blocks(self, by_key: bool) -> tuple[tuple[int, int], dict[str, View]]:
        """(queries and keys per block, the lists of blocks): by rows of queries, or by columns of keys."""
        lists, sizes = self.mask[2:-3], tuple(map(_known, self.mask_node[-3:-1]))
        if min(sizes) >= WHOLE:
            return (0, 0), {}
        if any(b % LEAST_BLOCK for b in sizes):
            raise Refused("unsupported", f"a block mask of {sizes[0]} x {sizes[1]}; multiples of {LEAST_BLOCK} only")
        four = lists[4:8] if by_key else lists[:4]
        found = {n: self.cx.readable(x) for n, x in zip(("num", "idx", "full_num", "full_idx"), four) if x is not None}
        if "num" not in found or any(x.dtype not in (torch.int32, torch.int64) for x in found.values()):
            raise Refused("unsupported", "a block mask without lists of blocks")
        for x in found.values():
            if any(x.shape[d] not in (n, expr(1)) for d, n in enumerate((self.batch, self.heads))):
                raise Refused("unsupported", "a block mask for other numbers of batches or heads")
        return (sizes[0], sizes[1]), found

    # -- kernels ----------------------------------------------------------------------------------------
    def kernels(
        self, kinds: dict[str, dict[str, View]], given: dict[str, View], exact: bool, packed: int = 1, splits: int = 1
    ) -> None:
        """Append the kernels ``kinds`` with what they write, each given q, k, v and ``given``."""
        loops = self.slot.finish()
        views = self.slot.views()
        for v in views:
            if self.cx.low.buffers[v.buffer].device != self.cx.device:
                raise Refused("unsupported", "a captured tensor on another device")
        self.slot.forget()
        precision = float32_precision() if self.q.dtype == torch.float32 else "ieee"
        for kind, written in kinds.items():
            sizes, lists = self.blocks(by_key=kind == "dkv")
            slot, sums = (loops, self.slot.sums) if kind == "dq" else (without_sums(loops), [])
            kernel = FlexKernel(
                kind, slot, self.q.dtype, float(self.scale), self.groups, sizes, precision,
                tuple(v.strides for v in views), exact, self.cx.low.options.batch_invariant,
                packed, splits, self.asked.tiling(kind, sizes),
            )  # fmt: skip
            arguments = {"q": self.q, "k": self.k, "v": self.v, **given, **written, **lists}
            more = {"captured": views, "sizes": tuple(map(expr, symbols_of(loops)))}
            self._launch(kernel, arguments | more, (*(v.buffer for v in written.values()), *sums), not sums)

    def _launch(self, kernel: FlexKernel, arguments: dict[str, Any], written: tuple[str, ...], again: bool) -> None:
        """The launch; a choice of several where something is measured, if it may be launched ``again`` (no sums)."""
        low, name = self.cx.low, self.cx.low.next_node()

        def extern(k: FlexKernel) -> Node:
            args = tuple(arguments.items())
            return Extern(name, k, (), args, (), written, origins=(replace(self.cx.origin, op=kernel.__name__),))

        target = self.target
        fixed = kernel.one_order or not again or kernel.kind == "decode"
        if low.options.autotune == "off" or not low.choices or target is None or fixed:
            low.nodes.append(extern(kernel))
            return
        sizes = self.depth.constant or 0, self.width.constant or 0
        made = [replace(kernel, tiling=t) for t in tilings(kernel, sizes, target)]
        variants = tuple(Variant(str(k.tiling), (extern(k),)) for k in made)
        lists = inputs_from({k: v for k, v in arguments.items() if isinstance(v, View)})
        op, origins = kernel.__name__, (self.cx.origin,)
        low.nodes.append(Choice(name, op, written, variants, inputs_from=lists, custom=True, origins=origins))


def forward(attention: Attention, score_mod: Any) -> Any:
    """(output, log-sum-exp and maximum of the scores, in base 2), those of the latter two that are used."""
    a = attention
    _functions(a, score_mod)
    wanted = used(a.cx)
    views = [a.cx.out(i) if i in wanted or i == 0 else None for i in range(len(a.cx.fakes))]
    written = {n: v for n, v in zip(("out", "lse", "top"), views) if v is not None}
    exact = a.q.dtype == torch.float32 or len(written) > 1
    how = few_queries(a)
    if how is None:
        a.kernels({"forward": written}, {}, exact)
    else:
        decode(a, how, written, exact)
    return tuple(views)


def backward(
    attention: Attention, out: View, lse: View, grad: View, grad_lse: View | None, score_mod: Any, joint: Any
) -> tuple[Any, ...]:
    """Gradients of query, key and value, and those of captured tensors, where they are used."""
    a, cx = attention, attention.cx
    if a.k.shape[0] != a.batch:
        raise Refused("unsupported", "gradients of keys that all batches share")
    _functions(a, score_mod)
    given = "score", *"bhmn", "grad"
    of_captured, rounded = _of_captured(a, joint, given)
    a.slot.add("of_score", lambda *x: joint(*x)[0].float(), given, a.of_score)  # (autograd may have rounded it)
    lse, do = cx.readable(lse), cx.readable(grad)

    def too_much(o: Any, g: Any, g_lse: Any = None) -> Any:
        d = (o.float() * g.float()).sum(-1)
        return d if g_lse is None else d - g_lse.float() / math.log(2)

    delta = cx.temp("delta", (a.batch, a.heads, a.rows), torch.float32)
    of_lse = replace(cx, fake=cx.node.args[4].meta["val"])  # type: ignore[union-attr]
    put_instead(of_lse, "delta", too_much, (out, do) if grad_lse is None else (out, do, grad_lse), [delta])
    views = [cx.out(i) for i in range(3)]
    kinds = {"dq": {"dq": views[0]}, "dkv": {"dk": views[1], "dv": views[2]}}
    a.kernels(kinds, {"do": do, "lse": lse, "delta": delta}, a.q.dtype == torch.float32)
    cx.low.nodes += rounded
    return *views, of_captured


def _of_captured(a: Attention, joint: Any, given: Sequence[str]) -> tuple[tuple[View | None, ...], list[LoopNest]]:
    """Gradients of captured tensors, which the slot adds to, and what rounds them at the end."""
    cx, views, rounded = a.cx, list[View | None](), list[LoopNest]()
    wanted = cx.fake[3] if 3 in used(cx) else [None] * len(cx.fake[3])
    for i, like in enumerate(wanted):
        if like is None:
            views.append(None)
            continue

        def terms(*x: Any, i: int = i) -> Any:
            found, table = joint(*x)[5 + i], x[len(given) + i]
            if found is None:
                return torch.zeros_like(table)
            if not table.dim():
                at = torch.zeros((), dtype=torch.int64, device=table.device)
                found = torch.ops.flex_lib.zeros_and_scatter([1], [at], found).reshape(())
            return found.to(table.dtype, copy=True)

        out = cx.out(3 + sum(x is not None for x in cx.fake[3][:i]))
        before, after = a.slot.add_sum(out, like, terms, given, a.of_score)
        views.append(out)
        cx.low.nodes += before
        rounded += after
    return tuple(views), rounded


def _functions(a: Attention, score_mod: Any) -> None:
    a.slot.add("modified", score_mod, ("score", *"bhmn"), a.of_score)
    a.slot.add("mask", a.mask[-1], tuple("bhmn"), a.of_mask)


def used(cx: LoweringContext) -> set[int]:
    """The results that the graph uses."""
    users = list(cx.node.users)
    if any(u.target is not operator.getitem for u in users):
        return set(range(len(cx.fake)))
    return {u.args[1] for u in users}  # type: ignore[misc]


def _known(size: Any) -> int:
    """A size that the code depends on: with ``dynamic=True`` it is a symbol, and the program is for this value alone
    (PyTorch compiles again for another)."""
    return int(size.meta["val"] if isinstance(size, torch.fx.Node) else size)


def target_of(cx: LoweringContext) -> Target | None:
    """What it is compiled for, if that is known: a named target, or the GPU that is there."""
    if cx.low.options.target:
        return parse_target(cx.low.options.target)
    there = cx.device.type == "cuda" and torch.cuda.is_available()
    return device_target("cuda", cx.device.index or 0) if there else None
