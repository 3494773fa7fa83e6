"""How a kernel of fused attention is launched: its tiling, chosen here unless it was measured, and what it assumes.

The first variant assumes what held when the program was captured: addresses of inputs, and strides, that are
multiples of 16 bytes, indices of 32 bits, and lengths that are whole blocks, so that no access needs a mask. The second
one does not assume the last, where lengths may change. The third assumes nothing.
"""

from dataclasses import replace
from typing import Any

from ..errors import GenerateError
from ..ir.assume import limit_facts
from ..ir.expr import Expr, Sym, expr
from ..ir.flex import INPUTS, FlexKernel
from ..ir.program import Assume, Buffer, Config, Extern, KernelNode, Variant, View, iter_views, symbols_in
from ..lower.flex_tilings import tilings
from ..target import Target


def variants(name: str, x: Extern, buffers: dict[str, Buffer], target: Target) -> tuple[Variant, ...]:
    """The kernel ``name``, which launches ``x``. Raises GenerateError for a target that is no GPU."""
    kernel, given = x.target, dict(x.kwargs)
    assert isinstance(kernel, FlexKernel)
    if not target.is_gpu:
        raise GenerateError(f"{kernel.__name__} is a Triton kernel: there is no code of it for {target.arch}")
    if kernel.tiling is None:
        heads = given["q"].shape[3].constant or 0, given["v"].shape[3].constant or 0
        kernel = replace(kernel, tiling=tilings(kernel, heads, target)[0])
        x = replace(x, target=kernel)
    assert kernel.tiling is not None
    q, k = given["q"].shape, given["k"].shape
    products = [q[0] * q[1] * q[2], k[0] * k[1] * k[2]]  # indices of all queries, all keys
    products += [buffers[given[n].buffer].extent for n in ("acc",) if n in given]
    limits = limit_facts([*(buffers[b].extent for b in x.reads()), *products])
    if any(s.lo < -(2**31) for s in symbols_in((x.args, x.kwargs))):
        limits = None
    multiples = _multiples(kernel, given)
    facts = tuple(Assume("aligned", b, 16) for b in _wide_reads(kernel, given) if buffers[b].kind != "temp")
    facts += (*(limits or ()), *(Assume("divisible", expr(s), 16) for s in multiples))
    whole = [(d, e, b) for d, e, b in _lengths(given, kernel) if e.hint() % b == 0]
    always = tuple(d for d, e, _ in whole if e.constant is not None)
    lengths = tuple(Assume("divisible", e, b) for _, e, b in whole if e.constant is None)
    known = ("divisible", tuple(s.name for s in multiples))
    general = Config("flex", 1, 1, kernel.tiling.num_warps, kernel.tiling.num_stages, "int64")
    fast = replace(general, index="int64" if limits is None else "int32")
    ways = [("fast", replace(fast, extras=(known, ("whole", tuple(d for d, _, _ in whole)))), (*facts, *lengths))]
    if lengths:
        ways.append(("ragged", replace(fast, extras=(known, ("whole", always))), facts))
    if ways[-1][2]:
        ways.append(("fallback", replace(general, extras=(("whole", always),)), ()))
    names = (name if i == 0 else f"{name}_{way}" for i, (way, _, _) in enumerate(ways))
    return tuple(Variant(way, (KernelNode(n, (x,), c),), f) for n, (way, c, f) in zip(names, ways))


def _wide_reads(kernel: FlexKernel, given: dict[str, Any]) -> list[str]:
    """What is worth reading 16 bytes at a time: operands, and what is captured with an element per score. (Not a table
    that is read at computed places, in which neighbours are a matter of luck.)"""
    views = [given[n] for n in ("q", "k", "v", "do") if n in given]
    m, n = (a.var for a in kernel.slot.axes[2:])
    for s in () if kernel.one_order else kernel.slot.loads():  # a row's mask is at any address: it chooses no kernel
        if s.buffer not in INPUTS and s.index.coefficient(n) == 1 and s.index.has(m):
            views.append(given["captured"][int(s.buffer)])
    return list(dict.fromkeys(v.buffer for v in views))


def _multiples(kernel: FlexKernel, given: dict[str, Any]) -> list[Sym]:
    """Symbols in strides of these that were multiples of 16, as such reads need."""
    read = _wide_reads(kernel, given)
    found: set[Sym] = set()
    for v in iter_views(tuple(given.values())):
        for m, c in (term for e in v.strides if v.buffer in read for term in e.terms):
            found |= {a for a in m if isinstance(a, Sym) and c % 16 and a.hint and a.hint % 16 == 0}
    return sorted(found)


def _lengths(given: dict[str, View], kernel: FlexKernel) -> tuple[tuple[str, Expr, int], ...]:
    """(m or n, how many queries or keys there are, of what that must be a multiple): of a block of scores, or, where
    blocks of the mask are walked along, of such a block."""
    assert kernel.tiling is not None
    block = {"m": kernel.tiling.m, "n": kernel.tiling.n}
    walked = "m" if kernel.kind == "dkv" else "n"
    block[walked] = max(block[walked], kernel.blocks["mn".index(walked)])
    return ("m", given["q"].shape[2] * kernel.packed, block["m"]), ("n", given["k"].shape[2], block["n"])
