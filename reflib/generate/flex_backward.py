"""Fused attention in Triton: backward. The scores are computed again, and ``power``, the softmax's results, from
them and the rows' log-sum-exps (FlashAttention-2, arXiv:2307.08691): one kernel walks along the keys of a block of
queries and sums up their gradient; another one walks along the queries of a block of keys, of all heads that share
these. Each sums in registers, in a fixed order, so results repeat bit for bit. Gradients of captured tensors do not:
the first kernel adds to them in memory, by atomic additions.

NB: TorchInductor has both in one launch, with one tiling's warps and stages for the two.
"""

from collections.abc import Collection, Sequence

from ..ir.program import Buffer, KernelNode
from ..target import Target
from .flex_printer import FlexPrinter
from .kernel import Kernel

QUERIES, KEYS = [(2, "m", "[:, None]"), (3, "d", "[None, :]")], [(2, "n", "[:, None]"), (3, "d", "[None, :]")]
OUT, VALUES = [(2, "m", "[:, None]"), (3, "e", "[None, :]")], [(2, "n", "[:, None]"), (3, "e", "[None, :]")]
FUNCTIONS = ("modified", "mask", "of_score")


def print_dq(node: KernelNode, buffers: dict[str, Buffer], target: Target, aligned: Collection[str]) -> Kernel:
    p = FlexPrinter(node, buffers, target, aligned)
    programs = p.queries()
    p.put(f"do = {p.read(p.place('do', 'b', 'h'), 'do', OUT)}")
    _rows(p, "[:, None]")
    p.put("dq = tl.zeros([MBLOCK, DBLOCK], tl.float32)")

    def step(masked: bool) -> None:
        p.put(f"k = {p.read('k_at', 'k', [(3, 'd', '[:, None]'), (2, 'n', '[None, :]')])}")
        p.put(f"v = {p.read('v_at', 'v', [(3, 'e', '[:, None]'), (2, 'n', '[None, :]')])}")
        p.put(f"score = {p.dot('q', 'k')}")
        _powers(p, masked)
        p.put(f"of_power = {p.dot('do', 'v')}")
        _of_scores(p, masked, p.slot.sums)
        p.put(f"dq = {p.dot(p.narrow('grad'), 'tl.trans(k)', 'dq')}")

    p.over("n", (*FUNCTIONS, *p.slot.sums), step)
    p.write(p.place("dq", "b", "h"), "dq", QUERIES, f"(dq * {p.kernel.scale!r})")
    return p.finish(programs)


def print_dkv(node: KernelNode, buffers: dict[str, Buffer], target: Target, aligned: Collection[str]) -> Kernel:
    p = FlexPrinter(node, buffers, target, aligned, rows="n")
    groups = p.kernel.groups
    programs = p.programs("n", p.given["k"].shape[1])
    p.span("n", "tile * NBLOCK")
    p.put("d = tl.arange(0, DBLOCK)")
    p.put("e = tl.arange(0, EBLOCK)")
    p.put(f"k = {p.read(p.place('k', 'b', 'kv_head'), 'k', KEYS)}")
    p.put(f"v = {p.read(p.place('v', 'b', 'kv_head'), 'v', VALUES)}")
    p.put("dk = tl.zeros([NBLOCK, DBLOCK], tl.float32)")
    p.put("dv = tl.zeros([NBLOCK, EBLOCK], tl.float32)")
    if groups > 1:
        p.put(f"for group in range({groups}):")
        p.indent(1)
        p.put(f"h = kv_head * {groups} + group")
    else:
        p.put("h = kv_head")
    p.put(f"q_at = {p.place('q', 'b', 'h')}")
    p.put(f"do_at = {p.place('do', 'b', 'h')}")

    def step(masked: bool) -> None:
        p.put(f"q = {p.read('q_at', 'q', QUERIES)}")
        p.put(f"do = {p.read('do_at', 'do', OUT)}")
        _rows(p, "[None, :]")
        p.put(f"score = {p.dot('k', 'tl.trans(q)')}")
        _powers(p, masked)
        p.put(f"dv = {p.dot(p.narrow('power'), 'do', 'dv')}")
        p.put(f"of_power = {p.dot('v', 'tl.trans(do)')}")
        _of_scores(p, masked)
        p.put(f"dk = {p.dot(p.narrow('grad'), 'q', 'dk')}")

    p.over("m", FUNCTIONS, step)
    if groups > 1:
        p.indent(-1)
    p.write(p.place("dk", "b", "kv_head"), "dk", KEYS, f"(dk * {p.kernel.scale!r})")
    p.write(p.place("dv", "b", "kv_head"), "dv", VALUES, "dv")
    return p.finish(programs)


def _rows(p: FlexPrinter, index: str) -> None:
    """What is known of each query: a row without any score has an infinite log-sum-exp, so that its powers are 0."""
    p.put(f"lse = {p.read(p.place('lse', 'b', 'h'), 'lse', [(2, 'm', '')])}")
    p.put('lse = tl.where(lse == float("-inf"), float("inf"), lse)' + index)
    p.put(f"delta = {p.read(p.place('delta', 'b', 'h'), 'delta', [(2, 'm', '')])}{index}")


def _powers(p: FlexPrinter, masked: bool) -> None:
    p.modified(masked)
    p.put(f"power = tl.exp2(weight * {p.constant('FACTOR', p.factor)} - lse)")


def _of_scores(p: FlexPrinter, masked: bool, sums: Sequence[str] = ()) -> None:
    """``grad``, of the scores: through the softmax, then through the user's function, with what that captures."""
    p.put("grad = power * (of_power - delta)")
    if sums:
        rows = ["ymask"] if p.slot.masks["y"] else []
        p.slot.add(" & ".join([*filter(None, [p.counted(masked)]), *rows]))
    if not p.kernel.stores("of_score"):
        return
    v = p.slot.value("of_score")
    text = v.text
    if where := p.counted(masked):  # a derivative may be infinite elsewhere
        text = f"tl.where({where}, {text}, 0.0)"
    p.put(f"grad = tl.broadcast_to({text}, [YBLOCK, XBLOCK])" if not v.dims else f"grad = {text}")
